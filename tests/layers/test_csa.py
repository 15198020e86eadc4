"""CSA layers, ratios 2 to 127: window, overlapping compressor, indexer."""

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
    randomised,
    small_config,
)

from dsv4_fusions import dispatch
from dsv4_fusions.documents import compressed_groups, from_segment_ids
from dsv4_fusions.layers import Compressor, compressed_sparse_attention
from dsv4_fusions.ops.kv_index_table.reference import local_table
from dsv4_fusions.testing import assert_trees_bitwise_equal

RNG = np.random.default_rng(3)
POSITIONS = RNG.integers(0, 200, SEGMENTS.shape).astype(np.int32)
LOSS_MASK = RNG.integers(0, 3, SEGMENTS.shape).astype(np.float32)
SPARSE = small_config(**INDEXED, compress_ratios=(2,) * 3)


# ---- the overlapping compressor


@quick
def compressed(compressor, x, segment_ids, positions):
    return compressor(x, compressed_groups(from_segment_ids(segment_ids), compressor.ratio), positions)


def make_compressor(**how):
    return randomised(lambda: Compressor(SPARSE, 4, rngs=nnx.Rngs(0), **how))


@pytest.mark.parametrize("how", [{}, dict(head_dim=16, rotate_channels=True)], ids=["rows", "index-keys"])
def test_overlapping_compressor(how):
    compressor, (x, _) = make_compressor(**how), make_input(SPARSE, 3, 24)
    assert compressor.overlap and compressor.kv_proj.kernel.shape[1] == 2 * compressor.head_dim
    want = loops.packed(compressor, x, SEGMENTS, POSITIONS)
    np.testing.assert_allclose(compressed(compressor, x, SEGMENTS, POSITIONS), want, rtol=1e-4, atol=1e-5)


def test_first_group_of_a_document_reads_nothing_before_it():
    """With a NaN in every token before it, not even times zero; and the second group reads the first."""
    compressor, (x, _) = make_compressor(), make_input(SPARSE, 3, 24)
    segment_ids = np.repeat([[1, 2, 3]] * 3, [8, 12, 4], axis=1).astype(np.int32)
    run = lambda x: np.asarray(compressed(compressor, x, segment_ids, POSITIONS))[0]  # noqa: E731
    rows = run(x.at[:, :8].set(jnp.nan))
    assert np.isnan(rows[:2]).all() and np.isfinite(rows[2:]).all()
    changed = (run(x.at[:, 8].add(1.0)) != run(x)).any(-1)
    np.testing.assert_array_equal(changed, [False, False, True, True, False, False])


# ---- values and gradients


@pytest.mark.parametrize("ratio, phase", [(2, "sparse"), (4, "warm_up")])
def test_outputs_and_gradients_are_the_oracles(ratio, phase):
    cfg = small_config(**INDEXED, compress_ratios=(ratio,) * 3, indexer_phase=phase, gated_attention=phase == "warm_up")
    common.check_against_loops(cfg, SEGMENTS, POSITIONS, LOSS_MASK, one_by_one=phase == "sparse")


def test_dense_phase_has_no_indexer():
    cfg = small_config(**INDEXED, compress_ratios=(4,) * 3, indexer_phase="dense")
    layer, (x, _) = random_layer(cfg), make_input(cfg, 3, 24)
    y, aux = quick_apply(layer, x, SEGMENTS, POSITIONS)
    assert layer.core_attention.indexer is None and aux == {}
    want = loops.layer(layer, x, SEGMENTS, POSITIONS)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def test_without_documents():
    """Of a length that leaves a remainder; the other path of compressor, tables and positions."""
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 2, 23)
    y, aux = quick_apply(layer, x)
    want, loss = loops.layer_and_loss(layer, x)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(aux["indexer_loss"], loss, rtol=1e-5)


def run_sparse(layer, segment_ids):
    x, g = make_input(SPARSE, 3, 24)
    return pulled_back(layer, x, g, 1.0, segment_ids, POSITIONS, LOSS_MASK)


def test_padding_gives_zeros_and_no_gradient():
    y, _, d_layer, dx = run_sparse(random_layer(SPARSE), SEGMENTS)
    padding = SEGMENTS == 0
    for rows in (np.asarray(y), np.asarray(dx)):
        assert not rows[padding].any() and rows[~padding].any(-1).all()
    y, aux, d_layer, dx = run_sparse(random_layer(SPARSE), np.zeros_like(SEGMENTS))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((y, aux, d_layer, dx)))


def test_documents_of_one_token():
    """Nothing to compress and nothing to select."""
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 3, 24)
    alone = np.broadcast_to(np.arange(1, 25, dtype=np.int32), (3, 24))
    y, aux, d_layer, dx = run_sparse(layer, alone)
    np.testing.assert_allclose(y, loops.layer(layer, x, alone, POSITIONS), rtol=1e-4, atol=1e-5)
    assert aux["indexer_loss"] == 0
    assert not any(
        np.any(leaf) for leaf in jax.tree.leaves((d_layer.core_attention.indexer, d_layer.core_attention.compressor))
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((d_layer, dx)))


@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_extreme_sinks(sink):
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 3, 24)
    layer.core_attention.sink[...] = jnp.full(4, sink, jnp.float32)
    y, _, *gradients = run_sparse(layer, SEGMENTS)
    np.testing.assert_allclose(y, loops.layer(layer, x, SEGMENTS, POSITIONS), rtol=1e-4, atol=1e-5)
    assert np.any(y) == (sink < 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_fewer_tokens_than_a_group():
    """And than the window: what a window layer with the same parameters gives, and a loss of 0."""
    cfg = small_config(**INDEXED, compress_ratios=(4,) * 3)
    layer, (x, _) = random_layer(cfg), make_input(cfg, 2, 3)
    y, aux = quick_apply(layer, x)
    np.testing.assert_allclose(y, loops.layer(layer, x), rtol=1e-4, atol=1e-5)
    assert list(aux) == ["indexer_loss"] and aux["indexer_loss"] == 0


# ---- the table


def test_table(monkeypatch):
    """Each row: the whole window, and as many finished groups of the document as may be selected, none twice."""
    tables = []

    def spy(q, rows, index, sink, **how):
        tables.append(local_table(index, 3))
        return jnp.zeros_like(q)

    monkeypatch.setattr(compressed_sparse_attention, "sparse_attention", spy)
    layer, (x, _) = random_layer(SPARSE), make_input(SPARSE, 3, 24)
    table = np.asarray(quick(lambda layer, x: (layer(x, SEGMENTS), tables.pop())[1])(layer, x))
    assert table.shape == (3, 24, layer.table_width(24)) == (3, 24, 5 + 3)
    for i, segments in enumerate(SEGMENTS):
        slots = 0  # of the documents before
        for start, length in loops.documents(segments):
            for t in range(start, start + length):
                ids = table[i, t][table[i, t] >= 0]
                assert len(set(ids)) == len(ids)
                window = set(range(max(start, t - 4), t + 1))
                done = (t - start + 1) // 2
                selected = set(ids) - window
                assert window <= set(ids) and len(selected) == min(done, 3)
                assert selected <= set(range(24 + slots, 24 + slots + done))
            slots += length // 2
        assert (table[i][segments == 0] == -1).all()


# ---- the fusions


@pytest.mark.parametrize("backend", ["flat", "xla"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.filterwarnings("ignore:fuse_kv_index_remap")
def test_table_is_remapped_once(backend, phase):
    cfg = small_config(compress_ratios=(4,) * 3, indexer_phase=phase, sparse_attention_backend=backend)
    layer, (x, _) = random_layer(cfg, fuse_kv_index_remap=True), make_input(cfg, 2, 8)
    with dispatch.interpret():
        names = [name for name in common.kernels(common.forward_jaxpr(layer, x)) if "postmix" not in name]
    assert len(names) == (backend == "flat")
    assert layer.explain_fusions(x)["fuse_kv_index_remap"].active == (backend == "flat")


def test_flips_change_no_bit():
    cfg = small_config(**INDEXED | dict(dtype="bfloat16"), compress_ratios=(4,) * 3, gated_attention=True)
    layer, (x, g) = random_layer(cfg), make_input(cfg, 3, 24)
    results = []
    for fused in (False, False, True):
        layer.set_attributes(fuse_inv_rope=fused, fuse_kv_index_remap=fused)
        results.append(common.quick_run(layer, x, g, SEGMENTS))
    assert all(status.active for status in layer.explain_fusions(x).values())
    assert_trees_bitwise_equal(results[0], results[1], names=("unfused", "unfused again"))
    assert_trees_bitwise_equal(results[0], results[2], names=("unfused", "fused"))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(results[2]))
