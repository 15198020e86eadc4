"""What the kernels serve, their tile sizes, which fix the order of every sum, and what the two Triton ones share.

Pallas and Triton load only with the kernels, and this does not load them.
"""

import jax.numpy as jnp

from dsv4_fusions import rope

DTYPES = ("bfloat16", "float16")
"""What all kernels serve."""
MOSAIC_HEADS = 64
"""What the Mosaic kernel serves."""
MOSAIC_CHANNELS = 128
"""Channels of a tile of the Mosaic kernel; it serves multiples of them."""
MOST_HEADS = 128
"""What the Triton kernels mix at most."""

# The rest is of the two implementations in Triton.

LEAST = 16
"""Extent of a tensor-core operand."""
CHANNELS = 128
"""Channels that the forward mixes at a time: measured best with 64 heads, where 64 cost 5 % of the forward."""
BACKWARD_CHANNELS = 64
CHUNK = 8
"""Tokens of a partial weight gradient. It fixes the reduction tree, so it must not depend on the chip."""


def block(extent: int) -> int:
    """The least size of an array in a kernel, a power of two, that holds `extent` elements."""
    return max(LEAST, 1 << max(extent - 1, 0).bit_length())


def backward_stages(weights) -> int:
    """Tiles on their way at a time in the backward: as many as pay, and less where 99 KiB of shared memory are to do.

    At 16384 x 64 x 512, 4 took 1.00 ms, 3 took 1.04 and 2 took 1.25.
    """
    heads = weights[0].shape[-2]  # of a group
    return 4 if heads <= 64 else 2


def padded_weights(weights):
    """(m,) or (u, v) as [groups, block, block], zeros beyond their own elements."""
    groups = 1 if len(weights) == 1 else weights[0].shape[0]

    def pad(w):
        widths = [(0, 0)] * (w.ndim - 2) + [(0, block(n) - n) for n in w.shape[-2:]]
        w = jnp.pad(w, widths)
        return w.reshape(groups, *w.shape[-2:])

    return [pad(w) for w in weights]


def table_rows(tables: rope.RopeTables | None, x):
    """Cosines and sines for x [..., tokens, heads, head_dim], each [all tokens, rope_dim]; none without tables."""
    if tables is None:
        return []
    prepared = rope.prepare_tables(tables, x.dtype)
    rope_dim = tables.cos.shape[-1]
    return [jnp.broadcast_to(t, (*x.shape[:-2], rope_dim)).reshape(-1, rope_dim) for t in (prepared.cos, prepared.sin)]
