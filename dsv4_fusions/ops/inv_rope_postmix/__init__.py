"""VHA postmix, alone or with the inverse RoPE of the attention output folded in.

Unfused is `vha_postmix(rotate(o, tables, inverse=True), m)`, fused is `inv_rope_vha_postmix(o, m, tables)`: one
custom_vjp serves both, so that the two differ in the rotation and in nothing else.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from dsv4_fusions import dispatch, rope
from dsv4_fusions.ops.inv_rope_postmix import reference, xla

Backward = Literal["dot_general", "single_pass"]
BACKWARDS = ("dot_general", "single_pass")
_LATER = dispatch.NotBuilt("not built yet")
_TRITON_DTYPES = ("bfloat16", "float16")


def postmix_matrix(u: Float[Array, "heads rank"], v: Float[Array, "heads rank"]) -> Float[Array, "heads heads"]:
    """The postmix matrix M = round(round(V U^T) + I) of virtual-head attention (PaddleFleet).

    Args:
      u: [heads, rank], in the parameters' dtype.
      v: like u. At its initial value 0, M is the identity.

    Returns:
      [heads, heads] in the parameters' dtype; cast it once to the activations' dtype.

    Raises:
      ValueError, TypeError: u and v are not matrices of the same shape and floating-point dtype.
    """
    if u.ndim != 2 or u.shape != v.shape:
        raise ValueError(f"u, v: got shapes {u.shape} and {v.shape}, wanted the same [heads, rank] twice")
    if u.dtype != v.dtype or not jnp.issubdtype(u.dtype, jnp.floating):
        raise TypeError(f"u, v: got dtypes {u.dtype} and {v.dtype}, wanted the same floating-point dtype twice")
    return reference.postmix_matrix(u, v)


def vha_postmix(
    x: Float[Array, "*batch tokens heads head_dim"],
    m: Float[Array, "heads heads"],
    backward: Backward = "dot_general",
    implementation: str | None = None,
) -> Float[Array, "*batch tokens heads head_dim"]:
    """Mixes the heads of every token: out[t, h, c] = sum_k m[h, k] * x[t, k, c], f32 accumulation, rounded once.

    Args:
      x: [..., tokens, heads, head_dim], bfloat16, float16 or float32.
      m: [heads, heads] in x's dtype (see `postmix_matrix`).
      backward: "dot_general" takes both gradients from the transpose of the forward's own dot_general; "single_pass"
        is not built yet.
      implementation: "xla", "triton", or None for the best that the target and the dtype allow.

    Returns:
      Array like x.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, or an implementation that cannot run here.
      NotImplementedError: an implementation or backward that is not built yet.
    """
    _check_mix("x", x, m, backward)
    implementation = dispatch.choose(implementation, _unsupported(x.dtype))
    x, m = dispatch.align_manual_axes(x, m)
    return _postmix(x, m, None, implementation)


def inv_rope_vha_postmix(
    o: Float[Array, "*batch tokens heads head_dim"],
    m: Float[Array, "heads heads"],
    tables: rope.RopeTables,
    backward: Backward = "dot_general",
    implementation: str | None = None,
) -> Float[Array, "*batch tokens heads head_dim"]:
    """`vha_postmix(rotate(o, tables, inverse=True), m)` without the rotated tensor in memory, and the same bits.

    Output, gradient of o and gradient of m equal the unfused pair's of the same `implementation` and `backward`, both
    under jit. The backward saves o, m and the tables, rebuilds the rotation and hands both gradients to the transpose
    that the unfused pair uses. Off the CPU, a call that no kernel serves takes the unfused pair.

    Args:
      o: attention output, [..., tokens, heads, head_dim], bfloat16, float16 or float32.
      m: [heads, heads] in o's dtype (see `postmix_matrix`).
      tables: of the query positions, [..., tokens, rope_dim]; leading axes broadcast against o's. No gradient.
      backward: see `vha_postmix`.
      implementation: see `vha_postmix`.

    Returns:
      Array like o.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, or an implementation that cannot run here.
      NotImplementedError: an implementation or backward that is not built yet.
    """
    rope.check_operands("o", o, tables)
    _check_mix("o", o, m, backward)
    tables = lax.stop_gradient(tables)
    implementation, falls_back = inv_rope_choice(o.dtype, tables.cos.shape[-1], implementation)
    if falls_back:
        return vha_postmix(rope.rotate(o, tables, inverse=True), m, backward, implementation)
    o, m, cos, sin = dispatch.align_manual_axes(o, m, tables.cos, tables.sin)
    return _postmix(o, m, rope.RopeTables(cos, sin, tables.rounding), implementation)


def inv_rope_choice(dtype, rope_dim: int, implementation: str | None = None) -> tuple[str, str | None]:
    """(implementation that runs, why the inverse RoPE is not folded into it: None where it is)."""
    chosen = dispatch.choose(implementation, _unsupported(jnp.dtype(dtype)))
    if rope_dim == 0:
        return chosen, "rope_dim is 0: there is nothing to rotate"
    platform = dispatch.target().platform
    if chosen == "xla" and platform != "cpu":
        return chosen, f"no kernel serves this call, and XLA code gains nothing from the fusion on a {platform}"
    return chosen, None


def _unsupported(dtype) -> dict[str, str | None]:
    triton_reason = dispatch.triton_unsupported()
    if triton_reason is None and dtype.name not in _TRITON_DTYPES:
        triton_reason = f"it serves {' and '.join(_TRITON_DTYPES)}, not {dtype.name}"
    return {"mosaic": _LATER, "triton": triton_reason, "jax_triton": _LATER, "xla": None}


def grouped_postmix(
    x: Float[Array, "*batch tokens heads head_dim"],
    u: Float[Array, "groups group_heads rank"],
    v: Float[Array, "groups group_heads rank"],
) -> Float[Array, "*batch tokens heads head_dim"]:
    """The postmix within groups of heads: x + V (U^T x) for each group (PaddleFleet). No fused form yet.

    Args:
      x: [..., tokens, heads, head_dim].
      u: [groups, heads // groups, rank] in x's dtype.
      v: like u.

    Returns:
      Array like x.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit.
    """
    if x.ndim < 3 or u.ndim != 3 or u.shape != v.shape or u.shape[0] * u.shape[1] != x.shape[-2]:
        raise ValueError(
            f"u, v: got shapes {u.shape} and {v.shape}, wanted the same [groups, heads // groups, rank] twice for "
            f"x [..., tokens, heads, head_dim] = {x.shape}"
        )
    if not x.dtype == u.dtype == v.dtype:
        raise TypeError(f"u, v: got dtypes {u.dtype} and {v.dtype}, wanted x's dtype {x.dtype}")
    return reference.grouped_mix(u, v, x)


def check_backward(backward: str) -> None:
    """Raises unless `backward` names a gradient that is built."""
    if backward not in BACKWARDS:
        raise ValueError(f"backward: got {backward!r}, wanted one of {', '.join(BACKWARDS)}")
    if backward == "single_pass":
        raise NotImplementedError(f"backward 'single_pass': {_LATER}")


def _check_mix(name, x, m, backward):
    rope.check_rows(name, x)
    heads = x.shape[-2]
    if m.shape != (heads, heads):
        raise ValueError(f"m: got shape {m.shape}, wanted ({heads}, {heads}) for {name}'s {heads} heads")
    if m.dtype != x.dtype:
        raise TypeError(f"m: got dtype {m.dtype}, wanted {name}'s dtype {x.dtype}")
    check_backward(backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _postmix(o, m, tables, implementation):
    if o.size == 0:
        return o
    # The barriers keep what surrounds the postmix from being fused into it, on either path: its operands are rounded
    # values in memory, and so is its result.
    o, m, tables = lax.optimization_barrier((o, m, tables))
    if implementation == "triton":
        from dsv4_fusions.ops.inv_rope_postmix import triton  # Pallas loads only where it is used

        out = triton.forward(m, o, tables)
    else:
        out = xla.forward(m, o, tables)
    return lax.optimization_barrier(out)


def _postmix_fwd(o, m, tables, implementation):
    # A frozen operand's gradient is not computed, and what only that gradient needs is not saved.
    values = jax.tree.map(lambda leaf: leaf.value, (o, m, tables), is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    residuals = (values[0] if m.perturbed else None, values[1] if o.perturbed else None, values[2])
    return _postmix(*values, implementation), residuals


def _postmix_bwd(implementation, residuals, g):
    o, m, tables = residuals
    if isinstance(g, SymbolicZero):
        return None, None, None
    o, m, tables, g = lax.optimization_barrier((o, m, tables, g))
    x = o
    if o is not None and tables is not None:
        x = lax.optimization_barrier(rope.rotate(o, tables, inverse=True))
    dm, dx = lax.optimization_barrier(reference.mix_transpose(m, x, g))
    if dx is not None and tables is not None:
        dx = rope.rotate_transposed(dx, tables, inverse=True)
    return dx, dm, None


_postmix.defvjp(_postmix_fwd, _postmix_bwd, symbolic_zeros=True)
