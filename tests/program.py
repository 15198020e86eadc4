"""What tests read off a program: its equations, and its CUDA lowering on a machine without a GPU."""

import re

import jax
from jax.extend.core import Literal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def equations(jaxpr):
    """All equations in order, those of nested jaxprs in place of the call that holds them.

    A kernel stays whole, and so does a scatter, whose jaxpr only says how two numbers are combined.
    """
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        inner = list(_subjaxprs(eqn.params))
        if not inner or eqn.primitive.name == "pallas_call" or eqn.primitive.name.startswith("scatter"):
            yield eqn
        else:
            for sub in inner:
                yield from equations(sub)


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
        if eqn.primitive.name in ("jit", "pjit", "closed_call", "custom_vjp_call") and len(inner) == 1:
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
