"""Exact rounding that no compiler may drop, and integer views for bitwise comparison."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

# Explicit significand bits of the formats a rounding can be pinned to; f32 itself needs none.
_MANTISSA_BITS = {"bfloat16": 7, "float16": 10}


_FAN_IN = 16  # of `sum_in_order`


def round_to(x: Float32[Array, "..."], dtype) -> Float32[Array, "..."]:
    """Rounds f32 values to the nearest value of `dtype` (ties to even), in code that XLA compiles.

    A plain `astype(dtype).astype(float32)` may be dropped inside a fusion; this rounding survives. NaN stays NaN.

    Args:
      x: f32 values.
      dtype: bfloat16, float16 or float32 (for which nothing happens).

    Returns:
      f32 array whose elements are exactly representable in `dtype`.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    # For float16, reduce_precision would flush subnormals to zero, and they are ordinary values there.
    return round_to_in_kernel(x, dtype)


def round_to_in_kernel(x: Float32[Array, "..."], dtype) -> Float32[Array, "..."]:
    """Same as `round_to`, in integer arithmetic alone, which lowers in every Pallas backend."""
    name = jnp.dtype(dtype).name
    if name == "float32":
        return x
    if name not in _MANTISSA_BITS:
        raise ValueError(f"dtype: got {name}, wanted bfloat16, float16 or float32")
    y = round_significand(x, _MANTISSA_BITS[name] + 1)
    if name == "float16":
        magnitude = jnp.abs(x)
        y = jnp.where(magnitude < jnp.float32(2.0**-14), _with_sign_of(_float16_subnormal(magnitude), x), y)
        y = jnp.where(magnitude >= jnp.float32(65520.0), x * jnp.float32(np.inf), y)
    # The integer carry turns some NaN patterns into +-0.
    return jnp.where(x != x, x, y)


def _float16_subnormal(magnitude):
    """Nearest multiple of 2**-24, for 0 <= magnitude < 2**-14."""
    # Adding and subtracting 0.5 would do the same, but XLA's simplifier cancels the pair.
    u = lax.bitcast_convert_type(magnitude, jnp.int32)
    shift = jnp.clip(126 - (u >> 23), 1, 25)
    significand = (u & 0x7FFFFF) | 0x800000
    half_minus_one = (jnp.int32(1) << (shift - 1)) - 1
    quotient = (significand + half_minus_one + ((significand >> shift) & 1)) >> shift
    return quotient.astype(jnp.float32) * jnp.float32(2.0**-24)


def round_significand(x: Float32[Array, "..."], bits: int) -> Float32[Array, "..."]:
    """Rounds f32 values to `bits` significant bits (ties to even), exponent range unchanged, in integer arithmetic."""
    drop = 24 - bits
    u = lax.bitcast_convert_type(x, jnp.uint32)
    tie_to_even = (u >> jnp.uint32(drop)) & jnp.uint32(1)
    u = (u + jnp.uint32((1 << (drop - 1)) - 1) + tie_to_even) & jnp.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    return lax.bitcast_convert_type(u, jnp.float32)


def _with_sign_of(magnitude, x):
    # Bits, not -magnitude: Pallas' Triton backend computes 0 - magnitude, which is +0 for +0.
    sign = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x80000000)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.uint32) | sign, jnp.float32)


def sum_in_order(parts: Float[Array, "parts ..."]) -> Float[Array, "..."]:
    """Sum over the leading axis, in a tree of single additions that depends on the axis' length alone.

    A compiler may order a reduction as it likes, by the chip or by what surrounds it; single additions it may not.

    Args:
      parts: at least one part.

    Returns:
      Their sum, without the leading axis.
    """
    while len(parts) > 1:
        fan_in = min(_FAN_IN, len(parts))
        columns = -(-len(parts) // fan_in)
        padding = [(0, fan_in * columns - len(parts))] + [(0, 0)] * (parts.ndim - 1)
        rows = jnp.pad(parts, padding).reshape(fan_in, columns, *parts.shape[1:])
        # The barrier ends a fusion: one over all levels would load every part for every element at once.
        parts = lax.optimization_barrier(functools.reduce(operator.add, list(rows)))
    return parts[0]


def integers(name: str, x) -> Int[Array, "..."]:
    """`x` as a JAX array of integers. A value that JAX would wrap raises instead.

    Args:
      name: of the argument, for the message.
      x: integers; int64 from NumPy is taken as int32 where `jax_enable_x64` is off.

    Returns:
      JAX array of x's values.

    Raises:
      TypeError: x is not of an integer type.
      ValueError: a 64-bit value outside int32 where JAX has no 64-bit integers.
    """
    given = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {given.dtype}, wanted integers")
    taken = jnp.asarray(given)
    if taken.dtype != given.dtype and given.size:
        low, high = given.min(), given.max()
        if low < jnp.iinfo(taken.dtype).min or high > jnp.iinfo(taken.dtype).max:
            raise ValueError(
                f"{name}: got {given.dtype} values from {low} to {high}, wanted values within {taken.dtype} "
                "(or jax_enable_x64 on)"
            )
    return taken


def saturated_int32(x: Int[Array, "..."]) -> Int32[Array, "..."]:
    """Integers of any type as int32, the nearest one for those that it does not hold: they must not wrap."""
    held, limits = jnp.iinfo(jnp.int32), jnp.iinfo(x.dtype)
    if limits.min < held.min:
        x = jnp.maximum(x, np.asarray(held.min, x.dtype))
    if limits.max > held.max:
        x = jnp.minimum(x, np.asarray(held.max, x.dtype))
    return x.astype(jnp.int32)


def bits(x: Shaped[Array, "..."]):
    """The elements of a NumPy or JAX array as unsigned integers of the same width, so that +0 and -0 differ."""
    dtype = np.dtype(f"uint{8 * x.dtype.itemsize}")
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(dtype)
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, dtype)
