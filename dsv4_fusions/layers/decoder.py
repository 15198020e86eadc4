"""A decoder: embedding, pre-norm blocks of hybrid attention and SwiGLU, and a head tied to the embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions import dispatch
from dsv4_fusions.config import DSv4Config
from dsv4_fusions.gather import gather_rows
from dsv4_fusions.layers.dsv4_attention import DSv4HybridSelfAttention
from dsv4_fusions.layers.norms import RMSNorm
from dsv4_fusions.layers.switches import FusionStatus, Switches, forwarded, warn_never_active


class SwiGLU(nnx.Module):
    """The gated feed-forward network `down(silu(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(self, cfg: DSv4Config, *, rngs: nnx.Rngs):
        """Makes the three projections.

        Args:
          cfg: the configuration.
          rngs: source of the initial values.
        """

        def linear(width_in, width_out):
            dtypes = {"dtype": jnp.dtype(cfg.dtype), "param_dtype": jnp.dtype(cfg.param_dtype)}
            return nnx.Linear(width_in, width_out, use_bias=False, rngs=rngs, **dtypes)

        self.gate = linear(cfg.hidden_size, cfg.intermediate_size)
        self.up = linear(cfg.hidden_size, cfg.intermediate_size)
        self.down = linear(cfg.intermediate_size, cfg.hidden_size)

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
        param_dtype = jnp.dtype(cfg.param_dtype)
        self.attention_norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, param_dtype=param_dtype)
        self.attention = DSv4HybridSelfAttention(cfg, layer_index, rngs=rngs, **switches)
        self.mlp_norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, param_dtype=param_dtype)
        self.mlp = SwiGLU(cfg, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "batch tokens hidden"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
    ) -> tuple[Float[Array, "batch tokens hidden"], dict[str, Float[Array, ""]]]:
        """Arguments and results as of `DSv4HybridSelfAttention`."""
        attended, aux = self.attention(self.attention_norm(x), segment_ids, positions)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), aux


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
          ValueError, TypeError, NotImplementedError: as the layer does.
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
        self.norm = RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps, param_dtype=param_dtype)
        for name, value in fusions.items():
            setattr(self, name, value)
        warn_never_active(cfg, **fusions)

    def __call__(
        self,
        token_ids: Int[Array, "batch tokens"],
        segment_ids: Int[Array, "batch tokens"] | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
    ) -> tuple[Float[Array, "batch tokens vocab"], dict[str, Float[Array, ""]]]:
        """Scores the next token at every token.

        Args:
          token_ids: ids in [0, vocab_size); any other one is embedded as zeros.
          segment_ids: document of each token, 0 for padding; None: every row is one document.
          positions: rotary positions, int [tokens] or [batch, tokens]; None: counted within the document.

        Returns:
          f32 logits, and the auxiliary losses by name, each summed over the layers.
        """
        x = gather_rows(*dispatch.align_manual_axes(self.embedding[...], token_ids)).astype(self.cfg.dtype)
        aux = {}
        for layer in self.layers:
            x, layer_aux = layer(x, segment_ids, positions)
            for name, value in layer_aux.items():
                aux[name] = aux.get(name, 0.0) + value
        head = self.embedding[...].astype(self.cfg.dtype)
        return jnp.einsum("bth,vh->btv", self.norm(x), head, preferred_element_type=jnp.float32), aux

    def explain_fusions(self, token_ids=None) -> dict[str, dict[str, FusionStatus]]:
        """What every fusion of every layer does and why.

        Args:
          token_ids: the input, or anything with its shape; None: the batch is unknown.

        Returns:
          {"layers.0": {"fuse_inv_rope": FusionStatus, ...}, ...}, see `DSv4HybridSelfAttention.explain_fusions`.
        """
        return {f"layers.{i}": layer.attention.explain_fusions(token_ids) for i, layer in enumerate(self.layers)}
