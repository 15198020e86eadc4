"""Rows of a table by id, with a gradient whose bits do not change from run to run.

The transpose of a plain gather is a scatter-add, which a GPU does with atomics in whatever order they arrive.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from dsv4_fusions import dispatch


def gather_rows(table: Float[Array, "rows channels"], ids: Int[Array, "*slots"]) -> Float[Array, "*slots channels"]:
    """The rows that `ids` name; zeros for ids outside [0, rows), which also receive no gradient.

    Args:
      table: rows to choose from. An empty slot never reads one, so that a NaN in row 0 stays there.
      ids: row numbers, any shape and integer type.

    Returns:
      [*slots, channels] in the table's dtype. Its gradient sums the contributions of each row in f32.
    """
    # Narrower types cannot hold the number of rows, with which the gradient marks empty slots.
    return _gather(table.shape[0], table, ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(num_rows, table, ids):
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _gather_fwd(num_rows, table, ids):
    return _gather(num_rows, table, ids), ids


def _gather_bwd(num_rows, ids, cotangent):
    # On a CPU XLA adds one update after the other: repeatable, and ten times faster than sorting.
    sum_rows = sum_rows_scatter if dispatch.target().platform == "cpu" else sum_rows_sorted
    channels = cotangent.shape[-1]
    sums = sum_rows(cotangent.reshape(-1, channels).astype(jnp.float32), ids.reshape(-1), num_rows)
    return sums.astype(cotangent.dtype), None


_gather.defvjp(_gather_fwd, _gather_bwd)


def sum_rows_scatter(
    values: Float32[Array, "slots channels"], ids: Int32[Array, "slots"], num_rows: int
) -> Float32[Array, "rows channels"]:
    """Sums `values` by id with one scatter-add, which repeats on a CPU only. Ids outside [0, num_rows) drop."""
    sums = jnp.zeros((num_rows, values.shape[-1]), values.dtype)
    return sums.at[ids].add(values, mode="drop", wrap_negative_indices=False)


def sum_rows_sorted(
    values: Float32[Array, "slots channels"], ids: Int32[Array, "slots"], num_rows: int
) -> Float32[Array, "rows channels"]:
    """Sums `values` by id in an order that depends on the ids alone. Ids outside [0, num_rows) drop.

    Equal ids are brought together by a stable sort and added by a segmented scan, a fixed tree; then every row is
    written once, so no two threads ever meet. Work and memory are a few times those of `values`, whatever the number
    of duplicates.
    """
    slots = ids.shape[0]
    order = jnp.argsort(jnp.where((ids >= 0) & (ids < num_rows), ids, num_rows), stable=True)
    ids = ids[order]
    changes = ids[1:] != ids[:-1]
    edge = jnp.ones(min(slots, 1), bool)
    is_first, is_last = jnp.concatenate([edge, changes]), jnp.concatenate([changes, edge])

    def add(left, right):
        left_starts, left_sum = left
        right_starts, right_sum = right
        return left_starts | right_starts, jnp.where(right_starts, right_sum, left_sum + right_sum)

    _, running = lax.associative_scan(add, (is_first[:, None], values[order]))
    # Entries that are not the last of their row go out of range too, each to a place of its own: the ids stay unique.
    is_total = is_last & (ids >= 0) & (ids < num_rows)
    rows = jnp.where(is_total, ids, num_rows + jnp.arange(slots, dtype=ids.dtype))
    sums = jnp.zeros((num_rows, values.shape[-1]), values.dtype)
    return sums.at[rows].set(running, mode="drop", unique_indices=True)
