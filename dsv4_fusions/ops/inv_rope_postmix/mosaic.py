"""The postmix and its single-pass gradient on Pallas' Mosaic GPU backend, for Hopper, with or without the rotation.

One kernel serves all. Its grid is persistent: on each multiprocessor one warpgroup copies tiles of heads x 128 channels
into a ring in shared memory, and two others take them in turn. What they do with a tile is set by what is wanted:

    forward     rotate X; out = M X
    dX          dX = M^T dOut; rotate dX
    dM          rotate X; dM += dOut X^T
    both        the two above, from one read of X and dOut

A rotation takes place in shared memory, where the tile lies anyway.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from dsv4_fusions import dispatch, numerics, rope
from dsv4_fusions.mosaic import divmod_, over_few_entries, tiled
from dsv4_fusions.ops.inv_rope_postmix.tiling import MOSAIC_CHANNELS as CHANNELS

_BLOCK = 64  # channels rotated at a time
_STAGES = {1: 8, 2: 4}  # tiles in the ring, an even number, by the number of arrays that are read
_OUT_TILES = 2  # of a warpgroup: one is filled while another is written out
_RUN = 8  # consecutive tiles that a multiprocessor takes, where nothing is summed
_CHUNK = 32  # tokens of a partial weight gradient. It fixes the reduction tree, so it must not depend on the chip.
_LAYOUT = plgpu.Layout.WGMMA


def forward(weights, x, tables: rope.RopeTables | None):
    """The postmix of x, or of inv_rope(x) where tables are given; see `triton.forward`."""
    return _Call(weights[0], x, None, tables, want_product=True, want_sums=False).launch()[0].reshape(x.shape)


def single_pass_backward(weights, x, tables: rope.RopeTables | None, g, wanted):
    """(dx, dweights) in one pass over x and g; see `xla.single_pass_backward`."""
    m = weights[0] if wanted.activation else None
    call = _Call(m, x, g, tables, want_product=wanted.activation, want_sums=wanted.weights)
    results = iter(call.launch())
    dx = next(results).reshape(g.shape) if wanted.activation else None
    return dx, (numerics.sum_in_order(next(results)),) if wanted.weights else None


class _Call:
    """One launch: operands, what is static about them, and the kernel."""

    def __init__(self, m, x, g, tables, want_product, want_sums):
        self.m, self.want_product, self.want_sums = m, want_product, want_sums
        self.backward = g is not None
        like = g if self.backward else x
        self.heads, self.head_dim, self.dtype = *like.shape[-2:], like.dtype
        # The arrays that are read tile by tile; the last one is what M is multiplied with.
        streams = [x] * (want_sums or not self.backward) + [g] * self.backward
        self.streams = [stream.reshape(-1, self.heads, self.head_dim) for stream in streams]
        self.tokens = self.streams[0].shape[0]
        self.stages = _STAGES[len(streams)]
        self.tiles = self.head_dim // CHANNELS  # of a token
        self.items = self.tokens * self.tiles
        self.run = _CHUNK * self.tiles if want_sums else _RUN
        self.runs = pl.cdiv(self.items, self.run)
        self.grid = min(self.runs, 2 if dispatch.interpreting() else dispatch.target().cores or 132)
        self.tables, self.rope_dim, self.rounding = [], 0, "once"
        if tables is not None:
            self.rope_dim, self.rounding = tables.cos.shape[-1], tables.rounding
            self.tables = [self._coefficients(tables, like.shape[:-2])]

    def _coefficients(self, tables, lead):
        """[tokens, 2, blocks * 64]: `rope.coefficients` of the inverse rotation.

        Columns in front stand for channels that are not rotary but lie in the first block that is touched.
        """
        packed = jnp.stack(rope.coefficients(rope.prepare_tables(tables, self.dtype), inverse=True), axis=-2)
        packed = jnp.broadcast_to(packed, (*lead, *packed.shape[-2:])).reshape(self.tokens, 2, self.rope_dim)
        return jnp.pad(packed, ((0, 0), (0, 0), (-self.rope_dim % _BLOCK, 0)))

    def launch(self):
        outs = []
        if self.want_product:
            outs.append(jax.ShapeDtypeStruct(self.streams[0].shape, self.dtype))
        if self.want_sums:
            outs.append(jax.ShapeDtypeStruct((2 * self.runs, self.heads, self.heads), jnp.float32))
        weights = [self.m] if self.want_product else []
        tile = lambda *lead: plgpu.SMEM(  # noqa: E731
            (*lead, self.heads, CHANNELS), self.dtype, transforms=tiled(self.dtype)
        )
        scratch = {
            "rings": [tile(self.stages) for _ in self.streams],
            "full": plgpu.Barrier(num_arrivals=len(self.streams), num_barriers=self.stages),
            "consumed": plgpu.Barrier(num_barriers=self.stages),
        }
        if self.want_product:
            scratch["out_tiles"] = tile(2, _OUT_TILES)
            scratch["m_tile"] = plgpu.SMEM((self.heads, self.heads), self.dtype, transforms=tiled(self.dtype))
            scratch["m_in"] = plgpu.Barrier()

        def entry(*refs):
            refs = iter(refs)
            take = lambda arrays: [next(refs) for _ in arrays]  # noqa: E731
            memory = _Memory(take(weights), take(self.tables), take(self.streams), take(outs))
            pl.run_scoped(lambda **shared: self._kernel(memory, _Shared(**shared)), collective_axes="wg", **scratch)

        kernel = plgpu.kernel(
            entry,
            out_type=outs,
            grid=(self.grid,),
            grid_names=("sm",),
            num_threads=3,
            thread_name="wg",
            kernel_name=("inv_rope_" if self.tables else "") + "vha_postmix" + ("_bwd" if self.backward else ""),
            **({"interpret": plgpu.InterpretGPUParams()} if dispatch.interpreting() else {}),
        )
        outs = over_few_entries(kernel)(*weights, *self.tables, *self.streams)
        # The kernel is traced without its operands' manual axes and gives its outputs none.
        return [dispatch.align_manual_axes(out, self.streams[0])[0] for out in outs]

    # --- the kernel ---

    def _kernel(self, memory, shared):
        warpgroup = lax.axis_index("wg")
        for side in range(2):
            pl.when(warpgroup == side)(lambda side=side: self._compute(memory, shared, side))
        pl.when(warpgroup == 2)(lambda: self._load(memory, shared))

    def _for_each_run(self, body, carry):
        """carry = body(run, first item, items, items seen before, carry) for each run of this multiprocessor's."""
        sm = lax.axis_index("sm")

        def step(i, carry):
            run = sm + i * self.grid
            first = run * self.run
            return body(run, first, jnp.minimum(self.run, self.items - first), i * self.run, carry)

        return lax.fori_loop(0, divmod_(self.runs - sm + self.grid - 1, self.grid)[0], step, carry)

    def _place(self, item):
        """(token, first channel) of an item."""
        token, tile = divmod_(item, self.tiles)
        return token, tile * CHANNELS

    def _load(self, memory, shared):
        plgpu.set_max_registers(40, action="decrease")

        def load_run(_, first, count, before, total):
            def load_item(i, _):
                seen = before + i
                slot = divmod_(seen, self.stages)[1]
                pl.when(seen >= self.stages)(lambda: plgpu.barrier_wait(shared.consumed.at[slot]))
                token, channel = self._place(first + i)
                for ref, ring in zip(memory.streams, shared.rings, strict=True):
                    tile = ref.at[token, :, pl.ds(channel, CHANNELS)]
                    plgpu.copy_gmem_to_smem(tile, ring.at[slot], shared.full.at[slot])
                    # Touching the next tile now makes it stay in the cache until it is read, and the writes leave
                    # earlier instead. It is worth 4 % with one array, and more than one tile ahead costs that again.
                    token_ahead, channel_ahead = self._place(first + jnp.minimum(i + 1, count - 1))
                    ahead = ref.at[token_ahead, :, pl.ds(channel_ahead, CHANNELS)]
                    plgpu.async_prefetch(ahead, predicate=i + 1 < count)

            lax.fori_loop(0, count, load_item, None)
            return total + count

        total = self._for_each_run(load_run, np.int32(0))

        def drain(seen, _):  # every phase of a barrier has to be observed before the kernel ends
            plgpu.barrier_wait(shared.consumed.at[divmod_(seen, self.stages)[1]])

        lax.fori_loop(jnp.maximum(total - self.stages, 0), total, drain, None)
        if self.want_product:
            plgpu.barrier_wait(shared.m_in)

    def _compute(self, memory, shared, side):
        plgpu.set_max_registers(232, action="increase")
        if self.want_product:
            if side == 0:
                plgpu.copy_gmem_to_smem(memory.weights[0], shared.m_tile, shared.m_in)
            plgpu.barrier_wait(shared.m_in)

        def run_step(run, first, count, before, _):
            mine = divmod_(before + side, 2)[1]  # this warpgroup takes every other tile that its multiprocessor sees

            def item_step(i, sums):
                i = mine + 2 * i
                return self._item(memory, shared, side, before + i, *self._place(first + i), sums)

            sums = plgpu.layout_cast(jnp.zeros((self.heads, self.heads), jnp.float32), _LAYOUT) if self.want_sums else 0
            sums = lax.fori_loop(0, divmod_(count - mine + 1, 2)[0], item_step, sums)
            if self.want_sums:
                memory.outs[-1][run * 2 + side] = sums
            return 0

        self._for_each_run(run_step, 0)
        if self.want_product:
            plgpu.wait_smem_to_gmem(0)

    def _item(self, memory, shared, side, seen, token, channel, sums):
        slot = divmod_(seen, self.stages)[1]
        tiles = [ring.at[slot] for ring in shared.rings]
        plgpu.barrier_wait(shared.full.at[slot])
        if self.want_sums or not self.backward:
            self._rotate(memory, tiles[0], token, channel, transposed=False)
        if self.want_product:
            m = shared.m_tile.transpose((1, 0)) if self.backward else shared.m_tile
            product = _dot(m, tiles[-1])
        if self.want_sums:
            sums = sums + _dot(tiles[1], tiles[0].transpose((1, 0)))
        plgpu.barrier_arrive(shared.consumed.at[slot])
        if self.want_product:
            plgpu.wait_smem_to_gmem(_OUT_TILES - 1, wait_read_only=True)
            out = shared.out_tiles.at[side, divmod_(divmod_(seen, 2)[0], _OUT_TILES)[1]]
            out[...] = product.astype(self.dtype)
            if self.backward:
                self._rotate(memory, out, token, channel, transposed=True)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, memory.outs[0].at[token, :, pl.ds(channel, CHANNELS)])
        return sums

    def _rotate(self, memory, tile, token, channel, transposed):
        """Rotates back, in place, the blocks of a tile that hold rotary channels."""
        if not self.tables:
            return
        (table,) = memory.tables
        width = table.shape[-1]  # of all blocks with rotary channels
        start = self.head_dim - width
        for offset in range(0, CHANNELS, _BLOCK):
            if self.head_dim - CHANNELS + offset < start:  # not even in the last tile
                continue

            @pl.when(channel + offset >= start)
            def _(offset=offset):
                block = tile.at[:, pl.ds(offset, _BLOCK)]
                column = channel + offset - start

                def row(kind):
                    entries = table.at[token, kind, pl.ds(column, _BLOCK)]
                    entries = plgpu.load(entries, layout=_LAYOUT.reduce(0), optimized=False)
                    return lax.broadcast_in_dim(entries.astype(jnp.float32), (self.heads, _BLOCK), [1])

                x = plgpu.load(block, layout=_LAYOUT, optimized=False)
                partner = _swap_pairs(row(1)) if transposed else row(1)
                y = rope.combine(
                    x, _swap_pairs(x), row(0), partner, self.rounding, round_to=numerics.round_to_in_kernel
                )
                if width > self.rope_dim:
                    position = plgpu.broadcasted_iota(jnp.int32, (self.heads, _BLOCK), 1, layout=_LAYOUT) + column
                    y = jnp.where(position >= width - self.rope_dim, y, x)
                block[...] = y
                plgpu.commit_smem()


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Refs to device memory."""

    weights: list
    tables: list
    streams: list
    outs: list


@dataclasses.dataclass(frozen=True)
class _Shared:
    """Shared memory of a multiprocessor, and the barriers that say when it is filled and when it is free again."""

    rings: list
    full: object
    consumed: object
    out_tiles: object = None
    m_tile: object = None
    m_in: object = None


def _dot(a, b):
    """a @ b of tiles in shared memory, in f32."""

    def product(sums):
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(product, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _swap_pairs(x):
    """Exchanges the channels of every pair. In this layout a register holds a pair.

    (A product with a permutation matrix would do it too, but 0 * infinity spreads NaN over the row.)
    """
    if dispatch.interpreting():  # the simulator knows no registers
        return jnp.flip(x.reshape(*x.shape[:-1], -1, 2), -1).reshape(x.shape)
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import vector

    @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=_LAYOUT))
    def swap(_, x):
        registers = np.empty_like(x.registers)
        for i, register in np.ndenumerate(x.registers):
            registers[i] = vector.shuffle(register, register, [1, 0])
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return swap(x)
