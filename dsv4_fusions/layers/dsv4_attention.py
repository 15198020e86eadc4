"""The DeepSeek-V4 hybrid attention layer with its VHA postmix."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.documents import from_segment_ids
from dsv4_fusions.layers.cache import AttentionCache, check_cache
from dsv4_fusions.layers.compressed_sparse_attention import CompressedSparseAttention
from dsv4_fusions.layers.norms import rms_normalize
from dsv4_fusions.layers.projections import check_input, gated, linear, recomputed, rms_norm, without_padding
from dsv4_fusions.layers.rotary import layer_tables, rotate_row, token_positions
from dsv4_fusions.layers.switches import FusionStatus, Switches, forwarded, never_active
from dsv4_fusions.ops.inv_rope_postmix import (
    check_backward,
    grouped_postmix,
    inv_rope_grouped_postmix,
    inv_rope_vha_postmix,
    postmix_choice,
    postmix_matrix,
    vha_postmix,
)
from dsv4_fusions.rope import RopeTables, rotate


class DSv4HybridSelfAttention(Switches, nnx.Module):
    """Hybrid self-attention: low-rank queries, one key/value row per token, rotated back and mixed across heads.

    In order (PaddleFleet PR #1772; DeepSeek-V4 without the postmix and the gate):

        q = rms(RMSNorm(x Wq_down) Wq_up) per head         kv = RMSNorm(x Wkv)
        o = inverse_rotation(attention(rotate(q), rotate(kv)))
        mixed = M o, M = V U^T + I, over heads             (VHA postmix)
        out = (mixed in groups of heads) @ o_down          times sigmoid(x Wgate) if gated
        y = out @ o_proj

    The parameters are the same whatever the switches say. Computation is in `cfg.dtype`.

    Attributes:
      fuse_inv_rope: bool switch, see `Switches` for when a flip acts. The inverse rotation is folded into the postmix,
        so that the rotated attention output never exists in memory. No bit of the result or of a gradient depends on
        it. Where it cannot serve, the unfused pair runs: `explain_fusions` tells.
      fuse_kv_index_remap: bool switch of the core attention, see `CompressedSparseAttention`.
      postmix_backward: "dot_general" or "single_pass", the postmix's gradient on either path.
      implementation: which implementation of the postmix runs, on either path: a name, or None for the best that can.
        It says nothing about the index remap, which chooses for itself.
    """

    SWITCHES = ("fuse_inv_rope", "fuse_kv_index_remap")
    CHOICES = ("postmix_backward", "implementation")

    fuse_kv_index_remap = forwarded("fuse_kv_index_remap", lambda layer: [layer.core_attention])

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
        """Makes the parameters: U ~ N(0, 0.01) and V = 0, so that the postmix starts as the identity.

        Args:
          cfg: the configuration.
          layer_index: which layer; it chooses the compress ratio and the rotary base.
          rngs: source of the initial values.
          fuse_inv_rope, fuse_kv_index_remap, postmix_backward, implementation: the switches' values; None: the
            configuration's.

        Raises:
          ValueError: a layer that the configuration does not have or whose ratio is -2, an unknown name.
          TypeError: a fusion switch that is no bool.
        """
        self.core_attention = CompressedSparseAttention(cfg, layer_index, rngs=rngs, fuse_kv_index_remap=False)
        self.cfg = cfg
        # What the layer is, rather than its number: layers of one kind can be stacked for a scan.
        self.rope = cfg.layer_rope(layer_index)
        param_dtype = jnp.dtype(cfg.param_dtype)
        heads, groups = cfg.num_attention_heads, cfg.o_groups

        self.q_down = linear(cfg, cfg.hidden_size, cfg.q_lora_rank, rngs=rngs)
        self.q_norm = rms_norm(cfg, cfg.q_lora_rank)
        self.q_up = linear(cfg, cfg.q_lora_rank, heads * cfg.head_dim, rngs=rngs)
        self.kv_proj = linear(cfg, cfg.hidden_size, cfg.head_dim, rngs=rngs)
        self.kv_norm = rms_norm(cfg, cfg.head_dim)
        if cfg.use_vha_attention:
            shape = (groups, heads // groups) if cfg.vha_postmix_grouped else (heads,)
            shape = (*shape, cfg.postmix_rank)
            self.postmix_u = nnx.Param(0.01 * jax.random.normal(rngs.params(), shape, param_dtype))
            self.postmix_v = nnx.Param(jnp.zeros(shape, param_dtype))
        grouped = nnx.initializers.lecun_normal(batch_axis=0)
        group_width = heads * cfg.head_dim // groups
        self.o_down = nnx.Param(grouped(rngs.params(), (groups, group_width, cfg.o_lora_rank), param_dtype))
        if cfg.gated_attention:
            self.gate_proj = linear(cfg, cfg.hidden_size, groups * cfg.o_lora_rank, rngs=rngs)
        self.o_proj = linear(cfg, groups * cfg.o_lora_rank, cfg.hidden_size, rngs=rngs)

        self.set_switches(
            cfg,
            fuse_inv_rope=fuse_inv_rope,
            fuse_kv_index_remap=fuse_kv_index_remap,
            postmix_backward=postmix_backward,
            implementation=implementation,
        )

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
        loss_mask: Array | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], dict[str, Float[Array, ""]]]:
        """Attends, causally and within each document.

        Args:
          x: hidden states.
          segment_ids: document of each token, 0 for padding, whose output is 0; None: every row is one document.
          positions: rotary positions, int [tokens] or [batch, tokens]; None: counted within the document.
          loss_mask: [batch, tokens] bools or numbers, which tokens count in the auxiliary losses; None: all that are no
            padding.

        Returns:
          Array like `x` in the compute dtype, and the layer's auxiliary losses by name: "indexer_loss", already times
          `cfg.indexer_loss_coeff`, where there is an indexer and the coefficient is above 0.

        Raises:
          ValueError: shapes that do not fit, or an `implementation` that cannot run here.
          TypeError: segment ids or positions that are no integers.
        """
        check_input(self.cfg, x, segment_ids, loss_mask)
        boundaries = None if segment_ids is None else from_segment_ids(segment_ids)
        forward = recomputed(self.cfg, "full_attn", self._forward)
        x = without_padding(x.astype(self.cfg.dtype), boundaries)
        return forward(x, boundaries, positions, loss_mask)

    def init_cache(self, batch: int, max_length: int) -> AttentionCache:
        """An empty cache for `decode`; see `CompressedSparseAttention.init_cache`."""
        return self.core_attention.init_cache(batch, max_length)

    def decode(
        self, x: Float[Array, "batch tokens hidden"], cache: AttentionCache
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache]:
        """The next tokens of a sequence that is one document: many at once for a prompt, one at a time behind it.

        Args:
          x: hidden states of the next tokens; the first one stands at position `cache.length`.
          cache: of the tokens before, from `init_cache` or the last call.

        Returns:
          What a call on the whole sequence gives for these tokens, up to rounding, and the new cache.
        """
        check_input(self.cfg, x)
        check_cache(cache, x, self.init_cache)
        x = x.astype(self.cfg.dtype)
        tables = layer_tables(self.cfg, self.rope, cache.length + jnp.arange(x.shape[1], dtype=jnp.int32))
        q, kv, latent = self._queries_and_rows(x, tables)
        o, cache = self.core_attention.decode(q, kv, x, cache, latent)
        return self._output(o, x, tables), cache

    def table_width(self, tokens: int) -> int:
        """Columns of the core attention's table of ids for this many tokens."""
        return self.core_attention.table_width(tokens)

    def _forward(self, x, boundaries, positions, loss_mask):
        batch, tokens, _ = x.shape
        tables = layer_tables(self.cfg, self.rope, token_positions(batch, tokens, boundaries, positions))
        q, kv, latent = recomputed(self.cfg, "qkv", self._queries_and_rows)(x, tables)
        o, aux = self.core_attention(q, kv, x, boundaries, positions, latent, loss_mask)
        return self._output(o, x, tables), aux

    def _queries_and_rows(self, x, tables):
        cfg = self.cfg
        latent = self.q_norm(self.q_down(x))
        q = self.q_up(latent).reshape(*x.shape[:2], cfg.num_attention_heads, cfg.head_dim)
        q = rotate(rms_normalize(q, cfg.rms_norm_eps), tables)
        return q, rotate_row(self.kv_norm(self.kv_proj(x)), tables), latent

    def _output(self, o, x, tables):
        o = recomputed(self.cfg, "post_core", self._post_core)(o, tables)
        if self.cfg.gated_attention:
            o = gated(self.cfg, o, x, self.gate_proj)
        return self.o_proj(o)

    def _post_core(self, o, tables):
        cfg = self.cfg
        o = self._inverse_rotation_and_postmix(o, tables)
        o = o.reshape(*o.shape[:2], cfg.o_groups, self.o_down.shape[1])
        o = jnp.einsum("btgc,gcr->btgr", o, self.o_down[...].astype(cfg.dtype))
        return o.reshape(*o.shape[:2], self.o_proj.kernel.shape[0])

    def explain_fusions(self, x=None) -> dict[str, FusionStatus]:
        """What every fusion of this layer does and why, from the function that the forward decides with.

        Args:
          x: the input, or anything with its shape; None: the batch is unknown. Its dtype does not matter, for the layer
            computes in `cfg.dtype`.

        Returns:
          {"fuse_inv_rope": FusionStatus, "fuse_kv_index_remap": FusionStatus}.

        Raises:
          ValueError: about `implementation` and `postmix_backward`, as a call does.
        """
        return {"fuse_inv_rope": self._inv_rope_status(), **self.core_attention.explain_fusions(x)}

    def _inv_rope_status(self):
        cfg = self.cfg
        check_backward(self.postmix_backward)
        implementation, falls_back = postmix_choice(
            cfg.dtype,
            cfg.num_attention_heads,
            cfg.head_dim,
            cfg.qk_rope_head_dim,
            groups=cfg.o_groups if cfg.vha_postmix_grouped else None,
            implementation=self.implementation,
        )
        reason = never_active(cfg).get("fuse_inv_rope") or falls_back
        if reason is None and not self.fuse_inv_rope:
            reason = "fuse_inv_rope is False"
        applies = f"{cfg.dtype}, {cfg.qk_rope_head_dim} rotary channels"
        if "vha_postmix" in cfg.remat:
            applies += "; subsumes the remat segment vha_postmix: nothing is saved that it could compute again"
        return FusionStatus(
            active=reason is None,
            implementation=implementation if cfg.use_vha_attention else None,
            reason=reason or applies,
        )

    def _inverse_rotation_and_postmix(self, o, tables: RopeTables):
        # The rotation must see the rounded attention output on both paths; without the barrier XLA may hand it the f32
        # values from before the rounding, on the unfused path alone. Its transpose does the same for the gradient.
        o = jax.lax.optimization_barrier(o)
        cfg, status = self.cfg, self._inv_rope_status()
        how = {"backward": self.postmix_backward, "implementation": status.implementation}
        if not cfg.use_vha_attention:
            return rotate(o, tables, inverse=True)
        if cfg.vha_postmix_grouped:
            weights = [w[...].astype(o.dtype) for w in (self.postmix_u, self.postmix_v)]
            fused, unfused = inv_rope_grouped_postmix, grouped_postmix
        else:
            weights = [postmix_matrix(self.postmix_u[...], self.postmix_v[...]).astype(o.dtype)]
            fused, unfused = inv_rope_vha_postmix, vha_postmix
        if status.active:
            return fused(o, *weights, tables, **how)
        rotated = rotate(o, tables, inverse=True)
        return recomputed(cfg, "vha_postmix", lambda x, *weights: unfused(x, *weights, **how))(rotated, *weights)
