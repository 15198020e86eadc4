"""The postmix and its single-pass gradient on Pallas' Triton backend, with or without the inverse rotation.

A program works on one group of heads (all of them, unless the postmix is grouped) of one token, or of one chunk of
tokens where it sums weight gradients.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from dsv4_fusions import dispatch, numerics, rope
from dsv4_fusions.ops.inv_rope_postmix import tiling


def forward(weights, x, tables: rope.RopeTables | None):
    """The postmix of x, or of inv_rope(x) where tables are given.

    Args:
      weights: (m,) or (u, v), see reference.py.
      x: [..., tokens, heads, head_dim], bfloat16 or float16.
      tables: None, or [..., tokens, rope_dim] with leading axes that broadcast against x's.
    """
    call = _Call(weights, x, tables, chunk=1)
    kernel = functools.partial(_forward_kernel, call)
    (out,) = call.launch(kernel, [x], [call.rows()], stages=1, name="vha_postmix")
    return out.reshape(x.shape)


def single_pass_backward(weights, x, tables: rope.RopeTables | None, g, wanted):
    """(dx, dweights) in one pass over x and g; see `xla.single_pass_backward`."""
    if weights is None:  # only its type is used
        weights = (jnp.zeros((g.shape[-2],) * 2, g.dtype),)
    call = _Call(weights, g, tables, chunk=tiling.CHUNK if wanted.weights else 1)
    kernel = functools.partial(_backward_kernel, call, wanted)
    streams = [x, g] if wanted.weights else [g]
    outs = [call.rows()] * wanted.activation
    if wanted.weights:
        outs += [call.partial(w.shape[-1]) for w in call.weights]
    results = iter(call.launch(kernel, streams, outs, stages=tiling.backward_stages(weights), name="vha_postmix_bwd"))
    dx = next(results).reshape(g.shape) if wanted.activation else None
    if not wanted.weights:
        return dx, None
    return dx, tuple(
        numerics.sum_in_order(partials)[..., : w.shape[-2], : w.shape[-1]].reshape(w.shape)
        for partials, w in zip(results, weights, strict=True)
    )


class _Call:
    """Shapes, operands and block specs that the two kernels share."""

    def __init__(self, weights, x, tables, chunk):
        self.groups = 1 if len(weights) == 1 else weights[0].shape[0]
        self.heads, self.head_dim = x.shape[-2] // self.groups, x.shape[-1]  # heads of a group
        self.tokens, self.chunk = x.size // (x.shape[-2] * x.shape[-1]), chunk
        self.dtype, self.like = x.dtype, x
        self.weights = tiling.padded_weights(weights)
        self.padded_heads = self.weights[0].shape[-2]
        self.tables = tiling.table_rows(tables, x)
        self.rope_dim, self.rounding = (0, "once") if tables is None else (tables.cos.shape[-1], tables.rounding)

    def _chunk_and_group(self, program):
        groups = np.int32(self.groups)  # a Python int would be int64 under jax_enable_x64
        return (program, np.int32(0)) if self.groups == 1 else (lax.div(program, groups), lax.rem(program, groups))

    def rows(self):
        """Type and block of an operand like x, [tokens, groups, heads, head_dim]."""
        shape = (self.tokens, self.groups, self.heads, self.head_dim)
        block = pl.BlockSpec((self.chunk, None, *shape[2:]), lambda i: (*self._chunk_and_group(i), 0, 0))
        return dispatch.output_type(shape, self.dtype, self.like), block

    def partial(self, width):
        """Type and block of a chunk's weight gradient, [chunks, groups, padded heads, width]."""
        shape = (pl.cdiv(self.tokens, self.chunk), self.groups, self.padded_heads, width)
        block = pl.BlockSpec((None, None, *shape[2:]), lambda i: (*self._chunk_and_group(i), 0, 0))
        return dispatch.output_type(shape, jnp.float32, self.like), block

    def launch(self, kernel, streams, outs, stages, name):
        """Runs the kernel with refs of the weights, the tables, the streams of rows and the outputs."""
        rows, rows_spec = self.rows()
        weight_spec = [
            pl.BlockSpec((None, *w.shape[1:]), lambda i: (self._chunk_and_group(i)[1], 0, 0)) for w in self.weights
        ]
        table_spec = [pl.BlockSpec((self.chunk, self.rope_dim), lambda i: (self._chunk_and_group(i)[0], 0))] * 2
        n_weights, n_tables = len(self.weights), len(self.tables)

        def body(*refs):
            kernel(refs[:n_weights], refs[n_weights : n_weights + n_tables], *refs[n_weights + n_tables :])

        return pl.pallas_call(
            body,
            grid=(pl.cdiv(self.tokens, self.chunk) * self.groups,),
            in_specs=[*weight_spec, *table_spec[:n_tables], *[rows_spec] * len(streams)],
            out_specs=[spec for _, spec in outs],
            out_shape=[shape for shape, _ in outs],
            compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=stages),
            interpret=dispatch.interpreting(),
            name=("grouped_" if n_weights == 2 else "") + ("inv_rope_" if n_tables else "") + name,
        )(*self.weights, *self.tables, *(s.reshape(rows.shape) for s in streams))

    # --- device functions ---

    def forward_tiles(self):
        """Tiles that cover the nope channels, then those that cover the rotary ones; whether they are rotary."""
        nope = self.head_dim - self.rope_dim
        for start, stop in ((0, nope), (nope, self.head_dim)):
            while start < stop:
                size = min(tiling.CHANNELS, tiling.block(stop - start))
                if dispatch.interpreting():
                    size = (
                        tiling.CHANNELS
                    )  # a CPU's matrix product may order its sums by its size, a tensor core does not
                yield _Tile(self, start, min(size, stop - start), size), start >= nope
                start += size

    def rotated(self, table_refs, token, tile, x, x_partner, transposed=False):
        """A tile with its rotary channels rotated back, from its channels and their pair partners."""
        own, partner = self._coefficients(table_refs, token, tile, transposed)
        y = rope.combine(x, x_partner, own, partner, self.rounding, round_to=numerics.round_to_in_kernel)
        return y if tile.rotary is None else jnp.where(tile.rotary[None, :], y, x)

    def _coefficients(self, table_refs, token, tile, transposed):
        """`rope.coefficients` of the inverse rotation for a tile's channels, read from the halves of the tables."""
        cos_ref, sin_ref = table_refs
        channel = tile.channel - tile.rotary_from
        inside = tile.inside
        if tile.rotary is not None:
            inside = tile.rotary if inside is None else tile.rotary & inside

        def entry(ref, channel):  # first channels of all pairs in the left half, second ones in the right half
            return _load(ref.at[token, (channel >> 1) + (channel & 1) * (self.rope_dim // 2)], inside)[None, :]

        sin = entry(sin_ref, channel ^ 1 if transposed else channel).astype(jnp.float32)
        sign = jnp.where((channel & 1) == int(transposed), np.float32(1), np.float32(-1))
        return entry(cos_ref, channel), sin * sign[None, :]  # not -sin: the backend computes 0 - sin, wrong for +0


class _Tile:
    """Heads x `width` channels from `start` on, in a block of a power of two, with a mask only where that overhangs."""

    def __init__(self, call, start, width, size):
        rows = call.padded_heads
        self.row = jnp.arange(rows)
        self.rotary_from = call.head_dim - call.rope_dim
        self.channel = start + jnp.arange(size)
        self.inside = jnp.arange(size) < width if width < size else None  # channels; None: all
        self.width = width
        rotary = isinstance(start, int) and start >= self.rotary_from  # of a traced start nothing is known
        self.rotary = None if rotary else self.channel >= self.rotary_from  # channels; None: all
        self.mask = None if self.inside is None else self.inside[None, :]
        if call.heads < rows:
            present = (self.row < call.heads)[:, None]
            self.mask = present if self.mask is None else present & self.mask
        if self.mask is not None:
            self.mask = jnp.broadcast_to(self.mask, (rows, size))

    def load(self, ref, token):
        return self._load(ref, token, self.channel)

    def load_partner(self, ref, token):
        """The channels' pair partners. It is a second load that hits the cache."""
        partner = self.rotary_from + ((self.channel - self.rotary_from) ^ 1)
        return self._load(ref, token, partner if self.rotary is None else jnp.where(self.rotary, partner, self.channel))

    def _load(self, ref, token, channel):
        return _load(ref.at[token, self.row[:, None], channel[None, :]], self.mask)

    def store(self, ref, token, value):
        pltriton.store(ref.at[token, self.row[:, None], self.channel[None, :]], value, mask=self.mask)


def _load(ref, mask):
    return pltriton.load(ref, mask=mask, other=None if mask is None else 0.0)


def _forward_kernel(call, weight_refs, table_refs, x_ref, out_ref):
    weights = [ref[...] for ref in weight_refs]
    for tile, rotary in call.forward_tiles():
        x = tile.load(x_ref, 0)
        if rotary:
            x = call.rotated(table_refs, 0, tile, x, tile.load_partner(x_ref, 0))
        tile.store(out_ref, 0, _mix(weights, x))


def _backward_kernel(call, wanted, weight_refs, table_refs, *refs):
    x_ref = refs[0] if wanted.weights else None
    g_ref, *out_refs = refs[wanted.weights :]
    dx_ref = out_refs.pop(0) if wanted.activation else None
    weights = [ref[...] for ref in weight_refs]
    first = pl.program_id(0) if call.groups == 1 else lax.div(pl.program_id(0), np.int32(call.groups))
    tokens = jnp.minimum(call.chunk, call.tokens - first * call.chunk)
    # The order of the sums must not depend on the rotation: all tiles but the last of one token after the other, then
    # the last ones. Only with more rotary channels than the last tile holds do the others carry code for them.
    size = min(tiling.BACKWARD_CHANNELS, tiling.block(call.head_dim))
    full = pl.cdiv(call.head_dim, size) - 1
    last = _Tile(call, full * size, call.head_dim - full * size, size)

    def tile_step(tile, rotary, token, sums):
        g = tile.load(g_ref, token)
        if wanted.activation:
            dx = _mix_transposed(weights, g)
            if rotary:
                dx_partner = _mix_transposed(weights, tile.load_partner(g_ref, token))
                dx = call.rotated(table_refs, token, tile, dx, dx_partner, transposed=True)
            tile.store(dx_ref, token, dx)
        if wanted.weights:
            x = tile.load(x_ref, token)
            if rotary:
                x = call.rotated(table_refs, token, tile, x, tile.load_partner(x_ref, token))
            sums = [total + part for total, part in zip(sums, _weight_gradients(weights, x, g), strict=True)]
        return sums

    def full_step(i, sums):
        tile = _Tile(call, lax.rem(i, np.int32(full)) * size, size, size)
        return tile_step(tile, call.rope_dim > last.width, lax.div(i, np.int32(full)), sums)

    sums = [jnp.zeros(ref.shape, jnp.float32) for ref in out_refs]
    if full:
        sums = lax.fori_loop(0, tokens * full, full_step, sums)
    sums = lax.fori_loop(0, tokens, functools.partial(tile_step, last, call.rope_dim > 0), sums)
    for ref, total in zip(out_refs, sums, strict=True):
        ref[...] = total


def _mix(weights, x):
    if len(weights) == 1:
        return pltriton.dot(weights[0], x).astype(x.dtype)
    u, v = weights
    return _add(x, pltriton.dot(v, _hidden(u, x)))


def _mix_transposed(weights, g):
    if len(weights) == 1:
        return pltriton.dot(weights[0], g, trans_a=True).astype(g.dtype)
    u, v = weights
    return _add(g, pltriton.dot(u, _hidden(v, g)))


def _weight_gradients(weights, x, g):
    if len(weights) == 1:
        return [pltriton.dot(g, x, trans_b=True)]
    u, v = weights
    return [pltriton.dot(x, _hidden(v, g), trans_b=True), pltriton.dot(g, _hidden(u, x), trans_b=True)]


def _hidden(weight, x):
    return pltriton.dot(weight, x, trans_a=True).astype(x.dtype)


def _add(x, product):
    """x + round(product), rounded."""
    return (x.astype(jnp.float32) + numerics.round_to_in_kernel(product, x.dtype)).astype(x.dtype)
