"""Tables of local KV ids: which rows of its own batch entry's KV each query token reads.

All ids are int32; -1 is an empty slot. Rows of padding are empty. The tables of one layer are concatenated along the
last axis; their ids never collide, since compressed rows stand behind the raw ones in KV (`offset`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from dsv4_fusions.documents import CompressedGroups, DocumentBoundaries

EMPTY = -1


def _check_tokens(num_tokens: int, got: Int32[Array, "*batch tokens"], name: str) -> None:
    if got.shape[-1] != num_tokens:
        raise ValueError(f"{name}: got {got.shape[-1]} tokens, wanted num_tokens = {num_tokens}")


def _span(start: Int32[Array, "*batch tokens"], width: int) -> Int32[Array, "*batch tokens width"]:
    """`width` ids from each row's start up to the row itself."""
    rows = jnp.arange(start.shape[-1], dtype=jnp.int32)[:, None]
    ids = start[..., None] + jnp.arange(width, dtype=jnp.int32)
    return jnp.where(ids <= rows, ids, EMPTY)


def window_index(
    num_tokens: int, window: int, boundaries: DocumentBoundaries | None = None
) -> Int32[Array, "*batch tokens window"]:
    """Ids of the last `window` tokens of each token's document, itself included; empty slots trail.

    Args:
      num_tokens: length of the sequence.
      window: width of the table, at least 1.
      boundaries: documents of [..., num_tokens] rows, None for one document.

    Returns:
      [num_tokens, window] int32, with the leading axes of `boundaries` if given.

    Raises:
      ValueError: window < 1, or boundaries of another length.
    """
    if window < 1:
        raise ValueError(f"window: got {window}, wanted at least 1")
    start = jnp.maximum(jnp.arange(num_tokens, dtype=jnp.int32) - (window - 1), 0)
    if boundaries is None:
        return _span(start, window)
    _check_tokens(num_tokens, boundaries.doc_start, "boundaries")
    ids = _span(jnp.maximum(start, boundaries.doc_start), window)
    return jnp.where(boundaries.is_valid[..., None], ids, EMPTY)


def compressed_index(
    num_tokens: int, ratio: int, offset: int, groups: CompressedGroups | None = None
) -> Int32[Array, "*batch tokens slots"]:
    """Ids of every compressed slot that each token sees: the groups of its document that end at or before it.

    Args:
      num_tokens: length of the sequence.
      ratio: tokens per group, at least 1.
      offset: number of rows in KV ahead of the compressed ones.
      groups: of [..., num_tokens] rows and the same ratio, None for one document.

    Returns:
      [num_tokens, num_tokens // ratio] int32, with the leading axes of `groups` if given. Slot c stands in column c, so
      rows of later documents begin with empty slots.

    Raises:
      ValueError: ratio < 1, or groups of another length or ratio.
    """
    if ratio < 1:
        raise ValueError(f"ratio: got {ratio}, wanted at least 1")
    if groups is None:
        count = (jnp.arange(num_tokens, dtype=jnp.int32) + 1) // ratio
        start = jnp.zeros_like(count)
    else:
        start, count = groups.row_start, groups.row_count
        _check_tokens(num_tokens, count, "groups")
        if groups.token_index.shape[-1] != ratio:
            raise ValueError(f"groups: got a ratio of {groups.token_index.shape[-1]}, wanted {ratio}")
    slot = jnp.arange(num_tokens // ratio, dtype=jnp.int32)
    seen = (slot >= start[..., None]) & (slot < (start + count)[..., None])
    return jnp.where(seen, slot + offset, EMPTY)


def causal_index(num_tokens: int, boundaries: DocumentBoundaries | None = None) -> Int32[Array, "*batch tokens tokens"]:
    """Ids of every token of each token's document up to itself; empty slots trail.

    Args:
      num_tokens: length of the sequence.
      boundaries: documents of [..., num_tokens] rows, None for one document.

    Returns:
      [num_tokens, num_tokens] int32, with the leading axes of `boundaries` if given.

    Raises:
      ValueError: boundaries of another length.
    """
    return window_index(num_tokens, max(num_tokens, 1), boundaries)[..., :num_tokens]
