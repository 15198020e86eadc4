"""Local to flat KV ids in plain jnp: the specification, and the XLA implementation."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32


def local_to_flat(local_index: Int[Array, "batch tokens topk"], kv_len: int) -> Int32[Array, "batch*tokens topk"]:
    """Adds `i * kv_len` modulo 2^32 to the ids >= 0 of batch entry i; negative ids keep their low 32 bits."""
    batch, tokens, topk = local_index.shape
    if batch == 1:  # no offset, and so nothing to add
        return local_index.astype(jnp.int32).reshape(tokens, topk)
    offset = (np.arange(batch, dtype=np.uint32) * np.uint32(kv_len % 2**32)).view(np.int32)
    low = local_index.astype(jnp.int32)
    flat = jnp.where(local_index >= 0, low + offset[:, None, None], low)
    return flat.reshape(batch * tokens, topk)
