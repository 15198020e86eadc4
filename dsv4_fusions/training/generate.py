"""Text from a decoder: the prompt in one call, then byte after byte from its caches."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from dsv4_fusions.layers import Decoder
from dsv4_fusions.training.text import NUM_BYTES


@functools.partial(jax.jit, donate_argnames="cache")
def _next_byte(model, tokens, cache, key, temperature):
    """The byte behind `tokens` [1, tokens], and the caches with them in. Temperature 0 takes the likeliest byte."""
    logits, cache = model.decode(tokens, cache)
    logits = logits[:, -1, :NUM_BYTES]
    sampled = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, sampled, jnp.argmax(logits, axis=-1)).astype(jnp.int32), cache


def generate(model: Decoder, prompt: bytes, count: int, temperature: float = 1.0, seed: int = 0) -> Iterator[int]:
    """Continues a text.

    Args:
      model: a decoder of bytes.
      prompt: the text so far, one byte or more.
      count: bytes to generate.
      temperature: divides the logits before sampling; 0: always the likeliest byte.
      seed: of the sampling, a signed integer of 64 bits.

    Yields:
      `count` bytes, as integers.

    Raises:
      ValueError: an empty prompt, a negative count, a temperature that is negative or no number, a seed out of range.
    """
    if not prompt:
        raise ValueError("prompt: got nothing, wanted one byte or more")
    if count < 0:
        raise ValueError(f"count: got {count}, wanted 0 or more")
    if not temperature >= 0:
        raise ValueError(f"temperature: got {temperature}, wanted 0 or more")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: got {seed}, wanted a signed integer of 64 bits")
    return _generate(model, prompt, count, temperature, seed)


def _generate(model, prompt, count, temperature, seed):
    tokens = jnp.asarray([list(prompt)], jnp.int32)
    cache = model.init_cache(1, len(prompt) + count)
    for key in jax.random.split(jax.random.key(seed), count) if count else ():
        token, cache = _next_byte(model, tokens, cache, key, temperature)
        tokens = token[:, None]
        yield int(token[0])
