"""What layers keep of the tokens so far: explicit pytrees, handed from one `decode` to the next."""

import dataclasses

import jax
from jaxtyping import Array, Float, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CompressorCache:
    """What a compressor keeps between two calls of `extend`."""

    kv: Float[Array, "batch before channels"]
    """Projected rows of the last tokens: what an open group, and the group before it, may still need."""
    score: Float[Array, "batch before channels"]
    """Scores of the same tokens, without the position embedding."""
    rows: Float[Array, "batch slots head_dim"]
    """Compressed rows so far, zeros behind them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCache:
    """What an attention layer keeps between two calls of `decode`."""

    length: Int32[Array, ""]
    """How many tokens there are, the same for all batch entries."""
    kv: Float[Array, "batch rows channels"]
    """Raw rows: of every token by position where a layer attends to all, else of the last `sliding_window` - 1."""
    compressor: CompressorCache | None = None
    """Of the layer's compressor."""
    indexer: CompressorCache | None = None
    """Of the indexer's compressor, where the layer selects compressed rows."""
    index_keys: Float[Array, "batch rows index_head_dim"] | None = None
    """The indexer's key of every token by position, where the layer selects tokens."""


def put_rows(
    rows: Float[Array, "batch rows channels"],
    new: Float[Array, "batch tokens channels"],
    position: Int32[Array, "tokens"],
) -> Float[Array, "batch rows channels"]:
    """`rows` with the new ones at their positions; those behind the last row drop."""
    return rows.at[:, position].set(new, mode="drop", unique_indices=True)


def check_batch(cache: AttentionCache, x: Float[Array, "batch tokens hidden"]) -> None:
    """Raises ValueError unless the cache is for as many batch entries as x has."""
    if cache.kv.shape[0] != x.shape[0]:
        raise ValueError(f"cache: got one for a batch of {cache.kv.shape[0]}, wanted {x.shape[0]}, the batch of x")
