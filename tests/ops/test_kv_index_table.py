"""The flat table written at once: against a NumPy loop and against the steps that it stands for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from layouts import document_lengths, layout_segments
from program import cuda_kernels, gpu_target, kernel_names, lower_for_cuda
from remap_oracle import flat_ids

from dsv4_fusions import dispatch, kv_index
from dsv4_fusions.documents import compressed_groups, from_segment_ids
from dsv4_fusions.kv_index import Selection, Span
from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index
from dsv4_fusions.ops.kv_index_table import flat_kv_index_table, table_implementation
from dsv4_fusions.testing import assert_trees_bitwise_equal

NAME = "flat_kv_index_table"


def random_parts(batch, tokens, widths, kv_len, dtype=np.int32, seed=0):
    """Spans and selections in turn, of random bounds; ids before, behind and far outside the rows among them."""
    rng = np.random.default_rng(seed)
    draw = lambda low, high, *shape: rng.integers(low, high, (batch, tokens, *shape), np.int32)  # noqa: E731
    parts = []
    for number, width in enumerate(widths):
        start, count = draw(-2, width + 2), draw(-1, width + 2)
        if number % 2 == 0:
            base = np.where(draw(0, 9) == 0, 2**31 - 3, draw(-width, kv_len))
            parts.append(Span(jnp.asarray(base, jnp.int32), jnp.asarray(start), jnp.asarray(count), width))
        else:
            selected = jnp.asarray(draw(-1, width + 1, width).astype(dtype))
            parts.append(kv_index.selection(selected, jnp.asarray(start), jnp.asarray(count), kv_len // 3))
    return tuple(parts)


def loop_row(parts, entry, token, kv_len):
    """One row of the local table, slot by slot from the definitions."""
    row = []
    for part in parts:
        if isinstance(part, Span):
            base, first, count = (int(x[entry, token]) for x in (part.base, part.first, part.count))
            row += [base + j if first <= j < first + count else -1 for j in range(part.width)]
        else:
            start, count = (int(x[entry, token]) for x in (part.row_start, part.row_count))
            slots = [int(j) for j in part.selected[entry, token]]
            row += [j + part.offset if start <= j < start + count else -1 for j in slots]
    return [i if 0 <= i < kv_len else -1 for i in row]


def loop_table(parts, batch, tokens, kv_len, multiple, compact):
    parts = [jax.tree.map(np.asarray, part) for part in parts]
    rows, counts = [], []
    for entry, token in np.ndindex(batch, tokens):
        row = [i if i < 0 else i + entry * kv_len for i in loop_row(parts, entry, token, kv_len)]
        ids = [i for i in row if i >= 0]
        row = ids + [-1] * (len(row) - len(ids)) if compact else row
        rows.append(row + [-1] * (-len(row) % multiple))
        counts.append(len(ids))
    table = np.array(rows, np.int32)
    return (table, np.array(counts, np.int32)) if compact else table


def compiled(parts, batch, kv_len, implementation, **how):
    run = partial(flat_kv_index_table, batch=batch, kv_len=kv_len, implementation=implementation, **how)
    with dispatch.interpret():
        return jax.jit(run)(parts)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    "batch, tokens, widths, multiple",
    [
        (1, 1, (1,), 1),
        (3, 5, (4, 6), 1),
        (2, 9, (7, 130, 3, 129), 64),  # parts and a table that end inside a chunk of columns, rows inside one of rows
        (2, 8, (128, 128), 128),
        (2, 3, (300,), 512),  # more columns of padding than there are ids
    ],
    ids=str,
)
def test_against_the_loop(batch, tokens, widths, multiple, compact, implementation):
    parts = random_parts(batch, tokens, widths, 40)
    how = dict(multiple=multiple, compact=compact)
    got = compiled(parts, batch, 40, implementation, **how)
    assert_trees_bitwise_equal(got, loop_table(parts, batch, tokens, 40, **how))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_selected_slots_of_any_integer_type(dtype, implementation):
    with jax.enable_x64(dtype == np.int64):
        parts = random_parts(2, 5, (3, 6), 50, dtype)
        if dtype == np.int64:  # their low 32 bits would be slots
            wide = parts[1].selected.at[:, ::2].add(2**32)
            parts = parts[0], kv_index.selection(wide, parts[1].row_start, parts[1].row_count, 16)
        got = compiled(parts, 2, 50, implementation, compact=True)
        assert_trees_bitwise_equal(got, loop_table(parts, 2, 5, 50, 1, True))


@settings(max_examples=25)
@given(data=st.data(), ratio=st.sampled_from([1, 4, 26]), compact=st.booleans())
def test_tables_of_layers(data, ratio, compact):
    """Window and compressed ids of packed documents, and of none: the same integers as step by step."""
    segments = np.stack([layout_segments(data.draw(document_lengths(26)), 26) for _ in range(2)])
    assert_layers_table_is_the_steps(jnp.asarray(segments), ratio, compact)


@partial(jax.jit, static_argnums=(1, 2))
def layers_table(segments, ratio, compact):
    boundaries = from_segment_ids(segments)
    groups = compressed_groups(boundaries, ratio)
    kv_len, how = 26 + 26 // ratio, dict(multiple=8, compact=compact)
    parts = kv_index.window_span(26, 5, boundaries), kv_index.compressed_span(26, ratio, 26, groups)
    local = kv_index.joined(kv_index.window_index(26, 5, boundaries), kv_index.compressed_index(26, ratio, 26, groups))
    flat = local_to_flat_kv_index(local, kv_len, "xla")
    flat, count = kv_index.compact(flat) if compact else (flat, None)
    steps = (kv_index.pad_topk(flat, 8), count) if compact else kv_index.pad_topk(flat, 8)
    return steps, *(flat_kv_index_table(parts, 2, kv_len, implementation=name, **how) for name in ("xla", "triton"))


def assert_layers_table_is_the_steps(segments, ratio, compact):
    with dispatch.interpret():
        steps, *got = layers_table(segments, ratio, compact)
    for table in got:
        assert_trees_bitwise_equal(table, steps)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_parts_without_a_batch_axis_serve_every_entry(implementation):
    """A table without documents, and a span for all entries beside slots of each."""
    window = kv_index.window_span(6, 4)
    local = np.broadcast_to(np.asarray(window.table()), (3, 6, 4))
    assert_trees_bitwise_equal(compiled((window,), 3, 9, implementation), flat_ids(local, 9))
    _, own = random_parts(3, 6, (1, 5), 9)
    local = np.concatenate([local, np.asarray(own.table())], axis=-1)
    local = np.where((local >= 0) & (local < 9), local, -1)
    assert_trees_bitwise_equal(compiled((window, own), 3, 9, implementation), flat_ids(local, 9))
    one = jax.tree.map(lambda x: x[None], window)
    assert_trees_bitwise_equal(compiled((one, own), 3, 9, implementation), flat_ids(local, 9))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_rows_up_to_the_last_flat_id(implementation):
    """The last row of the last entry is 2^31 - 2: nothing may wrap on the way, beside ids that would."""
    kv_len = (2**31 - 1) // 2
    base = jnp.array([[kv_len - 3, 0], [kv_len - 3, 2**31 - 2]], jnp.int32)
    span = Span(base, jnp.zeros_like(base), jnp.full_like(base, 5), 5)
    got = compiled((span,), 2, kv_len, implementation)
    last = 2 * kv_len - 1
    wanted = [[kv_len - 3, kv_len - 2, kv_len - 1, -1, -1], [0, 1, 2, 3, 4], [last - 2, last - 1, last, -1, -1]]
    assert_trees_bitwise_equal(got, np.array([*wanted, [-1] * 5], np.int32))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("tokens, width", [(0, 4), (4, 0)])
def test_empty_axes(tokens, width, implementation):
    zeros = jnp.zeros((2, tokens), jnp.int32)
    table, count = compiled((Span(zeros, zeros, zeros, width),), 2, 7, implementation, multiple=8, compact=True)
    assert table.shape == (2 * tokens, 8 if width else 0) and not np.any(count) and np.all(table == -1)


# --- transformations and programs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmap_and_scan(implementation):
    stacked = [random_parts(2, 5, (3, 6), 50, seed=seed) for seed in range(3)]
    wanted = np.stack([loop_table(parts, 2, 5, 50, 1, False) for parts in stacked])
    parts = jax.tree.map(lambda *x: jnp.stack(x), *stacked)
    run = lambda parts: flat_kv_index_table(parts, 2, 50, implementation=implementation)  # noqa: E731
    with dispatch.interpret():
        assert_trees_bitwise_equal(jax.jit(jax.vmap(run))(parts), wanted)
        got = jax.jit(lambda parts: jax.lax.scan(lambda carry, x: (carry, run(x)), 0, parts)[1])(parts)
    assert_trees_bitwise_equal(got, wanted)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_shard_map(implementation, mesh4):
    """Rows are numbered through the batch entries of the shard: each device holds the KV of its own."""
    parts, spec = random_parts(8, 5, (3, 6), 50), PartitionSpec("data")
    run = jax.shard_map(
        lambda parts: flat_kv_index_table(parts, 2, 50, implementation=implementation),
        mesh=mesh4,
        in_specs=spec,
        out_specs=spec,
        check_vma=implementation != "triton",  # JAX's interpreter of kernels pads with a constant that it refuses
    )
    with dispatch.interpret():
        got = jax.jit(run)(parts)
    shards = [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], parts) for i in range(4)]
    assert_trees_bitwise_equal(got, np.concatenate([loop_table(shard, 2, 5, 50, 1, False) for shard in shards]))


@pytest.mark.lowering
def test_shard_map_lowers_for_cuda():
    """Parts that vary over the mesh beside one that does not."""
    spec = PartitionSpec("d")
    with gpu_target(devices=4):
        mesh = jax.sharding.get_abstract_mesh()
    window = kv_index.window_span(5, 3)
    run = jax.shard_map(
        lambda own: flat_kv_index_table((window, own), 2, 50, implementation="triton"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    _, own = random_parts(8, 5, (1, 6), 50)
    assert cuda_kernels(lower_for_cuda(run, jax.eval_shape(lambda: own), devices=4)) == [NAME]


@pytest.mark.lowering
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_lowers_for_cuda(compact, x64):
    """One kernel and no pass over the table beside it, for ids of V4-Flash's layers."""
    with jax.enable_x64(x64):
        ids = jax.ShapeDtypeStruct((2, 4096, 512), jnp.int64 if x64 else jnp.int32)
        row = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
        parts = Span(row, row, row, 128), Selection(ids, row, row, 4096)
        run = partial(flat_kv_index_table, batch=2, kv_len=5120, multiple=128, compact=compact)
        text = lower_for_cuda(lambda parts: run(parts, implementation="triton"), parts)
        assert cuda_kernels(text) == [NAME]
        assert not any(f"stablehlo.{op}" in text for op in ("concatenate", "sort", "pad", "select", "add"))


@pytest.mark.parametrize("serves", [True, False])
def test_the_kernel_is_chosen_where_it_runs(serves, faked_target):
    faked_target("gpu", (8, 0) if serves else (7, 5))
    window = (kv_index.window_span(5, 3),)
    names = kernel_names(jax.make_jaxpr(lambda x: flat_kv_index_table(x, 2, 9))(window))
    assert names == [NAME] * serves and table_implementation(30) == ("triton" if serves else "xla")
    assert table_implementation(2**31) == "xla"
    assert kernel_names(jax.make_jaxpr(lambda x: flat_kv_index_table(x, 2, 9, implementation="xla"))(window)) == []


def test_not_differentiable():
    """Inside a differentiated function it is a constant."""
    parts = random_parts(2, 5, (3, 6), 50)

    def weighted(x):
        return jnp.sum(x * flat_kv_index_table(parts, 2, 50))

    assert jax.grad(weighted)(2.0) == np.sum(loop_table(parts, 2, 5, 50, 1, False))


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(parts=()), "parts: got no parts, wanted at least one Span or Selection"),
        (dict(batch=0), "batch: got 0, wanted at least 1"),
        (dict(kv_len=0), "kv_len: got 0, wanted at least 1"),
        (dict(kv_len=2**30), r"kv_len: got 2 x 1073741824 rows, wanted fewer than 2\*\*31 for flat int32 ids"),
        (dict(multiple=0), "multiple: got 0, wanted at least 1"),
        (dict(implementation="cuda"), "implementation: got 'cuda'"),
        (dict(implementation="mosaic"), "implementation: got 'mosaic'"),
        (dict(batch=3), r"parts: got shapes \(2, 5, 3\), \(2, 5, 6\), wanted \[tokens, k\] or \[3, tokens, k\]"),
    ],
)
def test_wrong_arguments(changes, match):
    arguments = dict(parts=random_parts(2, 5, (3, 6), 50), batch=2, kv_len=50) | changes
    with pytest.raises(ValueError, match=match):
        flat_kv_index_table(**arguments)


def test_parts_of_other_tokens():
    with pytest.raises(ValueError, match=r"parts: got shapes \(5, 3\), \(6, 3\)"):
        flat_kv_index_table((kv_index.window_span(5, 3), kv_index.window_span(6, 3)), 2, 50)


def test_where_no_kernel_runs(monkeypatch):
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "1")
    with pytest.raises(ValueError, match="'triton' cannot run here"):
        flat_kv_index_table(random_parts(2, 5, (3, 6), 50), 2, 50, implementation="triton")
