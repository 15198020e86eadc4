"""Absorbed latent attention against the plain form, in which every head's keys and values exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import common, loops
from layers.common import (
    INDEXED,
    PHASES,
    SEGMENTS,
    make_input,
    pulled_back,
    quick,
    quick_apply,
    random_layer,
    small_config,
)

from dsv4_fusions import dispatch
from dsv4_fusions.layers import MQALatentAttention, mqa_latent_attention
from dsv4_fusions.ops.kv_index_table.reference import local_table
from dsv4_fusions.testing import assert_trees_bitwise_equal

LATENT = dict(compress_ratios=(-2,) * 3)
SPARSE = small_config(**INDEXED, **LATENT)
RNG = np.random.default_rng(4)
POSITIONS = RNG.integers(0, 200, SEGMENTS.shape).astype(np.int32)
LOSS_MASK = RNG.integers(0, 3, SEGMENTS.shape).astype(np.float32)


@pytest.mark.parametrize("phase", ["sparse", "warm_up"])
def test_outputs_and_gradients_are_the_oracles(phase):
    cfg = small_config(**INDEXED, **LATENT, indexer_phase=phase, gated_attention=phase == "warm_up")
    common.check_against_loops(cfg, SEGMENTS, POSITIONS, LOSS_MASK, one_by_one=phase == "sparse")


def test_dense_phase_has_no_indexer():
    cfg = small_config(**INDEXED, **LATENT, indexer_phase="dense")
    layer, (x, _) = random_layer(cfg), make_input(cfg, 3, 24)
    y, aux = quick_apply(layer, x, SEGMENTS, POSITIONS)
    assert layer.indexer is None and aux == {}
    np.testing.assert_allclose(y, loops.layer(layer, x, SEGMENTS, POSITIONS), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [23, 3], ids=["many", "within-the-window"])
def test_without_documents(tokens):
    """Of three tokens as many are selected as there are: the way of the indexer that has no top-k."""
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 2, tokens)
    y, aux = quick_apply(layer, x)
    want, loss = loops.layer_and_loss(layer, x)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux["indexer_loss"], loss, rtol=1e-5)


def run_sparse(layer, segment_ids):
    x, g = make_input(SPARSE, 3, 24)
    return pulled_back(layer, x, g, 1.0, segment_ids, POSITIONS, LOSS_MASK)


def test_padding_gives_zeros_and_no_gradient():
    y, _, _, dx = run_sparse(random_layer(SPARSE), SEGMENTS)
    padding = SEGMENTS == 0
    for rows in (np.asarray(y), np.asarray(dx)):
        assert not rows[padding].any() and rows[~padding].any(-1).all()
    nothing = run_sparse(random_layer(SPARSE), np.zeros_like(SEGMENTS))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nothing))


def test_documents_within_the_window():
    """Of one token, and of as many as the window: no candidate, no loss."""
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 3, 24)
    segment_ids = np.stack([np.arange(1, 25), np.arange(24) // 5 + 1, np.arange(24) // 2 + 1]).astype(np.int32)
    y, aux, d_layer, dx = run_sparse(layer, segment_ids)
    np.testing.assert_allclose(y, loops.layer(layer, x, segment_ids, POSITIONS), rtol=1e-4, atol=1e-5)
    assert aux["indexer_loss"] == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(d_layer.indexer))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((d_layer, dx)))


@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_extreme_sinks(sink):
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 3, 24)
    layer.sink[...] = jnp.full(4, sink, jnp.float32)
    y, _, *gradients = run_sparse(layer, SEGMENTS)
    np.testing.assert_allclose(y, loops.layer(layer, x, SEGMENTS, POSITIONS), rtol=1e-4, atol=1e-5)
    assert np.any(y) == (sink < 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_table(monkeypatch):
    """Each row: selected tokens before the window, as many as may be, then the whole window; none twice."""
    tables = []

    def spy(q, rows, index, sink, *, value_dim, **how):
        tables.append(local_table(index, 3))
        return jnp.zeros_like(q[..., :value_dim])

    monkeypatch.setattr(mqa_latent_attention, "sparse_attention", spy)
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 3, 24)
    table = np.asarray(quick(lambda layer, x: (layer(x, SEGMENTS), tables.pop())[1])(layer, x))
    assert table.shape == (3, 24, layer.table_width(24)) == (3, 24, 3 + 5)
    for i, segments in enumerate(SEGMENTS):
        for start, length in loops.documents(segments):
            for t in range(start, start + length):
                selected = table[i, t, :3][table[i, t, :3] >= 0]
                first = max(start, t - 4)
                assert table[i, t, 3:][table[i, t, 3:] >= 0].tolist() == list(range(first, t + 1))
                assert len(set(selected)) == len(selected) == min(first - start, 3)
                assert set(selected) <= set(range(start, first))
        assert (table[i][segments == 0] == -1).all()


@pytest.mark.parametrize("backend", ["flat", "xla"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.filterwarnings("ignore:fuse_kv_index_remap")
def test_table_is_remapped_once(backend, phase):
    cfg = small_config(**LATENT, indexer_phase=phase, sparse_attention_backend=backend)
    layer, (x, _) = random_layer(cfg, fuse_kv_index_remap=True), make_input(cfg, 2, 8)
    with dispatch.interpret():
        assert len(common.kernels(common.forward_jaxpr(layer, x))) == (backend == "flat")
    assert layer.explain_fusions(x)["fuse_kv_index_remap"].active == (backend == "flat")


def test_flips_change_no_bit():
    cfg = small_config(**INDEXED | dict(dtype="bfloat16"), **LATENT, gated_attention=True)
    layer, (x, g) = random_layer(cfg), make_input(cfg, 3, 24)
    results = []
    for fused in (False, False, True):
        layer.fuse_kv_index_remap = fused
        results.append(common.quick_run(layer, x, g, SEGMENTS))
    assert layer.explain_fusions(x)["fuse_kv_index_remap"].active
    assert_trees_bitwise_equal(results[0], results[1], names=("unfused", "unfused again"))
    assert_trees_bitwise_equal(results[0], results[2], names=("unfused", "fused"))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(results[2]))


def test_inverse_rotation_has_nothing_to_fuse_into():
    """The switches of a hybrid layer are taken, and change nothing in the program."""
    with pytest.warns(UserWarning, match="fuse_inv_rope=True has no effect: compress_ratios are all -2"):
        layer = random_layer(SPARSE, fuse_inv_rope=True, postmix_backward="single_pass", implementation="xla")
    x, _ = make_input(SPARSE, 2, 8)
    status = layer.explain_fusions(x)["fuse_inv_rope"]
    assert (status.active, status.implementation) == (False, None) and "not rotated" in status.reason
    assert str(common.forward_jaxpr(layer, x)) == str(common.forward_jaxpr(random_layer(SPARSE), x))


def test_layers_of_another_ratio_are_refused():
    with pytest.raises(ValueError, match="layer_index: got 1, whose compress ratio is 4, wanted -2; DSv4Hybrid"):
        MQALatentAttention(small_config(compress_ratios=(-2, 4, 0)), 1, rngs=nnx.Rngs(0))
