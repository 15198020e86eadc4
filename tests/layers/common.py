"""What the layer tests share: small configurations, the four quantities that are compared, and questions to a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import program
from flax import nnx

from dsv4_fusions.config import DSv4Config
from dsv4_fusions.layers import DSv4HybridSelfAttention

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
    index_head_dim=16,
    intermediate_size=32,
)

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
    layer = DSv4HybridSelfAttention(cfg, layer_index, rngs=nnx.Rngs(seed), **switches)
    if cfg.use_vha_attention:
        keys = jax.random.split(jax.random.key(43))
        for key, param in zip(keys, (layer.postmix_u, layer.postmix_v), strict=True):
            values = 0.05 * jax.random.normal(key, param[...].shape)
            param[...] = values.astype(jnp.bfloat16).astype(param[...].dtype)
    return layer


def make_input(cfg, batch, tokens, seed=42):
    """x and a cotangent, both N(0, 1)."""
    keys = jax.random.split(jax.random.key(seed))
    shape = (batch, tokens, cfg.hidden_size)
    return tuple(jax.random.normal(key, shape).astype(cfg.dtype) for key in keys)


def compute(layer, x, g, segment_ids=None, positions=None):
    """Output, input gradient and every parameter gradient of a layer."""
    y, pull = jax.vjp(lambda layer, x: layer(x, segment_ids, positions)[0], layer, x)
    d_layer, dx = pull(g)
    return {"y": y, "dx": dx, "params": nnx.to_pure_dict(nnx.state(d_layer))}


run = jax.jit(compute)


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
