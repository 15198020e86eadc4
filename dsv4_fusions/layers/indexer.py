"""The lightning indexer: which rows a token attends to, and the loss that teaches it."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.kv_index import in_range
from dsv4_fusions.layers.compressor import Compressor
from dsv4_fusions.layers.projections import linear, rms_norm
from dsv4_fusions.layers.rotary import hadamard, layer_tables, rotate_row
from dsv4_fusions.rope import RopeTables, rotate

BLOCK_BYTES = 2**26
"""Bytes that the scores of one block of queries, and the rows that its teacher gathers, may take."""


class Indexer(nnx.Module):
    """Scores every candidate row for every token and selects the best ones (DeepSeek-V3.2 and V4).

    With q_h the token's indexer queries, k_c the candidates' keys and w_h weights projected from the token:

        score[t, c] = sum_h w_h(t) relu(q_h(t) . k_c) / sqrt(index_n_heads * index_head_dim)

    in f32. Queries and keys are rotated by position, and by a Hadamard matrix. The keys are those of a compressor of
    the indexer's own (ratio 2 or more), or one per token (ratio 1). Its inputs are detached: the loss trains the
    indexer and nothing else, and since a selection has no gradient, nothing else trains the indexer.
    """

    def __init__(self, cfg: DSv4Config, ratio: int, layer_index: int = 0, *, rngs: nnx.Rngs):
        """Makes the parameters.

        Args:
          cfg: the configuration.
          ratio: tokens to a candidate row; 1: every token is one.
          layer_index: which layer's rotary base to use.
          rngs: source of the initial values.
        """
        self.cfg = cfg
        self.rope = cfg.layer_rope(layer_index)
        heads, head_dim = cfg.index_n_heads, cfg.index_head_dim
        self.q_proj = linear(cfg, cfg.q_lora_rank, heads * head_dim, rngs=rngs)
        self.weights_proj = linear(cfg, cfg.hidden_size, heads, rngs=rngs)
        if ratio > 1:
            self.compressor = Compressor(cfg, ratio, layer_index, rngs=rngs, head_dim=head_dim, rotate_channels=True)
        else:
            self.k_proj = linear(cfg, cfg.hidden_size, head_dim, rngs=rngs)
            self.k_norm = rms_norm(cfg, head_dim)

    def token_keys(
        self, x: Float[Array, "batch tokens hidden"], positions: Int[Array, "*batch tokens"]
    ) -> Float[Array, "batch tokens index_head_dim"]:
        """Keys of an indexer with ratio 1, one for each token at its position."""
        keys = self.k_norm(self.k_proj(lax.stop_gradient(x)))
        return hadamard(rotate_row(keys, layer_tables(self.cfg, self.rope, positions)))

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        latent: Float[Array, "batch tokens q_lora_rank"],
        tables: RopeTables,
        keys: Float[Array, "batch rows index_head_dim"],
        row_start: Int32[Array, "*batch tokens"],
        row_count: Int32[Array, "*batch tokens"],
        topk: int,
        teacher: tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch rows head_dim"], float] | None,
    ) -> tuple[Int32[Array, "batch tokens topk"], Float32[Array, "batch tokens"] | None]:
        """Selects rows for every token, in bounded memory: a block of queries at a time.

        Args:
          x: hidden states.
          latent: normalised low-rank queries of the attention.
          tables: rotary tables of the tokens.
          keys: of the candidates, from the compressor or `token_keys`.
          row_start: first candidate of each token.
          row_count: how many candidates it has.
          topk: how many to select at most.
          teacher: queries, rows and score factor of the attention that the indexer is to predict; None: no loss.

        Returns:
          The selected rows, best first, -1 where a token has fewer candidates than `topk`; of candidates with equal
          scores the earlier ones are taken, and come first. If `topk` covers all rows: all candidates, in order.
          And each token's divergence from the teacher, or None: sum_c p_c (log(p_c + e) - log(r_c + e)) over the
          selected rows, e = 1e-10, with r the softmax of the scores and p the teacher's attention, a softmax over the
          selected rows for each head, averaged over the heads. Tokens without candidates have 0.
        """
        cfg = self.cfg
        x, latent = lax.stop_gradient((x, latent))
        batch, tokens = x.shape[:2]
        q = self.q_proj(latent).reshape(batch, tokens, cfg.index_n_heads, cfg.index_head_dim)
        q = hadamard(rotate(q, tables))
        weights = self.weights_proj(x).astype(jnp.float32) * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5
        row_start, row_count = (jnp.broadcast_to(bound, (batch, tokens)) for bound in (row_start, row_count))
        topk = min(topk, keys.shape[1])
        if 0 in (batch, tokens, topk):
            nothing = jnp.zeros((batch, tokens), jnp.float32)
            return jnp.full((batch, tokens, topk), -1, jnp.int32), None if teacher is None else nothing
        if teacher is None:
            q, weights, keys = lax.stop_gradient((q, weights, keys))
            attended_q = attended_rows = scale = None
        else:
            (attended_q, attended_rows), scale = lax.stop_gradient(teacher[:2]), teacher[2]
        entries = (q, weights, row_start, row_count, attended_q), keys, attended_rows
        selected, divergence = lax.map(lambda entry: _select(*entry, topk=topk, scale=scale), entries)
        return selected, None if teacher is None else divergence


def indexer_loss(
    cfg: DSv4Config,
    divergence: Float32[Array, "batch tokens"],
    is_valid: Int[Array, "batch tokens"] | None,
    loss_mask: Array | None,
) -> Float32[Array, ""]:
    """Mean divergence of the tokens that count, times `cfg.indexer_loss_coeff`; 0 if none counts.

    Args:
      cfg: the configuration.
      divergence: from `Indexer`.
      is_valid: tokens that are no padding; None: all.
      loss_mask: which of them count, as numbers or bools; None: all. A number below 0 is 0.
    """
    mask = jnp.ones_like(divergence)
    for factor in (is_valid, loss_mask):
        if factor is not None:
            mask = mask * jnp.maximum(factor.astype(jnp.float32), 0.0)
    # Chosen, not multiplied away: what padding holds may be NaN.
    total = jnp.sum(jnp.where(mask > 0, divergence, 0.0) * mask)
    weight = jnp.sum(mask)
    return cfg.indexer_loss_coeff * total / jnp.where(weight > 0, weight, 1.0)


def _select(queries, keys, attended_rows, *, topk, scale):
    """`Indexer.__call__` for one batch entry, with queries = (q [tokens, heads, head_dim], weights, ...)."""
    q, attended_q = queries[0], queries[-1]
    tokens, heads, _ = q.shape
    rows = keys.shape[0]
    columns = rows * (heads + 2)
    if attended_q is not None:
        # Rows are gathered only where some are left out.
        columns += topk * (attended_q.shape[1] + (attended_q.shape[2] if topk < rows else 0))
    most = max(1, BLOCK_BYTES // (4 * columns))
    num_blocks = -(-tokens // most)
    block = -(-tokens // num_blocks)

    def blocks(x):
        x = jnp.pad(x, [(0, num_blocks * block - tokens)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(num_blocks, block, *x.shape[1:])

    # The backward scores again: all scores would take tokens * rows * heads elements.
    select_again = jax.checkpoint(
        functools.partial(_select_block, dtype=keys.dtype, topk=topk, scale=scale), prevent_cse=False
    )
    # f32 keys, so that their gradient's sum over blocks is f32 too.
    wide = keys.astype(jnp.float32)
    selected, divergence = lax.map(
        lambda block: select_again(wide, attended_rows, *block), jax.tree.map(blocks, queries)
    )
    return selected.reshape(-1, topk)[:tokens], divergence.reshape(-1)[:tokens]


def _select_block(keys, attended_rows, q, weights, start, count, attended_q, *, dtype, topk, scale):
    scores = _dot("thd,cd->thc", q, keys.astype(dtype))
    scores = jnp.sum(jax.nn.relu(scores) * weights[..., None], axis=1)
    row = jnp.arange(keys.shape[0], dtype=jnp.int32)
    is_candidate = in_range(row, start, count)
    leaves_out = topk < keys.shape[0]
    if leaves_out:
        # Stable: of equal scores, which a relu makes many of, the earlier row.
        scores, row = lax.top_k(jnp.where(is_candidate, scores, -jnp.inf), topk)
        is_candidate = in_range(row, start, count)
    selected = jnp.where(is_candidate, row, -1)
    if attended_q is None:
        return selected, jnp.zeros(q.shape[:1], jnp.float32)

    if leaves_out:
        logits = _dot("thd,tcd->thc", attended_q, attended_rows[row])
    else:
        logits = _dot("thd,cd->thc", attended_q, attended_rows)
    target = lax.stop_gradient(jnp.mean(_softmax(scale * logits, is_candidate[:, None]), axis=1))
    predicted = _softmax(scores, is_candidate)
    return selected, jnp.sum(target * (jnp.log(target + 1e-10) - jnp.log(predicted + 1e-10)), axis=-1)


def _dot(spec, x, y):
    return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _softmax(logits, keep):
    """Softmax over the kept columns, 0 in the others and in rows without any; no gradient is NaN."""
    keep = jnp.broadcast_to(keep, logits.shape)
    peak = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, where=keep, initial=-jnp.inf))
    # Chosen before the exponential: the gradient of one that overflows would be NaN where it is masked afterwards.
    weight = jnp.where(keep, jnp.exp(jnp.where(keep, logits - peak, 0.0)), 0.0)
    return weight / jnp.maximum(jnp.sum(weight, axis=-1, keepdims=True), 1e-10)
