"""What tests read off a program: its equations, and its CUDA lowering on a machine without a GPU."""

import re

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

KERNELS = ("pallas_call", "mpmd_map")
"""Primitives that are kernels: of Pallas' Triton backend, of its Mosaic GPU backend."""


def equations(jaxpr, whole=()):
    """All equations in order, those of nested jaxprs in place of the call that holds them.

    A kernel stays whole, and so does a scatter, whose jaxpr only says how two numbers are combined, and what is named.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner, name = list(_subjaxprs(eqn.params)), eqn.primitive.name
        if not inner or name in KERNELS or name.startswith("scatter") or name in whole:
            yield eqn
        else:
            for sub in inner:
                yield from equations(sub, whole)


def kernels(jaxpr):
    """The equations that call a kernel."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in KERNELS]


def kernel_names(jaxpr):
    return [str(eqn.params["name"]) for eqn in kernels(jaxpr)]


def inside(kernel):
    """The equations of a kernel."""
    return [eqn for sub in _subjaxprs(kernel.params) for eqn in equations(sub)]


def _subjaxprs(params):
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield item


def flattened(jaxpr, names=None):
    """(primitive, inputs, outputs) of all equations, calls replaced by what they call, values identified throughout.

    Loops and branches stay single equations.
    """
    names = {} if names is None else names
    name = lambda v: None if isinstance(v, Literal) else names.get(v, v)  # noqa: E731
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = [getattr(sub, "jaxpr", sub) for sub in _subjaxprs(eqn.params)]
        calls = ("jit", "pjit", "closed_call", "custom_vjp_call", "custom_vmap_call")
        if eqn.primitive.name in calls and len(inner) == 1:
            (inner,) = inner
            names |= dict(zip(inner.invars, map(name, eqn.invars), strict=True))
            yield from flattened(inner, names)
            names |= dict(zip(eqn.outvars, map(name, inner.outvars), strict=True))
        else:
            inputs = [name(v) for v in eqn.invars]
            names |= {v: object() for v in eqn.outvars}  # a jaxpr that is called twice has two sets of values
            yield eqn.primitive.name, inputs, [name(v) for v in eqn.outvars]


def primitives(fn, *args):
    """Names of the primitives of `fn`'s jaxpr, in order."""
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args))]


def assert_static_and_on_device(text):
    """No call back to the host and no shape that depends on data in a lowered program."""
    assert "callback" not in text
    assert not re.search(r"tensor<[^>]*\?|real_dynamic|dynamic_(reshape|broadcast|iota|gather)", text)


def gpu_target(device_kind="NVIDIA H200", devices=1):
    """Context in which programs are traced for such GPUs, a mesh of one axis "d"."""
    device = AbstractDevice(device_kind, 132, "gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((devices,), ("d",), (AxisType.Auto,), abstract_device=device))


def lower_for_cuda(fn, *args, devices=1):
    """The text of `fn` lowered for CUDA. Arguments may be ShapeDtypeStructs."""
    with gpu_target(devices=devices):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def cuda_kernels(text):
    """Names of the Pallas kernels in a text from `lower_for_cuda`, in order."""
    found = re.finditer(r'name = "(\w+)", num_stages|\\00(?!stable_)([a-z_]+)_mosaic_gpu\\', text)
    return [triton or mosaic for triton, mosaic in (match.groups() for match in found)]


def cuda_grids(text):
    """Grids (x, y, z) of the Triton kernels in a text from `lower_for_cuda`, in order."""
    return [tuple(map(int, grid)) for grid in re.findall(r"grid_x = (\d+) .*?grid_y = (\d+) .*?grid_z = (\d+)", text)]
