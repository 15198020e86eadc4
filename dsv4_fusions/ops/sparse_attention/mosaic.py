"""Sparse attention on Pallas' Mosaic GPU backend, for Hopper.

The grid is persistent. On each multiprocessor one warpgroup gathers rows into a ring of tiles in shared memory, a block
of slots at a time, and two others compute. An item of work is one token and 64 of its heads, which fill the matrix
instruction. Both warpgroups make all of its scores, and each sums half of the values' channels, so that neither waits
for a score of the other's.

Rows come by `cp.async`, 16 bytes a thread, because Hopper's copy engine cannot gather. An empty slot is filled with
zeros and reads no memory. The tile of an item's last block takes its output on the way out, and its query's place is
taken by the next item's as soon as the last scores are there.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4_fusions import dispatch
from dsv4_fusions.mosaic import divmod_, over_few_entries, tiled
from dsv4_fusions.ops.sparse_attention.slots import Slots

HEADS = 64
"""Heads of an item."""
_BLOCK = 64  # slots of a tile
_STAGES = 2  # tiles in the ring, an even number
_LAYOUT = plgpu.Layout.WGMMA
_PER_HEAD, _PER_SLOT = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_LOG2E = math.log2(math.e)

# How the gathering warpgroup works: 8 threads copy 128 bytes of a row, 16 rows at a time. A thread keeps the numbers of
# the rows that it copies parts of in one register of this layout.
_ROWS_AT_ONCE = 16
_ROWS_PER_THREAD = _BLOCK // _ROWS_AT_ONCE
_ROWS_SHAPE = (128 * _ROWS_PER_THREAD,)
_ROWS = plgpu.Layout.WG_STRIDED(_ROWS_SHAPE, vec_size=_ROWS_PER_THREAD)


def forward(q, kv, slots: Slots, sink, *, scale: float, value_dim: int):
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
    return _Forward(q, kv, slots, sink, scale, value_dim).launch()


class _Forward:
    """One launch: operands, what is static about them, and the kernel."""

    def __init__(self, q, kv, slots, sink, scale, value_dim):
        self.q, self.kv, self.slots, self.sink = q, kv, slots, sink
        self.tokens, self.heads, self.head_dim = q.shape
        self.topk = slots.ids.shape[1]
        self.value_dim, self.half, self.scale = value_dim, value_dim // 2, scale * _LOG2E
        self.groups = self.heads // HEADS
        self.items = self.tokens * self.groups
        self.grid = min(self.items, 2 if dispatch.interpreting() else dispatch.target().cores or 132)
        # Rows are kept in pieces: a half of the values each, and the channels that are in keys alone.
        self.pieces = [self.half, self.half] + [self.head_dim - value_dim] * (self.head_dim > value_dim)

    def launch(self):
        shape, dtype = (self.tokens, self.heads), self.q.dtype
        outs = [jax.ShapeDtypeStruct((*shape, self.value_dim), dtype), jax.ShapeDtypeStruct(shape, jnp.float32)]
        length = [] if self.slots.length is None else [self.slots.length]
        operands = [self.q, self.kv, self.sink, self.slots.ids, *length]
        tiles = lambda *lead: [plgpu.SMEM((*lead, width), dtype, transforms=tiled(dtype)) for width in self.pieces]  # noqa: E731
        scratch = {
            "query": tiles(HEADS),
            "ring": tiles(_STAGES, _BLOCK),
            "rows": plgpu.SMEM((_STAGES, _BLOCK), jnp.int32),
            "query_in": plgpu.Barrier(num_arrivals=len(self.pieces)),
            "query_done": plgpu.Barrier(num_arrivals=2),
            "full": plgpu.Barrier(num_barriers=_STAGES),
            "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        }

        def entry(q, kv, sink, ids, *refs):
            memory = _Memory(q, kv, sink, ids, refs[0] if length else None, *refs[-2:])
            pl.run_scoped(lambda **shared: self._kernel(memory, _Shared(**shared)), collective_axes="wg", **scratch)

        kernel = plgpu.kernel(
            entry,
            out_type=outs,
            grid=(self.grid,),
            grid_names=("sm",),
            num_threads=3,
            thread_name="wg",
            kernel_name="sparse_attention",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            **({"interpret": plgpu.InterpretGPUParams()} if dispatch.interpreting() else {}),
        )
        # The kernel is traced without its operands' manual axes and gives its outputs none.
        return [dispatch.align_manual_axes(out, self.q)[0] for out in over_few_entries(kernel)(*operands)]

    # --- the kernel ---

    def _kernel(self, memory, shared):
        warpgroup = lax.axis_index("wg")
        for side in range(2):
            pl.when(warpgroup == side)(lambda side=side: self._compute(memory, shared, side))
        pl.when(warpgroup == 2)(lambda: self._gather(memory, shared))

    def _for_each_item(self, memory, body):
        """Calls body(i, token, first head, blocks, blocks before) for this multiprocessor's items; returns (i, blocks).

        Neighbouring tokens are worked on at one time, so that the rows that they share stay cached.
        """
        sm, items = lax.axis_index("sm"), np.int32(self.items)

        def step(i, before):
            token, group = divmod_(sm + i * np.int32(self.grid), self.groups)
            # An item without slots has one empty block, for its output needs a tile.
            blocks = jnp.maximum(divmod_(self._length(memory, token) + np.int32(_BLOCK - 1), _BLOCK)[0], 1)
            body(i, token, group * np.int32(HEADS), blocks, before)
            return before + blocks

        count = divmod_(items - sm + np.int32(self.grid - 1), self.grid)[0]
        return count, lax.fori_loop(0, count, step, np.int32(0))

    def _length(self, memory, token):
        topk = np.int32(self.topk)
        return topk if memory.length is None else jnp.clip(memory.length[token], 0, topk)

    def _gather(self, memory, shared):
        plgpu.set_max_registers(40, action="decrease")

        def gather_item(i, token, head, blocks, before):
            length = self._length(memory, token)
            base = divmod_(token, self.slots.tokens_per_entry)[0] * np.int32(self.slots.rows_per_entry)

            def load_query():
                pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.query_done))
                start = 0
                for tile in shared.query:
                    part = memory.q.at[token, pl.ds(head, HEADS), pl.ds(start, tile.shape[-1])]
                    plgpu.copy_gmem_to_smem(part, tile, shared.query_in)
                    start += tile.shape[-1]

            def load_block(j, _):
                seen = before + j
                stage = divmod_(seen, _STAGES)[1]
                tiles, rows_tile = [piece.at[stage] for piece in shared.ring], shared.rows.at[stage]
                # Ahead of the wait, which hides the latency of reading the table.
                rows = _fetch_rows(memory.ids, token, j * np.int32(_BLOCK), length, base, self.slots.rows_per_entry)
                pl.when(seen >= _STAGES)(lambda: plgpu.barrier_wait(shared.consumed.at[stage]))
                _start_copies(rows, memory.kv, tiles, rows_tile)
                # Not ahead of the first rows: the last item still needs its query while they are on their way.
                pl.when(j == 0)(load_query)
                _finish_copies()
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared.full.at[stage])

            lax.fori_loop(0, blocks, load_block, None)

        count, blocks = self._for_each_item(memory, gather_item)

        def drain(seen, _):  # every phase of a barrier has to be observed before the kernel ends
            plgpu.barrier_wait(shared.consumed.at[divmod_(seen, _STAGES)[1]])

        lax.fori_loop(jnp.maximum(blocks - _STAGES, 0), blocks, drain, None)
        pl.when(count > 0)(lambda: plgpu.barrier_wait(shared.query_done))

    def _compute(self, memory, shared, side):
        plgpu.set_max_registers(232, action="increase")

        def compute_item(_, token, head, blocks, before):
            plgpu.barrier_wait(shared.query_in)
            carry = (
                plgpu.layout_cast(jnp.zeros((HEADS, self.half), jnp.float32), _LAYOUT),
                plgpu.layout_cast(jnp.full((HEADS,), -jnp.inf, jnp.float32), _PER_HEAD),
                plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _PER_HEAD),
            )
            stage = lambda j: divmod_(before + j, _STAGES)[1]  # noqa: E731

            def step(j, carry):
                carry = self._block(shared, side, stage(j), carry)
                plgpu.barrier_arrive(shared.consumed.at[stage(j)])
                return carry

            carry = lax.fori_loop(0, blocks - 1, step, carry)
            last = stage(blocks - 1)
            sums, peak, total = self._block(shared, side, last, carry, scored=shared.query_done)

            heads = pl.ds(head, HEADS)
            sink = plgpu.load(memory.sink.at[heads], layout=_PER_HEAD, optimized=False) * np.float32(_LOG2E)
            top = _finite(jnp.maximum(peak, sink))
            shrink = jnp.exp2(peak - top)
            total = total * shrink + jnp.exp2(sink - top)
            factor = jnp.where(total == 0.0, 0.0, shrink / jnp.where(total == 0.0, 1.0, total))
            out = shared.ring[side].at[last]
            plgpu.barrier_wait(shared.query_done)  # the other side has made its scores of this tile, too
            out[...] = (sums * _columns(factor, self.half)).astype(self.q.dtype)
            plgpu.commit_smem()
            half = pl.ds(side * self.half, self.half)
            plgpu.copy_smem_to_gmem(out, memory.out.at[token, heads, half])
            if side == 0:
                memory.lse[token, heads] = top + jnp.log(total) * np.float32(_LOG2E)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(shared.consumed.at[last])

        self._for_each_item(memory, compute_item)
        plgpu.wait_smem_to_gmem(0)

    def _block(self, shared, side, stage, carry, scored=None):
        """One step of the streaming softmax; arrives at `scored` when the query is not needed any more."""
        sums, peak, total = carry
        plgpu.barrier_wait(shared.full.at[stage])

        def scores(result):
            for query, keys in zip(shared.query, shared.ring, strict=True):
                plgpu.wgmma(result, query, keys.at[stage].transpose((1, 0)))
            return result[...]

        s = pl.run_scoped(scores, plgpu.ACC((HEADS, _BLOCK), jnp.float32))
        if scored is not None:
            plgpu.barrier_arrive(scored)
        rows = plgpu.load(shared.rows.at[stage], layout=_PER_SLOT, optimized=False)
        s = jnp.where(lax.broadcast_in_dim(rows, s.shape, [1]) >= 0, s * np.float32(self.scale), -jnp.inf)
        new_peak = jnp.maximum(peak, s.max(axis=1))
        top = _finite(new_peak)  # all slots empty so far: -inf - -inf would be NaN
        shrink = jnp.exp2(peak - top)
        p = jnp.exp2(s - _columns(top, _BLOCK))
        total = total * shrink + p.sum(axis=1)
        sums = _add_product(sums * _columns(shrink, self.half), p.astype(self.q.dtype), shared.ring[side].at[stage])
        return sums, new_peak, total


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Refs to device memory."""

    q: object
    kv: object
    sink: object
    ids: object
    length: object
    out: object
    lse: object


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory of a multiprocessor, and the barriers that say when it is filled and when it is free again."""

    query: list
    ring: list
    rows: object
    query_in: object
    query_done: object
    full: object
    consumed: object


def _finite(peak):
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def _columns(per_head, width):
    return lax.broadcast_in_dim(per_head, (HEADS, width), [0])


def _add_product(sums, p, values):
    """sums + p @ values, of p in registers and values in shared memory."""
    if dispatch.interpreting():  # the simulator wants both in shared memory
        return sums + jnp.dot(p, values[...], preferred_element_type=jnp.float32)
    return pl.run_state(lambda result: plgpu.wgmma(result, p, values))(plgpu.ACC.init(sums))


# --- the gather, below Pallas: it has no asynchronous copy of single rows ---


def _fetch_rows(ids_ref, token, first, length, base, limit):
    """The row of each of a block's slots, from `first` on, or -1 where there is none."""
    if dispatch.interpreting():

        def fetch_row(i, rows):
            slot = first + i
            row = ids_ref[token, jnp.minimum(slot, ids_ref.shape[1] - 1)]
            return rows.at[i].set(jnp.where((slot < length) & (row >= 0) & (row < limit), row + base, -1))

        return lax.fori_loop(0, _BLOCK, fetch_row, jnp.zeros(_BLOCK, jnp.int32))
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    result = plgpu.ShapeDtypeStruct(_ROWS_SHAPE, jnp.int32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[plgpu.Layout.WG_SPLAT] * 4), return_type=result)
    def fetch(_, ids, token, first, length, base):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        token, first, length, base = (x.registers.item() for x in (token, first, length, base))
        table = _global_pointer(utils.memref_ptr(ids))
        start = arith.muli(arith.extui(i64, token), arith.constant(i64, ids_ref.shape[1]))
        rows = []
        for i in range(_ROWS_PER_THREAD):
            slot = arith.addi(first, arith.addi(_place()[0], arith.constant(i32, i * _ROWS_AT_ONCE)))
            is_there = arith.cmpi(arith.CmpIPredicate.slt, slot, length)
            at = arith.addi(start, arith.extui(i64, arith.select(is_there, slot, first)))
            row = llvm.load(i32, utils.getelementptr(table, [at], i32))
            # Unsigned, a negative id is above every limit.
            is_row = arith.cmpi(arith.CmpIPredicate.ult, row, arith.constant(i32, limit))
            is_row = arith.andi(is_there, is_row)
            rows.append(arith.select(is_row, arith.addi(row, base), arith.constant(i32, -1)))
        packed = vector.from_elements(ir.VectorType.get((len(rows),), i32), rows)
        registers = np.array([packed], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=_ROWS.to_mgpu(), _is_signed=True)

    return fetch(ids_ref, token, first, length, base)


def _start_copies(rows, kv_ref, tiles, rows_tile):
    """Starts copying rows into tiles that each hold some of their channels, and writes their numbers to rows_tile."""
    if dispatch.interpreting():

        def copy_row(i, _):
            start = 0
            for tile in tiles:
                part = kv_ref[jnp.maximum(rows[i], 0), pl.ds(start, tile.shape[-1])]
                tile[i, :] = jnp.where(rows[i] >= 0, part, 0)
                start += tile.shape[-1]

        lax.fori_loop(0, _BLOCK, copy_row, None)
        rows_tile[...] = rows
        return
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

    tile_type = plgpu.RefType(tiled(kv_ref.dtype))

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.RefType(), plgpu.RefType(), *[tile_type] * len(tiles)))
    def copy(_, rows, kv, rows_tile, *tile_refs):
        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        constant = lambda value: arith.constant(i32, value)  # noqa: E731
        row_in_16, chunk = _place()
        # A tile of a matrix is cells of 8 rows x 128 bytes, one after the other along the channels first. In row r of a
        # cell, the 16 bytes in place c stand in place c ^ r: that is the swizzle.
        cell, row_in_cell = arith.divui(row_in_16, constant(8)), arith.remui(row_in_16, constant(8))
        in_cell = arith.muli(row_in_cell, constant(128))
        in_cell = arith.addi(in_cell, arith.muli(arith.xori(chunk, row_in_cell), constant(16)))
        targets = []  # (pointer, bytes to the same place 16 rows on) for each 128 bytes of a row
        for tile, ref in zip(tiles, tile_refs, strict=True):
            cells = tile.shape[-1] // 64  # along the channels
            offset = arith.addi(in_cell, arith.muli(cell, constant(cells * 1024)))
            pointer = utils.memref_ptr(ref)
            targets += [
                (utils.getelementptr(pointer, [arith.addi(offset, constant(i * 1024))], i8), 2 * cells * 1024)
                for i in range(cells)
            ]
        memory, numbers = _global_pointer(utils.memref_ptr(kv)), utils.memref_ptr(rows_tile)
        for i in range(_ROWS_PER_THREAD):
            row = vector.extract(rows.registers.item(), [], [i])
            is_row = arith.cmpi(arith.CmpIPredicate.sge, row, constant(0))
            size = arith.select(is_row, constant(16), constant(0))  # of 0 bytes, it writes zeros and reads nothing
            row64 = arith.extui(i64, arith.select(is_row, row, constant(0)))
            start = arith.addi(
                arith.muli(row64, arith.constant(i64, 2 * kv_ref.shape[-1])),
                arith.extui(i64, arith.muli(chunk, constant(16))),
            )
            source = utils.getelementptr(memory, [start], i8)
            for at, (pointer, stride) in enumerate(targets):
                nvvm.cp_async_shared_global(
                    utils.getelementptr(pointer, [i * stride], i8),
                    utils.getelementptr(source, [at * 128], i8),
                    16,
                    nvvm.LoadCacheModifierKind.CG,
                    cp_size=size,
                )
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, chunk, constant(0))):
                slot = arith.addi(row_in_16, constant(i * _ROWS_AT_ONCE))
                llvm.store(row, utils.getelementptr(numbers, [slot], i32))
        nvvm.cp_async_commit_group()
        return ()

    copy(rows, kv_ref, rows_tile, *tiles)


def _finish_copies():
    """Waits until the rows that this thread copies have come."""
    if dispatch.interpreting():
        return
    from jaxlib.mlir.dialects import nvvm

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(0)
        return ()

    wait()


def _place():
    """(row of 16, 16 bytes of 128) that this thread copies."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    constant = lambda value: arith.constant(ir.IntegerType.get_signless(32), value)  # noqa: E731
    thread = arith.remui(utils.thread_idx(), constant(128))
    return arith.divui(thread, constant(8)), arith.remui(thread, constant(8))


def _global_pointer(pointer):
    from jaxlib.mlir.dialects import llvm

    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
