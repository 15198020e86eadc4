"""The rotary tables of a layer: its base, its positions, its rounding, chosen in one place for every rotation in it."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dsv4_fusions import numerics
from dsv4_fusions.config import DSv4Config
from dsv4_fusions.documents import DocumentBoundaries
from dsv4_fusions.rope import RopeTables, rope_tables, rotate

Rope = tuple[float, Mapping[str, float] | None]


def token_positions(
    batch: int, tokens: int, boundaries: DocumentBoundaries | None, positions: Int[Array, "*batch tokens"] | None
) -> Int[Array, "*batch tokens"]:
    """The rotary position of every token: as given, else counted within its document, else its row.

    Args:
      batch: number of batch entries.
      tokens: length of the sequence.
      boundaries: documents of [batch, tokens] rows, or None for one document a row.
      positions: int [tokens] or [batch, tokens], or None.

    Returns:
      int32 [tokens] or [batch, tokens].

    Raises:
      TypeError: positions that are no integers.
      ValueError: positions of another shape.
    """
    if positions is None:
        return jnp.arange(tokens, dtype=jnp.int32) if boundaries is None else boundaries.pos_in_doc
    positions = numerics.integers("positions", positions)
    if positions.shape not in ((tokens,), (batch, tokens)):
        raise ValueError(f"positions: got shape {positions.shape}, wanted {(tokens,)} or {(batch, tokens)}")
    return positions.astype(jnp.int32)


def layer_tables(cfg: DSv4Config, rope: Rope, positions: Int[Array, "*batch tokens"]) -> RopeTables:
    """Tables of one layer, for its forward rotation, its compressor and its inverse rotation alike.

    The rotary base differs between the layers of one model, so an inverse rotation with a table from elsewhere would
    leave a residual rotation in the output, which nothing reports.

    Args:
      cfg: the configuration.
      rope: rotary base and YaRN parameters of the layer, from `cfg.layer_rope`.
      positions: int32 [..., tokens].

    Returns:
      Tables [..., tokens, rope_dim].
    """
    base, yarn = rope
    return rope_tables(positions, cfg.qk_rope_head_dim, base, yarn, cfg.rope_rounding, jnp.dtype(cfg.dtype))


def rotate_row(x: Float[Array, "batch tokens head_dim"], tables: RopeTables) -> Float[Array, "batch tokens head_dim"]:
    """`rotate` for rows of a single head."""
    return rotate(x[:, :, None], tables)[:, :, 0]


def hadamard(x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """Multiplies each row by the Hadamard matrix of its width, scaled to be orthogonal (Sylvester's construction).

    It spreads outliers over the channels and leaves inner products of two rotated rows as they were, up to rounding.

    Args:
      x: rows; the number of channels is a power of two.

    Returns:
      Array like `x`, accumulated in f32 and rounded once.
    """
    channels = x.shape[-1]
    index = np.arange(channels)
    ones = np.bitwise_count(index[:, None] & index) % 2
    matrix = jnp.asarray(1.0 - 2.0 * ones, x.dtype)  # +-1, exact in every dtype
    wide = jnp.einsum("...c,cd->...d", x, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return (wide * np.float32(channels**-0.5)).astype(x.dtype)
