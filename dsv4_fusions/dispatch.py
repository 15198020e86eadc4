"""Which implementation of an op runs: the target's capability, the choice, its errors, and the output types of kernels.

An op hands `choose` a table of its implementations in order of preference, each with the reason why it cannot serve
the call (None if it can). Nothing else decides which kernel runs.
"""

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

DISABLE_KERNELS = "DSV4_FUSIONS_DISABLE_KERNELS"
"""Environment variable: set to 1, every op takes plain XLA code and a named kernel raises. Read at trace time."""

IMPLEMENTATIONS = ("mosaic", "triton", "jax_triton", "xla")
"""All names that an op may know."""

# Part of jit's cache key: a function compiled inside the context is not reused outside, nor the other way round.
_interpret = jax.make_user_context(False)


class Target(NamedTuple):
    """What the traced program is compiled for."""

    platform: str
    """ "gpu", "cpu" or another JAX platform name."""
    capability: tuple[int, int] | None
    """CUDA compute capability, None off NVIDIA GPUs."""
    cores: int | None = None
    """Multiprocessors of the GPU, where known."""


class NotBuilt(str):
    """A reason for `choose`: the implementation has a name but no code yet."""


def target() -> Target:
    """The abstract mesh's device if one is set, else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    device = jax.config.jax_default_device or jax.devices()[0]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    if abstract is not None and abstract.device_kind != device.device_kind:
        if abstract.platform != "gpu":
            return Target(abstract.platform, None)
        return Target("gpu", _capability(abstract.device_kind), abstract.num_cores)
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or not isinstance(capability, str) or "." not in capability:
        return Target(device.platform, None)
    major, minor = capability.split(".")
    return Target("gpu", (int(major), int(minor)), getattr(device, "core_count", None))


# Of devices that are not there: programs can be lowered for them. Parts of their names, the longer ones first.
_CAPABILITIES = {
    **{
        "GB200": (10, 0),
        "GH200": (9, 0),
        "B300": (10, 3),
        "B200": (10, 0),
        "H200": (9, 0),
        "H100": (9, 0),
        "H800": (9, 0),
    },
    **{"A100": (8, 0), "A800": (8, 0), "A30": (8, 0), "A40": (8, 6), "A10": (8, 6), "L40": (8, 9), "L4": (8, 9)},
    **{"T4": (7, 5), "V100": (7, 0), "RTX PRO 6000 Blackwell": (12, 0), "RTX 6000 Ada": (8, 9), "RTX A6000": (8, 6)},
}


def _capability(device_kind):
    return next((capability for part, capability in _CAPABILITIES.items() if part in device_kind), None)


@contextlib.contextmanager
def interpret() -> Iterator[None]:
    """Runs Pallas kernels in interpret mode inside the block, on any device. For tests: it is very slow."""
    with _interpret(True):
        yield


def interpreting() -> bool:
    """Whether the code being traced is inside `interpret()`."""
    return _interpret.value


def triton_unsupported() -> str | None:
    """Why a kernel of the Pallas Triton backend cannot run on the target, None if it can."""
    reason = _switched_off() or (
        None if interpreting() else _lacks(lambda capability: capability >= (8, 0), "8.0 or higher")
    )
    if reason is None and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        reason = "this version of JAX has no Pallas Triton backend"
    return reason


def mosaic_unsupported() -> str | None:
    """Why a kernel of the Pallas Mosaic GPU backend cannot run on the target, None if it can."""
    # Hopper's matrix instruction exists on Hopper alone: later chips have another one.
    return _switched_off() or (None if interpreting() else _lacks(lambda capability: capability == (9, 0), "9.0"))


def jax_triton_unsupported() -> str | None:
    """Why a kernel of jax-triton cannot run on the target, None if it can."""
    reason = _switched_off() or _lacks(lambda capability: capability >= (8, 0), "8.0 or higher")
    if reason is None and not all(map(importlib.util.find_spec, ("jax_triton", "triton"))):
        reason = "it needs jax-triton, which the extra triton brings: pip install '.[triton]'"
    return reason


def _switched_off():
    if os.environ.get(DISABLE_KERNELS, "0") not in ("", "0"):
        return f"kernels are switched off by {DISABLE_KERNELS}"
    return None


def _lacks(serves, wanted):
    platform, capability, _ = target()
    if platform != "gpu" or capability is None:
        return f"it needs an NVIDIA GPU and the target is {platform}"
    if not serves(capability):
        return f"it needs compute capability {wanted} and the target has {capability[0]}.{capability[1]}"
    return None


def choose(implementation: str | None, unsupported: Mapping[str, str | None]) -> str:
    """The implementation that runs.

    Args:
      implementation: a name, or None for the first that can serve.
      unsupported: every implementation in order of preference, with the reason why it cannot serve this call, or None.

    Returns:
      A key of `unsupported`.

    Raises:
      ValueError: an unknown name, or a named implementation that cannot serve.
      NotImplementedError: a named implementation that is not built yet.
    """
    if implementation is None:
        return next(name for name, reason in unsupported.items() if reason is None)
    if implementation not in unsupported:
        raise ValueError(f"implementation: got {implementation!r}, wanted None or one of {', '.join(unsupported)}")
    reason = unsupported[implementation]
    if isinstance(reason, NotBuilt):
        raise NotImplementedError(f"implementation {implementation!r}: {reason}")
    if reason is not None:
        raise ValueError(f"implementation {implementation!r} cannot run here: {reason}")
    return implementation


def align_manual_axes(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Gives all operands the same manual axis type: inside `shard_map`, varying over every axis that any varies over.

    A replicated weight next to sharded activations then gets its one all-reduce from this cast's transpose, and a
    custom gradient need not know about the mesh.
    """
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))

    def cast(x):
        missing = tuple(varying - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return tuple(cast(x) for x in operands)


def output_type(shape: tuple[int, ...], dtype, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's output, which varies over the same manual mesh axes as any of its (aligned) operands."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), manual_axis_type=jax.typeof(operand).manual_axis_type)
