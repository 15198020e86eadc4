"""Root-mean-square normalisation, with and without a weight."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def rms_normalize(x: Float[Array, "*batch channels"], eps: float) -> Float[Array, "*batch channels"]:
    """Divides each row by its root mean square; statistics and division in f32, one rounding.

    Args:
      x: rows to normalise.
      eps: added to the mean square.

    Returns:
      Array like `x`.
    """
    wide = x.astype(jnp.float32)
    return (wide * _reciprocal_rms(wide, eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMS normalisation with a learned weight per channel."""

    def __init__(self, channels: int, *, eps: float, param_dtype=jnp.float32):
        """Makes the weight, all ones.

        Args:
          channels: width of the normalised axis.
          eps: added to the mean square.
          param_dtype: dtype of the weight.
        """
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((channels,), param_dtype))

    def __call__(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """Normalises and scales in f32, with one rounding to the dtype of `x`."""
        wide = x.astype(jnp.float32)
        return (wide * _reciprocal_rms(wide, self.eps) * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def _reciprocal_rms(wide, eps):
    return jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
