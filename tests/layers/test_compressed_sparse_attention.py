"""The core attention's parameters and status; its values are tested through the layer (test_dsv4_attention.py)."""

from flax import nnx
from layers.common import small_config

from dsv4_fusions.layers import CompressedSparseAttention, FusionStatus


def test_only_ratio_128_has_a_compressor():
    cfg = small_config(compress_ratios=(0, -1, 128))
    have = [CompressedSparseAttention(cfg, i, rngs=nnx.Rngs(0)).compressor is not None for i in range(3)]
    assert have == [False, False, True]


def test_status_without_a_layer_around():
    core = CompressedSparseAttention(small_config(), rngs=nnx.Rngs(0), fuse_kv_index_remap=True)
    told = core.explain_fusions()
    assert list(told) == ["fuse_kv_index_remap"]
    assert told["fuse_kv_index_remap"] == FusionStatus(True, "xla", "batch unknown: fused above 1, a reshape at 1")
