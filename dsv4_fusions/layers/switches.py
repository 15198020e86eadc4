"""Switches: plain module attributes that change how a layer computes and never what, and what became of them."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import flax

from dsv4_fusions.config import LATENT_RATIO, DSv4Config
from dsv4_fusions.dispatch import IMPLEMENTATIONS
from dsv4_fusions.ops.inv_rope_postmix import BACKWARDS
from dsv4_fusions.ops.kv_index_table import table_implementation

LATENT_VALUES = "the values of latent attention are not rotated"

_KNOWN = {"postmix_backward": BACKWARDS, "implementation": (None, *IMPLEMENTATIONS)}

# A warning should point at the user's line, behind our frames and the constructor of Flax's metaclass.
_INTERNAL = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(flax.__file__))


@dataclasses.dataclass(frozen=True)
class FusionStatus:
    """What one fusion does in one layer.

    Attributes:
      active: whether the fused form runs.
      implementation: name of the implementation that runs, fused or not; None where no op of ours is involved.
      reason: why it is active or not, in words.
    """

    active: bool
    implementation: str | None
    reason: str


class Switches:
    """Guard for a module's switches; comes before `nnx.Module` among the bases.

    A class lists its fusions in `SWITCHES`, and which of `postmix_backward` and `implementation` it takes in `CHOICES`.
    Any other name of these kinds, a typo for instance, raises: it would be a new attribute without effect. A `fuse_*`
    switch takes True or False and nothing else: NumPy booleans, 0 and 1 hash like them and would share, or split,
    entries of the compile cache.

    Switches are static parts of the module, so a new value acts at the next trace. Where the module is an argument of
    `jax.jit` or `nnx.jit` that is the next call:

        step = jax.jit(lambda layer, x: layer(x)[0])
        layer.fuse_inv_rope = True                  # retraced at the next step(layer, x); back to False: cached code

    A trace that captured the module keeps the old value, and the old weights with it. Three spellings do that:

        jax.jit(lambda x: layer(x)[0])              # the layer is closed over, not passed
        nnx.cached_partial(step, layer)             # the structure was cached before the flip
        graphdef, state = nnx.split(layer)          # the switches live in graphdef: split again after a flip

    Raises:
      AttributeError: on assigning a switch that the class does not have.
      TypeError: on assigning anything but a bool to a `fuse_*` switch.
      ValueError: on assigning an unknown name to `postmix_backward` or `implementation`.
    """

    SWITCHES: tuple[str, ...] = ()
    CHOICES: tuple[str, ...] = tuple(_KNOWN)

    def __setattr__(self, name, value):
        owner, is_fusion = type(self).__name__, name.startswith("fuse_")
        if (is_fusion or name in _KNOWN) and name not in self.SWITCHES + self.CHOICES:
            raise AttributeError(f"{owner} has no switch {name!r}; it has {', '.join(self.SWITCHES + self.CHOICES)}")
        if is_fusion and type(value) is not bool:
            raise TypeError(f"{owner}.{name}: got {value!r}, wanted True or False")
        if name in _KNOWN and value not in _KNOWN[name]:
            raise ValueError(f"{owner}.{name}: got {value!r}, wanted one of {', '.join(map(str, _KNOWN[name]))}")
        super().__setattr__(name, value)

    def set_switches(self, cfg: DSv4Config, **given: bool | str | None) -> None:
        """Sets the switches as given, or as the configuration has them where that is None, and warns about idle ones.

        Args:
          cfg: the configuration.
          **given: value or None for every switch of the class.
        """
        for name, value in given.items():
            setattr(self, name, getattr(cfg, name) if value is None else value)
        warn_never_active(cfg, **{name: getattr(self, name) for name in self.SWITCHES})


def forwarded(name: str, modules: Callable[[Any], Sequence[Any]]) -> property:
    """A switch whose home is in other modules: assigning sets it in all of them, reading gives the value they share.

    Args:
      name: of the switch.
      modules: from the module that has the property to those that have the switch.

    Returns:
      A property. Reading it raises AttributeError where the modules differ.
    """

    def read(owner):
        values = {getattr(module, name) for module in modules(owner)}
        if len(values) > 1:
            raise AttributeError(
                f"{type(owner).__name__}.{name} differs between its layers; set_attributes({name}=...) sets all of them"
            )
        return values.pop()

    def assign(owner, value):
        for module in modules(owner):
            setattr(module, name, value)

    return property(read, assign)


def never_active(cfg: DSv4Config) -> dict[str, str]:
    """The fusions that no call can activate under a configuration, each with the field that stands in the way.

    Args:
      cfg: the configuration.

    Returns:
      Switch name -> reason, which names the field.
    """
    reasons = {}
    if not cfg.use_vha_attention:
        reasons["fuse_inv_rope"] = "use_vha_attention is False: there is no postmix to fold the rotation into"
    elif cfg.qk_rope_head_dim == 0:
        reasons["fuse_inv_rope"] = "qk_rope_head_dim is 0: there is nothing to rotate"
    elif all(ratio == LATENT_RATIO for ratio in cfg.compress_ratios):
        reasons["fuse_inv_rope"] = f"compress_ratios are all {LATENT_RATIO}: {LATENT_VALUES}"
    if cfg.sparse_attention_backend != "flat":
        reasons["fuse_kv_index_remap"] = (
            f"sparse_attention_backend is {cfg.sparse_attention_backend!r}: it reads per-batch ids, nothing is remapped"
        )
    return reasons


def remap_status(cfg: DSv4Config, switch: bool, batch: int | None, ids: int = 0) -> FusionStatus:
    """What `fuse_kv_index_remap` does with a table of ids.

    Args:
      cfg: the configuration.
      switch: the switch's value.
      batch: batch entries; None: unknown.
      ids: of the table of one batch entry.

    Returns:
      The status.
    """
    never = never_active(cfg).get("fuse_kv_index_remap")
    if never is not None:
        return FusionStatus(False, None, never)
    implementation = table_implementation((batch or 1) * ids)
    if not switch:
        return FusionStatus(False, implementation, "fuse_kv_index_remap is False")
    if batch == 1:
        return FusionStatus(False, None, "batch 1: a reshape")
    reason = "batch unknown: fused above 1, a reshape at 1" if batch is None else f"batch {batch}"
    return FusionStatus(True, implementation, reason)


def warn_never_active(cfg: DSv4Config, **switches: bool) -> None:
    """Warns once for each switch that is on and that no call can activate. It stays on and has no effect.

    Args:
      cfg: the configuration.
      **switches: values of the fusion switches.
    """
    for name, reason in never_active(cfg).items():
        if switches.get(name):
            warnings.warn(f"{name}=True has no effect: {reason}", UserWarning, skip_file_prefixes=_INTERNAL)
