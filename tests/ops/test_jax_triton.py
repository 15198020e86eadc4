"""The kernels in Triton's own language, as far as a machine without a GPU can tell: when their name raises, that they
compile for every architecture they serve, and that programs with them lower. tests/gpu compares their bits."""

import functools
import importlib.util

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import Postmix
from jax.sharding import PartitionSpec as P
from program import gpu_target, lower_for_cuda

import dsv4_fusions as dsv4
from dsv4_fusions import dispatch
from dsv4_fusions.ops import inv_rope_postmix as op
from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index
from dsv4_fusions.testing import assert_trees_bitwise_equal

IDS = jnp.zeros((2, 3, 4), jnp.int32)
X, M, TABLES = jnp.ones((5, 3, 8), jnp.bfloat16), jnp.eye(3, dtype=jnp.bfloat16), dsv4.rope_tables(jnp.arange(5), 4)
U = jnp.ones((1, 3, 2), jnp.bfloat16)
OPS = {
    "vha_postmix": lambda name: op.vha_postmix(X, M, implementation=name),
    "inv_rope_vha_postmix": lambda name: op.inv_rope_vha_postmix(X, M, TABLES, implementation=name),
    "grouped_postmix": lambda name: op.grouped_postmix(X, U, U, implementation=name),
    "local_to_flat_kv_index": lambda name: local_to_flat_kv_index(IDS, 8, name),
}
EVERY_OP = pytest.mark.parametrize("call", OPS.values(), ids=OPS.keys())


@EVERY_OP
def test_the_name_raises_with_the_reason(call, faked_target, monkeypatch):
    for target, reason in [
        (("cpu", None), "it needs an NVIDIA GPU and the target is cpu"),
        (("gpu", (7, 5)), "it needs compute capability 8.0 or higher and the target has 7.5"),
    ]:
        faked_target(*target)
        with pytest.raises(ValueError, match=f"'jax_triton' cannot run here: {reason}"):
            call("jax_triton")
    faked_target("gpu", (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"'jax_triton' cannot run here: it needs jax-triton.*pip install '.\[triton\]'"
    ):
        call("jax_triton")
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "1")
    with pytest.raises(ValueError, match=dispatch.DISABLE_KERNELS):
        call("jax_triton")


def test_a_dtype_it_does_not_serve(faked_target, monkeypatch):
    faked_target("gpu", (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="'jax_triton' cannot run here: it serves bfloat16 and float16, not float32"):
        op.vha_postmix(X.astype(jnp.float32), M.astype(jnp.float32), implementation="jax_triton")


def test_it_comes_after_pallas(faked_target, monkeypatch):
    faked_target("gpu", (8, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert op.postmix_choice("bfloat16", 64, 512, 64)[0] == "triton"
    monkeypatch.setattr(dispatch, "triton_unsupported", lambda: "it is gone")
    assert op.postmix_choice("bfloat16", 64, 512, 64)[0] == "jax_triton"


def test_the_remap_has_no_mosaic_kernel():
    with pytest.raises(NotImplementedError, match="'mosaic': the remap has no Mosaic kernel"):
        local_to_flat_kv_index(IDS, 8, "mosaic")


# --- the kernels through Triton's compiler, which needs no GPU ---

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int64": "*i64"}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that a program may have, by compute capability."""
BOTH = op.Wanted(activation=True, weights=True)
POSTMIX = [
    Postmix(16, 64, 512, 64),
    Postmix(16, 64, 512, 64, "bfloat16", "once"),
    Postmix(16, 64, 512, 64, "float16"),
    Postmix(16, 64, 512, 64, "float16", "once"),
    Postmix(7, 3, 40, 8),
    Postmix(5, 8, 34, 6),
    Postmix(3, 1, 8, 8),
    Postmix(9, 16, 136, 130, "float16"),
    Postmix(2, 128, 512, 64),
]


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """compiled(capability, fn, *args): the kernels that fn launches, compiled."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install '.[triton]'")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from dsv4_fusions import triton_launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls = []

    def record(kernel, operands, outputs, programs, **options):
        calls.append((kernel, [*operands, *outputs], options))
        return [jnp.zeros(out.shape, out.dtype) for out in outputs]

    monkeypatch.setattr(triton_launch, "call", record)

    def run(capability, fn, *args):
        calls.clear()
        jax.eval_shape(lambda *args: fn(*args), *args)  # a function of its own: a trace that is cached launches nothing
        kernels = []
        for kernel, arrays, options in calls:
            constants = dict.fromkeys(kernel.arg_names[len(arrays) :]) | options
            launch = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
            signature = dict.fromkeys(kernel.arg_names, "constexpr")
            signature |= {name: POINTERS[str(x.dtype)] for name, x in zip(kernel.arg_names, arrays, strict=False)}
            divisible = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
            source = ASTSource(kernel, signature, constants, divisible)
            kernels.append(compile(source, target=GPUTarget("cuda", capability, 32), options=launch))
        return kernels

    return run


@pytest.mark.lowering
@pytest.mark.parametrize("grouped", [False, True], ids=["", "grouped"])
@pytest.mark.parametrize(
    "case, capability",
    [(case, 90) for case in POSTMIX] + [(case, c) for case in POSTMIX[::8] for c in (80, 100)],
    ids=str,
)
def test_postmix_compiles(compiled, case, grouped, capability):
    from dsv4_fusions.ops.inv_rope_postmix import jax_triton

    o, u, v, tables, g = case.operands()
    weights = (u[None], v[None]) if grouped else (dsv4.postmix_matrix(u, v),)
    kernels = [
        *compiled(capability, jax_triton.forward, weights, o, tables),
        *compiled(capability, functools.partial(jax_triton.single_pass_backward, wanted=BOTH), weights, o, tables, g),
    ]
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_MEMORY[capability]
        assert any(instruction in kernel.asm["ptx"] for instruction in ("mma.sync", "wgmma", "tcgen05.mma"))


@pytest.mark.lowering
@pytest.mark.parametrize("activation, weights", [(True, True), (True, False), (False, True)])
def test_the_product_sums_into_the_weight_gradient(compiled, activation, weights):
    """No addition is left outside the matrix instruction: one there would round the gradient in another way."""
    from dsv4_fusions.ops.inv_rope_postmix import jax_triton

    o, u, v, _, g = POSTMIX[0].operands()
    wanted = op.Wanted(activation, weights)
    m = dsv4.postmix_matrix(u, v)
    (kernel,) = compiled(90, lambda m, o, g: jax_triton.single_pass_backward((m,), o, None, g, wanted), m, o, g)
    assert kernel.asm["ttir"].count(" = tt.dot ") == 2 * (activation + weights)  # tiles within the loops, and the last
    assert "arith.addf" not in kernel.asm["ttir"]


@pytest.mark.lowering
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 2, 1024), (2, 46337, 46400), (2, 2**16 + 1, 2**16)], ids=str)
def test_remap_compiles(compiled, shape, dtype):
    from dsv4_fusions.ops.kv_index_remap import jax_triton

    with jax.enable_x64(dtype == "int64"):
        for capability in SHARED_MEMORY:
            ids = jax.ShapeDtypeStruct(shape, dtype)
            (kernel,) = compiled(capability, lambda ids: jax_triton.local_to_flat(ids, 2**31), ids)
            assert kernel.metadata.shared == 0


# --- programs that hold them ---


@pytest.fixture
def jax_triton():
    try:
        return __import__("jax_triton")
    except ImportError as error:  # it is not installed, or JAX has no GPU support
        pytest.skip(f"jax-triton does not load: {str(error).splitlines()[0]}")


NAME = "triton_kernel_call"
STEP = functools.partial(cases.step, implementation="jax_triton")


@pytest.mark.lowering
@pytest.mark.parametrize("path", [cases.fused, cases.unfused])
@pytest.mark.parametrize("backward, kernels", [("dot_general", 1), ("single_pass", 2)])
def test_postmix_lowers(jax_triton, path, backward, kernels):
    operands = Postmix(8, 3, 24, 8).operands()
    assert lower_for_cuda(STEP(path, backward=backward), *operands).count(NAME) == kernels

    def rematerialized(o, m, tables, **options):
        return jax.checkpoint(functools.partial(path, **options))(o, m, tables)

    assert lower_for_cuda(STEP(rematerialized, backward=backward), *operands).count(NAME) == kernels


@pytest.mark.lowering
def test_mapped_axes_become_entries_of_one_call(jax_triton):
    o, u, v, tables, g = Postmix(8, 4, 24, 8, lead=(2, 3)).operands()

    def gradient(o, u, v, g):
        return jax.vjp(lambda *x: op.inv_rope_grouped_postmix(*x, tables, "single_pass", "jax_triton"), o, u, v)[1](g)

    u, v = (jnp.stack([x.reshape(2, 2, -1)] * 3) for x in (u, v))
    one, both = jax.vmap(gradient, (0, None, None, 0)), jax.vmap(gradient, (1, 0, 0, 1))
    for fn, weights in [(one, (u[0], v[0])), (both, (u, v)), (jax.vmap(one, (0, None, None, 0)), (u[0], v[0]))]:
        assert lower_for_cuda(fn, o, *weights, g).count(NAME) == 1
    ids = jax.ShapeDtypeStruct((70_000, 3, 4, 8), jnp.int32)
    assert lower_for_cuda(jax.vmap(lambda x: local_to_flat_kv_index(x, 64, "jax_triton")), ids).count(NAME) == 1


@pytest.mark.lowering
@pytest.mark.parametrize("backward, kernels", [("dot_general", 1), ("single_pass", 2)])
def test_shard_map_lowers_with_manual_axes_checked(jax_triton, backward, kernels):
    o, u, v, tables, g = Postmix(8, 3, 24, 8).operands()
    rows = P("d")
    with gpu_target(devices=4):
        mesh = jax.sharding.get_abstract_mesh()
    body = functools.partial(cases.fused, backward=backward, implementation="jax_triton")
    specs = dict(mesh=mesh, out_specs=rows, check_vma=True)
    path = jax.shard_map(body, in_specs=(rows, P(), rows), **specs)

    def step(o, m, g):
        out, vjp = jax.vjp(lambda o, m: path(o, m, tables), o, m)
        return out, *vjp(g)

    text = lower_for_cuda(step, o, dsv4.postmix_matrix(u, v), g, devices=4)
    assert text.count(NAME) == kernels and text.count("all_reduce") == 1
    remap = jax.shard_map(lambda x: local_to_flat_kv_index(x, 512, "jax_triton"), in_specs=rows, **specs)
    assert NAME in lower_for_cuda(remap, jax.ShapeDtypeStruct((12, 5, 97), jnp.int32), devices=4)


# --- the rule for vmap ---


def test_over_entries():
    """A launch that takes one scale for all entries, or one for each."""
    from dsv4_fusions import triton_launch

    seen = []

    def launch(scale, x):
        seen.append((len(scale), len(x)))
        return [scale[:, None] * x, x.sum(1)]

    call = triton_launch.over_entries(launch, shareable=1)
    scale, x = jnp.arange(1.0, 6), jnp.arange(30.0).reshape(5, 2, 3)
    one = lambda scale, x: [y[0] for y in call(scale[None], x[None])]  # noqa: E731
    want = lambda scale, x: [scale * x, x.sum(0)]  # noqa: E731
    for axes, operands in [((None, 0), (scale[0], x[:, 0])), ((0, 0), (scale, x[:, 0])), ((0, None), (scale, x[0, 0]))]:
        got = jax.vmap(one, axes)(*operands)
        assert_trees_bitwise_equal(got, jax.vmap(want, axes)(*operands))
        assert seen[-1] == (1 if axes[0] is None else 5, 5)
    for inner, outer in [((None, 0), (None, 0)), ((None, 0), (0, 0)), ((None, 0), (0, None)), ((0, 0), (None, 0))]:
        operands = (scale[:2] if inner[0] == 0 else scale if outer[0] == 0 else scale[0], x if outer[1] == 0 else x[0])
        nested = lambda fn, inner=inner, outer=outer: jax.vmap(jax.vmap(fn, inner), outer)  # noqa: E731
        assert_trees_bitwise_equal(nested(one)(*operands), nested(want)(*operands))
