"""Recomputed segments of a layer: what is computed again, and that no bit depends on it, nor on the fusions with it."""

import jax
import numpy as np
import program
import pytest
from layers import common
from layers.common import INDEXED, SEGMENTS, make_input, quick_run, random_layer, small_config

from dsv4_fusions.config import REMAT_SEGMENTS
from dsv4_fusions.testing import assert_trees_bitwise_equal

PARTS = ("qkv", "post_core", "vha_postmix", "gated_attn")
CASES = [(0, ("full_attn",)), (0, ("vha_postmix",)), (0, ("qkv", "post_core"))]
CASES += [(4, ("full_attn",)), (4, PARTS), (-2, PARTS)]


def make_remat(ratio, remat, **changes):
    changes = INDEXED | dict(dtype="bfloat16", gated_attention=True) | changes
    return random_layer(small_config(**changes, compress_ratios=(ratio,) * 3, remat=remat))


def results(layer, fused):
    layer.set_attributes(fuse_inv_rope=fused, fuse_kv_index_remap=fused)
    return quick_run(layer, *make_input(layer.cfg, 3, 24), SEGMENTS)


@pytest.mark.parametrize("ratio, remat", CASES, ids=str)
def test_recomputed_is_kept(ratio, remat):
    """Kept and unfused against recomputed and fused, as bits.

    But for the gradient of x where "qkv" is recomputed: the terms of queries and rows are added to each other first,
    and then to what the gate and the compressor give, another order of the same sum.
    """
    kept, recomputed = results(make_remat(ratio, ()), False), results(make_remat(ratio, remat), True)
    if "qkv" in remat:
        dx, other = (np.asarray(result["dx"], np.float32) for result in (kept, recomputed))
        np.testing.assert_allclose(dx, other, rtol=0, atol=2**-7 * np.abs(dx).max())
        kept, recomputed = kept | {"dx": None}, recomputed | {"dx": None}
    assert_trees_bitwise_equal(kept, recomputed, names=("kept", "recomputed and fused"))


@pytest.mark.parametrize("remat", [("qkv",), ("vha_postmix",)], ids=str)
def test_unfused_recomputation_is_the_fused_one(remat):
    layer = make_remat(0, remat)
    assert_trees_bitwise_equal(results(layer, False), results(layer, True), names=("unfused", "fused"))


# ---- what is in the program


def checkpoints(jaxpr):
    """How many functions a program marks to be computed again, those within others too."""
    count = 0
    for eqn in program.equations(jaxpr, whole=("remat2",)):
        if eqn.primitive.name == "remat2":
            count += 1 + checkpoints(eqn.params["jaxpr"])
    return count


@pytest.mark.parametrize("ratio", [0, 4, -2])
def test_each_segment_is_computed_again(ratio):
    """The backward has one more function that is marked (the whole layer: one for two), and more matrix products."""

    def counts(remat):
        layer = make_remat(ratio, remat, indexer_phase="dense")
        jaxpr = jax.make_jaxpr(lambda *args: common.compute(*args))(layer, *make_input(layer.cfg, 2, 8))
        products = [e for e in program.equations(jaxpr) if e.primitive.name == "dot_general"]
        return checkpoints(jaxpr), len(products)

    marked, done = counts(())
    for name in REMAT_SEGMENTS:
        more, again = counts((name,))
        # A product keeps its operands alone, so that nothing of the postmix, or of the latent values, is left to do.
        is_marked = (ratio, name) != (-2, "vha_postmix")
        is_done = name != "vha_postmix" and (ratio, name) != (-2, "post_core")
        assert again > done if is_done else again == done, name
        assert name == "full_attn" or more == marked + is_marked, name
    assert counts(("qkv", "post_core"))[0] == marked + 2


@pytest.mark.parametrize("remat", [("full_attn",), ("post_core",), ("vha_postmix",), PARTS], ids=str)
def test_a_flip_acts_on_what_is_recomputed(remat):
    """In the next trace, back and forth: `jax.checkpoint` must not find the one that it has of this very layer."""
    layer = make_remat(0, remat)
    x, _ = make_input(layer.cfg, 2, 8)
    shape = (2, 8, layer.cfg.num_attention_heads, layer.cfg.head_dim)
    rotated = []
    for layer.fuse_inv_rope in (False, True, False):
        anew = jax.make_jaxpr(lambda x: layer(x)[0])(x)
        rotated.append(common.rotated_tensors(anew, shape))
    assert rotated == [2, 1, 2]


def test_the_fusion_subsumes_the_postmix_segment():
    layer = make_remat(0, ("vha_postmix",))
    x, _ = make_input(layer.cfg, 2, 8)
    off = checkpoints(common.forward_jaxpr(layer, x))
    assert "subsumes" not in layer.explain_fusions(x)["fuse_inv_rope"].reason
    layer.fuse_inv_rope = True
    status = layer.explain_fusions(x)["fuse_inv_rope"]
    assert status.active and "subsumes the remat segment vha_postmix" in status.reason
    assert checkpoints(common.forward_jaxpr(layer, x)) == off - 1
    other = make_remat(0, ("post_core",))
    other.fuse_inv_rope = True
    assert "subsumes" not in other.explain_fusions(x)["fuse_inv_rope"].reason


# ---- the configuration


def test_segments_are_named_in_any_order():
    assert small_config(remat=["gated_attn", "qkv", "qkv"]).remat == ("qkv", "gated_attn")
    assert small_config(remat="full_attn").remat == ("full_attn",)
    assert small_config(remat=[]).remat == small_config().remat == ()


@pytest.mark.parametrize("remat", ["attn", ("qkv", "core"), (True,), True, None, {"qkv": 1}, 1], ids=str)
def test_unknown_segments_raise(remat):
    with pytest.raises(ValueError, match="^remat: got .*, wanted a list of segments, each one of full_attn, qkv, "):
        small_config(remat=remat)
