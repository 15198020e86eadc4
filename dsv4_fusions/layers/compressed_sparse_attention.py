"""Attention of every head to one shared key/value row per token: window, compressed rows, or everything before."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from dsv4_fusions.config import LATENT_RATIO, DSv4Config
from dsv4_fusions.documents import DocumentBoundaries, compressed_groups
from dsv4_fusions.kv_index import (
    Runs,
    compressed_span,
    joined,
    range_index,
    selected_index,
    selection,
    visible_slots,
    window_run,
    window_span,
)
from dsv4_fusions.layers.cache import AttentionCache, check_cache, check_sizes, put_rows
from dsv4_fusions.layers.compressor import Compressor
from dsv4_fusions.layers.indexer import Indexer, indexer_loss
from dsv4_fusions.layers.rotary import layer_tables, token_positions
from dsv4_fusions.layers.switches import FusionStatus, Switches, remap_status
from dsv4_fusions.ops.sparse_attention import check_backend, index_width, sparse_attention, table_backend


class CompressedSparseAttention(Switches, nnx.Module):
    """The core attention of a hybrid layer: keys are values, one head of them, and each head has a sink in its softmax.

    What a token attends to follows from the layer's compress ratio: -1, every token of its document up to itself;
    0, the last `sliding_window` of those; 2 to 127, that window and the complete compressed rows of its document that
    an indexer selects; 128, that window and every complete compressed row of its document. The rows are handed to the
    sparse attention as a table of ids, local to the batch entry, or as two runs of them: with the `"structured"`
    backend, unless an indexer selects.

    Attributes:
      fuse_kv_index_remap: bool switch, see `Switches`. With the `"flat"` backend and a batch above 1 the table is made
        flat in one kernel; no bit of the result depends on it.
    """

    SWITCHES = ("fuse_kv_index_remap",)
    CHOICES = ()

    def __init__(
        self, cfg: DSv4Config, layer_index: int = 0, *, rngs: nnx.Rngs, fuse_kv_index_remap: bool | None = None
    ):
        """Makes the parameters.

        Args:
          cfg: the configuration.
          layer_index: which layer; it chooses the compress ratio and the rotary base of the compressed rows.
          rngs: source of the initial values.
          fuse_kv_index_remap: the switch's value; None: the configuration's.

        Raises:
          ValueError: a layer that the configuration does not have, or one with ratio -2, which is a
            `MQALatentAttention`.
        """
        self.cfg = cfg
        self.ratio = cfg.layer_ratio(layer_index)
        if self.ratio == LATENT_RATIO:
            wanted = "a ratio of -1, 0, or 2 to 128; MQALatentAttention is the layer of ratio -2"
            raise ValueError(f"layer_index: got {layer_index}, whose compress ratio is -2, wanted {wanted}")
        self.rope = cfg.layer_rope(layer_index)
        check_backend(cfg.sparse_attention_backend)
        self.set_switches(cfg, fuse_kv_index_remap=fuse_kv_index_remap)
        self.sink = nnx.Param(jnp.zeros((cfg.num_attention_heads,), jnp.float32))
        self.compressor = Compressor(cfg, self.ratio, layer_index, rngs=rngs) if self.ratio > 1 else None
        self.indexer = Indexer(cfg, self.ratio, layer_index, rngs=rngs) if cfg.has_indexer(self.ratio) else None
        self.selects, self.teaches = cfg.selects(self.ratio), cfg.teaches(self.ratio)

    def __call__(
        self,
        q: Float[Array, "batch tokens heads head_dim"],
        kv: Float[Array, "batch tokens head_dim"],
        x: Float[Array, "batch tokens hidden"],
        boundaries: DocumentBoundaries | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
        latent: Float[Array, "batch tokens q_lora_rank"] | None = None,
        loss_mask: Array | None = None,
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], dict[str, Float[Array, ""]]]:
        """Attends, causally and within each document.

        Args:
          q: rotated queries.
          kv: rotated key/value rows.
          x: hidden states, from which the compressed rows are made.
          boundaries: documents of the rows [batch, tokens]; None: every row is one document.
          positions: rotary positions of the tokens, int [tokens] or [batch, tokens]; None: counted within the document.
          latent: normalised low-rank queries, which the indexer of a layer that has one reads.
          loss_mask: [batch, tokens] bools or numbers, which tokens count in the indexer's loss; None: all that are no
            padding.

        Returns:
          Array like `q`, still rotated; rows of padding tokens are 0. And the auxiliary losses by name:
          "indexer_loss" where the layer has an indexer and `cfg.indexer_loss_coeff` is above 0.

        Raises:
          ValueError: no `latent` where there is an indexer.
        """
        batch, tokens, _ = kv.shape
        groups = None if boundaries is None or self.compressor is None else compressed_groups(boundaries, self.ratio)
        compressed = None if self.compressor is None else self.compressor(x, groups, positions)
        self._check_latent(latent)
        aux = {"indexer_loss": jnp.zeros((), jnp.float32)} if self.teaches else {}
        if compressed is not None:
            kv = jnp.concatenate([kv, compressed], axis=1)
            seen = visible_slots(tokens, self.ratio, groups)
            if self.selects or self.teaches:
                keys = self.indexer.compressor(lax.stop_gradient(x), groups, positions)
                tables = layer_tables(self.cfg, self.rope, token_positions(batch, tokens, boundaries, positions))
                teacher = (q, compressed, self.cfg.head_dim**-0.5) if self.teaches else None
                topk = self.cfg.index_topk if self.selects else keys.shape[1]
                selected, divergence = self.indexer(x, latent, tables, keys, *seen, topk, teacher)
                if self.teaches:
                    is_valid = None if boundaries is None else boundaries.is_valid
                    aux = {"indexer_loss": indexer_loss(self.cfg, divergence, is_valid, loss_mask)}

        window = max(tokens, 1) if self.ratio == -1 else self.cfg.sliding_window
        if self.cfg.sparse_attention_backend == "structured" and not self.selects:
            start, count = window_run(tokens, window, boundaries)
            far_start, far_count = (start * 0, count * 0) if compressed is None else seen
            runs = (start, count, far_start + tokens, far_count)
            index = Runs(*(jnp.broadcast_to(x, (batch, tokens)) for x in runs), self.table_width(tokens))
            return self._attend(q, kv, index), aux
        parts = (window_span(tokens, window, boundaries),)
        if compressed is not None and self.selects:
            parts += (selection(selected, *seen, tokens),)
        elif compressed is not None:
            parts += (compressed_span(tokens, self.ratio, tokens, groups),)
        return self._attend(q, kv, parts), aux

    def init_cache(self, batch: int, max_length: int) -> AttentionCache:
        """An empty cache.

        Args:
          batch: batch entries.
          max_length: tokens that a sequence may come to have. Behind them nothing is added to the compressed rows, nor
            to the raw ones of a full causal layer; a window goes on.

        Returns:
          The cache, in the compute dtype.
        """
        check_sizes(batch, max_length)
        cfg, dtype = self.cfg, jnp.dtype(self.cfg.dtype)
        rows = max_length if self.ratio == -1 else cfg.sliding_window - 1
        return AttentionCache(
            jnp.zeros((), jnp.int32),
            jnp.zeros((batch, rows, cfg.head_dim), dtype),
            None if self.compressor is None else self.compressor.init_cache(batch, max_length),
            self.indexer.compressor.init_cache(batch, max_length) if self.selects else None,
            ratio=self.ratio,
        )

    def decode(
        self,
        q: Float[Array, "batch tokens heads head_dim"],
        kv: Float[Array, "batch tokens head_dim"],
        x: Float[Array, "batch tokens hidden"],
        cache: AttentionCache,
        latent: Float[Array, "batch tokens q_lora_rank"] | None = None,
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], AttentionCache]:
        """Attends from the next tokens of one document a batch entry to those and the cached ones.

        Args:
          q: queries of the next tokens, rotated at their positions, from `cache.length` on.
          kv: their key/value rows, likewise.
          x: their hidden states.
          cache: of the tokens before.
          latent: their low-rank queries, as of a call.

        Returns:
          Array like `q`, still rotated, and the cache with the next tokens in it.

        Raises:
          TypeError: no cache.
          ValueError: a cache for another batch or of another layer, no `latent` where there is an indexer.
        """
        check_cache(cache, x, self.init_cache)
        self._check_latent(latent)
        batch, tokens, _ = kv.shape
        length = cache.length
        position = length + jnp.arange(tokens, dtype=jnp.int32)
        if self.ratio == -1:
            rows = kept = put_rows(cache.kv, kv, position)
            index = range_index(jnp.zeros_like(position), position + 1, rows.shape[1])
        else:
            rows = jnp.concatenate([cache.kv, kv], axis=1)
            kept = rows[:, tokens:]
            # The row of the first token in `rows` is the window's width less one: ids of a window before it are rows
            # that the sequence does not have yet.
            before = cache.kv.shape[1]
            missing = jnp.maximum(before - length, 0)
            row = jnp.arange(tokens, dtype=jnp.int32)[:, None] + jnp.arange(before + 1, dtype=jnp.int32)
            index = jnp.where(row >= missing, row, -1)
        compressor, indexer = cache.compressor, cache.indexer
        if self.compressor is not None:
            compressor = self.compressor.extend(x, compressor, length)
            offset, num_slots = rows.shape[1], compressor.rows.shape[1]
            rows = jnp.concatenate([rows, compressor.rows], axis=1)
            seen = jnp.zeros_like(position), jnp.minimum((position + 1) // self.ratio, num_slots)
            if self.selects:
                indexer = self.indexer.compressor.extend(x, indexer, length)
                tables = layer_tables(self.cfg, self.rope, position)
                selected, _ = self.indexer(x, latent, tables, indexer.rows, *seen, self.cfg.index_topk, None)
                far = selected_index(selected, *seen, offset)
            else:
                far = range_index(*seen, num_slots, offset)
            index = joined(index, far)
        o = self._attend(q, rows, jnp.broadcast_to(index, (batch, *index.shape[-2:])))
        return o, AttentionCache(length + tokens, kept, compressor, indexer, ratio=self.ratio)

    def explain_fusions(self, q=None) -> dict[str, FusionStatus]:
        """What the fusion of this module does, without running it.

        Args:
          q: array, or anything with its shape, [batch, tokens, ...]; None: the batch is unknown.

        Returns:
          {"fuse_kv_index_remap": FusionStatus}.
        """
        batch, ids = (None, 0) if q is None else (q.shape[0], q.shape[1] * self.table_width(q.shape[1]))
        return {"fuse_kv_index_remap": remap_status(self.cfg, self.fuse_kv_index_remap, batch, ids)}

    def table_width(self, tokens: int) -> int:
        """Columns of the table of ids for this many tokens."""
        if self.ratio == -1:
            return tokens
        slots = tokens // self.ratio if self.ratio > 1 else 0
        return self.cfg.sliding_window + (min(slots, self.cfg.index_topk) if self.selects else slots)

    def _check_latent(self, latent):
        if self.indexer is not None and latent is None:
            raise ValueError("latent: got None, wanted the low-rank queries, which the indexer reads")

    def _attend(self, q, rows, index):
        backend, fused = self.cfg.sparse_attention_backend, False
        if not isinstance(index, Runs):
            backend, ids = table_backend(backend), q.shape[1] * index_width(index)
            fused = remap_status(self.cfg, self.fuse_kv_index_remap, len(q), ids).active
        return sparse_attention(q, rows, index, self.sink[...], backend=backend, fuse_kv_index_remap=fused)
