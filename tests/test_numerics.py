"""Exact rounding: against ml_dtypes and NumPy over the whole range of f32, and against a compiler's wish to drop it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from program import primitives

from dsv4_fusions import numerics

NAN_PATTERNS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001]


def wide_range_values():
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = (rng.standard_normal(200_000) * 10.0 ** rng.uniform(-9, 6, 200_000)).astype(np.float32)
    edges = [
        0.0,
        -0.0,
        65504,
        65519.9,
        65520,
        -65520,
        2.0**-14,
        2.0**-24,
        2.0**-25,
        1.5 * 2.0**-24,
        3 * 2.0**-25,
        3.4e38,
    ]
    ties = np.float32(1) + np.arange(64, dtype=np.float32) * np.float32(2.0**-9)
    return np.concatenate(
        [anything, scaled, np.array(edges, np.float32), ties, -ties, np.array(NAN_PATTERNS, np.uint32).view(np.float32)]
    )


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("round_to", [numerics.round_to, numerics.round_to_in_kernel])
def test_rounding_equals_ml_dtypes_on_every_kind_of_number(round_to, dtype):
    x = wide_range_values()
    if dtype == ml_dtypes.bfloat16:  # XLA's CPU code flushes f32 subnormals, which bfloat16 shares
        x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
    with np.errstate(over="ignore"):
        want = x.astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(round_to, static_argnums=1)(x, dtype))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(got.view(np.uint32)[finite], want.view(np.uint32)[finite])


@pytest.mark.parametrize("bits", [8, 11, 13, 16])
def test_round_significand_is_the_nearest_number_of_that_many_bits(bits):
    x = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)
    got = np.asarray(numerics.round_significand(jnp.asarray(x), bits), np.float64)
    exponent = np.frexp(x.astype(np.float64))[1]
    spacing = np.exp2(exponent - bits)
    np.testing.assert_array_equal(got, np.rint(x.astype(np.float64) / spacing) * spacing)


def test_a_rounding_between_f32_operations_is_kept():
    # xla#41605: 1 + 2**-9 through bf16 is 1; a compiler that drops the round trip answers 2**-9.
    through = jax.jit(lambda x: numerics.round_to(x + jnp.float32(2.0**-9), jnp.bfloat16) - x)
    assert through(jnp.float32(1)) == 0


def test_pins_stand_in_the_jaxpr():
    x = jnp.ones(4)
    assert primitives(lambda x: numerics.round_to(x, jnp.bfloat16), x) == ["reduce_precision"]
    assert "bitcast_convert_type" in primitives(lambda x: numerics.round_to(x, jnp.float16), x)
    assert primitives(lambda x: numerics.round_to(x, jnp.float32), x) == []


def test_rounding_to_another_format_is_refused():
    with pytest.raises(ValueError, match="dtype: got float64, wanted bfloat16, float16 or float32"):
        numerics.round_to(jnp.ones(3), np.float64)


def sum_in_numpy(parts):
    """The tree of `sum_in_order`, one column at a time."""
    while len(parts) > 1:
        fan_in = min(16, len(parts))
        columns = -(-len(parts) // fan_in)
        sums = np.empty((columns, *parts.shape[1:]), np.float32)
        for column in range(columns):
            total = parts[column]
            for row in range(1, fan_in):
                i = row * columns + column
                total = total + (parts[i] if i < len(parts) else np.float32(0))
            sums[column] = total
        parts = sums
    return parts[0]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 255, 256, 257, 1000])
@pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
def test_sum_in_order_is_one_tree_of_single_additions(length, jit):
    rng = np.random.default_rng(length)
    parts = (rng.standard_normal((length, 3, 5)) * 10.0 ** rng.uniform(-3, 3, (length, 3, 5))).astype(np.float32)
    got = np.asarray(jit(numerics.sum_in_order)(jnp.asarray(parts)))
    np.testing.assert_array_equal(got.view(np.uint32), sum_in_numpy(parts).view(np.uint32))
    if length >= 255:  # another order would not give these bits
        in_a_row = np.add.accumulate(parts, axis=0)[-1]
        assert (got != in_a_row).any()


def test_sum_in_order_leaves_a_compiler_nothing_to_order():
    for length in (1, 2, 17, 300):
        names = primitives(numerics.sum_in_order, jnp.ones((length, 4)))
        assert not any(name.startswith(("reduce", "dot", "cumsum", "scan", "while")) for name in names), names
    # 300 -> 19 -> 2 -> 1, each with a barrier behind it
    assert names.count("add") == 15 + 15 + 1 and names.count("optimization_barrier") == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "bool"])
def test_bits_is_an_integer_view_of_the_same_width(dtype):
    x = jnp.asarray([0, 1, 1, 0], dtype)
    for view in (numerics.bits(x), numerics.bits(np.asarray(x))):
        assert view.dtype == np.dtype(f"uint{8 * x.dtype.itemsize}")
        np.testing.assert_array_equal(np.asarray(view), np.asarray(x).view(view.dtype))


def test_bits_tells_the_zeros_apart():
    assert numerics.bits(jnp.float32(0)) != numerics.bits(jnp.float32(-0.0))


@pytest.mark.parametrize("values", [[2**31], [-(2**31) - 1], [2**40, 0]])
def test_integers_that_jax_would_wrap_raise(values):
    with pytest.raises(ValueError, match="ids: got int64 values from .* wanted values within int32"):
        numerics.integers("ids", np.array(values))
    with jax.enable_x64(True):
        assert numerics.integers("ids", np.array(values)).dtype == jnp.int64


def test_integers_keep_their_values_and_type():
    for x in (
        np.array([2**31 - 1, -(2**31)]),
        np.arange(3, dtype=np.uint8),
        jnp.arange(3),
        [1, 2],
        np.empty(0, np.int64),
    ):
        np.testing.assert_array_equal(numerics.integers("ids", x), x)
    with pytest.raises(TypeError, match="ids: got dtype float32, wanted integers"):
        numerics.integers("ids", jnp.ones(3))
