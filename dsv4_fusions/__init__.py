"""DeepSeek-V4-style hybrid attention for JAX with fusions that can be switched on without moving a bit."""

from dsv4_fusions import testing
from dsv4_fusions.config import DSv4Config
from dsv4_fusions.documents import document_boundaries
from dsv4_fusions.hf import load_hf_attention
from dsv4_fusions.layers import (
    CompressedSparseAttention,
    Decoder,
    DSv4HybridSelfAttention,
    FusionStatus,
    MQALatentAttention,
    linen,
)
from dsv4_fusions.ops.inv_rope_postmix import inv_rope_vha_postmix, postmix_matrix, vha_postmix
from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index
from dsv4_fusions.ops.sparse_attention import sparse_attention
from dsv4_fusions.rope import RopeTables, rope_tables, rotate

__version__ = "0.1.0"

__all__ = [
    "CompressedSparseAttention",
    "DSv4Config",
    "DSv4HybridSelfAttention",
    "Decoder",
    "FusionStatus",
    "MQALatentAttention",
    "RopeTables",
    "document_boundaries",
    "inv_rope_vha_postmix",
    "linen",
    "load_hf_attention",
    "local_to_flat_kv_index",
    "postmix_matrix",
    "rope_tables",
    "rotate",
    "sparse_attention",
    "testing",
    "vha_postmix",
]
