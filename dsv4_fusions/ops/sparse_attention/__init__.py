"""Attention of every query to the key/value rows that an index table names, with a learned sink."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from dsv4_fusions import dispatch
from dsv4_fusions.ops import kv_index_remap
from dsv4_fusions.ops.kv_index_remap.reference import local_to_flat
from dsv4_fusions.ops.sparse_attention.reference import attend

BACKENDS = ("flat", "batched", "xla")


def check_backend(backend: str) -> None:
    """Raises unless `backend` names one that is built."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, wanted one of {', '.join(map(repr, BACKENDS))}")
    if backend == "batched":
        raise NotImplementedError("backend 'batched' has no kernel yet; use 'flat' or 'xla'")


def sparse_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    kv: Float[Array, "batch kv_len head_dim"],
    index: Int[Array, "batch tokens topk"],
    sink: Float[Array, "heads"],
    *,
    scale: float | None = None,
    value_dim: int | None = None,
    backend: str = "flat",
    topk_length: Int[Array, "batch tokens"] | None = None,
    fuse_kv_index_remap: bool = False,
    implementation: str | None = None,
) -> Float[Array, "batch tokens heads value_dim"]:
    """Multi-query attention over the listed rows only; a row is a key, and its leading channels are the value.

    A query whose slots are all empty gets zeros. Arithmetic is f32 whatever the dtypes; memory grows with the inputs
    and a block of queries, not with tokens * topk * head_dim. All backends give the same bits on the same device as
    long as they share the reference implementation.

    Args:
      q: queries.
      kv: key/value rows of each batch entry.
      index: local row ids; any id outside [0, kv_len) is an empty slot. An id that stands twice counts twice.
      sink: logit per head of a column without a value, finite or -inf (no sink).
      scale: factor of the scores, head_dim ** -0.5 if None.
      value_dim: channels of the values, the leading ones of each row; None for all. Absorbed latent attention has keys
        of 576 channels, 512 of them the value.
      backend: "flat" consumes flat row ids (rows of all batch entries numbered through), "xla" local ones.
      topk_length: slots at or beyond this count are not read.
      fuse_kv_index_remap: with "flat", number the rows through by the fused op instead of step by step. Changes no bit.
      implementation: that of the fused remap.

    Returns:
      Output in q's dtype.

    Raises:
      ValueError: shapes that do not fit together, a value_dim outside 1 to head_dim, an unknown backend, or too many
        rows for flat int32 ids.
      TypeError: ids, lengths or a value_dim that are not integers, operands that are not floating point.
      NotImplementedError: backend "batched", which has no code yet.

    Source: DeepSeek-V4's sparse attention, as in Megatron-LM and PaddleFleet.
    """
    _check(q, kv, index, sink, topk_length, value_dim, backend)
    batch, tokens, heads, head_dim = q.shape
    kv_len, topk = kv.shape[1], index.shape[2]
    if backend == "flat" and batch * kv_len >= 2**31:
        raise ValueError(f"kv: got {batch} x {kv_len} rows, wanted fewer than 2**31 for flat int32 ids")
    value_dim = head_dim if value_dim is None else int(value_dim)
    if 0 in (*q.shape, kv_len, topk):
        return jnp.zeros_like(q, shape=(batch, tokens, heads, value_dim))
    scale = head_dim**-0.5 if scale is None else scale

    # Before the remap, which would turn an id past kv_len into a row of the next batch entry.
    ids = _empty_as_minus_one(index, kv_len, topk_length)
    # f32 rows, so that their gradient's sum over blocks is f32 too.
    rows, sink = jnp.asarray(kv, jnp.float32), jnp.asarray(sink, jnp.float32)
    q, rows, ids, sink = dispatch.align_manual_axes(jnp.asarray(q), rows, ids, sink)
    if backend == "xla":
        return lax.map(lambda entry: attend(*entry, sink, scale, value_dim), (q, rows, ids))
    if fuse_kv_index_remap:
        flat = kv_index_remap.local_to_flat_kv_index(ids, kv_len, implementation=implementation)
    else:
        flat = local_to_flat(ids, kv_len)
    rows = rows.reshape(batch * kv_len, head_dim)
    # Blocks that end where batch entries do add in the same order as "xla".
    return lax.map(lambda entry: attend(entry[0], rows, entry[1], sink, scale, value_dim), (q, flat.reshape(ids.shape)))


def _empty_as_minus_one(index, kv_len, topk_length) -> Int32[Array, "batch tokens topk"]:
    # Tested in their own type: int64 ids from NumPy and unsigned ones may wrap on the way to int32.
    index = index.astype(np.int32) if index.dtype.itemsize < 4 else index
    keep = (index >= 0) & (index < kv_len)
    if topk_length is not None:
        keep = keep & (np.arange(index.shape[-1], dtype=np.int32) < topk_length[..., None])
    return jnp.where(keep, index.astype(np.int32), -1)


def _check(q, kv, index, sink, topk_length, value_dim, backend):
    check_backend(backend)
    ranks = {"q": (q, 4), "kv": (kv, 3), "index": (index, 3), "sink": (sink, 1)}
    for name, (x, rank) in ranks.items():
        if x.ndim != rank:
            raise ValueError(f"{name}: got shape {x.shape}, wanted {rank} axes")
    batch, tokens, heads, head_dim = q.shape
    wanted = {"kv": (kv, (batch, kv.shape[1], head_dim)), "index": (index, (batch, tokens, index.shape[2]))}
    wanted["sink"] = (sink, (heads,))
    if topk_length is not None:
        wanted["topk_length"] = (topk_length, (batch, tokens))
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"{name}: got shape {x.shape}, wanted {shape} to go with q of shape {q.shape}")
    for name, x in {"q": q, "kv": kv, "sink": sink}.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted floating point")
    for name, x in {"index": index, "topk_length": topk_length}.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted an integer type")
    if value_dim is not None:
        if isinstance(value_dim, bool) or not isinstance(value_dim, int | np.integer):
            raise TypeError(f"value_dim: got {type(value_dim).__name__}, wanted a Python int or None")
        if not 1 <= value_dim <= head_dim:
            raise ValueError(f"value_dim: got {value_dim}, wanted 1 to {head_dim}, the channels of a row")
