import collections
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_fusions.training import text


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12), st.integers(1, 17))
def test_packing_keeps_every_byte_and_every_pair_once(documents, row_length):
    rows = text.pack(documents, row_length)
    kept = rows.segment_ids > 0
    assert collections.Counter(rows.tokens[kept].tolist()) == collections.Counter(b"".join(documents))
    pairs = collections.Counter(pair for document in documents for pair in zip(document, document[1:], strict=False))
    assert collections.Counter(zip(rows.tokens[rows.has_target], rows.targets[rows.has_target], strict=True)) == pairs
    assert not rows.has_target[~kept].any() and not rows.tokens[~kept].any()


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=12), st.integers(1, 17))
def test_segments_are_contiguous_pieces_of_documents(documents, row_length):
    rows = text.pack(documents, row_length)
    for tokens, segments in zip(rows.tokens, rows.segment_ids, strict=True):
        used = segments[segments > 0]
        assert (segments[: len(used)] == used).all() and used[0] == 1  # padding only at the end
        assert np.isin(np.diff(used), (0, 1)).all()
        for segment in range(1, used[-1] + 1):
            piece = bytes(tokens[segments == segment].astype(np.uint8))
            assert any(piece in document for document in documents)


def first_fit(lengths, row_length):
    """The definition, one row after another."""
    room, rows = [], []
    for length in lengths:
        row = next((row for row, free in enumerate(room) if free >= length), len(room))
        if row == len(room):
            room.append(row_length)
        room[row] -= length
        rows.append(row)
    return rows


@given(st.lists(st.integers(1, 17), max_size=60), st.integers(17, 60))
def test_every_piece_goes_into_the_first_row_with_room(lengths, row_length):
    assert text._first_rows_with_room(lengths, row_length) == first_fit(lengths, row_length)


@pytest.mark.parametrize(
    "documents, row_length",
    [
        ([bytes(range(256)) * 2**15], 500),  # 8 MB that fill their rows
        ([b"x" * 9] * 150_000, 16),  # every row stays open
        ([b"y" * n for n in np.random.default_rng(0).geometric(1 / 50, 60_000)], 256),
    ],
    ids=["one-document", "half-rows", "many-documents"],
)
def test_packing_megabytes(documents, row_length):
    """Takes minutes if it looks through all rows for every piece."""
    rows = text.pack(documents, row_length)
    size, longest = sum(map(len, documents)), max(map(len, documents))
    assert (rows.segment_ids > 0).sum() == size and rows.has_target.sum() == size - len(documents)
    wanted = len(documents) if longest == 9 else -(-size // row_length)
    assert wanted <= len(rows) <= 1.01 * wanted


def test_no_documents_make_no_rows():
    assert len(text.pack([], 4)) == len(text.pack([b""], 4)) == 0


def test_rows_are_equal_to_themselves_alone():
    one, other = (text.pack([b"abc"], 3) for _ in range(2))
    assert one == one and one != other


def test_targets_within_a_row():
    rows = text.pack([b"abcd", b"xy", b"z"], 3)
    assert rows.tokens.tolist() == [[97, 98, 99], [100, 120, 121], [122, 0, 0]]
    assert rows.segment_ids.tolist() == [[1, 1, 1], [1, 2, 2], [1, 0, 0]]
    assert rows.targets.tolist() == [[98, 99, 100], [0, 121, 0], [0, 0, 0]]
    assert rows.has_target.tolist() == [[True, True, True], [False, True, False], [False, False, False]]


def test_take_selects_rows_of_every_field():
    rows = text.pack([b"abc", b"def", b"ghi"], 3)
    taken = rows.take(np.array([2, 0]))
    assert len(taken) == 2 and bytes(taken.tokens[0].astype(np.uint8)) == b"ghi"
    assert all(len(array) == 2 for array in (taken.segment_ids, taken.targets, taken.has_target))


def test_every_tenth_document_is_held_out():
    documents = [b"%02d" % i for i in range(25)]
    training, held_out = text.hold_out(documents)
    assert held_out == [b"09", b"19"]
    assert training == [document for document in documents if document not in held_out]


def test_few_documents_give_their_last_tenth():
    training, held_out = text.hold_out([bytes(range(100)), bytes(range(50))])
    assert [len(part) for part in training] == [90, 45]
    assert held_out == [bytes(range(90, 100)), bytes(range(45, 50))]


@pytest.mark.parametrize("documents", [[b"short"], [b""], [b"ab"] * 9 + [b"c"]], ids=["short", "empty", "one_byte"])
def test_too_little_text_is_refused(documents):
    with pytest.raises(ValueError, match="text: got .* bytes"):
        text.hold_out(documents)


def test_files_become_documents(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    assert text.read_files([tmp_path / "b", tmp_path / "a"]) == [b"bbb", b"aaa"]
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty"):
        text.read_files([tmp_path / "a", tmp_path / "empty"])
    with pytest.raises(FileNotFoundError):
        text.read_files([tmp_path / "missing"])


def test_batches_are_whole_permutations_and_repeat_with_the_seed():
    order = np.stack(list(text.batch_order(num_rows=7, batch_size=3, steps=5, seed=1)))
    assert order.shape == (5, 3)
    assert sorted(order.ravel()[:7]) == sorted(order.ravel()[7:14]) == list(range(7))
    assert (order == np.stack(list(text.batch_order(7, 3, 5, seed=1)))).all()
    assert (order != np.stack(list(text.batch_order(7, 3, 5, seed=2)))).any()
    assert [batch.tolist() for batch in text.batch_order(num_rows=1, batch_size=4, steps=2, seed=0)] == [[0] * 4] * 2
    next(text.batch_order(num_rows=7, batch_size=3, steps=10**15, seed=1))  # nothing is made ahead


def test_entropies():
    assert text.unigram_entropy([b"abab"]) == pytest.approx(math.log(2))
    assert text.bigram_entropy([b"abab"]) == pytest.approx(0, abs=1e-12)
    assert text.bigram_entropy([b"aba", b"aca"]) == pytest.approx(math.log(2) / 2)
    assert text.bigram_entropy([b"ab", b"cd"]) == 0  # "bc" would cross from one document into the next


def test_python_documentation():
    documents = text.python_documentation()
    assert len(documents) > 50 and min(map(len, documents)) > 50
    assert text.unigram_entropy(documents) == pytest.approx(3.26, abs=0.05)
