"""Documents packed along the sequence: where each starts, where each token stands, and what a compressor keeps.

Segment ids or end rows in, arrays of fixed shape out, so everything works inside `jax.jit`. Leading axes are batch
axes: every row of a batch has its own documents.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from dsv4_fusions import numerics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DocumentBoundaries:
    """Where every token stands in its document. Padding rows are not valid; their other fields mean nothing."""

    doc_start: Int32[Array, "*batch tokens"]
    """Row of the first token of the document."""
    doc_len: Int32[Array, "*batch tokens"]
    """Length of the document in tokens."""
    pos_in_doc: Int32[Array, "*batch tokens"]
    """Row minus `doc_start`. Keeps counting through padding behind the last document."""
    is_valid: Bool[Array, "*batch tokens"]
    """Whether the row is a token of a document, that is `pos_in_doc < doc_len`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CompressedGroups:
    """Groups of `ratio` tokens that a compressor pools into one slot each; what is left over of a document is dropped.

    The slots of a row are packed to the front, document after document; the slots behind the last group are empty.
    """

    token_index: Int32[Array, "*batch slots ratio"]
    """Rows pooled into each slot. Some rows within range for an empty slot."""
    is_group: Bool[Array, "*batch slots"]
    """Whether the slot holds a group."""
    is_first: Bool[Array, "*batch slots"]
    """Whether the group is the first of its document."""
    pos_in_doc: Int32[Array, "*batch slots"]
    """Position of the group's first token in its document, 0 for an empty slot."""
    row_start: Int32[Array, "*batch tokens"]
    """First slot that the token sees, 0 if it sees none."""
    row_count: Int32[Array, "*batch tokens"]
    """Number of slots that the token sees: the groups of its own document that end at or before it."""


def _integers(x, name: str) -> Int[Array, "*batch tokens"]:
    x = numerics.integers(name, x)
    if x.ndim == 0:
        raise ValueError(f"{name}: got a scalar, wanted [..., tokens]")
    return x


def _count(mask: Bool[Array, "*batch tokens"]) -> Int32[Array, "*batch tokens"]:
    return jnp.cumsum(mask, axis=-1, dtype=jnp.int32)


def _previous(x: Int[Array, "*batch tokens"]) -> Int[Array, "*batch tokens"]:
    return jnp.concatenate([x[..., :1], x[..., :-1]], axis=-1)


def _rows_where(mask: Bool[Array, "*batch tokens"], size: int, fill: int) -> Int32[Array, "*batch size"]:
    """The rows at which `mask` is true, packed to the front of a table of fixed size; `fill` behind them."""
    table = jnp.full((*mask.shape[:-1], size), fill, jnp.int32)
    slot = jnp.where(mask, _count(mask) - 1, size)  # rows that are not wanted fall off the end of the table
    rows = jnp.broadcast_to(jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape)
    return jnp.put_along_axis(table, slot, rows, axis=-1, inplace=False, mode="drop")


def end_rows(segment_ids: Int[Array, "*batch tokens"]) -> Int32[Array, "*batch tokens"]:
    """Exclusive end row of each token's document.

    Padding behind the last document repeats that document's end (0 if the row has none). End rows cannot express a gap
    in front of a document, so padding there is given as a document of its own: `from_segment_ids` marks it invalid.

    Args:
      segment_ids: [..., tokens] integers. Equal neighbours are one document, 0 is padding; an id that comes back after
        another one starts a new document.

    Returns:
      [..., tokens] int32.

    Raises:
      TypeError: segment_ids are not integers.
      ValueError: segment_ids is a scalar.
    """
    segments = _integers(segment_ids, "segment_ids")
    tokens = segments.shape[-1]
    is_start = (jnp.arange(tokens) == 0) | (segments != _previous(segments))
    run = _count(is_start) - 1
    starts = _rows_where(is_start, tokens + 1, fill=tokens)
    end = jnp.take_along_axis(starts, run + 1, axis=-1)
    is_tail = (segments == 0) & (end == tokens)
    return jnp.where(is_tail, jnp.take_along_axis(starts, run, axis=-1), end)


def document_boundaries(end_rows: Int[Array, "*batch tokens"]) -> DocumentBoundaries:
    """Start, length, position and validity of every row, from the end row of its document.

    Row t starts a document if t == 0, or if the document before ends there and this one ends elsewhere. The starts are
    gathered through a running count, from a table of fixed size (PaddleFleet PR #1843, without its data-dependent
    shape).

    Args:
      end_rows: [..., tokens] integers, not decreasing: exclusive end row of each row's document. Padding behind the
        last document either repeats the last end or holds each row's own number.

    Returns:
      DocumentBoundaries of [..., tokens] arrays.

    Raises:
      TypeError: end_rows are not integers.
      ValueError: end_rows is a scalar.
    """
    ends = _integers(end_rows, "end_rows")
    tokens = ends.shape[-1]
    # Clipped in their own type, as wide ones would wrap: an end past the last row is none, whatever its number.
    ends = jnp.clip(ends, -1, tokens + 1).astype(jnp.int32) if ends.dtype.itemsize > 4 else ends.astype(jnp.int32)
    rows = jnp.arange(tokens, dtype=jnp.int32)
    previous = _previous(ends)
    is_start = (rows == 0) | ((rows == previous) & (ends != previous))
    starts = _rows_where(is_start, tokens, fill=0)
    doc_start = jnp.take_along_axis(starts, _count(is_start) - 1, axis=-1)
    pos_in_doc, doc_len = rows - doc_start, ends - doc_start
    return DocumentBoundaries(doc_start, doc_len, pos_in_doc, pos_in_doc < doc_len)


def from_segment_ids(segment_ids: Int[Array, "*batch tokens"]) -> DocumentBoundaries:
    """Start, length, position and validity of every row, from segment ids.

    Args:
      segment_ids: [..., tokens] integers. Equal neighbours are one document, 0 is padding; an id that comes back after
        another one starts a new document.

    Returns:
      DocumentBoundaries of [..., tokens] arrays; padding has length 0 and is not valid, inside a row as well.

    Raises:
      TypeError: segment_ids are not integers.
      ValueError: segment_ids is a scalar.
    """
    boundaries = document_boundaries(end_rows(segment_ids))
    is_token = _integers(segment_ids, "segment_ids") != 0
    return dataclasses.replace(
        boundaries,
        doc_len=jnp.where(is_token, boundaries.doc_len, 0),
        is_valid=boundaries.is_valid & is_token,
    )


def compressed_groups(boundaries: DocumentBoundaries, ratio: int) -> CompressedGroups:
    """Groups of `ratio` tokens within each document, and the slots of them that every token sees.

    A document of n tokens has n // ratio groups; token p of it (from 0) sees the first (p + 1) // ratio.

    Args:
      boundaries: of [..., tokens] arrays.
      ratio: tokens per group, at least 1.

    Returns:
      CompressedGroups with tokens // ratio slots.

    Raises:
      ValueError: ratio < 1.
    """
    if ratio < 1:
        raise ValueError(f"ratio: got {ratio}, wanted at least 1")
    pos, doc_len = boundaries.pos_in_doc, boundaries.doc_len
    slots = pos.shape[-1] // ratio
    is_start = boundaries.is_valid & (pos % ratio == 0) & (pos + ratio <= doc_len)
    groups_so_far = _count(is_start)

    first_row = _rows_where(is_start, slots, fill=0)
    is_group = jnp.arange(slots) < groups_so_far[..., -1:]
    pos_of_group = jnp.where(is_group, jnp.take_along_axis(pos, first_row, axis=-1), 0)

    row_count = jnp.where(boundaries.is_valid, (pos + 1) // ratio, 0)
    groups_before_doc = jnp.take_along_axis(groups_so_far - is_start, boundaries.doc_start, axis=-1)
    return CompressedGroups(
        token_index=first_row[..., None] + jnp.arange(ratio, dtype=jnp.int32),
        is_group=is_group,
        is_first=is_group & (pos_of_group == 0),
        pos_in_doc=pos_of_group,
        row_start=jnp.where(row_count > 0, groups_before_doc, 0),
        row_count=row_count,
    )
