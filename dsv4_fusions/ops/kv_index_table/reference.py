"""A flat table from its parts in plain jnp, step by step: the specification, and the XLA implementation."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from dsv4_fusions.kv_index import EMPTY, Selection, Span, compact, joined, pad_topk
from dsv4_fusions.ops.kv_index_remap.reference import local_to_flat


def local_table(parts: tuple[Span | Selection, ...], batch: int) -> Int32[Array, "batch tokens topk"]:
    """The tables of the parts side by side, for each batch entry."""
    table = joined(*(part.table() for part in parts))
    return jnp.broadcast_to(table, (batch, *table.shape[-2:]))


def flat_table(
    parts: tuple[Span | Selection, ...], batch: int, kv_len: int, multiple: int, compacted: bool
) -> tuple[Int32[Array, "batch*tokens topk"], Int32[Array, "batch*tokens"] | None]:
    """Writes the table, empties what is out of range, makes the ids flat, moves them to the front, pads."""
    local = local_table(parts, batch)
    flat = local_to_flat(jnp.where((local >= 0) & (local < kv_len), local, EMPTY), kv_len)
    flat, count = compact(flat) if compacted else (flat, None)
    return pad_topk(flat, multiple), count
