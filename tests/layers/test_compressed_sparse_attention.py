"""The core attention's parameters and status; its values are tested through the layer (test_dsv4_attention.py)."""

import jax
import pytest
from flax import nnx
from layers.common import forward_jaxpr, make_input, make_layer, small_config

from dsv4_fusions.layers import CompressedSparseAttention, FusionStatus, compressed_sparse_attention


def test_only_ratio_128_has_a_compressor():
    cfg = small_config(compress_ratios=(0, -1, 128))
    make = lambda i: CompressedSparseAttention(cfg, i, rngs=nnx.Rngs(0))  # noqa: E731
    have = [nnx.eval_shape(lambda i=i: make(i)).compressor is not None for i in range(3)]
    assert have == [False, False, True]


def test_status_without_a_layer_around():
    core = CompressedSparseAttention(small_config(), rngs=nnx.Rngs(0), fuse_kv_index_remap=True)
    told = core.explain_fusions()
    assert list(told) == ["fuse_kv_index_remap"]
    assert told["fuse_kv_index_remap"] == FusionStatus(True, "xla", "batch unknown: fused above 1, a reshape at 1")


@pytest.mark.parametrize("ratio, topk", [(-1, 130), (0, 5), (128, 5 + 1)])
def test_explanation_asks_about_the_table_that_the_forward_makes(ratio, topk, monkeypatch):
    choose, asked = compressed_sparse_attention.remap_implementation, []
    monkeypatch.setattr(
        compressed_sparse_attention,
        "remap_implementation",
        lambda elements: (asked.append(elements), choose(elements=elements))[1],
    )
    layer = make_layer(small_config(compress_ratios=(ratio,) * 3))
    x, _ = make_input(layer.cfg, 2, 130)
    layer.explain_fusions(x)
    forward_jaxpr(layer, x)
    assert asked == [130 * topk] * 2


def test_table_that_is_too_large_for_the_kernel(faked_target):
    faked_target("gpu", (9, 0))
    core = CompressedSparseAttention(small_config(compress_ratios=(-1,) * 3), rngs=nnx.Rngs(0))
    for tokens, implementation in ((2**16, "triton"), (2**16 + 1, "xla")):
        told = core.explain_fusions(jax.ShapeDtypeStruct((2, tokens, 24), "bfloat16"))
        assert told["fuse_kv_index_remap"].implementation == implementation
