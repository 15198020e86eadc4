"""Switches as attributes: what may be assigned, and when a new value acts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layers.common import make_layer, small_config

from dsv4_fusions.layers import CompressedSparseAttention, Decoder, FusionStatus


@pytest.fixture
def layer():
    return make_layer(small_config())


@pytest.fixture
def x():
    return jnp.ones((2, 8, small_config().q_lora_rank), jnp.bfloat16)


@pytest.mark.parametrize("switch", ["fuse_inv_rope", "fuse_kv_index_remap"])
@pytest.mark.parametrize("value", [1, 0, None, np.True_, "True", [True]])
def test_only_bools_are_taken(layer, switch, value):
    with pytest.raises(TypeError, match=rf"{switch}: got .* wanted True or False"):
        setattr(layer, switch, value)
    with pytest.raises(TypeError, match=rf"{switch}: got"):
        make_layer(small_config(), **{switch: 1})
    assert getattr(layer, switch) is False


def test_typos_raise(layer):
    with pytest.raises(AttributeError, match="no switch 'fuse_inv_rop'; it has fuse_inv_rope, fuse_kv_index_remap"):
        layer.fuse_inv_rop = True
    with pytest.raises(AttributeError, match="no switch 'fuse_inv_rope'; it has fuse_kv_index_remap"):
        layer.core_attention.fuse_inv_rope = True
    with pytest.raises(AttributeError, match="no switch 'implementation'; it has fuse_kv_index_remap"):
        layer.core_attention.implementation = "xla"
    with pytest.raises(AttributeError, match="no switch 'postmix_backward'; it has fuse_kv_index_remap"):
        layer.core_attention.postmix_backward = "dot_general"
    with pytest.raises(ValueError, match="postmix_backward: got 'single-pass', wanted one of dot_general, single_pass"):
        layer.postmix_backward = "single-pass"
    with pytest.raises(ValueError, match="implementation: got 'cuda'"):
        layer.implementation = "cuda"
    with pytest.raises(ValueError, match="implementation: got 'cuda'"):
        make_layer(small_config(), implementation="cuda")
    for name in (None, "xla", "triton", "mosaic", "jax_triton"):
        layer.implementation = name
    layer.postmix_backward = "single_pass"


def test_own_arguments_override_the_configuration():
    cfg = small_config(fuse_inv_rope=True, fuse_kv_index_remap=True, implementation="xla")
    layer = make_layer(cfg)
    assert (layer.fuse_inv_rope, layer.fuse_kv_index_remap, layer.implementation) == (True, True, "xla")
    layer = make_layer(cfg, fuse_inv_rope=False, fuse_kv_index_remap=False, implementation="triton")
    assert (layer.fuse_inv_rope, layer.fuse_kv_index_remap, layer.implementation) == (False, False, "triton")
    assert make_layer(cfg).postmix_backward == "dot_general"
    assert make_layer(small_config(postmix_backward="single_pass")).postmix_backward == "single_pass"
    assert CompressedSparseAttention(cfg, rngs=nnx.Rngs(0)).fuse_kv_index_remap is True


def test_remap_switch_has_one_home(layer):
    layer.fuse_kv_index_remap = True
    assert layer.core_attention.fuse_kv_index_remap is True
    layer.core_attention.fuse_kv_index_remap = False
    assert layer.fuse_kv_index_remap is False


@pytest.mark.parametrize(
    "name, value",
    [
        ("fuse_inv_rope", True),
        ("fuse_kv_index_remap", True),
        ("postmix_backward", "single_pass"),
        ("implementation", "xla"),
    ],
)
def test_model_and_block_have_the_switches_of_their_layers(name, value):
    model = Decoder(small_config(), rngs=nnx.Rngs(0))
    values = lambda model: [getattr(layer.attention, name) for layer in model.layers]  # noqa: E731
    default = getattr(model, name)
    assert values(model) == [default] * 3 and default != value
    setattr(model.layers[1], name, value)
    assert values(model) == [default, value, default] and getattr(model.layers[1], name) == value
    with pytest.raises(AttributeError, match=rf"Decoder.{name} differs between its layers; set_attributes\({name}="):
        getattr(model, name)
    model.set_attributes(**{name: value})
    assert values(model) == [value] * 3 and getattr(model, name) == value
    setattr(model, name, default)
    assert values(model) == [default] * 3
    copy = nnx.with_attributes(model, **{name: value})
    assert values(copy) == [value] * 3 and values(model) == [default] * 3
    assert getattr(nnx.merge(*nnx.split(copy)), name) == value


def test_model_and_block_refuse_what_a_layer_refuses():
    model = Decoder(small_config(), rngs=nnx.Rngs(0))
    for module in (model, model.layers[0]):
        with pytest.raises(AttributeError, match="no switch 'fuse_typo'; it has fuse_inv_rope, fuse_kv_index_remap, "):
            module.fuse_typo = 1
        with pytest.raises(TypeError, match="fuse_inv_rope: got 1, wanted True or False"):
            module.fuse_inv_rope = 1
        with pytest.raises(ValueError, match="implementation: got 'cuda'"):
            module.implementation = "cuda"


def test_whole_model_is_flipped_at_once():
    model = Decoder(small_config(), rngs=nnx.Rngs(0))
    model.set_attributes(fuse_inv_rope=True, fuse_kv_index_remap=True)
    assert all(s.active for layer in model.explain_fusions().values() for s in layer.values())
    copy = nnx.with_attributes(model, fuse_inv_rope=False)
    assert not any(layer["fuse_inv_rope"].active for layer in copy.explain_fusions().values())
    assert all(layer["fuse_inv_rope"].active for layer in model.explain_fusions().values())
    with pytest.raises(ValueError, match="fuse_typo"):
        model.set_attributes(fuse_typo=True)
    with pytest.raises(TypeError, match="fuse_inv_rope"):
        model.set_attributes(fuse_inv_rope=1)


def test_guard_survives_split_merge_and_clone(layer):
    layer.fuse_inv_rope = True
    for copy in (nnx.merge(*nnx.split(layer)), nnx.clone(layer), jax.tree.map(lambda leaf: leaf, layer)):
        assert copy.fuse_inv_rope is True
        with pytest.raises(TypeError):
            copy.fuse_inv_rope = 1


def test_status_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FusionStatus(True, "xla", "").active = False


# ---- when a flip acts


def traced(seen):
    """A step that notes, each time it is traced, what the layer's forward would do. It computes next to nothing."""

    def step(layer, x):
        seen.append(layer.explain_fusions(x)["fuse_inv_rope"].active)
        return layer.q_norm(x)

    return step


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit], ids=["jax.jit", "nnx.jit"])
def test_flip_acts_where_the_module_is_an_argument(layer, x, jit):
    seen = []
    step = jit(traced(seen))
    for layer.fuse_inv_rope in (False, True, False, True):
        step(layer, x)
    assert seen == [False, True]  # and the code of both values is kept


def test_flip_acts_where_the_module_is_split_anew(layer, x):
    seen = []
    step = jax.jit(lambda graphdef, state, x: traced(seen)(nnx.merge(graphdef, state), x))
    for layer.fuse_inv_rope in (False, True, False):
        step(*nnx.split(layer), x)
    assert seen == [False, True]


def test_flip_of_one_layer_of_a_model(x):
    model = Decoder(small_config(), rngs=nnx.Rngs(0))
    seen = []
    step = jax.jit(lambda model, x: [traced(seen)(layer.attention, x) for layer in model.layers])
    step(model, x)
    model.layers[1].attention.fuse_inv_rope = True
    step(model, x)
    assert seen == [False] * 3 + [False, True, False]


def test_closed_over_layer_keeps_the_old_value(layer, x):
    """As documented on `Switches`: nothing that JAX sees has changed."""
    seen = []
    step = jax.jit(lambda x: traced(seen)(layer, x))
    for layer.fuse_inv_rope in (False, True):
        step(x)
    assert seen == [False]


def test_cached_partial_keeps_the_old_value(layer, x):
    seen = []
    step = nnx.cached_partial(nnx.jit(traced(seen)), layer)
    for layer.fuse_inv_rope in (False, True):
        step(x)
    assert seen == [False]


def test_earlier_graphdef_keeps_the_old_value(layer, x):
    seen = []
    step = jax.jit(lambda graphdef, state, x: traced(seen)(nnx.merge(graphdef, state), x))
    graphdef, state = nnx.split(layer)
    for layer.fuse_inv_rope in (False, True):
        step(graphdef, state, x)
    assert seen == [False]
    assert nnx.merge(graphdef, state).fuse_inv_rope is False
