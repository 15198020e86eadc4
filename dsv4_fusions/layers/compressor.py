"""The KV compressor: one row for every complete group of tokens of a document."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Int32

from dsv4_fusions.config import HCA_RATIO, DSv4Config
from dsv4_fusions.documents import CompressedGroups
from dsv4_fusions.layers.cache import CompressorCache, check_sizes
from dsv4_fusions.layers.projections import linear, rms_norm
from dsv4_fusions.layers.rotary import hadamard, layer_tables, rotate_row, token_positions


class Compressor(nnx.Module):
    """Pools each group of `ratio` consecutive tokens into one key/value row.

    A group never crosses a document and an incomplete last group is dropped. Per channel, the group's rows are averaged
    with a softmax over the group of `x @ gate + ape`; the result is normalised and rotated at the position of the
    group's first token (DeepSeek-V4's compressors).

    With `overlap` the projections are twice as wide, and a row averages 2 * ratio tokens: its own group by the second
    half of the channels and the group before it in the same document by the first half. A document's first group has
    nothing before it.
    """

    def __init__(
        self,
        cfg: DSv4Config,
        ratio: int,
        layer_index: int = 0,
        *,
        rngs: nnx.Rngs,
        head_dim: int | None = None,
        overlap: bool | None = None,
        rotate_channels: bool = False,
    ):
        """Makes the parameters.

        Args:
          cfg: the configuration.
          ratio: tokens in a group.
          layer_index: which layer's rotary base to use.
          rngs: source of the initial values.
          head_dim: channels of a row; None: `cfg.head_dim`.
          overlap: whether a row reaches into the group before; None: for every ratio below 128, as in DeepSeek-V4.
          rotate_channels: whether the rows go through a Hadamard rotation of their channels, as an indexer's do.
        """
        self.cfg = cfg
        self.ratio = ratio
        self.rope = cfg.layer_rope(layer_index)
        self.head_dim = cfg.head_dim if head_dim is None else head_dim
        self.overlap = ratio < HCA_RATIO if overlap is None else overlap
        self.rotate_channels = rotate_channels
        width = (2 if self.overlap else 1) * self.head_dim
        self.kv_proj = linear(cfg, cfg.hidden_size, width, rngs=rngs)
        self.gate_proj = linear(cfg, cfg.hidden_size, width, rngs=rngs)
        # f32 whatever the parameters' dtype: it makes the scores, the softmax and the pooling f32.
        self.ape = nnx.Param(0.02 * jax.random.normal(rngs.params(), (ratio, width), jnp.float32))
        self.norm = rms_norm(cfg, self.head_dim)

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
            is_first = jnp.arange(slots) == 0
        else:
            kv, score = (_gather_groups(y, groups) for y in (kv, score))
            first_position = groups.pos_in_doc
            if positions is not None:
                positions = jnp.broadcast_to(token_positions(batch, tokens, None, positions), (batch, tokens))
                first_position = jnp.take_along_axis(positions, groups.token_index[..., 0], axis=-1)
            is_first = groups.is_first | ~groups.is_group
        # The group before stands in the slot before. Nothing stands before the first slot, which is a first group.
        before = tuple(jnp.roll(y, 1, axis=1) for y in (kv, score))
        return self._pool((kv, score), before, is_first, first_position)

    def init_cache(self, batch: int, max_length: int) -> CompressorCache:
        """An empty cache for sequences of up to `max_length` tokens."""
        check_sizes(batch, max_length)
        before = (2 if self.overlap else 1) * self.ratio - 1
        zeros = lambda *shape: jnp.zeros((batch, *shape), jnp.dtype(self.cfg.dtype))  # noqa: E731
        width = self.ape.shape[-1]
        return CompressorCache(
            zeros(before, width), zeros(before, width), zeros(max_length // self.ratio, self.head_dim)
        )

    def extend(
        self, x: Float[Array, "batch tokens hidden"], cache: CompressorCache, length: Int32[Array, ""]
    ) -> CompressorCache:
        """Adds the rows of the groups that end within the next tokens of one document.

        Args:
          x: hidden states of the next tokens.
          cache: of the tokens so far.
          length: how many those are; the position of the first token of `x`.

        Returns:
          The cache behind them. A group behind its capacity is dropped.
        """
        tokens, ratio, before = x.shape[1], self.ratio, cache.kv.shape[1]
        kv, score = (
            jnp.concatenate([old, new], axis=1)
            for old, new in ((cache.kv, self.kv_proj(x)), (cache.score, self.gate_proj(x)))
        )
        group = length // ratio + jnp.arange(-(-tokens // ratio), dtype=jnp.int32)
        is_done = (group + 1) * ratio <= length + tokens
        own = (group * ratio - length + before)[:, None] + jnp.arange(ratio, dtype=jnp.int32)

        def rows(index):
            index = jnp.clip(index, 0, before + tokens - 1)  # for the groups that are not done
            return kv[:, index], score[:, index]

        pooled = self._pool(rows(own), rows(own - ratio), group == 0, group * ratio)
        out_of_range = cache.rows.shape[1] + group.shape[0] + group
        slot = jnp.where(is_done, group, out_of_range)
        new_rows = cache.rows.at[:, slot].set(pooled, mode="drop", unique_indices=True)
        return CompressorCache(kv[:, tokens:], score[:, tokens:], new_rows)

    def _pool(self, own, before, is_first, first_position):
        """Rows from (kv, score) [batch, slots, ratio, width] of each group and of the group before it."""
        ape = self.ape[...]
        kv, score = own[0].astype(jnp.float32), own[1].astype(jnp.float32) + ape
        if self.overlap:
            half, first = self.head_dim, is_first[..., None, None]
            # Chosen, not multiplied away: what stands there may be another document's, a NaN for instance.
            kv_before = jnp.where(first, 0.0, before[0][..., :half].astype(jnp.float32))
            score_before = before[1][..., :half].astype(jnp.float32) + ape[:, :half]
            kv = jnp.concatenate([kv_before, kv[..., half:]], axis=-2)
            score = jnp.concatenate([jnp.where(first, -jnp.inf, score_before), score[..., half:]], axis=-2)
        pooled = jnp.sum(kv * jax.nn.softmax(score, axis=-2), axis=-2).astype(own[0].dtype)
        rows = rotate_row(self.norm(pooled), layer_tables(self.cfg, self.rope, first_position))
        return hadamard(rows) if self.rotate_channels else rows


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
