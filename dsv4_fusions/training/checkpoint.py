"""Checkpoints: parameters in a layout that NNX and Linen share, and whole runs that resume bit for bit.

A directory that holds parameters is an Orbax checkpoint of the nested dictionary of arrays, keys as strings
(`layers/0/attention/...`). Switches are no part of it. A run is an Orbax checkpoint directory with one folder a step,
whose `params` can be given to `load_params`.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from dsv4_fusions.config import DSv4Config, TrainConfig
from dsv4_fusions.layers import DSv4HybridSelfAttention
from dsv4_fusions.layers.linen import params_from_nnx, update_nnx
from dsv4_fusions.training.loop import State

KEPT = 3  # checkpoints of a run; older ones are deleted


def save_params(path: str | os.PathLike, module: nnx.Module | Mapping[str, Any]) -> None:
    """Writes parameters to a new directory, which appears only once it is complete.

    Args:
      path: the directory to make.
      module: an NNX module, or the `params` of a Linen one.

    Raises:
      FileExistsError: the path exists.
      OSError: it cannot be written.
    """
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"path: {path} exists, wanted a new directory")
    path.parent.mkdir(parents=True, exist_ok=True)  # Orbax would report a failure here by a timeout
    params = _params(module)
    with _writing(path), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(params))


def load_params(path: str | os.PathLike, module: nnx.Module | Mapping[str, Any]) -> nnx.Module | Mapping[str, Any]:
    """Reads parameters that must fit exactly: same names, shapes and dtypes. Nothing is cast, added or left out.

    Args:
      path: what `save_params` wrote, or the folder `params` of a run's checkpoint.
      module: an NNX module, whose parameters are overwritten, or a tree like the `params` of a Linen one, which is
        left as it is. Each parameter is placed as the present one is.

    Returns:
      The NNX module itself, or a new tree.

    Raises:
      ValueError: nothing was saved there, or some leaf does not fit; the message names it, what is in the file and
        what was wanted. The module is unchanged.
    """
    params = _read(path, _params(module))
    if not isinstance(module, nnx.Module):
        return params
    update_nnx(module, params)
    return module


def describe_run(cfg: DSv4Config, config: TrainConfig, documents: Sequence[bytes]) -> dict[str, Any]:
    """What decides a run's bits on one machine, in JSON's types.

    The fusion switches are left out because they change no bit, and `eval_interval` because it only adds reports.
    `steps` is left out so that a run can be continued; it shapes the learning rate, see `load_run`.

    Args:
      cfg: the model's configuration.
      config: the training's configuration.
      documents: the text, held-out part included.

    Returns:
      Part -> its fields, and the text's SHA-256.
    """
    parts = {
        "model": (cfg, DSv4HybridSelfAttention.SWITCHES),
        "train": (config, ("steps", "eval_interval")),
    }
    fields = {
        part: {name: value for name, value in dataclasses.asdict(values).items() if name not in left_out}
        for part, (values, left_out) in parts.items()
    }
    digest = hashlib.sha256()
    for document in documents:
        digest.update(len(document).to_bytes(8, "little") + document)
    return json.loads(json.dumps(fields | {"text": {"sha256": digest.hexdigest()}}, default=dict))


def latest_step(directory: str | os.PathLike) -> int | None:
    """Step of a run's newest complete checkpoint; None where there is no checkpoint or no such directory."""
    with _manager(directory, read_only=True) as manager:
        return manager.latest_step()


def save_run(directory: str | os.PathLike, state: State, description: Mapping[str, Any], steps: int) -> None:
    """Writes a checkpoint, which counts only once it is complete, and deletes all but the last few.

    Args:
      directory: of the run.
      state: where the run stands.
      description: as `describe_run` gives it.
      steps: over which the learning rate decays.

    Raises:
      OSError: it cannot be written; the earlier checkpoints stay valid.
    """
    import orbax.checkpoint as ocp

    path = Path(directory).absolute()
    path.mkdir(parents=True, exist_ok=True)
    arrays = {"params": _as_dicts(state.params), "opt_state": _as_dicts(state.opt_state)}
    items = {name: ocp.args.StandardSave(tree) for name, tree in arrays.items()}
    run = ocp.args.JsonSave({**description, "steps": steps})
    with _writing(path / str(state.step)), _manager(path) as manager:
        manager.save(state.step, args=ocp.args.Composite(run=run, **items))


def load_run(directory: str | os.PathLike, start: State, description: Mapping[str, Any]) -> tuple[State, int]:
    """Reads a run's newest checkpoint.

    Args:
      directory: of the run.
      start: the run's initial state, for its structure, dtypes and placement.
      description: as `describe_run` gives it.

    Returns:
      The state, and the number of steps that the run had set out for. With another number the learning rate takes
      another course from here on than in an unbroken run.

    Raises:
      ValueError: there is no checkpoint, it is of a run that would give other bits, or some leaf does not fit.
    """
    step, saved = _newest(directory)
    _check_description(directory, saved, description)
    folder = Path(directory, str(step))
    params, opt_state = (
        _fill(like, _read(folder / name, _as_dicts(like)))
        for name, like in (("params", start.params), ("opt_state", start.opt_state))
    )
    return State(step, params, opt_state), saved["steps"]


def load_run_params(directory: str | os.PathLike, cfg: DSv4Config, model: nnx.Module) -> int:
    """Puts the parameters of a run's newest checkpoint into a model.

    Args:
      directory: of the run.
      cfg: the model's configuration, which must be the run's up to the fusion switches.
      model: the decoder.

    Returns:
      The checkpoint's step.

    Raises:
      ValueError: there is no checkpoint, it is of another configuration, or some leaf does not fit.
    """
    step, saved = _newest(directory)
    _check_description(directory, saved, {"model": describe_run(cfg, TrainConfig(), [])["model"]})
    load_params(Path(directory, str(step), "params"), model)
    return step


def _newest(directory):
    """Step of a run's newest checkpoint, and what was saved about the run."""
    import orbax.checkpoint as ocp

    with _manager(directory, read_only=True) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError(f"{directory}: got no checkpoint in there, wanted that of a run")
        try:
            saved = manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
            saved["steps"]
        except KeyError:
            raise ValueError(f"{directory}: got another program's checkpoints, wanted those of save_run") from None
    return step, saved


def _check_description(directory, saved, description):
    # A field that is younger than the run had its default then.
    defaults = {"model": DSv4Config, "train": TrainConfig}
    for part, wanted in description.items():
        for name, value in wanted.items():
            had = saved[part].get(name, getattr(defaults.get(part), name, None))
            if json.loads(json.dumps(had, default=dict)) != value:
                raise ValueError(f"{part}.{name}: got {value!r}, but the run in {directory} has {had!r}")


def _params(module):
    return params_from_nnx(module) if isinstance(module, nnx.Module) else module


def _is_state(tree):
    return isinstance(tree, nnx.State)


def _as_dicts(tree):
    """The optimizer's state holds states that mirror the parameters' one; all of them become plain dictionaries."""
    return jax.tree.map(lambda node: nnx.to_pure_dict(node) if _is_state(node) else node, tree, is_leaf=_is_state)


def _fill(like, values):
    def fill(node, values):
        if not _is_state(node):
            return values
        node = jax.tree.map(lambda leaf: leaf, node)  # a copy: filling works in place
        nnx.replace_by_pure_dict(node, values)
        return node

    return jax.tree.map(fill, like, values, is_leaf=_is_state)


def _read(path, like):
    import orbax.checkpoint as ocp

    path = Path(path).absolute()
    with _silent_orbax(), ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(path).item_metadata
        if metadata is None:
            raise ValueError(f"path: got {path} without parameters in it, wanted a directory that save_params wrote")
        # Orbax itself casts to the wanted dtype without a word.
        found = {leaf.name: _describe(leaf) for leaf in jax.tree.leaves(metadata.tree)}
        wanted = {
            jax.tree_util.keystr(key, simple=True, separator="."): _describe(leaf)
            for key, leaf in jax.tree_util.tree_leaves_with_path(like)
        }
        for name in [*wanted, *found]:
            got, want = found.get(name, "nothing"), wanted.get(name, "nothing")
            if got != want:
                raise ValueError(f"{path}: {name}: got {got}, wanted {want}")
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None)), like
        )
        return checkpointer.restore(path, args=ocp.args.StandardRestore(abstract))


def _describe(leaf) -> str:
    return f"{leaf.dtype.name}{list(leaf.shape)}"


@contextlib.contextmanager
def _manager(directory, read_only=False):
    import orbax.checkpoint as ocp

    path = Path(directory).absolute()
    if path.exists():
        next(path.iterdir(), None)  # raises where it is a file or closed to us
    with _silent_orbax():
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, create=not read_only, read_only=read_only, enable_async_checkpointing=False
        )
        with ocp.CheckpointManager(path, options=options) as manager:
            yield manager


@contextlib.contextmanager
def _writing(path):
    """Makes an `OSError` of the `ValueError` by which Orbax reports one that its storage met, such as a full disk."""
    try:
        with _silent_orbax():
            yield
    except ValueError as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


@contextlib.contextmanager
def _silent_orbax():
    """Orbax raises an error and prints a traceback for every thread that met it, some by way of the interpreter."""
    logger, hook = logging.getLogger("absl"), sys.unraisablehook

    def hide_closed_loops(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    disabled, logger.disabled = logger.disabled, True
    sys.unraisablehook = hide_closed_loops
    try:
        yield
    finally:
        logger.disabled, sys.unraisablehook = disabled, hook
