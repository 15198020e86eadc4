"""The Mosaic kernel of the postmix in JAX's simulator: no races, and sums whose order knows nothing of the chip."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from program import gpu_target, kernels

import dsv4_fusions as dsv4
from dsv4_fusions import dispatch
from dsv4_fusions import mosaic as mosaic_common
from dsv4_fusions.ops.inv_rope_postmix import Wanted, mosaic
from dsv4_fusions.testing import assert_trees_bitwise_equal

KINDS = {
    "forward": None,
    "activation": Wanted(activation=True, weights=False),
    "weights": Wanted(activation=False, weights=True),
    "both": Wanted(activation=True, weights=True),
}


def call(kind, m, o, tables, g):
    """One launch of the kernel."""
    wanted = KINDS[kind]
    if wanted is None:
        return mosaic.forward((m,), o, tables)
    weights, x = (m,) if wanted.activation else None, o if wanted.weights else None
    return mosaic.single_pass_backward(weights, x, tables, g, wanted)


def operands(case):
    o, u, v, tables, g = case.operands()
    return dsv4.postmix_matrix(u, v), o, tables, g


@pytest.fixture
def finds_race(finds_race_in):
    """finds_race(kind, case, products): whether the simulator finds a race in the kernel."""
    return lambda kind, case, products: finds_race_in(functools.partial(call, kind), operands(case), products)


# More tiles than the ring has slots, a run that ends early, rotary channels in a part of a tile.
RAGGED = cases.Postmix(19, 64, 128, 50)


@pytest.mark.parametrize(
    "case, products", [(RAGGED, False), (RAGGED, True), (cases.Postmix(5, 64, 256, 200), True)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_races(finds_race, kind, case, products, monkeypatch):
    monkeypatch.setattr(mosaic, "_CHUNK", 4)  # several chunks on each multiprocessor
    assert not finds_race(kind, case, products)


def out_tile_is_refilled_before_it_has_left(monkeypatch):
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: None if wait_read_only else wait(n))


def rotation_is_not_committed(monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)


def within(monkeypatch, method, patches):
    """Patches functions of plgpu while `method` of the kernel is traced; patches(*its arguments): {name: function}."""
    original = getattr(mosaic._Call, method)

    def mutated(self, *args):
        with pytest.MonkeyPatch.context() as inner:
            for name, function in patches(self, *args).items():
                inner.setattr(plgpu, name, function)
            return original(self, *args)

    monkeypatch.setattr(mosaic._Call, method, mutated)


def tile_is_read_before_it_is_filled(monkeypatch):
    within(monkeypatch, "_item", lambda *_: {"barrier_wait": lambda barrier: None})


def slot_is_given_back_before_its_tile_is_read(monkeypatch):
    wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive

    def patches(self, memory, shared, side, seen, *_):
        def wait_and_arrive(barrier):
            wait(barrier)
            arrive(shared.consumed.at[jax.lax.rem(seen, self.stages)])

        return {"barrier_wait": wait_and_arrive, "barrier_arrive": lambda barrier: None}

    within(monkeypatch, "_item", patches)


@pytest.mark.parametrize(
    "mutate, products, kinds",
    [
        (out_tile_is_refilled_before_it_has_left, False, ["forward", "activation", "both"]),
        (rotation_is_not_committed, False, list(KINDS)),
        (tile_is_read_before_it_is_filled, True, list(KINDS)),
        (slot_is_given_back_before_its_tile_is_read, True, list(KINDS)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_races_are_found(finds_race, mutate, products, kinds, monkeypatch):
    """Mutations: without one of its waits the kernel is caught, by a race or by a barrier that was not observed."""
    mutate(monkeypatch)
    for kind in kinds:
        try:
            assert finds_race(kind, RAGGED, products), kind
        except jax.errors.JaxRuntimeError as error:
            assert "observed" in str(error)


@pytest.mark.parametrize("kind", ["forward", "both"])
def test_results_do_not_depend_on_the_number_of_multiprocessors(kind, monkeypatch):
    monkeypatch.setattr(mosaic, "_CHUNK", 4)
    init, results = mosaic._Call.__init__, []
    for multiprocessors in (1, 2, 3):

        def on(self, *args, multiprocessors=multiprocessors, **kwargs):
            init(self, *args, **kwargs)
            self.grid = min(self.runs, multiprocessors)

        monkeypatch.setattr(mosaic._Call, "__init__", on)
        with dispatch.interpret():
            results.append(jax.jit(functools.partial(call, kind))(*operands(cases.Postmix(14, 64, 256, 50))))
    assert_trees_bitwise_equal(results[0], results[1])
    assert_trees_bitwise_equal(results[0], results[2])


def test_the_grid_is_the_multiprocessors_and_the_sums_are_not(faked_target):
    case = cases.Postmix(700, 64, 256, 64)
    o, _, _, tables, g = case.types()
    m = jax.ShapeDtypeStruct((64, 64), o.dtype)
    grids, partials = [], []
    for cores in (132, 114, 7, None):
        faked_target("gpu", (9, 0), cores)
        (kernel,) = kernels(jax.make_jaxpr(functools.partial(call, "both"))(m, o, tables, g))
        grids.append(kernel.params["meshes"][0].grid)
        partials.append(kernel.outvars[1].aval.shape)
    assert grids == [(22,), (22,), (7,), (22,)]  # chunks of 32 tokens
    assert partials == [(44, 64, 64)] * 4
    faked_target("gpu", (9, 0), 132)
    (kernel,) = kernels(jax.make_jaxpr(functools.partial(call, "forward"))(m, o, tables, g))
    assert kernel.params["meshes"][0].grid == (132,)


def test_rotary_channels_that_start_anywhere():
    """Every even rope_dim up to two blocks and more: the columns in front of the tail are left alone."""
    case = cases.Postmix(1, 64, 256, 256)
    m, o, tables, g = operands(case)
    unfused = jax.jit(lambda o, tables: dsv4.rotate(o, tables, inverse=True))
    for rope_dim in (2, 62, 66, 126, 130, 194, 254):
        part = jax.tree.map(lambda t, n=rope_dim: t[:, :n], tables)
        with dispatch.interpret():
            fused = jax.jit(functools.partial(call, "forward"))(jnp.eye(64, dtype=o.dtype), o, part, g)
        np.testing.assert_array_equal(np.asarray(fused, np.float32), np.asarray(unfused(o, part), np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mapped_axis_of_any_length(kind, monkeypatch):
    """Longer than a launch takes: several launches, with the bits of single calls."""
    monkeypatch.setattr(mosaic_common, "_MOST_ENTRIES", 2)
    m, o, tables, g = operands(cases.Postmix(1, 64, 128, 50, lead=(3,)))
    one = functools.partial(call, kind, m)
    with dispatch.interpret():
        mapped = jax.jit(jax.vmap(one, in_axes=(0, None, 0)))(o, tables, g)
        single = jax.jit(one)
        singles = [single(o[i], tables, g[i]) for i in range(3)]
    assert_trees_bitwise_equal(mapped, jax.tree.map(lambda *entries: jnp.stack(entries), *singles))


def test_a_mapped_axis_does_not_exceed_the_grid():
    """The first axis of the kernel's grid is CUDA's y: it stops at 65,535 (jax#18361)."""
    o, _, _, tables, g = cases.Postmix(1, 64, 128, 64, lead=(70_001,)).types()
    m = jax.ShapeDtypeStruct((64, 64), o.dtype)
    for kind in ("forward", "both"):
        mapped = jax.vmap(functools.partial(call, kind), in_axes=(None, 0, None, 0))
        with gpu_target():
            grids = [kernel.params["meshes"][0].grid for kernel in kernels(jax.make_jaxpr(mapped)(m, o, tables, g))]
        assert sum(entries for entries, _ in grids) == 70_001 and all(entries <= 65_535 for entries, _ in grids)
