"""Tables of local ids, and their flat ids by NumPy: independent of the op, for the tests on a CPU and on a GPU."""

import numpy as np


def random_ids(shape, kv_len, empty=0.3, dtype=np.int32, seed=0):
    """Ids of rows below kv_len; a share of the slots is empty."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, min(kv_len, 2**31), shape, dtype)
    ids[rng.random(shape, np.float32) < empty] = -1
    return ids


def flat_rows(ids, entry, kv_len):
    """Flat ids of a table of one batch entry: exact Python offset, 64-bit addition, low 32 bits at the end."""
    wide = ids.astype(np.int64)
    flat = np.where(wide >= 0, wide + entry * kv_len % 2**32, wide)
    return flat.astype(np.uint32).view(np.int32)


def flat_ids(ids, kv_len):
    """[batch, tokens, topk] to [batch * tokens, topk]."""
    flat = [flat_rows(table, entry, kv_len) for entry, table in enumerate(ids)]
    return np.concatenate(flat)
