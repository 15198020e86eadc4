"""Index tables against loops over single tokens, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import PADDING_STYLES, document_lengths, layout_ends, layout_segments
from program import assert_static_and_on_device

from dsv4_fusions import documents, kv_index

TOKENS, BATCH = 18, 3
OFFSET = 1000


def loop_documents(segments):
    """[start, end) of every document of one row of segment ids; None means one document."""
    starts = [t for t in range(len(segments)) if t == 0 or segments[t] != segments[t - 1]]
    return [(a, e) for a, e in zip(starts, [*starts[1:], len(segments)], strict=True) if segments[a] != 0]


def loop_window(segments, window):
    table = np.full((len(segments), window), -1)
    for a, e in loop_documents(segments):
        for t in range(a, e):
            seen = [k for k in range(a, t + 1) if t - k < window]
            table[t, : len(seen)] = seen
    return table


def loop_compressed(segments, ratio, offset):
    table = np.full((len(segments), len(segments) // ratio), -1)
    slot = 0
    for a, e in loop_documents(segments):
        for last in range(a + ratio - 1, e, ratio):
            table[last:e, slot] = slot + offset
            slot += 1
    return table


def loop_candidates(segments, window):
    """The candidates of every token, in a list."""
    candidates = [[] for _ in segments]
    for a, e in loop_documents(segments):
        for t in range(a, e):
            candidates[t] = [k for k in range(a, t + 1) if t - k >= window]
    return candidates


def batches(rows):
    return st.lists(rows, min_size=BATCH, max_size=BATCH)


batches_of_segments = batches(
    st.one_of(
        st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 2]), min_size=TOKENS, max_size=TOKENS),
        document_lengths(TOKENS).map(lambda lengths: layout_segments(lengths, TOKENS)),
    )
).map(lambda rows: np.array(rows, np.int32))

from_segment_ids = jax.jit(documents.from_segment_ids)
document_boundaries = jax.jit(documents.document_boundaries)
compressed_groups = jax.jit(documents.compressed_groups, static_argnums=1)
selected_index = jax.jit(kv_index.selected_index)


def near_and_far(tokens, window, ratio, boundaries=None, groups=None):
    """The fields of `Runs` that stand for the window and the compressed rows."""
    start, count = kv_index.visible_slots(tokens, ratio, groups)
    return *kv_index.window_run(tokens, window, boundaries), start + OFFSET, count


@jax.jit
def tables(boundaries):
    tokens = boundaries.doc_start.shape[-1]
    groups = {r: documents.compressed_groups(boundaries, r) for r in (1, 2, 5, 25)}
    return {
        "window": {w: kv_index.window_index(tokens, w, boundaries) for w in (1, 4, 30)},
        "compressed": {r: kv_index.compressed_index(tokens, r, OFFSET, g) for r, g in groups.items()},
        "causal": kv_index.causal_index(tokens, boundaries),
        "runs": {
            (w, r): kv_index.Runs(*near_and_far(tokens, w, r, boundaries, groups[r]), 30 + tokens // r).table()
            for w, r in ((1, 1), (4, 2), (30, 5), (4, 25))
        },
        "candidates": {w: kv_index.latent_candidates(tokens, w, boundaries) for w in (0, 1, 4, 30)},
    }


def assert_tables_equal_loops(got, segments):
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.int32)}
    for row in range(BATCH):
        for w, table in got["window"].items():
            np.testing.assert_array_equal(table[row], loop_window(segments[row], w))
        for r, table in got["compressed"].items():
            np.testing.assert_array_equal(table[row], loop_compressed(segments[row], r, OFFSET))
        np.testing.assert_array_equal(got["causal"][row], loop_window(segments[row], TOKENS))
        for (w, r), table in got["runs"].items():
            both = np.concatenate([loop_window(segments[row], w), loop_compressed(segments[row], r, OFFSET)], axis=1)
            for ids, wanted in zip(np.asarray(table[row]), both, strict=True):
                wanted = wanted[wanted >= 0]
                np.testing.assert_array_equal(ids, np.pad(wanted, (0, len(ids) - len(wanted)), constant_values=-1))
        for w, (start, count) in got["candidates"].items():
            candidates = loop_candidates(segments[row], w)
            np.testing.assert_array_equal(start[row], [min(rows, default=0) for rows in candidates])
            np.testing.assert_array_equal(count[row], [len(rows) for rows in candidates])


@settings(max_examples=60)
@given(batches_of_segments)
def test_tables_equal_a_loop(segments):
    assert_tables_equal_loops(tables(from_segment_ids(segments)), segments)


@settings(max_examples=40)
@given(batches(document_lengths(TOKENS)), st.sampled_from(PADDING_STYLES))
def test_padding_style_changes_no_table(lengths, style):
    ends = np.stack([layout_ends(x, TOKENS, style) for x in lengths])
    segments = np.stack([layout_segments(x, TOKENS) for x in lengths])
    assert_tables_equal_loops(tables(document_boundaries(ends)), segments)


@given(batches_of_segments)
def test_what_every_table_promises(segments):
    """No id twice in a row, none out of range, none of the future, none of another document; padding reads nothing."""
    boundaries = from_segment_ids(segments)
    got = tables(boundaries)
    pooled = {r: np.asarray(compressed_groups(boundaries, r).token_index) for r in got["compressed"]}
    for row in range(BATCH):
        document = np.zeros(TOKENS, int)
        for number, (a, e) in enumerate(loop_documents(segments[row]), start=1):
            document[a:e] = number
        for table in (*got["window"].values(), got["causal"]):
            for t, ids in enumerate(np.asarray(table[row])):
                ids = ids[ids >= 0]
                assert len(set(ids)) == len(ids)
                assert all(k <= t and document[k] == document[t] != 0 for k in ids)
                assert (t in ids) == (document[t] != 0)
        for r, table in got["compressed"].items():
            for t, ids in enumerate(np.asarray(table[row])):
                assert np.all((ids == -1) | ((ids >= OFFSET) & (ids < OFFSET + TOKENS // r)))
                slots = ids[ids >= 0] - OFFSET
                assert len(set(slots)) == len(slots)
                rows = pooled[r][row, slots]
                assert np.all(rows <= t) and np.all(document[rows] == document[t])
                assert document[t] != 0 or not len(slots)


@pytest.mark.parametrize("window", [0, 1, 4, 30])
@settings(max_examples=25)
@given(segments=batches_of_segments, seed=st.integers(0, 1000))
def test_window_and_selected_rows_are_all_that_a_token_may_see(window, segments, seed):
    """Every row once, in whatever order an indexer names them, and whatever else it names."""
    slots = np.random.default_rng(seed).permuted(
        np.broadcast_to(np.arange(-3, TOKENS + 3), (BATCH, TOKENS, TOKENS + 6)), axis=-1
    )
    got = tables(from_segment_ids(segments))
    selected = selected_index(slots, *got["candidates"][window], 0)
    assert selected.dtype == jnp.int32
    for row in range(BATCH):
        candidates = loop_candidates(segments[row], window)
        wanted = [[k if k in candidates[t] else -1 for k in slots[row, t]] for t in range(TOKENS)]
        np.testing.assert_array_equal(selected[row], wanted)
        near = got["window"][window][row] if window else np.full((TOKENS, 0), -1)
        together = np.sort(np.concatenate([near, selected[row]], axis=1), axis=1)[:, ::-1]
        np.testing.assert_array_equal(together[:, :TOKENS], np.sort(got["causal"][row], axis=1)[:, ::-1])
        assert np.all(together[:, TOKENS:] == -1)


@settings(max_examples=25)
@given(segments=batches_of_segments, seed=st.integers(0, 1000))
def test_all_slots_selected_are_the_compressed_table(segments, seed):
    groups = compressed_groups(from_segment_ids(segments), 2)
    slots = np.random.default_rng(seed).permuted(
        np.broadcast_to(np.arange(TOKENS // 2), (BATCH, TOKENS, TOKENS // 2)), axis=-1
    )
    selected = selected_index(slots, groups.row_start, groups.row_count, OFFSET)
    table = kv_index.compressed_index(TOKENS, 2, OFFSET, groups)
    np.testing.assert_array_equal(selected, np.take_along_axis(np.asarray(table), slots, axis=-1))


def test_selected_slots_with_and_without_a_batch():
    start, count = kv_index.latent_candidates(4, 2)
    selected = np.array([[0, 1, -1], [0, 1, 2], [1, 0, 7], [2, 1, 0]])
    wanted = np.array([[-1, -1, -1], [-1, -1, -1], [-1, 10, -1], [-1, 11, 10]])
    np.testing.assert_array_equal(kv_index.selected_index(selected, start, count, 10), wanted)
    both = kv_index.selected_index(np.stack([selected, selected[:, ::-1]]), start, count, 10)
    np.testing.assert_array_equal(both, [wanted, wanted[:, ::-1]])
    no_slot = kv_index.selected_index(np.zeros((2, 4, 0), int), start, count, 10)
    assert no_slot.shape == (2, 4, 0)


# --- the layout of a table ------------------------------------------------------------------------------------------


ROWS, WIDTH = 6, 9
rows_of_ids = st.lists(
    st.lists(st.sampled_from([-(2**31), -7, -1, -1, -1, 0, 0, 3, 8, 2**31 - 1]), min_size=WIDTH, max_size=WIDTH),
    min_size=ROWS,
    max_size=ROWS,
).map(lambda rows: np.array(rows, np.int32))
compact, trailing_length = jax.jit(kv_index.compact), jax.jit(kv_index.trailing_length)


@given(rows_of_ids)
def test_compact_and_trailing_length_equal_a_loop(index):
    (got, count), length = compact(index), trailing_length(index)
    assert got.dtype == count.dtype == length.dtype == jnp.int32
    for row in range(ROWS):
        ids = [i for i in index[row] if i >= 0]
        np.testing.assert_array_equal(got[row], ids + [-1] * (WIDTH - len(ids)))
        assert count[row] == len(ids)
        assert length[row] == max([1, *(column + 1 for column in range(WIDTH) if index[row, column] >= 0)])
    again, count_again = compact(got)
    np.testing.assert_array_equal(again, got)
    np.testing.assert_array_equal(count_again, count)
    np.testing.assert_array_equal(trailing_length(got), np.maximum(count, 1))


def test_compact_keeps_every_batch_entry_to_itself():
    index = np.array([[[5, -1, 2], [-1, -1, -1]], [[-9, 5, 5], [-1, -1, 0]]])
    got, count = kv_index.compact(index)
    np.testing.assert_array_equal(got, [[[5, 2, -1], [-1, -1, -1]], [[5, 5, -1], [0, -1, -1]]])
    np.testing.assert_array_equal(count, [[2, 0], [2, 1]])
    np.testing.assert_array_equal(kv_index.trailing_length(index), [[3, 1], [3, 3]])
    jax.tree.map(np.testing.assert_array_equal, jax.vmap(kv_index.compact)(index), (got, count))


@pytest.mark.parametrize("width, multiple, wanted", [(5, 4, 8), (8, 4, 8), (1, 64, 64), (65, 64, 128), (3, 1, 3)])
def test_pad_topk(width, multiple, wanted):
    index = np.arange(2 * 3 * width).reshape(2, 3, width)
    got = kv_index.pad_topk(index, multiple)
    assert got.shape == (2, 3, wanted) and got.dtype == jnp.int32
    np.testing.assert_array_equal(got[..., :width], index)
    assert np.all(got[..., width:] == -1)


def test_tables_without_a_column():
    index = np.zeros((2, 0), np.int32)
    ids, count = kv_index.compact(index)
    assert ids.shape == (2, 0) and count.tolist() == [0, 0]
    assert kv_index.trailing_length(index).tolist() == [1, 1]
    assert kv_index.pad_topk(index, 64).shape == (2, 0)


def test_x64_changes_no_dtype():
    index = np.array([[3, -1, 2]])
    with jax.enable_x64(True):
        got = [
            kv_index.compact(index),
            kv_index.trailing_length(index),
            kv_index.pad_topk(index, 4),
            kv_index.latent_candidates(3, 1),
            kv_index.selected_index(index, *kv_index.latent_candidates(1, 0), 5),
        ]
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.int32)}


# --- special sizes and refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 18])
@pytest.mark.parametrize("ratio", [1, 4])
def test_without_boundaries_the_sequence_is_one_document(tokens, ratio):
    one = np.ones(tokens, int)
    boundaries = documents.from_segment_ids(one)
    for window in (1, 4, 30):
        got = kv_index.window_index(tokens, window)
        np.testing.assert_array_equal(got, loop_window(one, window))
        np.testing.assert_array_equal(got, kv_index.window_index(tokens, window, boundaries))
    got = kv_index.compressed_index(tokens, ratio, OFFSET)
    np.testing.assert_array_equal(got, loop_compressed(one, ratio, OFFSET))
    np.testing.assert_array_equal(
        got, kv_index.compressed_index(tokens, ratio, OFFSET, documents.compressed_groups(boundaries, ratio))
    )
    np.testing.assert_array_equal(kv_index.causal_index(tokens), loop_window(one, tokens))
    for window in (0, 1, 4, 30):
        got = kv_index.latent_candidates(tokens, window)
        jax.tree.map(np.testing.assert_array_equal, got, kv_index.latent_candidates(tokens, window, boundaries))
        np.testing.assert_array_equal(got[1], [len(rows) for rows in loop_candidates(one, window)])


def test_sequence_shorter_than_the_ratio_has_no_slot():
    assert kv_index.compressed_index(3, 4, 3).shape == (3, 0)


def test_empty_sequence():
    assert kv_index.window_index(0, 4).shape == (0, 4)
    assert kv_index.compressed_index(0, 4, 0).shape == (0, 0)
    assert kv_index.causal_index(0).shape == (0, 0)
    start, count = kv_index.latent_candidates(0, 4)
    assert kv_index.selected_index(np.zeros((0, 3), int), start, count, 0).shape == (0, 3)


def test_lowered_text_has_no_callback_and_no_dynamic_shape():
    def everything(segments, index):
        got = tables(documents.from_segment_ids(segments))
        selected = kv_index.selected_index(index, *got["candidates"][4], 0)
        return got, kv_index.compact(selected), kv_index.trailing_length(selected), kv_index.pad_topk(selected, 64)

    shapes = (jax.ShapeDtypeStruct((2, 512), jnp.int32), jax.ShapeDtypeStruct((2, 512, 30), jnp.int32))
    assert_static_and_on_device(jax.jit(everything).lower(*shapes).as_text())


def test_wrong_arguments():
    boundaries = documents.from_segment_ids(np.ones((2, 8), int))
    groups = documents.compressed_groups(boundaries, 2)
    with pytest.raises(ValueError, match="window: got 0, wanted at least 1"):
        kv_index.window_index(8, 0)
    with pytest.raises(ValueError, match="window: got 0"):
        kv_index.window_run(8, 0)
    with pytest.raises(ValueError, match="ratio: got 0, wanted at least 1"):
        kv_index.compressed_index(8, 0, 8)
    with pytest.raises(ValueError, match="boundaries: got 8 tokens, wanted num_tokens = 9"):
        kv_index.window_index(9, 4, boundaries)
    with pytest.raises(ValueError, match="boundaries: got 8 tokens, wanted num_tokens = 9"):
        kv_index.causal_index(9, boundaries)
    with pytest.raises(ValueError, match="groups: got 8 tokens, wanted num_tokens = 9"):
        kv_index.compressed_index(9, 2, 9, groups)
    with pytest.raises(ValueError, match="groups: got a ratio of 2, wanted 4"):
        kv_index.compressed_index(8, 4, 8, groups)
    with pytest.raises(ValueError, match="window: got -1, wanted at least 0"):
        kv_index.latent_candidates(8, -1)
    with pytest.raises(ValueError, match="boundaries: got 8 tokens, wanted num_tokens = 9"):
        kv_index.latent_candidates(9, 4, boundaries)
    start, count = kv_index.latent_candidates(8, 4)
    with pytest.raises(ValueError, match=r"row_start: got shape \(8,\), wanted \[..., 7\] to go with"):
        kv_index.selected_index(np.zeros((7, 2), int), start, count, 0)
    with pytest.raises(ValueError, match=r"row_count: got shape \(7,\), wanted \[..., 8\] to go with"):
        kv_index.selected_index(np.zeros((8, 2), int), start, count[:7], 0)
    with pytest.raises(ValueError, match=r"selected: got shape \(8,\), wanted \[..., tokens, k\]"):
        kv_index.selected_index(np.zeros(8, int), start, count, 0)
    with pytest.raises(TypeError, match="selected: got dtype float32, wanted integers"):
        kv_index.selected_index(np.zeros((8, 2), np.float32), start, count, 0)
    with pytest.raises(ValueError, match="multiple: got 0, wanted at least 1"):
        kv_index.pad_topk(np.zeros((8, 2), int), 0)


@pytest.mark.parametrize("function", [kv_index.compact, kv_index.trailing_length, lambda x: kv_index.pad_topk(x, 4)])
def test_wrong_tables(function):
    with pytest.raises(TypeError, match="index: got dtype float32, wanted integers"):
        function(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="index: got a scalar"):
        function(np.int32(3))
    with pytest.raises(ValueError, match="index: got int64 values .*, wanted values within int32"):
        function(np.array([2**32 + 5]))
