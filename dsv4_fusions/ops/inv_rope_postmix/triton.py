"""The postmix of one token a program, with or without the inverse rotation, on Pallas' Triton backend."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsv4_fusions import dispatch, numerics, rope

DTYPES = ("bfloat16", "float16")
_MIN_DOT = 16  # least extent of a tensor-core operand
_CHANNELS = 128  # channels mixed at a time: with 64 heads, the widest tile whose accumulator stays in registers


def forward(m, x, tables: rope.RopeTables | None):
    """M @ X, or M @ inv_rope(X) where tables are given.

    Args:
      m: [heads, heads].
      x: [..., tokens, heads, head_dim], bfloat16 or float16.
      tables: None, or [..., tokens, rope_dim] with leading axes that broadcast against x's.
    """
    heads, head_dim = x.shape[-2:]
    rows = x.reshape(-1, heads, head_dim)
    padded = max(_MIN_DOT, pl.next_power_of_2(heads))
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
    m = m_ref[...]
    rows = jnp.arange(m.shape[0])

    def mix(x, tile):
        pltriton.store(out_ref.at[tile.index], pltriton.dot(m, x).astype(x.dtype), mask=tile.mask)

    for tile in _tiles(rows, heads, 0, head_dim - rope_dim):
        mix(tile.load(x_ref), tile)
    if rope_dim:
        tile = _Tile(rows, heads, head_dim - rope_dim, max(_MIN_DOT, pl.next_power_of_2(rope_dim)), rope_dim)
        mix(_inverse_rotated(x_ref, *table_refs, tile, rounding), tile)


def _inverse_rotated(x_ref, cos_ref, sin_ref, tile, rounding):
    """The rotary channels of a token, rotated back. A channel's pair partner is a second load that hits the cache."""
    channel, rope_dim = tile.channel, tile.valid
    # Tables hold the first channels of all pairs in the left half, the second ones in the right half.
    column = (channel >> 1) + (channel & 1) * (rope_dim // 2)
    valid = None if rope_dim == channel.size else channel < rope_dim
    own, sin = (_load(ref.at[0, column], valid) for ref in (cos_ref, sin_ref))
    partner = jnp.where((channel & 1) == 0, sin, -sin)  # the inverse rotation's signs
    x, x_partner = tile.load(x_ref), tile.load(x_ref, swap=1)
    return rope.combine(x, x_partner, own[None, :], partner[None, :], rounding, round_to=numerics.round_to_in_kernel)


class _Tile:
    """A block of heads x channels of one token, its sizes powers of two, with a mask only where it overhangs."""

    def __init__(self, rows, heads, start, size, valid):
        self.rows, self.start, self.valid = rows, start, valid
        self.channel = jnp.arange(size)
        self.index = (0, rows[:, None], (start + self.channel)[None, :])
        inside = []
        if heads < rows.size:
            inside.append((rows < heads)[:, None])
        if valid < size:
            inside.append((self.channel < valid)[None, :])
        self.mask = functools.reduce(jnp.logical_and, inside) if inside else None
        if self.mask is not None:
            self.mask = jnp.broadcast_to(self.mask, (rows.size, size))

    def load(self, ref, swap=0):
        """The tile of `ref`; swap=1 exchanges the two channels of every pair."""
        index = (0, self.rows[:, None], (self.start + (self.channel ^ swap))[None, :])
        return _load(ref.at[index], self.mask)


def _load(ref, mask):
    return pltriton.load(ref, mask=mask, other=None if mask is None else 0.0)


def _tiles(rows, heads, start, width):
    """Covers channels [start, start + width): tiles of descending powers of two, the last of which may overhang."""
    while width > 0:
        size = min(_CHANNELS, max(_MIN_DOT, 1 << (width.bit_length() - 1)))
        yield _Tile(rows, heads, start, size, min(size, width))
        start, width = start + size, width - size
