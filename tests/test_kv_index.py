"""Index tables against loops over single tokens, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


batches_of_segments = st.lists(
    st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 2]), min_size=TOKENS, max_size=TOKENS), min_size=BATCH, max_size=BATCH
).map(lambda rows: np.array(rows, np.int32))


@jax.jit
def tables(segments):
    boundaries = documents.from_segment_ids(segments)
    tokens = segments.shape[-1]
    return {
        "window": {w: kv_index.window_index(tokens, w, boundaries) for w in (1, 4, 30)},
        "compressed": {
            r: kv_index.compressed_index(tokens, r, OFFSET, documents.compressed_groups(boundaries, r))
            for r in (1, 2, 5)
        },
        "causal": kv_index.causal_index(tokens, boundaries),
    }


@settings(max_examples=60)
@given(batches_of_segments)
def test_tables_equal_a_loop(segments):
    got = tables(segments)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.int32)}
    for row in range(BATCH):
        for w, table in got["window"].items():
            np.testing.assert_array_equal(table[row], loop_window(segments[row], w))
        for r, table in got["compressed"].items():
            np.testing.assert_array_equal(table[row], loop_compressed(segments[row], r, OFFSET))
        np.testing.assert_array_equal(got["causal"][row], loop_window(segments[row], TOKENS))


@given(batches_of_segments)
def test_what_every_table_promises(segments):
    """No id twice in a row, none out of range, none of the future, none of another document; padding reads nothing."""
    got = tables(segments)
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
        for table in got["compressed"].values():
            ids = np.asarray(table[row])
            assert np.all((ids == -1) | ((ids >= OFFSET) & (ids < OFFSET + table.shape[-1])))
            assert np.all(ids[document == 0] == -1)


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


@pytest.mark.parametrize("style", ["repeat", "diagonal"])
def test_padding_style_changes_no_table(style):
    padding = [15, 15, 15] if style == "repeat" else [15, 16, 17]
    boundaries = documents.document_boundaries(np.array([6] * 6 + [7] + [15] * 8 + padding))
    segments = np.repeat([1, 2, 3, 0], [6, 1, 8, 3])
    np.testing.assert_array_equal(kv_index.window_index(18, 4, boundaries), loop_window(segments, 4))
    np.testing.assert_array_equal(kv_index.causal_index(18, boundaries), loop_window(segments, 18))
    groups = documents.compressed_groups(boundaries, 2)
    np.testing.assert_array_equal(kv_index.compressed_index(18, 2, 18, groups), loop_compressed(segments, 2, 18))


def test_sequence_shorter_than_the_ratio_has_no_slot():
    assert kv_index.compressed_index(3, 4, 3).shape == (3, 0)


def test_empty_sequence():
    assert kv_index.window_index(0, 4).shape == (0, 4)
    assert kv_index.compressed_index(0, 4, 0).shape == (0, 0)
    assert kv_index.causal_index(0).shape == (0, 0)


def test_lowered_text_has_no_callback_and_no_dynamic_shape():
    text = tables.lower(jax.ShapeDtypeStruct((2, 512), jnp.int32)).as_text()
    assert_static_and_on_device(text)


def test_wrong_arguments():
    boundaries = documents.from_segment_ids(np.ones((2, 8), int))
    groups = documents.compressed_groups(boundaries, 2)
    with pytest.raises(ValueError, match="window: got 0, wanted at least 1"):
        kv_index.window_index(8, 0)
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
