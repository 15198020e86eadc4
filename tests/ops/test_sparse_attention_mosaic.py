"""The Mosaic kernel of sparse attention: in JAX's simulator against the reference, and its lowering for Hopper."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program import gpu_target, kernel_names

from dsv4_fusions import dispatch
from dsv4_fusions.kv_index import Runs
from dsv4_fusions.ops import sparse_attention as op
from dsv4_fusions.ops.sparse_attention import mosaic, sparse_attention
from dsv4_fusions.ops.sparse_attention.mosaic import backward_pass
from dsv4_fusions.ops.sparse_attention.slots import Slots
from dsv4_fusions.testing import assert_trees_bitwise_equal

# JAX has no public name for the races that its simulator finds.
simulator = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call", exc_type=ImportError)


def operands(batch=1, tokens=3, heads=64, head_dim=128, kv_len=150, topk=100, dtype=jnp.bfloat16, seed=0):
    """Queries, rows, ids with holes and duplicates, sinks."""
    rng = np.random.default_rng(seed)
    q, kv = rng.standard_normal((batch, tokens, heads, head_dim)), rng.standard_normal((batch, kv_len, head_dim))
    index = rng.integers(-kv_len // 2, kv_len, (batch, tokens, topk), dtype=np.int32)
    return jnp.asarray(q, dtype), jnp.asarray(kv, dtype), jnp.asarray(index), jnp.asarray(rng.standard_normal(heads))


def simulated(run, *args):
    simulator.reset_gpu_interpret_mode_state()
    with dispatch.interpret():
        out = jax.block_until_ready(jax.jit(run)(*args))
    simulator.reset_gpu_interpret_mode_state()
    return out


def in_simulator(*args, **kwargs):
    return simulated(partial(sparse_attention, implementation="mosaic", **kwargs), *args)


def gradients(q, kv, index, sink, g, **kwargs):
    """dq, dkv, d_sink."""
    attend = lambda q, kv, sink: sparse_attention(q, kv, index, sink, **kwargs)  # noqa: E731
    return jax.vjp(attend, q, kv, sink)[1](g)


def gradients_in_simulator(*args, **kwargs):
    return simulated(partial(gradients, implementation="mosaic", **kwargs), *args)


def assert_close(out, args, **kwargs):
    """The kernel rounds the weights of the sum to bf16: as much again as the rounding of the result."""
    wanted = np.asarray(sparse_attention(*args, implementation="xla", **kwargs), np.float32)
    out = np.asarray(out, np.float32)
    assert np.all(np.isfinite(out))
    assert np.linalg.norm(out - wanted) <= 3e-3 * np.linalg.norm(wanted)
    np.testing.assert_allclose(out, wanted, atol=0.02 * np.abs(wanted).max())


def with_cotangent(q, kv, index, sink, value_dim=None, **_):
    shape = (*q.shape[:-1], value_dim or q.shape[-1])
    return q, kv, index, sink, jnp.asarray(np.random.default_rng(1).standard_normal(shape), q.dtype)


def assert_gradients_close(got, args, times=1, **kwargs):
    """P, dS, the output that D is made from and each slot's contribution are rounded to the operands' dtype."""
    wanted = gradients(*args, implementation="xla", **kwargs)
    for x, y in zip(got, wanted, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.all(np.isfinite(x))
        assert np.linalg.norm(x - y) <= times * 6e-3 * np.linalg.norm(y)
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max())


@pytest.mark.parametrize(
    "case",
    [
        dict(),
        dict(tokens=1, topk=1, kv_len=1),
        dict(topk=64),
        dict(topk=129, tokens=5),  # three blocks, one slot in the last
        dict(head_dim=192, value_dim=128, scale=0.1),  # channels that keys alone have
        dict(heads=128, tokens=2),
        dict(heads=5, tokens=2),
        dict(dtype=jnp.float16),
    ],
    ids=str,
)
def test_it_is_the_reference(case):
    kwargs = {name: case[name] for name in ("value_dim", "scale") if name in case}
    args = operands(**{name: value for name, value in case.items() if name not in kwargs})
    assert_close(in_simulator(*args, **kwargs), args, **kwargs)


@pytest.mark.parametrize(
    "case",
    [
        dict(kv_len=1, topk=1, tokens=1),
        dict(kv_len=20, topk=129),  # rows with more contributions than are added at a time, and three blocks
        dict(head_dim=192, value_dim=128, scale=0.1),
        dict(heads=128, tokens=2, topk=70),
        dict(heads=5, tokens=2),
        dict(dtype=jnp.float16),
    ],
    ids=str,
)
def test_gradients_are_the_references(case):
    kwargs = {name: case[name] for name in ("value_dim", "scale") if name in case}
    args = operands(**{name: value for name, value in case.items() if name not in kwargs})
    args = with_cotangent(*args, **kwargs)
    got = gradients_in_simulator(*args, **kwargs)
    assert_gradients_close(got, args, **kwargs)


def test_lse_and_its_gradients():
    """Heads that are padded, a query without rows."""
    q, kv, index, sink = operands(heads=5, tokens=2, topk=70)
    args = q, kv, index.at[0, 1].set(-1), sink
    rng = np.random.default_rng(2)
    cotangents = jnp.asarray(rng.standard_normal(q.shape), q.dtype), jnp.asarray(rng.standard_normal(q.shape[:3]), "f")
    out, lse = in_simulator(*args, return_lse=True)
    assert_close(out, args)
    wanted = sparse_attention(*args, implementation="xla", return_lse=True)[1]
    np.testing.assert_allclose(lse, wanted, rtol=1e-5, atol=1e-5)
    got = gradients_in_simulator(*args, cotangents, return_lse=True)
    assert_gradients_close(got, (*args, cotangents), return_lse=True)


def test_contributions_are_the_same_through_the_tiles_of_the_block(monkeypatch):
    args = with_cotangent(*operands(tokens=2, topk=70))
    got = gradients_in_simulator(*args)
    monkeypatch.setattr(backward_pass, "_SHARED_BYTES", 0)
    assert_trees_bitwise_equal(gradients_in_simulator(*args), got)


def test_gradients_in_chunks_of_queries(monkeypatch):
    """Chunks that do not divide the queries: the last ends where the queries do."""
    args, length = with_cotangent(*operands(batch=2, tokens=2)), jnp.array([[100, 0], [64, 65]])
    monkeypatch.setattr(backward_pass, "CONTRIBUTIONS_BYTES", 3 * 128 * 128 * 2)
    got = gradients_in_simulator(*args, topk_length=length, fuse_kv_index_remap=True)
    assert_gradients_close(got, args, topk_length=length)
    assert_trees_bitwise_equal(gradients_in_simulator(*args, topk_length=length, backend="batched"), got)


def test_flat_and_batched_are_the_same_bits():
    """With lengths of none, of a part of a block, of whole ones and of more than there is."""
    args, length = operands(batch=2), jnp.array([[100, 0, 7], [64, 65, 1000]])
    flat = in_simulator(*args, backend="flat", topk_length=length, fuse_kv_index_remap=True)
    assert_trees_bitwise_equal(flat, in_simulator(*args, backend="batched", topk_length=length))
    assert_close(flat, args, topk_length=length)
    assert not np.any(flat[0, 1])


def test_runs_are_the_bits_of_their_table():
    """Output and gradients; runs of no row, of one block, of several, with their border inside a block."""
    q, kv, _, sink = operands(batch=2, kv_len=200)
    counts = np.array([[0, 64, 100], [1, 0, 7]], np.int32)
    bounds = [
        np.array([[3, 10, 0], [150, 0, 1]]),
        counts,
        np.array([[0, 100, 100], [0, 50, 9]]),
        counts.T.reshape(2, 3),
    ]
    runs = Runs(*(jnp.asarray(x, jnp.int32) for x in bounds), width=200)
    got = in_simulator(q, kv, runs, sink, backend="structured")
    assert_trees_bitwise_equal(got, in_simulator(q, kv, runs.table(), sink, backend="batched"))
    assert_close(got, (q, kv, runs.table(), sink))
    args = with_cotangent(q, kv, runs, sink)
    assert_gradients_close(gradients_in_simulator(*args, backend="structured"), args, backend="structured")


KV_LEN = 90  # of the fuzzed tables; 2 batch entries of 1 query with 70 slots
some_ids = st.one_of(
    st.just([-1]),
    st.integers(0, KV_LEN - 1).map(lambda row: [row]),  # one row in every slot
    st.lists(st.sampled_from([-1, 0, KV_LEN - 1, KV_LEN, 2 * KV_LEN - 1, 2**31 - 1, -(2**31)]), min_size=1, max_size=9),
    st.lists(st.integers(-KV_LEN, 2 * KV_LEN), min_size=1, max_size=70),
)


@jax.jit
def fuzzed(length, q, kv, index, sink, g):
    """Output and gradients, compiled once."""

    def attend(q, kv, sink):
        return sparse_attention(q, kv, index, sink, topk_length=length, implementation="mosaic")

    out, transpose = jax.vjp(attend, q, kv, sink)
    return out, transpose(g)


@settings(max_examples=8)
@given(
    ids=st.lists(some_ids, min_size=2, max_size=2),
    length=st.lists(st.sampled_from([0, 1, 63, 64, 65, 70, 2**31 - 1]), min_size=2, max_size=2),
    sink=st.lists(st.sampled_from([-np.inf, -1e4, 0.0, 3.0, 1e4]), min_size=64, max_size=64),
)
def test_any_table(ids, length, sink):
    q, kv, _, _ = operands(batch=2, tokens=1, kv_len=KV_LEN)
    index = jnp.asarray(np.stack([np.resize(np.array(row, np.int32), 70) for row in ids]))
    args = with_cotangent(q, kv, index[:, None], jnp.asarray(sink, jnp.float32))
    length = jnp.asarray(length, jnp.int32)[:, None]
    simulator.reset_gpu_interpret_mode_state()
    with dispatch.interpret():
        out, got = jax.block_until_ready(fuzzed(length, *args))
    simulator.reset_gpu_interpret_mode_state()
    assert_close(out, args[:4], topk_length=length)
    # Where one slot has nearly all the weight, dP and D differ little, and D is made from the rounded output.
    assert_gradients_close(got, args, topk_length=length, times=3)


@pytest.mark.lowering
def test_runs_lower_for_hopper():
    shape = jax.ShapeDtypeStruct
    with gpu_target("NVIDIA H200"):
        runs = Runs(*[shape((2, 96), jnp.int32)] * 4, width=640)
        args = (
            shape((2, 96, 64, 512), jnp.bfloat16),
            shape((2, 200, 512), jnp.bfloat16),
            runs,
            shape((64,), jnp.float32),
        )
        run = partial(gradients, backend="structured")
        traced = jax.jit(run).trace(*args, shape((2, 96, 64, 512), jnp.bfloat16))
        assert kernel_names(traced.jaxpr) == ["sparse_attention", "sparse_attention_backward", "sum_rows"]
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 2


@pytest.mark.parametrize("sink", [-np.inf, -1e4, 1e4])
def test_sinks_and_queries_without_rows(sink):
    q, kv, index, _ = operands()
    args = q, kv, index.at[0, 1].set(-1), jnp.full(64, sink)
    out = in_simulator(*args)
    assert not np.any(out[0, 1]) and np.all(np.isfinite(np.asarray(out, np.float32)))
    assert not np.any(out) if sink > 0 else np.any(out[0, 0])
    got = gradients_in_simulator(*with_cotangent(*args))
    assert all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in got)
    assert not np.any(got[0][0, 1])
    if sink < 0:
        assert_close(out, args)
        assert_gradients_close(got, with_cotangent(*args))


@pytest.mark.parametrize("sink", [-1e30, -1e9, 1e9, 1e30, float(np.finfo(np.float32).min)])
def test_sinks_beyond_the_precision_of_scores(sink):
    """Only of a query without rows can such a sink be a part of the sum that is not all or nothing."""
    q, kv, index, _ = operands(tokens=2, topk=5)
    args = q, kv, index.at[0, 1].set(-1), jnp.full(64, sink, jnp.float32)
    rng = np.random.default_rng(2)
    cotangents = jnp.asarray(rng.standard_normal(q.shape), q.dtype), jnp.asarray(rng.standard_normal(q.shape[:3]), "f")
    out, lse = in_simulator(*args, return_lse=True)
    assert not np.any(out[0, 1]) and np.all(np.isfinite(lse))
    # The kernel's base is 2, in which the smallest f32 is out of range.
    np.testing.assert_allclose(lse[0, 1], max(sink, float(np.finfo(np.float32).min) / np.log2(np.e)), rtol=1e-6)
    got = gradients_in_simulator(*args, cotangents, return_lse=True)
    assert_gradients_close(got, (*args, cotangents), return_lse=True)


def test_rows_that_no_slot_names_are_not_read():
    """Neither those at the clamped ends nor those that a wrong id would lead to, in either backend."""
    q, kv, index, sink = operands(batch=2, kv_len=70)
    index = jnp.where((index >= 10) & (index < 60), index, -1)
    bad = jnp.array([-1, -2, 70, 71, 139, 140, 2147480000, 2**31 - 1, -(2**31)], jnp.int32)
    poisoned = kv.at[:, :10].set(jnp.nan).at[:, 60:].set(jnp.nan)
    wanted = sparse_attention(q, kv, index, sink, implementation="xla")
    for backend in ("flat", "batched"):
        out = in_simulator(q, poisoned, index.at[..., 5 : 5 + len(bad)].set(bad), sink, backend=backend)
        cut = sparse_attention(q, kv, index.at[..., 5 : 5 + len(bad)].set(-1), sink, implementation="xla")
        assert np.linalg.norm(np.float32(out) - np.float32(cut)) <= 3e-3 * np.linalg.norm(np.float32(wanted))


# Several items on a multiprocessor, of several blocks each and of none.
SEVERAL_ITEMS = dict(tokens=5, topk=130)
SEVERAL_LENGTHS = jnp.array([[130, 0, 64, 1, 130]])


@pytest.mark.parametrize("products", [False, True])
def test_no_races(finds_race_in, products):
    attend = partial(sparse_attention, implementation="mosaic", topk_length=SEVERAL_LENGTHS)
    assert not finds_race_in(attend, operands(**SEVERAL_ITEMS), products)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("products", [False, True])
def test_no_races_in_the_backward(finds_race_in, products, staged, monkeypatch):
    if not staged:
        monkeypatch.setattr(backward_pass, "_SHARED_BYTES", 0)
    run = partial(gradients, implementation="mosaic", topk_length=SEVERAL_LENGTHS)
    assert not finds_race_in(run, with_cotangent(*operands(**SEVERAL_ITEMS)), products)


def test_the_kernel_itself_reads_no_row_of_another_entry():
    """Its callers hand it -1 for ids that are out of range; it does not rely on that."""
    q, kv, index, sink = operands(batch=2, kv_len=70, tokens=2)
    rows, index = kv.reshape(140, -1), index.reshape(4, -1)
    bad = jnp.array([-1, -2, 70, 71, 139, 140, 2147480000, 2**31 - 1, -(2**31)], jnp.int32)

    def attend(ids):
        slots = Slots(index.at[:, 5 : 5 + len(bad)].set(ids), None, 2, 70)
        run = partial(mosaic.forward, slots=slots, sink=sink.astype(jnp.float32), scale=0.1, value_dim=128)
        simulator.reset_gpu_interpret_mode_state()
        with dispatch.interpret():
            return jax.block_until_ready(jax.jit(run)(q.reshape(4, 64, -1), rows))

    assert_trees_bitwise_equal(attend(bad), attend(-1))
    simulator.reset_gpu_interpret_mode_state()


def test_a_mapped_axis():
    """vmap over queries, rows and ids: the bits of single calls."""
    q, kv, index, sink = operands(batch=2, tokens=2, topk=20)
    single = [in_simulator(q[i, None], kv[i, None], index[i, None], sink) for i in range(2)]
    simulator.reset_gpu_interpret_mode_state()
    with dispatch.interpret():
        attend = lambda q, kv, index: sparse_attention(q[None], kv[None], index[None], sink, implementation="mosaic")  # noqa: E731
        mapped = jax.block_until_ready(jax.jit(jax.vmap(attend))(q, kv, index))
    simulator.reset_gpu_interpret_mode_state()
    assert_trees_bitwise_equal(mapped, jnp.stack(single))


@pytest.mark.lowering
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "heads, head_dim, value_dim, topk, with_length",
    [
        (64, 512, 512, 640, False),
        (128, 576, 512, 2176, True),
        (16, 64, 128, 1, False),
        (64, 128, 128, 100, True),
        (64, 512, 256, 64, False),
        (64, 384, 128, 64, False),  # as many channels beside the value as may be
    ],
)
def test_lowers_for_hopper(heads, head_dim, value_dim, topk, with_length, x64):
    if head_dim < value_dim:
        head_dim = value_dim
    shape = jax.ShapeDtypeStruct
    with jax.enable_x64(x64), gpu_target("NVIDIA H200"):
        args = [shape((2, 96, heads, head_dim), jnp.bfloat16), shape((2, 200, head_dim), jnp.bfloat16)]
        args += [shape((2, 96, topk), jnp.int32), shape((heads,), jnp.float32)]
        length = [shape((2, 96), jnp.int32)] * with_length

        def run(q, kv, index, sink, g, length=None):
            return gradients(q, kv, index, sink, g, value_dim=value_dim, topk_length=length)

        args.append(shape((2, 96, heads, value_dim), jnp.bfloat16))
        traced = jax.jit(run).trace(*args, *length)
        assert kernel_names(traced.jaxpr) == ["sparse_attention", "sparse_attention_backward", "sum_rows"]
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu") >= 2


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(kv_dtype=jnp.float32), "needs bfloat16 or float16 for both"),
        (dict(head_dim=96), "rows have 96 channels"),
        (dict(head_dim=640, value_dim=512), "rows have 640 channels"),
        (dict(value_dim=64), "values 64"),
        (dict(rows=2**31), "numbers them in int32"),
        (dict(backend="xla"), "backend 'xla' is the reference"),
        (dict(), "it needs an NVIDIA GPU"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_the_kernel_does_not_serve_takes_the_reference(changes, reason, faked_target):
    call = dict(q_dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16, head_dim=512, value_dim=512, rows=1000, backend="flat")
    faked_target("gpu", (9, 0)) if changes else faked_target("cpu", None)
    call |= changes
    assert op.attention_implementation(**call, implementation=None) == "xla"
    with pytest.raises(ValueError, match=f"'mosaic' cannot run here: .*{reason}"):
        op.attention_implementation(**call, implementation="mosaic")


@pytest.mark.lowering
def test_every_shape_that_it_takes_lowers_for_hopper():
    """What it says that it serves, forward and backward trace; what it does not take is refused by name."""
    shape, refused = jax.ShapeDtypeStruct, []
    with gpu_target("NVIDIA H200"):
        for head_dim in range(64, 640, 64):
            for value_dim in range(128, head_dim + 1, 128):
                q, kv = shape((1, 3, 64, head_dim), jnp.bfloat16), shape((1, 9, head_dim), jnp.bfloat16)
                args = q, kv, shape((1, 3, 64), jnp.int32), shape((64,), jnp.float32)
                g = shape((1, 3, 64, value_dim), jnp.bfloat16)
                run = jax.jit(partial(gradients, value_dim=value_dim, implementation="mosaic"))
                try:
                    run.trace(*args, g)
                except ValueError as error:
                    assert "'mosaic' cannot run here" in str(error)
                    refused.append((head_dim, value_dim))
    assert refused == [(448, 128), (512, 128), (576, 128), (576, 256)]
