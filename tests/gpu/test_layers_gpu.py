"""Whole layers and training steps on a GPU: flipping the fusions moves no bit, and the fused kernels are what runs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from layers import common
from layers.common import make_input, make_layer, random_layer

# Collected here as well, to run on the GPU.
from layers.test_indexer import test_of_equal_scores_the_earlier_is_taken  # noqa: F401
from layers.test_transforms import test_donated_stack_of_layers_under_scan, test_vmap  # noqa: F401

from dsv4_fusions import DSv4Config
from dsv4_fusions.config import REMAT_SEGMENTS
from dsv4_fusions.layers import attention_layer
from dsv4_fusions.testing import assert_trees_bitwise_equal

RATIOS = (0, -1, 128, 4, -2)
REFERENCE = common.REFERENCE | dict(
    compress_ratios=RATIOS,
    num_hidden_layers=len(RATIOS),
    indexer_loss_coeff=0.1,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
)
V4_FLASH = dict(
    hidden_size=4096,
    num_hidden_layers=5,
    compress_ratios=(0, -1, 128, 4, -2),
    indexer_loss_coeff=0.1,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
)


@jax.jit
def step(layer, x, g, segment_ids):
    """Output, auxiliary losses and all gradients, those of the losses included."""
    (y, aux), pull = jax.vjp(lambda layer, x: layer(x, segment_ids), layer, x)
    d_layer, dx = pull((g, jax.tree.map(jnp.ones_like, aux)))
    return y, aux, nnx.to_pure_dict(nnx.state(d_layer)), dx


def assert_no_flip_moves_a_bit(cfg, layer_index, batch, tokens, segment_ids=None):
    layer = random_layer(cfg, layer_index)
    x, g = make_input(cfg, batch, tokens)
    results = []
    for fused in (False, False, True):
        layer.fuse_inv_rope = layer.fuse_kv_index_remap = fused
        results.append(step(layer, x, g, segment_ids))
    unfused, again, fused = results
    assert_trees_bitwise_equal(unfused, again, names=("unfused", "again"))
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
    return layer, x


def test_smallest_layer():
    layer, x = assert_no_flip_moves_a_bit(common.small_config(), 0, 2, 1)
    assert {status.implementation for status in layer.explain_fusions(x).values()} == {"triton"}
    kernels = common.kernels(common.forward_jaxpr(layer, x))
    assert set(kernels) == {"inv_rope_vha_postmix", "flat_kv_index_table"}


@pytest.mark.parametrize("tokens, rounding", [(97, "each_product"), (384, "each_product"), (128, "once")])
@pytest.mark.parametrize("layer_index", range(len(RATIOS)))
def test_reference_layer(layer_index, tokens, rounding):
    cfg = DSv4Config(**REFERENCE | dict(rope_rounding=rounding))
    assert_no_flip_moves_a_bit(cfg, layer_index, 2, tokens)


@pytest.mark.parametrize("dtype, ratios", [("bfloat16", RATIOS), ("float16", (0, 4)), ("float32", (128, -2))])
def test_documents(dtype, ratios):
    cfg = DSv4Config(**REFERENCE | dict(dtype=dtype, param_dtype="float32"))
    for layer_index in map(RATIOS.index, ratios):
        assert_no_flip_moves_a_bit(cfg, layer_index, 3, 24, jnp.asarray(common.SEGMENTS))


@pytest.mark.parametrize("phase", ["warm_up", "dense"])
@pytest.mark.parametrize("layer_index", [3, 4])
def test_other_phases_of_the_indexer(layer_index, phase):
    assert_no_flip_moves_a_bit(DSv4Config(**REFERENCE | dict(indexer_phase=phase)), layer_index, 2, 97)


@pytest.mark.parametrize("layer_index, segment", [*((3, segment) for segment in REMAT_SEGMENTS), (4, "full_attn")])
def test_recomputed_segments(layer_index, segment):
    assert_no_flip_moves_a_bit(DSv4Config(**REFERENCE | dict(remat=segment)), layer_index, 2, 129)


@pytest.mark.parametrize("layer_index", range(len(RATIOS)))
def test_decoding(layer_index):
    """A prompt and then tokens: the same bits fused or not, and the call on all of them up to rounding."""
    cfg = DSv4Config(**REFERENCE)
    layer, (x, _) = random_layer(cfg, layer_index), make_input(cfg, 2, 160)
    decode = jax.jit(lambda layer, x, cache: layer.decode(x, cache), donate_argnums=2)
    results = []
    for fused in (False, False, True):
        layer.fuse_inv_rope = layer.fuse_kv_index_remap = fused
        y, cache = decode(layer, x[:, :125], layer.init_cache(2, 160))
        parts = [y]
        for t in range(125, 160):
            y, cache = decode(layer, x[:, t : t + 1], cache)
            parts.append(y)
        results.append((jnp.concatenate(parts, axis=1), cache))
    unfused, again, fused = results
    assert_trees_bitwise_equal(unfused, again, names=("unfused", "again"))
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
    whole = jax.jit(lambda layer, x: layer(x)[0])(layer, x)
    error, scale = (jnp.linalg.norm(a.astype(jnp.float32)) for a in (whole - fused[0], whole))
    # Where bf16 noise swaps a selected row, a token differs by what that row is worth.
    assert error <= (0.02 if cfg.compress_ratios[layer_index] in (-1, 0, 128) else 0.1) * scale


@pytest.mark.parametrize("layer_index", [2, 3])
def test_memory_of_a_training_step(layer_index):
    """V4-Flash's dimensions, 4096 tokens, all gradients: arguments, results and temporaries below 8 GiB."""
    cfg = DSv4Config(**V4_FLASH | dict(param_dtype="bfloat16", fuse_inv_rope=True))
    layer = nnx.eval_shape(lambda: attention_layer(cfg, layer_index, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 4096, 4096), jnp.bfloat16)
    memory = step.lower(layer, x, x, None).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert peak < 8 * 2**30


def test_indexer_at_16384_tokens():
    """4096 candidates: all their scores at once would take 16 GiB, and their gradient as much."""
    cfg = DSv4Config(**V4_FLASH | dict(param_dtype="bfloat16"))
    layer = nnx.eval_shape(lambda: attention_layer(cfg, 3, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((1, 16384, 4096), jnp.bfloat16)
    memory = step.lower(layer, x, x, None).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 12 * 2**30


@pytest.mark.parametrize("layer_index", [0, 2, 3, 4])
def test_v4_flash_dimensions(layer_index):
    assert_no_flip_moves_a_bit(DSv4Config(**V4_FLASH), layer_index, 2, 1024)


def test_remat_keeps_the_fused_bits():
    cfg = DSv4Config(**common.REFERENCE)
    layer, (x, g) = make_layer(cfg), make_input(cfg, 2, 256)

    @jax.jit
    def rematerialized(layer, x, g):
        return jax.vjp(jax.checkpoint(lambda layer, x: layer(x)[0]), layer, x)[1](g)

    results = []
    for layer.fuse_inv_rope in (False, True):
        results.append(rematerialized(layer, x, g))
    unfused, fused = (jax.tree.leaves(r) for r in results)
    assert_trees_bitwise_equal(unfused, fused)
