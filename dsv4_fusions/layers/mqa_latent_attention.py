"""Absorbed multi-head latent attention: every head attends to one latent row per token."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions.config import LATENT_RATIO, DSv4Config
from dsv4_fusions.documents import from_segment_ids
from dsv4_fusions.kv_index import joined, latent_candidates, range_index, selected_index, selection, window_span
from dsv4_fusions.layers.cache import AttentionCache, check_cache, check_sizes, put_rows
from dsv4_fusions.layers.indexer import Indexer, indexer_loss
from dsv4_fusions.layers.projections import check_input, gated, linear, recomputed, rms_norm, without_padding
from dsv4_fusions.layers.rotary import layer_tables, rotate_row, token_positions
from dsv4_fusions.layers.switches import LATENT_VALUES, FusionStatus, Switches, remap_status
from dsv4_fusions.ops.sparse_attention import check_backend, index_width, sparse_attention, table_backend
from dsv4_fusions.rope import rotate


class MQALatentAttention(Switches, nnx.Module):
    """Multi-head latent attention in its absorbed form, with the indexer of DeepSeek-V3.2 (compress ratio -2).

    A token's latent row c = RMSNorm(x Wkv) has `kv_lora_rank` channels, and every head's keys and values are
    projections of it. Absorbed, the projections move to the queries and behind the attention, so that all heads read
    one row:

        q_h = [nope_h | rotate(pe_h)]        of RMSNorm(x Wq_down) Wq_up per head
        query_h = [nope_h k_up_h | rotate(pe_h)]        row = [c | rotate(x Wpe)]
        out_h = (attention of query_h to the rows, values c) v_up_h        y = out @ o_proj

    with scores times (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, the width before absorption, and a learned sink per
    head (`sink[...] = -jnp.inf` for weights of a model without sinks). What a token attends to follows from
    `cfg.indexer_phase`: "dense", every token of its document up to itself; "warm_up", the same, and the indexer learns
    on all of them; "sparse", the window and the `index_topk` best tokens before it, none twice. Rotary channels are
    interleaved pairs, as everywhere in this library. There is no inverse rotation, for values have no rotary channels,
    and no VHA postmix.

    Attributes:
      fuse_inv_rope, postmix_backward, implementation: for the sake of code that sets the switches of all layers;
        without effect here.
      fuse_kv_index_remap: bool switch, see `CompressedSparseAttention`.
    """

    SWITCHES = ("fuse_inv_rope", "fuse_kv_index_remap")
    CHOICES = ("postmix_backward", "implementation")

    def __init__(
        self,
        cfg: DSv4Config,
        layer_index: int = 0,
        *,
        rngs: nnx.Rngs,
        fuse_inv_rope: bool | None = None,
        fuse_kv_index_remap: bool | None = None,
        postmix_backward: str | None = None,
        implementation: str | None = None,
    ):
        """Makes the parameters.

        Args:
          cfg: the configuration.
          layer_index: which layer; its compress ratio must be -2.
          rngs: source of the initial values.
          fuse_inv_rope, fuse_kv_index_remap, postmix_backward, implementation: the switches' values; None: the
            configuration's.

        Raises:
          ValueError: a layer that the configuration does not have or that has another ratio, an unknown name.
          TypeError: a fusion switch that is no bool.
        """
        if (ratio := cfg.layer_ratio(layer_index)) != LATENT_RATIO:
            wanted = f"{LATENT_RATIO}; DSv4HybridSelfAttention is the layer of the others"
            raise ValueError(f"layer_index: got {layer_index}, whose compress ratio is {ratio}, wanted {wanted}")
        check_backend(cfg.sparse_attention_backend)
        self.cfg = cfg
        self.rope = cfg.layer_rope(layer_index)
        heads, rank, pe = cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim
        nope, value = cfg.qk_nope_head_dim, cfg.v_head_dim
        per_head = nnx.initializers.lecun_normal(batch_axis=0)

        def weight(*shape):
            return nnx.Param(per_head(rngs.params(), shape, jnp.dtype(cfg.param_dtype)))

        self.q_down = linear(cfg, cfg.hidden_size, cfg.q_lora_rank, rngs=rngs)
        self.q_norm = rms_norm(cfg, cfg.q_lora_rank)
        self.q_up = linear(cfg, cfg.q_lora_rank, heads * (nope + pe), rngs=rngs)
        self.kv_down = linear(cfg, cfg.hidden_size, rank + pe, rngs=rngs)
        self.kv_norm = rms_norm(cfg, rank)
        self.k_up = weight(heads, nope, rank)
        self.v_up = weight(heads, rank, value)
        self.sink = nnx.Param(jnp.zeros((heads,), jnp.float32))
        if cfg.gated_attention:
            self.gate_proj = linear(cfg, cfg.hidden_size, heads * value, rngs=rngs)
        self.o_proj = linear(cfg, heads * value, cfg.hidden_size, rngs=rngs)
        self.indexer = Indexer(cfg, 1, layer_index, rngs=rngs) if cfg.has_indexer(LATENT_RATIO) else None
        self.selects, self.teaches = cfg.selects(LATENT_RATIO), cfg.teaches(LATENT_RATIO)

        self.set_switches(
            cfg,
            fuse_inv_rope=fuse_inv_rope,
            fuse_kv_index_remap=fuse_kv_index_remap,
            postmix_backward=postmix_backward,
            implementation=implementation,
        )

    @property
    def _scale(self):
        return (self.cfg.qk_nope_head_dim + self.cfg.qk_rope_head_dim) ** -0.5

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
        loss_mask: Array | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], dict[str, Float[Array, ""]]]:
        """Attends, causally and within each document; arguments and results as of `DSv4HybridSelfAttention`."""
        check_input(self.cfg, x, segment_ids, loss_mask)
        boundaries = None if segment_ids is None else from_segment_ids(segment_ids)
        forward = recomputed(self.cfg, "full_attn", self._forward)
        x = without_padding(x.astype(self.cfg.dtype), boundaries)
        return forward(x, boundaries, positions, loss_mask)

    def _forward(self, x, boundaries, positions, loss_mask):
        cfg = self.cfg
        batch, tokens, _ = x.shape
        positions = token_positions(batch, tokens, boundaries, positions)
        tables = layer_tables(cfg, self.rope, positions)
        q, rows, latent = recomputed(cfg, "qkv", self._queries_and_rows)(x, tables)
        aux = {}
        if self.selects or self.teaches:
            # In the sparse phase the window is attended to anyway, and is no candidate: no id stands twice in a row.
            start, count = latent_candidates(tokens, cfg.sliding_window if self.selects else 0, boundaries)
            selected, divergence = self.indexer(
                *(x, latent, tables, self.indexer.token_keys(x, positions), start, count),
                cfg.index_topk if self.selects else tokens,
                (q, rows, self._scale) if self.teaches else None,
            )
            if self.teaches:
                is_valid = None if boundaries is None else boundaries.is_valid
                aux = {"indexer_loss": indexer_loss(cfg, divergence, is_valid, loss_mask)}
        if self.selects:
            # The selected rows in front, as in PaddleFleet since its PR #1653: an LSE over them is one over a prefix.
            index = selection(selected, start, count, 0), window_span(tokens, cfg.sliding_window, boundaries)
        else:
            index = (window_span(tokens, max(tokens, 1), boundaries),)
        return self._output(self._attend(q, rows, index), x), aux

    def init_cache(self, batch: int, max_length: int) -> AttentionCache:
        """An empty cache for `decode`.

        Args:
          batch: batch entries.
          max_length: tokens that a sequence may come to have; those behind them are attended to by none.

        Returns:
          The cache, in the compute dtype.
        """
        check_sizes(batch, max_length)
        cfg = self.cfg
        zeros = lambda width: jnp.zeros((batch, max_length, width), jnp.dtype(cfg.dtype))  # noqa: E731
        keys = zeros(cfg.index_head_dim) if self.selects else None
        rows = zeros(cfg.kv_lora_rank + cfg.qk_rope_head_dim)
        return AttentionCache(jnp.zeros((), jnp.int32), rows, index_keys=keys, ratio=LATENT_RATIO)

    def decode(
        self, x: Float[Array, "batch tokens hidden"], cache: AttentionCache
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache]:
        """The next tokens of a sequence that is one document; arguments and results as of `DSv4HybridSelfAttention`."""
        check_input(self.cfg, x)
        check_cache(cache, x, self.init_cache)
        cfg, x = self.cfg, x.astype(self.cfg.dtype)
        capacity = cache.kv.shape[1]
        position = cache.length + jnp.arange(x.shape[1], dtype=jnp.int32)
        tables = layer_tables(cfg, self.rope, position)
        q, new, latent = self._queries_and_rows(x, tables)
        rows, keys = put_rows(cache.kv, new, position), cache.index_keys
        if self.selects:
            keys = put_rows(keys, self.indexer.token_keys(x, position), position)
            start, count = jnp.zeros_like(position), jnp.clip(position + 1 - cfg.sliding_window, 0, capacity)
            selected, _ = self.indexer(x, latent, tables, keys, start, count, cfg.index_topk, None)
            window = position[:, None] - jnp.arange(cfg.sliding_window - 1, -1, -1, dtype=jnp.int32)
            index = joined(selected_index(selected, start, count, 0), window)
        else:
            index = range_index(jnp.zeros_like(position), position + 1, capacity)
        index = jnp.broadcast_to(index, (len(x), *index.shape[-2:]))
        o = self._output(self._attend(q, rows, index), x)
        return o, AttentionCache(cache.length + x.shape[1], rows, index_keys=keys, ratio=LATENT_RATIO)

    def explain_fusions(self, x=None) -> dict[str, FusionStatus]:
        """What every fusion of this layer does and why; see `DSv4HybridSelfAttention.explain_fusions`."""
        batch, ids = (None, 0) if x is None else (x.shape[0], x.shape[1] * self.table_width(x.shape[1]))
        return {
            "fuse_inv_rope": FusionStatus(False, None, LATENT_VALUES),
            "fuse_kv_index_remap": remap_status(self.cfg, self.fuse_kv_index_remap, batch, ids),
        }

    def table_width(self, tokens: int) -> int:
        """Columns of the table of ids for this many tokens."""
        return min(self.cfg.index_topk, tokens) + self.cfg.sliding_window if self.selects else tokens

    def _queries_and_rows(self, x, tables):
        """Absorbed queries [batch, tokens, heads, rank + pe], rows [batch, tokens, rank + pe], low-rank queries."""
        cfg = self.cfg
        latent = self.q_norm(self.q_down(x))
        q = self.q_up(latent)
        q = q.reshape(*x.shape[:2], cfg.num_attention_heads, cfg.qk_nope_head_dim + cfg.qk_rope_head_dim)
        q = rotate(q, tables)
        absorbed = jnp.einsum("bthn,hnl->bthl", q[..., : cfg.qk_nope_head_dim], self.k_up[...].astype(cfg.dtype))
        q = jnp.concatenate([absorbed, q[..., cfg.qk_nope_head_dim :]], axis=-1)
        row = self.kv_down(x)
        row = jnp.concatenate([self.kv_norm(row[..., : cfg.kv_lora_rank]), row[..., cfg.kv_lora_rank :]], axis=-1)
        return q, rotate_row(row, tables), latent

    def _attend(self, q, rows, index):
        ids = q.shape[1] * index_width(index)
        return sparse_attention(
            q,
            rows,
            index,
            self.sink[...],
            scale=self._scale,
            value_dim=self.cfg.kv_lora_rank,
            backend=table_backend(self.cfg.sparse_attention_backend),
            fuse_kv_index_remap=remap_status(self.cfg, self.fuse_kv_index_remap, len(q), ids).active,
        )

    def _output(self, o, x):
        o = recomputed(self.cfg, "post_core", self._values)(o)
        if self.cfg.gated_attention:
            o = gated(self.cfg, o, x, self.gate_proj)
        return self.o_proj(o)

    def _values(self, o):
        o = jnp.einsum("bthl,hlv->bthv", o, self.v_up[...].astype(self.cfg.dtype))
        return o.reshape(*o.shape[:2], o.shape[2] * o.shape[3])
