"""Text as packed rows of bytes with document ends, and the entropies that a model's loss is judged by."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

NUM_BYTES = 256
HOLD_OUT_EVERY = 10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Documents packed into rows of equal length.

    Attributes:
        tokens: [rows, tokens] int32, bytes; 0 in padding.
        segment_ids: [rows, tokens] int32, from 1 within each row; 0 in padding.
        targets: [rows, tokens] int32, the byte that follows in the same document; 0 where there is none.
        has_target: [rows, tokens] bool.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    targets: np.ndarray
    has_target: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows) -> "Rows":
        """The given rows (integers or a slice), in that order."""
        return jax.tree.map(lambda array: array[rows], self)


def python_documentation() -> list[bytes]:
    """The documentation topics that CPython ships for `help()`, one document a topic, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def read_files(paths: Sequence[str | Path]) -> list[bytes]:
    """One document a file.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is empty.
    """
    documents = [Path(path).read_bytes() for path in paths]
    for path, document in zip(paths, documents, strict=True):
        if not document:
            raise ValueError(f"text: {path} is empty")
    return documents


def hold_out(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Splits documents into training and held-out ones.

    Args:
        documents: of any length.

    Returns:
        (training, held out): every tenth document is held out, or, of fewer than ten, the last tenth of each.

    Raises:
        ValueError: one of the two has no pair of neighbouring bytes, so nothing could be predicted in it.
    """
    if len(documents) >= HOLD_OUT_EVERY:
        held_out = list(documents[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY])
        training = [document for i, document in enumerate(documents) if i % HOLD_OUT_EVERY != HOLD_OUT_EVERY - 1]
    else:
        ends = [len(document) - len(document) // HOLD_OUT_EVERY for document in documents]
        training = [document[:end] for document, end in zip(documents, ends, strict=True)]
        held_out = [document[end:] for document, end in zip(documents, ends, strict=True)]
    for part in (training, held_out):
        if max(map(len, part), default=0) < 2:
            size = sum(map(len, documents))
            raise ValueError(f"text: got {size} bytes in {len(documents)} documents, too little to hold out a tenth")
    return training, held_out


def pack(documents: Sequence[bytes], row_length: int) -> Rows:
    """Packs documents into rows, each piece into the first row with room for it.

    A document longer than a row is cut into pieces. A piece is a document to the model, but its last byte keeps the
    next piece's first as its target, so every byte except each document's first one is predicted exactly once.

    Args:
        documents: non-empty ones take part.
        row_length: tokens a row.

    Returns:
        The rows.
    """
    pieces = [
        (document[start : start + row_length], document[start + 1 : start + row_length + 1])
        for document in documents
        for start in range(0, len(document), row_length)
    ]
    rows = _first_rows_with_room([len(piece) for piece, _ in pieces], row_length)
    shape = (max(rows, default=-1) + 1, row_length)
    packed = Rows(*(np.zeros(shape, np.int32) for _ in range(3)), np.zeros(shape, bool))
    filled, segments = [0] * len(packed), [0] * len(packed)
    for row, (piece, following) in zip(rows, pieces, strict=True):
        start = filled[row]
        filled[row] += len(piece)
        segments[row] += 1
        packed.tokens[row, start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        packed.segment_ids[row, start : start + len(piece)] = segments[row]
        packed.targets[row, start : start + len(following)] = np.frombuffer(following, np.uint8)
        packed.has_target[row, start : start + len(following)] = True
    return packed


def _first_rows_with_room(lengths: Sequence[int], row_length: int) -> list[int]:
    """For each length in turn, the first row that still has room for it.

    room[i] is the most room in any row below node i of a binary tree (its children are 2 i and 2 i + 1), so that a row
    is found in logarithmic time: looking through all of them takes minutes for some megabytes of short rows.
    """
    leaves = 1 << (len(lengths) - 1).bit_length() if lengths else 0
    room = [row_length] * (2 * leaves)
    rows = []
    for length in lengths:
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        rows.append(node - leaves)
        room[node] -= length
        while node > 1:
            node //= 2
            most = max(room[2 * node], room[2 * node + 1])
            if room[node] == most:
                break
            room[node] = most
    return rows


def batch_order(num_rows: int, batch_size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """Which rows make up which batch: one random order of all rows after another, the same for the same seed.

    Args:
      num_rows: how many rows there are.
      batch_size: rows a batch.
      steps: number of batches.
      seed: of the orders.

    Yields:
      [batch_size] row numbers, `steps` times.
    """
    rng = np.random.default_rng(seed)
    left = np.empty(0, np.int64)
    for _ in range(steps):
        while len(left) < batch_size:
            left = np.concatenate([left, rng.permutation(num_rows)])
        yield left[:batch_size]
        left = left[batch_size:]


def unigram_entropy(documents: Sequence[bytes]) -> float:
    """Entropy of single bytes, in nats: the loss of the best model without any context."""
    counts = np.bincount(np.frombuffer(b"".join(documents), np.uint8), minlength=NUM_BYTES)
    return _entropy(counts)


def bigram_entropy(documents: Sequence[bytes]) -> float:
    """Entropy of a byte given the one before it in its document, in nats: the best loss with one byte of context."""
    pairs = np.zeros((NUM_BYTES, NUM_BYTES), np.int64)
    for document in documents:
        codes = np.frombuffer(document, np.uint8)
        np.add.at(pairs, (codes[:-1], codes[1:]), 1)
    return _entropy(pairs) - _entropy(pairs.sum(axis=1))


def _entropy(counts: np.ndarray) -> float:
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())
