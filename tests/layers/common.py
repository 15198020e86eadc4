"""What the layer tests share: small configurations, the four quantities that are compared, and questions to a jaxpr."""

import functools

import compilation
import jax
import jax.numpy as jnp
import numpy as np
import program
from flax import nnx
from layers import loops

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.layers import DSv4HybridSelfAttention, attention_layer

# The layer of PaddleFleet PR #1772's layer test.
REFERENCE = dict(
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_groups=4,
    o_lora_rank=32,
    compress_ratios=(128, 128, 128),
    sliding_window=16,
    compress_rope_theta=10000.0,
    yarn=None,
    index_n_heads=4,
    index_head_dim=32,
    index_topk=8,
    vha_rank=2,
    param_dtype="bfloat16",
    vocab_size=64,
    intermediate_size=128,
)

# Small enough for many compilations and for NumPy loops.
SMALL = REFERENCE | dict(
    hidden_size=24,
    num_attention_heads=4,
    head_dim=12,
    qk_rope_head_dim=6,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=5,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    v_head_dim=10,
    index_head_dim=16,
    intermediate_size=32,
)

PHASES = ("sparse", "warm_up", "dense")

# Layers with an indexer that has a choice to make and is trained.
INDEXED = dict(dtype="float32", param_dtype="float32", indexer_loss_coeff=0.5, index_topk=3)

# Three batch entries with different documents: padding at the front, inside, at the end, and an id that comes back.
SEGMENTS = np.array(
    [
        [1] * 9 + [2] * 1 + [1] * 11 + [0] * 3,
        [0] * 2 + [5] * 8 + [0] * 3 + [6] * 11,
        [7] * 24,
    ],
    np.int32,
)


def small_config(**changes) -> DSv4Config:
    return DSv4Config(**(SMALL | changes))


def make_layer(cfg, layer_index=0, seed=42, **switches) -> DSv4HybridSelfAttention:
    """A layer whose postmix matrix is no identity: with V = 0 every sum over heads would have a single term."""
    with compilation.quick():
        layer = DSv4HybridSelfAttention(cfg, layer_index, rngs=nnx.Rngs(seed), **switches)
        if cfg.use_vha_attention:
            keys = jax.random.split(jax.random.key(43))
            for key, param in zip(keys, (layer.postmix_u, layer.postmix_v), strict=True):
                values = 0.05 * jax.random.normal(key, param[...].shape)
                param[...] = values.astype(jnp.bfloat16).astype(param[...].dtype)
    return layer


def randomised(make, seed=0):
    """A module with every parameter random, also those that start at 0 or 1; quick, as none is initialised."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(nnx.eval_shape(make))
    rng = np.random.default_rng(seed)
    values = []
    for path, leaf in leaves:
        value = rng.standard_normal(leaf.shape, np.float32)
        if "weight" in str(path):
            value = 1 + 0.3 * value
        elif leaf.ndim > 1:
            value *= leaf.shape[-2] ** -0.5
        values.append(jnp.asarray(value.astype(leaf.dtype)))
    return jax.tree.unflatten(structure, values)


def random_layer(cfg, layer_index=0, seed=0, **switches):
    """The attention layer of a configuration's layer, `randomised`."""
    return randomised(lambda: attention_layer(cfg, layer_index, rngs=nnx.Rngs(0), **switches), seed)


def in_f64(module):
    """A module with NumPy f64 parameters, for the loops alone."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), module)


def make_input(cfg, batch, tokens, seed=42):
    """x and a cotangent, both N(0, 1)."""
    shape = (batch, tokens, cfg.hidden_size)
    with compilation.quick():
        return tuple(jax.random.normal(key, shape).astype(cfg.dtype) for key in jax.random.split(jax.random.key(seed)))


def compute(layer, x, g, segment_ids=None, positions=None):
    """Output, input gradient, every parameter gradient and the auxiliary losses of a layer."""
    (y, aux), pull = jax.vjp(lambda layer, x: layer(x, segment_ids, positions), layer, x)
    d_layer, dx = pull((g, jax.tree.map(jnp.ones_like, aux)))
    return {"y": y, "dx": dx, "params": nnx.to_pure_dict(nnx.state(d_layer)), **aux}


run = jax.jit(compute)

# For what is compared within rounding, or is no arithmetic of a kernel: half the time to compile. Tests that share a
# configuration and a shape share the program.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
quick_run = quick(compute)


@quick
def quick_apply(layer, x, segment_ids=None, positions=None):
    return layer(x, segment_ids, positions)


@quick
def pulled_back(layer, x, g, g_loss, segment_ids=None, positions=None, loss_mask=None):
    """Output, auxiliary losses, and the gradients that the cotangents of both give to the layer and to x."""
    (y, aux), pull = jax.vjp(lambda layer, x: layer(x, segment_ids, positions, loss_mask), layer, x)
    return y, aux, *pull((g, jax.tree.map(lambda loss: jnp.full_like(loss, g_loss), aux)))


def assert_gradients_are_differences(loss, module, x, gradients, which, one_by_one):
    """Compares gradients with central differences of `loss(module, x)` in f64, along a random direction.

    Args:
      loss: function of a NumPy module and input.
      module, x: where.
      gradients: (of the module, of x).
      which: predicate on a leaf's path as text; the other leaves are held.
      one_by_one: a direction for each leaf. Otherwise one for all, in which every leaf weighs the same.
    """
    rng, step = np.random.default_rng(0), 1e-6
    at, structure = jax.tree.flatten((in_f64(module), np.asarray(x, np.float64)))
    moves = []
    for i, (path, gradient) in enumerate(jax.tree_util.tree_leaves_with_path(gradients)):
        if which(jax.tree_util.keystr(path)):
            gradient = np.asarray(gradient, np.float64)
            direction = rng.standard_normal(gradient.shape) / np.linalg.norm(gradient)
            moves.append((i, direction, np.sum(gradient * direction)))
    for group in [[move] for move in moves] if one_by_one else [moves]:
        ends = []
        for sign in (1, -1):
            there = list(at)
            for i, direction, _ in group:
                there[i] = there[i] + sign * step * direction
            ends.append(loss(*jax.tree.unflatten(structure, there)))
        got, want = sum(slope for *_, slope in group), (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def check_against_loops(cfg, segment_ids, positions, loss_mask, one_by_one):
    """Output, loss and gradients: the output's of all but the indexer, the loss's of the indexer."""
    layer, (x, g) = random_layer(cfg), make_input(cfg, *segment_ids.shape)
    y, aux, *gradients = pulled_back(layer, x, g, 1.0, segment_ids, positions, loss_mask)
    of_output = lambda module, x: np.sum(loops.layer(module, x, segment_ids, positions) * np.asarray(g))  # noqa: E731
    of_loss = lambda module, x: loops.layer_and_loss(module, x, segment_ids, positions, loss_mask)[1]  # noqa: E731
    np.testing.assert_allclose(y, loops.layer(layer, x, segment_ids, positions), rtol=1e-4, atol=1e-5)
    assert list(aux) == ["indexer_loss"] and aux["indexer_loss"].dtype == jnp.float32
    np.testing.assert_allclose(aux["indexer_loss"], of_loss(layer, x), rtol=1e-5)
    assert_gradients_are_differences(of_output, layer, x, gradients, lambda p: "indexer" not in p, one_by_one)
    assert_gradients_are_differences(of_loss, layer, x, gradients, lambda p: "indexer" in p, one_by_one)


def flipped(layer, x, g, segment_ids=None, positions=None, switch="fuse_inv_rope", run=run):
    """The results of one live layer with a switch off and on."""
    results = []
    for value in (False, True):
        setattr(layer, switch, value)
        results.append(run(layer, x, g, segment_ids, positions))
    return results


def forward_jaxpr(layer, x, segment_ids=None):
    return jax.make_jaxpr(lambda layer, x: layer(x, segment_ids)[0])(layer, x).jaxpr


def rotated_tensors(jaxpr, shape) -> int:
    """How many tensors of `shape` are put together from channels as they were and rotated ones."""
    made = (e for e in program.equations(jaxpr) if e.primitive.name == "concatenate")
    return sum(e.outvars[0].aval.shape == shape and e.invars[-1].aval.shape[-1] < shape[-1] for e in made)


def kernels(jaxpr) -> list[str]:
    """Names of the Pallas kernels that a jaxpr calls."""
    return program.kernel_names(jaxpr)
