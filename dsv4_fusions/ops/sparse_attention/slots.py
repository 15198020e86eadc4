"""Which rows each query reads, as kernels take it: a table of ids, or two runs of rows."""

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

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens, topk)."""
        return self.ids.shape

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RunSlots:
    """Two runs of consecutive rows for each query, the second behind the first, all rows numbered through.

    Attributes:
      runs: [tokens, 4] int32: first row of the first run, its length, first row of the second run less that length, and
        the length of both.
      width: no query has more slots.
      rows: of all batch entries.
    """

    runs: Int32[Array, "tokens 4"]
    width: int = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens, most slots of one)."""
        return self.runs.shape[0], self.width

    def flat(self, multiple: int) -> Slots:
        """The table that stands for the runs."""
        near, near_count, far, count = self.runs.T[..., None]
        slot = np.arange(self.width, dtype=np.int32)
        ids = jnp.where(slot < count, slot + jnp.where(slot < near_count, near, far), -1)
        return Slots(ids, self.runs[:, 3], self.runs.shape[0], self.rows).flat(multiple)
