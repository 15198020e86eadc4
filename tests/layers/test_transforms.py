"""The layer under JAX's and Flax's transformations: the flip changes no bit under any of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from layers import common
from layers.common import compute, flipped, make_input, make_layer, small_config

from dsv4_fusions.testing import assert_trees_bitwise_equal


def apply(layer, x):
    return layer(x)[0]


def _gradients(function, **options):
    """`compute` with another way to apply the layer."""

    @functools.partial(jax.jit, **options)
    def run(layer, x, g, segment_ids=None, positions=None):
        y, pull = jax.vjp(function, layer, x)
        d_layer, dx = pull(g)
        return {"y": y, "dx": dx, "params": nnx.to_pure_dict(nnx.state(d_layer))}

    return run


POSTMIXES = pytest.mark.parametrize(
    "postmix",
    [pytest.param({}, marks=pytest.mark.optimised), dict(vha_postmix_grouped=True, postmix_backward="single_pass")],
    ids=["default", "grouped-single_pass"],
)


@POSTMIXES
def test_vmap(postmix):
    cfg = small_config(dtype="float16", **postmix)
    layer, (x, g) = make_layer(cfg), make_input(cfg, 2, 16)
    one_by_one = lambda layer, x: jax.vmap(lambda x: apply(layer, x))(x[:, None])[:, 0]  # noqa: E731
    unfused, fused = flipped(layer, x, g, run=_gradients(one_by_one))
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
    assert jnp.count_nonzero(fused["params"]["postmix_u"]) > 0


@POSTMIXES
def test_remat_is_no_remat_fused_or_not(postmix):
    """With every rounding kept: XLA may carry a bf16 value on in f32, and does so elsewhere in a recomputation."""
    exact = dict(compiler_options={"xla_allow_excess_precision": False})  # as XLA_FLAGS sets for a whole process
    cfg = small_config(**postmix)
    layer, (x, g) = make_layer(cfg), make_input(cfg, 2, 16)
    kept = _gradients(apply, **exact)(layer, x, g)
    unfused, fused = flipped(layer, x, g, run=_gradients(jax.checkpoint(apply), **exact))
    assert_trees_bitwise_equal(kept, unfused, names=("kept", "rematerialised"))
    assert_trees_bitwise_equal(kept, fused, names=("kept", "rematerialised and fused"))


@pytest.mark.optimised
def test_nnx_jit_grad_and_remat():
    cfg = small_config()
    layer, (x, g) = make_layer(cfg), make_input(cfg, 2, 16)

    @nnx.jit
    def run(layer, x, g, segment_ids, positions):
        loss = lambda layer: jnp.sum((nnx.remat(apply)(layer, x) * g).astype(jnp.float32))  # noqa: E731
        return nnx.value_and_grad(loss)(layer)

    unfused, fused = flipped(layer, x, g, run=run)
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))


@pytest.mark.optimised
def test_donated_stack_of_layers_under_scan():
    cfg = small_config(postmix_backward="single_pass")
    layers = [make_layer(cfg, i, seed=i) for i in range(3)]
    x, g = make_input(cfg, 2, 16)

    def step(stacked, x, g):
        scan = lambda stacked, x: jax.lax.scan(lambda x, layer: (x + apply(layer, x), None), x, stacked)[0]  # noqa: E731
        y, pull = jax.vjp(scan, stacked, x)
        d_stacked, dx = pull(g)
        return jax.tree.map(lambda p, d: p - 0.1 * d.astype(p.dtype), stacked, d_stacked), y, dx

    results = []
    for fuse, donate in ((False, ()), (True, (0,))):
        for layer in layers:
            layer.fuse_inv_rope = fuse
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        old = stacked.q_up.kernel[...]
        stacked, *rest = jax.jit(step, donate_argnums=donate)(stacked, x, g)
        assert old.is_deleted() == bool(donate)
        assert stacked.fuse_inv_rope is fuse
        results.append((nnx.to_pure_dict(nnx.state(stacked)), rest))
    assert_trees_bitwise_equal(*results, names=("unfused, kept", "fused, donated"))
    layers[1].fuse_inv_rope = False
    with pytest.raises(ValueError):  # layers that differ are not stacked by mistake
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


@POSTMIXES
def test_frozen_postmix_computes_no_gradient_of_it(postmix):
    cfg = small_config(**postmix)
    layer, (x, g) = make_layer(cfg), make_input(cfg, 2, 16)
    is_postmix = nnx.Any(nnx.PathContains("postmix_u"), nnx.PathContains("postmix_v"))

    def gradients(layer, frozen):
        graphdef, frozen, trained = nnx.split(layer, frozen, ...)
        _, pull = jax.vjp(lambda trained, x: apply(nnx.merge(graphdef, frozen, trained), x), trained, x)
        return pull(g)

    def products(frozen):
        jaxpr = jax.make_jaxpr(functools.partial(gradients, frozen=frozen))(layer).jaxpr
        heads = cfg.num_attention_heads
        shape = layer.postmix_u[...].shape if cfg.vha_postmix_grouped else (heads, heads)  # dU's and dV's, or dM's
        products = [e for e in program.equations(jaxpr) if e.primitive.name == "dot_general"]
        return sum(e.outvars[0].aval.shape == shape for e in products)

    results = []
    for layer.fuse_inv_rope in (False, True):
        # What is left is M = V U^T + I itself.
        wanted = (2, 0) if cfg.vha_postmix_grouped else (2, 1)
        assert (products(nnx.Nothing()), products(is_postmix)) == wanted
        results.append(jax.jit(functools.partial(gradients, frozen=is_postmix))(layer))
    (unfused, unfused_dx), (fused, fused_dx) = results
    assert_trees_bitwise_equal(*(nnx.to_pure_dict(s) for s in (unfused, fused)), names=("unfused", "fused"))
    assert_trees_bitwise_equal(unfused_dx, fused_dx, names=("unfused", "fused"))


@POSTMIXES
def test_shard_map_over_the_batch(postmix):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices: set XLA_FLAGS=--xla_force_host_platform_device_count=4")
    cfg = small_config(gated_attention=True, **postmix)
    layer, (x, g) = make_layer(cfg), make_input(cfg, 4, 24)
    segment_ids = np.concatenate([common.SEGMENTS, common.SEGMENTS[:1]])
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("batch",), axis_types=auto, devices=jax.devices()[:4])

    # Parameters are the same on every device, so their gradients leave as sums; the flip may not add a collective.
    specs = {"y": P("batch"), "dx": P("batch"), "params": P()}

    @jax.jit
    def run(layer, x, g, segment_ids, positions):
        shards = jax.shard_map(
            compute, mesh=mesh, in_specs=(P(), P("batch"), P("batch"), P("batch")), out_specs=specs, check_vma=True
        )
        return shards(layer, x, g, segment_ids)

    unfused, fused = flipped(layer, x, g, segment_ids, run=run)
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
    collectives = []
    for layer.fuse_inv_rope in (False, True):
        text = run.lower(layer, x, g, segment_ids, None).as_text()
        collectives.append(text.count("all_reduce"))
    assert collectives[0] == collectives[1]
    # bf16 sums in another order; a gradient that is not summed over the devices would be off by more than its size.
    whole = common.run(layer, x, g, segment_ids, None)
    for one, four in zip(jax.tree.leaves(whole), jax.tree.leaves(fused), strict=True):
        one, four = np.asarray(one, np.float32), np.asarray(four, np.float32)
        np.testing.assert_allclose(four, one, rtol=0, atol=0.05 * np.abs(one).max())
