"""The kernel that writes the flat table, on a GPU: against NumPy at small shapes, against XLA at production's."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.test_kv_index_table import loop_table, random_parts

from dsv4_fusions import kv_index
from dsv4_fusions.ops.kv_index_table import flat_kv_index_table
from dsv4_fusions.testing import assert_trees_bitwise_equal

SENTINEL = 0x7BADBAD


def written(parts, batch, kv_len, implementation="triton", **how):
    run = partial(flat_kv_index_table, batch=batch, kv_len=kv_len, implementation=implementation, **how)
    return jax.jit(run)(parts)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    "batch, tokens, widths, multiple",
    [(1, 1, (1,), 1), (3, 5, (4, 6), 1), (2, 9, (7, 130, 3, 129), 64), (2, 8, (128, 128), 128), (2, 3, (300,), 512)],
    ids=str,
)
def test_against_the_loop(batch, tokens, widths, multiple, compact):
    parts, how = random_parts(batch, tokens, widths, 40), dict(multiple=multiple, compact=compact)
    wanted = loop_table(parts, batch, tokens, 40, **how)
    for poison in range(4):
        jnp.full((batch * tokens, sum(widths)), SENTINEL + poison, jnp.int32).block_until_ready().delete()
        assert_trees_bitwise_equal(written(parts, batch, 40, **how), wanted)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint32])
def test_selected_slots_of_any_integer_type(dtype):
    with jax.enable_x64(dtype == np.int64):
        parts = random_parts(2, 5, (3, 6), 50, dtype)
        assert_trees_bitwise_equal(written(parts, 2, 50, compact=True), loop_table(parts, 2, 5, 50, 1, True))


def production_parts(kind, batch, tokens):
    """(parts, rows of KV): a window and compressed ids as in V4-Flash's HCA layers, or selected ones as in its CSA."""
    window = kv_index.window_span(tokens, 128)
    if kind == "hca":
        return (window, kv_index.compressed_span(tokens, 128, tokens)), tokens + tokens // 128
    seen = (jnp.arange(tokens, dtype=jnp.int32) + 1) // 4
    selected = jax.random.randint(jax.random.key(0), (batch, tokens, 512), -1, tokens // 4, jnp.int32)
    return (window, kv_index.selection(selected, jnp.zeros_like(seen), seen, tokens)), tokens + tokens // 4


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind, batch, tokens", [("hca", 2, 65536), ("csa", 4, 16384), ("csa", 2, 517)])
def test_production_tables(kind, batch, tokens, compact):
    parts, kv_len = production_parts(kind, batch, tokens)
    how = dict(multiple=128, compact=compact)
    wanted = written(parts, batch, kv_len, "xla", **how)
    for _ in range(20):
        assert_trees_bitwise_equal(written(parts, batch, kv_len, **how), wanted)


def test_a_mapped_axis():
    stacked = [random_parts(2, 5, (3, 6), 50, seed=seed) for seed in range(3)]
    parts = jax.tree.map(lambda *x: jnp.stack(x), *stacked)
    run = lambda parts: flat_kv_index_table(parts, 2, 50, implementation="triton")  # noqa: E731
    wanted = np.stack([loop_table(parts, 2, 5, 50, 1, False) for parts in stacked])
    assert_trees_bitwise_equal(jax.jit(jax.vmap(run))(parts), wanted)
