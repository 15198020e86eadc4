"""Strict Flax Linen twins of the NNX layers: the same parameters, the same bits, switches as dataclass fields.

The NNX module is the only definition of a layer. Its twin builds that module's structure from its own fields, puts the
Linen parameters into it and calls it.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from dsv4_fusions import layers
from dsv4_fusions.layers.switches import Switches, warn_never_active

_MOST_PROBLEMS = 10  # in one message: a whole model has hundreds of parameters


def params_from_nnx(module: nnx.Module) -> dict[str, Any]:
    """The parameters of an NNX module as a Linen tree, which is also the tree of a checkpoint.

    The arrays are the module's own, not copies. An abstract module (`nnx.eval_shape`) gives shapes and dtypes.

    Args:
      module: any NNX module.

    Returns:
      Nested dict of arrays, without the switches. Keys are strings, those of the entries of an `nnx.List` too: with
      more than ten of them, leaves come in another order than in NNX ("10" before "2"), so match the two by path.
    """
    return _string_keys(nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def update_nnx(module: nnx.Module, params: Mapping[str, Any]) -> None:
    """Puts a Linen parameter tree into an NNX module, in place; its switches stay as they are.

    Args:
      module: any NNX module, abstract ones (`nnx.eval_shape`) included.
      params: tree as of `params_from_nnx` or under "params" of a twin's variables.

    Raises:
      ValueError: a parameter is missing, unexpected, or of another shape or dtype, each named by its path. Nothing is
        cast, and nothing has been changed then.
    """
    state = nnx.state(module, nnx.Param)
    nnx.update(module, _filled(type(module).__name__, state, params))


class _Twin(Switches, nn.Module):
    """What all twins share.

    Fields are set once. A flip is `twin.clone(fuse_inv_rope=False)`; an assignment raises, for Linen would accept it on
    an unbound module and `jax.jit(twin.apply)` would go on with the code of the old value, even through a new `jax.jit`
    while the earlier one lives.
    """

    NNX = nnx.Module  # no annotation: it would make this a field

    @nn.nowrap
    def __setattr__(self, name, value):
        by_linen = name in ("name", "parent") or name.startswith("_")
        if not by_linen and (name in self.__dict__ or name not in self.__dataclass_fields__):
            raise AttributeError(f"{type(self).__name__} is frozen: use .clone({name}={value!r})")
        if value is None and name in self.SWITCHES + self.CHOICES:
            value = getattr(self.cfg, name)
        super().__setattr__(name, value)

    def __post_init__(self):
        fields = self.__dataclass_fields__
        # Linen clones a module for every init and apply. A clone is given a parent; one that the user makes is not.
        if fields["parent"].default is self.parent and self.SWITCHES:
            warn_never_active(self.cfg, **{name: getattr(self, name) for name in self.SWITCHES})
        self._structure()  # so that a layer that cannot be built raises here, as in NNX
        super().__post_init__()

    @nn.nowrap
    def _arguments(self):
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("name", "parent")}

    @nn.nowrap
    def _structure(self):
        return _structure(self.NNX, **self._arguments())

    @nn.compact
    def __call__(self, *args, **kwargs):
        """Arguments and results as of the NNX layer."""
        if self.is_initializing() and not self.variables.get("params", {}):
            params = params_from_nnx(_make(self.NNX, nnx.Rngs(self.make_rng("params")), self._arguments()))
            for name, value in params.items():
                self.put_variable("params", name, value)
        return self._nnx()(*args, **kwargs)

    @nn.nowrap
    def _nnx(self):
        """The NNX module with this one's parameters."""
        graphdef, state = self._structure()
        return nnx.merge(graphdef, _filled(type(self).__name__, state, self.variables.get("params", {})))


def _make(cls, rngs, arguments):
    """The NNX module with its fusions off: what has no effect is reported by the twin, and once."""
    others = dict.fromkeys(_switches(cls)[0], False)
    if "rngs" in inspect.signature(cls.__init__).parameters:
        others["rngs"] = rngs
    return cls(**(arguments | others))


@functools.lru_cache(typed=True)  # typed: 1, 1.0 and True hash alike, and only one of them is a layer's number
def _structure(cls, **arguments):
    """The NNX module's graphdef and abstract parameters."""

    def make():
        module = _make(cls, nnx.Rngs(0), arguments)
        for name in _switches(cls)[0]:
            setattr(module, name, arguments[name])
        return module

    return nnx.split(nnx.eval_shape(make), nnx.Param)


def _filled(owner, state, params):
    """`state` with the arrays of `params` in place of its own."""
    wanted = {tuple(map(str, path)): (path, leaf) for path, leaf in nnx.to_flat_state(state)}
    given = {tuple(map(str, path)): leaf for path, leaf in nnx.traversals.flatten_mapping(params).items()}
    problems = [f"missing {'/'.join(path)}" for path in wanted if path not in given]
    problems += [f"unexpected {'/'.join(path)}" for path in given if path not in wanted]
    for path, (_, leaf) in wanted.items():
        if path in given and _form(given[path]) != _form(leaf):
            problems.append(f"{'/'.join(path)}: got {_form(given[path])}, wanted {_form(leaf)}")
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise ValueError(f"{owner}: parameters do not fit: {'; '.join(problems[:_MOST_PROBLEMS] + more)}")
    return nnx.from_flat_state([(path, leaf.replace(jnp.asarray(given[key]))) for key, (path, leaf) in wanted.items()])


def _form(leaf):
    if isinstance(leaf, jax.Array | np.ndarray | nnx.Param):
        return f"{leaf.dtype.name}{list(leaf.shape)}"
    return f"a {type(leaf).__name__}"


def _string_keys(tree):
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def _switches(cls):
    """Names of an NNX class's fusions and of its choices; a class without `Switches` has none."""
    return (cls.SWITCHES, cls.CHOICES) if issubclass(cls, Switches) else ((), ())


def _fields(cls):
    """Name -> (annotation, field) of the constructor's parameters, without `rngs`; `**switches` are the class's own."""
    parameters = dict(inspect.signature(cls.__init__).parameters)
    if parameters.pop("switches", None) is not None:
        for name in sum(_switches(cls), ()):
            parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Any)
    return {
        name: (
            p.annotation,
            dataclasses.field(
                default=dataclasses.MISSING if p.default is p.empty else p.default, kw_only=p.kind is p.KEYWORD_ONLY
            ),
        )
        for name, p in parameters.items()
        if name not in ("self", "rngs")
    }


def _twin(cls):
    """The Linen class whose fields are the parameters of an NNX class's constructor."""
    fields, (fusions, choices) = _fields(cls), _switches(cls)
    namespace = {name: field for name, (_, field) in fields.items()} | {
        "__annotations__": {name: annotation for name, (annotation, _) in fields.items()},
        "__module__": __name__,
        "__doc__": f"Linen twin of `dsv4_fusions.layers.{cls.__name__}`; its fields are that constructor's arguments.",
        "NNX": cls,
        "SWITCHES": fusions,
        "CHOICES": choices,
    }
    if hasattr(cls, "explain_fusions"):

        @nn.nowrap
        @functools.wraps(cls.explain_fusions)
        def explain_fusions(self, *args, **kwargs):
            return nnx.merge(*self._structure()).explain_fusions(*args, **kwargs)

        namespace["explain_fusions"] = explain_fusions
    if hasattr(cls, "init_cache"):

        @nn.nowrap
        @functools.wraps(cls.init_cache)
        def init_cache(self, *args, **kwargs):
            return nnx.merge(*self._structure()).init_cache(*args, **kwargs)

        @functools.wraps(cls.decode if hasattr(cls, "decode") else cls.extend)
        def decode(self, *args, **kwargs):
            module = self._nnx()
            return (module.decode if hasattr(cls, "decode") else module.extend)(*args, **kwargs)

        namespace |= {"init_cache": init_cache, "decode" if hasattr(cls, "decode") else "extend": decode}
    return type(cls.__name__, (_Twin,), namespace)


RMSNorm = _twin(layers.RMSNorm)
Compressor = _twin(layers.Compressor)
CompressedSparseAttention = _twin(layers.CompressedSparseAttention)
DSv4HybridSelfAttention = _twin(layers.DSv4HybridSelfAttention)
MQALatentAttention = _twin(layers.MQALatentAttention)
SwiGLU = _twin(layers.SwiGLU)
DecoderBlock = _twin(layers.DecoderBlock)
Decoder = _twin(layers.Decoder)
