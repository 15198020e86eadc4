"""What layers keep of the tokens so far: explicit pytrees, handed from one `decode` to the next."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
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
    ratio: int = dataclasses.field(default=0, metadata={"static": True})
    """The layer's compress ratio: the same arrays mean something else to another kind of layer."""


def put_rows(
    rows: Float[Array, "batch rows channels"],
    new: Float[Array, "batch tokens channels"],
    position: Int32[Array, "tokens"],
) -> Float[Array, "batch rows channels"]:
    """`rows` with the new ones at their positions; those behind the last row drop."""
    return rows.at[:, position].set(new, mode="drop", unique_indices=True)


def check_sizes(batch: int, max_length: int) -> None:
    """Raises unless both are Python or NumPy integers of at least 0; the arguments of every `init_cache`."""
    for name, size in (("batch", batch), ("max_length", max_length)):
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise TypeError(f"{name}: got {type(size).__name__}, wanted an integer")
        if size < 0:
            raise ValueError(f"{name}: got {size}, wanted at least 0")


def check_cache(
    cache: AttentionCache, x: Float[Array, "batch tokens hidden"], init_cache: Callable[[int, int], AttentionCache]
) -> None:
    """Raises unless the cache is one that `init_cache` makes for as many batch entries as x has.

    Args:
      cache: what a caller handed to `decode`.
      x: hidden states.
      init_cache: the layer's method.

    Raises:
      TypeError: no cache at all.
      ValueError: one for another batch, or of another layer.
    """
    if not isinstance(cache, AttentionCache):
        raise TypeError(f"cache: got {type(cache).__name__}, wanted an AttentionCache, which init_cache makes")
    if cache.kv.shape[0] != x.shape[0]:
        raise ValueError(f"cache: got one for a batch of {cache.kv.shape[0]}, wanted {x.shape[0]}, the batch of x")
    # Axes that differ between two lengths follow the length, so that any size of theirs will do.
    short, long = (jax.eval_shape(lambda length=length: init_cache(x.shape[0], length)) for length in (0, 2**15))
    if jax.tree.structure(cache) != jax.tree.structure(short):
        wanted = f"the fields that are not None and the ratio of this layer's, {_fields(short)}"
        raise ValueError(f"cache: got {_fields(cache)}, wanted {wanted}")
    for (path, got), a, b in zip(
        jax.tree_util.tree_leaves_with_path(cache), jax.tree.leaves(short), jax.tree.leaves(long), strict=True
    ):
        wanted = [n if n == m else None for n, m in zip(a.shape, b.shape, strict=True)]
        fits = len(got.shape) == len(wanted) and all(n in (m, None) for m, n in zip(got.shape, wanted, strict=True))
        if not fits or got.dtype != a.dtype:
            name = "cache" + jax.tree_util.keystr(path)
            raise ValueError(f"{name}: got {got.dtype}{list(got.shape)}, wanted {a.dtype}{wanted} (None: any size)")


def _fields(cache):
    names = [name for name, value in vars(cache).items() if name != "ratio" and value is not None]
    return f"{', '.join(names)} of ratio {cache.ratio}"
