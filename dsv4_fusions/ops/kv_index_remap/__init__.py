"""From KV ids local to a batch entry to ids in the flat KV of the whole batch, which sparse-attention kernels read."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from dsv4_fusions import dispatch
from dsv4_fusions.ops.kv_index_remap import reference

_LATER = dispatch.NotBuilt("not built yet")


def _ids(local_index) -> Int[Array, "batch tokens topk"]:
    """The argument as a JAX array of int32 or int64; raises where a NumPy value would not survive that."""
    given = local_index if isinstance(local_index, jax.Array) else np.asarray(local_index)
    if given.dtype not in (np.int32, np.int64):
        raise TypeError(f"local_index: got dtype {given.dtype}, wanted int32 or int64")
    if given.ndim != 3:
        raise ValueError(f"local_index: got shape {given.shape}, wanted [batch, tokens, topk]")
    ids = jnp.asarray(given)
    if ids.dtype != given.dtype and given.size:  # int64 from NumPy, and jax_enable_x64 is off
        low, high = given.min(), given.max()
        if low < -(2**31) or high >= 2**31:
            raise ValueError(
                f"local_index: got int64 values from {low} to {high}, wanted values within int32 (or jax_enable_x64 on)"
            )
    return ids


def remap_implementation(implementation: str | None = None, elements: int = 0) -> str:
    """The implementation that remaps tables of `elements` ids per batch entry; raises as `dispatch.choose` does."""
    unsupported = {"triton": _triton_unsupported(elements), "xla": None, "mosaic": _LATER, "jax_triton": _LATER}
    return dispatch.choose(implementation, unsupported)


def _triton_unsupported(elements: int) -> str | None:
    if elements > 2**32:  # the backend multiplies block numbers by the block in 32 bits, and only then widens to 64
        return f"it serves up to 2^32 ids per batch entry and the table has {elements}"
    return dispatch.triton_unsupported()


def local_to_flat_kv_index(
    local_index: Int[Array, "batch tokens topk"], kv_len: int, implementation: str | None = None
) -> Int32[Array, "batch*tokens topk"]:
    """Turns KV ids local to each batch entry into ids of the flat KV of the batch.

    flat[i * tokens + t, k] = local[i, t, k] + i * kv_len for local ids >= 0. Every negative id is an empty slot and
    keeps its value. Arithmetic is modulo 2^32. With one batch entry of int32 ids this is a reshape.

    Args:
      local_index: [batch, tokens, topk] int32 or int64; int64 from NumPy is taken as int32 where JAX has no int64.
      kv_len: rows of KV per batch entry, a Python int > 0 of any size.
      implementation: "triton", "xla", or None for the first of them that runs on the target.

    Returns:
      [batch * tokens, topk] int32. Integers: no gradient flows through.

    Raises:
      TypeError: local_index is not int32 or int64, or kv_len is not a Python int.
      ValueError: another rank, kv_len <= 0, a NumPy value outside int32 where JAX has no int64, or an implementation
        that is unknown or cannot run here.
      NotImplementedError: an implementation that is not built yet.

    The sign test and the wrap are those of PaddleFleet PR #1772.
    """
    if isinstance(kv_len, bool) or not isinstance(kv_len, int | np.integer):
        raise TypeError(f"kv_len: got {type(kv_len).__name__}, wanted a Python int")
    if kv_len <= 0:
        raise ValueError(f"kv_len: got {kv_len}, wanted > 0")
    ids = _ids(local_index)
    batch, tokens, topk = ids.shape
    chosen = remap_implementation(implementation, tokens * topk)
    if ids.size == 0 or (batch == 1 and ids.dtype == np.int32):
        return ids.astype(jnp.int32).reshape(batch * tokens, topk)
    if chosen == "triton":
        from dsv4_fusions.ops.kv_index_remap import triton  # Pallas loads only where it is used

        return triton.local_to_flat(ids, int(kv_len))
    return reference.local_to_flat(ids, int(kv_len))
