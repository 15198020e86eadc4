"""Documents and their groups against loops over single tokens, written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import PADDING_STYLES, document_lengths, layout_ends, layout_segments
from program import assert_static_and_on_device

from dsv4_fusions import documents

TOKENS, BATCH = 24, 4


def loop_boundaries(ends):
    """The definition for one row of end rows, one token at a time."""
    start, out = 0, []
    for t, end in enumerate(ends):
        if t == 0 or (t == ends[t - 1] and end != ends[t - 1]):
            start = t
        out.append((start, end - start, t - start, t - start < end - start))
    return [np.array(column) for column in zip(*out, strict=True)]


def cummax_boundaries(ends):
    """The older derivation: the running maximum of the boundary rows."""
    rows = np.arange(len(ends))
    boundary = np.concatenate([[True], (rows[1:] == ends[:-1]) & (ends[1:] != ends[:-1])])
    start = np.maximum.accumulate(boundary * rows)
    return [start, ends - start, rows - start, rows - start < ends - start]


def loop_runs(segments):
    """[start, end) of every document of one row of segment ids."""
    runs, t = [], 0
    while t < len(segments):
        end = t
        while end < len(segments) and segments[end] == segments[t]:
            end += 1
        if segments[t] != 0:
            runs.append((t, end))
        t = end
    return runs


batches_of_ends = st.lists(
    st.builds(layout_ends, document_lengths(TOKENS), st.just(TOKENS), st.sampled_from(PADDING_STYLES)),
    min_size=BATCH,
    max_size=BATCH,
).map(np.stack)
batches_of_segments = st.lists(
    st.lists(st.sampled_from([0, 0, 1, 1, 1, 2, 7]), min_size=TOKENS, max_size=TOKENS), min_size=BATCH, max_size=BATCH
).map(lambda rows: np.array(rows, np.int32))

document_boundaries = jax.jit(documents.document_boundaries)
from_segment_ids = jax.jit(documents.from_segment_ids)
compressed_groups = jax.jit(documents.compressed_groups, static_argnums=1)


def fields(boundaries, row=()):
    return [
        np.asarray(x)[row]
        for x in (boundaries.doc_start, boundaries.doc_len, boundaries.pos_in_doc, boundaries.is_valid)
    ]


@given(batches_of_ends)
def test_new_and_old_derivation_agree(ends):
    got = document_boundaries(ends)
    for row in range(BATCH):
        for new, old, loop in zip(
            fields(got, row), cummax_boundaries(ends[row]), loop_boundaries(ends[row]), strict=True
        ):
            np.testing.assert_array_equal(new, old)
            np.testing.assert_array_equal(new, loop)


@pytest.mark.parametrize("style", PADDING_STYLES)
def test_padding_styles(style):
    """5, 14, 3 and 8 tokens and two of padding: the padding keeps counting behind the last document, invalid."""
    ends = layout_ends([5, 14, 3, 8], 32, style)
    assert list(ends[-2:]) == ([30, 30] if style == "repeat" else [30, 31])
    got = documents.document_boundaries(ends)
    assert all(x.dtype == jnp.int32 for x in (got.doc_start, got.doc_len, got.pos_in_doc))
    assert got.is_valid.dtype == jnp.bool_
    np.testing.assert_array_equal(got.doc_start, np.repeat([0, 5, 19, 22], [5, 14, 3, 10]))
    np.testing.assert_array_equal(got.pos_in_doc, [*range(5), *range(14), *range(3), *range(10)])
    np.testing.assert_array_equal(got.is_valid, np.arange(32) < 30)
    np.testing.assert_array_equal(got.doc_len[:31], np.repeat([5, 14, 3, 8], [5, 14, 3, 9]))
    assert got.doc_len[31] == (8 if style == "repeat" else 9)


@given(batches_of_segments)
def test_segment_ids_equal_a_loop(segments):
    got = from_segment_ids(segments)
    for row in range(BATCH):
        start, length, pos, valid = fields(got, row)
        np.testing.assert_array_equal(valid, segments[row] != 0)
        np.testing.assert_array_equal(valid, pos < length)
        for a, e in loop_runs(segments[row]):
            np.testing.assert_array_equal(start[a:e], a)
            np.testing.assert_array_equal(length[a:e], e - a)
            np.testing.assert_array_equal(pos[a:e], np.arange(e - a))


def test_the_same_id_after_another_one_is_a_new_document():
    got = documents.from_segment_ids(np.array([1, 1, 2, 1, 1, 1]))
    np.testing.assert_array_equal(got.doc_start, [0, 0, 2, 3, 3, 3])
    np.testing.assert_array_equal(got.pos_in_doc, [0, 1, 0, 0, 1, 2])


def test_the_same_id_after_padding_is_a_new_document():
    got = documents.from_segment_ids(np.array([4, 4, 0, 4, 4, 4, 0, 0]))
    np.testing.assert_array_equal(got.is_valid, [1, 1, 0, 1, 1, 1, 0, 0])
    np.testing.assert_array_equal(got.pos_in_doc[3:6], [0, 1, 2])
    np.testing.assert_array_equal(got.doc_len, [2, 2, 0, 3, 3, 3, 0, 0])


def test_end_rows_of_segment_ids():
    segments = np.array([[0, 3, 3, 5, 5, 5, 0, 0], [2, 2, 2, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]], np.int8)
    ends = documents.end_rows(segments)
    assert ends.dtype == jnp.int32
    np.testing.assert_array_equal(ends, [[1, 3, 3, 6, 6, 6, 6, 6], [8] * 8, [0] * 8])


def loop_groups(segments, ratio):
    """Rows, first position and [first slot, count) per token, for one row of segment ids."""
    groups, positions, visible = [], [], np.zeros((len(segments), 2), int)
    for a, e in loop_runs(segments):
        before = len(groups)
        for g in range((e - a) // ratio):
            groups.append(list(range(a + g * ratio, a + (g + 1) * ratio)))
            positions.append(g * ratio)
        for t in range(a, e):
            complete = sum(rows[-1] <= t for rows in groups[before:])
            visible[t] = (before, complete) if complete else (0, 0)
    return groups, positions, visible


@pytest.mark.parametrize("ratio", [1, 2, 5, 24, 25])
@settings(max_examples=25)
@given(segments=batches_of_segments)
def test_compressed_groups_equal_a_loop(ratio, segments):
    got = compressed_groups(from_segment_ids(segments), ratio)
    slots = TOKENS // ratio
    assert got.token_index.shape == (BATCH, slots, ratio)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.int32), jnp.dtype(bool)}
    assert np.all((np.asarray(got.token_index) >= 0) & (np.asarray(got.token_index) < TOKENS))
    for row in range(BATCH):
        groups, positions, visible = loop_groups(segments[row], ratio)
        n = len(groups)
        np.testing.assert_array_equal(got.is_group[row], np.arange(slots) < n)
        np.testing.assert_array_equal(got.token_index[row, :n], np.reshape(groups, (n, ratio)))
        np.testing.assert_array_equal(got.pos_in_doc[row], positions + [0] * (slots - n))
        np.testing.assert_array_equal(got.is_first[row], [p == 0 for p in positions] + [False] * (slots - n))
        np.testing.assert_array_equal(got.row_start[row], visible[:, 0])
        np.testing.assert_array_equal(got.row_count[row], visible[:, 1])


@pytest.mark.parametrize("style", PADDING_STYLES)
def test_compressed_groups_do_not_depend_on_the_padding_style(style):
    """Documents shorter than the ratio, of one token, and of exactly the ratio."""
    lengths = [1, 3, 4, 1, 9, 2]
    got = documents.compressed_groups(documents.document_boundaries(layout_ends(lengths, TOKENS, style)), 4)
    segments = layout_segments(lengths, TOKENS)
    groups, positions, visible = loop_groups(segments, 4)
    np.testing.assert_array_equal(got.token_index[: len(groups)], groups)
    np.testing.assert_array_equal(got.is_group, np.arange(6) < len(groups))
    np.testing.assert_array_equal(np.stack([got.row_start, got.row_count], -1), visible)


def everything(ends, segments):
    boundaries = documents.document_boundaries(ends), documents.from_segment_ids(segments)
    return boundaries, [documents.compressed_groups(b, 4) for b in boundaries]


def test_more_batch_axes_and_vmap_give_each_row_its_own():
    segments = np.random.default_rng(0).integers(0, 3, (2, 3, TOKENS))
    ends = np.stack([[layout_ends([i + 1, 5 - j, 7], TOKENS, "repeat") for j in range(3)] for i in range(2)])
    together = everything(ends, segments)
    for mapped in (jax.vmap(jax.vmap(everything))(ends, segments), jax.vmap(everything, 1, 1)(ends, segments)):
        jax.tree.map(np.testing.assert_array_equal, mapped, together)
    for i in range(2):
        for j in range(3):
            alone = everything(ends[i, j], segments[i, j])
            jax.tree.map(lambda a, b, at=(i, j): np.testing.assert_array_equal(a, b[at]), alone, together)
    _, scanned = jax.lax.scan(lambda carry, x: (carry, everything(*x)), 0, (ends, segments))
    jax.tree.map(np.testing.assert_array_equal, scanned, together)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 5)])
def test_empty_axes(shape):
    boundaries = documents.from_segment_ids(np.zeros(shape, np.int32))
    groups = documents.compressed_groups(boundaries, 2)
    assert boundaries.doc_start.shape == shape
    assert groups.token_index.shape == (*shape[:-1], shape[-1] // 2, 2)


def test_lowered_text_has_no_callback_and_no_dynamic_shape():
    rows = jax.ShapeDtypeStruct((2, 4096), jnp.int32)
    text = jax.jit(everything).lower(rows, rows).as_text()
    assert_static_and_on_device(text)


def test_x64_changes_no_dtype():
    with jax.enable_x64(True):
        got = documents.from_segment_ids(np.array([1, 1, 0, 2]))
        groups = documents.compressed_groups(got, 2)
    assert {x.dtype for x in jax.tree.leaves((got, groups))} == {jnp.dtype(jnp.int32), jnp.dtype(bool)}


def test_equality_is_identity():
    """A comparison field by field would ask for the truth of an array."""
    made = [documents.from_segment_ids(np.ones(4, int)) for _ in range(2)]
    for one, other in (made, [documents.compressed_groups(boundaries, 2) for boundaries in made]):
        assert one == one and one != other and len({one, other}) == 2


def test_shard_map_over_the_batch(mesh4):
    spec = jax.sharding.PartitionSpec("data")
    segments = np.random.default_rng(1).integers(0, 3, (8, TOKENS))
    ends = np.stack([layout_ends([i + 1, 9 - i], TOKENS, "repeat") for i in range(8)])
    sharded = jax.jit(jax.shard_map(everything, mesh=mesh4, in_specs=spec, out_specs=spec, check_vma=True))
    jax.tree.map(np.testing.assert_array_equal, sharded(ends, segments), everything(ends, segments))


@pytest.mark.parametrize("function", [documents.end_rows, documents.document_boundaries, documents.from_segment_ids])
def test_wrong_input(function):
    with pytest.raises(TypeError, match=r"(segment_ids|end_rows): got dtype float32, wanted integers"):
        function(jnp.ones((4,), jnp.float32))
    with pytest.raises(ValueError, match=r"(segment_ids|end_rows): got a scalar"):
        function(jnp.int32(4))


def test_ratio_must_be_positive():
    with pytest.raises(ValueError, match="ratio: got 0, wanted at least 1"):
        documents.compressed_groups(documents.from_segment_ids(np.ones(4, int)), 0)


@pytest.mark.parametrize("function", [documents.document_boundaries, documents.from_segment_ids])
def test_ids_that_jax_would_wrap_raise(function):
    # Wrapped, the second document would be the first one, and its tokens would see each other.
    with pytest.raises(ValueError, match="wanted values within int32"):
        function(np.array([5, 5, 2**32 + 5]))


def test_ids_and_ends_of_64_bits_are_told_apart():
    """Where JAX has 64-bit integers: ids that are equal in their low halves, one of them 0, and an end past any row."""
    with jax.enable_x64(True):
        wide = from_segment_ids(jnp.array([1, 1, 1 + 2**32, 2**32, 0], jnp.int64))
        narrow = from_segment_ids(jnp.array([1, 1, 2, 3, 0], jnp.int32))
        jax.tree.map(np.testing.assert_array_equal, wide, narrow)
        far = document_boundaries(jnp.array([3, 3, 3, 2**32 + 3], jnp.int64))
        near = document_boundaries(jnp.array([3, 3, 3, 5], jnp.int32))
        jax.tree.map(np.testing.assert_array_equal, far.is_valid, near.is_valid)
        jax.tree.map(np.testing.assert_array_equal, far.doc_start, near.doc_start)
