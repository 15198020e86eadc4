"""Rows by id and the sum of rows by id, which is the gradient, against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_fusions import gather


@pytest.mark.parametrize("num_rows, num_slots", [(1, 9), (5, 0), (50, 33), (300, 1000)])
def test_sums_of_rows(num_rows, num_slots):
    rng = np.random.default_rng(num_slots)
    ids = rng.integers(-3, num_rows + 3, num_slots).astype(np.int32)
    # Multiples of 1/16 below 4: every partial sum is exact, so that all orders must agree to the last bit.
    values = (rng.integers(-64, 64, (num_slots, 3)) / 16).astype(np.float32)
    wanted = np.zeros((num_rows, 3), np.float32)
    for i, value in zip(ids, values, strict=True):
        if 0 <= i < num_rows:
            wanted[i] += value
    for sum_rows in (gather.sum_rows_sorted, gather.sum_rows_scatter):
        got = jax.jit(sum_rows, static_argnums=2)(values, ids, num_rows)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, wanted)
    values = rng.standard_normal((num_slots, 3)).astype(np.float32)
    exact = np.zeros((num_rows, 3))
    np.add.at(exact, ids[(ids >= 0) & (ids < num_rows)], values[(ids >= 0) & (ids < num_rows)].astype(np.float64))
    for sum_rows in (gather.sum_rows_sorted, gather.sum_rows_scatter):
        np.testing.assert_allclose(jax.jit(sum_rows, static_argnums=2)(values, ids, num_rows), exact, atol=1e-4)


@pytest.mark.parametrize("sum_rows", [gather.sum_rows_sorted, gather.sum_rows_scatter])
def test_sums_keep_nan_in_its_row(sum_rows):
    ids = np.array([3, -1, 0, 9, 3, 1, 0], np.int32)
    values = np.array([1, np.nan, 2, np.nan, np.inf, np.nan, 3], np.float32)[:, None]
    np.testing.assert_array_equal(jax.jit(sum_rows, static_argnums=2)(values, ids, 4)[:, 0], [5, np.nan, 0, np.inf])


def test_sums_under_vmap():
    rng = np.random.default_rng(0)
    ids, values = rng.integers(-1, 4, (3, 20)).astype(np.int32), rng.standard_normal((3, 20, 2)).astype(np.float32)
    for sum_rows in (gather.sum_rows_sorted, gather.sum_rows_scatter):
        sum_rows = partial(sum_rows, num_rows=4)
        mapped = jax.jit(jax.vmap(sum_rows))(values, ids)
        for i in range(3):
            np.testing.assert_allclose(mapped[i], jax.jit(sum_rows)(values[i], ids[i]), rtol=1e-6, atol=1e-6)


def test_gather_gives_zeros_for_empty_slots_and_keeps_the_dtype():
    table = jnp.arange(1.0, 7.0, dtype=jnp.bfloat16).reshape(3, 2)
    ids = jnp.array([[2, -1], [3, 0]])
    rows, transpose = jax.vjp(lambda table: gather.gather_rows(table, ids), table)
    np.testing.assert_array_equal(rows, [[[5, 6], [0, 0]], [[0, 0], [1, 2]]])
    (gradient,) = transpose(jnp.full((2, 2, 2), 3, jnp.bfloat16))
    assert rows.dtype == gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, [[3, 3], [0, 0], [3, 3]])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
def test_ids_of_a_narrow_type_count_right(faked_target, platform, dtype):
    # uint8 cannot hold the number of rows, 256, which marks empty slots in the sorted sum.
    faked_target(platform, (9, 0) if platform == "gpu" else None)
    ids = jnp.array([0, 1, 1, 2, 3], dtype)
    table = jnp.zeros((256, 2))
    gradient = jax.grad(lambda table: gather.gather_rows(table, ids).sum())(table)
    np.testing.assert_array_equal(gradient[:5, 0], [1, 2, 1, 1, 0])
