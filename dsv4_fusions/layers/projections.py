"""What the attention layers share: projections, normalisations, recomputed segments, the check of their input."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.documents import DocumentBoundaries
from dsv4_fusions.layers.norms import RMSNorm


def linear(cfg: DSv4Config, width_in: int, width_out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A projection without bias, in the configuration's dtypes."""
    dtypes = {"dtype": jnp.dtype(cfg.dtype), "param_dtype": jnp.dtype(cfg.param_dtype)}
    return nnx.Linear(width_in, width_out, use_bias=False, rngs=rngs, **dtypes)


def rms_norm(cfg: DSv4Config, width: int) -> RMSNorm:
    """A normalisation with the configuration's eps and dtype."""
    return RMSNorm(width, eps=cfg.rms_norm_eps, param_dtype=jnp.dtype(cfg.param_dtype))


def recomputed(cfg: DSv4Config, segment: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, recomputed in the backward pass if the configuration's `remat` names the segment.

    Args:
      cfg: the configuration.
      segment: name of the segment.
      fn: function of arrays; what it reads of the module's parameters is saved, not recomputed.

    Returns:
      A function with the arguments and results of `fn`.
    """
    if segment not in cfg.remat:
        return fn
    # A function of its own for every trace: bound methods compare equal, and `jax.checkpoint` would find the trace
    # that it kept for an earlier one, with the switches of then.
    return jax.checkpoint(lambda *args: fn(*args))


def gated(cfg: DSv4Config, o: Array, x: Array, gate_proj: nnx.Linear) -> Array:
    """o times the sigmoid of a projection of x; the remat segment "gated_attn"."""
    return recomputed(cfg, "gated_attn", lambda o, x: o * jax.nn.sigmoid(gate_proj(x)))(o, x)


def without_padding(x: Array, boundaries: DocumentBoundaries | None) -> Array:
    """x with zeros in place of padding, whatever stands there: 0 times NaN would be NaN in outputs and gradients."""
    return x if boundaries is None else jnp.where(boundaries.is_valid[..., None], x, 0)


def check_input(cfg: DSv4Config, x, segment_ids=None, loss_mask=None) -> None:
    """Raises unless x is [batch, tokens, hidden] and the others have one entry for each of its tokens.

    Raises:
      TypeError: no array, x not floating point, or a mask of complex numbers.
      ValueError: another shape.
    """
    for name, array in (("x", x), ("segment_ids", segment_ids), ("loss_mask", loss_mask)):
        if not hasattr(array, "ndim") and not (array is None and name != "x"):
            raise TypeError(f"{name}: got {type(array).__name__}, wanted an array")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: got dtype {x.dtype}, wanted floating point")
    if loss_mask is not None and jnp.issubdtype(loss_mask.dtype, jnp.complexfloating):
        raise TypeError(f"loss_mask: got dtype {loss_mask.dtype}, wanted bools or real numbers")
    if x.ndim != 3 or x.shape[-1] != cfg.hidden_size:
        raise ValueError(f"x: got shape {x.shape}, wanted [batch, tokens, {cfg.hidden_size}]")
    for name, array, what in (("segment_ids", segment_ids, "id"), ("loss_mask", loss_mask, "weight")):
        if array is not None and array.shape != x.shape[:2]:
            raise ValueError(f"{name}: got shape {array.shape}, wanted {x.shape[:2]}, one {what} per token of x")
