"""Launches kernels written in Triton's own language through jax-triton, under vmap and shard_map too."""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from dsv4_fusions import dispatch


def call(kernel, operands, outputs, programs: int, **options) -> list[jax.Array]:
    """One launch of `programs` programs on grid axis 0: the others stop at 65,535.

    Args:
      kernel: a `triton.jit` function of the operands' pointers, the outputs' pointers and constants. The last of its
        parameters *_ptr, as far as there are more of them than arrays, get None.
      operands: arrays.
      outputs: types of the arrays that it writes; their manual axes are those of the operands.
      programs: size of the grid.
      **options: num_warps, num_stages, and the kernel's constants by name.

    Returns:
      The outputs.
    """
    import jax_triton  # it refuses to load where JAX has no GPU support, and kernels compile without it

    operands = dispatch.align_manual_axes(*operands)
    arrays = len(operands) + len(outputs)
    absent = {name: None for name in kernel.arg_names[arrays:] if name.endswith("_ptr")}
    # Of the target that the program is traced for; jax-triton would ask the first GPU of the machine.
    major, minor = dispatch.target().capability
    results = jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_shape=list(outputs),
        grid=(programs,),
        name=kernel.__name__,
        compute_capability=10 * major + minor,
        **absent,
        **options,
    )
    return list(dispatch.align_manual_axes(*results, operands[0])[:-1])  # jax-triton's types leave manual axes out


def over_entries(launch, shareable: int = 0):
    """Gives `launch` the rule for vmap that jax-triton's calls lack: a mapped axis becomes more entries.

    Args:
      launch: takes arrays [entries, ...] and returns a list of such.
      shareable: how many of its first operands it takes as [1, ...] too, one for all entries.

    Returns:
      A function like `launch`.
    """

    @custom_vmap
    def mappable(*operands):
        return launch(*operands)

    @mappable.def_vmap
    def rule(axis_size, mapped, *operands):
        entries = operands[-1].shape[1 if mapped[-1] else 0]

        def join(x, is_mapped):
            x = x if is_mapped else x[None]
            x = jnp.broadcast_to(x, (axis_size, entries, *x.shape[2:]))
            return x.reshape(axis_size * entries, *x.shape[2:])

        stay_shared = not any(mapped[:shareable]) and all(len(x) == 1 for x in operands[:shareable])
        first = shareable if stay_shared else 0
        results = mappable(*operands[:first], *map(join, operands[first:], mapped[first:]))
        return [x.reshape(axis_size, entries, *x.shape[1:]) for x in results], [True] * len(results)

    return mappable
