"""Which rows each query reads, as kernels take it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
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

    def flat(self, multiple: int) -> "Slots":
        """The same slots as one span of all rows, empty ones -1, their number a multiple of `multiple`."""
        tokens, topk = self.ids.shape
        entry = np.arange(tokens, dtype=np.int32) // np.int32(self.tokens_per_entry)
        is_there = (self.ids >= 0) & (self.ids < self.rows_per_entry)
        if self.length is not None:
            is_there &= np.arange(topk, dtype=np.int32) < self.length[:, None]
        ids = jnp.where(is_there, self.ids + (entry * np.int32(self.rows_per_entry))[:, None], -1)
        ids = jnp.pad(ids, ((0, 0), (0, -topk % multiple)), constant_values=-1)
        entries = -(-tokens // self.tokens_per_entry)
        return Slots(ids, self.length, tokens, entries * self.rows_per_entry)
