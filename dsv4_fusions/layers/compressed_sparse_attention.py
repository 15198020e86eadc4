"""Attention of every head to one shared key/value row per token: window, compressed rows, or everything before."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_fusions.config import HCA_RATIO, DSv4Config
from dsv4_fusions.documents import DocumentBoundaries, compressed_groups
from dsv4_fusions.kv_index import causal_index, compressed_index, window_index
from dsv4_fusions.layers.compressor import Compressor
from dsv4_fusions.layers.switches import FusionStatus, Switches, never_active, warn_never_active
from dsv4_fusions.ops.kv_index_remap import remap_implementation
from dsv4_fusions.ops.sparse_attention import sparse_attention


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
        if self.ratio == -1:
            tables = [causal_index(tokens, boundaries)]
        else:
            tables = [window_index(tokens, self.cfg.sliding_window, boundaries)]
        if self.compressor is not None:
            groups = None if boundaries is None else compressed_groups(boundaries, self.ratio)
            compressed = self.compressor(x, groups, positions)
            if compressed is not None:
                kv = jnp.concatenate([kv, compressed], axis=1)
                tables.append(compressed_index(tokens, self.ratio, tokens, groups))
        index = jnp.concatenate(tables, axis=-1)
        return sparse_attention(
            q,
            kv,
            jnp.broadcast_to(index, (batch, *index.shape[-2:])),
            self.sink[...],
            backend=self.cfg.sparse_attention_backend,
            fuse_kv_index_remap=self._remap_status(batch).active,
        )

    def explain_fusions(self, q=None) -> dict[str, FusionStatus]:
        """What the fusion of this module does, without running it.

        Args:
          q: array, or anything with its shape, [batch, ...]; None: the batch is unknown.

        Returns:
          {"fuse_kv_index_remap": FusionStatus}.
        """
        return {"fuse_kv_index_remap": self._remap_status(None if q is None else q.shape[0])}

    def _remap_status(self, batch):
        never = never_active(self.cfg).get("fuse_kv_index_remap")
        if never is not None:
            return FusionStatus(False, None, never)
        implementation = remap_implementation()
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
            f"compress_ratios[{layer_index}] = {ratio} waits for the issue 'Complete the layers'; "
            f"-1, 0 and {HCA_RATIO} are built"
        )
    return ratio
