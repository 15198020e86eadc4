"""The backward: five products a block of slots in one kernel, and a sum for each row of keys and values.

For each head h and slot j of a query, with D = sum_c out_c g_c, less the cotangent of lse:

    P_j  = exp(s_j - lse)         dP_j = g . kv_j[:value_dim]       dS_j = scale * P_j (dP_j - D)
    dq   = sum_j dS_j kv_j        contribution to d(kv_j) = sum_h P_j g + dS_j q

One of the two computing warpgroups makes P, the other dP and with it dS, and they exchange both through shared memory.
Then each has a half of the channels: of dq, whose sum over the blocks stays in registers, and of the contributions,
which go to device memory in the operands' dtype. A second kernel adds them up in f32, row by row in the order of
queries and slots, so that no result depends on which multiprocessor was first: see `sum_rows.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4_fusions import dispatch
from dsv4_fusions.mosaic import tiled
from dsv4_fusions.ops.sparse_attention.mosaic.gather import BLOCK
from dsv4_fusions.ops.sparse_attention.mosaic.launch import HEADS, LAYOUT, LOG2E, PER_HEAD, PER_SLOT, Launch, in_base_2
from dsv4_fusions.ops.sparse_attention.slots import RunSlots, Slots
from dsv4_fusions.ops.sparse_attention.sum_rows import add_rows

CONTRIBUTIONS_BYTES = 2**30
"""Bytes that the contributions may take: so many queries are worked on at a time."""
_ZERO = np.int32(0)  # a Python int would be int64 under jax_enable_x64
_CHUNK = 64  # channels of contributions that are computed at a time
_SHARED_BYTES = 225 * 1024  # that may be asked for in matrices, of Hopper's 227 KiB


def backward(q, kv, slots: Slots | RunSlots, sink, out, lse, g, g_lse=None, *, scale: float):
    """Gradients of `forward`.

    Args:
      q, kv, slots, sink, scale: as there.
      out, lse: what it returned.
      g: cotangent of out, in q's dtype.
      g_lse: cotangent of the natural logarithm that lse is in base 2, [tokens, heads] f32; None: none.

    Returns:
      dq: like q.
      dkv: [rows, head_dim] f32.
      d_sink: [heads] f32.
    """
    tokens, heads, head_dim = q.shape
    delta = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)
    if g_lse is not None:
        # d lse / d s_j = P_j, so that it enters where D does.
        delta -= g_lse
    # Of a sink of -inf, lse may be -inf too.
    weight = jnp.where(sink == -jnp.inf, 0.0, jnp.exp2(in_base_2(sink) - lse))
    d_sink = -jnp.sum(weight * delta, axis=0)

    slots = slots.flat(BLOCK)  # the sum needs a table anyway
    slot_bytes = heads // HEADS * slots.ids.shape[1] * head_dim * q.dtype.itemsize
    count = -(-tokens // max(1, CONTRIBUTIONS_BYTES // slot_bytes))
    at_once = -(-tokens // count)
    count = -(-tokens // at_once)

    def chunks(x, empty):
        padding = ((0, count * at_once - tokens),) + ((0, 0),) * (x.ndim - 1)
        return jnp.pad(x, padding, constant_values=empty).reshape(count, at_once, *x.shape[1:])

    per_token = {"ids": chunks(slots.ids, -1), "lse": chunks(lse, 0), "delta": chunks(delta, 0)}
    if slots.length is not None:
        per_token["length"] = chunks(slots.length, 0)
    first = jnp.arange(count, dtype=jnp.int32) * np.int32(at_once)

    def work(dkv, chunk):
        first, per_token = chunk
        dq, contributions = _Backward(q, g, per_token, kv.shape[0], scale).launch(kv, first)
        ids = jnp.broadcast_to(per_token["ids"][:, None], contributions.shape[:-1])
        return add_rows(contributions.reshape(-1, head_dim), ids.reshape(-1), dkv), dq

    zeros, first = dispatch.align_manual_axes(jnp.zeros(kv.shape, jnp.float32), first, q)[:2]
    dkv, dq = lax.scan(work, zeros, (first, per_token))
    return dq.reshape(count * at_once, heads, head_dim)[:tokens], dkv, d_sink


class _Backward(Launch):
    stages = 1
    per_item = ("q", "g")

    def __init__(self, q, g, per_token, rows, scale):
        self.q, self.g, self.per_token, self.scale = q, g, per_token, scale
        tokens = per_token["ids"].shape[0]
        super().__init__(q, Slots(per_token["ids"], per_token.get("length"), tokens, rows), g.shape[-1])
        matrices = 64 * (2 * self.head_dim + self.value_dim) + 2 * HEADS * BLOCK  # query, block and cotangent; P and dS
        # Contributions leave through tiles of their own if there is room, else through the block's.
        self.staged = (matrices + 2 * BLOCK * _CHUNK) * self.dtype.itemsize <= _SHARED_BYTES

    def launch(self, kv, first):
        tokens = self.tokens
        slots = (tokens, self.groups, self.topk, self.head_dim)
        outs = {
            "dq": jax.ShapeDtypeStruct((tokens, *self.q.shape[1:]), self.dtype),
            "contributions": jax.ShapeDtypeStruct(slots, self.dtype),
        }
        pair = plgpu.SMEM((2, BLOCK, _CHUNK), self.dtype, transforms=tiled(self.dtype))
        scratch = {
            "weights": pair,  # P and dS
            "weights_done": plgpu.Barrier(),
            "p_there": plgpu.Barrier(),
            "ds_there": plgpu.Barrier(),
            "both": plgpu.Barrier(num_arrivals=2),
        }
        if self.staged:
            scratch["staging"] = pair
        operands = {"q": self.q, "kv": kv, "g": self.g, "first": first[None]} | self.per_token
        return self.run("sparse_attention_backward", operands, outs, scratch)

    def tokens_to_do(self, memory):
        return jnp.minimum(np.int32(self.tokens), np.int32(self.q.shape[0]) - memory.first[0])

    def first_token(self, memory):
        return memory.first[0]

    def compute(self, memory, shared, side):
        mine = [side] + [2] * (side == 0 and len(self.pieces) > 2)  # pieces of rows whose gradients this side makes
        starts = [sum(self.pieces[:piece]) for piece in range(len(self.pieces))]

        def compute_item(_, token, head, blocks, before):
            plgpu.barrier_wait(shared.item_in)
            heads = pl.ds(head, HEADS)
            per_head = (memory.lse if side == 0 else memory.delta).at[token, heads]
            per_head = plgpu.load(per_head, layout=PER_HEAD, optimized=False)
            group = head // np.int32(HEADS)

            def block(j, sums):
                first_slot = j * np.int32(BLOCK)
                outs = [
                    memory.contributions.at[token, group, pl.ds(first_slot, BLOCK), pl.ds(starts[p], self.pieces[p])]
                    for p in range(len(self.pieces))
                ]
                return self._block(shared, side, mine, per_head, before + j, sums, outs)

            zeros = [plgpu.layout_cast(jnp.zeros((HEADS, self.pieces[piece]), jnp.float32), LAYOUT) for piece in mine]
            sums = lax.fori_loop(0, blocks, block, zeros)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._meet(shared)  # both are past their last product with the query: its place takes dq
            query = shared.matrix(_ZERO)
            for piece, total in zip(mine, sums, strict=True):
                query[piece][...] = total.astype(self.dtype)
            plgpu.commit_smem()
            for piece in mine:
                part = memory.dq.at[token, heads, pl.ds(starts[piece], self.pieces[piece])]
                plgpu.copy_smem_to_gmem(query[piece], part)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.item_done)

        _, blocks = self.for_each_item(memory, compute_item)
        if side == 0:  # every phase of a barrier has to be observed before the kernel ends
            pl.when(blocks > 0)(lambda: plgpu.barrier_wait(shared.weights_done))

    def _meet(self, shared):
        plgpu.barrier_arrive(shared.both)
        plgpu.barrier_wait(shared.both)

    def _block(self, shared, side, mine, per_head, seen, sums, outs):
        """Adds a block's share to this side's sums for dq, and stores its contributions."""
        plgpu.barrier_wait(shared.full.at[_ZERO])
        zero = shared.zero(_ZERO)
        query, keys = shared.matrix(_ZERO, zero), shared.block(_ZERO, zero)
        cotangent = shared.matrix(np.int32(2), zero, of_values=True)
        p_tile, ds_tile = (shared.weights.at[zero + np.int32(i)] for i in range(2))
        spread = lax.broadcast_in_dim(per_head, (HEADS, BLOCK), [0])
        if side == 0:
            rows = plgpu.load(shared.rows.at[_ZERO], layout=PER_SLOT, optimized=False)
            s = _product(query, [k.transpose((1, 0)) for k in keys])
            p = jnp.exp2(s * np.float32(self.scale * LOG2E) - spread)
            p = jnp.where(lax.broadcast_in_dim(rows, s.shape, [1]) >= 0, p, 0.0)
            # The other side is past its last product with the weights of the block before.
            pl.when(seen > 0)(lambda: plgpu.barrier_wait(shared.weights_done))
            p_tile[...] = p.astype(self.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.p_there)
            plgpu.barrier_wait(shared.p_there)
            plgpu.barrier_wait(shared.ds_there)
        else:
            dp = _product(cotangent, [k.transpose((1, 0)) for k in keys[:2]])
            plgpu.barrier_wait(shared.p_there)
            p = plgpu.load(p_tile, layout=LAYOUT, optimized=False).astype(jnp.float32)
            ds_tile[...] = (p * (dp - spread) * np.float32(self.scale)).astype(self.dtype)
            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.ds_there)
            plgpu.barrier_wait(shared.ds_there)
        sums = [_add_product(total, ds_tile, keys[piece]) for piece, total in zip(mine, sums, strict=True)]

        if self.staged:
            plgpu.barrier_arrive(shared.consumed.at[_ZERO])
        else:
            self._meet(shared)
        for piece in mine:
            for start in range(0, self.pieces[piece], _CHUNK):
                channels = pl.ds(start, _CHUNK)
                weights, factors = [ds_tile], [query[piece].at[:, channels]]
                if piece < 2:
                    weights, factors = [ds_tile, p_tile], factors + [cotangent[piece].at[:, channels]]
                part = _product([w.transpose((1, 0)) for w in weights], factors).astype(self.dtype)
                if self.staged:
                    tile = shared.staging.at[np.int32(side)]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    tile[...] = part
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(tile, outs[piece].at[:, channels])
                else:
                    keys[piece].at[:, channels][...] = part
        if side == 1:
            plgpu.barrier_arrive(shared.weights_done)
        if not self.staged:
            plgpu.commit_smem()
            for piece in mine:
                plgpu.copy_smem_to_gmem(keys[piece], outs[piece])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.consumed.at[_ZERO])
        return sums


def _product(a, b):
    """Sum of a @ b over pairs of tiles in shared memory."""

    def multiply(result):
        for x, y in zip(a, b, strict=True):
            plgpu.wgmma(result, x, y)
        return result[...]

    return pl.run_scoped(multiply, plgpu.ACC((a[0].shape[0], b[0].shape[1]), jnp.float32))


def _add_product(total, a, b):
    """total + a @ b, of tiles in shared memory."""
    if dispatch.interpreting():  # the simulator has no product under run_state
        return total + _product([a], [b])
    return pl.run_state(lambda result: plgpu.wgmma(result, a, b))(plgpu.ACC.init(total))
