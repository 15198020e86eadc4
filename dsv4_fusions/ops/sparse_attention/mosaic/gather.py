"""The gather of rows into shared memory, below Pallas: it has no asynchronous copy of single rows.

Rows come by `cp.async`, 16 bytes a thread, because Hopper's copy engine cannot gather. An empty slot is filled with
zeros and reads no memory.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4_fusions import dispatch
from dsv4_fusions.mosaic import divmod_, tiled
from dsv4_fusions.ops.sparse_attention.slots import RunSlots, Slots

BLOCK = 64
"""Slots that are gathered at a time."""

# How the gathering warpgroup works: 8 threads copy 128 bytes of a row, 16 rows at a time. A thread keeps the numbers of
# the rows that it copies parts of in one register of this layout.
_ROWS_AT_ONCE = 16
_ROWS_PER_THREAD = BLOCK // _ROWS_AT_ONCE
_ROWS_SHAPE = (128 * _ROWS_PER_THREAD,)
_ROWS = plgpu.Layout.WG_STRIDED(_ROWS_SHAPE, vec_size=_ROWS_PER_THREAD)


class TableRows:
    """The rows of blocks of slots, from a table of ids."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.operands = {"ids": slots.ids, "length": slots.length}

    def count(self, memory, token):
        """How many slots of a token are looked at."""
        topk = np.int32(self.slots.shape[1])
        return topk if memory.length is None else jnp.clip(memory.length[token], 0, topk)

    def of_token(self, memory, token):
        """fetch(first): the rows of the token's slots from `first` on, a block of them, -1 for an empty one."""
        limit = np.int32(self.slots.rows_per_entry)
        ids_ref, count = memory.ids, self.count(memory, token)
        base = divmod_(token, self.slots.tokens_per_entry)[0] * limit

        def simulate(first):
            def add(i, rows):
                row = ids_ref[token, jnp.minimum(first + i, ids_ref.shape[1] - 1)]
                is_row = (first + i < count) & (row >= 0) & (row < limit)
                return rows.at[i].set(jnp.where(is_row, row + base, -1))

            return lax.fori_loop(0, BLOCK, add, jnp.zeros(BLOCK, jnp.int32))

        def emit(op, slot, ids, first, token, count, base):
            start = op.muli(op.extui(_integer(64), token), op.constant(_integer(64), ids_ref.shape[1]))
            is_there = op.cmpi(op.CmpIPredicate.slt, slot, count)
            at = op.addi(start, op.extui(_integer(64), op.select(is_there, slot, first)))
            row = _load(ids, at)
            # Unsigned, a negative id is above every limit.
            is_row = op.cmpi(op.CmpIPredicate.ult, row, op.constant(_integer(32), int(limit)))
            return op.select(op.andi(is_there, is_row), op.addi(row, base), op.constant(_integer(32), -1))

        return lambda first: _rows_of_block(simulate, emit, [ids_ref], [first, token, count, base])


class RunRows:
    """The rows of blocks of slots, worked out from two runs; the interface is that of `TableRows`."""

    def __init__(self, slots: RunSlots):
        self.slots = slots
        self.operands = {"runs": slots.runs}

    def count(self, memory, token):
        return memory.runs[token, 3]

    def of_token(self, memory, token):
        near, near_count, far, count = (memory.runs[token, i] for i in range(4))

        def simulate(first):
            slot = first + jnp.arange(BLOCK, dtype=jnp.int32)
            return jnp.where(slot < count, slot + jnp.where(slot < near_count, near, far), -1)

        def emit(op, slot, _, near, near_count, far, count):
            is_near = op.cmpi(op.CmpIPredicate.slt, slot, near_count)
            row = op.addi(slot, op.select(is_near, near, far))
            is_there = op.cmpi(op.CmpIPredicate.slt, slot, count)
            return op.select(is_there, row, op.constant(_integer(32), -1))

        return lambda first: _rows_of_block(simulate, emit, [], [first, near, near_count, far, count])


def _rows_of_block(simulate, emit, refs, scalars):
    """The rows of the slots from scalars[0] on.

    Args:
      simulate: of the first slot, gives those of the block.
      emit: of MLIR's arithmetic operations, a slot, `refs` and `scalars`, gives that slot's.
      refs: to device memory.
      scalars: int32, the same in all threads.
    """
    if dispatch.interpreting():
        return simulate(scalars[0])
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    types = [plgpu.RefType()] * len(refs) + [plgpu.Layout.WG_SPLAT] * len(scalars)
    result = plgpu.ShapeDtypeStruct(_ROWS_SHAPE, jnp.int32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=types, return_type=result)
    def fetch(_, *args):
        refs_in, values = args[: len(refs)], [x.registers.item() for x in args[len(refs) :]]
        first = arith.addi(values[0], _place()[0])
        rows = []
        for i in range(_ROWS_PER_THREAD):
            slot = arith.addi(first, arith.constant(_integer(32), i * _ROWS_AT_ONCE))
            rows.append(emit(arith, slot, *refs_in, *values))
        packed = vector.from_elements(ir.VectorType.get((len(rows),), _integer(32)), rows)
        registers = np.array([packed], dtype=object)
        return mgpu.FragmentedArray(_registers=registers, _layout=_ROWS.to_mgpu(), _is_signed=True)

    return fetch(*refs, *scalars)


def start_copies(rows, kv_ref, tiles, rows_tile):
    """Starts copying rows into tiles that each hold some of their channels, and writes their numbers to rows_tile."""
    if dispatch.interpreting():

        def copy_row(i, _):
            start = 0
            for tile in tiles:
                part = kv_ref[jnp.maximum(rows[i], 0), pl.ds(start, tile.shape[-1])]
                tile[i, :] = jnp.where(rows[i] >= 0, part, 0)
                start += tile.shape[-1]

        lax.fori_loop(0, BLOCK, copy_row, None)
        rows_tile[...] = rows
        return
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

    tile_type = plgpu.RefType(tiled(kv_ref.dtype))

    @plgpu.inline_mgpu(arg_types=(_ROWS, plgpu.RefType(), plgpu.RefType(), *[tile_type] * len(tiles)))
    def copy(_, rows, kv, rows_tile, *tile_refs):
        i8, i32, i64 = map(_integer, (8, 32, 64))
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


def finish_copies():
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
    from jaxlib.mlir.dialects import arith

    constant = lambda value: arith.constant(_integer(32), value)  # noqa: E731
    thread = arith.remui(utils.thread_idx(), constant(128))
    return arith.divui(thread, constant(8)), arith.remui(thread, constant(8))


def _integer(bits):
    from jaxlib.mlir import ir

    return ir.IntegerType.get_signless(bits)


def _load(ref, at):
    """The int32 element of a ref to device memory that stands at an offset."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import llvm

    pointer = _global_pointer(utils.memref_ptr(ref))
    return llvm.load(_integer(32), utils.getelementptr(pointer, [at], _integer(32)))


def _global_pointer(pointer):
    from jaxlib.mlir.dialects import llvm

    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
