"""Attention of every head to one shared key/value row per token: window, compressed rows, or everything before."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions.config import HCA_RATIO, DSv4Config
from dsv4_fusions.documents import DocumentBoundaries, compressed_groups
from dsv4_fusions.kv_index import causal_index, compressed_index, window_index
from dsv4_fusions.layers.compressor import Compressor
from dsv4_fusions.layers.switches import FusionStatus, Switches, never_active, warn_never_active
from dsv4_fusions.ops.kv_index_remap import remap_implementation
from dsv4_fusions.ops.sparse_attention import check_backend, sparse_attention


class CompressedSparseAttention(Switches, nnx.Module):
    """The core attention of a hybrid layer: keys are values, one head of them, and each head has a sink in its softmax.

    What a token attends to follows from the layer's compress ratio: -1, every token of its document up to itself;
    0, the last `sliding_window` of those; 128, that window and every complete compressed row of its document. The rows
    are handed to the sparse attention as a table of ids, local to the batch entry.

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
          ValueError: a layer that the configuration does not have.
          NotImplementedError: a compress ratio whose layer is not built yet.
        """
        self.cfg = cfg
        self.ratio = _built_ratio(cfg, layer_index)
        check_backend(cfg.sparse_attention_backend)
        self.fuse_kv_index_remap = cfg.fuse_kv_index_remap if fuse_kv_index_remap is None else fuse_kv_index_remap
        warn_never_active(cfg, fuse_kv_index_remap=self.fuse_kv_index_remap)
        self.sink = nnx.Param(jnp.zeros((cfg.num_attention_heads,), jnp.float32))
        self.compressor = Compressor(cfg, self.ratio, layer_index, rngs=rngs) if self.ratio == HCA_RATIO else None

    def __call__(
        self,
        q: Float[Array, "batch tokens heads head_dim"],
        kv: Float[Array, "batch tokens head_dim"],
        x: Float[Array, "batch tokens hidden"],
        boundaries: DocumentBoundaries | None = None,
        positions: Int[Array, "*batch tokens"] | None = None,
    ) -> Float[Array, "batch tokens heads head_dim"]:
        """Attends, causally and within each document.

        Args:
          q: rotated queries.
          kv: rotated key/value rows.
          x: hidden states, from which the compressed rows are made.
          boundaries: documents of the rows [batch, tokens]; None: every row is one document.
          positions: rotary positions of the tokens, int [tokens] or [batch, tokens]; None: counted within the document.

        Returns:
          Array like `q`, still rotated. Rows of padding tokens are 0.
        """
        batch, tokens, _ = kv.shape
        groups = None
        if self.compressor is not None:
            groups = None if boundaries is None else compressed_groups(boundaries, self.ratio)
            compressed = self.compressor(x, groups, positions)
            if compressed is not None:
                kv = jnp.concatenate([kv, compressed], axis=1)
        index = self._index(tokens, boundaries, groups)
        index = jnp.broadcast_to(index, (batch, *index.shape[-2:]))
        return sparse_attention(
            q,
            kv,
            index,
            self.sink[...],
            backend=self.cfg.sparse_attention_backend,
            fuse_kv_index_remap=self._remap_status(index).active,
        )

    def explain_fusions(self, q=None) -> dict[str, FusionStatus]:
        """What the fusion of this module does, without running it.

        Args:
          q: array, or anything with its shape, [batch, tokens, ...]; None: the batch is unknown.

        Returns:
          {"fuse_kv_index_remap": FusionStatus}.
        """
        if q is None:
            return {"fuse_kv_index_remap": self._remap_status(None)}
        batch, tokens = q.shape[:2]
        table = jax.eval_shape(lambda: self._index(tokens))
        return {"fuse_kv_index_remap": self._remap_status(jax.ShapeDtypeStruct((batch, *table.shape), table.dtype))}

    def _index(self, tokens, boundaries=None, groups=None):
        """Local ids of the rows that each token attends to, [tokens, topk], or [batch, tokens, topk] with documents."""
        if self.ratio == -1:
            return causal_index(tokens, boundaries)
        window = window_index(tokens, self.cfg.sliding_window, boundaries)
        if self.compressor is None:
            return window
        return jnp.concatenate([window, compressed_index(tokens, self.ratio, tokens, groups)], axis=-1)

    def _remap_status(self, index):
        """The status for a table of this shape [batch, tokens, topk]; None: unknown."""
        never = never_active(self.cfg).get("fuse_kv_index_remap")
        if never is not None:
            return FusionStatus(False, None, never)
        batch, elements = (None, 0) if index is None else (index.shape[0], index.shape[1] * index.shape[2])
        implementation = remap_implementation(elements=elements)
        if not self.fuse_kv_index_remap:
            return FusionStatus(False, implementation, "fuse_kv_index_remap is False")
        if batch == 1:
            return FusionStatus(False, None, "batch 1: a reshape")
        reason = "batch unknown: fused above 1, a reshape at 1" if batch is None else f"batch {batch}"
        return FusionStatus(True, implementation, reason)


def _built_ratio(cfg, layer_index):
    if not 0 <= layer_index < cfg.num_hidden_layers:
        raise ValueError(f"layer_index: got {layer_index}, wanted 0 to {cfg.num_hidden_layers - 1}")
    ratio = cfg.compress_ratios[layer_index]
    if ratio not in (-1, 0, HCA_RATIO):
        raise NotImplementedError(
            f"compress_ratios[{layer_index}] = {ratio} is not built yet; -1, 0 and {HCA_RATIO} are"
        )
    return ratio
