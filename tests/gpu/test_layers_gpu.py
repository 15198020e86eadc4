"""Whole layers and training steps on a GPU: flipping the fusions moves no bit, and the fused kernels are what runs."""

import jax
import jax.numpy as jnp
import pytest
from layers import common
from layers.common import make_input, make_layer, run

# Collected here as well, to run on the GPU.
from layers.test_transforms import test_donated_stack_of_layers_under_scan, test_vmap  # noqa: F401

from dsv4_fusions import DSv4Config
from dsv4_fusions.testing import assert_trees_bitwise_equal

V4_FLASH = dict(
    hidden_size=4096,
    num_hidden_layers=3,
    compress_ratios=(0, -1, 128),
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1024,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
)


def assert_no_flip_moves_a_bit(cfg, layer_index, batch, tokens, segment_ids=None):
    layer = make_layer(cfg, layer_index)
    x, g = make_input(cfg, batch, tokens)
    results = []
    for fused in (False, False, True):
        layer.fuse_inv_rope = layer.fuse_kv_index_remap = fused
        results.append(run(layer, x, g, segment_ids))
    unfused, again, fused = results
    assert_trees_bitwise_equal(unfused, again, names=("unfused", "again"))
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
    return layer, x


def test_smallest_layer():
    layer, x = assert_no_flip_moves_a_bit(common.small_config(), 0, 2, 1)
    assert {status.implementation for status in layer.explain_fusions(x).values()} == {"triton"}
    kernels = common.kernels(common.forward_jaxpr(layer, x))
    assert set(kernels) == {"inv_rope_vha_postmix", "local_to_flat_kv_index"}


@pytest.mark.parametrize("rounding", ["each_product", "once"])
@pytest.mark.parametrize("tokens", [32, 97, 128, 384])
@pytest.mark.parametrize("layer_index", [0, 1, 2])
def test_reference_layer(layer_index, tokens, rounding):
    cfg = DSv4Config(**common.REFERENCE | dict(compress_ratios=(0, -1, 128), rope_rounding=rounding))
    assert_no_flip_moves_a_bit(cfg, layer_index, 2, tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_documents(dtype):
    cfg = DSv4Config(**common.REFERENCE | dict(compress_ratios=(0, -1, 128), dtype=dtype, param_dtype="float32"))
    for layer_index in range(3):
        assert_no_flip_moves_a_bit(cfg, layer_index, 3, 24, jnp.asarray(common.SEGMENTS))


@pytest.mark.parametrize("layer_index", [0, 2])
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
