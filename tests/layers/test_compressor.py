import functools

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
from flax import nnx
from layers import common, loops
from layers.common import make_input, small_config

from dsv4_fusions.documents import compressed_groups, from_segment_ids
from dsv4_fusions.layers import Compressor


@jax.jit
def apply(compressor, x, groups=None, positions=None):
    return compressor(x, groups, positions)


@functools.partial(jax.jit, static_argnums=1)
def groups_of(segment_ids, ratio=4):
    return compressed_groups(from_segment_ids(segment_ids), ratio)


def make_compressor(ratio=4, **changes):
    cfg = small_config(**(dict(dtype="float32", param_dtype="float32", compress_rope_theta=160000.0) | changes))
    compressor = Compressor(cfg, ratio, rngs=nnx.Rngs(5), overlap=False)
    compressor.ape[...] = jax.random.normal(jax.random.key(6), compressor.ape[...].shape)  # large enough to matter
    compressor.norm.weight[...] = jnp.linspace(0.5, 1.5, cfg.head_dim).astype(cfg.param_dtype)
    return compressor


def expected(compressor, x, segment_ids, positions=None):
    x = np.asarray(x, np.float64)
    batch, tokens, _ = x.shape
    rows = np.zeros((batch, tokens // compressor.ratio, compressor.cfg.head_dim))
    for i in range(batch):
        docs = loops.documents(segment_ids[i])
        position = np.zeros(tokens, int)
        for start, length in docs:
            position[start : start + length] = range(length)
        if positions is not None:
            position = np.broadcast_to(positions, (batch, tokens))[i]
        for slot, (_, _, row) in enumerate(loops.compress(compressor, x[i], docs, position, compressor.rope[0])):
            rows[i, slot] = row
    return rows


@pytest.mark.parametrize("tokens", [4, 7, 24])
def test_one_document(tokens):
    compressor = make_compressor()
    x, _ = make_input(compressor.cfg, 2, tokens)
    want = expected(compressor, x, np.ones((2, tokens), int))
    np.testing.assert_allclose(apply(compressor, x), want, rtol=1e-4, atol=1e-5)


def test_documents_and_positions():
    compressor = make_compressor()
    x, _ = make_input(compressor.cfg, 3, 24)
    groups = groups_of(common.SEGMENTS)
    want = expected(compressor, x, common.SEGMENTS)
    np.testing.assert_allclose(apply(compressor, x, groups), want, rtol=1e-4, atol=1e-5)
    per_entry = np.random.default_rng(0).integers(0, 300, (3, 24)).astype(np.int32)
    for positions in (per_entry[0], per_entry):
        want = expected(compressor, x, common.SEGMENTS, positions)
        np.testing.assert_allclose(apply(compressor, x, groups, positions), want, rtol=1e-4, atol=1e-5)


def test_empty_slots_are_zero_whatever_stands_in_padding():
    compressor = make_compressor()
    segment_ids = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 0, 2, 2, 0]])
    x, _ = make_input(compressor.cfg, 1, 12)
    x = jnp.where(segment_ids[..., None] == 0, jnp.nan, x)
    rows = np.asarray(apply(compressor, x, groups_of(segment_ids)))
    assert np.isfinite(rows).all() and rows[0, 0].any() and not rows[0, 1:].any()


def test_padding_in_no_group_reaches_no_gradient():
    """The first token is padding and NaN. An empty slot once read it, and gave NaN to the tokens beside it."""
    compressor = make_compressor()
    segment_ids = np.array([[0, 1, 1, 1, 1, 1, 0, 2, 2, 2, 2, 0]])
    x, _ = make_input(compressor.cfg, 1, 12)
    x = jnp.where(segment_ids[..., None] == 0, jnp.nan, x)
    dx = jax.jit(jax.grad(lambda x: jnp.sum(compressor(x, groups_of(segment_ids)) ** 2)))(x)
    in_group = np.array([0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], bool)
    assert np.isfinite(dx[0, in_group]).all() and dx[0, in_group].all() and not np.nan_to_num(dx)[0, ~in_group].any()


def test_gradient_writes_each_row_once():
    """Which a GPU repeats, where adding with atomics would come out in any order."""
    compressor = make_compressor()
    x, groups = make_input(compressor.cfg, 3, 24)[0], groups_of(common.SEGMENTS)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(compressor(x, groups))))(x)
    added = [e for e in program.equations(jaxpr) if e.primitive.name == "scatter-add"]
    assert len(added) == 2 and all(e.params["unique_indices"] for e in added)
    ids = np.where(groups.is_group[..., None], groups.token_index, -1).reshape(3, -1)
    for row in ids:
        assert len(np.unique(row[row >= 0])) == np.sum(row >= 0) > 0


def test_fewer_tokens_than_a_group():
    compressor = make_compressor()
    assert compressor(make_input(compressor.cfg, 1, 3)[0]) is None


def test_gradients_are_finite_and_padding_has_none():
    compressor = make_compressor(dtype="bfloat16")
    x, _ = make_input(compressor.cfg, 3, 24)
    groups = groups_of(common.SEGMENTS)
    loss = lambda compressor, x: jnp.sum(compressor(x, groups).astype(jnp.float32) ** 3)  # noqa: E731
    d_compressor, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(compressor, x)
    for leaf in jax.tree.leaves((d_compressor, dx)):
        assert jnp.all(jnp.isfinite(leaf)) and jnp.any(leaf)
    assert not np.any(np.asarray(dx, np.float32)[common.SEGMENTS == 0])


def test_pooling_is_f32():
    """Weights in bf16 would be off by up to 2**-9 each; here the one rounding of the pooled row is all there is."""
    compressor = make_compressor(dtype="bfloat16", param_dtype="bfloat16", qk_rope_head_dim=0)
    x, _ = make_input(compressor.cfg, 1, 8)
    kv, score = (np.asarray(f(x), np.float64).reshape(1, 2, 4, -1) for f in (compressor.kv_proj, compressor.gate_proj))
    score = score + np.asarray(compressor.ape[...], np.float64)
    weight = np.exp(score) / np.exp(score).sum(2, keepdims=True)
    pooled = np.asarray(jnp.asarray((kv * weight).sum(2)).astype(jnp.bfloat16), np.float64)
    want = loops.rms(pooled, compressor.cfg.rms_norm_eps, loops.f64(compressor.norm.weight))
    np.testing.assert_allclose(np.asarray(apply(compressor, x), np.float64), want, rtol=1.1 * 2**-8)
