"""From KV ids local to a batch entry to ids in the flat KV of the whole batch, which sparse-attention kernels read."""

import importlib

import numpy as np
from jaxtyping import Array, Int, Int32

from dsv4_fusions import dispatch, numerics
from dsv4_fusions.ops.kv_index_remap import reference

_NO_MOSAIC = dispatch.NotBuilt("the remap has no Mosaic kernel")


def _ids(local_index) -> Int[Array, "batch tokens topk"]:
    given = getattr(local_index, "dtype", None) or np.asarray(local_index).dtype
    if given not in (np.int32, np.int64):
        raise TypeError(f"local_index: got dtype {given}, wanted int32 or int64")
    ids = numerics.integers("local_index", local_index)
    if ids.ndim != 3:
        raise ValueError(f"local_index: got shape {ids.shape}, wanted [batch, tokens, topk]")
    return ids


def remap_implementation(implementation: str | None = None, elements: int = 0) -> str:
    """The implementation that remaps tables of `elements` ids per batch entry; raises as `dispatch.choose` does."""
    unsupported = {
        "mosaic": _NO_MOSAIC,
        "triton": _triton_unsupported(elements),
        "jax_triton": dispatch.jax_triton_unsupported(),
        "xla": None,
    }
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
    keeps its value. Arithmetic is modulo 2^32. With one batch entry of int32 ids this is a reshape. Inside `shard_map`
    the batch entries are those of the shard: the flat ids count the rows of KV that its device holds.

    Args:
      local_index: [batch, tokens, topk] int32 or int64. Where JAX has no int64, NumPy's is taken as int32 and checked
        to fit; but what is an argument of the caller's own `jit`, JAX has wrapped to int32 before this op sees it.
      kv_len: rows of KV per batch entry, a Python int > 0 of any size.
      implementation: "triton", "jax_triton", "xla", or None for the first of them that runs on the target.

    Returns:
      [batch * tokens, topk] int32. Integers: no gradient flows through.

    Raises:
      TypeError: local_index is not int32 or int64, or kv_len is not a Python int.
      ValueError: another rank, kv_len <= 0, a NumPy value outside int32 where JAX has no int64, or an implementation
        that is unknown or cannot run here.
      NotImplementedError: "mosaic".

    The sign test and the wrap are those of PaddleFleet PR #1772.
    """
    if isinstance(kv_len, bool) or not isinstance(kv_len, int | np.integer):
        raise TypeError(f"kv_len: got {type(kv_len).__name__}, wanted a Python int")
    if kv_len <= 0:
        raise ValueError(f"kv_len: got {kv_len}, wanted > 0")
    ids = _ids(local_index)
    batch, tokens, topk = ids.shape
    chosen = remap_implementation(implementation, tokens * topk)
    nothing_to_compute = ids.size == 0 or (batch == 1 and ids.dtype == np.int32)
    if chosen == "xla" or nothing_to_compute:
        return reference.local_to_flat(ids, int(kv_len))
    kernels = importlib.import_module(f"{__name__}.{chosen}")  # Pallas and jax-triton load only where they are used
    return kernels.local_to_flat(ids, int(kv_len))
