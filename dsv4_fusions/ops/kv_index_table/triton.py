"""A flat table from its parts as one Pallas kernel of the Triton backend."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

from dsv4_fusions import dispatch
from dsv4_fusions.kv_index import EMPTY, Selection, Span, in_range

ROWS, COLUMNS = 8, 128
"""Rows of the table per program, and columns that it writes at a time; powers of two."""


def _ids(part, row, is_row, column):
    """Ids of a part, for rows [ROWS] and columns [COLUMNS] of its own; empty where the part itself is."""

    def of_row(ref):
        return plgpu.load(ref.at[row], mask=is_row)

    if isinstance(part, Span):
        base, first, count = map(of_row, (part.base, part.first, part.count))
        return jnp.where(in_range(column, first, count), base[:, None] + column, EMPTY)
    inside = is_row[:, None] & (column < part.shape[-1])
    selected = plgpu.load(part.selected.at[row[:, None], column[None, :]], mask=inside)
    keep = in_range(selected, of_row(part.row_start), of_row(part.row_count))
    return jnp.where(keep, selected.astype(jnp.int32) + part.offset, EMPTY)


def _kernel(*refs, structure, widths, tokens, kv_len, compact):
    parts = jax.tree.unflatten(structure, refs[: structure.num_leaves])
    table_ref, *count_ref = refs[structure.num_leaves :]
    rows, width = table_ref.shape
    row = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    is_row = row < rows
    before = lax.div(row, jnp.full_like(row, tokens)) * kv_len
    lane = jnp.arange(COLUMNS, dtype=jnp.int32)

    def put(column, ids, mask):
        column = jnp.broadcast_to(column, (ROWS, COLUMNS))
        plgpu.store(
            table_ref.at[jnp.broadcast_to(row[:, None], column.shape), column], ids, mask=mask & is_row[:, None]
        )

    def chunks(width, body, carry):
        return lax.fori_loop(np.int32(0), np.int32(pl.cdiv(width, COLUMNS)), body, carry)

    left, count = 0, jnp.zeros((ROWS,), jnp.int32)
    for part, part_width in zip(parts, widths, strict=True):

        def write(chunk, count, part=part, part_width=part_width, left=left):
            column = chunk * COLUMNS + lane
            inside = is_row[:, None] & (column < part_width)
            local = _ids(part, row, is_row, column)
            is_id = inside & (local >= 0) & (local < kv_len)
            flat = jnp.where(is_id, local + before[:, None], EMPTY)
            if not compact:
                put(left + column, flat, inside)
                return count
            counted = jnp.cumsum(is_id, axis=1, dtype=jnp.int32)
            # Empty ones point past the row: in interpret mode a masked store writes back what it found, which must not
            # be where an id lands.
            put(jnp.where(is_id, count[:, None] + counted - 1, width), flat, is_id)
            return count + jnp.sum(is_id, axis=1, dtype=jnp.int32)

        count = chunks(part_width, write, count)
        left += part_width

    start = count[:, None] if compact else jnp.full((ROWS, 1), left, jnp.int32)

    def empty(chunk, _):
        column = start + chunk * COLUMNS + lane
        put(column, jnp.full((ROWS, COLUMNS), EMPTY, jnp.int32), column < width)

    chunks(width if compact else width - left, empty, None)
    if compact:
        plgpu.store(count_ref[0].at[row], count, mask=is_row)


def flat_table(
    parts: Sequence[Span | Selection], shape: tuple[int, int, int], kv_len: int, width: int, compact: bool
) -> tuple[Int32[Array, "batch*tokens width"], Int32[Array, "batch*tokens"] | None]:
    """`reference.flat_table` in one kernel, whose programs write whole rows.

    Args:
      parts: arrays with leading axes [tokens], [1, tokens] or [batch, tokens], all varying over the same manual axes.
      shape: [batch, tokens, topk] of the table before padding, not empty.
      kv_len: rows of KV per batch entry.
      width: columns after padding.
      compact: move the ids of every row to its front, and count them.
    """
    batch, tokens, _ = shape
    rows = batch * tokens
    widths = [part.shape[-1] for part in parts]

    def per_row(x, axes):
        return jnp.broadcast_to(x, (batch, tokens, *x.shape[x.ndim - axes :])).reshape(rows, *x.shape[x.ndim - axes :])

    flattened = [
        Span(*(per_row(x, 0) for x in (part.base, part.first, part.count)), part.width)
        if isinstance(part, Span)
        else Selection(per_row(part.selected, 1), per_row(part.row_start, 0), per_row(part.row_count, 0), part.offset)
        for part in parts
    ]
    leaves, structure = jax.tree.flatten(flattened)
    types = [((rows, width), jnp.int32)] + [((rows,), jnp.int32)] * compact
    table, *count = pl.pallas_call(
        functools.partial(
            _kernel, structure=structure, widths=widths, tokens=tokens, kv_len=np.int32(kv_len), compact=compact
        ),
        grid=(pl.cdiv(rows, ROWS),),
        out_shape=[dispatch.output_type(*each, leaves[0]) for each in types],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=dispatch.interpreting(),
        name="flat_kv_index_table",
    )(*leaves)
    return table, count[0] if compact else None
