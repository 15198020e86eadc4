"""The forward.

Both computing warpgroups make all scores of an item's block, and each sums half of the values' channels, so that
neither waits for a score of the other's. The tile of an item's last block takes its output on the way out, and its
query's place is taken by the next item's as soon as the last scores are there.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4_fusions import dispatch
from dsv4_fusions.mosaic import divmod_
from dsv4_fusions.ops.sparse_attention.mosaic.gather import BLOCK
from dsv4_fusions.ops.sparse_attention.mosaic.launch import HEADS, LAYOUT, LOG2E, PER_HEAD, PER_SLOT, Launch, in_base_2
from dsv4_fusions.ops.sparse_attention.slots import RunSlots, Slots


def forward(q, kv, slots: Slots | RunSlots, sink, *, scale: float, value_dim: int):
    """Attention of every query to the rows in its slots.

    Args:
      q: [tokens, heads, head_dim], a multiple of `HEADS` heads and of 64 channels.
      kv: [rows, head_dim] in q's dtype, 16 bits wide.
      slots: the rows of each query.
      sink: [heads] f32.
      scale: factor of the scores.
      value_dim: channels of the values, a multiple of 128.

    Returns:
      out: [tokens, heads, value_dim] in q's dtype.
      lse: [tokens, heads] f32, log2 of the sum of exp over scaled scores and sink; -inf where there is neither.
    """
    outs = {
        "out": jax.ShapeDtypeStruct((*q.shape[:2], value_dim), q.dtype),
        "lse": jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
    }
    operands = {"q": q, "kv": kv, "sink": in_base_2(sink)}
    return _Forward(q, slots, value_dim, scale).run("sparse_attention", operands, outs, {})


class _Forward(Launch):
    stages = 2  # an even number
    per_item = ("q",)

    def __init__(self, q, slots, value_dim, scale):
        super().__init__(q, slots, value_dim)
        self.scale = scale * LOG2E

    def compute(self, memory, shared, side):
        def compute_item(_, token, head, blocks, before):
            plgpu.barrier_wait(shared.item_in)
            carry = (
                plgpu.layout_cast(jnp.zeros((HEADS, self.half), jnp.float32), LAYOUT),
                plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), PER_HEAD),
                plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), PER_HEAD),
            )
            stage = lambda j: divmod_(before + j, self.stages)[1]  # noqa: E731

            def step(j, carry):
                carry = self._block(shared, side, stage(j), carry)
                plgpu.barrier_arrive(shared.consumed.at[stage(j)])
                return carry

            carry = lax.fori_loop(0, blocks - 1, step, carry)
            last = stage(blocks - 1)
            sums, peak, total = self._block(shared, side, last, carry, scored=shared.item_done)

            heads = pl.ds(head, HEADS)
            sink = plgpu.load(memory.sink.at[heads], layout=PER_HEAD, optimized=False)
            top = _finite(jnp.maximum(peak, sink))
            shrink = jnp.exp2(peak - top)
            total = total * shrink + jnp.exp2(sink - top)
            factor = jnp.where(total == 0.0, 0.0, shrink / jnp.where(total == 0.0, 1.0, total))
            out = shared.block(last)[side]
            plgpu.barrier_wait(shared.item_done)  # the other side has made its scores of this tile, too
            out[...] = (sums * _columns(factor, self.half)).astype(self.dtype)
            plgpu.commit_smem()
            half = pl.ds(side * self.half, self.half)
            plgpu.copy_smem_to_gmem(out, memory.out.at[token, heads, half])
            if side == 0:
                memory.lse[token, heads] = top + jnp.log(total) * np.float32(LOG2E)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.consumed.at[last])

        self.for_each_item(memory, compute_item)

    def _block(self, shared, side, stage, carry, scored=None):
        """One step of the streaming softmax; arrives at `scored` when the query is not needed any more."""
        sums, peak, total = carry
        plgpu.barrier_wait(shared.full.at[stage])

        def scores(result):
            zero = shared.zero(stage)
            for query, keys in zip(shared.matrix(np.int32(0), zero), shared.block(stage), strict=True):
                plgpu.wgmma(result, query, keys.transpose((1, 0)))
            return result[...]

        s = pl.run_scoped(scores, plgpu.ACC((HEADS, BLOCK), jnp.float32))
        if scored is not None:
            plgpu.barrier_arrive(scored)
        rows = plgpu.load(shared.rows.at[stage], layout=PER_SLOT, optimized=False)
        s = jnp.where(lax.broadcast_in_dim(rows, s.shape, [1]) >= 0, s * np.float32(self.scale), -jnp.inf)
        new_peak = jnp.maximum(peak, s.max(axis=1))
        top = _finite(new_peak)  # all slots empty so far: -inf - -inf would be NaN
        shrink = jnp.exp2(peak - top)
        p = jnp.exp2(s - _columns(top, BLOCK))
        total = total * shrink + p.sum(axis=1)
        sums = _add_product(sums * _columns(shrink, self.half), p.astype(self.dtype), shared.block(stage)[side])
        return sums, new_peak, total


def _finite(peak):
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def _columns(per_head, width):
    return lax.broadcast_in_dim(per_head, (HEADS, width), [0])


def _add_product(sums, p, values):
    """sums + p @ values, of p in registers and values in shared memory."""
    if dispatch.interpreting():  # the simulator wants both in shared memory
        return sums + jnp.dot(p, values[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda result: plgpu.wgmma(result, p, values))(plgpu.ACC.init(sums))
