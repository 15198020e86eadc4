"""The postmix of one token a program, with or without the inverse rotation, on Pallas' Triton backend."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsv4_fusions import dispatch, numerics, rope

_LEAST = 16  # extent of a tensor-core operand
_CHANNELS = 128  # channels mixed at a time: measured best with 64 heads, where 64 cost 5 % of the forward


def forward(m, x, tables: rope.RopeTables | None):
    """M @ X, or M @ inv_rope(X) where tables are given.

    Args:
      m: [heads, heads].
      x: [..., tokens, heads, head_dim], bfloat16 or float16.
      tables: None, or [..., tokens, rope_dim] with leading axes that broadcast against x's.
    """
    heads, head_dim = x.shape[-2:]
    rows = x.reshape(-1, heads, head_dim)
    padded = max(_LEAST, pl.next_power_of_2(heads))
    operands = [jnp.pad(m, ((0, padded - heads),) * 2), rows]
    specs = [
        pl.BlockSpec((padded, padded), lambda i: (0, 0)),
        pl.BlockSpec((1, heads, head_dim), lambda i: (i, 0, 0)),
    ]
    rope_dim, rounding = 0, "once"
    if tables is not None:
        rope_dim, rounding = tables.cos.shape[-1], tables.rounding
        tables = rope.prepare_tables(tables, x.dtype)
        for table in (tables.cos, tables.sin):
            operands.append(jnp.broadcast_to(table, (*x.shape[:-2], rope_dim)).reshape(-1, rope_dim))
            specs.append(pl.BlockSpec((1, rope_dim), lambda i: (i, 0)))
    out = pl.pallas_call(
        functools.partial(_kernel, rope_dim=rope_dim, rounding=rounding),
        grid=(rows.shape[0],),
        in_specs=specs,
        out_specs=specs[1],
        out_shape=dispatch.output_type(rows.shape, x.dtype, rows),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=dispatch.interpreting(),
        name="inv_rope_vha_postmix" if rope_dim else "vha_postmix",
    )(*operands)
    return out.reshape(x.shape)


def _kernel(m_ref, x_ref, *refs, rope_dim, rounding):
    *table_refs, out_ref = refs
    _, heads, head_dim = x_ref.shape
    nope = head_dim - rope_dim
    m = m_ref[...]

    def mix(tile, x):
        pltriton.store(out_ref.at[tile.index()], pltriton.dot(m, x).astype(x.dtype), mask=tile.mask)

    for tile in _tiles(m.shape[0], heads, 0, nope):
        mix(tile, tile.load(x_ref))
    for tile in _tiles(m.shape[0], heads, nope, head_dim):
        mix(tile, _inverse_rotated(x_ref, *table_refs, tile, nope, rounding))


def _inverse_rotated(x_ref, cos_ref, sin_ref, tile, nope, rounding):
    """A tile of rotary channels, rotated back. A channel's pair partner is a second load that hits the cache."""
    channel = tile.channel - nope
    half = cos_ref.shape[-1] // 2
    # Tables hold the first channels of all pairs in the left half, the second ones in the right half.
    column = (channel >> 1) + (channel & 1) * half
    own, sin = (_load(ref.at[0, column], tile.inside) for ref in (cos_ref, sin_ref))
    partner = jnp.where((channel & 1) == 0, sin, -sin)  # the inverse rotation's signs
    x, x_partner = tile.load(x_ref), tile.load(x_ref, nope + (channel ^ 1))
    return rope.combine(x, x_partner, own[None, :], partner[None, :], rounding, round_to=numerics.round_to_in_kernel)


def _tiles(rows, heads, start, stop):
    """Covers channels [start, stop) with tiles whose size is a power of two; the last may overhang."""
    while start < stop:
        size = min(_CHANNELS, max(_LEAST, pl.next_power_of_2(stop - start)))
        if dispatch.interpreting():
            size = _CHANNELS  # a CPU's matrix product may order its sums by its size, a tensor core does not
        yield _Tile(rows, heads, start, min(start + size, stop), size)
        start += size


class _Tile:
    """Heads x channels [start, stop) of one token, in a block of rows x size with a mask only where that overhangs."""

    def __init__(self, rows, heads, start, stop, size):
        self.row = jnp.arange(rows)
        self.channel = start + jnp.arange(size)
        self.inside = self.channel < stop if stop - start < size else None  # channels
        self.mask = None if self.inside is None else self.inside[None, :]
        if heads < rows:
            present = (self.row < heads)[:, None]
            self.mask = present if self.mask is None else present & self.mask
        if self.mask is not None:
            self.mask = jnp.broadcast_to(self.mask, (rows, size))

    def index(self, channel=None):
        return 0, self.row[:, None], (self.channel if channel is None else channel)[None, :]

    def load(self, ref, channel=None):
        """The tile of `ref`, or of its channels named instead."""
        return _load(ref.at[self.index(channel)], self.mask)


def _load(ref, mask):
    return pltriton.load(ref, mask=mask, other=None if mask is None else 0.0)
