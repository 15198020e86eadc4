"""The comparison that users put into their own CI: what it takes as equal, what not, and what it says."""

import os
import pathlib
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_fusions import DSv4Config, DSv4HybridSelfAttention
from dsv4_fusions.testing import assert_trees_bitwise_equal, count_mismatches

FLOATS = ["bfloat16", "float16", "float32", "float64"]
WORD = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def message(a, b, **kwargs):
    with pytest.raises(AssertionError) as error:
        assert_trees_bitwise_equal(a, b, **kwargs)
    return str(error.value)


def with_bits(values, dtype):
    """A NumPy array of `dtype` from the integers that are its elements' bits."""
    dtype = jnp.dtype(dtype)
    return np.array(values, WORD[dtype.itemsize]).view(dtype)


def nan_patterns(dtype):
    """Quiet and signalling NaNs of both signs."""
    dtype = jnp.dtype(dtype)
    width = 8 * dtype.itemsize
    infinity = int(np.array(np.inf, dtype).view(WORD[dtype.itemsize]))
    sign, quiet = 1 << (width - 1), 1 << (jnp.finfo(dtype).nmant - 1)
    return with_bits([infinity | quiet, infinity | 1, sign | infinity | quiet, sign - 1, 2 * sign - 1], dtype)


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_signed_zeros_differ(dtype, place):
    if dtype == "float64" and place is jnp.asarray:
        pytest.skip("a JAX array of 64 bits needs x64, which has its own test")
    plus, minus = np.zeros(3, jnp.dtype(dtype)), np.zeros(3, jnp.dtype(dtype))
    minus[1] = -minus[1]
    plus, minus = place(plus), place(minus)
    chex.assert_trees_all_equal(plus, minus)  # why a comparison of our own
    assert count_mismatches(plus, minus) == 1
    assert "1 of 3 elements differ" in message(plus, minus)
    assert_trees_bitwise_equal(minus, minus.copy())


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_equals_any_nan_but_nothing_else(dtype):
    nans = nan_patterns(dtype)
    assert np.isnan(nans).all()
    assert_trees_bitwise_equal(nans, np.roll(nans, 1))
    for other in (np.inf, 0.0, 1.0):
        moved = nans.copy()
        moved[2] = other
        assert count_mismatches(nans, moved) == count_mismatches(moved, nans) == 1
    left = np.array([np.nan, 1.0], jnp.dtype(dtype))
    assert count_mismatches(left, left[::-1]) == 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bit_is_seen_wherever_it_sits(dtype):
    dtype = jnp.dtype(dtype)
    for bit in range(8 * dtype.itemsize):
        one = int(np.array(1.0, dtype).view(WORD[dtype.itemsize]))
        a, b = with_bits([0, one], dtype), with_bits([0, one ^ (1 << bit)], dtype)
        assert count_mismatches(a, b) == 1, bit


def test_subnormals_are_not_flushed():
    assert count_mismatches(with_bits([1, 2], "float32"), with_bits([0, 2], "float32")) == 1
    assert count_mismatches(jnp.asarray(with_bits([1], "bfloat16")), jnp.zeros(1, jnp.bfloat16)) == 1


def test_message_names_leaf_count_index_and_bits():
    a = {"layers": [{"kernel": jnp.zeros((3, 4), jnp.bfloat16)}, {"kernel": jnp.ones((3, 4), jnp.bfloat16)}]}
    b = jax.tree.map(lambda x: x, a)
    b["layers"][1]["kernel"] = a["layers"][1]["kernel"].at[1, 2].set(-1.0).at[2, 0].set(2.0)
    text = message(a, b, names=("fused", "unfused"))
    assert "fused and unfused differ in 1 of 2 leaves" in text
    assert "['layers'][1]['kernel']: 2 of 12 elements differ (bfloat16[3, 4])" in text
    assert "first at (1, 2): fused 0x3f80, unfused 0xbf80" in text
    assert "['layers'][0]" not in text


def test_every_differing_leaf_is_listed():
    a = {"x": np.arange(4), "y": np.zeros(2, np.float32), "z": np.array([True, False])}
    text = message(a, {"x": np.arange(4) + 1, "y": a["y"], "z": ~a["z"]})
    assert "2 of 3 leaves" in text and "['x']: 4 of 4" in text and "['z']: 2 of 2" in text and "['y']" not in text
    assert "a 0x0000000000000000, b 0x0000000000000001" in text
    assert "first at (0,): a 0x01, b 0x00" in text


def test_integers_bools_scalars_and_empty_leaves():
    tree = {"i": jnp.array([-1, 2], jnp.int8), "b": jnp.array([True]), "s": 1.0, "n": 3, "e": jnp.zeros((0, 3))}
    tree["nothing"] = None
    assert_trees_bitwise_equal(tree, dict(tree))
    assert "['i']: 1 of 2" in message(tree, tree | {"i": jnp.array([1, 2], jnp.int8)})
    assert "['n']: 1 of 1" in message(tree, tree | {"n": 4}) and "at ()" in message(tree, tree | {"n": 4})
    # A Python float is 64 bits wide, and is compared as such although JAX computes in 32.
    assert "['s']: 1 of 1" in message(tree, tree | {"s": 1.0 + 2**-50})
    assert_trees_bitwise_equal(1.5, 1.5)
    assert "the only leaf" in message(0.0, -0.0)


def test_x64_arrays():
    with jax.enable_x64(True):
        a = jnp.array([1.0, 2.0, np.nan])
        b = a.at[1].add(2**-51)
    assert a.dtype == jnp.float64
    assert_trees_bitwise_equal(a, a.copy())
    text = message(a, b)
    assert "1 of 3 elements differ (float64[3]), first at (1,): a 0x4000000000000000, b 0x4000000000000001" in text


def test_jax_against_numpy():
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    assert_trees_bitwise_equal(jnp.asarray(x), x)
    y = x.copy()
    y[6] = 2
    assert "first at (6,)" in message(jnp.asarray(x), y) and "first at (6,)" in message(y, jnp.asarray(x))


def test_arrays_on_different_devices():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    a, b = (jax.device_put(jnp.arange(4.0), device) for device in devices[:2])
    assert_trees_bitwise_equal(a, b)
    assert count_mismatches(a, -b) == 4
    mesh = jax.make_mesh((2,), ("x",), devices=devices[:2])
    sharded = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("x")))
    assert_trees_bitwise_equal(sharded, a)
    assert "first at (3,)" in message(sharded, a.at[3].set(0))


def test_nnx_state():
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    assert_trees_bitwise_equal(state, jax.tree.map(jnp.copy, state))
    text = message(state, jax.tree.map(lambda x: x.at[0].add(1.0), state))
    assert "kernel" in text and "bias" in text and "2 of 6 elements" in text


def test_differences_other_than_values():
    a = {"x": jnp.zeros((2, 3)), "y": jnp.zeros(2)}
    names = dict(names=("run 1", "run 2"))
    assert "run 1 and run 2 differ in tree structure" in message(a, {"x": a["x"]}, **names)
    assert "tree structure" in message(a, [a["x"], a["y"]])
    assert "tree structure" in message(a, a | {"y": None})

    for other in (jnp.zeros((3, 2)), jnp.zeros(6), jnp.zeros((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.bfloat16)):
        text = message(a, a | {"x": other}, **names)
        assert "run 1 and run 2 differ in shape or dtype" in text and "x" in text
    assert "shape or dtype" in message(1, 1.0)
    for other in (jnp.zeros((3, 2)), jnp.zeros((2, 3), jnp.int32)):
        with pytest.raises(ValueError, match=r"b: got .* wanted float32\[2, 3\] like a"):
            count_mismatches(a["x"], other)


def test_arrays_stay_on_their_device(monkeypatch):
    x = jnp.zeros((1024, 1024)).at[1000, 1001].set(1.0)
    fetched = []
    device_get = jax.device_get

    def spy(tree):
        fetched.extend(jax.tree.leaves(tree))
        return device_get(tree)

    monkeypatch.setattr(jax, "device_get", spy)
    assert "first at (1000, 1001)" in message(x, jnp.zeros((1024, 1024)))
    assert fetched and all(leaf.size == 1 for leaf in fetched)


def test_chex_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "chex", None)
    with pytest.raises(ImportError, match="needs chex: pip install chex"):
        assert_trees_bitwise_equal(1, 1)
    assert count_mismatches(np.ones(2), np.zeros(2)) == 2  # which does without


def test_chex_loads_with_the_first_comparison():
    code = "import sys, dsv4_fusions.testing as t; assert 'chex' not in sys.modules; t.assert_trees_bitwise_equal(1, 1)"
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    code += "; assert 'chex' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_modules_that_differ_in_a_switch():
    """Their printed structures take pages, and say nothing that a reader finds."""
    cfg = DSv4Config(num_hidden_layers=1, compress_ratios=(0,), num_attention_heads=8)
    layers = [
        nnx.eval_shape(lambda on=on: DSv4HybridSelfAttention(cfg, rngs=nnx.Rngs(0), fuse_inv_rope=on))
        for on in (False, True)
    ]
    layers = [jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), layer) for layer in layers]
    assert "nnx.to_pure_dict(nnx.state(module))" in message(*layers) and len(message(*layers)) < 400
    states = [nnx.to_pure_dict(nnx.state(layer)) for layer in layers]
    assert_trees_bitwise_equal(*states)
