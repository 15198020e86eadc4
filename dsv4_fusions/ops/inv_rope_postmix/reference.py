"""Inverse RoPE and VHA postmix in plain jnp: the specification.

postmix   out[t, h, c] = sum_k M[h, k] * X[t, k, c]          X = inv_rope(O)
its VJP   dX[t, k, c]  = sum_h M[h, k] * dOut[t, h, c]       dM[h, k] = sum_tc dOut[t, h, c] * X[t, k, c]
          dO           = transpose of inv_rope, applied to dX
M's       dV = dM U            dU = dM^T V                   M = round(round(V U^T) + I)

grouped   Z[t, r, c]   = sum_j U[j, r] * X[t, j, c]          out = X + V Z, in every group of heads on its own
its VJP   dZ = V^T dOut        dX = dOut + U dZ
          dU[j, r]     = sum_tc X[t, j, c] * dZ[t, r, c]     dV[j, r] = sum_tc dOut[t, j, c] * Z[t, r, c]

Sums are f32; Z, dZ, V Z and U dZ are rounded to the dtype like every result. The postmix's `weights` are (M,), those of
the grouped one (U, V).
"""

import jax
import jax.numpy as jnp
from jax import lax

from dsv4_fusions import dispatch, numerics


def postmix_matrix(u, v):
    """round(round(V U^T) + I): two roundings, because the reference system adds the identity to a stored product."""
    product = lax.optimization_barrier(jnp.einsum("hr,kr->hk", v, u))  # or the first rounding may be dropped
    return product + jnp.eye(u.shape[0], dtype=u.dtype)


def mix(weights, x):
    """The postmix, or the grouped one, of x [..., tokens, heads, head_dim]."""
    if len(weights) == 2:
        return _grouped_mix(*weights, x)
    (m,) = weights
    # Every path uses this spelling: another one (batched over tokens, say) rounds dM's partial sums.
    return jnp.einsum("hk,...tkd->...thd", m, x)


def _grouped_mix(u, v, x):
    grouped = _split(x, u)
    return _add(grouped, v, _hidden(u, grouped)).reshape(x.shape)


def mix_transpose(weights, x, g):
    """(dweights, dX): for M by the transposes of `mix`'s one dot_general, for (U, V) by the formulas above.

    None for x: no dweights. None for weights: no dX; those of the grouped postmix are needed for both.
    """
    if weights is not None and len(weights) == 2:
        dx = _add(_split(g, weights[0]), weights[0], _hidden(weights[1], _split(g, weights[0]))).reshape(g.shape)
        return None if x is None else tuple(d.astype(g.dtype) for d in weight_gradients(weights, x, g)), dx
    dweights = dx = None
    if x is not None:
        like_m, _ = dispatch.align_manual_axes(jnp.zeros((x.shape[-2],) * 2, x.dtype), x)  # only its type is used
        dweights = jax.linear_transpose(lambda m: mix((m,), x), like_m)(g)
    if weights is not None:
        (dx,) = jax.linear_transpose(lambda x: mix(weights, x), g)(g)
    return dweights, dx


def weight_gradients(weights, x, g):
    """dweights in f32, summed over all tokens; the grouped postmix's `weights` (the other's may be None)."""
    if weights is None or len(weights) == 1:
        return (jnp.einsum("...thc,...tkc->hk", g, x, preferred_element_type=jnp.float32),)
    u, v = weights
    x, g = _split(x, u), _split(g, u)
    return _einsum("...gjc,...grc->gjr", x, _hidden(v, g)), _einsum("...gjc,...grc->gjr", g, _hidden(u, x))


def _split(x, u):
    groups, width, _ = u.shape
    return x.reshape(*x.shape[:-2], groups, width, x.shape[-1])


def _hidden(weight, x):
    return _product("...gjd,gjr->...grd", x, weight)


def _add(x, weight, z):
    return x + _product("...grd,gjr->...gjd", z, weight)


def _product(equation, x, weight):
    # The rounding is pinned: a fusion may drop one that a barrier alone is to keep.
    return lax.optimization_barrier(numerics.round_to(_einsum(equation, x, weight), x.dtype).astype(x.dtype))


def _einsum(equation, a, b):
    # Batched products of bf16 arrays are summed in bf16 by XLA on a CPU, or not served at all.
    return jnp.einsum(equation, a.astype(jnp.float32), b.astype(jnp.float32))
