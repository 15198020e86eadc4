"""What the two kernels share: how the work is cut, what shared memory holds, and the warpgroup that gathers rows.

The grid is persistent. On each multiprocessor one warpgroup gathers rows into tiles in shared memory, a block of slots
at a time, and two others compute. An item of work is one token and 64 of its heads, which fill the matrix instruction.
"""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from dsv4_fusions import dispatch
from dsv4_fusions.mosaic import divmod_, over_few_entries, tiled
from dsv4_fusions.ops.sparse_attention.mosaic.gather import BLOCK, RunRows, TableRows, finish_copies, start_copies
from dsv4_fusions.ops.sparse_attention.slots import RunSlots

HEADS = 64
"""Heads of an item."""
LAYOUT = plgpu.Layout.WGMMA
PER_HEAD, PER_SLOT = LAYOUT.reduce(1), LAYOUT.reduce(0)
LOG2E = math.log2(math.e)
"""The kernels work in base 2: exp2 is an instruction."""
_ZERO = np.int32(0)


def in_base_2(sink: Float32[Array, "heads"]) -> Float32[Array, "heads"]:
    """The sink as a power of 2, rounded once, finite where it was.

    It is compared with sums that it is the largest term of, or all of. Multiplied where it is subtracted from them, it
    would become one operation with the subtraction and keep digits that they have lost: for a sink of 1e30 the
    difference of the two, which is 0, would be 1e22.
    """
    finite = jnp.clip(sink * np.float32(LOG2E), np.finfo(np.float32).min, np.finfo(np.float32).max)
    return lax.optimization_barrier(jnp.where(sink == -jnp.inf, sink, finite))


class Launch:
    """One launch: what is static about it, and the gathering warpgroup. A kernel adds those that compute.

    In shared memory a matrix of 64 heads or slots is kept in pieces: a half of the values' channels each, and the
    channels that are in keys alone. Matrix 0 is an item's query, those behind it are the ring of gathered blocks, and
    behind them comes what else an item reads, of values' width.
    """

    stages: int
    """Blocks in the ring."""
    per_item: tuple[str, ...]
    """Operands of which an item reads its heads' rows: the first has keys' width, the others values'."""

    def __init__(self, q, slots, value_dim):
        self.dtype, self.head_dim, self.value_dim = q.dtype, q.shape[2], value_dim
        self.tokens, self.topk = slots.shape
        self.rows = RunRows(slots) if isinstance(slots, RunSlots) else TableRows(slots)
        self.half = value_dim // 2
        self.groups = q.shape[1] // HEADS
        self.grid = min(self.tokens * self.groups, 2 if dispatch.interpreting() else dispatch.target().cores or 132)
        self.pieces = [self.half, self.half] + [self.head_dim - value_dim] * (self.head_dim > value_dim)

    def compute(self, memory, shared, side):
        """What one of the two computing warpgroups does."""
        raise NotImplementedError

    def run(self, name, operands, outs, scratch):
        """Launches the kernel.

        Args:
          name: the kernel's.
          operands: arrays by name, `q`, `kv` and the kernel's own; those that say which rows to read are added.
          outs: shapes and dtypes of outputs by name.
          scratch: shared memory and barriers of the kernel's own by name.

        Returns:
          The outputs.
        """
        extra = len(self.per_item) - 1
        matrices = lambda count, width: plgpu.SMEM((count, 64, width), self.dtype, transforms=tiled(self.dtype))  # noqa: E731
        scratch = scratch | {
            "halves": matrices(2 * (1 + self.stages + extra), self.half),
            "rows": plgpu.SMEM((self.stages, BLOCK), jnp.int32),
            "item_in": plgpu.Barrier(num_arrivals=len(self.pieces) + 2 * extra),
            "item_done": plgpu.Barrier(num_arrivals=2),
            "full": plgpu.Barrier(num_barriers=self.stages),
            "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
        }
        if len(self.pieces) > 2:
            scratch["tails"] = matrices(1 + self.stages, self.pieces[2])
        operands = operands | self.rows.operands
        there = [key for key, value in operands.items() if value is not None]

        def entry(*refs):
            memory = SimpleNamespace(**dict.fromkeys(operands) | dict(zip([*there, *outs], refs, strict=True)))
            pl.run_scoped(
                lambda **refs: self._kernel(memory, Shared(**{"tails": None} | refs)), collective_axes="wg", **scratch
            )

        kernel = plgpu.kernel(
            entry,
            out_type=list(outs.values()),
            grid=(self.grid,),
            grid_names=("sm",),
            num_threads=3,
            thread_name="wg",
            kernel_name=name,
            compiler_params=plgpu.CompilerParams(approx_math=True),
            **({"interpret": plgpu.InterpretGPUParams()} if dispatch.interpreting() else {}),
        )
        results = over_few_entries(kernel)(*(operands[key] for key in there))
        # The kernel is traced without its operands' manual axes and gives its outputs none.
        return [dispatch.align_manual_axes(out, operands["q"])[0] for out in results]

    def _kernel(self, memory, shared):
        warpgroup = lax.axis_index("wg")
        for side in range(2):
            pl.when(warpgroup == side)(lambda side=side: self._compute(memory, shared, side))
        pl.when(warpgroup == 2)(lambda: self._gather(memory, shared))

    def _compute(self, memory, shared, side):
        plgpu.set_max_registers(232, action="increase")
        self.compute(memory, shared, side)
        plgpu.wait_smem_to_gmem(0)

    def for_each_item(self, memory, body):
        """Calls body(i, token, first head, blocks, blocks before) for this multiprocessor's items; returns (i, blocks).

        Neighbouring tokens are worked on at one time, so that the rows that they share stay cached.
        """
        sm, items = lax.axis_index("sm"), self.tokens_to_do(memory) * np.int32(self.groups)

        def step(i, before):
            token, group = divmod_(sm + i * np.int32(self.grid), self.groups)
            # An item without slots has one empty block.
            blocks = jnp.maximum(divmod_(self.rows.count(memory, token) + np.int32(BLOCK - 1), BLOCK)[0], 1)
            body(i, token, group * np.int32(HEADS), blocks, before)
            return before + blocks

        count = divmod_(items - sm + np.int32(self.grid - 1), self.grid)[0]
        return count, lax.fori_loop(0, count, step, np.int32(0))

    def tokens_to_do(self, memory):
        """Tokens of the table to work on."""
        return np.int32(self.tokens)

    def first_token(self, memory):
        """The token of `q` that the table begins with."""
        return np.int32(0)

    def _gather(self, memory, shared):
        plgpu.set_max_registers(40, action="decrease")

        def gather_item(i, token, head, blocks, before):
            fetch = self.rows.of_token(memory, token)

            def load_item():
                pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.item_done))
                for number, name in enumerate(self.per_item):
                    source, start = getattr(memory, name), 0
                    at = np.int32(self.stages + number if number else 0)
                    tiles = shared.matrix(at, of_values=number > 0)
                    for tile in tiles:
                        width = tile.shape[-1]
                        part = source.at[self.first_token(memory) + token, pl.ds(head, HEADS), pl.ds(start, width)]
                        plgpu.copy_gmem_to_smem(part, tile, shared.item_in)
                        start += width

            def load_block(j, _):
                seen = before + j
                stage = divmod_(seen, self.stages)[1]
                # Ahead of the wait, which hides the latency of reading the table.
                rows = fetch(j * np.int32(BLOCK))
                pl.when(seen >= self.stages)(lambda: plgpu.barrier_wait(shared.consumed.at[stage]))
                start_copies(rows, memory.kv, shared.block(stage), shared.rows.at[stage])
                # Not ahead of the first rows: the last item still needs its own while they are on their way.
                pl.when(j == 0)(load_item)
                finish_copies()
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared.full.at[stage])

            lax.fori_loop(0, blocks, load_block, None)

        count, blocks = self.for_each_item(memory, gather_item)

        def drain(seen, _):  # every phase of a barrier has to be observed before the kernel ends
            plgpu.barrier_wait(shared.consumed.at[divmod_(seen, self.stages)[1]])

        lax.fori_loop(jnp.maximum(blocks - self.stages, 0), blocks, drain, None)
        pl.when(count > 0)(lambda: plgpu.barrier_wait(shared.item_done))


class Shared(SimpleNamespace):
    """Shared memory of a multiprocessor, and the barriers that say when it is filled and when it is free again."""

    def matrix(self, number, zero=_ZERO, *, of_values=False) -> list:
        """The pieces of a matrix of keys' or of values' width; `zero` is 0, see there."""
        halves = [self.halves.at[zero + np.int32(2) * number + np.int32(half)] for half in range(2)]
        return halves if of_values or self.tails is None else [*halves, self.tails.at[zero + number]]

    def block(self, stage, zero=_ZERO) -> list:
        """The pieces of a gathered block."""
        return self.matrix(stage + np.int32(1), zero)

    def zero(self, stage):
        """0, which the compiler does not know, to add to the indices of tiles that matrix products read.

        It works out what describes such a tile to the matrix instruction for each 16 channels. For a tile in a place
        that it knows, it does so once, ahead of all loops, and keeps the results: more than there are registers for.
        Spilling them and reading them back cost the forward an eighth of its time and the backward three fifths.
        """
        return lax.shift_right_logical(self.rows[stage, 0] + np.int32(1), np.int32(31))
