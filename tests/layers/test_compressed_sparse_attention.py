"""The core attention's parameters and status; its values are tested through the layer (test_dsv4_attention.py)."""

import re

import jax
import pytest
from flax import nnx
from layers.common import forward_jaxpr, make_input, make_layer, small_config

from dsv4_fusions.layers import CompressedSparseAttention, FusionStatus, switches


@pytest.mark.parametrize("phase, indexer", [("sparse", True), ("warm_up", True), ("dense", False)])
def test_which_ratio_has_a_compressor_and_an_indexer(phase, indexer):
    cfg = small_config(compress_ratios=(0, -1, 2, 127, 128), num_hidden_layers=5, indexer_phase=phase)
    made = [nnx.eval_shape(lambda i=i: CompressedSparseAttention(cfg, i, rngs=nnx.Rngs(0))) for i in range(5)]
    assert [core.compressor is not None for core in made] == [False, False, True, True, True]
    assert [core.indexer is not None for core in made] == [False, False, indexer, indexer, False]
    assert [core.compressor.overlap for core in made[2:]] == [True, True, False]


def test_latent_layers_and_layers_that_are_not_there():
    cfg = small_config(compress_ratios=(0, -2, 4))
    wanted = "layer_index: got 1, whose compress ratio is -2, wanted a ratio of -1, 0, or 2 to 128; MQALatentAttention"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        CompressedSparseAttention(cfg, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="layer_index: got 3, wanted 0 to 2"):
        CompressedSparseAttention(cfg, 3, rngs=nnx.Rngs(0))
    core = CompressedSparseAttention(cfg, 2, rngs=nnx.Rngs(0))
    q = jax.numpy.zeros((1, 8, 4, 12), "bfloat16")
    with pytest.raises(ValueError, match="latent: got None, wanted the low-rank queries"):
        core(q, q[:, :, 0], jax.numpy.zeros((1, 8, 24), "bfloat16"))


def test_status_without_a_layer_around():
    core = CompressedSparseAttention(small_config(), rngs=nnx.Rngs(0), fuse_kv_index_remap=True)
    told = core.explain_fusions()
    assert list(told) == ["fuse_kv_index_remap"]
    assert told["fuse_kv_index_remap"] == FusionStatus(True, "xla", "batch unknown: fused above 1, a reshape at 1")


@pytest.mark.parametrize("ratio, topk", [(-1, 130), (0, 5), (4, 5 + 8), (26, 5 + 5), (128, 5 + 1)])
def test_explanation_asks_about_the_table_that_the_forward_makes(ratio, topk, monkeypatch):
    choose, asked = switches.table_implementation, []
    monkeypatch.setattr(switches, "table_implementation", lambda ids: (asked.append(ids), choose(ids))[1])
    layer = make_layer(small_config(compress_ratios=(ratio,) * 3))
    x, _ = make_input(layer.cfg, 2, 130)
    layer.explain_fusions(x)
    forward_jaxpr(layer, x)
    assert asked == [2 * 130 * topk] * 2


def test_table_that_is_too_large_for_the_kernel(faked_target):
    faked_target("gpu", (9, 0))
    core = CompressedSparseAttention(small_config(compress_ratios=(-1,) * 3), rngs=nnx.Rngs(0))
    for tokens, implementation in ((2**15 - 1, "triton"), (2**15, "xla")):
        told = core.explain_fusions(jax.ShapeDtypeStruct((2, tokens, 24), "bfloat16"))
        assert told["fuse_kv_index_remap"].implementation == implementation
