"""The non-overlapping KV compressor: one row for every complete group of tokens of a document."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.documents import CompressedGroups
from dsv4_fusions.layers.norms import RMSNorm
from dsv4_fusions.layers.rotary import layer_tables, rotate_row, token_positions


class Compressor(nnx.Module):
    """Pools each group of `ratio` consecutive tokens into one key/value row.

    A group never crosses a document and an incomplete last group is dropped. Per channel, the group's rows are averaged
    with a softmax over the group of `x @ gate + ape`; the result is normalised and rotated at the position of the
    group's first token (DeepSeek-V4's compressor for ratio 128).
    """

    def __init__(self, cfg: DSv4Config, ratio: int, layer_index: int = 0, *, rngs: nnx.Rngs):
        """Makes the parameters.

        Args:
          cfg: the configuration.
          ratio: tokens in a group.
          layer_index: which layer's rotary base to use.
          rngs: source of the initial values.
        """
        self.cfg = cfg
        self.ratio = ratio
        self.rope = cfg.layer_rope(layer_index)

        def projection():
            return nnx.Linear(
                cfg.hidden_size,
                cfg.head_dim,
                use_bias=False,
                dtype=jnp.dtype(cfg.dtype),
                param_dtype=jnp.dtype(cfg.param_dtype),
                rngs=rngs,
            )

        self.kv_proj = projection()
        self.gate_proj = projection()
        # f32 whatever the parameters' dtype: it makes the scores, the softmax and the pooling f32.
        self.ape = nnx.Param(0.02 * jax.random.normal(rngs.params(), (ratio, cfg.head_dim), jnp.float32))
        self.norm = RMSNorm(cfg.head_dim, eps=cfg.rms_norm_eps, param_dtype=jnp.dtype(cfg.param_dtype))

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        groups: CompressedGroups | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
    ) -> Float[Array, "batch slots head_dim"] | None:
        """Compressed rows, packed to the front.

        Args:
          x: hidden states.
          groups: the groups of every batch entry's documents; None: every batch entry is one document.
          positions: rotary positions of the tokens, int [tokens] or [batch, tokens]; None: counted within the document.

        Returns:
          [batch, tokens // ratio, head_dim] in the compute dtype, zero rows behind a batch entry's last group. None
          if there are fewer tokens than a group has.
        """
        batch, tokens, _ = x.shape
        slots = tokens // self.ratio
        if slots == 0:
            return None
        kv, score = self.kv_proj(x), self.gate_proj(x)
        if groups is None:
            kv, score = (y[:, : slots * self.ratio].reshape(batch, slots, self.ratio, y.shape[-1]) for y in (kv, score))
            first_position = token_positions(batch, tokens, None, positions)[..., : slots * self.ratio : self.ratio]
        else:
            kv, score = (_gather_groups(y, groups) for y in (kv, score))
            first_position = groups.pos_in_doc
            if positions is not None:
                positions = jnp.broadcast_to(token_positions(batch, tokens, None, positions), (batch, tokens))
                first_position = jnp.take_along_axis(positions, groups.token_index[..., 0], axis=-1)
        weights = jax.nn.softmax(score.astype(jnp.float32) + self.ape[...], axis=-2)
        pooled = jnp.sum(kv.astype(jnp.float32) * weights, axis=-2).astype(kv.dtype)
        return rotate_row(self.norm(pooled), layer_tables(self.cfg, self.rope, first_position))


def _gather_groups(y, groups):
    """Rows of y [batch, tokens, channels] -> [batch, slots, ratio, channels], zeros in empty slots.

    No row is read twice, as `unique_indices` says, so that the gradient writes each of its rows once: without the
    promise a GPU adds with atomics, in any order. The promise covers the ids out of range that empty slots are given.
    """
    tokens, (slots, ratio) = y.shape[1], groups.token_index.shape[1:]
    out_of_range = tokens + jnp.arange(slots * ratio, dtype=jnp.int32).reshape(slots, ratio)
    ids = jnp.where(groups.is_group[..., None], groups.token_index, out_of_range)
    gather = lambda rows, ids: rows.at[ids].get(mode="fill", fill_value=0, unique_indices=True)  # noqa: E731
    return jax.vmap(gather)(y, ids)
