"""Proof, on this machine and at a configuration's shapes, that the fusions change no bit of a layer."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int, Int32

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.kv_index import selection
from dsv4_fusions.layers import DSv4HybridSelfAttention, FusionStatus, MQALatentAttention, attention_layer
from dsv4_fusions.ops.kv_index_table import flat_kv_index_table
from dsv4_fusions.testing import count_mismatches

SWITCHES = DSv4HybridSelfAttention.SWITCHES
_SLAB = 256  # rows of a table of ids that the host holds at a time


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How many elements of one array differ in any bit.

    Attributes:
        name: of the array: "output", "input gradient", "gradient of ...", an auxiliary loss's name, or "remapped ids".
        elements: how many it has.
        run_to_run: mismatches between two unfused runs; of the remapped ids, between two fused ones.
        fused_to_unfused: mismatches between the fused and the first unfused run; of the remapped ids, between the fused
            run and NumPy's integers, as the fused and the unfused program may be the same.
    """

    name: str
    elements: int
    run_to_run: int
    fused_to_unfused: int


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """The layers of one compress ratio: they share their shapes, so one of them stands for all.

    Attributes:
        ratio: the compress ratio.
        indices: of the layers.
        layer: one of them, with the fusions on.
        fusions: what each fusion does in it.
    """

    ratio: int
    indices: tuple[int, ...]
    layer: DSv4HybridSelfAttention | MQALatentAttention
    fusions: dict[str, FusionStatus]


@dataclasses.dataclass(frozen=True)
class Report:
    """Comparisons for every kind of layer, in the order of `kinds`."""

    kinds: list[LayerKind]
    comparisons: list[list[Comparison]]

    @property
    def mismatches(self) -> int:
        """Elements that differ, between two unfused runs or between fused and unfused."""
        return sum(each.run_to_run + each.fused_to_unfused for each in itertools.chain(*self.comparisons))

    @property
    def exit_code(self) -> int:
        """0: bitwise equal; 1: something differs; 2: no fusion was active in any layer, so nothing was proved."""
        if self.mismatches:
            return 1
        return 0 if any(fused_layers(self.kinds).values()) else 2


def fused_layers(kinds: Sequence[LayerKind]) -> dict[str, dict[int, str]]:
    """For every fusion, the layers in which it is active and the implementation that runs there."""
    return {
        name: {
            index: kind.fusions[name].implementation
            for kind in kinds
            if kind.fusions[name].active
            for index in kind.indices
        }
        for name in SWITCHES
    }


def build_layers(cfg: DSv4Config, batch: int, tokens: int, layers: Sequence[int] | None = None) -> list[LayerKind]:
    """One layer of every kind, with both fusions on.

    Args:
        cfg: the configuration.
        batch: batch entries that the layers will be given.
        tokens: tokens of each.
        layers: which layers to look at; None: all.

    Returns:
        The kinds in the order of their first layers.

    Raises:
        ValueError: a layer that the configuration does not have, or an implementation that cannot run here.
    """
    kinds: dict[int, list[int]] = {}
    for index in range(cfg.num_hidden_layers) if layers is None else sorted(set(layers)):
        if not 0 <= index < cfg.num_hidden_layers:
            raise ValueError(f"layer: got {index}, wanted 0 to {cfg.num_hidden_layers - 1}")
        kinds.setdefault(cfg.compress_ratios[index], []).append(index)
    x = jax.ShapeDtypeStruct((batch, tokens, cfg.hidden_size), cfg.dtype)

    def build(ratio, indices):
        layer = attention_layer(cfg, indices[0], rngs=nnx.Rngs(0), **dict.fromkeys(SWITCHES, True))
        return LayerKind(ratio, tuple(indices), layer, layer.explain_fusions(x))

    return [build(ratio, indices) for ratio, indices in kinds.items()]


def verify(
    cfg: DSv4Config, kinds: Sequence[LayerKind], batch: int, tokens: int, on_kind: Callable = lambda kind: None
) -> Report:
    """Compares outputs and all gradients of every kind of layer, run against run and fused against unfused, as bits.

    The input and the cotangent are standard normal. Parameters that start at zero are moved off it: with V = 0 the
    postmix is the identity, every sum in it has one term, and the order of accumulation would go untested. The first
    batch entry is one document, the others hold several and end in padding.

    Args:
        cfg: the configuration.
        kinds: from `build_layers`.
        batch: batch entries.
        tokens: tokens of each.
        on_kind: called with every kind before its turn.

    Returns:
        The report.
    """
    comparisons = []
    for kind in kinds:
        on_kind(kind)
        comparisons.append(_compare_kind(cfg, kind, batch, tokens))
    return Report(list(kinds), comparisons)


def _compare_kind(cfg, kind, batch, tokens) -> list[Comparison]:
    x_key, cotangent_key, params_key, ids_key = jax.random.split(jax.random.key(0), 4)
    shape, dtype = (batch, tokens, cfg.hidden_size), jnp.dtype(cfg.dtype)
    x, cotangent = jax.random.normal(x_key, shape, dtype), jax.random.normal(cotangent_key, shape, dtype)
    segment_ids = _documents(batch, tokens)
    params = _moved_off_zero(nnx.state(kind.layer, nnx.Param), params_key)

    def run(fused):
        layer = nnx.with_attributes(kind.layer, **dict.fromkeys(SWITCHES, fused))
        y, aux, d_x, d_params = _run(nnx.graphdef(layer), params, x, segment_ids, cotangent)
        of_params = {f"gradient of {'.'.join(map(str, path))}": leaf[...] for path, leaf in nnx.to_flat_state(d_params)}
        return {"output": y, **aux, "input gradient": d_x, **of_params}

    comparisons = _compare(run)
    if kind.fusions["fuse_kv_index_remap"].active:
        comparisons.append(_compare_remap(*_random_ids(kind, batch, tokens, ids_key)))
    return comparisons


def _compare(run: Callable[[bool], dict[str, Array]]) -> list[Comparison]:
    first = run(False)
    run_to_run, fused_to_unfused = (jax.tree.map(count_mismatches, first, run(fused)) for fused in (False, True))
    return [Comparison(name, first[name].size, run_to_run[name], fused_to_unfused[name]) for name in first]


@jax.jit
def _run(graphdef, params, x, segment_ids, cotangent):
    (y, aux), pull_back = jax.vjp(lambda params, x: nnx.merge(graphdef, params)(x, segment_ids), params, x)
    d_params, d_x = pull_back((cotangent, jax.tree.map(jnp.ones_like, aux)))
    return y, aux, d_x, d_params


@partial(jax.jit, static_argnums=1)
def _remap(ids: Int[Array, "batch tokens topk"], kv_len: int) -> Int32[Array, "batch*tokens topk"]:
    """What a fused layer runs, on ids that stand for selected ones."""
    start = jnp.zeros(ids.shape[1], jnp.int32)
    return flat_kv_index_table((selection(ids, start, start + kv_len, 0),), len(ids), kv_len)


def _compare_remap(ids: Int[Array, "batch tokens topk"], kv_len: int) -> Comparison:
    batch, tokens, topk = ids.shape
    flat, again = (_remap(ids, kv_len).reshape(ids.shape) for _ in range(2))
    wrong = 0
    # Not the whole table: one of causal ids takes gigabytes, and the host's 64-bit copies several times as many.
    for entry, start in itertools.product(range(batch), range(0, tokens, _SLAB)):
        rows = (1, min(_SLAB, tokens - start), topk)
        local, got = (np.asarray(lax.dynamic_slice(table, (entry, start, 0), rows)) for table in (ids, flat))
        wrong += np.count_nonzero(got != np.where(local < 0, local, local + np.int64(entry * kv_len)))
    return Comparison("remapped ids", ids.size, count_mismatches(flat, again), int(wrong))


def _documents(batch: int, tokens: int) -> Int[Array, "batch tokens"]:
    rows = np.ones((batch, tokens), np.int32)
    for i in range(1, batch):
        cuts = tokens * np.array([1, i + 2, 2 * i + 3]) // (2 * i + 4)
        rows[i] = np.searchsorted(cuts, np.arange(tokens), side="right") + 1
        rows[i, cuts[-1] :] = 0
    return jnp.asarray(rows)


def _moved_off_zero(params: nnx.State, key) -> nnx.State:
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        structure,
        [
            leaf if jnp.any(leaf) else (0.05 * jax.random.normal(leaf_key, leaf.shape)).astype(leaf.dtype)
            for leaf, leaf_key in zip(leaves, keys, strict=True)
        ],
    )


def _random_ids(kind: LayerKind, batch: int, tokens: int, key):
    """A table of random ids as wide as the layer's, a third of its slots empty, and the rows of KV per batch entry."""
    compressed = tokens // kind.ratio if kind.ratio > 1 else 0
    width = kind.layer.table_width(tokens)
    id_key, empty_key = jax.random.split(key)
    ids = jax.random.randint(id_key, (batch, tokens, width), 0, tokens + compressed)
    return jnp.where(jax.random.bernoulli(empty_key, 1 / 3, ids.shape), -1, ids), tokens + compressed
