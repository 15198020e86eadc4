"""The postmix in XLA code, with or without the inverse rotation."""

import jax
import jax.numpy as jnp
from jax import lax

from dsv4_fusions import dispatch, rope
from dsv4_fusions.ops.inv_rope_postmix.reference import mix

_BLOCKS = 16  # of tokens: one block's copies are the temporary memory


def forward(m, x, tables: rope.RopeTables | None):
    """`mix(m, x)`, or `mix(m, inv_rope(x))` where tables are given; x [..., tokens, heads, head_dim].

    On a CPU the product is taken a block of tokens at a time and written into the result in place. That spares the
    head-major copy of everything that XLA's einsum makes there. With the rotation, only a block of rotated rows exists
    at a time, and its product has the shape of the one without: a library that orders its sums by the size of the
    product (seen on a CPU for narrow ones) does so alike on both paths. Elsewhere XLA's own product is as good without
    the rotation, and the fused op does not come here.
    """
    if tables is None and dispatch.target().platform != "cpu":
        return mix(m, x)
    tokens = x.shape[-3]
    block = -(-tokens // _BLOCKS)

    def write_block(i, out):
        start = jnp.minimum(i * block, tokens - block)  # the last block overlaps: it writes the same bits again
        take = lambda a, axis: lax.dynamic_slice_in_dim(a, start, block, axis)  # noqa: E731
        rows = take(x, x.ndim - 3)
        if tables is not None:
            nope = x.shape[-1] - tables.cos.shape[-1]
            tail = rope.rotate_tail(rows[..., nope:], jax.tree.map(lambda t: take(t, t.ndim - 2), tables), inverse=True)
            # The barrier: XLA on a CPU fuses a rotation into an update in place and then reads what it overwrote.
            rows = lax.dynamic_update_slice_in_dim(rows, lax.optimization_barrier(tail), nope, axis=-1)
        return lax.dynamic_update_slice_in_dim(out, mix(m, lax.optimization_barrier(rows)), start, axis=-3)

    out, _ = dispatch.align_manual_axes(jnp.zeros(x.shape, x.dtype), x)
    return lax.fori_loop(0, -(-tokens // block), write_block, out)
