"""The Linen twins: the NNX layers' bits and paths, their guard, and life among Linen's own transformations."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from layers import common
from layers.common import make_input, small_config

from dsv4_fusions import layers, linen
from dsv4_fusions.testing import assert_trees_bitwise_equal

# An indexer is a part of two layers and nothing to be called alone.
NAMES = [
    name
    for name in layers.__all__
    if isinstance(cls := getattr(layers, name), type) and issubclass(cls, nnx.Module) and name != "Indexer"
]
SWITCHED = ["CompressedSparseAttention", "DSv4HybridSelfAttention", "DecoderBlock", "Decoder"]
FUSIONS = {"fuse_inv_rope": True, "fuse_kv_index_remap": True}


def arguments(name, cfg, **switches):
    """Constructor arguments of either kind of layer."""
    if name == "CompressedSparseAttention":
        switches.pop("fuse_inv_rope", None)
    return {
        "RMSNorm": {"channels": cfg.hidden_size, "eps": cfg.rms_norm_eps, "param_dtype": jnp.bfloat16},
        "Compressor": {"cfg": cfg, "ratio": 4, "layer_index": 1},
        "CompressedSparseAttention": {"cfg": cfg, "layer_index": 1, **switches},
        "DSv4HybridSelfAttention": {"cfg": cfg, "layer_index": 1, **switches},
        "MQALatentAttention": {"cfg": cfg, "layer_index": 1, **switches},
        "SwiGLU": {"cfg": cfg},
        "DecoderBlock": {"cfg": cfg, "layer_index": 1, **switches},
        "Decoder": {"cfg": cfg, **switches},
    }[name]


def make_pair(name, cfg, seed=0, **switches):
    """An NNX layer and its twin, every parameter of the first random: none is zero or one."""
    given = arguments(name, cfg, **switches)
    rngs = (lambda: {}) if name == "RMSNorm" else (lambda: {"rngs": nnx.Rngs(0)})
    module = nnx.eval_shape(lambda: getattr(layers, name)(**given, **rngs()))  # no initial value is computed
    rng = np.random.default_rng(seed)
    values = lambda leaf: (0.2 * rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)  # noqa: E731
    linen.update_nnx(module, jax.tree.map(values, linen.params_from_nnx(module)))
    return module, getattr(linen, name)(**given)


def make_inputs(name, cfg):
    """The arrays that a layer is called with; the first is differentiated if it is a float."""
    x = make_input(cfg, 3, 24)[0]
    if name == "CompressedSparseAttention":
        keys = jax.random.split(jax.random.key(5))
        shapes = ((3, 24, cfg.num_attention_heads, cfg.head_dim), (3, 24, cfg.head_dim))
        q, kv = (jax.random.normal(key, shape).astype(cfg.dtype) for key, shape in zip(keys, shapes, strict=True))
        return q, kv, x
    if name == "Decoder":
        return (jnp.arange(3 * 24).reshape(3, 24) % cfg.vocab_size,)
    return (x, common.SEGMENTS) if name in ("DSv4HybridSelfAttention", "MQALatentAttention") else (x,)


def outputs_and_gradients(call, params, inputs):
    """((loss, everything that the call returns), (parameters' gradients, the first input's if it is a float))."""
    first, *others = inputs

    def loss(params, *first):
        out = call(params, *first, *others)
        y = out[0] if isinstance(out, tuple) else out
        return jnp.sum(y.astype(jnp.float32) ** 2), out

    if jnp.issubdtype(first.dtype, jnp.floating):
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, first)
    others.insert(0, first)
    return jax.value_and_grad(loss, argnums=(0,), has_aux=True)(params)


def form(leaf):
    return leaf.shape, leaf.dtype


def nnx_result(module, *inputs, call=lambda module, *inputs: module(*inputs)):
    """The same of an NNX module, its parameters' gradients as a Linen tree."""

    @jax.jit
    def run(module, inputs):
        graphdef, state = nnx.split(module)
        return outputs_and_gradients(lambda state, *inputs: call(nnx.merge(graphdef, state), *inputs), state, inputs)

    value, (d_params, *d_input) = run(module, inputs)
    return value, (linen.params_from_nnx(d_params), *d_input)


def linen_result(twin, params, *inputs):
    """The same of a twin."""
    call = lambda params, *inputs: twin.apply({"params": params}, *inputs)  # noqa: E731
    return jax.jit(lambda params, inputs: outputs_and_gradients(call, params, inputs))(params, inputs)


def test_every_layer_has_a_twin_with_its_arguments():
    assert len(NAMES) >= 8
    for name in NAMES:
        twin, cls = getattr(linen, name), getattr(layers, name)
        assert issubclass(twin, nn.Module) and twin.__name__ == name and twin.NNX is cls
    fields = linen.DecoderBlock.__dataclass_fields__
    assert {"cfg", "layer_index", *FUSIONS, "postmix_backward", "implementation"} < fields.keys()


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_the_nnx_layers(name):
    # One layer suffices for the decoder: a list of them is below.
    ratios = {"Decoder": (0,), "MQALatentAttention": (0, -2)}.get(name, (-1, 0))
    # "dense": without a loss an indexer would have no gradient to compare.
    changes = dict(num_hidden_layers=len(ratios), compress_ratios=ratios, indexer_phase="dense")
    cfg = small_config(**changes, param_dtype="float32")
    module, twin = make_pair(name, cfg, **FUSIONS)
    inputs, params = make_inputs(name, cfg), linen.params_from_nnx(module)
    wanted = nnx_result(module, *inputs)
    assert_trees_bitwise_equal(wanted, linen_result(twin, params, *inputs), names=("nnx", "linen"))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(wanted[1]))


def test_init_makes_the_nnx_parameters():
    cfg = small_config(num_hidden_layers=2, compress_ratios=(128, 0))
    variables = jax.eval_shape(linen.Decoder(cfg).init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    abstract = nnx.eval_shape(lambda: layers.Decoder(cfg, rngs=nnx.Rngs(0)))
    assert variables.keys() == {"params"}
    assert jax.tree.map(form, variables["params"]) == jax.tree.map(form, linen.params_from_nnx(abstract))
    assert list(variables["params"]["layers"]) == ["0", "1"]


def test_initial_values():
    cfg = small_config(param_dtype="float32")
    twin, x = linen.SwiGLU(cfg), jnp.ones((1, 2, cfg.hidden_size), jnp.bfloat16)
    one, same, other = (jax.jit(twin.init)(jax.random.key(seed), x)["params"] for seed in (0, 0, 1))
    assert_trees_bitwise_equal(one, same)
    assert not np.array_equal(one["up"]["kernel"], other["up"]["kernel"])
    assert not np.array_equal(one["up"]["kernel"], one["gate"]["kernel"])
    assert np.std(one["up"]["kernel"]) == pytest.approx(cfg.hidden_size**-0.5, rel=0.1)


# ---- switches


@pytest.mark.parametrize("name", SWITCHED)
def test_configuration_gives_the_defaults(name):
    cfg = small_config(fuse_kv_index_remap=True, implementation="xla", postmix_backward="single_pass")
    twin = getattr(linen, name)(**arguments(name, cfg))
    assert twin.fuse_kv_index_remap is True
    assert twin.clone(fuse_kv_index_remap=False).fuse_kv_index_remap is False
    assert twin.clone(fuse_kv_index_remap=False).clone(fuse_kv_index_remap=None).fuse_kv_index_remap is True
    if name != "CompressedSparseAttention":
        assert (twin.fuse_inv_rope, twin.implementation, twin.postmix_backward) == (False, "xla", "single_pass")
    assert twin == getattr(linen, name)(**arguments(name, cfg, fuse_kv_index_remap=True))
    assert hash(twin) == hash(twin.clone()) and twin != twin.clone(fuse_kv_index_remap=False)


@pytest.mark.optimised
def test_clone_flips():
    cfg = small_config()
    module, twin = make_pair("DSv4HybridSelfAttention", cfg)
    variables, (x, _) = {"params": linen.params_from_nnx(module)}, make_input(cfg, 2, 16)
    shape = (2, 16, cfg.num_attention_heads, cfg.head_dim)
    rotated = lambda apply: common.rotated_tensors(jax.make_jaxpr(apply)(variables, x).jaxpr, shape)  # noqa: E731
    apply = jax.jit(twin.apply)
    unfused = apply(variables, x)
    fused_twin = twin.clone(fuse_inv_rope=True)  # while the wrapper that could be stale lives
    assert (rotated(apply), rotated(jax.jit(fused_twin.apply))) == (2, 1)
    assert rotated(jax.jit(fused_twin.clone(fuse_inv_rope=False).apply)) == 2
    assert_trees_bitwise_equal(unfused, jax.jit(fused_twin.apply)(variables, x), names=("unfused", "fused"))
    told = [one.explain_fusions(x)["fuse_inv_rope"].active for one in (twin, fused_twin)]
    assert told == [False, True]


ASSIGNED = [
    ("cfg", None),
    ("layer_index", 1),
    ("fuse_inv_rope", True),
    ("fuse_kv_index_remap", False),
    ("postmix_backward", "single_pass"),
    ("implementation", "xla"),
    ("fuse_typo", True),
    ("implementaton", "xla"),
]


@pytest.mark.parametrize("name, value", ASSIGNED)
def test_assignment_raises(name, value):
    twin = linen.DSv4HybridSelfAttention(small_config())
    for module in (twin, twin.clone(), copy.deepcopy(twin), twin.bind({"params": {}})):
        with pytest.raises(AttributeError, match=rf"DSv4HybridSelfAttention is frozen: use \.clone\({name}="):
            setattr(module, name, value)
    assert twin == linen.DSv4HybridSelfAttention(small_config())


BAD = [
    {"fuse_inv_rope": 1},
    {"fuse_inv_rope": np.True_},
    {"fuse_kv_index_remap": [True]},
    {"postmix_backward": "single-pass"},
    {"implementation": "cuda"},
    {"layer_index": 3},
    {"layer_index": 1.0},
    {"fuse_typo": True},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_arguments_raise_as_in_nnx(bad):
    good = linen.DSv4HybridSelfAttention(small_config(), 1, fuse_inv_rope=True)  # a value like it is known already
    with pytest.raises((TypeError, ValueError)) as by_nnx:
        nnx.eval_shape(lambda: layers.DSv4HybridSelfAttention(good.cfg, rngs=nnx.Rngs(0), **bad))
    for make in (lambda: linen.DSv4HybridSelfAttention(good.cfg, **bad), lambda: good.clone(**bad)):
        with pytest.raises(by_nnx.type) as by_linen:
            make()
        if by_nnx.type is ValueError:
            assert str(by_linen.value) == str(by_nnx.value)


def test_layers_of_another_class_raise_as_in_nnx():
    cfg, messages = small_config(compress_ratios=(-2, 0, 0)), []
    for make in (
        lambda: layers.DSv4HybridSelfAttention(cfg, rngs=nnx.Rngs(0)),
        lambda: linen.DSv4HybridSelfAttention(cfg),
    ):
        with pytest.raises(ValueError, match="MQALatentAttention is the layer of ratio -2") as error:
            make()
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_fusion_that_can_never_fire_warns_once():
    cfg = small_config(use_vha_attention=False, sparse_attention_backend="xla")
    for _ in range(2):  # each time that a user makes one
        with pytest.warns(UserWarning, match="has no effect") as record:
            twin = linen.DecoderBlock(cfg, 0, **FUSIONS)
        assert sorted(str(w.message).split("=")[0] for w in record) == sorted(FUSIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = make_input(cfg, 1, 4)[0]
        variables = jax.eval_shape(twin.init, jax.random.key(0), x)
        jax.eval_shape(twin.clone().apply, variables, x)
        linen.DecoderBlock(cfg, 0)
    assert twin.fuse_inv_rope and twin.fuse_kv_index_remap


@pytest.mark.parametrize("name", SWITCHED)
@pytest.mark.parametrize("switches", [{}, FUSIONS], ids=["off", "on"])
def test_explains_what_the_nnx_layer_explains(name, switches):
    if name == "DecoderBlock":
        assert not hasattr(layers.DecoderBlock, "explain_fusions")
        return
    module, twin = make_pair(name, small_config(), **switches)
    for batch in (None, 1, 2):
        x = None if batch is None else jax.ShapeDtypeStruct((batch, 8), jnp.int32)
        assert twin.explain_fusions(x) == twin.bind({}).explain_fusions(x) == module.explain_fusions(x)


# ---- parameters


def refused(params, *reasons):
    """Both the twin and `update_nnx` refuse a tree, in those words, and the latter has changed nothing."""
    cfg = small_config()
    module, twin = make_pair("SwiGLU", cfg)
    before, x = linen.params_from_nnx(module), make_input(cfg, 1, 2)[0]
    for call in (
        lambda: twin.apply({"params": params}, x),
        lambda: jax.eval_shape(twin.apply, {"params": params}, x),
        lambda: linen.update_nnx(module, params),
    ):
        with pytest.raises(ValueError, match="SwiGLU: parameters do not fit") as error:
            call()
        assert all(reason in str(error.value) for reason in reasons), error.value
    assert_trees_bitwise_equal(before, linen.params_from_nnx(module))


def test_parameters_that_do_not_fit_raise():
    params = linen.params_from_nnx(make_pair("SwiGLU", small_config())[0])
    kernel = params["up"]["kernel"]
    refused({}, "missing down/kernel; missing gate/kernel; missing up/kernel")
    refused({"gate": params["gate"], "down": params["down"]}, "fit: missing up/kernel")
    refused(params | {"up": {}}, "fit: missing up/kernel")
    refused(params | {"up": kernel}, "missing up/kernel", "unexpected up")
    refused(params | {"up": {"kernel": kernel, "bias": kernel[0]}}, "fit: unexpected up/bias")
    refused(params | {"up/kernel": kernel, "up": {}}, "missing up/kernel", "unexpected up/kernel")
    refused(params | {"up": {"kernel": kernel.T}}, "up/kernel: got bfloat16[32, 24], wanted bfloat16[24, 32]")
    refused(params | {"up": {"kernel": kernel[None]}}, "up/kernel: got bfloat16[1, 24, 32], wanted bfloat16[24, 32]")
    for other in (jnp.float32, jnp.float16):
        refused(params | {"up": {"kernel": kernel.astype(other)}}, f"up/kernel: got {jnp.dtype(other).name}[24, 32], ")
    refused(params | {"up": {"kernel": np.zeros((24, 32), np.int32)}}, "up/kernel: got int32[24, 32], ")


def test_no_variables_at_all_raise():
    twin = linen.RMSNorm(4, eps=1e-6)
    with pytest.raises(ValueError, match="RMSNorm: parameters do not fit: missing weight"):
        twin.apply({}, jnp.ones(4))
    with pytest.raises(ValueError, match="weight: got a float, wanted float32"):
        twin.apply({"params": {"weight": 1.0}}, jnp.ones(4))


def test_long_reports_are_cut():
    module, _ = make_pair("Decoder", small_config())
    with pytest.raises(ValueError, match=r"missing layers/0/.*; and \d+ more$") as error:
        linen.update_nnx(module, {})
    assert str(error.value).count("missing") == 10


def test_update_nnx_keeps_switches_and_takes_numpy():
    cfg = small_config()
    source, target = (make_pair("DSv4HybridSelfAttention", cfg, seed)[0] for seed in (1, 2))
    source.fuse_inv_rope = target.fuse_kv_index_remap = True
    params = linen.params_from_nnx(source)
    linen.update_nnx(target, jax.tree.map(np.asarray, params))
    assert_trees_bitwise_equal(params, linen.params_from_nnx(target))
    assert (target.fuse_inv_rope, target.fuse_kv_index_remap) == (False, True)
    with pytest.raises(ValueError, match="fit: missing sink"):  # of the part, not of the whole
        linen.update_nnx(target.core_attention, {"compressor": params["core_attention"]["compressor"]})


def test_more_than_ten_layers_are_matched_by_path(monkeypatch):
    """As strings "10" sorts before "2": leaves paired by position would put layers into each other's places."""
    cfg = small_config(num_hidden_layers=12, compress_ratios=(0,) * 12)
    module, twin = make_pair("Decoder", cfg)
    params, state = linen.params_from_nnx(module), nnx.to_pure_dict(nnx.state(module))
    assert list(jax.tree.map(lambda leaf: leaf, params)["layers"])[1:3] == ["1", "10"]
    target = make_pair("Decoder", cfg, seed=1)[0]
    linen.update_nnx(target, params)
    monkeypatch.setattr(layers.Decoder, "__call__", lambda self: nnx.to_pure_dict(nnx.state(self)))
    assert_trees_bitwise_equal(state, target(), names=("module", "updated module"))
    assert_trees_bitwise_equal(state, twin.apply({"params": params}), names=("module", "twin"))
    kernels = [layer["mlp"]["up"]["kernel"] for layer in state["layers"].values()]
    assert len({np.asarray(kernel).tobytes() for kernel in kernels}) == 12


# ---- Linen's transformations


@pytest.fixture(scope="module")
def attention():
    """(NNX layer, twin, parameters, x), float32 parameters and the fusion on."""
    cfg = small_config(compress_ratios=(0, 0, 0), param_dtype="float32")
    module, twin = make_pair("DSv4HybridSelfAttention", cfg, fuse_inv_rope=True)
    return module, twin, linen.params_from_nnx(module), make_input(cfg, 2, 16)[0]


def test_remat_keeps_fields_guard_and_parameters(attention):
    _, twin, params, x = attention
    rematted = nn.remat(linen.DSv4HybridSelfAttention)(twin.cfg, 1, fuse_inv_rope=True)
    with pytest.raises(AttributeError, match=r"use \.clone\(fuse_inv_rope=False\)"):
        rematted.fuse_inv_rope = False
    assert rematted.clone(fuse_inv_rope=False).explain_fusions() == twin.clone(fuse_inv_rope=False).explain_fusions()
    shapes = jax.eval_shape(rematted.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(form, shapes) == jax.tree.map(form, params)
    jaxprs = [jax.make_jaxpr(one.apply)({"params": params}, x) for one in (twin, rematted)]
    assert ["remat" in str(jaxpr.eqns[0].primitive) for jaxpr in jaxprs] == [False, True]


def test_vmap(attention):
    module, twin, params, x = attention
    over_batch = lambda call: jax.jit(jax.vmap(lambda x: call(x[None])[0][0]))  # noqa: E731
    wanted = over_batch(module)(x)
    assert_trees_bitwise_equal(wanted, over_batch(lambda x: twin.apply({"params": params}, x))(x))


def test_scan_over_stacked_layers():
    cfg = small_config(compress_ratios=(0, 0, 0))
    blocks = [make_pair("DecoderBlock", cfg, seed, fuse_inv_rope=True)[0] for seed in range(3)]
    x = make_input(cfg, 2, 16)[0]
    scanned = nn.scan(nn.remat(linen.DecoderBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(
        cfg, 0, fuse_inv_rope=True
    )
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *map(linen.params_from_nnx, blocks))
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), x)["params"]
    assert jax.tree.map(form, shapes) == jax.tree.map(form, params)

    def nnx_scan(stacked, x):
        return jax.lax.scan(jax.checkpoint(lambda x, block: block(x)), x, stacked)

    wanted = nnx_result(jax.tree.map(lambda *leaves: np.stack(leaves), *blocks), x, call=nnx_scan)
    assert_trees_bitwise_equal(wanted, linen_result(scanned, params, x), names=("nnx", "linen"))


def test_nn_vmap_over_an_ensemble():
    cfg = small_config()
    x = jnp.stack([make_input(cfg, 1, 2)[0]] * 2)
    ensemble = nn.vmap(linen.SwiGLU, variable_axes={"params": 0}, split_rngs={"params": True})(cfg)
    variables = jax.jit(ensemble.init)(jax.random.key(0), x)
    first, second = variables["params"]["up"]["kernel"]
    assert not np.array_equal(first, second)
    y = jax.jit(ensemble.apply)(variables, x)
    module, _ = make_pair("SwiGLU", cfg)
    for i in range(2):
        linen.update_nnx(module, jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]))
        wanted = jax.jit(lambda module, x: module(x))(module, x[i])
        np.testing.assert_allclose(wanted.astype(np.float32), y[i].astype(np.float32), rtol=0.02, atol=0.02)


class Compact(nn.Module):
    """A user's model around a layer, in Linen's compact form."""

    cfg: object
    fuse_inv_rope: bool = False

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(self.cfg.hidden_size)(x)
        attention = linen.DSv4HybridSelfAttention(self.cfg, 0, fuse_inv_rope=self.fuse_inv_rope, name="attention")
        return nn.LayerNorm()(h + attention(linen.RMSNorm(self.cfg.hidden_size, eps=1e-6)(h))[0])


class SetUp(nn.Module):
    """The same with `setup`, whose submodules Linen names when they are assigned."""

    cfg: object
    fuse_inv_rope: bool = False

    def setup(self):
        self.dense, self.norm, self.out = nn.Dense(self.cfg.hidden_size), linen.RMSNorm(24, eps=1e-6), nn.LayerNorm()
        self.attention = linen.DSv4HybridSelfAttention(self.cfg, 0, fuse_inv_rope=self.fuse_inv_rope)

    def __call__(self, x):
        h = self.dense(x)
        return self.out(h + self.attention(self.norm(h))[0])


@pytest.mark.optimised
def test_nested_among_linen_modules():
    cfg = small_config(compress_ratios=(0, 0, 0))
    x, attention = make_input(cfg, 2, 8)[0], linen.params_from_nnx(make_pair("DSv4HybridSelfAttention", cfg)[0])
    variables = jax.jit(Compact(cfg).init)(jax.random.key(0), x)
    assert variables["params"].keys() == {"Dense_0", "RMSNorm_0", "LayerNorm_0", "attention"}
    assert jax.tree.map(form, variables["params"]["attention"]) == jax.tree.map(form, attention)
    y = jax.jit(Compact(cfg).apply)(variables, x)
    dense, norm, out, attention = (variables["params"][k] for k in ("Dense_0", "RMSNorm_0", "LayerNorm_0", "attention"))

    renamed = {"params": {"dense": dense, "norm": norm, "out": out, "attention": attention}}
    shapes = jax.eval_shape(SetUp(cfg).init, jax.random.key(0), x)
    assert jax.tree.map(form, renamed) == jax.tree.map(form, shapes)
    assert_trees_bitwise_equal(y, jax.jit(SetUp(cfg, True).apply)(renamed, x), names=("compact", "setup, fused"))

    del renamed["params"]["attention"]["q_up"]
    for cls in (Compact, SetUp):
        with pytest.raises(ValueError, match="missing q_up/kernel"):
            jax.eval_shape(cls(cfg).apply, {"params": renamed["params"] | variables["params"]}, x)


@pytest.mark.optimised
def test_train_state(attention):
    """Three steps, the second with the fusion off, are three steps of the NNX layer that never had it on."""
    module, twin, params, x = attention
    module, optimizer = nnx.with_attributes(module, fuse_inv_rope=False), optax.sgd(0.1, momentum=0.9)

    def loss(call, x):
        return jnp.mean(call(x)[0].astype(jnp.float32) ** 2)

    @jax.jit
    def linen_step(state, x):
        grads = jax.grad(lambda params: loss(lambda x: state.apply_fn({"params": params}, x), x))(state.params)
        return state.apply_gradients(grads=grads)

    @jax.jit
    def nnx_step(graphdef, params, opt_state, x):
        grads = jax.grad(lambda params: loss(nnx.merge(graphdef, params), x))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = TrainState.create(apply_fn=twin.apply, params=params, tx=optimizer)
    state = state.replace(step=jnp.int32(0))  # Flax starts with a Python int, whose other type would be another trace
    graphdef, nnx_params = nnx.split(module)
    opt_state = optimizer.init(nnx_params)
    unfused = twin.clone(fuse_inv_rope=False)
    for one in (twin, unfused, twin):
        state = linen_step(state.replace(apply_fn=one.apply), x)
        nnx_params, opt_state = nnx_step(graphdef, nnx_params, opt_state, x)
    assert (state.step, linen_step._cache_size()) == (3, 2)
    assert all(np.any(new != old) for new, old in zip(*map(jax.tree.leaves, (state.params, params)), strict=True))
    wanted = linen.params_from_nnx(nnx.merge(graphdef, nnx_params))
    assert_trees_bitwise_equal(wanted, state.params, names=("nnx", "linen"))


def test_static_argument_and_pickle(attention):
    _, twin, params, x = attention
    traces = []

    def apply(twin, params, x):
        traces.append(twin.fuse_inv_rope)
        return twin.apply({"params": params}, x)

    for one in (twin, twin.clone(), pickle.loads(pickle.dumps(twin)), twin.clone(fuse_inv_rope=False)):
        jax.jit(apply, static_argnums=0).eval_shape(one, params, x)
    assert traces == [True, False]
