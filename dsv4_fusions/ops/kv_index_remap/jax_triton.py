"""Local to flat KV ids as a kernel in Triton's own language, launched through jax-triton."""

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array, Int, Int32

from dsv4_fusions import triton_launch

BLOCK = 1024
"""Ids per program, a power of two."""


@triton.jit
def local_to_flat_kv_index(
    local_ptr,
    flat_ptr,
    BATCH: tl.constexpr,
    ELEMENTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    KV_STEP: tl.constexpr,
):
    """One block of the ids of one batch entry."""
    program = tl.program_id(0)  # of [entries of a mapped axis, batch, blocks]
    table = program // BLOCKS
    block = program % BLOCKS
    lane = tl.arange(0, BLOCK)
    # Comparing block numbers, not element numbers: those of a large table do not fit 32 bits.
    mask = None
    if BLOCKS * BLOCK > ELEMENTS:
        mask = (block < BLOCKS - 1) | (lane < ELEMENTS - (BLOCKS - 1) * BLOCK)
    first = table.to(tl.int64) * ELEMENTS + block.to(tl.int64) * BLOCK
    local = tl.load(local_ptr + first + lane, mask)
    low = local.to(tl.int32)
    tl.store(flat_ptr + first + lane, tl.where(local >= 0, low + table % BATCH * KV_STEP, low), mask)


def local_to_flat(local_index: Int[Array, "batch tokens topk"], kv_len: int) -> Int32[Array, "batch*tokens topk"]:
    """`reference.local_to_flat` in flat blocks of each batch entry's table. Not for empty tables."""
    batch, tokens, topk = local_index.shape
    elements = tokens * topk
    blocks = -(-elements // BLOCK)

    def launch(local):
        return triton_launch.call(
            local_to_flat_kv_index,
            [local],
            [jax.ShapeDtypeStruct(local.shape, jnp.int32)],
            programs=len(local) * batch * blocks,
            num_warps=4,
            num_stages=1,
            BATCH=batch,
            ELEMENTS=elements,
            BLOCKS=blocks,
            BLOCK=BLOCK,
            KV_STEP=int(np.uint32(kv_len % 2**32).astype(np.int32)),
        )

    (flat,) = triton_launch.over_entries(launch)(local_index[None])
    return flat.reshape(batch * tokens, topk)
