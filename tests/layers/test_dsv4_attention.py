"""The hybrid attention layer: the fused inverse rotation changes no bit, and the layer is the right one.

The layer test of PaddleFleet PR #1772, case by case:

| reference case | here |
|---|---|
| determinism_precondition | test_flip_changes_no_bit (all cases: two unfused runs) |
| bitwise_sq32, bitwise_sq128, odd_seq (97) | test_flip_changes_no_bit[tokens-32], [tokens-128], [tokens-97] |
| bitwise_other_seed, bitwise_other_layer | test_flip_changes_no_bit[tokens-32] (three models, which share their code) |
| gate True with the flag, False without | test_explanation_and_program_agree |
| at least 8 gradients, U's and V's not zero | test_flip_changes_no_bit (all cases) |
| grouped_postmix_falls_back | it fuses here: test_flip_changes_no_bit[grouped-...] and program_agree[grouped] |
| high_precision_rope_falls_back | it fuses here: test_flip_changes_no_bit[documents-once-...] and program_agree[once] |
| config_rejects_a_flag_that_can_never_fire | a warning here: test_flag_that_can_never_fire_warns |
| selective_postmix_recompute_only_warns, bounded_recompute_window | it fuses: test_transforms.py, the remat tests |
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import program
import pytest
from flax import nnx
from layers import common, loops
from layers.common import flipped, make_input, make_layer, run, small_config

from dsv4_fusions import dispatch
from dsv4_fusions.config import DSv4Config
from dsv4_fusions.layers import DSv4HybridSelfAttention, attention_layer
from dsv4_fusions.testing import assert_trees_bitwise_equal

BITWISE = {
    "tokens-32": dict(tokens=32, models=[(0, 42), (0, 7), (2, 42)]),
    "tokens-128": dict(tokens=128, marks=()),
    "tokens-97": dict(tokens=97, marks=()),
    "float32-causal": dict(tokens=32, batch=2, cfg=dict(dtype="float32", compress_ratios=(-1, -1, -1))),
    "documents-once-yarn-gated-float32-parameters": dict(
        tokens=24,
        batch=3,
        segment_ids=common.SEGMENTS,
        cfg=dict(
            rope_rounding="once",
            yarn={"factor": 16.0, "original_max_position_embeddings": 64},
            gated_attention=True,
            param_dtype="float32",
        ),
    ),
    "single_pass": dict(tokens=97, cfg=dict(postmix_backward="single_pass")),
    "grouped": dict(tokens=32, marks=(), cfg=dict(vha_postmix_grouped=True)),
    "grouped-single_pass-documents-once-float16": dict(
        tokens=24,
        batch=3,
        segment_ids=common.SEGMENTS,
        cfg=dict(
            vha_postmix_grouped=True, postmix_backward="single_pass", rope_rounding="once", dtype="float16",
            param_dtype="float32",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=case.get("marks", pytest.mark.optimised)) for case in BITWISE.values()],
    ids=BITWISE,
)
def test_flip_changes_no_bit(case):
    cfg = DSv4Config(**(common.REFERENCE | case.get("cfg", {})))
    for layer_index, seed in case.get("models", [(0, 42)]):
        layer = make_layer(cfg, layer_index, seed)
        x, g = make_input(cfg, case.get("batch", 1), case["tokens"], seed)
        before = jax.device_get((x, g, nnx.to_pure_dict(nnx.state(layer))))
        unfused, fused = flipped(layer, x, g, case.get("segment_ids"))
        again, _ = flipped(layer, x, g, case.get("segment_ids"))
        assert_trees_bitwise_equal(unfused, again, names=("unfused", "unfused again"))
        assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
        assert len(jax.tree.leaves(fused["params"])) >= 8
        for path, leaf in jax.tree.leaves_with_path(jax.device_get(fused)):  # U's and V's among them
            assert leaf.any() or ("compressor" in str(path) and case["tokens"] < 128), path
        after = jax.device_get((x, g, nnx.to_pure_dict(nnx.state(layer))))
        assert_trees_bitwise_equal(before, after, names=("operands before", "operands after"))


FOR_MOSAIC = dict(num_attention_heads=64, head_dim=128, qk_rope_head_dim=50, o_groups=8)
KERNELS = {
    "triton-dot_general": dict(implementation="triton"),
    "triton-single_pass": dict(implementation="triton", postmix_backward="single_pass"),
    "triton-grouped-single_pass": dict(
        implementation="triton", postmix_backward="single_pass", vha_postmix_grouped=True
    ),
    "mosaic-single_pass": dict(implementation="mosaic", postmix_backward="single_pass", **FOR_MOSAIC),
}


@pytest.mark.parametrize("changes", KERNELS.values(), ids=KERNELS)
def test_kernels_in_interpret_mode(changes):
    # The attention in front of it has a Mosaic kernel, too: test_sparse_attention_mosaic.py.
    layer = make_layer(small_config(**changes, sparse_attention_backend="xla"))
    x, g = make_input(layer.cfg, 2, 2 if changes["implementation"] == "mosaic" else 7)
    with dispatch.interpret():
        unfused, fused = flipped(layer, x, g)
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
    assert all(jnp.any(leaf) for leaf in (fused["params"]["postmix_u"], fused["params"]["postmix_v"]))


@pytest.mark.optimised
@pytest.mark.parametrize("grouped", [False, True])
def test_training_steps_with_the_single_pass(grouped):
    """Three steps, each from the parameters that the last one left: no bit of any of them depends on the switch."""
    cfg = small_config(vha_postmix_grouped=grouped, postmix_backward="single_pass", gated_attention=True)
    x, g = make_input(cfg, 3, 24)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(layer):
        def loss(layer):
            y, _ = layer(x, common.SEGMENTS)
            return jnp.sum((jax.nn.silu(y) * g).astype(jnp.float32))

        value, gradient = jax.value_and_grad(loss)(layer)
        return jax.tree.map(lambda p, d: p - (0.1 * d).astype(p.dtype), layer, gradient), value

    results = []
    for fuse in (False, True):
        layer, losses = make_layer(cfg, fuse_inv_rope=fuse), []
        before = nnx.to_pure_dict(nnx.state(jax.tree.map(jnp.copy, layer)))
        for _ in range(3):
            layer, value = step(layer)
            losses.append(value)
        assert layer.fuse_inv_rope is fuse
        results.append((nnx.to_pure_dict(nnx.state(layer)), losses))
    assert_trees_bitwise_equal(*results, names=("unfused", "fused"))
    assert jnp.any(results[0][0]["postmix_u"] != before["postmix_u"])


@pytest.mark.optimised
def test_nans_and_infinities_stay_where_they_were():
    layer = make_layer(DSv4Config(**common.REFERENCE))
    for bad in (jnp.nan, jnp.inf):
        x, g = make_input(layer.cfg, 1, 32)
        unfused, fused = flipped(layer, x.at[0, 5, 3].set(bad), g)
        assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))
        is_finite = np.isfinite(np.asarray(fused["y"], np.float32)).all(axis=(0, 2))
        behind = np.arange(32) - 5
        np.testing.assert_array_equal(is_finite, (behind < 0) | (behind >= 16))  # the window is 16 wide


@pytest.mark.optimised
def test_eval_mode_keeps_the_fusion_and_the_bits():
    layer = make_layer(DSv4Config(**common.REFERENCE))
    x, g = make_input(layer.cfg, 1, 32)
    _, trained = flipped(layer, x, g)
    layer.eval()
    assert layer.fuse_inv_rope and layer.explain_fusions(x)["fuse_inv_rope"].active
    unfused, fused = flipped(layer, x, g)
    assert_trees_bitwise_equal(trained, unfused, names=("train, fused", "eval, unfused"))
    assert_trees_bitwise_equal(trained, fused, names=("train", "eval"))


FUSES = {
    "default": {},
    "once": dict(rope_rounding="once"),
    "float32": dict(dtype="float32"),
    "float16": dict(dtype="float16"),
    "gated": dict(gated_attention=True),
    "window": dict(compress_ratios=(0, 0, 0)),
    "causal": dict(compress_ratios=(-1, -1, -1)),
    "xla-backend": dict(sparse_attention_backend="xla"),
    "grouped": dict(vha_postmix_grouped=True),
    "single_pass": dict(postmix_backward="single_pass"),
    "grouped-single_pass": dict(vha_postmix_grouped=True, postmix_backward="single_pass"),
}
FALLS_BACK = {
    "no-postmix": dict(use_vha_attention=False),
    "no-rotation": dict(qk_rope_head_dim=0),
}


@pytest.mark.parametrize("changes", (FUSES | FALLS_BACK).values(), ids=FUSES | FALLS_BACK)
@pytest.mark.filterwarnings("ignore:fuse_inv_rope")
def test_explanation_and_program_agree(changes, request):
    """Read off the program: with the fusion the query is the only full-width tensor that is rotated."""
    cfg = small_config(**changes)
    fuses = request.node.callspec.id in FUSES
    layer, (x, _) = make_layer(cfg), make_input(cfg, 2, 10)
    shape = (2, 10, cfg.num_attention_heads, cfg.head_dim)
    rotated, programs = {}, []
    for layer.fuse_inv_rope in (False, True):
        assert layer.explain_fusions(x)["fuse_inv_rope"].active == (layer.fuse_inv_rope and fuses)
        assert layer.explain_fusions()["fuse_inv_rope"] == layer.explain_fusions(x)["fuse_inv_rope"]
        jaxpr = common.forward_jaxpr(layer, x)
        rotated[layer.fuse_inv_rope] = common.rotated_tensors(jaxpr, shape)
        # In front of either path, outside the ops: the attention output is rounded before it is rotated.
        barriers = [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
        assert barriers.count(shape) == 1
        programs.append(str(jaxpr))
    assert (programs[0] == programs[1]) != fuses
    if cfg.qk_rope_head_dim == 0:
        assert rotated == {False: 0, True: 0}
    else:
        assert rotated == {False: 2, True: 1 if fuses else 2}


GRADIENT_KERNELS = [
    ("triton", {}, "", []),
    ("triton", dict(postmix_backward="single_pass"), "", ["_bwd"]),
    ("triton", dict(vha_postmix_grouped=True, postmix_backward="single_pass"), "grouped_", ["_bwd"]),
    # The attention in front of it has a Mosaic kernel, too, but for this backend.
    ("mosaic", dict(postmix_backward="single_pass", sparse_attention_backend="xla", **FOR_MOSAIC), "", ["_bwd"]),
]


def gradient(layer, x):
    return jax.grad(lambda layer, x: jnp.sum(layer(x)[0].astype(jnp.float32)), argnums=(0, 1))(layer, x)


@pytest.mark.parametrize("implementation, changes, prefix, suffixes", GRADIENT_KERNELS)
def test_fusion_calls_its_kernels(implementation, changes, prefix, suffixes):
    cfg = small_config(**changes)
    layer, (x, _) = make_layer(cfg, implementation=implementation), make_input(cfg, 2, 4)
    for layer.fuse_inv_rope, rotation in ((False, ""), (True, "inv_rope_")):
        with dispatch.interpret():
            kernels = common.kernels(jax.make_jaxpr(gradient)(layer, x))
            assert kernels == [f"{prefix}{rotation}vha_postmix{suffix}" for suffix in ("", *suffixes)]
            assert layer.explain_fusions(x)["fuse_inv_rope"].implementation == implementation


@pytest.mark.lowering
@pytest.mark.parametrize("implementation, changes, prefix, suffixes", GRADIENT_KERNELS)
def test_fusion_calls_its_kernels_on_cuda(implementation, changes, prefix, suffixes):
    """Those of the implementation that is chosen there, for none is named."""
    cfg = small_config(**changes)
    layer, (x, _) = make_layer(cfg), make_input(cfg, 2, 4)
    for layer.fuse_inv_rope, rotation in ((False, ""), (True, "inv_rope_")):
        text = program.lower_for_cuda(gradient, layer, x)
        assert ("mosaic_gpu_v2" in text) == (implementation == "mosaic")
        assert program.cuda_kernels(text) == [f"{prefix}{rotation}vha_postmix{suffix}" for suffix in ("", *suffixes)]


@pytest.mark.lowering
@pytest.mark.parametrize("backend", ["flat", "batched", "structured"])
def test_attention_calls_its_kernels_on_cuda(backend):
    cfg = small_config(sparse_attention_backend=backend, **FOR_MOSAIC)
    layer, (x, _) = make_layer(cfg), make_input(cfg, 1, 4)
    kernels = program.cuda_kernels(program.lower_for_cuda(gradient, layer, x))
    assert [kernels.count(name) for name in ("sparse_attention", "sparse_attention_backward", "sum_rows")] == [1, 1, 1]


@pytest.mark.parametrize("ratio", [-1, 0, 4, 128])
def test_structured_is_batched_but_for_rounding(ratio):
    """Runs in place of a table: the same ids in other slots. A layer that selects rows has a table all the same."""
    cfg = small_config(compress_ratios=(ratio,) * 3, **common.INDEXED)
    segments = np.repeat([[3, 1, 2, 0]], [140, 1, 129, 5], axis=1) if ratio == 128 else common.SEGMENTS
    x, g = make_input(cfg, *segments.shape)
    results = {}
    for backend in ("batched", "structured"):
        layer = common.random_layer(dataclasses.replace(cfg, sparse_attention_backend=backend))
        results[backend] = common.quick_run(layer, x, g, segments)
    if ratio == 4:
        assert_trees_bitwise_equal(results["structured"], results["batched"])
    compare = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(compare, results["structured"], results["batched"])


@pytest.mark.parametrize(
    "capability, changes, implementation",
    [
        ((9, 0), {}, "mosaic"),
        ((9, 0), dict(dtype="float16", rope_rounding="once"), "mosaic"),
        ((9, 0), dict(vha_postmix_grouped=True), "triton"),
        ((9, 0), dict(num_attention_heads=32), "triton"),
        ((9, 0), dict(head_dim=576), "triton"),
        ((8, 0), {}, "triton"),
        ((10, 0), {}, "triton"),
    ],
)
@pytest.mark.parametrize("fuse", [False, True])
def test_which_kernel_serves_the_production_widths(faked_target, capability, changes, implementation, fuse):
    cfg = DSv4Config(**changes)
    assert (cfg.num_attention_heads, cfg.head_dim) == (64, 512) or changes
    layer = nnx.eval_shape(lambda: DSv4HybridSelfAttention(cfg, rngs=nnx.Rngs(0), fuse_inv_rope=fuse))
    faked_target("gpu", capability)
    status = layer.explain_fusions()["fuse_inv_rope"]
    assert (status.active, status.implementation) == (fuse, implementation)


def test_reasons_name_what_stands_in_the_way():
    def reason(**changes):
        return make_layer(small_config(**changes)).explain_fusions()["fuse_inv_rope"].reason

    assert "fuse_inv_rope is False" in reason()
    assert "fuse_inv_rope is False" in reason(vha_postmix_grouped=True)
    assert "use_vha_attention" in reason(use_vha_attention=False)
    assert "qk_rope_head_dim" in reason(qk_rope_head_dim=0)


def test_dtype_that_no_kernel_serves_falls_back(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda: dispatch.Target("gpu", (9, 0)))
    layer = make_layer(small_config(dtype="float32"), fuse_inv_rope=True)
    status = layer.explain_fusions()["fuse_inv_rope"]
    assert (status.active, status.implementation) == (False, "xla") and "no kernel" in status.reason
    x, _ = make_input(layer.cfg, 1, 4)
    assert common.rotated_tensors(common.forward_jaxpr(layer, x), (1, 4, 4, 12)) == 2
    assert make_layer(small_config(), fuse_inv_rope=True).explain_fusions()["fuse_inv_rope"].implementation == "triton"


NEVER = {
    "no-postmix": ("fuse_inv_rope", "use_vha_attention", FALLS_BACK["no-postmix"]),
    "no-rotation": ("fuse_inv_rope", "qk_rope_head_dim", FALLS_BACK["no-rotation"]),
    "xla": ("fuse_kv_index_remap", "sparse_attention_backend", dict(sparse_attention_backend="xla")),
}


@pytest.mark.parametrize("switch, field, changes", NEVER.values(), ids=NEVER)
def test_flag_that_can_never_fire_warns(switch, field, changes):
    with pytest.warns(UserWarning, match=f"{switch}.*{field}") as record:
        layer = DSv4HybridSelfAttention(small_config(**changes), rngs=nnx.Rngs(0), **{switch: True})
    assert len(record) == 1 and record[0].filename == __file__
    assert getattr(layer, switch) is True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DSv4HybridSelfAttention(small_config(**changes), rngs=nnx.Rngs(0))
        setattr(layer, switch, False)
        setattr(layer, switch, True)
    assert layer.explain_fusions()[switch].active is False


@pytest.mark.parametrize("grouped", [False, True])
def test_flags_that_can_fire_do_not_warn(grouped):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_layer(small_config(vha_postmix_grouped=grouped), fuse_inv_rope=True, fuse_kv_index_remap=True)


@pytest.mark.parametrize("kind", ["default", "grouped", "no-postmix", "no-rotation"])
def test_what_is_named_runs_or_raises(kind):
    cfg = small_config(**(FUSES | FALLS_BACK)[kind])
    x, _ = make_input(cfg, 1, 4)
    for name in ("mosaic", "jax_triton", "triton"):
        layer = make_layer(cfg, implementation=name)
        for ask in (layer.explain_fusions, lambda x, layer=layer: common.forward_jaxpr(layer, x)):
            with pytest.raises(ValueError, match=f"implementation '{name}' cannot run here: it needs an NVIDIA GPU"):
                ask(x)
    layer.implementation = "xla"
    for layer.postmix_backward in ("dot_general", "single_pass"):
        common.forward_jaxpr(layer, x)
        assert layer.explain_fusions(x)["fuse_inv_rope"].implementation == (None if kind == "no-postmix" else "xla")


def test_a_kernel_that_does_not_serve_a_layer_says_why():
    for changes, reason in (
        (FOR_MOSAIC | dict(vha_postmix_grouped=True), "it does not serve the grouped postmix"),
        ({}, "it serves 64 heads, not 4"),
        (FOR_MOSAIC | dict(head_dim=96), "it serves multiples of 128 as head_dim, not 96"),
        (FOR_MOSAIC | dict(dtype="float32"), "it serves bfloat16 and float16, not float32"),
    ):
        layer = make_layer(small_config(**changes), implementation="mosaic")
        x, _ = make_input(layer.cfg, 1, 2)
        for ask in (layer.explain_fusions, lambda x, layer=layer: common.forward_jaxpr(layer, x)):
            with dispatch.interpret(), pytest.raises(ValueError, match=f"'mosaic' cannot run here: {reason}"):
                ask(x)


def test_latent_layers_are_of_another_class():
    with pytest.raises(ValueError, match="layer_index: got 1, whose compress ratio is -2"):
        make_layer(small_config(compress_ratios=(0, -2, 0)), layer_index=1)


@pytest.mark.parametrize("fuse", [False, True])
def test_bad_input_raises(fuse):
    cfg = small_config()
    layer, (x, _) = make_layer(cfg, fuse_inv_rope=fuse), make_input(cfg, 2, 6)
    with pytest.raises(ValueError, match=r"x: got shape \(2, 6, 23\)"):
        layer(x[..., 1:])
    with pytest.raises(ValueError, match="x: got shape"):
        layer(x[0])
    with pytest.raises(ValueError, match="segment_ids: got shape"):
        layer(x, jnp.ones((2, 5), jnp.int32))
    with pytest.raises(TypeError, match="segment_ids"):
        layer(x, jnp.ones((2, 6)))
    with pytest.raises(ValueError, match="positions: got shape"):
        layer(x, positions=jnp.arange(5))
    with pytest.raises(ValueError, match="positions: got shape"):
        layer(x, positions=jnp.zeros((3, 6), jnp.int32))
    with pytest.raises(TypeError, match="positions"):
        layer(x, positions=jnp.arange(6.0))
    for index in (-1, 3):
        with pytest.raises(ValueError, match="layer_index"):
            make_layer(cfg, index)


# ---- the parameters


def test_parameters_do_not_depend_on_switches():
    cfg = small_config()
    trees = []
    for fuse_inv_rope in (False, True):
        for fuse_kv_index_remap in (False, True):
            for rest in ({}, dict(postmix_backward="single_pass", implementation="xla")):
                switches = dict(fuse_inv_rope=fuse_inv_rope, fuse_kv_index_remap=fuse_kv_index_remap) | rest
                layer = DSv4HybridSelfAttention(cfg, rngs=nnx.Rngs(3), **switches)
                trees.append(nnx.to_pure_dict(nnx.state(layer)))
    for tree in trees[1:]:
        assert_trees_bitwise_equal(trees[0], tree)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_parameters(param_dtype):
    cfg = small_config(param_dtype=param_dtype, gated_attention=True)
    state = nnx.state(nnx.eval_shape(lambda: DSv4HybridSelfAttention(cfg, rngs=nnx.Rngs(0))))
    assert all(type(param) is nnx.Param for _, param in nnx.to_flat_state(state))
    dtypes = {path: param.dtype.name for path, param in nnx.to_flat_state(state)}
    wide = {("core_attention", "sink"), ("core_attention", "compressor", "ape")}
    assert wide <= set(dtypes) and all(dtypes[path] == "float32" for path in wide)
    assert {dtype for path, dtype in dtypes.items() if path not in wide} == {param_dtype}


def test_postmix_starts_as_the_identity():
    cfg = DSv4Config(**(common.REFERENCE | dict(num_attention_heads=64, vha_rank=16)))
    layer = DSv4HybridSelfAttention(cfg, rngs=nnx.Rngs(0))
    assert layer.postmix_u[...].shape == layer.postmix_v[...].shape == (64, 16)
    assert not jnp.any(layer.postmix_v[...])
    u = np.asarray(layer.postmix_u[...], np.float32)
    assert abs(u.std() - 0.01) < 0.001 and abs(u.mean()) < 0.001
    assert not jnp.any(layer.core_attention.sink[...])


# ---- the layer against loops in NumPy

LAYERS = {
    "window": dict(compress_ratios=(0, 0, 0)),
    "causal": dict(compress_ratios=(-1, -1, -1), sparse_attention_backend="xla"),
    "compressed": dict(compress_ratios=(128, 128, 128)),
    "grouped": dict(compress_ratios=(0, 0, 0), vha_postmix_grouped=True, vha_rank=1),
    "no-postmix": dict(compress_ratios=(0, 0, 0), use_vha_attention=False),
    "gated": dict(compress_ratios=(0, 0, 0), gated_attention=True),
    "no-rotation": dict(compress_ratios=(0, 0, 0), qk_rope_head_dim=0),
}


@pytest.mark.parametrize(
    "changes, documents",
    [(changes, True) for changes in LAYERS.values()] + [(LAYERS[name], False) for name in ("window", "compressed")],
    ids=[*LAYERS, "window-one-document", "compressed-one-document"],
)
def test_layer_is_what_loops_compute(changes, documents):
    changes = dict(dtype="float32", param_dtype="float32", compress_rope_theta=160000.0) | changes
    layer = make_layer(small_config(**changes))
    layer.core_attention.sink[...] = jnp.linspace(-1.0, 1.0, layer.cfg.num_attention_heads)
    tokens, segment_ids = 24, common.SEGMENTS
    if layer.core_attention.ratio == 128:  # documents with two groups, one, none
        tokens = 280
        segment_ids = np.stack([np.repeat([1, 2, 0], [260, 17, 3]), np.repeat([0, 3, 4], [6, 130, 144])])
    x, _ = make_input(layer.cfg, len(segment_ids), tokens)
    segment_ids = segment_ids if documents else None
    got = jax.jit(lambda layer, x: layer(x, segment_ids)[0])(layer, x)
    np.testing.assert_allclose(got, loops.layer(layer, x, segment_ids), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("documents", [False, True], ids=["one-document", "documents"])
def test_given_positions_are_used(documents):
    layer = make_layer(small_config(dtype="float32", param_dtype="float32"))
    x, _ = make_input(layer.cfg, 2, 140)
    segment_ids = np.repeat([[1, 2], [3, 0]], [5, 135], axis=1) if documents else None
    apply = jax.jit(lambda layer, x, positions: layer(x, segment_ids, positions)[0])
    per_entry = np.stack([np.arange(140) + 30, np.arange(140)[::-1]]).astype(np.int32)
    for positions in (per_entry[0], per_entry) if documents else (per_entry,):
        want = loops.layer(layer, x, segment_ids, positions)
        np.testing.assert_allclose(apply(layer, x, positions), want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("layer_index", [0, 1])
def test_rotation_is_undone_with_the_base_it_was_done_with(layer_index):
    """A token alone in its document attends to itself, so no position may show in the output (transformers#45910)."""
    cfg = small_config(
        dtype="float32", compress_ratios=(0, 128, 0), rope_theta=10000.0, compress_rope_theta=160000.0,
        yarn={"factor": 16.0, "original_max_position_embeddings": 64},
    )  # fmt: skip
    layer, (x, _) = make_layer(cfg, layer_index), make_input(cfg, 1, 32)
    alone = np.arange(1, 33, dtype=np.int32)[None]
    apply = jax.jit(lambda layer, x, positions: layer(x, alone, positions)[0])
    layer.fuse_inv_rope = layer_index == 1  # either path: the flip changes no bit
    near = apply(layer, x, jnp.zeros(32, jnp.int32))
    far = apply(layer, x, jnp.arange(32, dtype=jnp.int32) * 37)
    np.testing.assert_allclose(near, far, rtol=1e-4, atol=1e-5)


# ---- what a token may see


@pytest.mark.parametrize("ratio", [0, -1, 128])
def test_no_token_sees_the_future_or_another_document(ratio):
    cfg = small_config(compress_ratios=(ratio,) * 3)
    tokens = 140 if ratio == 128 else 24
    segment_ids = np.ones((1, tokens), np.int32)
    segment_ids[:, -6:] = 2
    layer, (x, other) = make_layer(cfg), make_input(cfg, 1, tokens)
    apply = jax.jit(lambda layer, x: layer(x, segment_ids)[0])
    before = np.asarray(apply(layer, x), np.float32)
    t = tokens - 10
    changed = np.any(np.asarray(apply(layer, x.at[:, t].set(other[:, t])), np.float32) != before, axis=(0, 2))
    assert not changed[:t].any() and changed[t : t + 4].all() and not changed[-6:].any()
    changed = np.any(np.asarray(apply(layer, x.at[:, -6:].set(other[:, -6:])), np.float32) != before, axis=(0, 2))
    assert not changed[:-6].any() and changed[-6:].all()


def test_padding_gets_zeros_and_gives_no_gradient():
    cfg = small_config(gated_attention=True)
    segment_ids = np.stack([np.repeat([0, 1, 0], [3, 130, 7]), np.zeros(140, int), np.repeat([2, 0], [100, 40])])
    layer, (x, g) = make_layer(cfg, fuse_inv_rope=True), make_input(cfg, *segment_ids.shape)
    result = run(layer, x, g, segment_ids)
    y, dx, padding = np.asarray(result["y"], np.float32), np.asarray(result["dx"], np.float32), segment_ids == 0
    assert not y[padding].any() and not dx[padding].any()
    assert y[~padding].any(-1).all() and dx[~padding].any(-1).all()
    for leaf in jax.tree.leaves(result):
        assert jnp.all(jnp.isfinite(leaf))


@pytest.mark.parametrize("ratio", [-2, -1, 0, 4, 128])
def test_what_stands_in_padding_does_not_matter(ratio):
    """Zeros, NaN or infinity: outputs and all gradients keep their bits."""
    cfg = small_config(
        **common.INDEXED | dict(gated_attention=True, indexer_loss_coeff=1.0), compress_ratios=(ratio,) * 3
    )
    layer, segment_ids = common.random_layer(cfg), jnp.asarray(common.SEGMENTS)
    x, g = make_input(cfg, *segment_ids.shape)
    is_padding = (segment_ids == 0)[..., None]
    filled = [common.quick_run(layer, jnp.where(is_padding, bad, x), g, segment_ids) for bad in (0, jnp.nan, jnp.inf)]
    assert not np.any(np.asarray(filled[0]["y"], np.float32)[segment_ids == 0])
    assert_trees_bitwise_equal(filled[0], filled[1])
    assert_trees_bitwise_equal(filled[0], filled[2])


# ---- the index remap


@pytest.mark.optimised
def test_remap_flip_changes_no_bit():
    """Of the output; for the gradients, see test_decoder.py."""
    layer = make_layer(small_config())
    x, _ = make_input(layer.cfg, 3, 24)
    apply = jax.jit(lambda layer, x, _, segment_ids, __: layer(x, segment_ids)[0])
    unfused, fused = flipped(layer, x, None, common.SEGMENTS, switch="fuse_kv_index_remap", run=apply)
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))


def test_remap_runs_where_it_is_said_to():
    def remaps(layer, x):
        return [name for name in common.kernels(common.forward_jaxpr(layer, x)) if "postmix" not in name]

    cfg = small_config()
    layer, (x, _) = make_layer(cfg), make_input(cfg, 3, 8)
    with dispatch.interpret():
        for layer.fuse_kv_index_remap in (False, True):
            for batch in (1, 3):
                status = layer.explain_fusions(x[:batch])["fuse_kv_index_remap"]
                assert status.active == (layer.fuse_kv_index_remap and batch > 1)
                assert len(remaps(layer, x[:batch])) == status.active
        assert status.implementation == "triton"
    assert "batch 1" in layer.explain_fusions(x[:1])["fuse_kv_index_remap"].reason
    assert "batch unknown" in layer.explain_fusions()["fuse_kv_index_remap"].reason
    xla = make_layer(small_config(sparse_attention_backend="xla")).explain_fusions(x)["fuse_kv_index_remap"]
    assert not xla.active and "xla" in xla.reason


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("layer_index", range(3))
def test_empty_inputs(shape, layer_index):
    cfg = small_config(compress_ratios=(0, -1, 128))
    layer = make_layer(cfg, layer_index, fuse_inv_rope=True, fuse_kv_index_remap=True)
    x = jnp.zeros((*shape, cfg.hidden_size), jnp.bfloat16)
    for segment_ids in (None, jnp.zeros(shape, jnp.int32)):
        y, pull = jax.vjp(lambda layer, x, s=segment_ids: layer(x, s)[0], layer, x)
        assert y.shape == pull(y)[1].shape == x.shape


@pytest.mark.parametrize("ratio", [-2, 128])
def test_inputs_of_another_kind_are_refused(ratio):
    layer = nnx.eval_shape(lambda: attention_layer(small_config(compress_ratios=(ratio,) * 3), 0, rngs=nnx.Rngs(0)))
    x = jax.ShapeDtypeStruct((2, 8, 24), jnp.float32)
    refusals = [
        ((x, [[1] * 8] * 2), {}, "segment_ids: got list, wanted an array"),
        ((None,), {}, "x: got NoneType, wanted an array"),
        (([[0.0] * 24],), {}, "x: got list, wanted an array"),
        ((jax.ShapeDtypeStruct((2, 8, 24), jnp.complex64),), {}, "x: got dtype complex64, wanted floating point"),
        ((jax.ShapeDtypeStruct((2, 8, 24), jnp.int32),), {}, "x: got dtype int32, wanted floating point"),
        ((x,), {"loss_mask": [1, 0]}, "loss_mask: got list, wanted an array"),
        (
            (x,),
            {"loss_mask": np.ones((2, 8), complex)},
            "loss_mask: got dtype complex128, wanted bools or real numbers",
        ),
    ]
    for args, kwargs, message in refusals:
        with pytest.raises(TypeError, match=message):
            layer(*args, **kwargs)
