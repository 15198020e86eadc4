"""VHA postmix, alone or with the inverse RoPE of the attention output folded in.

Unfused is `vha_postmix(rotate(o, tables, inverse=True), m)`, fused is `inv_rope_vha_postmix(o, m, tables)`, and
likewise for the postmix within groups of heads: one custom_vjp serves all four, so that fused and unfused differ in the
rotation and in nothing else.
"""

import dataclasses
import functools
import importlib
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from dsv4_fusions import dispatch, rope
from dsv4_fusions.ops.inv_rope_postmix import reference, tiling

Backward = Literal["dot_general", "single_pass"]
BACKWARDS = ("dot_general", "single_pass")


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
      backward: "dot_general" takes both gradients from the transpose of the forward's own dot_general. "single_pass"
        computes both in one pass over x and the incoming gradient; the gradient of m is summed in f32 over chunks of a
        fixed number of tokens, and the chunks in a fixed order, so that a kernel gives the same bits every time.
      implementation: "mosaic", "triton", "jax_triton", "xla", or None for the first of them that serves the call.

    Returns:
      Array like x.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    _check_mix("x", x, m)
    return _apply(x, (m,), None, backward, implementation)


def inv_rope_vha_postmix(
    o: Float[Array, "*batch tokens heads head_dim"],
    m: Float[Array, "heads heads"],
    tables: rope.RopeTables,
    backward: Backward = "dot_general",
    implementation: str | None = None,
) -> Float[Array, "*batch tokens heads head_dim"]:
    """`vha_postmix(rotate(o, tables, inverse=True), m)` without the rotated tensor in memory, and the same bits.

    Output, gradient of o and gradient of m equal the unfused pair's of the same `implementation` and `backward`, both
    under jit. The backward saves o, m and the tables. With "dot_general" it rebuilds the rotation and hands both
    gradients to the transpose that the unfused pair uses; with "single_pass" the rotation takes place within the pass.
    Off the CPU, a call that no kernel serves takes the unfused pair.

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
    """
    rope.check_operands("o", o, tables)
    _check_mix("o", o, m)
    return _apply(o, (m,), tables, backward, implementation)


def grouped_postmix(
    x: Float[Array, "*batch tokens heads head_dim"],
    u: Float[Array, "groups group_heads rank"],
    v: Float[Array, "groups group_heads rank"],
    backward: Backward = "dot_general",
    implementation: str | None = None,
) -> Float[Array, "*batch tokens heads head_dim"]:
    """The postmix within groups of heads: x + V (U^T x) for each group, each product rounded (PaddleFleet).

    Args:
      x: [..., tokens, heads, head_dim], bfloat16, float16 or float32.
      u: [groups, heads // groups, rank] in x's dtype.
      v: like u.
      backward: see `vha_postmix`; "dot_general" takes the gradients of x, u and v from products of XLA's.
      implementation: see `vha_postmix`; "mosaic" does not serve this op.

    Returns:
      Array like x.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    _check_grouped("x", x, u, v)
    return _apply(x, (u, v), None, backward, implementation)


def inv_rope_grouped_postmix(
    o: Float[Array, "*batch tokens heads head_dim"],
    u: Float[Array, "groups group_heads rank"],
    v: Float[Array, "groups group_heads rank"],
    tables: rope.RopeTables,
    backward: Backward = "dot_general",
    implementation: str | None = None,
) -> Float[Array, "*batch tokens heads head_dim"]:
    """`grouped_postmix(rotate(o, tables, inverse=True), u, v)` without the rotated tensor in memory, and the same bits.

    Args:
      o: like `inv_rope_vha_postmix`'s.
      u, v: see `grouped_postmix`.
      tables: see `inv_rope_vha_postmix`.
      backward, implementation: see `grouped_postmix`.

    Returns:
      Array like o.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit, or an implementation that cannot run here.
    """
    rope.check_operands("o", o, tables)
    _check_grouped("o", o, u, v)
    return _apply(o, (u, v), tables, backward, implementation)


def postmix_choice(
    dtype, heads: int, head_dim: int, rope_dim: int, groups: int | None = None, implementation: str | None = None
) -> tuple[str, str | None]:
    """Which implementation serves a postmix, fused or not, and whether the inverse RoPE is folded into it.

    Args:
      dtype: of the activations.
      heads, head_dim: of the activations.
      rope_dim: rotary channels.
      groups: of heads, for the postmix within groups; None: all heads are mixed.
      implementation: a name, or None.

    Returns:
      (implementation that runs, why the inverse RoPE is not folded into it: None where it is).

    Raises:
      ValueError: an implementation that is unknown or cannot run here.
    """
    chosen = dispatch.choose(implementation, _unsupported(jnp.dtype(dtype), heads, head_dim, groups))
    if rope_dim == 0:
        return chosen, "rope_dim is 0: there is nothing to rotate"
    platform = dispatch.target().platform
    if chosen == "xla" and platform != "cpu":
        return chosen, f"no kernel serves this call, and XLA code gains nothing from the fusion on a {platform}"
    return chosen, None


def _unsupported(dtype, heads, head_dim, groups) -> dict[str, str | None]:
    # None of these may depend on the rotation: with it and without it the same implementation must be chosen.
    wrong_dtype = many_heads = wrong_shape = None
    if dtype.name not in tiling.DTYPES:
        wrong_dtype = f"it serves {' and '.join(tiling.DTYPES)}, not {dtype.name}"
    if heads // (groups or 1) > tiling.MOST_HEADS:  # two tiles of more would not fit the shared memory of most chips
        many_heads = f"it serves up to {tiling.MOST_HEADS} heads that are mixed, not {heads // (groups or 1)}"
    if groups is not None:
        wrong_shape = "it does not serve the grouped postmix"
    elif heads != tiling.MOSAIC_HEADS:
        wrong_shape = f"it serves {tiling.MOSAIC_HEADS} heads, not {heads}"
    elif head_dim == 0 or head_dim % tiling.MOSAIC_CHANNELS:
        wrong_shape = f"it serves multiples of {tiling.MOSAIC_CHANNELS} as head_dim, not {head_dim}"
    return {
        "mosaic": dispatch.mosaic_unsupported() or wrong_dtype or wrong_shape,
        "triton": dispatch.triton_unsupported() or wrong_dtype or many_heads,
        "jax_triton": dispatch.jax_triton_unsupported() or wrong_dtype or many_heads,
        "xla": None,
    }


def check_backward(backward: str) -> None:
    """Raises unless `backward` names a gradient."""
    if backward not in BACKWARDS:
        raise ValueError(f"backward: got {backward!r}, wanted one of {', '.join(BACKWARDS)}")


def _check_mix(name, x, m):
    rope.check_rows(name, x)
    heads = x.shape[-2]
    if m.shape != (heads, heads):
        raise ValueError(f"m: got shape {m.shape}, wanted ({heads}, {heads}) for {name}'s {heads} heads")
    if m.dtype != x.dtype:
        raise TypeError(f"m: got dtype {m.dtype}, wanted {name}'s dtype {x.dtype}")


def _check_grouped(name, x, u, v):
    rope.check_rows(name, x)
    if u.ndim != 3 or u.shape != v.shape or u.shape[0] * u.shape[1] != x.shape[-2]:
        raise ValueError(
            f"u, v: got shapes {u.shape} and {v.shape}, wanted the same [groups, heads // groups, rank] twice for "
            f"{name} [..., tokens, heads, head_dim] = {x.shape}"
        )
    if not x.dtype == u.dtype == v.dtype:
        raise TypeError(f"u, v: got dtypes {u.dtype} and {v.dtype}, wanted {name}'s dtype {x.dtype}")


def _apply(x, weights, tables, backward, implementation):
    check_backward(backward)
    rope_dim = 0 if tables is None else tables.cos.shape[-1]
    implementation, falls_back = postmix_choice(
        x.dtype,
        *x.shape[-2:],
        rope_dim,
        groups=len(weights[0]) if len(weights) == 2 else None,
        implementation=implementation,
    )
    if falls_back and tables is not None:
        x, tables = rope.rotate(x, tables, inverse=True), None
    if tables is None:
        x, *weights = dispatch.align_manual_axes(x, *weights)
    else:
        tables = lax.stop_gradient(tables)
        x, cos, sin, *weights = dispatch.align_manual_axes(x, tables.cos, tables.sin, *weights)
        tables = rope.RopeTables(cos, sin, tables.rounding)
    return _postmix(x, tuple(weights), tables, implementation, backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients a backward computes."""

    activation: bool
    weights: bool


def _kernels(implementation):
    """The module of an implementation; Pallas loads only where it is used."""
    return importlib.import_module(f"{__name__}.{implementation}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _postmix(o, weights, tables, implementation, backward):
    if o.size == 0:
        return o
    # The barriers keep what surrounds the postmix from being fused into it, on either path: its operands are rounded
    # values in memory, and so is its result.
    o, weights, tables = lax.optimization_barrier((o, weights, tables))
    return lax.optimization_barrier(_kernels(implementation).forward(weights, o, tables))


def _postmix_fwd(o, weights, tables, implementation, backward):
    # A frozen operand's gradient is not computed, and what only that gradient needs is not saved.
    wanted = Wanted(activation=o.perturbed, weights=any(w.perturbed for w in weights))
    o, weights, tables = jax.tree.map(
        lambda leaf: leaf.value, (o, weights, tables), is_leaf=lambda leaf: hasattr(leaf, "perturbed")
    )
    saved_weights = weights if wanted.activation or len(weights) == 2 else None
    residuals = (o if wanted.weights else None, saved_weights, tables, wanted)
    return _postmix(o, weights, tables, implementation, backward), residuals


def _postmix_bwd(implementation, backward, residuals, g):
    o, weights, tables, wanted = residuals
    if isinstance(g, SymbolicZero):
        return None, None, None
    o, weights, tables, g = lax.optimization_barrier((o, weights, tables, g))
    if backward == "single_pass" and g.size:
        do, dweights = _kernels(implementation).single_pass_backward(weights, o, tables, g, wanted)
        do, dweights = lax.optimization_barrier((do, dweights))
        return do, jax.tree.map(lambda d: d.astype(g.dtype), dweights), None
    x = o
    if o is not None and tables is not None:
        x = lax.optimization_barrier(rope.rotate(o, tables, inverse=True))
    dweights, dx = lax.optimization_barrier(reference.mix_transpose(weights, x, g))
    if dx is not None and tables is not None:
        dx = rope.rotate_transposed(dx, tables, inverse=True)
    return dx if wanted.activation else None, dweights, None


_postmix.defvjp(_postmix_fwd, _postmix_bwd, symbolic_zeros=True)
