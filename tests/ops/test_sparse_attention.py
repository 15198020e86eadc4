"""Sparse attention against a NumPy loop, its backends against each other, and what empty slots must not do."""

import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program import equations, kernel_names

from dsv4_fusions import dispatch, kv_index
from dsv4_fusions.kv_index import Runs
from dsv4_fusions.ops import sparse_attention as module
from dsv4_fusions.ops.sparse_attention import _empty_as_minus_one, reference, sparse_attention, table_backend
from dsv4_fusions.ops.sparse_attention.padding import drop_padding, pad_heads, pad_latent
from dsv4_fusions.testing import assert_trees_bitwise_equal, count_mismatches

WAYS = {
    "xla": dict(backend="xla"),
    "batched": dict(backend="batched"),
    "flat": dict(backend="flat"),
    "flat-fused": dict(backend="flat", fuse_kv_index_remap=True),
}


class Case(NamedTuple):
    q: np.ndarray
    kv: np.ndarray
    index: np.ndarray
    sink: np.ndarray
    d_out: np.ndarray
    topk_length: np.ndarray | None = None


def make_case(
    batch=3, tokens=5, heads=2, head_dim=4, kv_len=7, topk=6, seed=0, dtype=np.float32, holes=0.3, value_dim=None
):
    """Random tables (with duplicates, as topk is close to kv_len) that differ between batch entries."""
    value_dim = head_dim if value_dim is None else value_dim
    rng = np.random.default_rng(seed)
    index = rng.integers(0, kv_len, (batch, tokens, topk))
    index[rng.random(index.shape) < holes] = -1
    q, kv, d_out = (
        rng.standard_normal(shape).astype(np.float32).astype(dtype)
        for shape in ((batch, tokens, heads, head_dim), (batch, kv_len, head_dim), (batch, tokens, heads, value_dim))
    )
    return Case(q, kv, index.astype(np.int32), rng.standard_normal(heads).astype(np.float32), d_out)


def oracle(case, scale=None):
    """out, dq, dkv, dsink in float64, slot by slot, with the backward by hand. d_out says how wide the values are."""
    q, kv, sink, d_out = (np.asarray(x, np.float64) for x in (case.q, case.kv, case.sink, case.d_out))
    batch, tokens, heads, head_dim = q.shape
    kv_len, topk, value_dim = kv.shape[1], case.index.shape[2], d_out.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    out, dq, dkv, d_sink = np.zeros_like(d_out), np.zeros_like(q), np.zeros_like(kv), np.zeros_like(sink)
    for b in range(batch):
        for t in range(tokens):
            length = topk if case.topk_length is None else case.topk_length[b, t]
            ids = [int(i) for j, i in enumerate(case.index[b, t]) if 0 <= i < kv_len and j < length]
            for h in range(heads):
                s = [scale * (q[b, t, h] @ kv[b, i]) for i in ids]
                m = max([*s, sink[h]])
                z = sum(np.exp(x - m) for x in s) + np.exp(sink[h] - m)
                p = [np.exp(x - m) / z for x in s]
                for w, i in zip(p, ids, strict=True):
                    out[b, t, h] += w * kv[b, i, :value_dim]
                delta = out[b, t, h] @ d_out[b, t, h]
                for w, i in zip(p, ids, strict=True):
                    ds = w * (d_out[b, t, h] @ kv[b, i, :value_dim] - delta)
                    dq[b, t, h] += scale * ds * kv[b, i]
                    dkv[b, i] += scale * ds * q[b, t, h]
                    dkv[b, i, :value_dim] += w * d_out[b, t, h]
                d_sink[h] -= np.exp(sink[h] - m) / z * delta
    return out, dq, dkv, d_sink


def attention_and_gradients(case, **options):
    """out, dq, dkv, dsink."""

    def attention(q, kv, sink):
        return sparse_attention(q, kv, case.index, sink, topk_length=case.topk_length, **options)

    out, transpose = jax.vjp(attention, case.q, case.kv, case.sink)
    return out, *transpose(case.d_out)


# Tests that share a shape share its compilation; those that patch what is read while tracing make their own.
with_gradients = jax.jit(
    attention_and_gradients, static_argnames=("scale", "value_dim", "backend", "fuse_kv_index_remap", "implementation")
)


def compiled_anew(case, **options):
    return jax.jit(lambda case: attention_and_gradients(case, **options))(case)


def assert_close(got, wanted, tolerance=2e-6):
    """Largest error of each array relative to its largest element (or to one)."""
    for name, x, y in zip(("out", "dq", "dkv", "d_sink"), got, wanted, strict=True):
        x = np.asarray(x, np.float64)
        assert x.shape == y.shape
        error = np.max(np.abs(x - y), initial=0) / max(1.0, np.max(np.abs(y), initial=0))
        assert error <= tolerance, (name, error)


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_against_the_numpy_loop(way):
    case = make_case(tokens=7, heads=3, head_dim=8, kv_len=11, topk=9)
    assert_close(with_gradients(case, **WAYS[way]), oracle(case))
    assert_close(with_gradients(case, scale=0.7, **WAYS[way]), oracle(case, scale=0.7))


@pytest.mark.parametrize("value_dim", [4, 3])
def test_the_oracle_agrees_with_finite_differences(value_dim):
    case = make_case(value_dim=value_dim)
    wanted = oracle(case)
    rng = np.random.default_rng(1)
    for position, name in enumerate(("q", "kv", "sink")):
        step = rng.standard_normal(getattr(case, name).shape)
        low, high = (oracle(case._replace(**{name: getattr(case, name) + e * step}))[0] for e in (-1e-5, 1e-5))
        slope = np.sum((high - low) * case.d_out) / 2e-5
        np.testing.assert_allclose(np.sum(wanted[1 + position] * step), slope, rtol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_one_rounding_to_bfloat16(way):
    case = make_case(dtype=jnp.bfloat16, head_dim=8)
    out, dq, dkv, d_sink = with_gradients(case, **WAYS[way])
    assert out.dtype == dq.dtype == dkv.dtype == jnp.bfloat16 and d_sink.dtype == jnp.float32
    exact = oracle(case)
    # Half a unit in the last place of bf16 is at most 2^-8 of the element; more would be a second rounding.
    for got, wanted in zip((out, dq, dkv), exact[:3], strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-8 * 1.001, atol=1e-6)
    np.testing.assert_allclose(d_sink, exact[3], rtol=1e-5)


@pytest.mark.parametrize("head_dim, value_dim", [(576, 512), (7, 5), (3, 1)])
def test_values_of_the_leading_channels(head_dim, value_dim):
    case = make_case(heads=3, head_dim=head_dim, value_dim=value_dim)
    case.index[1, 2] = -1
    case = case._replace(topk_length=np.random.default_rng(3).integers(0, 7, (3, 5)).astype(np.int32))
    got = {way: with_gradients(case, value_dim=value_dim, **options) for way, options in WAYS.items()}
    assert_close(got["xla"], oracle(case), 5e-6)
    assert not np.any(got["xla"][0][1, 2]) and not np.any(got["xla"][1][1, 2])
    assert_trees_bitwise_equal(got["flat"], got["flat-fused"], names=("step by step", "fused"))
    assert_trees_bitwise_equal(got["xla"], got["flat"], names=("xla", "flat"))


def test_all_channels_are_the_default():
    programs = {str(jax.make_jaxpr(partial(attention_and_gradients, value_dim=v))(make_case())) for v in (None, 4)}
    assert len({re.sub("0x[0-9a-f]+", "", program) for program in programs}) == 1


def dense(q, kv, index, sink, value_dim):
    """The same attention with a column for every row: how often a query names it multiplies its exponential."""
    times = (index[..., None] == np.arange(kv.shape[1])).sum(2)[:, :, None]
    scores = jnp.einsum("bthd,bkd->bthk", q, kv, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(times > 0, scores + jnp.log(jnp.maximum(times, 1)), -jnp.inf)
    sinks = jnp.broadcast_to(sink[:, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), axis=-1)[..., :-1]
    return jnp.einsum("bthk,bkd->bthd", weights, kv[..., :value_dim], precision="highest")


def test_gradients_are_those_of_dense_attention():
    case = make_case(batch=2, tokens=9, heads=3, head_dim=9, value_dim=6, kv_len=11, topk=8)
    case.index[1, 4] = -1

    @jax.jit
    def dense_with_gradients(case):
        out, transpose = jax.vjp(lambda q, kv, sink: dense(q, kv, case.index, sink, 6), case.q, case.kv, case.sink)
        return out, *transpose(case.d_out)

    assert_close(with_gradients(case, value_dim=6), dense_with_gradients(case))


slots = st.one_of(st.integers(0, 6), st.sampled_from([-1, -5, 0, 0, 6, 7, 8, 13, 2147480000, -(2**31)]))


@settings(max_examples=60)
@given(
    index=st.lists(slots, min_size=90, max_size=90),
    lengths=st.lists(st.integers(-1, 8), min_size=15, max_size=15),
    sink=st.lists(st.sampled_from([-1e4, -3.0, 0.0, 2.5, 1e4]), min_size=2, max_size=2),
    seed=st.integers(0, 1000),
    way=st.sampled_from(list(WAYS)),
)
def test_fuzz_of_small_tables(index, lengths, sink, seed, way):
    case = make_case(seed=seed)._replace(
        index=np.array(index, np.int32).reshape(3, 5, 6),
        topk_length=np.array(lengths, np.int32).reshape(3, 5),
        sink=np.array(sink, np.float32),
    )
    assert_close(with_gradients(case, **WAYS[way]), oracle(case), 5e-6)


@pytest.mark.parametrize("way", WAYS)
def test_fully_masked_rows(way):
    case = make_case()
    case.index[1], case.index[2, 3] = -1, [-1, -7, 7, 8, 99, -1]
    for sink in (0.0, 1e4, -1e4, -np.inf):
        masked = case._replace(sink=np.full(2, sink, np.float32))
        out, dq, dkv, d_sink = with_gradients(masked, **WAYS[way])
        assert all(np.isfinite(x).all() for x in (out, dq, dkv, d_sink)), sink
        assert not np.any(out[1]) and not np.any(dq[1]) and not np.any(dkv[1])
        assert not np.any(out[2, 3]) and not np.any(dq[2, 3])
    no_sink = oracle(case._replace(sink=np.full(2, -1e300)))
    assert_close((out, dq, dkv, d_sink), no_sink)
    assert not np.any(d_sink)


def test_duplicates_count_twice():
    case = make_case(batch=1, tokens=1)
    case.index[:] = [2, 5, 2, -1, 2, -1]
    assert_close(with_gradients(case, backend="xla"), oracle(case))
    # Three slots of one row weigh like one slot whose exponential is three times as large.
    out = with_gradients(case, backend="xla")[0]
    single = with_gradients(case._replace(index=np.array([[[2, 5, -1, -1, -1, -1]]], np.int32)), backend="xla")[0]
    assert np.max(np.abs(out - single)) > 1e-2


def test_extreme_sinks():
    case = make_case(holes=0.0)
    out, dq, dkv, d_sink = with_gradients(case._replace(sink=np.array([1e4, -1e4], np.float32)), backend="flat")
    assert not np.any(out[:, :, 0]) and np.all(d_sink == 0) and np.isfinite(dq).all() and np.isfinite(dkv).all()
    softmax = oracle(case._replace(sink=np.array([1e4, -1e300])))
    np.testing.assert_allclose(out, softmax[0], atol=2e-6)
    np.testing.assert_allclose(dq, softmax[1], atol=2e-6)
    np.testing.assert_allclose(dkv, softmax[2], atol=4e-6)


def test_large_scores_do_not_overflow():
    case = make_case()
    case = case._replace(q=case.q * 1e3)
    out = with_gradients(case, backend="xla")[0]
    np.testing.assert_allclose(out, oracle(case)[0], atol=1e-3)


# --- backends and transformations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "platform, dtype, batch, value_dim",
    [
        ("cpu", jnp.bfloat16, 3, 16),
        ("cpu", np.float32, 3, 16),
        ("gpu", np.float32, 3, 16),
        ("cpu", jnp.bfloat16, 2, 11),
    ],
)
def test_backends_and_flags_agree_bitwise(platform, dtype, batch, value_dim, monkeypatch):
    if platform != dispatch.target().platform:
        monkeypatch.setattr(dispatch, "target", lambda: dispatch.Target(platform, None))
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4 * 12 * (16 + 3) * 10)  # blocks of 10, the last one padded
    case = make_case(batch, 29, heads=3, head_dim=16, kv_len=40, topk=12, dtype=dtype, value_dim=value_dim)
    case = case._replace(topk_length=np.random.default_rng(2).integers(0, 13, (batch, 29)).astype(np.int32))
    results = {way: compiled_anew(case, value_dim=value_dim, **options) for way, options in WAYS.items()}
    assert_trees_bitwise_equal(results["flat"], results["flat-fused"], names=("step by step", "fused"))
    assert_trees_bitwise_equal(results["xla"], results["flat"], names=("xla", "flat"))
    assert_close(results["xla"], oracle(case), 2e-6 if dtype == np.float32 else 4e-3)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "batch, way, steps, fused",
    [
        (3, "flat", 1, 0),
        (3, "flat-fused", 0, 1),
        (3, "xla", 0, 0),
        (1, "flat-fused", 0, 0),
    ],
)
def test_the_table_is_remapped_once(batch, way, steps, fused, backward, faked_target, monkeypatch):
    """In the forward, not again in the backward; and not at all for a backend that reads local ids."""
    faked_target("gpu", (9, 0), 132)
    monkeypatch.setattr(module, "local_to_flat", jax.jit(module.local_to_flat, static_argnums=1))  # gives it a name
    case = make_case(batch, value_dim=3)

    def forward(case):
        return sparse_attention(case.q, case.kv, case.index, case.sink, value_dim=3, **WAYS[way])

    run = partial(attention_and_gradients, value_dim=3, **WAYS[way]) if backward else forward
    jaxpr = jax.make_jaxpr(run)(case)
    calls = [eqn.params["name"] for eqn in equations(jaxpr, whole=("jit", "pjit")) if "name" in eqn.params]
    assert calls.count("local_to_flat") == steps
    assert len(kernel_names(jaxpr)) == fused


@pytest.mark.parametrize("block", [1, 3])
def test_blocks_of_queries(block, monkeypatch):
    case = make_case()
    case.index[case.index == 0] = -1
    case.kv[:, 0] = np.nan  # not even by the queries that fill up the last block
    monkeypatch.setattr(reference, "BLOCK_BYTES", 4 * 6 * (4 + 2) * block)
    assert_close(compiled_anew(case, backend="xla"), oracle(case))


@pytest.mark.parametrize("backend", ["xla", "flat"])
def test_memory_stays_far_below_the_gathered_rows(backend):
    batch, tokens, heads, head_dim, kv_len, topk = 1, 16384, 8, 128, 16896, 640
    shapes = (
        jax.ShapeDtypeStruct((batch, tokens, heads, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, kv_len, head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, tokens, topk), jnp.int32),
        jax.ShapeDtypeStruct((heads,), jnp.float32),
    )
    gathered = tokens * topk * head_dim * 4

    def forward(q, kv, index, sink):
        return sparse_attention(q, kv, index, sink, backend=backend)

    def backward(q, kv, index, sink):
        return jax.grad(lambda *x: forward(x[0], x[1], index, x[2]).astype(jnp.float32).sum(), (0, 1, 2))(q, kv, sink)

    for function, share in ((forward, 1 / 20), (backward, 1 / 10)):
        analysis = jax.jit(function).lower(*shapes).compile().memory_analysis()
        assert analysis.temp_size_in_bytes < share * gathered


@pytest.mark.parametrize("way", ["xla", "flat-fused"])
def test_checkpoint_changes_no_bit(way):
    case = make_case(dtype=jnp.bfloat16)

    @jax.jit
    def with_checkpoint(case):
        attention = jax.checkpoint(lambda q, kv, sink: sparse_attention(q, kv, case.index, sink, **WAYS[way]))
        out, transpose = jax.vjp(attention, case.q, case.kv, case.sink)
        return out, *transpose(case.d_out)

    assert_trees_bitwise_equal(with_checkpoint(case), with_gradients(case, **WAYS[way]))


@pytest.mark.parametrize("way", ["xla", "flat-fused"])
def test_vmap_and_scan(way):
    cases = [make_case(seed=seed) for seed in (3, 4)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *cases)
    wanted = [oracle(case) for case in cases]
    mapped = jax.jit(jax.vmap(partial(attention_and_gradients, **WAYS[way])))(stacked)
    scanned = jax.jit(partial(jax.lax.map, partial(attention_and_gradients, **WAYS[way])))(stacked)
    for i in range(2):
        assert_close([x[i] for x in mapped], wanted[i])
        assert_close([x[i] for x in scanned], wanted[i])


def test_gradient_through_a_scan_over_layers():
    case = make_case(tokens=7, kv_len=7)

    def layer(x, sink):  # queries from the running state, its first head as rows
        return x + sparse_attention(x, x[:, :, 0], case.index, sink), None

    sinks = np.stack([case.sink, -case.sink, 2 * case.sink])

    def scanned(x):
        return jax.lax.scan(layer, x, sinks)[0]

    def unrolled(x):
        for sink in sinks:
            x, _ = layer(x, sink)
        return x

    gradients = [jax.jit(jax.grad(lambda x, f=f: (f(x) * case.d_out).sum()))(case.q) for f in (scanned, unrolled)]
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["xla", "flat-fused"])
@pytest.mark.parametrize("axis", ["batch", "tokens"])
def test_shard_map(axis, way, mesh4):
    # Split by tokens, every device reads all rows, and their gradient is summed over the devices as the sink's is.
    case = make_case(batch=4, tokens=8)
    queries = jax.P("data") if axis == "batch" else jax.P(None, "data")
    rows = jax.P("data") if axis == "batch" else jax.P()
    in_specs = Case(q=queries, kv=rows, index=queries, sink=jax.P(), d_out=queries)
    sharded = jax.shard_map(
        partial(attention_and_gradients, **WAYS[way]),
        mesh=mesh4,
        in_specs=(in_specs,),
        out_specs=(queries, queries, rows, jax.P()),
    )
    assert_close(jax.jit(sharded)(case), oracle(case))


def test_integer_arguments_under_grad():
    case = make_case()
    lengths = jnp.full(case.index.shape[:2], 4)
    gradient = jax.grad(
        lambda q, index, lengths: sparse_attention(q, case.kv, index, case.sink, topk_length=lengths).sum(),
        argnums=(0, 1, 2),
        allow_int=True,
    )(jnp.asarray(case.q), jnp.asarray(case.index), lengths)
    assert gradient[1].dtype == gradient[2].dtype == jax.dtypes.float0
    assert gradient[0].dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint32, np.uint64])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_ids_of_any_integer_type(place, dtype):
    ids = np.array([[[0, 3, 100, 2, 127, 1]]])
    if np.issubdtype(dtype, np.signedinteger):
        ids[..., 4] = -5
    length = np.array([[5]])
    with jax.enable_x64(True):  # so that a JAX array keeps 64 bits
        got = _empty_as_minus_one(place(ids.astype(dtype)), 100, length)
        narrow = _empty_as_minus_one(place(ids.astype(dtype)), 300, None)
    assert_trees_bitwise_equal(got, np.array([[[0, 3, -1, 2, -1, -1]]], np.int32))
    assert narrow[0, 0].tolist() == [0, 3, 100, 2, -1 if ids[0, 0, 4] < 0 else 127, 1]


def test_int64_ids_do_not_wrap():
    case = make_case()
    # The low 32 bits are 0 and 1: a silent wrap would read the first two rows.
    wide = np.where(case.index < 0, 2**32 + np.arange(6) % 2, case.index.astype(np.int64))
    got = sparse_attention(case.q, case.kv, wide, case.sink, topk_length=np.full((3, 5), 6))
    np.testing.assert_allclose(got, oracle(case)[0], rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        got = sparse_attention(case.q, case.kv, jnp.asarray(wide), case.sink)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, oracle(case)[0], rtol=1e-5, atol=1e-6)


# --- what must not be read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_nobody_selects_are_not_read(way, poison):
    case = make_case()
    case.index[case.index == 0] = -1
    case.index[case.index == 4] = 7  # just past the end: row 0 of the next batch entry, if it were numbered through
    clean = with_gradients(case, **WAYS[way])
    poisoned = case._replace(kv=case.kv.copy())
    poisoned.kv[:, [0, 4]] = poison
    got = with_gradients(poisoned, **WAYS[way])
    assert_trees_bitwise_equal(got, clean, names=("poisoned", "clean"))
    assert not np.any(got[2][:, [0, 4]])


@pytest.mark.parametrize("way", WAYS)
def test_a_poisoned_row_reaches_its_own_readers_alone(way):
    case = make_case(holes=0.5)
    case.index[case.index == 3] = -1
    case.index[1, 2] = [3, 1, -1, -1, -1, -1]
    clean = with_gradients(case, **WAYS[way])
    poisoned = case._replace(kv=case.kv.copy())
    poisoned.kv[:, 3] = np.nan
    out, dq, dkv, _ = with_gradients(poisoned, **WAYS[way])
    readers = np.zeros((3, 5), bool)
    readers[1, 2] = True
    assert np.isnan(np.asarray(out)[readers]).all()
    assert_trees_bitwise_equal(np.asarray(out)[~readers], np.asarray(clean[0])[~readers])
    assert_trees_bitwise_equal(np.asarray(dq)[~readers], np.asarray(clean[1])[~readers])
    touched = np.zeros((3, 7), bool)
    touched[1, [1, 3]] = True
    assert_trees_bitwise_equal(np.asarray(dkv)[~touched], np.asarray(clean[2])[~touched])


@pytest.mark.parametrize("way", WAYS)
def test_slots_beyond_topk_length_are_not_read(way):
    case = make_case(batch=2, tokens=70, kv_len=40, topk=64, holes=0.0)
    case.index[case.index == 11] = 12
    length = np.full((2, 70), 5, np.int32)
    length[1, :7] = [0, -3, 1, 63, 64, 65, 2**31 - 1]
    case = case._replace(topk_length=length)
    behind = np.arange(64) >= length[..., None]
    poisoned = case._replace(index=np.where(behind, 11, case.index), kv=case.kv.copy())
    poisoned.kv[:, 11] = np.nan
    got = with_gradients(poisoned, **WAYS[way])
    assert not np.any(got[2][:, 11])
    cut = case._replace(index=np.where(behind, -1, case.index), topk_length=None)
    assert_trees_bitwise_equal(got, with_gradients(cut, **WAYS[way]))
    if way == "xla":
        assert_close(got, oracle(case), 5e-6)


@pytest.mark.parametrize("bad", [-1, -5, -(2**31), 7, 13, 2147480000, 2**31 - 1])
@pytest.mark.parametrize("way", WAYS)
def test_ids_outside_the_rows_are_empty(way, bad):
    case = make_case()
    wanted = with_gradients(case, **WAYS[way])
    got = with_gradients(case._replace(index=np.where(case.index == -1, bad, case.index).astype(np.int32)), **WAYS[way])
    assert_trees_bitwise_equal(got, wanted)


def test_last_row_gets_no_gradient_from_empty_slots():
    case = make_case()
    case.index[:] = -1
    case.index[:, :, 0] = 0
    dkv = with_gradients(case, backend="xla")[2]
    assert np.any(dkv[:, 0]) and not np.any(dkv[:, 1:])


def test_queries_and_batch_entries_use_their_own_slots():
    case = make_case(holes=0.0)
    out = with_gradients(case, backend="flat")[0]
    for b in range(3):
        for t in range(5):
            alone = make_case()._replace(
                q=np.broadcast_to(case.q[b, t], case.q.shape),
                kv=np.broadcast_to(case.kv[b], case.kv.shape),
                index=np.broadcast_to(case.index[b, t], case.index.shape),
                sink=case.sink,
            )
            np.testing.assert_allclose(with_gradients(alone, backend="flat")[0][0, 0], out[b, t], rtol=1e-6)


def test_more_slots_than_rows():
    case = make_case(kv_len=5, topk=8, holes=0.0)
    case.index[:, :, 5:] = -1
    assert_close(with_gradients(case, backend="flat"), oracle(case))


@pytest.mark.parametrize("shape", ["batch", "tokens", "topk", "kv_len"])
@pytest.mark.parametrize("way", WAYS)
def test_empty_axes(way, shape):
    sizes = dict(batch=3, tokens=5, kv_len=7, topk=6) | {shape: 0}
    case = make_case(**(sizes | ({"kv_len": 1} if shape == "kv_len" else {})))
    if shape == "kv_len":
        case = case._replace(kv=case.kv[:, :0])
    for value_dim in (4, 3):
        case = case._replace(d_out=case.d_out[..., :value_dim])
        out, dq, dkv, d_sink = with_gradients(case, value_dim=value_dim, **WAYS[way])
        assert out.shape == (*case.q.shape[:3], value_dim) and out.dtype == case.q.dtype
        assert dq.shape == case.q.shape and dkv.shape == case.kv.shape and d_sink.shape == (2,)
        assert not any(np.any(x) for x in (out, dq, dkv, d_sink))


@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_no_two_updates_meet(way, faked_target):
    case = make_case()

    def gradient_scatters(platform):
        faked_target(platform, None)
        jaxpr = jax.make_jaxpr(lambda case: attention_and_gradients(case, **WAYS[way]))(case)
        return [equation for equation in equations(jaxpr) if equation.primitive.name.startswith("scatter")]

    on_gpu, on_cpu = gradient_scatters("gpu"), gradient_scatters("cpu")
    assert on_gpu and all(equation.params["unique_indices"] for equation in on_gpu)
    assert on_cpu and not any(equation.params["unique_indices"] for equation in on_cpu)


# --- compacted tables and padded operands ---------------------------------------------------------------------------


def test_compaction_changes_no_value():
    case = make_case()
    case.index[1, 2], case.index[2] = -1, -1
    case.index[0, :2] = [[-1, -1, 4, -1, 4, -1], [-7, 2, -1, 0, -1, 6]]
    ids, count = kv_index.compact(case.index)
    assert not np.any(count[2]) and count[0, :2].tolist() == [2, 3]
    compacted = case._replace(index=np.asarray(ids), topk_length=np.asarray(count))
    got = with_gradients(compacted)
    assert_close(got, [np.asarray(x) for x in with_gradients(case)], 1e-6)
    assert_close(got, oracle(case))
    # Where the ids are at the front already, the same terms stand in the same places.
    assert_trees_bitwise_equal(got, with_gradients(compacted._replace(topk_length=None)))


def test_a_table_that_is_empty_throughout_compacts_to_lengths_of_zero():
    case = make_case(holes=1.0)
    ids, count = kv_index.compact(case.index)
    assert not np.any(count)
    got = with_gradients(case._replace(index=np.asarray(ids), topk_length=np.asarray(count)))
    assert not any(np.any(x) for x in got)


@pytest.mark.parametrize("way", ["xla", "flat-fused"])
def test_slots_that_widen_the_table_change_no_value(way):
    case = make_case()
    widened = case._replace(index=np.asarray(kv_index.pad_topk(case.index, 64)))
    assert widened.index.shape == (3, 5, 64)
    assert_close(with_gradients(widened, **WAYS[way]), oracle(case))


@pytest.mark.parametrize("heads, multiple, width", [(3, 64, 7), (3, 1, 7), (65, 64, 5), (3, 4, 16)])
def test_padded_operands_give_the_same_attention(heads, multiple, width):
    case = make_case(batch=2, heads=heads, head_dim=5, value_dim=4)
    case.index[1, 2] = -1

    @jax.jit
    def padded(case):
        def attention(q, kv, sink):
            q, sink = pad_heads(pad_latent(q, width), sink, multiple)
            assert q.shape[2] == len(sink) == -(-heads // multiple) * multiple
            out = sparse_attention(q, pad_latent(kv, width), case.index, sink, scale=5**-0.5)
            return drop_padding(out, heads, 4)

        out, transpose = jax.vjp(attention, case.q, case.kv, case.sink)
        return out, *transpose(case.d_out)

    got = padded(case)
    assert_close(got, [np.asarray(x) for x in with_gradients(case, value_dim=4)], 1e-6)
    assert_close(got, oracle(case), 5e-6)


def test_what_is_padded():
    q, sink = jnp.ones((2, 5, 3, 4), jnp.bfloat16), jnp.ones(3)
    wide, sinks = pad_heads(q, sink)
    assert wide.shape == (2, 5, 64, 4) and wide.dtype == jnp.bfloat16 and sinks.dtype == jnp.float32
    assert np.all(wide[:, :, :3] == 1) and not np.any(wide[:, :, 3:])
    assert np.all(sinks[:3] == 1) and np.all(sinks[3:] == np.float32(-1e30))
    assert pad_heads(jnp.zeros((1, 1, 65, 4)), jnp.zeros(65))[0].shape == (1, 1, 128, 4)
    assert_trees_bitwise_equal(pad_heads(jnp.ones((1, 64, 4)), jnp.ones(64)), (jnp.ones((1, 64, 4)), jnp.ones(64)))
    rows = pad_latent(q)
    assert rows.shape == (2, 5, 3, 512) and np.all(rows[..., :4] == 1) and not np.any(rows[..., 4:])
    assert_trees_bitwise_equal(drop_padding(pad_heads(rows, sink)[0], 3, 4), q)


def test_a_padded_head_gives_no_gradient_and_no_nan():
    """Not even where the query reads nothing, so that its sink of -1e30 is the whole softmax."""
    case = make_case()
    case.index[0] = -1
    q, sink = pad_heads(case.q, case.sink, 4)
    d_out = jnp.pad(case.d_out, ((0, 0), (0, 0), (0, 2), (0, 0)))
    out, dq, dkv, d_sink = with_gradients(case._replace(q=q, sink=sink, d_out=d_out))
    assert all(np.isfinite(x).all() for x in (out, dq, dkv, d_sink))
    assert not np.any(out[0]) and np.any(out[1, :, 2:])
    assert not np.any(dq[:, :, 2:]) and not np.any(d_sink[2:])
    assert_close((out[:, :, :2], dq[:, :, :2], dkv, d_sink[:2]), oracle(case))


# --- the denominators -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [None, -np.inf, 1e4])
def test_lse_is_the_logarithm_of_the_denominator(sink):
    case = make_case()
    case.index[0, 1] = -1
    sinks = case.sink if sink is None else np.full_like(case.sink, sink)
    out, lse = sparse_attention(case.q, case.kv, case.index, sinks, return_lse=True)
    assert_trees_bitwise_equal(out, sparse_attention(case.q, case.kv, case.index, sinks))
    assert lse.dtype == jnp.float32 and lse.shape == case.q.shape[:3]
    for b, t, h in np.ndindex(lse.shape):
        logits = [case.q[b, t, h] @ case.kv[b, i] / 2 for i in case.index[b, t] if i >= 0] + [sinks[h]]
        np.testing.assert_allclose(lse[b, t, h], np.logaddexp.reduce(np.float64(logits)), rtol=1e-6)
    assert sparse_attention(case.q[:, :0], case.kv, case.index[:, :0], sinks, return_lse=True)[1].shape == (3, 0, 2)
    empty = sparse_attention(case.q, case.kv, case.index[..., :0], sinks, return_lse=True)[1]
    np.testing.assert_array_equal(empty, np.broadcast_to(sinks, lse.shape))


@pytest.mark.parametrize("backend", ["flat", "batched"])
def test_partial_results_merge_by_lse(backend):
    """Outputs and gradients of two halves of the slots, the sink in one of them, are those of all slots."""
    case = make_case(topk=12)
    case.index[1, 2, 6:] = -1
    no_sink = np.full_like(case.sink, -np.inf)

    def merged(q, kv, sink):
        attend = partial(sparse_attention, q, kv, backend=backend, return_lse=True)
        (a, lse_a), (b, lse_b) = attend(case.index[..., :6], sink), attend(case.index[..., 6:], no_sink)
        lse = jnp.logaddexp(lse_a, lse_b)
        weigh = lambda x, part: x * jnp.exp(part - lse)[..., None]  # noqa: E731
        return weigh(a, lse_a) + weigh(b, lse_b)

    out, transpose = jax.vjp(merged, case.q, case.kv, case.sink)
    assert_close((out, *transpose(case.d_out)), oracle(case))


# --- runs in place of a table ---------------------------------------------------------------------------------------


FIELDS = ("near_start", "near_count", "far_start", "far_count")


def make_runs(case, width, **changes):
    """Runs with every kind of bound: empty, beginning before the rows, ending behind them, wider than allowed."""
    shape = case.index.shape[:2]
    edges = np.array([0, 2, -3, 5, -(2**31), 2**31 - 1, 1], np.int32)
    arrays = {f: np.resize(np.roll(edges, i), shape) for i, f in enumerate(FIELDS)} | changes
    return Runs(**{f: jnp.asarray(arrays[f]) for f in FIELDS}, width=width)


def loop_slots(runs, entry, token, kv_len):
    """The slots of one query, from the definition, one at a time: an id outside the rows takes its slot."""
    slots = []
    for start, count in ((runs.near_start, runs.near_count), (runs.far_start, runs.far_count)):
        start, count = int(start[entry, token]), int(count[entry, token])
        slots += [start + j for j in range(min(count, runs.width - len(slots)))]
    slots = [i if 0 <= i < kv_len else -1 for i in slots]
    return np.array(slots + [-1] * (runs.width - len(slots)), np.int32)


def loop_table(runs, shape, kv_len):
    return np.stack([loop_slots(runs, *at, kv_len) for at in np.ndindex(shape)]).reshape(*shape, runs.width)


def packed(table):
    """The ids of each row in front."""
    rows = [[*row[row >= 0], *row[row < 0]] for row in table.reshape(-1, table.shape[-1])]
    return np.array(rows, np.int32).reshape(table.shape)


@pytest.mark.parametrize("backend", ["flat", "batched", "structured", "xla"])
@pytest.mark.parametrize("width", [1, 4, 14])
def test_runs_are_the_table_that_they_stand_for(backend, width):
    case = make_case()
    runs, kv_len = make_runs(case, width), case.kv.shape[1]
    table = loop_table(runs, case.index.shape[:2], kv_len)
    assert len({int((row >= 0).sum()) for row in table.reshape(-1, width)}) > 1
    ids = runs.table()
    np.testing.assert_array_equal(np.where((ids >= 0) & (ids < kv_len), ids, -1), table)
    attend = jax.jit(lambda q, kv, index: sparse_attention(q, kv, index, case.sink, backend=backend))
    from_table = jax.jit(lambda q, kv, index: sparse_attention(q, kv, index, case.sink, backend=table_backend(backend)))
    assert_trees_bitwise_equal(attend(case.q, case.kv, runs), from_table(case.q, case.kv, packed(table)))


def test_runs_wider_than_the_rows():
    """A window that begins far in front of the first row, as wide as all of them and wider."""
    case = make_case()
    start = np.arange(5, dtype=np.int32) - 9
    zeros = np.zeros_like(start)
    runs = Runs(*(jnp.asarray(np.broadcast_to(x, (3, 5))) for x in (start, zeros + 10, zeros, zeros)), width=10)
    first = runs.within(7)
    np.testing.assert_array_equal(first.near_start, 0 * first.near_start)
    np.testing.assert_array_equal(first.near_count[0], [1, 2, 3, 4, 5])
    wanted = oracle(case._replace(index=np.asarray(runs.table())))
    out = sparse_attention(case.q, case.kv, runs, case.sink, backend="structured")
    np.testing.assert_allclose(out, wanted[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_runs_of_any_integer_type(dtype):
    """Sums and differences of the bounds, and more rows than the smallest type counts, must not wrap."""
    limits = np.iinfo(dtype)
    case = make_case(kv_len=400, tokens=7)
    edges = [v for v in (0, 2, -3, 120, 127, 250, 2**32 + 3, limits.max) if limits.min <= v <= limits.max]
    with jax.enable_x64(np.dtype(dtype).itemsize > 4):
        arrays = {f: np.resize(np.roll(np.array(edges, dtype), i), (3, 7)) for i, f in enumerate(FIELDS)}
        runs = make_runs(case, 300, **arrays)
        assert runs.near_start.dtype == dtype
        table = loop_table(runs, (3, 7), 400)
        ids = runs.table()
        np.testing.assert_array_equal(np.where((ids >= 0) & (ids < 400), ids, -1), table)
        out = sparse_attention(case.q, case.kv, runs, case.sink, backend="structured")
    np.testing.assert_allclose(out, oracle(case._replace(index=table))[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_topk_length_of_any_integer_type(dtype):
    limits = np.iinfo(dtype)
    lengths = [v for v in (0, 3, -1, 5, 2**32 + 2, limits.max) if limits.min <= v <= limits.max]
    case = make_case()._replace(topk_length=np.resize(np.array(lengths, dtype), (3, 5)))
    with jax.enable_x64(np.dtype(dtype).itemsize > 4):
        out = sparse_attention(case.q, case.kv, case.index, case.sink, topk_length=jnp.asarray(case.topk_length))
    np.testing.assert_allclose(out, oracle(case)[0], atol=1e-5)


def parts_of(case, seed=3):
    """A window and selected slots behind it, some that the token may not see."""
    batch, tokens = case.index.shape[:2]
    rng = np.random.default_rng(seed)
    selected = rng.integers(-1, 4, (batch, tokens, 3), dtype=np.int32)
    count = jnp.asarray(rng.integers(0, 4, (batch, tokens)), jnp.int32)
    return kv_index.window_span(tokens, 3), kv_index.selection(jnp.asarray(selected), 0 * count, count, tokens)


@pytest.mark.parametrize("way", WAYS)
def test_parts_are_the_table_that_they_make(way):
    case = make_case(tokens=5, kv_len=9)
    parts = parts_of(case)
    table = kv_index.joined(*(part.table() for part in parts))
    assert np.any(np.asarray(table) >= 5) and np.any(np.asarray(table[..., 3:]) < 0)
    got = with_gradients(case._replace(index=parts), **WAYS[way])
    assert_trees_bitwise_equal(got, with_gradients(case._replace(index=table), **WAYS[way]))
    assert_close(got, oracle(case._replace(index=np.asarray(table))))


@pytest.mark.parametrize("fused, kernels", [(False, []), (True, ["flat_kv_index_table"])])
def test_the_table_of_parts_is_one_kernel(fused, kernels, faked_target):
    faked_target("gpu", (9, 0))
    case = make_case()

    def attend(q, kv, parts):
        return sparse_attention(q, kv, parts, case.sink, fuse_kv_index_remap=fused)

    assert kernel_names(jax.make_jaxpr(attend)(case.q, case.kv, parts_of(case))) == kernels


# --- refusals -------------------------------------------------------------------------------------------------------


def refuse(error, match, options=None, **changes):
    case = make_case()._replace(**changes)
    with pytest.raises(error, match=match):
        sparse_attention(case.q, case.kv, case.index, case.sink, topk_length=case.topk_length, **(options or {}))


def test_refusals():
    case = make_case()
    refuse(ValueError, r"q: got shape \(5, 2, 4\), wanted 4 axes", q=case.q[0])
    refuse(ValueError, r"kv: got shape \(3, 7, 1, 4\), wanted 3 axes", kv=case.kv[:, :, None])
    refuse(ValueError, r"index: got shape \(3, 5\), wanted 3 axes", index=case.index[..., 0])
    refuse(ValueError, r"sink: got shape \(\), wanted 1 axes", sink=np.float32(0))
    refuse(ValueError, r"kv: got shape \(2, 7, 4\), wanted \(3, 7, 4\)", kv=case.kv[:2])
    refuse(ValueError, r"kv: got shape \(3, 7, 3\), wanted \(3, 7, 4\)", kv=case.kv[..., :3])
    refuse(ValueError, r"index: got shape \(3, 4, 6\), wanted \(3, 5, 6\)", index=case.index[:, :4])
    refuse(ValueError, r"index: got shape \(1, 5, 6\)", index=case.index[:1])
    refuse(ValueError, r"sink: got shape \(3,\), wanted \(2,\)", sink=np.zeros(3, np.float32))
    refuse(ValueError, r"topk_length: got shape \(5,\), wanted \(3, 5\)", topk_length=np.zeros(5, np.int32))
    refuse(TypeError, "index: got dtype float32", index=case.index.astype(np.float32))
    refuse(TypeError, "index: got dtype bool", index=case.index > 0)
    refuse(TypeError, "topk_length: got dtype float32", topk_length=np.zeros((3, 5), np.float32))
    refuse(TypeError, "q: got dtype int32", q=case.q.astype(np.int32))
    refuse(ValueError, "value_dim: got 0, wanted 1 to 4", {"value_dim": 0})
    refuse(ValueError, "value_dim: got 5, wanted 1 to 4", {"value_dim": 5})
    refuse(TypeError, "value_dim: got float, wanted a Python int or None", {"value_dim": 2.0})
    refuse(TypeError, "value_dim: got bool, wanted a Python int or None", {"value_dim": True})
    refuse(
        ValueError, "backend: got 'cudnn', wanted one of 'flat', 'batched', 'structured', 'xla'", {"backend": "cudnn"}
    )
    refuse(ValueError, "backend: got None", {"backend": None})
    structured = {"backend": "structured"}
    refuse(ValueError, "index: got a table, wanted kv_index.Runs for the backend 'structured'", structured)
    length = np.zeros((3, 5), np.int32)
    refuse(ValueError, "got one beside Runs", structured, index=make_runs(case, 4), topk_length=length)
    runs = make_runs(case, 4, far_count=np.zeros((3, 4), np.int32))
    refuse(ValueError, r"index.far_count: got shape \(3, 4\), wanted \(3, 5\)", structured, index=runs)
    runs = make_runs(case, 4, near_start=np.zeros(5, np.int32))
    refuse(ValueError, r"index.near_start: got shape \(5,\), wanted 2 axes", structured, index=runs)
    runs = make_runs(case, 4, near_count=np.zeros((3, 5)))
    refuse(TypeError, "index.near_count: got dtype float32", structured, index=runs)
    refuse(ValueError, "index.width: got -1, wanted at least 0", structured, index=make_runs(case, -1))
    (window, *_), no_topk = parts_of(case), {"index": ()}
    refuse(ValueError, "got one beside parts of a table", index=(window,), topk_length=length)
    refuse(ValueError, "index: got no parts, wanted at least one", **no_topk)
    refuse(ValueError, r"index: got shapes \(4, 3\), \(5, 3\)", index=(kv_index.window_span(4, 3), window))
    refuse(ValueError, r"index: got shape \(3, 4, 3\), wanted \(3, 5, 3\)", index=(kv_index.window_span(4, 3),))
    refuse(ValueError, "'mosaic' cannot run here: q and kv are float32 and float32", {"implementation": "mosaic"})
    refuse(ValueError, "got 'cudnn', wanted None or one of mosaic, xla", {"implementation": "cudnn"})


def test_more_rows_than_flat_ids():
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((4, 3, 2, 4), jnp.bfloat16),
            ((4, 2**29, 4), jnp.bfloat16),
            ((4, 3, 5), jnp.int32),
            ((2,), jnp.float32),
        )
    ]
    with pytest.raises(ValueError, match=r"kv: got 4 x 536870912 rows, wanted fewer than 2\*\*31"):
        jax.eval_shape(partial(sparse_attention, backend="flat"), *shapes)
    assert jax.eval_shape(partial(sparse_attention, backend="xla"), *shapes).shape == (4, 3, 2, 4)


def test_the_implementation_reaches_the_fused_remap():
    case = make_case()
    refuse(ValueError, "implementation: got 'nonsense'", dict(fuse_kv_index_remap=True, implementation="nonsense"))
    out = sparse_attention(*case[:4], fuse_kv_index_remap=True, implementation="xla")
    assert count_mismatches(out, sparse_attention(*case[:4])) == 0


def test_refusals_of_padding():
    with pytest.raises(ValueError, match="multiple: got 0, wanted at least 1"):
        pad_heads(jnp.zeros((1, 3, 4)), jnp.zeros(3), 0)
    with pytest.raises(ValueError, match=r"sink: got shape \(4,\), wanted \(3,\) to go with q of shape \(1, 3, 4\)"):
        pad_heads(jnp.zeros((1, 3, 4)), jnp.zeros(4))
    with pytest.raises(ValueError, match="width: got 3, wanted at least 4, the channels of x"):
        pad_latent(jnp.zeros((1, 3, 4)), 3)
