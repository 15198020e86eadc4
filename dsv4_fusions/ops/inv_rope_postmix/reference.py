"""Inverse RoPE and VHA postmix in plain jnp: the specification.

postmix   out[t, h, c] = sum_k M[h, k] * X[t, k, c]          X = inv_rope(O)
its VJP   dX[t, k, c]  = sum_h M[h, k] * dOut[t, h, c]       dM[h, k] = sum_tc dOut[t, h, c] * X[t, k, c]
          dO           = transpose of inv_rope, applied to dX
M's       dV = dM U            dU = dM^T V                   M = round(round(V U^T) + I)
"""

import jax
import jax.numpy as jnp
from jax import lax

from dsv4_fusions import dispatch, rope

_BLOCKS = 16  # of tokens: the copies of one block are the temporary memory of `postmix`
_LEAST_BLOCK = 8


def postmix_matrix(u, v):
    """round(round(V U^T) + I): two roundings, because the reference system adds the identity to a stored product."""
    return jnp.einsum("hr,kr->hk", v, u) + jnp.eye(u.shape[0], dtype=u.dtype)


def mix(m, x):
    """The postmix. Every path uses this spelling: another one (batched over tokens, say) rounds dM's partial sums."""
    return jnp.einsum("hk,...tkd->...thd", m, x)


def mix_transpose(m, x, g):
    """(dM, dX) by the transposes of `mix`'s one dot_general; m or x None: the gradient that would need it is None."""
    dm = dx = None
    if x is not None:
        like_m, _ = dispatch.align_manual_axes(jnp.zeros((x.shape[-2],) * 2, x.dtype), x)  # only its type is used
        (dm,) = jax.linear_transpose(lambda m: mix(m, x), like_m)(g)
    if m is not None:
        (dx,) = jax.linear_transpose(lambda x: mix(m, x), g)(g)
    return dm, dx


def postmix(m, x, tables=None):
    """`mix(m, x)`, or `mix(m, inv_rope(x))` without the full-width rotated tensor where tables are given.

    Splitting the token and channel axes of a matrix product changes no accumulation. So the product is taken a block of
    tokens at a time and written into the result in place, which spares the head-major copy of all of it that XLA's
    einsum makes; and the rotary channels are mixed from a compact rotated copy, which replaces what the full-width
    product left in their place.
    """
    tokens = x.shape[-3]
    block = max(-(-tokens // _BLOCKS), min(tokens, _LEAST_BLOCK))

    def mixed(x, tables):
        y = mix(m, x)
        if tables is None:
            return y
        nope = x.shape[-1] - tables.cos.shape[-1]
        tail = lax.optimization_barrier(rope.rotate_tail(x[..., nope:], tables, inverse=True))
        return lax.dynamic_update_slice_in_dim(y, mix(m, tail), nope, axis=-1)

    def write_block(i, out):
        start = jnp.minimum(i * block, tokens - block)  # the last block overlaps: it writes the same bits again
        take = lambda a, axis: lax.dynamic_slice_in_dim(a, start, block, axis)  # noqa: E731
        y = mixed(take(x, x.ndim - 3), jax.tree.map(lambda t: take(t, t.ndim - 2), tables))
        return lax.dynamic_update_slice_in_dim(out, y, start, axis=-3)

    if block == tokens:
        return mixed(x, tables)
    out, _ = dispatch.align_manual_axes(jnp.zeros(x.shape, x.dtype), x)
    return lax.fori_loop(0, -(-tokens // block), write_block, out)
