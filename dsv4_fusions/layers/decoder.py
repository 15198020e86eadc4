"""A decoder: embedding, pre-norm blocks of hybrid attention and SwiGLU, and a head tied to the embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions import dispatch, numerics
from dsv4_fusions.config import LATENT_RATIO, DSv4Config
from dsv4_fusions.gather import gather_rows
from dsv4_fusions.layers.cache import AttentionCache
from dsv4_fusions.layers.dsv4_attention import DSv4HybridSelfAttention
from dsv4_fusions.layers.mqa_latent_attention import MQALatentAttention
from dsv4_fusions.layers.projections import linear, rms_norm
from dsv4_fusions.layers.switches import FusionStatus, Switches, forwarded, warn_never_active


def attention_layer(
    cfg: DSv4Config, layer_index: int, *, rngs: nnx.Rngs, **switches
) -> DSv4HybridSelfAttention | MQALatentAttention:
    """The attention layer of a configuration's layer, by its compress ratio.

    Args:
      cfg: the configuration.
      layer_index: which layer.
      rngs: source of the initial values.
      **switches: of `DSv4HybridSelfAttention`.

    Raises:
      ValueError, TypeError: as the layer does.
    """
    is_latent = cfg.layer_ratio(layer_index) == LATENT_RATIO
    return (MQALatentAttention if is_latent else DSv4HybridSelfAttention)(cfg, layer_index, rngs=rngs, **switches)


class SwiGLU(nnx.Module):
    """The gated feed-forward network `down(silu(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, cfg: DSv4Config, *, rngs: nnx.Rngs):
        """Makes the three projections.

        Args:
          cfg: the configuration.
          rngs: source of the initial values.
        """
        self.gate = linear(cfg, cfg.hidden_size, cfg.intermediate_size, rngs=rngs)
        self.up = linear(cfg, cfg.hidden_size, cfg.intermediate_size, rngs=rngs)
        self.down = linear(cfg, cfg.intermediate_size, cfg.hidden_size, rngs=rngs)

    def __call__(self, x: Float[Array, "batch tokens hidden"]) -> Float[Array, "batch tokens hidden"]:
        """Applies the network to every token."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderBlock(Switches, nnx.Module):
    """Attention and SwiGLU, each normalised before and added to the residual stream.

    The switches are the attention's.
    """

    SWITCHES, CHOICES = DSv4HybridSelfAttention.SWITCHES, DSv4HybridSelfAttention.CHOICES

    fuse_inv_rope = forwarded("fuse_inv_rope", lambda block: [block.attention])
    fuse_kv_index_remap = forwarded("fuse_kv_index_remap", lambda block: [block.attention])
    postmix_backward = forwarded("postmix_backward", lambda block: [block.attention])
    implementation = forwarded("implementation", lambda block: [block.attention])

    def __init__(self, cfg: DSv4Config, layer_index: int, *, rngs: nnx.Rngs, **switches):
        """Makes the parameters.

        Args:
          cfg: the configuration.
          layer_index: which layer.
          rngs: source of the initial values.
          **switches: of `DSv4HybridSelfAttention`.
        """
        self.attention_norm = rms_norm(cfg, cfg.hidden_size)
        self.attention = attention_layer(cfg, layer_index, rngs=rngs, **switches)
        self.mlp_norm = rms_norm(cfg, cfg.hidden_size)
        self.mlp = SwiGLU(cfg, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
        loss_mask: Array | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], dict[str, Float[Array, ""]]]:
        """Arguments and results as of `DSv4HybridSelfAttention`."""
        attended, aux = self.attention(self.attention_norm(x), segment_ids, positions, loss_mask)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), aux

    def init_cache(self, batch: int, max_length: int) -> AttentionCache:
        """An empty cache for `decode`; see `CompressedSparseAttention.init_cache`."""
        return self.attention.init_cache(batch, max_length)

    def decode(
        self, x: Float[Array, "batch tokens hidden"], cache: AttentionCache
    ) -> tuple[Float[Array, "batch tokens hidden"], AttentionCache]:
        """Arguments and results as of `DSv4HybridSelfAttention.decode`."""
        attended, cache = self.attention.decode(self.attention_norm(x), cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(Switches, nnx.Module):
    """Token ids to logits.

    The layers are a Python loop, for they differ in compress ratio. A switch of all layers is flipped by
    `model.fuse_inv_rope = True`, that of one by `model.layers[i].attention.fuse_inv_rope = True`. Read off the model, a
    switch is what all layers have; where they differ, that is an AttributeError.
    """

    SWITCHES, CHOICES = DSv4HybridSelfAttention.SWITCHES, DSv4HybridSelfAttention.CHOICES

    fuse_inv_rope = forwarded("fuse_inv_rope", lambda model: model.layers)
    fuse_kv_index_remap = forwarded("fuse_kv_index_remap", lambda model: model.layers)
    postmix_backward = forwarded("postmix_backward", lambda model: model.layers)
    implementation = forwarded("implementation", lambda model: model.layers)

    def __init__(
        self,
        cfg: DSv4Config,
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
          rngs: source of the initial values.
          fuse_inv_rope, fuse_kv_index_remap, postmix_backward, implementation: every layer's switches, as of
            `DSv4HybridSelfAttention`.

        Raises:
          ValueError, TypeError: as the layer does.
        """
        fusions = {
            "fuse_inv_rope": cfg.fuse_inv_rope if fuse_inv_rope is None else fuse_inv_rope,
            "fuse_kv_index_remap": cfg.fuse_kv_index_remap if fuse_kv_index_remap is None else fuse_kv_index_remap,
        }
        # Built off and switched on behind, so that a fusion without effect is reported once and not by every layer.
        off = dict.fromkeys(fusions, False)
        others = {"postmix_backward": postmix_backward, "implementation": implementation}
        param_dtype = jnp.dtype(cfg.param_dtype)
        self.cfg = cfg
        self.embedding = nnx.Param(
            0.02 * jax.random.normal(rngs.params(), (cfg.vocab_size, cfg.hidden_size), param_dtype)
        )
        self.layers = nnx.List([DecoderBlock(cfg, i, rngs=rngs, **off, **others) for i in range(cfg.num_hidden_layers)])
        self.norm = rms_norm(cfg, cfg.hidden_size)
        for name, value in fusions.items():
            setattr(self, name, value)
        warn_never_active(cfg, **fusions)

    def __call__(
        self,
        token_ids: Int[Array, "batch tokens"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
        loss_mask: Array | None = None,
    ) -> tuple[Float[Array, "batch tokens vocab"], dict[str, Float[Array, ""]]]:
        """Scores the next token at every token.

        Args:
          token_ids: ids in [0, vocab_size); any other one is embedded as zeros.
          segment_ids: document of each token, 0 for padding; None: every row is one document.
          positions: rotary positions, int [tokens] or [batch, tokens]; None: counted within the document.
          loss_mask: [batch, tokens] bools or numbers, which tokens count in the auxiliary losses; None: all that are no
            padding.

        Returns:
          f32 logits, and the auxiliary losses by name, each summed over the layers.
        """
        x = self._embedded(token_ids)
        aux = {}
        for layer in self.layers:
            x, layer_aux = layer(x, segment_ids, positions, loss_mask)
            for name, value in layer_aux.items():
                aux[name] = aux.get(name, 0.0) + value
        return self._logits(x), aux

    def init_cache(self, batch: int, max_length: int) -> tuple[AttentionCache, ...]:
        """Empty caches for `decode`, one a layer; see `CompressedSparseAttention.init_cache`."""
        return tuple(layer.init_cache(batch, max_length) for layer in self.layers)

    def decode(
        self, token_ids: Int[Array, "batch tokens"], cache: tuple[AttentionCache, ...]
    ) -> tuple[Float[Array, "batch tokens vocab"], tuple[AttentionCache, ...]]:
        """Scores the next token at each of the next tokens of a sequence that is one document.

        Args:
          token_ids: the next tokens; a whole prompt, or the one token chosen last.
          cache: of the tokens before, from `init_cache` or the last call.

        Returns:
          f32 logits and the new caches.
        """
        if len(cache) != len(self.layers):
            raise ValueError(f"cache: got {len(cache)} caches, wanted {len(self.layers)}, one for each layer")
        x, caches = self._embedded(token_ids), []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x, layer_cache = layer.decode(x, layer_cache)
            caches.append(layer_cache)
        return self._logits(x), tuple(caches)

    def _embedded(self, token_ids):
        token_ids = numerics.integers("token_ids", token_ids)
        if token_ids.ndim != 2:
            raise ValueError(f"token_ids: got shape {token_ids.shape}, wanted [batch, tokens]")
        return gather_rows(*dispatch.align_manual_axes(self.embedding[...], token_ids)).astype(self.cfg.dtype)

    def _logits(self, x):
        head = self.embedding[...].astype(self.cfg.dtype)
        return jnp.einsum("bth,vh->btv", self.norm(x), head, preferred_element_type=jnp.float32)

    def explain_fusions(self, token_ids=None) -> dict[str, dict[str, FusionStatus]]:
        """What every fusion of every layer does and why.

        Args:
          token_ids: the input, or anything with its shape; None: the batch is unknown.

        Returns:
          {"layers.0": {"fuse_inv_rope": FusionStatus, ...}, ...}, see `DSv4HybridSelfAttention.explain_fusions`.
        """
        return {f"layers.{i}": layer.attention.explain_fusions(token_ids) for i, layer in enumerate(self.layers)}
