"""The remap kernel on a GPU, against NumPy. Arrays are compared on the device; the host holds one slab of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remap_oracle import flat_ids, flat_rows, random_ids

from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index

SENTINEL = 0x7BADBAD
SLAB = 4096


def remap(kv_len, implementation="triton"):
    return jax.jit(functools.partial(local_to_flat_kv_index, kv_len=kv_len, implementation=implementation))


def slabs(batch, tokens):
    """(batch entry, first flat row, number of rows) of pieces that keep the host's memory small."""
    return [(i, i * tokens + t, min(SLAB, tokens - t)) for i in range(batch) for t in range(0, tokens, SLAB)]


def on_device(batch, tokens, topk, kv_len, dtype):
    rows = [jnp.asarray(random_ids((n, topk), kv_len, dtype=dtype, seed=first)) for _, first, n in slabs(batch, tokens)]
    return jnp.concatenate(rows).reshape(batch, tokens, topk)


@jax.jit
def mismatches(flat, want, first):
    return jnp.sum(jax.lax.dynamic_slice_in_dim(flat, first, want.shape[0]) != want)


def assert_equals_oracle(flat, batch, tokens, topk, kv_len, dtype):
    assert flat.dtype == jnp.int32 and flat.shape == (batch * tokens, topk)
    for i, first, n in slabs(batch, tokens):
        ids = random_ids((n, topk), kv_len, dtype=dtype, seed=first)
        assert mismatches(flat, flat_rows(ids, i, kv_len), first) == 0


def test_one_row():
    ids = np.array([[[3]], [[5]], [[-1]]], np.int32)
    np.testing.assert_array_equal(remap(8)(ids), [[3], [13], [-1]])
    np.testing.assert_array_equal(remap(8, None)(ids), [[3], [13], [-1]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("shape", [(1, 16384, 640), (4, 16384, 640), (1, 16384, 2176)], ids=str)
def test_production_tables(shape, dtype):
    with jax.enable_x64(dtype is np.int64):
        flat = remap(66048)(on_device(*shape, 66048, dtype))
        assert_equals_oracle(flat, *shape, 66048, dtype)


@pytest.mark.parametrize("shape", [(3, 1, 1), (5, 7, 5), (4, 97, 11), (3, 1023, 641), (33, 2, 1025)], ids=str)
def test_poison(shape):
    """The output lands where sentinels were, and every block's tail lies beside the next batch entry's first ids."""
    ids = on_device(*shape, 5000, np.int32)
    op = remap(5000)
    for _ in range(20):
        for poison in [jnp.full((shape[0] * shape[1], shape[2]), SENTINEL, jnp.int32) + i for i in range(4)]:
            poison.block_until_ready().delete()
        flat = op(ids)
        assert jnp.sum(flat == SENTINEL) == 0
        assert_equals_oracle(flat, *shape, 5000, np.int32)
    np.testing.assert_array_equal(ids, on_device(*shape, 5000, np.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("kv_len", [2**20, 2**28, 2**30, 2**31 - 1, 2**31, 3 * 10**8, 2**32 - 1, 2**32 + 5, 10**30 + 7])
def test_overflow_matrix(kv_len, dtype):
    ids = np.array([[[0, 5, -1, 17]], [[1, -1, 9, 0]], [[3, 4, 0, -7]]], dtype)
    with jax.enable_x64(dtype is np.int64):
        got = remap(kv_len)(ids)
    np.testing.assert_array_equal(got, flat_ids(ids, kv_len))


def test_int64_ids_outside_int32():
    ids = np.array([[[2**31, 2**32 + 3]], [[-(2**32), 2**31]], [[2**40 + 1, -(2**31) - 1]]])
    with jax.enable_x64(True):
        got = remap(1000)(ids)
    np.testing.assert_array_equal(got, [[-(2**31), 3], [0, 1000 - 2**31], [2001, 2**31 - 1]])


def test_repeatable():
    ids = on_device(4, 16384, 640, 66048, np.int32)
    op = remap(66048)
    first = op(ids)
    different = jax.jit(lambda a, b: jnp.sum(a != b))
    assert all(different(first, op(ids)) == 0 for _ in range(50))


def test_vmap_over_more_tables_than_a_side_axis_holds():
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 64, (70_000, 3, 2, 5), np.int32))
    got = jax.jit(jax.vmap(functools.partial(local_to_flat_kv_index, kv_len=64, implementation="triton")))(ids)
    offset = np.arange(3, dtype=np.int32)[:, None, None] * 64
    want = np.where(np.asarray(ids) >= 0, np.asarray(ids) + offset, -1).reshape(70_000, 6, 5)
    np.testing.assert_array_equal(got, want)


def test_more_than_2_31_elements():
    """8.6 GB in and out: 32-bit element offsets do not reach the last batch entry. Ids are made on the device."""
    batch, tokens, topk, kv_len = 3, 46337, 15467, 2**31 - 1
    assert batch * tokens * topk > 2**31

    @jax.jit
    def entry(i):
        return jax.random.randint(jax.random.key(i), (tokens, topk), -(2**20), 2**31 - 1, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(table, ids, i):
        return table.at[i].set(ids)

    table = jnp.zeros((batch, tokens, topk), jnp.int32)
    for i in range(batch):
        table = put(table, entry(i), i)
    flat = remap(kv_len)(table)
    for i in range(batch):
        offset = np.uint32(i * kv_len % 2**32).view(np.int32)
        ids = entry(i)
        assert mismatches(flat, jnp.where(ids >= 0, ids + offset, ids), i * tokens) == 0
