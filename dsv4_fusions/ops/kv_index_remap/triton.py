"""Local to flat KV ids as a Pallas kernel of the Triton backend."""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int, Int32

from dsv4_fusions import dispatch

BLOCK = 1024
"""Ids per program, a power of two."""


def _entry_and_block(program, blocks):
    """Batch entry of a program, and number of its block within that entry's table."""
    blocks = np.int32(blocks)  # a Python int would be int64 under jax_enable_x64
    return lax.div(program, blocks), lax.rem(program, blocks)


def _kernel(local_ref, flat_ref, *, blocks, kv_step, tail):
    entry, block = _entry_and_block(pl.program_id(0), blocks)
    # Comparing block numbers, not element numbers: those of a large table do not fit 32 bits.
    mask = None if tail == BLOCK else (block < blocks - 1) | (jnp.arange(BLOCK) < tail)
    local = plgpu.load(local_ref, mask=mask)
    low = local.astype(jnp.int32)
    plgpu.store(flat_ref, jnp.where(local >= 0, low + entry * kv_step, low), mask=mask)


def local_to_flat(local_index: Int[Array, "batch tokens topk"], kv_len: int) -> Int32[Array, "batch*tokens topk"]:
    """`reference.local_to_flat` in flat blocks of each batch entry's table. Not for empty tables.

    One program per row, with topk rounded up to a power of two, would leave three of eight lanes idle at topk 640.
    """
    batch, tokens, topk = local_index.shape
    elements = tokens * topk
    blocks = pl.cdiv(elements, BLOCK)
    # Everything on grid axis 0: the others stop at 65,535 programs.
    spec = pl.BlockSpec((None, BLOCK), lambda program: _entry_and_block(program, blocks))
    kernel = functools.partial(
        _kernel,
        blocks=blocks,
        kv_step=np.uint32(kv_len % 2**32).astype(np.int32),
        tail=elements - (blocks - 1) * BLOCK,
    )
    flat = pl.pallas_call(
        kernel,
        grid=(batch * blocks,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=dispatch.output_type((batch, elements), jnp.int32, local_index),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=dispatch.interpreting(),
        name="local_to_flat_kv_index",
    )(local_index.reshape(batch, elements))
    return flat.reshape(batch * tokens, topk)
