"""Bitwise comparison of pytrees, for tests here and in users' own CI."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from dsv4_fusions import numerics


def assert_trees_bitwise_equal(a: Any, b: Any, names: tuple[str, str] = ("a", "b")) -> None:
    """Fails unless two pytrees are equal in structure, shapes, dtypes and every bit.

    +0 and -0 differ. A NaN equals any NaN in the same place, whatever its payload. Arrays are compared on their
    device; the host gets a count, and for the first mismatch its index and the two elements.

    Args:
      a: pytree of JAX or NumPy arrays or Python scalars, a Flax NNX state for instance.
      b: pytree to compare with.
      names: what to call the two in the message.

    Raises:
      AssertionError: naming every leaf that differs.
      ImportError: chex is not installed. It is no dependency of the library itself.
    """
    try:
        import chex
    except ImportError as error:
        raise ImportError("assert_trees_bitwise_equal needs chex: pip install chex") from error

    first, second = names
    try:
        chex.assert_trees_all_equal_structs(a, b)
    except AssertionError as error:
        reason = _same_leaves(a, b) or str(error)
        raise AssertionError(f"{first} and {second} differ in tree structure: {reason}") from None
    a, b = jax.tree.map(_as_array, (a, b))
    try:
        chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
    except AssertionError as error:
        raise AssertionError(f"{first} and {second} differ in shape or dtype: {error}") from None

    leaves = jax.tree_util.tree_leaves_with_path(a)
    reports = []
    for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
        count = count_mismatches(x, y)
        if count:
            index, x_bits, y_bits = _first_mismatch(x, y)
            digits = 2 * x.dtype.itemsize
            reports.append(
                f"{jax.tree_util.keystr(path) or 'the only leaf'}: {count} of {x.size} elements differ "
                f"({x.dtype.name}{list(x.shape)}), first at {index}: "
                f"{first} 0x{x_bits:0{digits}x}, {second} 0x{y_bits:0{digits}x}"
            )
    if reports:
        head = f"{first} and {second} differ in {len(reports)} of {len(leaves)} leaves:"
        raise AssertionError("\n  ".join([head, *reports]))


def _same_leaves(a, b) -> str | None:
    """What to say of two trees that differ in static fields alone, whose printed structures can fill a page."""
    names = [[jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] for tree in (a, b)]
    if names[0] != names[1] or type(a) is not type(b) or not names[0]:
        return None
    return (
        "the same leaves, but other containers or static fields around them, such as the switches of a Flax module; "
        "compare parameters or gradients of modules as nnx.to_pure_dict(nnx.state(module))"
    )


def count_mismatches(a: Shaped[Array, "..."], b: Shaped[Array, "..."]) -> int:
    """Number of elements that differ in any bit, NaN payloads aside, counted on a's device.

    Args:
      a: JAX or NumPy array of floats, integers or bools.
      b: array of the same shape and dtype.

    Returns:
      The count, the only thing that comes to the host.

    Raises:
      ValueError: shapes or dtypes differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"b: got {b.dtype.name}{list(b.shape)}, wanted {a.dtype.name}{list(a.shape)} like a")
    with jax.enable_x64(True):  # 64-bit NumPy leaves keep their bits, and the count cannot overflow
        return int(_count(*_on_one_device(a, b)))


def _as_array(x):
    return x if isinstance(x, jax.Array) else np.asarray(x)


def _on_one_device(a, b):
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        b = jax.device_put(b, a.sharding)
    return a, b


def _differs(a, b):
    different = numerics.bits(a) != numerics.bits(b)
    if jnp.issubdtype(a.dtype, jnp.floating):
        different &= ~(jnp.isnan(a) & jnp.isnan(b))
    return different


@jax.jit
def _count(a, b):
    return _differs(a, b).sum(dtype=jnp.int64)


@jax.jit
def _locate(a, b):
    different, a, b = _differs(a, b), numerics.bits(a), numerics.bits(b)
    index = []
    for _ in range(a.ndim):  # an axis at a time: no flat position that could overflow
        i = jnp.argmax(different.any(axis=tuple(range(1, different.ndim))))
        different, a, b = different[i], a[i], b[i]
        index.append(i)
    return index, a, b


def _first_mismatch(a, b):
    with jax.enable_x64(True):
        index, a_bits, b_bits = jax.device_get(_locate(*_on_one_device(a, b)))
    return tuple(int(i) for i in index), int(a_bits), int(b_bits)
