"""Flax NNX modules of the hybrid attention model."""

from dsv4_fusions.layers.cache import AttentionCache
from dsv4_fusions.layers.compressed_sparse_attention import CompressedSparseAttention
from dsv4_fusions.layers.compressor import Compressor
from dsv4_fusions.layers.decoder import Decoder, DecoderBlock, SwiGLU, attention_layer
from dsv4_fusions.layers.dsv4_attention import DSv4HybridSelfAttention
from dsv4_fusions.layers.indexer import Indexer
from dsv4_fusions.layers.mqa_latent_attention import MQALatentAttention
from dsv4_fusions.layers.norms import RMSNorm, rms_normalize
from dsv4_fusions.layers.switches import FusionStatus, Switches

__all__ = [
    "AttentionCache",
    "CompressedSparseAttention",
    "Compressor",
    "Decoder",
    "DecoderBlock",
    "DSv4HybridSelfAttention",
    "FusionStatus",
    "Indexer",
    "MQALatentAttention",
    "RMSNorm",
    "SwiGLU",
    "Switches",
    "attention_layer",
    "rms_normalize",
]
