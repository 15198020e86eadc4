"""Zero heads and channels up to the sizes that attention kernels are made for.

The padding is exact: a zero channel adds nothing to a score, and a head whose output is dropped gives the rows no
gradient. `jax.grad` through these functions reaches the real heads and channels alone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

NO_SINK = -1e30
"""Sink logit of a padded head: next to nothing in any softmax, yet finite, since kernels may not take -inf."""


def pad_heads(
    q: Float[Array, "*batch heads head_dim"], sink: Float[Array, "heads"], multiple: int = 64
) -> tuple[Float[Array, "*batch heads_padded head_dim"], Float[Array, "heads_padded"]]:
    """Appends heads with zero queries and no sink up to a multiple.

    Args:
      q: queries.
      sink: sink logit of each head.
      multiple: the number of heads becomes the next multiple of this, at least 1.

    Returns:
      The padded queries and sinks. The output of a padded head is a mean of its rows: drop it, see `drop_padding`.

    Raises:
      ValueError: multiple < 1, or a sink of other heads.
    """
    if multiple < 1:
        raise ValueError(f"multiple: got {multiple}, wanted at least 1")
    heads = q.shape[-2]
    if sink.shape != (heads,):
        raise ValueError(f"sink: got shape {sink.shape}, wanted {(heads,)} to go with q of shape {q.shape}")
    padding = -heads % multiple
    return _pad(q, -2, padding), jnp.pad(sink, (0, padding), constant_values=NO_SINK)


def pad_latent(x: Float[Array, "*batch channels"], width: int = 512) -> Float[Array, "*batch width"]:
    """Appends zero channels, to be done to queries and rows alike.

    The default scale of `sparse_attention` follows the width of what it is given: pass that of the real channels.

    Args:
      x: queries or key/value rows.
      width: channels wanted, at least as many as there are.

    Returns:
      The padded array.

    Raises:
      ValueError: width below the number of channels.
    """
    if width < x.shape[-1]:
        raise ValueError(f"width: got {width}, wanted at least {x.shape[-1]}, the channels of x")
    return _pad(x, -1, width - x.shape[-1])


def drop_padding(
    out: Float[Array, "*batch heads_padded width"], heads: int, value_dim: int
) -> Float[Array, "*batch heads value_dim"]:
    """The way back from `pad_heads` and `pad_latent`: the output of the real heads and channels."""
    return out[..., :heads, :value_dim]


def _pad(x, axis, padding):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, padding)
    return jnp.pad(x, widths)
