"""Rotary position embedding: frequencies (plain and YaRN), tables, the rotation, its inverse and its transpose.

Channels are interleaved pairs (2k, 2k + 1) at the end of each head. With `a` the table entry of a channel and `b` that
of its partner, one formula serves all four directions:

    y[c] = x[c] * a[c] + x[c ^ 1] * b[c]

    rotation       a = (cosL, cosR)   b = (-sinL,  sinR)
    its transpose  a = (cosL, cosR)   b = ( sinR, -sinL)      (b's two sides exchanged)
    its inverse    sin negated

L and R are the left and right halves of a table, which `rope_tables` makes equal and a caller need not.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsv4_fusions import dispatch, numerics

Rounding = Literal["each_product", "once"]
ROUNDINGS = ("each_product", "once")
YARN_DEFAULTS = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
DTYPES = ("bfloat16", "float16", "float32")

# A product with a table entry of this many significant bits is exact in f32's 24, so that neither contraction into a
# fused multiply-add nor its absence can change a bit.
_EXACT_TABLE_BITS = {"bfloat16": 16, "float16": 13}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cos", "sin"], meta_fields=["rounding"])
@dataclasses.dataclass(frozen=True, eq=False)
class RopeTables:
    """Cosines and sines of a rotation.

    Attributes:
      cos: [..., tokens, rope_dim], left half for the first channel of each pair, right half for the second.
      sin: same.
      rounding: "each_product" (both products and their sum are rounded to x's dtype: PaddleFleet's bf16 path) or "once"
        (one rounding at the end: DeepSeek's reference and Hugging Face). Static.
    """

    cos: Float[Array, "*batch tokens rope_dim"]
    sin: Float[Array, "*batch tokens rope_dim"]
    rounding: Rounding = "each_product"


def yarn_correction_range(rope_dim: int, base: float, yarn: Mapping[str, float]) -> tuple[int, int]:
    """Frequency indices between which YaRN (Peng et al. 2023, section 3.2) ramps from extra- to interpolation."""
    yarn = {**YARN_DEFAULTS, **yarn}

    def index_of(rotations):  # of the frequency that turns this often within the original context
        return (
            rope_dim
            * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * rotations))
            / (2 * math.log(base))
        )

    low = max(math.floor(index_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(index_of(yarn["beta_slow"])), rope_dim - 1)
    return low, high


def inverse_frequencies(rope_dim: int, base: float, yarn: Mapping[str, float] | None = None) -> np.ndarray:
    """Angle per position of each channel pair, in radians.

    Args:
      rope_dim: rotary channels of a head, even.
      base: theta; `base ** (-2 i / rope_dim)` is the plain frequency of pair i.
      yarn: None, or a mapping with any of factor, original_max_position_embeddings, beta_fast, beta_slow. The attention
        temperature that YaRN also defines is not applied: DeepSeek-V4's rotation preserves norms.

    Returns:
      f32 [rope_dim // 2]; every step is taken in f32, as the reference systems do.

    Raises:
      ValueError: odd rope_dim, base not above 1, or an unknown key in `yarn`.
    """
    if rope_dim < 0 or rope_dim % 2:
        raise ValueError(f"rope_dim: got {rope_dim}, wanted an even number of channels")
    base = float(base)
    if not 1 < base < math.inf:
        raise ValueError(f"base: got {base}, wanted a finite number above 1")
    powers = np.float32(base) ** (np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(max(rope_dim, 1)))
    extrapolated = np.float32(1) / powers
    if yarn is None:
        return extrapolated
    _check_yarn(yarn)
    interpolated = np.float32(1) / (np.float32({**YARN_DEFAULTS, **yarn}["factor"]) * powers)
    low, high = yarn_correction_range(rope_dim, base, yarn)
    span = np.float32(high - low if high != low else 0.001)
    ramp = np.clip((np.arange(rope_dim // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1)
    extrapolation_share = np.float32(1) - ramp
    return interpolated * (np.float32(1) - extrapolation_share) + extrapolated * extrapolation_share


def _check_yarn(yarn):
    if not isinstance(yarn, Mapping):
        raise TypeError(f"yarn: got {type(yarn).__name__}, wanted a mapping or None")
    unknown = [str(key) for key in yarn if key not in YARN_DEFAULTS]
    if unknown:
        raise ValueError(f"yarn: got unknown {', '.join(sorted(unknown))}, wanted keys of {', '.join(YARN_DEFAULTS)}")
    merged = {**YARN_DEFAULTS, **yarn}
    for key, value in merged.items():
        if not 0 < value < math.inf:
            raise ValueError(f"yarn[{key!r}]: got {value}, wanted a finite number above 0")
    if merged["beta_fast"] < merged["beta_slow"]:
        raise ValueError(f"yarn: got beta_fast {merged['beta_fast']} below beta_slow {merged['beta_slow']}")


def rope_tables(
    positions: Int[Array, "*batch tokens"],
    rope_dim: int,
    base: float = 10000.0,
    yarn: Mapping[str, float] | None = None,
    rounding: Rounding = "each_product",
    dtype=jnp.bfloat16,
) -> RopeTables:
    """Tables for the given token positions.

    Positions may restart per document, differ per batch entry, carry an offset or be negative. Angles are f32 products
    of position and frequency, as in the reference systems: at position t an angle is off by up to t * 2**-24 radians
    (0.008 at position 131071), whatever the tables' dtype.

    Args:
      positions: [..., tokens] integers.
      rope_dim: rotary channels of a head, even.
      base: theta of the frequencies.
      yarn: None for plain frequencies; see `inverse_frequencies`.
      rounding: "each_product" rounds the tables to `dtype`; "once" keeps them in f32, with as many significant bits as
        keep every product with a `dtype` number exact (16 for bfloat16, 13 for float16).
      dtype: of the activations that will be rotated: bfloat16, float16 or float32.

    Returns:
      RopeTables with [..., tokens, rope_dim] arrays, both halves equal.

    Raises:
      ValueError, TypeError: an argument that is not as described.
    """
    positions = numerics.integers("positions", positions)
    if positions.ndim < 1:
        raise ValueError("positions: got a scalar, wanted shape [..., tokens]")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding: got {rounding!r}, wanted one of {', '.join(ROUNDINGS)}")
    dtype = _check_dtype("dtype", dtype)
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(rope_dim, base, yarn))
    angles = jnp.concatenate([angles, angles], axis=-1)
    tables = prepare_tables(RopeTables(jnp.cos(angles), jnp.sin(angles), rounding), dtype)
    if rounding == "each_product":
        return RopeTables(tables.cos.astype(dtype), tables.sin.astype(dtype), rounding)
    return tables


def prepare_tables(tables: RopeTables, dtype) -> RopeTables:
    """The tables that `dtype` numbers are multiplied with, rounded as `tables.rounding` says; idempotent.

    Tables that are as they should be pass as they are, so that nothing is copied; cast them to f32 where they are used.
    """
    name = jnp.dtype(dtype).name

    def prepare(table):
        if name == "float32" or (table.dtype == dtype and tables.rounding == "each_product"):
            return table
        if tables.rounding == "each_product":
            return numerics.round_to(table.astype(jnp.float32), dtype)
        return numerics.round_significand(table.astype(jnp.float32), _EXACT_TABLE_BITS[name])

    return RopeTables(prepare(tables.cos), prepare(tables.sin), tables.rounding)


def rotate(
    x: Float[Array, "*batch tokens heads head_dim"], tables: RopeTables, inverse: bool = False
) -> Float[Array, "*batch tokens heads head_dim"]:
    """Rotates the trailing rope_dim channels of every head; the leading ones are copied bit for bit.

    The gradient is the exact transpose with the same roundings, for unequal table halves too. No gradient flows to the
    tables, and forward-mode differentiation is refused.

    Args:
      x: [..., tokens, heads, head_dim], bfloat16, float16 or float32.
      tables: [..., tokens, rope_dim]; leading axes broadcast against x's.
      inverse: rotate back.

    Returns:
      Array like x.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit.
    """
    check_operands("x", x, tables)
    x, cos, sin = dispatch.align_manual_axes(x, tables.cos, tables.sin)
    return _rotate(x, lax.stop_gradient(dataclasses.replace(tables, cos=cos, sin=sin)), inverse, False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rotate(x, tables, inverse, transposed):
    rope_dim = tables.cos.shape[-1]
    if rope_dim == 0:
        return x
    nope = x.shape[-1] - rope_dim
    tail = rotate_tail(x[..., nope:], tables, inverse, transposed)
    # Not an update in place: XLA on a CPU fuses the rotation into it and then reads pair partners already overwritten.
    return jnp.concatenate([x[..., :nope], tail], axis=-1)


def _rotate_fwd(x, tables, inverse, transposed):
    return _rotate(x, tables, inverse, transposed), tables


def _rotate_bwd(inverse, transposed, tables, g):
    return _rotate(g, tables, inverse, not transposed), None


_rotate.defvjp(_rotate_fwd, _rotate_bwd)


def rotate_transposed(g, tables: RopeTables, inverse: bool = False):
    """The transpose of `rotate`: what its gradient is. Shapes as there."""
    return _rotate(g, tables, inverse, True)


def rotate_tail(x, tables: RopeTables, inverse: bool, transposed: bool = False):
    """The rotation on the rotary channels alone: x [..., tokens, heads, rope_dim]."""
    prepared = prepare_tables(tables, x.dtype)
    own, partner = (t[..., None, :] for t in coefficients(prepared, inverse, transposed))
    return combine(x, _swap_pairs(x), own, partner, tables.rounding)


def coefficients(tables: RopeTables, inverse: bool, transposed: bool = False):
    """(a, b) of the module's formula, each [..., tokens, rope_dim] in channel order."""
    half = tables.cos.shape[-1] // 2
    sin_left, sin_right = tables.sin[..., :half], tables.sin[..., half:]
    if transposed:
        sin_left, sin_right = -sin_right, -sin_left
    if inverse:
        sin_left, sin_right = -sin_left, -sin_right
    own = jnp.stack([tables.cos[..., :half], tables.cos[..., half:]], axis=-1)
    partner = jnp.stack([-sin_left, sin_right], axis=-1)
    return own.reshape(tables.cos.shape), partner.reshape(tables.sin.shape)


def combine(x, x_partner, own, partner, rounding: Rounding, round_to=numerics.round_to):
    """x * own + x_partner * partner in x's dtype: f32 arithmetic with the pinned roundings of `rounding`."""
    dtype = x.dtype
    x, x_partner, own, partner = (a.astype(jnp.float32) for a in (x, x_partner, own, partner))
    products = x * own, x_partner * partner
    if dtype == jnp.float32:
        # These are not exact: a compiler that contracts one of them with the sum here and not there would move bits.
        products = lax.optimization_barrier(products)
    elif rounding == "each_product":
        products = (round_to(product, dtype) for product in products)
    first, second = products
    return round_to(first + second, dtype).astype(dtype)


def _swap_pairs(x):
    return jnp.flip(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), -1).reshape(x.shape)


def check_operands(name: str, x, tables: RopeTables) -> None:
    """Raises unless x [..., tokens, heads, head_dim] can be rotated with the tables."""
    if not isinstance(tables, RopeTables):
        raise TypeError(f"tables: got {type(tables).__name__}, wanted RopeTables (see rope_tables)")
    check_rows(name, x)
    cos, sin = tables.cos, tables.sin
    if tables.rounding not in ROUNDINGS:
        raise ValueError(f"tables.rounding: got {tables.rounding!r}, wanted one of {', '.join(ROUNDINGS)}")
    if cos.shape != sin.shape:
        raise ValueError(f"tables: got cos {cos.shape} and sin {sin.shape}, wanted equal shapes")
    for side, table in (("cos", cos), ("sin", sin)):
        if not jnp.issubdtype(table.dtype, jnp.floating):
            raise TypeError(f"tables.{side}: got dtype {table.dtype}, wanted floating point")
    if cos.ndim < 2:
        raise ValueError(f"tables: got shape {cos.shape}, wanted [..., tokens, rope_dim]")
    rope_dim = cos.shape[-1]
    if rope_dim % 2:
        raise ValueError(f"tables: got rope_dim {rope_dim}, wanted an even number of channels")
    if rope_dim > x.shape[-1]:
        raise ValueError(f"tables: got rope_dim {rope_dim}, wanted at most {name}'s head_dim {x.shape[-1]}")
    lead, tokens = x.shape[:-3], x.shape[-3]
    table_lead = cos.shape[:-2]
    fits = len(table_lead) <= len(lead) and all(
        t in (1, n) for t, n in zip(reversed(table_lead), reversed(lead), strict=False)
    )
    if cos.shape[-2] != tokens or not fits:
        raise ValueError(
            f"tables: got shape {cos.shape}, wanted [..., {tokens}, rope_dim], leading axes that broadcast to {lead}"
        )


def check_rows(name: str, x) -> None:
    """Raises unless x is an array [..., tokens, heads, head_dim] of a dtype that the rotation and the postmix serve."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{name}: got {type(x).__name__}, wanted an array")
    if len(x.shape) < 3:
        raise ValueError(f"{name}: got shape {x.shape}, wanted [..., tokens, heads, head_dim]")
    _check_dtype(name, x.dtype)


def _check_dtype(name, dtype):
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        raise TypeError(f"{name}: got dtype {dtype.name}, wanted one of {', '.join(DTYPES)}")
    return dtype
