"""What tests read off a program: its equations, and its CUDA lowering on a machine without a GPU."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def equations(jaxpr):
    """All equations in order, those of nested jaxprs in place of the call that holds them."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = list(_subjaxprs(eqn.params))
        if not inner or eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for sub in inner:
                yield from equations(sub)


def _subjaxprs(params):
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


def primitives(fn, *args):
    """Names of the primitives of `fn`'s jaxpr, in order."""
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args))]


def gpu_target(device_kind="NVIDIA H200", devices=1):
    """Context in which programs are traced for such GPUs, a mesh of one axis "d"."""
    device = AbstractDevice(device_kind, 132, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((devices,), ("d",), (AxisType.Auto,), abstract_device=device))


def lower_for_cuda(fn, *args, devices=1):
    """The text of `fn` lowered for CUDA. Arguments may be ShapeDtypeStructs."""
    with gpu_target(devices=devices):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
