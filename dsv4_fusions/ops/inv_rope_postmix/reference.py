"""Inverse RoPE and VHA postmix in plain jnp: the specification.

postmix   out[t, h, c] = sum_k M[h, k] * X[t, k, c]          X = inv_rope(O)
its VJP   dX[t, k, c]  = sum_h M[h, k] * dOut[t, h, c]       dM[h, k] = sum_tc dOut[t, h, c] * X[t, k, c]
          dO           = transpose of inv_rope, applied to dX
M's       dV = dM U            dU = dM^T V                   M = round(round(V U^T) + I)
"""

import jax
import jax.numpy as jnp
from jax import lax

from dsv4_fusions import dispatch


def postmix_matrix(u, v):
    """round(round(V U^T) + I): two roundings, because the reference system adds the identity to a stored product."""
    product = lax.optimization_barrier(jnp.einsum("hr,kr->hk", v, u))  # or the first rounding may be dropped
    return product + jnp.eye(u.shape[0], dtype=u.dtype)


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


def grouped_mix(u, v, x):
    """The postmix within groups of heads: x + V (U^T x), u and v [groups, heads // groups, rank]."""
    groups, width, _ = u.shape
    grouped = x.reshape(*x.shape[:-2], groups, width, x.shape[-1])
    mixed = jnp.einsum("...gjd,gjr->...grd", grouped, u)
    return (grouped + jnp.einsum("...grd,gjr->...gjd", mixed, v)).reshape(x.shape)
