"""What kernels on Pallas' Mosaic GPU backend share."""

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.pallas import mosaic_gpu as plgpu

_MOST_ENTRIES = 65_535  # of a mapped axis in one launch


def tiled(dtype) -> tuple:
    """The transforms of a tile in shared memory that the matrix instruction reads."""
    return (plgpu.TilingTransform((8, 128 // np.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))


def divmod_(a, n: int):
    """Quotient and remainder for a >= 0."""
    n = np.int32(n)  # a Python int would be int64 under jax_enable_x64
    return lax.div(a, n), lax.rem(a, n)


def over_few_entries(kernel):
    """The kernel, with a rule for vmap that holds for any number of entries.

    Its own makes the mapped axis one of the grid's, and all but the first of those stop at 65,535.
    """

    @custom_vmap
    def mappable(*operands):
        return kernel(*operands)

    @mappable.def_vmap
    def rule(axis_size, mapped, *operands):
        entries = [x for x, is_mapped in zip(operands, mapped, strict=True) if is_mapped]

        def one(entry):
            mine = iter(entry)
            return kernel(*(next(mine) if is_mapped else x for x, is_mapped in zip(operands, mapped, strict=True)))

        if axis_size <= _MOST_ENTRIES:
            results = jax.vmap(one)(entries)
        else:
            results = lax.map(one, entries, batch_size=_MOST_ENTRIES)
        return results, [True] * len(results)

    return mappable
