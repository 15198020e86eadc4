import warnings

import compilation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers import common
from layers.common import small_config

from dsv4_fusions.layers import Decoder
from dsv4_fusions.testing import assert_trees_bitwise_equal

HYBRID = dict(num_hidden_layers=2, compress_ratios=(0, -1))


def make_decoder(cfg, **switches):
    with compilation.quick():
        model = Decoder(cfg, rngs=nnx.Rngs(1), **switches)
        for layer in model.layers:
            v = layer.attention.postmix_v
            v[...] = (0.05 * jax.random.normal(jax.random.key(2), v[...].shape)).astype(v[...].dtype)
    return model


def make_ids(batch, tokens):
    return jax.random.randint(jax.random.key(3), (batch, tokens), 0, 64)


@jax.jit
def apply(model, ids):
    return model(ids)


@jax.jit
def loss_and_gradients(model, ids, segment_ids):
    def loss(model):
        logits, _ = model(ids, segment_ids)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, ids[:, 1:, None], axis=-1))

    value, gradients = jax.value_and_grad(loss)(model)
    return value, nnx.to_pure_dict(nnx.state(gradients))


@pytest.mark.optimised
def test_flips_change_no_bit_of_loss_or_gradients():
    cfg = small_config(**HYBRID)
    model, ids = make_decoder(cfg), make_ids(3, 24)
    off = loss_and_gradients(model, ids, common.SEGMENTS)
    model.set_attributes(fuse_inv_rope=True, fuse_kv_index_remap=True)
    on = loss_and_gradients(model, ids, common.SEGMENTS)
    assert_trees_bitwise_equal(off, on, names=("unfused", "fused"))
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(on))


def test_logits_are_f32_and_head_is_tied():
    cfg = small_config(**HYBRID)
    model, ids = make_decoder(cfg), make_ids(2, 12)
    logits, aux = apply(model, ids)
    assert (logits.shape, logits.dtype, aux) == ((2, 12, 64), jnp.float32, {})
    names = nnx.to_pure_dict(nnx.state(model)).keys()
    assert names == {"embedding", "layers", "norm"}
    # The output layer's half of the gradient reaches tokens that the input never had.
    _, gradients = loss_and_gradients(model, jnp.zeros((3, 24), jnp.int32), common.SEGMENTS)
    assert jnp.all(jnp.any(gradients["embedding"], axis=-1))


def test_block_by_block():
    """The residual stream written out with the model's own parts."""
    cfg = small_config(**HYBRID, dtype="float32", param_dtype="float32")
    model, ids = make_decoder(cfg), make_ids(2, 12)

    @jax.jit
    def written_out(model, ids):
        x = model.embedding[...][ids]
        for layer in model.layers:
            x = x + layer.attention(layer.attention_norm(x))[0]
            h = layer.mlp_norm(x)
            gate, up, down = (p.kernel[...] for p in (layer.mlp.gate, layer.mlp.up, layer.mlp.down))
            x = x + (jax.nn.silu(h @ gate) * (h @ up)) @ down
        return model.norm(x) @ model.embedding[...].T

    np.testing.assert_allclose(apply(model, ids)[0], written_out(model, ids), rtol=1e-4, atol=1e-5)


def test_no_token_sees_the_future():
    model, ids = make_decoder(small_config(**HYBRID)), make_ids(2, 12)
    (before, _), (after, _) = apply(model, ids), apply(model, ids.at[:, 5].add(1))
    changed = np.any(np.asarray(before != after), axis=(0, 2))
    assert not changed[:5].any() and changed[5:].all()


def test_explain_names_every_layer():
    model = make_decoder(small_config(**HYBRID), fuse_inv_rope=True, fuse_kv_index_remap=True)
    told = model.explain_fusions(make_ids(1, 4))
    assert list(told) == ["layers.0", "layers.1"]
    assert all(layer["fuse_inv_rope"].active for layer in told.values())
    assert not any(layer["fuse_kv_index_remap"].active for layer in told.values())  # batch 1
    assert all(layer["fuse_kv_index_remap"].active for layer in model.explain_fusions(make_ids(2, 4)).values())


def test_fusion_that_can_never_fire_warns_once():
    cfg = small_config(use_vha_attention=False, sparse_attention_backend="xla")
    with pytest.warns(UserWarning) as record:
        model = Decoder(cfg, rngs=nnx.Rngs(0), fuse_inv_rope=True, fuse_kv_index_remap=True)
    assert sorted(str(w.message).split("=")[0] for w in record) == ["fuse_inv_rope", "fuse_kv_index_remap"]
    assert all(layer.attention.fuse_inv_rope and layer.attention.fuse_kv_index_remap for layer in model.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(cfg, rngs=nnx.Rngs(0))


def test_configuration_gives_the_defaults():
    cfg = small_config(fuse_inv_rope=True, implementation="xla")
    on, off = Decoder(cfg, rngs=nnx.Rngs(0)), Decoder(cfg, rngs=nnx.Rngs(0), fuse_inv_rope=False)
    assert all(layer.attention.fuse_inv_rope and layer.attention.implementation == "xla" for layer in on.layers)
    assert not any(layer.attention.fuse_inv_rope for layer in off.layers)
    assert_trees_bitwise_equal(*(nnx.to_pure_dict(nnx.state(model)) for model in (on, off)))
