"""Which rows each query reads, as kernels take it."""

import dataclasses

import jax
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """A table of ids, whose entries are numbered within a span of rows.

    Attributes:
      ids: [tokens, topk] int32; any id outside [0, rows_per_entry) is an empty slot.
      length: [tokens] int32, slots at or beyond it are not read; None: all are.
      tokens_per_entry: so many tokens share a span of rows, those behind them the next one.
      rows_per_entry: rows of a span. A flat table has one span of all rows.
    """

    ids: Int32[Array, "tokens topk"]
    length: Int32[Array, "tokens"] | None
    tokens_per_entry: int = dataclasses.field(metadata={"static": True})
    rows_per_entry: int = dataclasses.field(metadata={"static": True})
