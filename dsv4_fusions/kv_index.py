"""Local KV ids: which rows of its own batch entry's KV each query token reads, as tables, their parts, or runs of ids.

All ids are int32; -1 is an empty slot. Rows of padding are empty. The tables of one layer are concatenated along the
last axis; their ids never collide, since compressed rows stand behind the raw ones in KV (`offset`).

`Span` and `Selection` tell what stands in a table before it is written: the `*_index` functions write it, and a kernel
that takes all parts of a layer's table writes them side by side at once (`ops.kv_index_table`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from dsv4_fusions import numerics
from dsv4_fusions.documents import CompressedGroups, DocumentBoundaries

EMPTY = -1


def _check_tokens(num_tokens: int, got: Int32[Array, "*batch tokens"], name: str) -> None:
    if got.shape[-1] != num_tokens:
        raise ValueError(f"{name}: got {got.shape[-1]} tokens, wanted num_tokens = {num_tokens}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Two runs of consecutive ids for each query, near rows first: a window, and the compressed rows before it.

    Attributes:
      near_start, near_count: first id of the near run, and how many there are; none at 0 and below.
      far_start, far_count: of the far run.
      width: slots of every query; what does not fit is not read. As in a table, an id outside the rows takes its slot
        and is empty.
    """

    near_start: Int[Array, "*batch tokens"]
    near_count: Int[Array, "*batch tokens"]
    far_start: Int[Array, "*batch tokens"]
    far_count: Int[Array, "*batch tokens"]
    width: int = dataclasses.field(metadata={"static": True})

    def table(self) -> Int32[Array, "*batch tokens width"]:
        """The same ids as a table, empty slots behind them."""
        near, far = self._in_slots()
        slot = jnp.arange(self.width, dtype=jnp.int32)
        (near_start, near_count), (far_start, far_count) = ((x[..., None] for x in run) for run in (near, far))
        # What passes the end of int32 wraps to a negative id, an empty slot.
        ids = slot + jnp.where(slot < near_count, near_start, far_start - near_count)
        return jnp.where(slot < near_count + far_count, ids, EMPTY)

    def within(self, kv_len: int) -> "Runs":
        """The same ids less those outside [0, kv_len), int32 throughout. Later ones move up to their slots."""

        def cut(start, count):
            first = jnp.clip(start, 0, kv_len)
            # start + count may pass the end of int32 where start is beyond the rows anyway.
            end = jnp.minimum(jnp.minimum(start, kv_len) + count, kv_len)
            return first, jnp.maximum(end - first, 0)

        near, far = self._in_slots()
        return Runs(*cut(*near), *cut(*far), self.width)

    def _in_slots(self):
        """(start, count) of both runs as int32, the counts those of slots."""
        near_start, near_count, far_start, far_count = map(
            numerics.saturated_int32, (self.near_start, self.near_count, self.far_start, self.far_count)
        )
        near_count = jnp.clip(near_count, 0, self.width)
        return (near_start, near_count), (far_start, jnp.clip(far_count, 0, self.width - near_count))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """A part of a table whose ids count up from column to column: `base + j` in column j, first <= j < first + count.

    Attributes:
      base: what column 0 would hold, were it one of those.
      first, count: first of the columns that hold an id, and how many there are.
      width: columns.
    """

    base: Int32[Array, "*batch tokens"]
    first: Int32[Array, "*batch tokens"]
    count: Int32[Array, "*batch tokens"]
    width: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., tokens, width] of the part."""
        return *jnp.broadcast_shapes(self.base.shape, self.first.shape, self.count.shape), self.width

    def table(self) -> Int32[Array, "*batch tokens width"]:
        """The part itself, -1 in the other columns."""
        column = jnp.arange(self.width, dtype=jnp.int32)
        return jnp.where(in_range(column, self.first, self.count), self.base[..., None] + column, EMPTY)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """A part of a table that holds slots which were selected, as far as their token sees them; see `selected_index`."""

    selected: Int[Array, "*batch tokens k"]
    row_start: Int32[Array, "*batch tokens"]
    row_count: Int32[Array, "*batch tokens"]
    offset: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., tokens, k] of the part."""
        *lead, k = self.selected.shape
        return *jnp.broadcast_shapes(tuple(lead), self.row_start.shape, self.row_count.shape), k

    def table(self) -> Int32[Array, "*batch tokens k"]:
        """The part itself, -1 in place of slots that the token may not see."""
        keep = in_range(self.selected, self.row_start, self.row_count)
        return jnp.where(keep, self.selected.astype(jnp.int32) + self.offset, EMPTY)


def window_run(
    num_tokens: int, window: int, boundaries: DocumentBoundaries | None = None
) -> tuple[Int32[Array, "*batch tokens"], Int32[Array, "*batch tokens"]]:
    """First of the ids that `window_index` gives each token, and how many there are; the arguments are the same."""
    if window < 1:
        raise ValueError(f"window: got {window}, wanted at least 1")
    row = jnp.arange(num_tokens, dtype=jnp.int32)
    start = jnp.maximum(row - (window - 1), 0)
    if boundaries is None:
        return start, row + 1 - start
    _check_tokens(num_tokens, boundaries.doc_start, "boundaries")
    start = jnp.maximum(start, boundaries.doc_start)
    return start, jnp.where(boundaries.is_valid, row + 1 - start, 0)


def window_index(
    num_tokens: int, window: int, boundaries: DocumentBoundaries | None = None
) -> Int32[Array, "*batch tokens window"]:
    """Ids of the last `window` tokens of each token's document, itself included; empty slots trail.

    Args:
      num_tokens: length of the sequence.
      window: width of the table, at least 1.
      boundaries: documents of [..., num_tokens] rows, None for one document.

    Returns:
      [num_tokens, window] int32, with the leading axes of `boundaries` if given.

    Raises:
      ValueError: window < 1, or boundaries of another length.
    """
    return window_span(num_tokens, window, boundaries).table()


def window_span(num_tokens: int, window: int, boundaries: DocumentBoundaries | None = None) -> Span:
    """What `window_index` writes; the arguments are the same."""
    start, count = window_run(num_tokens, window, boundaries)
    return Span(start, jnp.zeros_like(start), count, window)


def compressed_index(
    num_tokens: int, ratio: int, offset: int, groups: CompressedGroups | None = None
) -> Int32[Array, "*batch tokens slots"]:
    """Ids of every compressed slot that each token sees: the groups of its document that end at or before it.

    Args:
      num_tokens: length of the sequence.
      ratio: tokens per group, at least 1.
      offset: number of rows in KV ahead of the compressed ones.
      groups: of [..., num_tokens] rows and the same ratio, None for one document.

    Returns:
      [num_tokens, num_tokens // ratio] int32, with the leading axes of `groups` if given. Slot c stands in column c, so
      rows of later documents begin with empty slots.

    Raises:
      ValueError: ratio < 1, or groups of another length or ratio.
    """
    return compressed_span(num_tokens, ratio, offset, groups).table()


def compressed_span(num_tokens: int, ratio: int, offset: int, groups: CompressedGroups | None = None) -> Span:
    """What `compressed_index` writes; the arguments are the same."""
    start, count = visible_slots(num_tokens, ratio, groups)
    return Span(jnp.full_like(start, offset), start, count, num_tokens // ratio)


def visible_slots(
    num_tokens: int, ratio: int, groups: CompressedGroups | None = None
) -> tuple[Int32[Array, "*batch tokens"], Int32[Array, "*batch tokens"]]:
    """First compressed slot that each token sees and how many there are; see `compressed_index`."""
    if ratio < 1:
        raise ValueError(f"ratio: got {ratio}, wanted at least 1")
    if groups is None:
        count = (jnp.arange(num_tokens, dtype=jnp.int32) + 1) // ratio
        return jnp.zeros_like(count), count
    _check_tokens(num_tokens, groups.row_count, "groups")
    if groups.token_index.shape[-1] != ratio:
        raise ValueError(f"groups: got a ratio of {groups.token_index.shape[-1]}, wanted {ratio}")
    return groups.row_start, groups.row_count


def range_index(
    start: Int32[Array, "*batch tokens"], count: Int32[Array, "*batch tokens"], num_slots: int, offset: int = 0
) -> Int32[Array, "*batch tokens num_slots"]:
    """Ids of `count` slots from `start` on, each in the column of its own number; the other columns are empty.

    Args:
      start: first slot of each row.
      count: number of slots of each row.
      num_slots: width of the table.
      offset: added to the number of a slot to make its id.

    Returns:
      [..., tokens, num_slots] int32.
    """
    return Span(jnp.full_like(start, offset), start, count, num_slots).table()


def in_range(
    slot: Int32[Array, "*batch_tokens slots"],
    start: Int32[Array, "*batch tokens"],
    count: Int32[Array, "*batch tokens"],
) -> Bool[Array, "*batch tokens slots"]:
    """Whether each slot is one of a row's `count` slots from `start` on."""
    # In their own types sums may pass the end and comparisons with negative bounds wrap.
    slot, start, count = map(numerics.saturated_int32, (slot, start, count))
    return (slot >= start[..., None]) & (slot < (start + count)[..., None])


def joined(*tables: Int32[Array, "*batch tokens topk"]) -> Int32[Array, "*batch tokens topk"]:
    """Tables side by side; leading axes broadcast, for a table without documents has no batch axis."""
    lead = jnp.broadcast_shapes(*(table.shape[:-1] for table in tables))
    return jnp.concatenate([jnp.broadcast_to(table, (*lead, table.shape[-1])) for table in tables], axis=-1)


def causal_index(num_tokens: int, boundaries: DocumentBoundaries | None = None) -> Int32[Array, "*batch tokens tokens"]:
    """Ids of every token of each token's document up to itself; empty slots trail.

    Args:
      num_tokens: length of the sequence.
      boundaries: documents of [..., num_tokens] rows, None for one document.

    Returns:
      [num_tokens, num_tokens] int32, with the leading axes of `boundaries` if given.

    Raises:
      ValueError: boundaries of another length.
    """
    return window_index(num_tokens, max(num_tokens, 1), boundaries)[..., :num_tokens]


def latent_candidates(
    num_tokens: int, window: int, boundaries: DocumentBoundaries | None = None
) -> tuple[Int32[Array, "*batch tokens"], Int32[Array, "*batch tokens"]]:
    """First row and number of rows of each token's document that stand before the token's window.

    With the rows of `window_index` they are all that the token may see, and no row is in both.

    Args:
      num_tokens: length of the sequence.
      window: width of the window, at least 0; 0: every row of the document up to the token itself.
      boundaries: documents of [..., num_tokens] rows, None for one document.

    Returns:
      row_start, row_count: [num_tokens] int32, with the leading axes of `boundaries` if given. Both are 0 for a token
      without candidates, padding among them.

    Raises:
      ValueError: window < 0, or boundaries of another length.
    """
    if window < 0:
        raise ValueError(f"window: got {window}, wanted at least 0")
    if boundaries is None:
        pos = jnp.arange(num_tokens, dtype=jnp.int32)
        start = jnp.zeros_like(pos)
    else:
        _check_tokens(num_tokens, boundaries.doc_start, "boundaries")
        start, pos = boundaries.doc_start, jnp.where(boundaries.is_valid, boundaries.pos_in_doc, -1)
    count = jnp.maximum(pos + 1 - window, 0)
    return jnp.where(count > 0, start, 0), count


def selected_index(
    selected: Int[Array, "*batch tokens k"],
    row_start: Int32[Array, "*batch tokens"],
    row_count: Int32[Array, "*batch tokens"],
    offset: int,
) -> Int32[Array, "*batch tokens k"]:
    """Ids of selected slots; a slot that its token may not see becomes empty.

    Args:
      selected: slots in any order, such as those of a top-k, whose width may exceed the number of slots to choose from.
      row_start: first slot that each token sees.
      row_count: number of slots that it sees. Leading axes of both broadcast against those of `selected`.
      offset: number of rows in KV ahead of slot 0.

    Returns:
      slot + offset in the column where the slot stood, -1 where it is outside [row_start, row_start + row_count).

    Raises:
      TypeError: selected are not integers.
      ValueError: row_start or row_count of other tokens.
    """
    return selection(selected, row_start, row_count, offset).table()


def selection(
    selected: Int[Array, "*batch tokens k"],
    row_start: Int32[Array, "*batch tokens"],
    row_count: Int32[Array, "*batch tokens"],
    offset: int,
) -> Selection:
    """What `selected_index` writes; arguments and errors are the same."""
    selected = numerics.integers("selected", selected)
    if selected.ndim < 2:
        raise ValueError(f"selected: got shape {selected.shape}, wanted [..., tokens, k]")
    for name, x in {"row_start": row_start, "row_count": row_count}.items():
        if x.shape[-1:] != selected.shape[-2:-1]:
            wanted = f"[..., {selected.shape[-2]}] to go with selected of shape {selected.shape}"
            raise ValueError(f"{name}: got shape {x.shape}, wanted {wanted}")
    return Selection(selected, row_start, row_count, offset)


def compact(index: Int[Array, "*batch topk"]) -> tuple[Int32[Array, "*batch topk"], Int32[Array, "*batch"]]:
    """Moves the ids of every row to its front, in the order they stand in, and counts them.

    The order is kept, rather than the ids sorted, so that attention adds the same terms in the same order.

    Args:
      index: ids; every negative one is an empty slot. This table does not know how many rows KV has: an id past them
        counts.

    Returns:
      The table with -1 behind the ids of each row, and the number of ids in each: exactly that, so 0 for an empty row.

    Raises:
      TypeError: index are not integers.
      ValueError: index is a scalar.
    """
    index = _table(index)
    is_empty = index < 0
    ids = jnp.where(is_empty, EMPTY, index.astype(jnp.int32))
    _, ids = lax.sort((is_empty.astype(jnp.int32), ids), num_keys=1, is_stable=True)
    return ids, jnp.sum(~is_empty, axis=-1, dtype=jnp.int32)


def trailing_length(index: Int[Array, "*batch topk"]) -> Int32[Array, "*batch"]:
    """Number of leading slots of each row that hold all its ids, empty slots among them; at least 1.

    A bound on what a forward pass has to read. It is no count: of an empty row it is 1 too, for kernels that hang on a
    length of 0.

    Args:
      index: ids; every negative one is an empty slot.

    Returns:
      Column of the last id plus 1, or 1.

    Raises:
      TypeError: index are not integers.
      ValueError: index is a scalar.
    """
    index = _table(index)
    length = jnp.arange(1, index.shape[-1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(index >= 0, length, 1), axis=-1, initial=1)


def pad_topk(index: Int[Array, "*batch topk"], multiple: int) -> Int32[Array, "*batch topk_padded"]:
    """Widens a table with empty slots at the end of every row, as kernels that read blocks of slots want it.

    To be used on flat ids, after the remap, which would otherwise have more to read and write.

    Args:
      index: ids.
      multiple: the width becomes the next multiple of this, at least 1. A width of 0 stays.

    Returns:
      The table, -1 in the new slots.

    Raises:
      TypeError: index are not integers.
      ValueError: multiple < 1, or index is a scalar.
    """
    if multiple < 1:
        raise ValueError(f"multiple: got {multiple}, wanted at least 1")
    index = _table(index).astype(jnp.int32)
    widths = [(0, 0)] * (index.ndim - 1) + [(0, -index.shape[-1] % multiple)]
    return jnp.pad(index, widths, constant_values=EMPTY)


def _table(index) -> Int[Array, "*batch topk"]:
    index = numerics.integers("index", index)
    if index.ndim == 0:
        raise ValueError("index: got a scalar, wanted [..., topk]")
    return index
