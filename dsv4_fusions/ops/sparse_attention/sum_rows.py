"""Sums of contributions to rows, in an order that does not depend on the machine: Pallas Triton."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Float32, Int32

from dsv4_fusions import dispatch

_CHANNELS = 128  # of a program
_AT_ONCE = 16  # contributions that a program adds at a time


def add_rows(
    contributions: Float[Array, "count channels"], ids: Int32[Array, "count"], total: Float32[Array, "rows channels"]
) -> Float32[Array, "rows channels"]:
    """total, with each contribution added to the row that its id names.

    A row's contributions are put in their order by a stable sort of the ids. Each program has one row and some of its
    channels, and adds them in that order, a fixed number at a time.

    Args:
      contributions: what is added; not read where the id is negative.
      ids: row of each, or a negative number for none.
      total: what the sums start from; its buffer is taken for the result.

    Returns:
      The sums, each rounded as f32.
    """
    contributions, ids, total = dispatch.align_manual_axes(contributions, ids, total)
    (count, channels), rows = contributions.shape, total.shape[0]
    keys = jnp.where(ids < 0, np.int32(rows), ids)
    keys, order = lax.sort((keys, jnp.arange(count, dtype=jnp.int32)), num_keys=1, is_stable=True)
    # Unrolled, it is one kernel instead of one for each step of the search.
    starts = jnp.searchsorted(keys, jnp.arange(rows + 1, dtype=jnp.int32), method="scan_unrolled").astype(jnp.int32)
    parts = -(-channels // _CHANNELS)

    def kernel(starts_ref, order_ref, contributions_ref, total_ref, out_ref):
        row, part = (pl.program_id(axis) for axis in range(2))
        channel = part * np.int32(_CHANNELS) + jnp.arange(_CHANNELS, dtype=jnp.int32)
        is_channel = channel < channels
        first, last = starts_ref[row], starts_ref[row + 1]

        def step(i, sums):
            at = first + i * np.int32(_AT_ONCE) + jnp.arange(_AT_ONCE, dtype=jnp.int32)
            which = pltriton.load(order_ref.at[at], mask=at < last, other=0)
            mask = (at < last)[:, None] & is_channel[None, :]
            added = pltriton.load(contributions_ref.at[which[:, None], channel[None, :]], mask=mask, other=0.0)
            return sums + added.astype(jnp.float32).sum(0)

        steps = lax.div(last - first + np.int32(_AT_ONCE - 1), np.int32(_AT_ONCE))
        sums = lax.fori_loop(0, steps, step, jnp.zeros(_CHANNELS, jnp.float32))
        before = pltriton.load(total_ref.at[row, channel], mask=is_channel, other=0.0)
        pltriton.store(out_ref.at[row, channel], before + sums, mask=is_channel)

    add = pl.pallas_call(
        kernel,
        grid=(rows, parts),
        out_shape=dispatch.output_type(total.shape, total.dtype, total),
        input_output_aliases={3: 0},
        name="sum_rows",
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=dispatch.interpreting(),
    )
    return add(starts, order, contributions, total)
