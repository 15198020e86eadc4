"""Sparse attention in plain jnp: the specification, and what runs where no kernel does.

For each query t and head h, over the slots j whose id is not empty (a row is a key, its leading channels the value):

    s_j = scale * q . kv[id_j]
    Z   = sum_j exp(s_j) + exp(sink_h)
    out = sum_j exp(s_j) / Z * kv[id_j][:value_dim]

The sink is a column without a value: it enters the denominator alone. An id that stands twice counts twice. Gradients
are those of autodiff, with the rows' gradient summed as in `gather.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from dsv4_fusions.gather import gather_rows

BLOCK_BYTES = 2**26
"""Bytes that the gathered rows and the scores of one block of queries may take."""


def attend(
    q: Float[Array, "tokens heads head_dim"],
    kv: Float32[Array, "rows head_dim"],
    ids: Int32[Array, "tokens topk"],
    sink: Float32[Array, "heads"],
    scale: float,
    value_dim: int,
    with_lse: bool = False,
) -> tuple[Float[Array, "tokens heads value_dim"], Float32[Array, "tokens heads"] | None]:
    """Attention of one sequence of queries to the rows that its table names, a block of queries at a time.

    Args:
      q: queries.
      kv: rows.
      ids: row of each slot, -1 for an empty one.
      sink: logit of the sink, finite or -inf (none).
      scale: factor of the scores.
      value_dim: channels of the values.
      with_lse: whether log Z is wanted.

    Returns:
      Output in q's dtype, rounded once from f32; log Z, or None if it is not wanted.
    """
    tokens, heads, head_dim = q.shape
    topk = ids.shape[1]
    most = max(1, BLOCK_BYTES // (4 * topk * (head_dim + heads)))
    num_blocks = -(-tokens // most)
    block = -(-tokens // num_blocks)
    padding = num_blocks * block - tokens
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(num_blocks, block, heads, head_dim)
    ids = jnp.pad(ids, ((0, padding), (0, 0)), constant_values=-1).reshape(num_blocks, block, topk)
    # The backward gathers again: saved rows would take tokens * topk * head_dim elements.
    attend_again = jax.checkpoint(
        partial(_attend_block, scale=scale, value_dim=value_dim, with_lse=with_lse), prevent_cse=False
    )
    results = lax.map(lambda block: attend_again(block[0], kv, block[1], sink), (q, ids))
    return jax.tree.map(lambda x: x.reshape(num_blocks * block, *x.shape[2:])[:tokens], results)


def _attend_block(q, kv, ids, sink, *, scale, value_dim, with_lse):
    rows = gather_rows(kv, ids)
    scores = scale * jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), rows, precision=lax.Precision.HIGHEST)
    scores = jnp.where((ids >= 0)[:, None, :], scores, -jnp.inf)
    # Any shift gives the same quotient, so this one is a constant to autodiff.
    peak = lax.stop_gradient(jnp.maximum(scores.max(-1), sink))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    weights = jnp.exp(scores - peak[..., None])
    total = weights.sum(-1) + jnp.exp(sink - peak)
    is_empty = total == 0.0
    total = jnp.where(is_empty, 1.0, total)
    values = rows[..., :value_dim]
    out = jnp.einsum("thk,tkd->thd", weights / total[..., None], values, precision=lax.Precision.HIGHEST)
    lse = jnp.where(is_empty, -jnp.inf, peak + jnp.log(total)) if with_lse else None
    return out.astype(q.dtype), lse
