"""Attention of every query to the key/value rows that an index table names, with a learned sink."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from dsv4_fusions import dispatch, numerics
from dsv4_fusions.kv_index import Runs, Selection, Span
from dsv4_fusions.ops import kv_index_remap, kv_index_table
from dsv4_fusions.ops.kv_index_remap.reference import local_to_flat
from dsv4_fusions.ops.kv_index_table.reference import local_table
from dsv4_fusions.ops.sparse_attention.padding import pad_heads
from dsv4_fusions.ops.sparse_attention.reference import attend
from dsv4_fusions.ops.sparse_attention.slots import RunSlots, Slots

BACKENDS = ("flat", "batched", "structured", "xla")

MOST_CHANNELS = 576
"""Channels of a row of which the kernel keeps a query and its ring of tiles in shared memory."""
MOST_WITHOUT_VALUE = 256
"""Channels of keys alone: Hopper's matrix instruction makes so many columns of dq at a time."""


def table_backend(backend: str) -> str:
    """The backend that reads a table of ids where `backend` is wanted: `backend`, unless that needs `Runs`."""
    return "batched" if backend == "structured" else backend


def check_backend(backend: str) -> None:
    """Raises unless `backend` is the name of one."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: got {backend!r}, wanted one of {', '.join(map(repr, BACKENDS))}")


def sparse_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    kv: Float[Array, "batch kv_len head_dim"],
    index: Int[Array, "batch tokens topk"] | tuple[Span | Selection, ...] | Runs,
    sink: Float[Array, "heads"],
    *,
    scale: float | None = None,
    value_dim: int | None = None,
    backend: str = "flat",
    topk_length: Int[Array, "batch tokens"] | None = None,
    fuse_kv_index_remap: bool = False,
    implementation: str | None = None,
    return_lse: bool = False,
) -> (
    Float[Array, "batch tokens heads value_dim"]
    | tuple[Float[Array, "batch tokens heads value_dim"], Float32[Array, "batch tokens heads"]]
):
    """Multi-query attention over the listed rows only; a row is a key, and its leading channels are the value.

    A query whose slots are all empty gets zeros. Scores and sums are f32 whatever the dtypes. The reference multiplies
    in f32 too; the kernels round what goes from one product into the next to the operands' dtype: the weights
    exp(score - maximum) and, in the backward, also the gradient of the scores and what each slot adds to the gradient
    of its row. Memory grows with the inputs and a block of queries, not with tokens * topk * head_dim. "flat" and
    "batched" give the same bits on the same device, gradients included, and so does "xla" where the others run the
    reference. Gradients are deterministic: a row's is summed in the order of queries and slots.

    Args:
      q: queries.
      kv: key/value rows of each batch entry.
      index: local row ids; any id outside [0, kv_len) is an empty slot. An id that stands twice counts twice. Or a
        tuple of the table's parts, from the left (`kv_index.Span`, `Selection`), or `kv_index.Runs` of such ids, fields
        [batch, tokens].
      sink: logit per head of a column without a value, finite or -inf (no sink).
      scale: factor of the scores, head_dim ** -0.5 if None.
      value_dim: channels of the values, the leading ones of each row; None for all. Absorbed latent attention has keys
        of 576 channels, 512 of them the value.
      backend: "flat" consumes flat row ids (rows of all batch entries numbered through), "batched" local ones, to which
        its kernel adds where the batch entry's rows begin; "structured" consumes `Runs`, of which its kernel works out
        the ids, where the others make a table of them; "xla" is the reference, on local ids. Slots stand elsewhere in
        the table of runs than in other tables of the same ids, so that sums may round differently.
      topk_length: slots at or beyond this count are not read. Of a table; its parts and `Runs` have counts.
      fuse_kv_index_remap: with "flat", number the rows through by a fused op instead of step by step: a table by
        `local_to_flat_kv_index`, the parts of one by `flat_kv_index_table`, which writes them once. Changes no bit.
      implementation: "mosaic", kernels for forward and backward, runs on compute capability 9.0, with q and kv of one
        16-bit type, rows of a multiple of 64 channels up to 576 and values of a multiple of 128, at most 256 fewer, for
        "flat", "batched" and "structured"; "xla" is the reference; None picks the first of them that can serve.
      return_lse: also return the logarithms of the softmax's denominators, which have gradients as well. Partial
        results over disjoint rows are merged with them.

    Returns:
      Output in q's dtype; with return_lse a tuple of it and the natural logarithm of
      sum_j exp(scale * q . kv_j) + exp(sink), f32, -inf where there is neither a row nor a sink.

    Raises:
      ValueError: shapes that do not fit together, a value_dim outside 1 to head_dim, an unknown backend, "structured"
        without `Runs`, `Runs` or parts with a topk_length, too many rows for flat int32 ids, or an implementation that
        cannot serve the call.
      TypeError: ids, lengths or a value_dim that are not integers, operands that are not floating point.

    Source: DeepSeek-V4's sparse attention, as in Megatron-LM and PaddleFleet.
    """
    _check(q, kv, index, sink, topk_length, value_dim, backend)
    batch, tokens, heads, head_dim = q.shape
    if isinstance(index, tuple) and not (backend == "flat" and fuse_kv_index_remap):
        index = local_table(index, batch)
    kv_len, topk = kv.shape[1], index_width(index)
    if backend in ("flat", "structured") and batch * kv_len >= 2**31:
        raise ValueError(f"kv: got {batch} x {kv_len} rows, wanted fewer than 2**31 for flat int32 ids")
    value_dim = head_dim if value_dim is None else int(value_dim)
    implementation = attention_implementation(
        q.dtype, kv.dtype, head_dim, value_dim, batch * kv_len, backend=backend, implementation=implementation
    )
    if 0 in (*q.shape, kv_len, topk):
        out = jnp.zeros_like(q, shape=(batch, tokens, heads, value_dim))
        return (out, jnp.broadcast_to(jnp.asarray(sink, jnp.float32), out.shape[:3])) if return_lse else out
    scale = head_dim**-0.5 if scale is None else float(scale)

    if isinstance(index, Runs):
        index = index.within(kv_len)
        if backend != "structured" or implementation == "xla":
            index = index.table()
    elif not isinstance(index, tuple):
        # Before the remap, which would turn an id past kv_len into a row of the next batch entry.
        index = _empty_as_minus_one(index, kv_len, topk_length)
    sink = jnp.asarray(sink, jnp.float32)
    leaves, structure = jax.tree.flatten((jnp.asarray(q), jnp.asarray(kv), index, sink))
    q, kv, index, sink = jax.tree.unflatten(structure, dispatch.align_manual_axes(*leaves))
    if isinstance(index, Runs):
        slots = _numbered_through(index, kv_len)
    elif isinstance(index, tuple):
        ids = kv_index_table.flat_kv_index_table(index, batch, kv_len)
        slots = Slots(ids, None, batch * tokens, batch * kv_len)
    elif backend == "flat":
        remap = kv_index_remap.local_to_flat_kv_index if fuse_kv_index_remap else local_to_flat
        slots = Slots(remap(index, kv_len), _per_query(topk_length), batch * tokens, batch * kv_len)
    else:
        slots = Slots(index.reshape(batch * tokens, topk), _per_query(topk_length), tokens, kv_len)
    out, lse = _attend(_How(scale, value_dim, implementation, return_lse), q, kv, slots, sink)
    return (out, lse) if return_lse else out


def index_width(index: Int[Array, "batch tokens topk"] | tuple[Span | Selection, ...] | Runs) -> int:
    """Slots of every query in a table, in the table that parts make, or in that of `Runs`."""
    if isinstance(index, tuple):
        return sum(part.shape[-1] for part in index)
    return index.width if isinstance(index, Runs) else index.shape[2]


def attention_implementation(
    q_dtype, kv_dtype, head_dim: int, value_dim: int, rows: int, *, backend: str, implementation: str | None = None
) -> str:
    """The implementation that serves a call of `sparse_attention`.

    Args:
      q_dtype, kv_dtype: of queries and rows.
      head_dim, value_dim: channels of keys and values.
      rows: of all batch entries.
      backend: name of the backend.
      implementation: a name, or None for the first that can serve.

    Returns:
      "mosaic" or "xla".

    Raises:
      ValueError: an unknown name, or a named implementation that cannot serve.
    """
    unsupported = {"mosaic": _mosaic_unsupported(q_dtype, kv_dtype, head_dim, value_dim, rows, backend), "xla": None}
    return dispatch.choose(implementation, unsupported)


def _mosaic_unsupported(q_dtype, kv_dtype, head_dim, value_dim, rows, backend):
    if backend == "xla":
        return "backend 'xla' is the reference"
    if jnp.dtype(q_dtype) != jnp.dtype(kv_dtype) or jnp.dtype(q_dtype) not in (jnp.bfloat16, jnp.float16):
        return f"q and kv are {jnp.dtype(q_dtype)} and {jnp.dtype(kv_dtype)}, and it needs bfloat16 or float16 for both"
    too_wide = head_dim > MOST_CHANNELS or head_dim - value_dim > MOST_WITHOUT_VALUE
    if head_dim % 64 or value_dim % 128 or too_wide:
        wanted = (
            f"a multiple of 64 up to {MOST_CHANNELS}, values of a multiple of 128, up to {MOST_WITHOUT_VALUE} fewer"
        )
        return f"rows have {head_dim} channels and values {value_dim}, and it needs {wanted}"
    if rows * head_dim >= 2**31:
        return f"{rows} rows have {rows * head_dim} elements, and it numbers them in int32"
    return dispatch.mosaic_unsupported()


class _How(NamedTuple):
    """What is static about a call."""

    scale: float
    value_dim: int
    implementation: str
    with_lse: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how, q, kv, slots, sink):
    return _attend_fwd(how, q, kv, slots, sink)[0]


def _attend_fwd(how, q, kv, slots, sink):
    if how.implementation == "xla":
        return _reference(how, slots, q, kv, sink), (q, kv, slots, sink, None, None)
    from dsv4_fusions.ops.sparse_attention import mosaic

    batch, tokens, heads, head_dim = q.shape
    padded, padded_sink = pad_heads(q.reshape(batch * tokens, heads, head_dim), sink, mosaic.HEADS)
    rows = kv.reshape(-1, head_dim)
    out, lse = mosaic.forward(padded, rows, slots, padded_sink, scale=how.scale, value_dim=how.value_dim)
    out = out[:, :heads].reshape(batch, tokens, heads, how.value_dim)
    natural = (lse[:, :heads] / np.float32(mosaic.LOG2E)).reshape(batch, tokens, heads) if how.with_lse else None
    return (out, natural), (q, kv, slots, sink, out, lse)


def _attend_bwd(how, saved, cotangents):
    q, kv, slots, sink, out, lse = saved
    if how.implementation == "xla":
        _, transpose = jax.vjp(partial(_reference, how, slots), q, kv, sink)
        dq, dkv, d_sink = transpose(cotangents)
        return dq, dkv, None, d_sink
    from dsv4_fusions.ops.sparse_attention import mosaic

    g, g_lse = cotangents
    batch, tokens, heads, head_dim = q.shape
    # A head that is padding has no cotangent: it gives no row a gradient.
    padded = lambda x: pad_heads(x.reshape(batch * tokens, heads, -1), sink, mosaic.HEADS)  # noqa: E731
    (q, padded_sink), (out, _), (g, _) = padded(q), padded(out), padded(g)
    if g_lse is not None:
        g_lse = padded(g_lse)[0][..., 0]
    rows = kv.reshape(-1, head_dim)
    dq, dkv, d_sink = mosaic.backward(q, rows, slots, padded_sink, out, lse, g, g_lse, scale=how.scale)
    dq = dq[:, :heads].reshape(batch, tokens, heads, head_dim)
    return dq, dkv.astype(kv.dtype).reshape(kv.shape), None, d_sink[:heads]


_attend.defvjp(_attend_fwd, _attend_bwd)


def _reference(how, slots, q, kv, sink):
    batch, tokens = q.shape[:2]
    # f32 rows, so that their gradient's sum over blocks is f32 too.
    rows, ids = kv.astype(jnp.float32), slots.ids.reshape(batch, tokens, -1)
    # Blocks that end where batch entries do add in the same order whether the table is flat or not.
    static = how.scale, how.value_dim, how.with_lse
    if slots.rows_per_entry == kv.shape[1]:
        return lax.map(lambda entry: attend(*entry, sink, *static), (q, rows, ids))
    rows = rows.reshape(-1, rows.shape[-1])
    return lax.map(lambda entry: attend(entry[0], rows, entry[1], sink, *static), (q, ids))


def _numbered_through(runs, kv_len) -> RunSlots:
    batch = runs.near_start.shape[0]
    base = (np.arange(batch, dtype=np.int32) * np.int32(kv_len))[:, None]
    far = runs.far_start + base - runs.near_count
    rows = jnp.stack([runs.near_start + base, runs.near_count, far, runs.near_count + runs.far_count], axis=-1)
    return RunSlots(rows.reshape(-1, 4), runs.width, batch * kv_len)


def _per_query(topk_length):
    return None if topk_length is None else jnp.maximum(numerics.saturated_int32(topk_length), 0).reshape(-1)


def _empty_as_minus_one(index, kv_len, topk_length) -> Int32[Array, "batch tokens topk"]:
    # Tested in their own type: int64 ids from NumPy and unsigned ones may wrap on the way to int32.
    index = index.astype(np.int32) if index.dtype.itemsize < 4 else index
    keep = (index >= 0) & (index < kv_len)
    if topk_length is not None:
        keep = keep & (np.arange(index.shape[-1], dtype=np.int32) < topk_length[..., None])
    return jnp.where(keep, index.astype(np.int32), -1)


def _check(q, kv, index, sink, topk_length, value_dim, backend):
    check_backend(backend)
    if isinstance(index, Runs | tuple) and topk_length is not None:
        kind = "Runs, which have" if isinstance(index, Runs) else "parts of a table, which have"
        raise ValueError(f"topk_length: got one beside {kind} counts; wanted None")
    if isinstance(index, Runs):
        if index.width < 0:
            raise ValueError(f"index.width: got {index.width}, wanted at least 0")
        fields = ("near_start", "near_count", "far_start", "far_count")
        tables = {f"index.{field}": getattr(index, field) for field in fields}
        of_query = ()
    else:
        if backend == "structured":
            raise ValueError("index: got a table, wanted kv_index.Runs for the backend 'structured'")
        if isinstance(index, tuple):
            shape = kv_index_table.table_shape(index, q.shape[0] if q.ndim else 1, "index")
            index = jax.ShapeDtypeStruct(shape, jnp.int32)
        tables = {"index": index}
        of_query = index.shape[2:]
    ranks = {"q": (q, 4), "kv": (kv, 3), "sink": (sink, 1)}
    ranks |= {name: (x, 2 if isinstance(index, Runs) else 3) for name, x in tables.items()}
    for name, (x, rank) in ranks.items():
        if x.ndim != rank:
            raise ValueError(f"{name}: got shape {x.shape}, wanted {rank} axes")
    batch, tokens, heads, head_dim = q.shape
    wanted = {"kv": (kv, (batch, kv.shape[1], head_dim)), "sink": (sink, (heads,))}
    wanted |= {name: (x, (batch, tokens, *of_query)) for name, x in tables.items()}
    if topk_length is not None:
        wanted["topk_length"] = (topk_length, (batch, tokens))
    for name, (x, shape) in wanted.items():
        if x.shape != shape:
            raise ValueError(f"{name}: got shape {x.shape}, wanted {shape} to go with q of shape {q.shape}")
    for name, x in {"q": q, "kv": kv, "sink": sink}.items():
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted floating point")
    for name, x in {**tables, "topk_length": topk_length}.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted an integer type")
    if value_dim is not None:
        if isinstance(value_dim, bool) or not isinstance(value_dim, int | np.integer):
            raise TypeError(f"value_dim: got {type(value_dim).__name__}, wanted a Python int or None")
        if not 1 <= value_dim <= head_dim:
            raise ValueError(f"value_dim: got {value_dim}, wanted 1 to {head_dim}, the channels of a row")
