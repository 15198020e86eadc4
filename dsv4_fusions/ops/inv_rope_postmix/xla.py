"""The postmix and its single-pass gradient in XLA code, with or without the inverse rotation."""

import jax
import jax.numpy as jnp
from jax import lax

from dsv4_fusions import dispatch, numerics, rope
from dsv4_fusions.ops.inv_rope_postmix import reference

_BLOCKS = 16  # of tokens in the forward: one block's copies are the temporary memory
_CHUNK = 256  # tokens of a partial weight gradient. It fixes the reduction tree.


def forward(weights, x, tables: rope.RopeTables | None):
    """`mix(weights, x)`, or `mix(weights, inv_rope(x))` where tables are given; x [..., tokens, heads, head_dim].

    On a CPU the product is taken a block of tokens at a time and written into the result in place. That spares the
    head-major copy of everything that XLA's einsum makes there. With the rotation, only a block of rotated rows exists
    at a time, and its product has the shape of the one without: a library that orders its sums by the size of the
    product (seen on a CPU for narrow ones) does so alike on both paths. Elsewhere XLA's own product is as good without
    the rotation, and the fused op does not come here.
    """
    if tables is None and dispatch.target().platform != "cpu":
        return reference.mix(weights, x)
    tokens = x.shape[-3]
    block = -(-tokens // _BLOCKS)

    def write_block(i, out):
        start = jnp.minimum(i * block, tokens - block)  # the last block overlaps: it writes the same bits again
        rows = _rotated(_take(x, start, block, -3), _take_rows(tables, start, block))
        return lax.dynamic_update_slice_in_dim(out, reference.mix(weights, rows), start, axis=-3)

    return lax.fori_loop(0, -(-tokens // block), write_block, _empty_like(x))


def single_pass_backward(weights, x, tables: rope.RopeTables | None, g, wanted):
    """(dx, dweights) in one pass over x and g, a chunk of tokens at a time: the rotated x never exists as a whole.

    Args:
      weights: (m,), (u, v), or None where `wanted` has no use for them.
      x: [..., tokens, heads, head_dim], or None where only dx is wanted.
      tables: as in `forward`.
      g: gradient of the result, like x.
      wanted: the gradients to compute; None stands for the others.

    Returns:
      dx like g, and a tuple like weights of f32 sums.
    """
    shape, (heads, head_dim) = g.shape, g.shape[-2:]
    if tables is not None:
        tables = jax.tree.map(
            lambda t: jnp.broadcast_to(t, (*shape[:-2], t.shape[-1])).reshape(-1, t.shape[-1]), tables
        )
    g = g.reshape(-1, heads, head_dim)
    x = None if x is None else x.reshape(g.shape)
    tokens = g.shape[0]

    def part(start, size, dx):
        rows_of_tables = _take_rows(tables, start, size)
        rows_g = lax.optimization_barrier(_take(g, start, size, 0))
        dweights = None
        if wanted.weights:
            rows = _rotated(_take(x, start, size, 0), rows_of_tables)
            dweights = reference.weight_gradients(weights, rows, rows_g)
        if wanted.activation:
            _, rows_dx = reference.mix_transpose(weights, None, rows_g)
            rows_dx = _rotated(rows_dx, rows_of_tables, transposed=True)
            dx = lax.dynamic_update_slice_in_dim(dx, rows_dx, start, axis=0)
        return dx, dweights

    chunks, rest = divmod(tokens, _CHUNK)
    dx, partials = _empty_like(g) if wanted.activation else None, []
    if chunks:
        dx, of_chunks = lax.scan(lambda dx, i: part(i * _CHUNK, _CHUNK, dx), dx, jnp.arange(chunks))
        partials.append(of_chunks)
    if rest:
        dx, of_rest = part(chunks * _CHUNK, rest, dx)
        partials.append(jax.tree.map(lambda p: p[None], of_rest))
    dweights = jax.tree.map(lambda *parts: numerics.sum_in_order(jnp.concatenate(parts)), *partials)
    return None if dx is None else dx.reshape(shape), dweights


def _rotated(rows, tables, transposed=False):
    """Rows behind a barrier, rotated back where tables are given."""
    if tables is not None:
        nope = rows.shape[-1] - tables.cos.shape[-1]
        rows = lax.optimization_barrier(rows)
        tail = rope.rotate_tail(rows[..., nope:], tables, inverse=True, transposed=transposed)
        # The barrier: XLA on a CPU fuses a rotation into an update in place and then reads what it overwrote.
        rows = lax.dynamic_update_slice_in_dim(rows, lax.optimization_barrier(tail), nope, axis=-1)
    return lax.optimization_barrier(rows)


def _take(a, start, size, axis):
    return lax.dynamic_slice_in_dim(a, start, size, axis)


def _take_rows(tables, start, size):
    return jax.tree.map(lambda t: _take(t, start, size, t.ndim - 2), tables)


def _empty_like(x):
    out, _ = dispatch.align_manual_axes(jnp.zeros(x.shape, x.dtype), x)
    return out
