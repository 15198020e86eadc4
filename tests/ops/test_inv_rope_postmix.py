"""Fused and unfused postmix: the same bits, proved from the outputs, and a real fusion, proved from the program.

PaddleFleet PR #1772's cases and where they are tested here ("gpu" is tests/gpu/test_inv_rope_postmix_gpu.py):

| case there | test |
|---|---|
| bitwise_default_shape, multiple_seeds | gpu: test_bitwise |
| bitwise_production_shape | gpu: test_production_shape_* |
| bitwise_odd_token_count | gpu: test_bitwise; test_bitwise, test_bitwise_where_chunks_end |
| o_restored_after_backward | test_inputs_are_untouched_and_repeats_agree |
| frozen_postmix_skips_wgrad | test_frozen_operands_cost_nothing, test_single_pass_reads_and_writes_what_is_wanted |
| no_wide_rotated_intermediate | test_temporary_memory; test_the_fusion_is_in_the_program |
| split_n_gemm_is_bitwise | test_splitting_the_channels_changes_no_bit; gpu: the same |
| backward_formulas_match_matmul_grad | test_gradients_are_the_formulas, test_products_are_rounded_sums |
| pe_scatter_matches_paddle, scatter_shape | test_the_fusion_is_in_the_program (the tail is written in place) |
| compact_rope_matches_wide_rope | test_compact_rotation_equals_the_wide_one |
| head-major weight gradient (removed there, for it was not bitwise) | backward="single_pass" in all tests of bits |
| grouped_postmix (it falls back there) | it fuses: the cases with groups in all tests of bits |
| enabled_by_default_config, disabled_cases, nested_recompute, eval_mode | tests/layers |
| method_matches_unfused_pair, entry point | tests/layers/test_dsv4_attention.py |
| small heads bitwise | test_bitwise |
| rank, channel split, width, freqs checks | test_names_what_does_not_fit; tests/test_rope.py |
| freqs_broadcast_over_batch | test_tables_broadcast_over_batch_axes |
| entry accepts non-contiguous | test_inputs_are_untouched_and_repeats_agree, test_donation (no strides in JAX) |

Races in the Mosaic kernel and its grid: test_mosaic.py. Kernels in Triton's own language: test_jax_triton.py.
"""

import contextlib
import dataclasses
import functools

import cases
import compilation
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from program import (
    KERNELS,
    cuda_grids,
    cuda_kernels,
    equations,
    flattened,
    gpu_target,
    inside,
    kernels,
    lower_for_cuda,
    primitives,
)

import dsv4_fusions as dsv4
from dsv4_fusions import dispatch, rope
from dsv4_fusions.ops.inv_rope_postmix import (
    BACKWARDS,
    grouped_postmix,
    inv_rope_grouped_postmix,
    mosaic,
    reference,
    tiling,
    xla,
)
from dsv4_fusions.testing import assert_trees_bitwise_equal

pytestmark = pytest.mark.optimised

IMPLEMENTATIONS = ["xla", "triton", "mosaic"]
ROUNDINGS = ["each_product", "once"]
SHAPE = cases.Postmix(7, 3, 40, 8)
GROUPED = cases.GROUPED[0]
FOR_MOSAIC = cases.Postmix(5, 64, 128, 50)
SHAPES = {"xla": SHAPE, "triton": SHAPE, "mosaic": FOR_MOSAIC}

# Every code path once: an implementation and a small case for it.
KINDS = [("xla", SHAPE), ("xla", GROUPED), ("triton", SHAPE), ("triton", GROUPED), ("mosaic", FOR_MOSAIC)]
KIND_IDS = ["xla", "xla-grouped", "triton", "triton-grouped", "mosaic"]
EVERY_KIND = pytest.mark.parametrize("implementation, case", KINDS, ids=KIND_IDS)
EVERY_BACKWARD = pytest.mark.parametrize("backward", BACKWARDS)
EVERY_PATH = pytest.mark.parametrize("path", [cases.unfused, cases.fused])


@contextlib.contextmanager
def running(implementation):
    """Kernels run in a simulator. That is no program of a user's, so that it need not be optimised."""
    if implementation == "xla":
        yield
    else:
        with dispatch.interpret(), compilation.quick():
            yield


# Compiled once for the tests of a process that share a case.
compiled_step = functools.cache(cases.step)


def step(path, case, implementation, backward="dot_general"):
    return compiled_step(path, groups=case.groups, implementation=implementation, backward=backward)


def run(path, case, implementation, backward="dot_general", **kwargs):
    with running(implementation):
        return step(path, case, implementation, backward)(*case.operands(**kwargs))


def with_options(case, **changes):
    return dataclasses.replace(case, **changes)


def operands(case):
    """(o, weights, tables, g)"""
    o, u, v, tables, g = case.operands()
    with compilation.quick():
        return o, cases.weights(u, v, case.groups), tables, g


def f64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


SMALL = cases.SMALL + cases.ODD
FEW = [cases.SMALL[2], cases.SMALL[4], cases.ODD[0], cases.ODD[1]]
NUMBERS = [("bfloat16", "once"), ("float16", "each_product")]


def calls(cases, implementations, backwards, *numbers):
    return [
        (with_options(case, dtype=dtype, rounding=rounding), implementation, backward)
        for case in cases
        for implementation in implementations
        for backward in backwards
        for dtype, rounding in numbers or [("bfloat16", "each_product")]
    ]


ONE_PASS, BY_TRANSPOSES = ["single_pass"], ["dot_general"]
# A CPU takes seconds for a kernel, so that here each case shows something that no other does. On a GPU all cases run
# with all implementations, dtypes and rounding modes (tests/gpu).
ALL_CALLS = [
    # The forward is the same before either gradient.
    *calls(SMALL + cases.MEDIUM, ["xla"], BY_TRANSPOSES),
    *calls(FEW + cases.SMALL[:1] + cases.MEDIUM[1:2], ["xla"], ONE_PASS),
    *calls([*FEW, *cases.SMALL[5:], *cases.ODD[2:], cases.MEDIUM[1]], ["triton"], ONE_PASS),
    # That gradient is XLA's behind any forward.
    *calls(FEW[1:2], ["triton"], BY_TRANSPOSES),
    *calls(FEW[:2], ["xla"], ONE_PASS, *NUMBERS),
    *calls(FEW[:1], ["triton"], ONE_PASS, *NUMBERS),
    *calls(FEW[:1], ["xla", "triton"], BY_TRANSPOSES, NUMBERS[0]),
    # f32 shows every change of an accumulation's order.
    *calls(cases.ODD, ["xla"], BY_TRANSPOSES, ("float32", "each_product")),
    *calls(FEW[1:2], ["xla"], BACKWARDS, ("float32", "once")),
    *calls(cases.WIDE_ROTARY[:1], ["xla"], ONE_PASS),
    *calls(cases.WIDE_ROTARY, ["triton"], ONE_PASS),
    *calls(cases.GROUPED, ["xla"], BACKWARDS),
    *calls(cases.GROUPED, ["triton"], ONE_PASS),
    *calls(cases.GROUPED[:1], ["triton"], BY_TRANSPOSES),
    *calls(cases.GROUPED[1:2], ["xla", "triton"], ONE_PASS, ("float16", "once")),
    *calls(cases.GROUPED[:1], ["xla"], ONE_PASS, ("float32", "each_product")),
    *calls(cases.MOSAIC, ["mosaic"], ONE_PASS),
    *calls(cases.MOSAIC[2:], ["mosaic"], ONE_PASS, NUMBERS[1]),
    *calls(cases.MOSAIC[1:2], ["mosaic"], BACKWARDS, ("float16", "once")),
]
SMOKE = [*FEW, cases.GROUPED[0], cases.MOSAIC[2]]


@pytest.mark.parametrize(
    "case, implementation, backward",
    [
        pytest.param(*call, marks=pytest.mark.smoke if call[0] in SMOKE and call[2] == "single_pass" else ())
        for call in ALL_CALLS
    ],
    ids=str,
)
def test_bitwise(case, implementation, backward):
    results = assert_bitwise(case, implementation, backward)
    if implementation == "triton" and case.dtype == "bfloat16" and case not in cases.MEDIUM:
        for got, want in zip(results, run(cases.fused, case, "xla", backward), strict=True):
            assert_alike_but_ties(got, want)


def assert_alike_but_ties(got, want):
    """Two ways to the same sums in f32, rounded alike.

    Which bits an addition's order gives depends on the CPU: a sum near the middle of two numbers may be rounded to
    either, in one of a hundred elements at most, and what is rotated afterwards is apart by a unit of its pair.
    """
    got, want = f64((got, want))
    apart = np.abs(got - want)
    assert (apart <= 2.0**-7 * np.abs(want).max()).all()
    assert np.count_nonzero(apart) <= apart.size // 100


def assert_bitwise(case, implementation, backward):
    """Output and gradients of the fused op are those of the unfused pair, which two runs agree on. Returns them."""
    operands = case.operands()
    unfused, fused = (step(path, case, implementation, backward) for path in (cases.unfused, cases.fused))
    with running(implementation):
        results = unfused(*operands)
        assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
        assert_trees_bitwise_equal(results, fused(*operands), names=("unfused", "fused"))
    assert all(np.asarray(result, np.float32).any() for result in results)
    return results


CHUNK = {"xla": xla._CHUNK, "triton": tiling.CHUNK, "mosaic": 4}  # the simulator cannot take many of Mosaic's own 32


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(mosaic, "_CHUNK", CHUNK["mosaic"])
    compiled_step.cache_clear()  # what is compiled holds the length of a chunk
    yield
    compiled_step.cache_clear()


@pytest.mark.parametrize(
    "implementation, case, chunks, more",
    [
        (implementation, case, chunks, more)
        for implementation, case in KINDS
        for chunks, more in [(1, 0), (3, 2)]
        if case is not GROUPED or more == 2
    ],
    ids=str,
)
@pytest.mark.usefixtures("short_chunks")
def test_bitwise_where_chunks_end(implementation, case, chunks, more):
    """One chunk, one token more, several with a ragged end (and one token less: 7 with Triton)."""
    assert_bitwise(with_options(case, tokens=chunks * CHUNK[implementation] + more), implementation, "single_pass")


def test_bitwise_across_a_chunk_of_mosaics_own():
    assert_bitwise(cases.Postmix(mosaic._CHUNK + 1, 64, 128, 128), "mosaic", "single_pass")


@hypothesis.settings(max_examples=10)
@hypothesis.example(tokens=1, heads=4, pairs=2, nope=508, lead=(), dtype="float32")  # narrow: a library sums otherwise
@hypothesis.example(tokens=3, heads=7, pairs=1, nope=30, lead=(), dtype="float16")
@hypothesis.example(tokens=2, heads=4, pairs=1, nope=6, lead=(3,), dtype="float32")
@hypothesis.given(
    tokens=st.integers(1, 40),
    heads=st.integers(1, 130),
    pairs=st.integers(1, 12),
    nope=st.integers(0, 40),
    lead=st.sampled_from([(), (2,)]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_bitwise_forward_at_any_shape(tokens, heads, pairs, nope, lead, dtype):
    """On the XLA path. With f32 a changed order of accumulation shows at once."""
    case = cases.Postmix(tokens, heads, nope + 2 * pairs, 2 * pairs, dtype, lead=lead)
    o, u, v, tables, _ = case.operands(scale=0.5)
    m = dsv4.postmix_matrix(u, v)
    unfused, fused = (
        jax.jit(functools.partial(path, implementation="xla"))(o, m, tables) for path in (cases.unfused, cases.fused)
    )
    assert_trees_bitwise_equal(unfused, fused)


@EVERY_BACKWARD
def test_mosaic_equals_xla_where_the_simulator_adds_alike(backward):
    """NumPy multiplies there: a sum of 64 terms in another order may round elsewhere, once in a thousand at most."""
    want, got = (run(cases.fused, cases.MOSAIC[0], i, backward) for i in ("xla", "mosaic"))
    for a, b in zip(want[:2], got[:2], strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
        np.testing.assert_allclose(*f64((b, a)), rtol=2**-7, atol=2**-12)


@EVERY_KIND
def test_products_are_rounded_sums(implementation, case):
    """Against f64: f32 sums of at most 64 terms, rounded as often as reference.py says."""
    x, weights, _, g = operands(case)

    def gradients(x, weights, g):
        options = {"backward": "single_pass", "implementation": implementation}
        postmix = dsv4.vha_postmix if case.groups is None else grouped_postmix
        out, vjp = jax.vjp(lambda x: postmix(x, *weights, **options), x)
        return out, *vjp(g)

    with running(implementation):
        out, dx = jax.jit(gradients)(x, weights, g)
    if case.groups is None:
        (m,) = weights
        assert_rounded_sums(out, m, x)
        assert_rounded_sums(dx, m.T, g)
    else:
        u, v = weights
        assert_rounded_in_steps(out, u, v, x)
        assert_rounded_in_steps(dx, v, u, g)


def assert_rounded_sums(got, m, x):
    """got = round(m @ x) up to the errors of f32 sums, which 64 terms keep below 64 units of the last place of f32."""
    got, m, x = f64((got, m, x))
    error = np.abs(got - np.einsum("hk,...kc->...hc", m, x))
    sums = 2.0**-18 * np.einsum("hk,...kc->...hc", np.abs(m), np.abs(x))
    assert (error <= 2.0**-8 * np.abs(got) + sums).all()


def assert_rounded_in_steps(got, u, v, x):
    """got = x + V (U^T x), each product rounded.

    A sum in f32 that lies halfway between two numbers may be rounded to either, in one of a hundred elements at most.
    """
    grouped = f64(x).reshape(*x.shape[:-2], *u.shape[:2], x.shape[-1])
    hidden = rounded(np.einsum("...gjc,gjr->...grc", grouped, f64(u)), x.dtype)
    product = f64(rounded(np.einsum("...grc,gjr->...gjc", f64(hidden), f64(v)), x.dtype))
    want = rounded(grouped + product, x.dtype).reshape(x.shape)
    apart = np.abs(f64(got) - f64(want))
    unit = 2.0**-7 * np.maximum(np.abs(grouped), np.abs(product)).reshape(x.shape)
    assert (apart <= unit).all() and np.count_nonzero(apart) <= apart.size // 100


def rounded(x, dtype):
    return x.astype(np.float32).astype(dtype)


@EVERY_BACKWARD
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_the_grouped_postmix_sums_in_f32(implementation, backward):
    """XLA on a CPU sums a batched product of bf16 arrays in bf16 where they are no constants."""
    case = cases.Postmix(5, 64, 256, 64, groups=2)
    x, (u, v), _, g = operands(case)
    assert u.shape == (2, 32, 16)

    def gradients(x, u, v, g):
        options = {"backward": backward, "implementation": implementation}
        out, vjp = jax.vjp(lambda x, u, v: grouped_postmix(x, u, v, **options), x, u, v)
        return out, *vjp(g)

    with running(implementation):
        out, dx, du, dv = jax.jit(gradients)(x, 4 * u, 4 * v, g)
    u, v = 4 * u, 4 * v
    assert_rounded_in_steps(out, u, v, x)
    assert_rounded_in_steps(dx, v, u, g)
    x, g = (f64(a).reshape(5, 2, 32, 256) for a in (x, g))
    for got, (a, b, weight) in ((du, (x, g, v)), (dv, (g, x, u))):
        hidden = rounded(np.einsum("tgjc,gjr->tgrc", b, f64(weight)), "bfloat16")
        want = np.einsum("tgjc,tgrc->gjr", a, f64(hidden))
        assert np.linalg.norm(f64(got) - want) < 2**-8 * np.linalg.norm(want)  # one rounding


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_single_pass_is_as_exact_as_the_best_weight_gradient_of_xlas(implementation):
    case = cases.Postmix(40, 64, 128, 64)
    o, (m,), tables, g = operands(case)
    x = jax.jit(functools.partial(dsv4.rotate, inverse=True))(o, tables)
    want = np.einsum("thc,tkc->hk", *f64((g, x)))

    def error(form):
        with running(implementation):
            dm = jax.jit(lambda m, o, tables, g: jax.vjp(lambda m: form(o, m, tables), m)[1](g)[0])(m, o, tables, g)
        return np.linalg.norm(f64(dm) - want) / np.linalg.norm(want)

    def batched(o, m, tables):
        many = jnp.broadcast_to(m, (case.tokens, *m.shape))
        return jnp.einsum("thk,tkc->thc", many, dsv4.rotate(o, tables, inverse=True))

    best = min(error(functools.partial(cases.fused, implementation="xla")), error(batched))
    ours = error(functools.partial(cases.fused, implementation=implementation, backward="single_pass"))
    assert ours <= 1.05 * best + 1e-6


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_against_float64_loops_with_an_unsymmetric_matrix(implementation):
    # pypto-lib#197: m[i, j] = 10 i + j tells M from its transpose.
    heads, head_dim = (64, 128) if implementation == "mosaic" else (3, 12)
    rope_dim, tokens, nope = 4, 5, head_dim - 4
    o = np.random.default_rng(0).integers(-4, 5, (tokens, heads, head_dim)).astype(np.float64)
    m = f64((10.0 * np.arange(heads)[:, None] + np.arange(heads)).astype("bfloat16"))
    positions = np.array([3, -1, 0, 7, 2])
    tables = dsv4.rope_tables(jnp.asarray(positions), rope_dim, rounding="once")
    x = o.copy()
    for t, k in np.ndindex(tokens, rope_dim // 2):
        angle = positions[t] * 10000.0 ** (-2 * k / rope_dim)
        a, b = o[t, :, nope + 2 * k], o[t, :, nope + 2 * k + 1]
        x[t, :, nope + 2 * k], x[t, :, nope + 2 * k + 1] = (
            a * np.cos(angle) + b * np.sin(angle),
            b * np.cos(angle) - a * np.sin(angle),
        )
    with running(implementation):
        got = dsv4.inv_rope_vha_postmix(
            jnp.asarray(o, jnp.bfloat16), jnp.asarray(m, jnp.bfloat16), tables, implementation=implementation
        )
    want = np.einsum("hk,tkd->thd", m, x)
    of_x = 2.0**-8 * np.abs(x).max() * m.sum(1).max()  # every rotated channel is rounded
    np.testing.assert_allclose(f64(got), want, rtol=2**-8, atol=of_x)
    np.testing.assert_array_equal(f64(got[..., :nope]), f64(want[..., :nope].astype("bfloat16")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "case", [case for case in cases.SPLIT if case.tokens * case.heads < 2**16] + cases.ODD, ids=str
)
def test_splitting_the_channels_changes_no_bit(case, dtype):
    """The library property that the XLA fusion rests on; the two largest of the ten shapes are in tests/gpu."""
    # NumPy slices: one of JAX's compiles a program.
    whole, nope, view, copy = map(np.asarray, cases.splits(with_options(case, dtype=dtype)))
    assert_trees_bitwise_equal(whole[..., : nope.shape[-1]], nope)
    assert_trees_bitwise_equal(whole[..., nope.shape[-1] :], view)
    assert_trees_bitwise_equal(view, copy)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tables_of_more_bits_than_the_mode_wants_are_rounded_first(implementation):
    case = with_options(SHAPES[implementation], tokens=2, rounding="once")
    o, u, v, wide, g = case.operands()
    exact = rope.prepare_tables(wide, jnp.bfloat16)
    assert np.asarray(exact.cos != wide.cos).any()
    narrow = dsv4.RopeTables(wide.cos.astype(jnp.bfloat16), wide.sin.astype(jnp.bfloat16))
    with running(implementation):
        path = step(cases.fused, case, implementation, "single_pass")
        assert_trees_bitwise_equal(path(o, u, v, exact, g), path(o, u, v, wide, g))
        assert_trees_bitwise_equal(path(o, u, v, narrow, g), path(o, u, v, dsv4.RopeTables(wide.cos, wide.sin), g))


@pytest.mark.parametrize(
    "implementation, case, counts",
    [
        ("xla", cases.Postmix(257, 4, 32, 16), (1, 2, 17, 33, 128, 257)),
        ("triton", cases.Postmix(257, 4, 32, 16), (1, 2, 17, 257)),
        *[(i, cases.Postmix(257, 6, 32, 16, groups=2), (1, 17, 257)) for i in ("xla", "triton")],
        ("mosaic", cases.Postmix(17, 64, 128, 50), (1, 2, 17)),
    ],
    ids=str,
)
def test_a_token_does_not_see_how_many_there_are(implementation, case, counts):
    # TransformerEngine#2986: output and activation gradient
    o, weights, tables, g = operands(case)

    def gradient(o, weights, tables, g):
        options = {"backward": "single_pass", "implementation": implementation}
        out, vjp = jax.vjp(lambda o: cases.fused(o, *weights, tables, **options), o)
        return out, *vjp(g)

    def first_of(n):
        path = jax.jit(gradient)
        return jax.tree.map(lambda a: a[0], path(o[:n], weights, jax.tree.map(lambda t: t[:n], tables), g[:n]))

    with running(implementation):
        first = [first_of(n) for n in counts]
    for row in first[1:]:
        assert_trees_bitwise_equal(first[0], row)


@EVERY_KIND
@pytest.mark.usefixtures("short_chunks")
def test_batch_axes_do_not_enter_the_order_of_sums(implementation, case):
    """[2, T] rows and [2 T] rows give the same weight gradient, and so do three runs; T is no multiple of a chunk."""
    case = with_options(case, tokens=14 if implementation == "mosaic" else 2 * 37)
    o, weights, tables, g = operands(case)

    def dweights(o, weights, tables, g):
        path = functools.partial(cases.fused, implementation=implementation, backward="single_pass")
        return jax.vjp(lambda weights: path(o, *weights, tables), weights)[1](g)[0]

    with running(implementation):
        flat, compiled = (o, weights, tables, g), jax.jit(dweights)
        results = [compiled(*flat) for _ in range(3)]
        split = lambda a: a.reshape(2, -1, *a.shape[1:])  # noqa: E731
        results.append(compiled(split(o), weights, jax.tree.map(split, tables), split(g)))
    for result in results[1:]:
        assert_trees_bitwise_equal(results[0], result)


@pytest.mark.parametrize("case", [SHAPE, cases.Postmix(33, 8, 64, 32)], ids=str)
def test_gradients_are_the_formulas(case):
    o, u, v, tables, g = case.operands()
    x = dsv4.rotate(o, tables, inverse=True)
    m = dsv4.postmix_matrix(u, v)
    (dm,), dx = jax.jit(reference.mix_transpose)((m,), x, g)
    by_jax = jax.jit(lambda m, x, g: jax.vjp(lambda m, x: reference.mix((m,), x), m, x)[1](g))(m, x, g)
    assert_trees_bitwise_equal((dm, dx), by_jax)
    _, do, du, dv = run(cases.unfused, case, "xla")
    assert_trees_bitwise_equal(do, jax.jit(lambda dx: rope.rotate_transposed(dx, tables, inverse=True))(dx))
    np.testing.assert_allclose(f64(dm), np.einsum("thc,tkc->hk", *f64((g, x))), rtol=2**-7, atol=2**-4)
    np.testing.assert_allclose(f64(dx), np.einsum("hk,thc->tkc", *f64((m, g))), rtol=2**-7, atol=2**-7)
    # dV = dM U and dU = dM^T V, with one rounding each
    assert_trees_bitwise_equal(dv, jax.jit(lambda dm: jnp.einsum("hk,kr->hr", dm, u))(dm))
    assert_trees_bitwise_equal(du, jax.jit(lambda dm: jnp.einsum("hk,hr->kr", dm, v))(dm))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("case", [SHAPE, cases.Postmix(97, 8, 128, 32)], ids=str)
def test_compact_rotation_equals_the_wide_one(case, inverse):
    o, _, _, tables, _ = case.operands()
    nope = case.head_dim - case.rope_dim
    compact = jax.jit(lambda x: rope.rotate_tail(x, tables, inverse))(o[..., nope:])
    assert_trees_bitwise_equal(jax.jit(lambda o: dsv4.rotate(o, tables, inverse))(o)[..., nope:], compact)


def test_postmix_matrix_rounds_twice():
    u, v = (jax.random.normal(k, (6, 3)).astype(jnp.bfloat16) for k in jax.random.split(jax.random.key(0)))
    product = np.asarray(v, np.float64) @ np.asarray(u, np.float64).T
    rounded = product.astype(np.float32).astype("bfloat16").astype(np.float64)
    want = (rounded + np.eye(6)).astype(np.float32).astype("bfloat16")
    assert_trees_bitwise_equal(jax.jit(dsv4.postmix_matrix)(u, v), want)
    identity = dsv4.postmix_matrix(u, jnp.zeros_like(v))
    np.testing.assert_array_equal(np.asarray(identity, np.float32), np.eye(6))


# --- the program ---


def full_width_before_the_product(path, case, **options):
    """Primitives that make a tensor of o's shape before the first matrix product or kernel, barriers aside."""
    o, weights, tables, _ = operands(case)
    jaxpr = jax.make_jaxpr(lambda o, weights, tables: path(o, *weights, tables, **options))(o, weights, tables)
    names = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name in ("dot_general", *KERNELS):
            return set(names) - {"optimization_barrier"}
        names += [eqn.primitive.name for out in eqn.outvars if out.aval.shape == o.shape]
    raise AssertionError("no product in the program")


@EVERY_KIND
def test_the_fusion_is_in_the_program(implementation, case):
    """What makes a tensor of o's width: with the rotation outside, the rotation; with it inside, at most the result."""
    case = with_options(case, tokens=20)  # more than the blocks that the XLA path works through
    result = {"broadcast_in_dim"} if implementation == "xla" else set()  # made empty, then written block by block
    with running(implementation):
        assert full_width_before_the_product(cases.fused, case, implementation=implementation) == result
        assert full_width_before_the_product(cases.unfused, case, implementation=implementation) == {
            "concatenate",
            *result,
        }


DISTINCT = list({case.shape[-2:] + (case.rope_dim,): case for case in SMALL + cases.MEDIUM}.values())


def lowered_kernels(path, case, implementation, backward="single_pass", devices=1):
    """Names of the kernels of a step lowered for CUDA, in order."""
    text = lower_for_cuda(step(path, case, implementation, backward), *case.types(), devices=devices)
    return cuda_kernels(text)


def names(case, *backward):
    grouped = "" if case.groups is None else "grouped_"
    return [[f"{grouped}{rotation}vha_postmix{suffix}" for suffix in ("", *backward)] for rotation in ("", "inv_rope_")]


LOWERED = [
    # The other cases have the widths of one of these, and of the tokens a kernel knows no more than the grid.
    *calls([*DISTINCT, *cases.WIDE_ROTARY, *cases.GROUPED], ["triton"], ["single_pass"]),
    *calls([*FEW, cases.WIDE_ROTARY[0], cases.GROUPED[0]], ["triton"], ["single_pass"], ("float16", "once")),
    *calls([cases.PRODUCTION, with_options(cases.PRODUCTION, groups=8)], ["triton"], BACKWARDS, *NUMBERS),
    *calls(cases.MOSAIC, ["mosaic"], ["single_pass"]),
    *calls(cases.MOSAIC[1:2], ["mosaic"], ["single_pass"], *NUMBERS),
    *calls([cases.PRODUCTION], ["mosaic"], BACKWARDS, ("bfloat16", "each_product"), ("float16", "once")),
    # more than 2**31 elements, and more than 65,535 programs on grid axis 0 (jax#18361)
    *calls([with_options(cases.PRODUCTION, tokens=70_001)], ["triton", "mosaic"], ["single_pass"]),
    *calls([with_options(cases.PRODUCTION, tokens=70_001, groups=8)], ["triton"], ["single_pass"]),
]


@pytest.mark.lowering
@pytest.mark.parametrize("case, implementation, backward", LOWERED, ids=str)
def test_cuda_lowering_holds_the_kernels(case, implementation, backward):
    unfused, fused = names(case, *(["_bwd"] if backward == "single_pass" else []))
    assert lowered_kernels(cases.fused, case, implementation, backward) == fused
    assert lowered_kernels(cases.unfused, case, implementation, backward) == unfused


KERNEL_KINDS = pytest.mark.parametrize(
    "implementation, case",
    [("triton", cases.Postmix(8, 3, 24, 8)), ("triton", cases.GROUPED[4]), ("mosaic", cases.Postmix(8, 64, 128, 50))],
    ids=["triton", "triton-grouped", "mosaic"],
)


@pytest.mark.lowering
@pytest.mark.parametrize("rounding", ROUNDINGS)
@KERNEL_KINDS
def test_cuda_lowering_with_64_bit_integers(implementation, case, rounding):
    with jax.enable_x64(True):
        assert (
            lowered_kernels(cases.fused, with_options(case, rounding=rounding), implementation)
            == names(case, "_bwd")[1]
        )


@pytest.mark.lowering
@KERNEL_KINDS
def test_cuda_lowering_of_transforms(implementation, case):
    """vmap and jax.checkpoint hold the same two kernels: the recomputation needs the operands alone."""
    options = {"implementation": implementation, "backward": "single_pass"}
    o, u, v, tables, g = case.types()

    def gradients(o, u, v, tables, g, wrap=lambda path: path):
        path = wrap(lambda o, u, v: cases.fused(o, *cases.weights(u, v, case.groups), tables, **options))
        out, vjp = jax.vjp(path, o, u, v)
        return out, *vjp(g)

    checkpointed = functools.partial(gradients, wrap=jax.checkpoint)
    assert cuda_kernels(lower_for_cuda(checkpointed, o, u, v, tables, g)) == names(case, "_bwd")[1]
    many = jax.ShapeDtypeStruct((3, *o.shape), o.dtype)
    mapped = jax.vmap(gradients, in_axes=(0, None, None, None, 0))
    assert cuda_kernels(lower_for_cuda(mapped, many, u, v, tables, many)) == names(case, "_bwd")[1]


@pytest.mark.lowering
@pytest.mark.parametrize("entries, tokens", [(1, 70_001), (3, 70_001), (70_001, 3)])
@pytest.mark.parametrize("groups", [None, 2])
def test_tritons_grid_fits(entries, tokens, groups):
    """Axes y and z stop at 65,535, under vmap as well."""
    case = cases.Postmix(tokens, 4, 64, 16, groups=groups)
    o, u, v, tables, _ = case.types()
    many = jax.ShapeDtypeStruct((entries, *o.shape), o.dtype)
    mapped = jax.vmap(step(cases.fused, case, "triton", "single_pass"), in_axes=(0, None, None, None, 0))
    grids = cuda_grids(lower_for_cuda(mapped, many, u, v, tables, many))
    programs = [entries * n * (groups or 1) for n in (tokens, -(-tokens // tiling.CHUNK))]
    assert [x * y * z for x, y, z in grids] == programs
    assert all(y <= 65_535 and z <= 65_535 for _, y, z in grids)


@pytest.mark.lowering
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_gradient_lowers_for_cuda(rounding):
    """By the transposes: M, dM, dX, dU, dV, and of the kernels the forward alone."""
    case = with_options(SHAPE, rounding=rounding)
    text = lower_for_cuda(cases.step(cases.fused, implementation="triton"), *case.types())
    assert text.count("dot_general") >= 5 and cuda_kernels(text) == ["inv_rope_vha_postmix"]


def untaken_vjp(fn, *args):
    """The vjp of `fn`, with the types of what it saves in place of the arrays."""
    return jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)


def backward_of(vjp, g):
    return jax.make_jaxpr(lambda vjp, g: vjp(g))(vjp, g)


def assert_behind_barriers(jaxpr, product, layout_changes):
    """Every `product` reads results of barriers and is read by a barrier, layout changes on the way aside."""
    nodes = list(flattened(jaxpr))
    maker = {value: (name, inputs) for name, inputs, outputs in nodes for value in outputs}
    products = [(inputs, outputs) for name, inputs, outputs in nodes if name == product]
    assert products
    for inputs, outputs in products:
        for value in filter(None, inputs):
            name, sources = maker[value]
            while name in layout_changes and sources != [None]:
                name, sources = maker[sources[0]]
            assert name == "optimization_barrier" or sources == [None]  # or made of a constant
        results, readers = set(outputs), set()
        for name, reads, makes in nodes:
            if results & set(reads):
                readers.add(name)
                results |= set(makes) if name in layout_changes else set()
        assert readers - layout_changes == {"optimization_barrier"}


LAYOUT_CHANGES = {"transpose", "reshape", "broadcast_in_dim", "pad", "slice", "squeeze", "concatenate", "stack", "neg"}
# The grouped postmix' products are f32 products of rounded values, which are rounded.
ROUNDINGS_OF_PRODUCTS = {"convert_element_type", "reduce_precision"}


@EVERY_KIND
@EVERY_PATH
def test_barriers_stand_around_operands_and_results(path, implementation, case):
    o, weights, tables, g = operands(case)
    exact = LAYOUT_CHANGES | (ROUNDINGS_OF_PRODUCTS if case.groups else set())
    # On the XLA path, forward: the loop over blocks of tokens.
    product = {"xla": "scan", "triton": "pallas_call", "mosaic": "mpmd_map"}[implementation]
    with running(implementation):
        for backward in BACKWARDS:
            kernel = functools.partial(path, implementation=implementation, backward=backward)
            forward = lambda o, weights, tables, kernel=kernel: kernel(o, *weights, tables)  # noqa: E731
            assert_behind_barriers(jax.make_jaxpr(forward)(o, weights, tables), product, LAYOUT_CHANGES)
            vjp = untaken_vjp(lambda o, weights, kernel=kernel: kernel(o, *weights, tables), o, weights)
            in_kernel = backward == "single_pass" and implementation != "xla"
            # Partial sums are added before they come to a barrier; an addition alone is safe.
            assert_behind_barriers(
                backward_of(vjp, g),
                *((product, exact | {"unstack", "add"}) if in_kernel else ("dot_general", exact)),
            )


def test_the_first_rounding_of_the_postmix_matrix_is_pinned():
    u = jnp.ones((4, 2), jnp.bfloat16)
    assert primitives(dsv4.postmix_matrix, u, u)[:2] == ["dot_general", "optimization_barrier"]


def test_roundings_are_pinned():
    o, u, v, tables, _ = cases.Postmix(8, 4, 64, 16).operands()
    m = dsv4.postmix_matrix(u, v)
    assert primitives(lambda o, m: cases.fused(o, m, tables, implementation="xla"), o, m).count("reduce_precision") == 3


@pytest.mark.parametrize("implementation, case", [KINDS[2], KINDS[4]], ids=["triton", "mosaic"])
def test_roundings_are_pinned_in_the_kernels(implementation, case):
    """There and back, for two products and their sum, wherever a kernel rotates a tile."""
    with running(implementation):
        jaxpr = jax.make_jaxpr(step(cases.fused, case, implementation, "single_pass"))(*case.operands())
    forward, backward = (
        [eqn.primitive.name for eqn in inside(kernel)].count("bitcast_convert_type") for kernel in kernels(jaxpr)
    )
    warpgroups = 2 if implementation == "mosaic" else 1
    assert (forward, backward) == (6 * warpgroups, 12 * warpgroups)  # O in both, and the gradient


@EVERY_KIND
@EVERY_PATH
def test_frozen_operands_cost_nothing(path, implementation, case):
    """By the transposes: what only the frozen operand's gradient needs is not computed."""
    o, weights, tables, g = operands(case)
    path = functools.partial(path, implementation=implementation)

    def products(gradient):
        return primitives(gradient, o, weights).count("dot_general")

    with running(implementation):
        both = products(lambda o, w: jax.vjp(lambda o, w: path(o, *w, tables), o, w)[1](g))
        only_o = products(lambda o, w: jax.vjp(lambda o: path(o, *w, tables), o)[1](g))
        only_w = products(lambda o, w: jax.vjp(lambda w: path(o, *w, tables), w)[1](g))
        stopped = products(lambda o, w: jax.vjp(lambda o: path(o, *jax.lax.stop_gradient(w), tables), o)[1](g))
    of_weights, of_o = (1, 1) if case.groups is None else (4, 0)  # of the grouped postmix, see below
    assert (both - only_o, both - stopped, both - only_w) == (of_weights, of_weights, of_o)


def test_a_frozen_input_costs_the_grouped_postmix_nothing():
    """Its transpose always writes dX down; XLA removes it."""
    o, weights, tables, g = operands(cases.GROUPED[3])

    def products(gradient):
        return jax.jit(gradient).lower(o, weights, g).compile().as_text().count(" dot(")

    both = products(lambda o, w, g: jax.vjp(lambda o, w: cases.fused(o, *w, tables), o, w)[1](g))
    assert both - products(lambda o, w, g: jax.vjp(lambda w: cases.fused(o, *w, tables), w)[1](g)) == 1


@pytest.mark.parametrize(
    "path, implementation, case, backward",
    [
        *[(cases.fused, *kind, "single_pass") for kind in KINDS],
        (cases.unfused, *KINDS[3], "single_pass"),
        *[(cases.fused, *kind, "dot_general") for kind in KINDS[:2]],
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_frozen_operands_change_no_bit(path, implementation, case, backward):
    o, weights, tables, g = operands(case)
    path = functools.partial(path, implementation=implementation, backward=backward)
    with running(implementation):
        both = jax.jit(lambda o, w, g: jax.vjp(lambda o, w: path(o, *w, tables), o, w)[1](g))(o, weights, g)
        frozen_weights = jax.jit(lambda o, w, g: jax.vjp(lambda o: path(o, *w, tables), o)[1](g))(o, weights, g)
        frozen_o = jax.jit(lambda o, w, g: jax.vjp(lambda w: path(o, *w, tables), w)[1](g))(o, weights, g)
    assert_trees_bitwise_equal(both, (*frozen_weights, *frozen_o))


@EVERY_KIND
@EVERY_PATH
def test_single_pass_reads_and_writes_what_is_wanted(path, implementation, case):
    """Read off the program: how many arrays of o's size the kernel, or the loop over chunks, reads and writes."""
    case = with_options(case, tokens=xla._CHUNK + 1) if implementation == "xla" else case
    o, weights, tables, g = operands(case)
    path = functools.partial(path, implementation=implementation, backward="single_pass")

    def streams(fn, *args):
        """(read, written) of the only kernel or loop, and whether the backward is given an array like o."""
        vjp = untaken_vjp(fn, *args)
        jaxpr = backward_of(vjp, g)
        (loop,) = (e for e in equations(jaxpr, whole=("scan",)) if e.primitive.name in ("scan", *KERNELS))
        sized = lambda values: sum(v.aval.size in (o.size, o.size // case.tokens * xla._CHUNK) for v in values)  # noqa: E731
        written = sized(loop.outvars)
        carried = written if loop.primitive.name == "scan" else 0  # the result, which the loop writes in place
        return sized(loop.invars) - carried, written, o.shape in [saved.shape for saved in jax.tree.leaves(vjp)]

    with running(implementation):
        assert streams(lambda o, w: path(o, *w, tables), o, weights) == (2, 1, True)
        assert streams(lambda o: path(o, *weights, tables), o) == (1, 1, False)
        assert streams(lambda w: path(o, *w, tables), weights) == (2, 0, True)


@EVERY_BACKWARD
@pytest.mark.parametrize("case", [SHAPE, GROUPED], ids=["one-matrix", "grouped"])
def test_frozen_operands_save_nothing_for_the_backward(case, backward):
    o, weights, tables, _ = operands(case)
    path = functools.partial(cases.fused, backward=backward)

    def saved(fn, *args):
        shapes = [saved.shape for saved in jax.tree.leaves(untaken_vjp(fn, *args))]
        return shapes.count(o.shape), shapes.count(weights[0].shape)

    assert saved(lambda o, *w: path(o, *w, tables), o, *weights) == (1, len(weights))
    assert saved(lambda o: path(o, *weights, tables), o)[0] == 0
    # U and V are needed for each other's gradient, M is not for its own.
    assert saved(lambda *w: path(o, *w, tables), *weights) == (1, 0 if case.groups is None else 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_temporary_memory(dtype):
    """At the production shape, against the pair as users write it, by less than 0.2 of a tensor of o's size."""
    case = with_options(cases.PRODUCTION, dtype=dtype)
    o, m, table = (jax.ShapeDtypeStruct(shape, dtype) for shape in (case.shape, (64, 64), (case.tokens, case.rope_dim)))
    tables = dsv4.RopeTables(table, table)
    plain = lambda o, m, tables: jnp.einsum("hk,...tkd->...thd", m, dsv4.rotate(o, tables, inverse=True))  # noqa: E731
    temp = lambda fn: jax.jit(fn).lower(o, m, tables).compile().memory_analysis().temp_size_in_bytes  # noqa: E731
    size = o.size * o.dtype.itemsize
    assert temp(functools.partial(cases.fused, implementation="xla")) <= temp(plain) - 0.8 * size


# --- numbers that are not ---

PATTERNS = [0x7FFF, 0xFFFF, 0x7FC0, 0x7F81, 0x7F80, 0xFF80]  # bfloat16: NaNs and infinities
FLOAT32_PATTERNS = [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000]


SPECIAL = [
    *[("xla", "each_product", backward) for backward in BACKWARDS],
    ("triton", "each_product", "single_pass"),
    *[(i, "once", "single_pass") for i in ("xla", "triton")],
    ("mosaic", "each_product", "single_pass"),
    ("mosaic", "once", "single_pass"),
]


@pytest.mark.parametrize(
    "where, implementation, rounding, backward",
    [("rotary", *special) for special in SPECIAL] + [("nope", *special) for special in SPECIAL[2:6:3]],
)
def test_nan_infinity_and_overflow_stay_in_their_places(implementation, rounding, backward, where):
    case = with_options(SHAPES[implementation], tokens=8, rounding=rounding)
    o, u, v, tables, g = case.operands()
    # In the nope channel next to the rotary ones, which a kernel may hold in the same tile, and in a rotary one.
    channel = case.head_dim - case.rope_dim + (3 if where == "rotary" else -1)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    special = [*np.array(PATTERNS, np.uint16).view("bfloat16"), largest, -largest]
    bad = np.asarray(o).copy()
    bad_g = np.asarray(g).copy()
    for token, value in enumerate(special):
        bad[token, 1, channel] = value
        bad_g[token, 2, channel] = value
    steps = [step(path, case, implementation, backward) for path in (cases.unfused, cases.fused)]
    for index, operands in enumerate([(jnp.asarray(bad), u, v, tables, g), (o, u, v, tables, jnp.asarray(bad_g))]):
        with running(implementation):
            unfused, fused = (step(*operands) for step in steps)
        assert_trees_bitwise_equal(unfused, fused)
        result = np.asarray(fused[index], np.float32)
        for token in range(4):
            assert np.isnan(result[token, :, channel]).all(), f"NaN {PATTERNS[token]:04x} vanished"
        for token in (4, 5):
            assert (~np.isfinite(result[token, :, channel])).any(), "infinity vanished"
        # A pair of rotary channels shares what is not finite; a nope channel keeps it to itself.
        spoilt = [channel] if where == "nope" else [channel - channel % 2, channel - channel % 2 + 1]
        assert np.isfinite(np.delete(result[:6], spoilt, axis=-1)).all(), "something spread"
        for token in (6, 7):  # the largest finite numbers, mixed: some sums overflow or stay near the largest
            assert np.abs(result[token]).max() > largest / 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float16_subnormals_and_zeros_of_either_sign(implementation):
    """Ordinary numbers of float16 are subnormal there and not in f32; a zero keeps its sign where nothing is added."""
    case = with_options(SHAPES[implementation], tokens=4, dtype="float16")
    o, u, v, tables, g = case.operands()
    tiny, tiny_g = ((a.astype(jnp.float32) * 2.0**-16).astype(jnp.float16) for a in (o, g))
    assert (np.abs(np.asarray(tiny, np.float32)) < 2.0**-14).mean() > 0.9
    zeros, zeros_g = (
        np.where(np.arange(o.size).reshape(o.shape) % 3 == 0, np.float16(-0.0), a) for a in (tiny, tiny_g)
    )
    with running(implementation):
        results = [
            step(path, case, implementation, "single_pass")(jnp.asarray(zeros), u, v, tables, jnp.asarray(zeros_g))
            for path in (cases.unfused, cases.fused)
        ]
        # M = I, no rotary channel touched: 1 * x + 0 * others.
        identity = jnp.eye(case.heads, dtype=jnp.float16)
        one = jax.jit(functools.partial(cases.fused, implementation=implementation))(tiny, identity, tables)
    assert_trees_bitwise_equal(*results)
    for result in results[0][:2]:
        assert ((np.asarray(result) != 0) & (np.abs(np.asarray(result, np.float32)) < 2.0**-14)).any()
    nope = case.head_dim - case.rope_dim
    np.testing.assert_array_equal(one[..., :nope], tiny[..., :nope])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_negative_zero_is_treated_alike(implementation):
    """All of a token's heads and channels: no sum has another term."""
    case = with_options(SHAPES[implementation], tokens=2)
    o, u, v, tables, g = case.operands()
    o, g = (
        jnp.asarray(np.where(np.arange(2)[:, None, None] == 1, np.asarray(a), -0.0).astype(a.dtype)) for a in (o, g)
    )
    with running(implementation):
        # The other gradient is XLA's behind every implementation.
        for backward in BACKWARDS if implementation == "xla" else ["single_pass"]:
            unfused, fused = (
                step(path, case, implementation, backward)(o, u, v, tables, g) for path in (cases.unfused, cases.fused)
            )
            assert_trees_bitwise_equal(unfused, fused)
            assert not np.asarray(fused[0][0], np.float32).any() and not np.asarray(fused[1][0], np.float32).any()


@pytest.mark.parametrize("channel", [1, 35], ids=["nope", "rotary"])
def test_f32_nan_patterns(channel):
    case = with_options(cases.Postmix(6, 3, 40, 8), dtype="float32")
    o, u, v, tables, g = case.operands()
    bad = np.asarray(o).copy()
    bad[np.arange(6), 1, channel] = np.array(FLOAT32_PATTERNS, np.uint32).view(np.float32)
    outs = [step(path, case, None)(jnp.asarray(bad), u, v, tables, g) for path in (cases.unfused, cases.fused)]
    assert_trees_bitwise_equal(*outs)
    assert np.isnan(np.asarray(outs[0][0])[:4, :, channel]).all()


@EVERY_KIND
def test_poisoned_neighbours_do_not_leak(implementation, case):
    # Heads are padded to a power of two and channels to a tile: what lies there belongs to the next token.
    # The last chunk of the weight gradient overhangs: what lies there belongs to nobody.
    o, weights, tables, g = operands(with_options(case, tokens=4))
    options = {"implementation": implementation, "backward": "single_pass"}

    def gradient(o, weights, tables, g):
        out, vjp = jax.vjp(lambda o, weights: cases.fused(o, *weights, tables, **options), o, weights)
        return out, *vjp(g)

    with running(implementation):
        path = jax.jit(gradient)
        clean_out, clean_do, clean_dweights = path(o, weights, tables, g)
        out, _, _ = path(o.at[1].set(jnp.nan), weights, tables, g)
        _, do, _ = path(o, weights, tables, g.at[1].set(jnp.nan))
    assert all(np.isfinite(np.asarray(d, np.float32)).all() for d in clean_dweights)
    for clean, poisoned in ((clean_out, out), (clean_do, do)):
        assert np.isnan(np.asarray(poisoned[1], np.float32)).all()
        for token in (0, 2, 3):
            assert_trees_bitwise_equal(clean[token], poisoned[token])


# --- transforms ---


@EVERY_KIND
def test_tables_broadcast_over_batch_axes(implementation, case):
    o, weights, tables, g = operands(with_options(case, tokens=3, lead=(2,)))
    options = {"implementation": implementation, "backward": "single_pass"}

    def gradient(o, tables, g):
        out, vjp = jax.vjp(lambda o: cases.fused(o, *weights, tables, **options), o)
        return out, *vjp(g)

    with running(implementation):
        path = jax.jit(gradient)
        got = path(o, tables, g)
        assert_trees_bitwise_equal(got, path(o, jax.tree.map(lambda t: t[None], tables), g))
        different = jax.tree.map(lambda t: jnp.stack([t, -t]), tables)  # Liger-Kernel#477: each entry has its own
        negative = path(o[1], jax.tree.map(jnp.negative, tables), g[1])
        for one, want, other in zip(path(o, different, g), got, negative, strict=True):
            assert_trees_bitwise_equal((one[0], one[1]), (want[0], other))


@EVERY_KIND
def test_inputs_are_untouched_and_repeats_agree(implementation, case):
    # vllm#46685: writing the row and then its tail again must not race.
    operands = case.operands()
    before = jax.tree.map(lambda x: np.array(x), operands)
    with running(implementation):
        compiled = step(cases.fused, case, implementation, "single_pass")
        results = [compiled(*operands) for _ in range(50 if implementation == "xla" else 3)]
    for result in results[1:]:
        assert_trees_bitwise_equal(results[0], result)
    assert_trees_bitwise_equal(before, operands)


@EVERY_BACKWARD
@pytest.mark.parametrize("implementation, case", KINDS[:2], ids=KIND_IDS[:2])
def test_donation(implementation, case, backward):
    o, u, v, tables, g = case.operands()
    compiled = step(cases.fused, case, implementation, backward)
    want = compiled(o, u, v, tables, g)
    donated = o + 0, g + 0
    got = jax.jit(compiled, donate_argnums=(0, 4))(donated[0], u, v, tables, donated[1])
    assert all(array.is_deleted() for array in donated)
    assert_trees_bitwise_equal(want, got)


def gradients_of(path, case, tables, g, options):
    """(u, v, o) -> output, dU, dV, dO under each transformation."""

    def one(u, v, o):
        return path(o, *cases.weights(u, v, case.groups), tables, **options)

    def plain(u, v, o, one=one):
        out, vjp = jax.vjp(one, u, v, o)
        return out, *vjp(g)

    def checkpointed(u, v, o):
        return plain(u, v, o, jax.checkpoint(one))

    def scanned(u, v, o):
        def body(total, og):
            o, g = og
            return total + (one(u, v, o) * g).astype(jnp.float32).sum(), None

        return jax.grad(lambda *args: jax.lax.scan(body, jnp.float32(0), (args[2], g))[0], argnums=(0, 1, 2))(u, v, o)

    def mapped(u, v, o):
        gradient = lambda u, v, o, g: jax.vjp(one, u, v, o)[1](g)  # noqa: E731
        return jax.vmap(gradient, in_axes=(None, None, 0, 0))(u, v, o, g)

    return {"plain": plain, "checkpointed": checkpointed, "scanned": scanned, "mapped": mapped}


@pytest.mark.parametrize(
    "implementation, case, backward",
    [("xla", SHAPE, "dot_general"), *[(*KINDS[i], "single_pass") for i in (0, 3, 4)]],
    ids=str,
)
def test_transforms_keep_the_bits(implementation, case, backward):
    mosaic = implementation == "mosaic"
    case = with_options(case, tokens=2 if mosaic else 6, lead=(3,))
    o, u, v, tables, g = case.operands()
    options = {"implementation": implementation, "backward": backward}
    unfused, fused = (gradients_of(path, case, tables, g, options) for path in (cases.unfused, cases.fused))
    results = {}
    with running(implementation):
        for name in fused:
            # The simulator cannot run under the gradient of a checkpoint: test_cuda_lowering_of_transforms.
            if name in ("scanned", "mapped") or not mosaic:
                results[name] = jax.jit(fused[name])(u, v, o)
                assert_trees_bitwise_equal(jax.jit(unfused[name])(u, v, o), results[name])
    if not mosaic:
        assert_trees_bitwise_equal(results["plain"], results["checkpointed"])


def sharded(path, mesh, check_vma=True, **options):
    """(o, weights, tables, g) -> (out, dO, dweights), tokens sharded, weights replicated."""
    rows = P("d")

    def step(o, weights, tables, g):
        body = lambda o, weights, tables: path(o, *weights, tables, **options)  # noqa: E731
        specs = dict(in_specs=(rows, P(), rows), out_specs=rows, check_vma=check_vma)
        out, vjp = jax.vjp(lambda o, weights: jax.shard_map(body, mesh=mesh, **specs)(o, weights, tables), o, weights)
        return out, *vjp(g)

    return jax.jit(step)


@pytest.mark.parametrize(
    "implementation, case, backward",
    [("xla", SHAPE, "dot_general"), *[(*KINDS[i], "single_pass") for i in (0, 1, 3)]],
    ids=str,
)
@pytest.mark.skipif(jax.device_count("cpu") < 4, reason="needs 4 simulated CPU devices")
def test_shard_map(implementation, case, backward):
    """Sharded over tokens: fused = unfused, the unsharded output, and a single all-reduce, the weights' (jax#21855)."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    o, weights, tables, g = operands(with_options(case, tokens=8))
    # JAX's interpreter of Pallas kernels knows no manual axes; the kernels are checked with them just below.
    options = dict(implementation=implementation, backward=backward)
    how = dict(mesh=mesh, check_vma=implementation == "xla")
    with running(implementation):
        unfused, fused = (
            sharded(path, **how, **options)(o, weights, tables, g) for path in (cases.unfused, cases.fused)
        )
        text = sharded(cases.fused, **how, **options).lower(o, weights, tables, g).compile().as_text()
        whole = jax.jit(functools.partial(cases.fused, **options))(o, *weights, tables)
    assert_trees_bitwise_equal(unfused, fused)
    assert_trees_bitwise_equal(whole, fused[0])
    assert text.count(" all-reduce(") == 1  # XLA combines those of U and V


@pytest.mark.lowering
@KERNEL_KINDS
@EVERY_BACKWARD
def test_the_kernels_lower_under_shard_map_with_manual_axes_checked(implementation, case, backward):
    o, weights, tables, g = operands(with_options(case, tokens=16))
    with gpu_target(devices=4):
        mesh = jax.sharding.get_abstract_mesh()
        steps = [
            sharded(path, mesh, implementation=implementation, backward=backward)
            for path in (cases.unfused, cases.fused)
        ]
    for step, wanted in zip(steps, names(case, *(["_bwd"] if backward == "single_pass" else [])), strict=True):
        text = lower_for_cuda(step, o, weights, tables, g, devices=4)
        assert cuda_kernels(text) == wanted
        assert text.count("stablehlo.all_reduce") == len(weights)


@EVERY_PATH
@pytest.mark.parametrize("case", [SHAPE, GROUPED], ids=["one-matrix", "grouped"])
def test_forward_mode_is_refused_by_both(case, path):
    o, weights, tables, _ = operands(case)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda o: path(o, *weights, tables), (o,), (o,))


@EVERY_BACKWARD
@EVERY_KIND
def test_empty_inputs(implementation, case, backward):
    for shape in ((0,), (2, 0), (0, 4)):
        o = jnp.ones((*shape, case.heads, case.head_dim), jnp.bfloat16)
        tables = dsv4.rope_tables(jnp.arange(shape[-1]), 8)
        _, u, v, _, _ = case.operands()
        weights = cases.weights(u, v, case.groups)
        with running(implementation):
            gradient = functools.partial(cases.fused, implementation=implementation, backward=backward)
            out, vjp = jax.vjp(lambda o, weights: gradient(o, *weights, tables), o, weights)  # noqa: B023
            do, dweights = vjp(out)
        assert out.shape == do.shape == o.shape
        assert not any(np.asarray(d, np.float32).any() for d in dweights)


def test_the_rotation_is_not_lost_where_a_gradient_is_traced_for_another_target(faked_target):
    """A gradient may be traced after its call, and with it the fused forward: under a GPU target here."""
    o, u, v, tables, _ = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    with_target = lambda target: [faked_target(*target), xla.forward((m,), o, tables)][1]  # noqa: E731
    assert_trees_bitwise_equal(with_target(("cpu", None)), with_target(("gpu", (9, 0))))


def test_rope_dim_0_is_the_plain_postmix():
    o, u, v, _, _ = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    tables = dsv4.rope_tables(jnp.arange(7), 0)
    assert_trees_bitwise_equal(jax.jit(cases.fused)(o, m, tables), jax.jit(dsv4.vha_postmix)(o, m))


def test_f32_on_a_gpu_takes_the_unfused_pair():
    o = jax.ShapeDtypeStruct((4, 3, 24), jnp.float32)
    m = jax.ShapeDtypeStruct((3, 3), jnp.float32)
    tables = dsv4.RopeTables(*(jax.ShapeDtypeStruct((4, 8), jnp.float32),) * 2)
    with gpu_target():
        fused, unfused = (
            [name for name in primitives(path, o, m, tables) if name != "stop_gradient"]
            for path in (cases.fused, cases.unfused)
        )
    assert fused == unfused


# --- errors ---

OUT, M, TABLES = jnp.ones((5, 3, 8), jnp.bfloat16), jnp.ones((3, 3), jnp.bfloat16), dsv4.rope_tables(jnp.arange(5), 4)
U = jnp.ones((3, 1, 2), jnp.bfloat16)


WRONG = [  # NAME stands for the rotated or unrotated array's name
    ((OUT[0], M), {}, ValueError, r"NAME: got shape \(3, 8\), wanted \[..., tokens, heads, head_dim\]"),
    ((OUT[0], U, U), {}, ValueError, r"NAME: got shape \(3, 8\), wanted \[..., tokens, heads, head_dim\]"),
    ((OUT.astype(jnp.int32), M), {}, TypeError, "NAME: got dtype int32"),
    ((OUT.astype(jnp.int32), U, U), {}, TypeError, "NAME: got dtype int32"),
    ((OUT, M[:2]), {}, ValueError, r"m: got shape \(2, 3\), wanted \(3, 3\) for NAME's 3 heads"),
    ((OUT, M[None]), {}, ValueError, r"m: got shape \(1, 3, 3\)"),
    ((OUT, M.astype(jnp.float32)), {}, TypeError, "m: got dtype float32, wanted NAME's dtype bfloat16"),
    (
        (OUT, U, U[..., :1]),
        {},
        ValueError,
        r"u, v: got shapes \(3, 1, 2\) and \(3, 1, 1\), wanted the same \[groups, heads // groups, rank\] "
        r"twice for NAME \[..., tokens, heads, head_dim\] = \(5, 3, 8\)",
    ),
    ((OUT, U[:2], U[:2]), {}, ValueError, r"u, v: got shapes \(2, 1, 2\) and \(2, 1, 2\)"),
    ((OUT, U[:, 0], U[:, 0]), {}, ValueError, r"u, v: got shapes \(3, 2\) and \(3, 2\)"),
    (
        (OUT, U.astype(jnp.float32), U),
        {},
        TypeError,
        "u, v: got dtypes float32 and bfloat16, wanted NAME's dtype bfloat16",
    ),
    ((OUT, U, U.astype(jnp.float16)), {}, TypeError, "u, v: got dtypes bfloat16 and float16"),
    *[
        ((OUT, *weights), options, ValueError, message)
        for weights in [(M,), (U, U)]
        for options, message in [
            ({"backward": "fast"}, "backward: got 'fast', wanted one of dot_general, single_pass"),
            (
                {"implementation": "cublas"},
                "implementation: got 'cublas', wanted None or one of mosaic, triton, jax_triton, xla",
            ),
        ]
    ],
]


@pytest.mark.parametrize("arguments, options, error, message", WRONG)
def test_names_what_does_not_fit(arguments, options, error, message):
    grouped = len(arguments) == 3
    fused, unfused = (
        (inv_rope_grouped_postmix, grouped_postmix) if grouped else (dsv4.inv_rope_vha_postmix, dsv4.vha_postmix)
    )
    with pytest.raises(error, match=message.replace("NAME", "o")):
        fused(*arguments, TABLES, **options)
    with pytest.raises(error, match=message.replace("NAME", "x")):
        unfused(*arguments, **options)


@pytest.mark.parametrize(
    "o, message",
    [
        (OUT[..., :2], "rope_dim 4, wanted at most o's head_dim 2"),
        (OUT[:4], r"tables: got shape \(5, 4\), wanted \[..., 4, rope_dim\]"),
    ],
)
def test_names_tables_that_do_not_fit(o, message):
    for weights in [(M,), (U, U)]:
        with pytest.raises(ValueError, match=message):
            cases.fused(o, *weights, TABLES)


NOT_HERE = [
    ("cpu", None, "mosaic", {}, "it needs an NVIDIA GPU and the target is cpu"),
    ("cpu", None, "triton", {}, "it needs an NVIDIA GPU and the target is cpu"),
    ("cpu", None, "jax_triton", {}, "it needs an NVIDIA GPU and the target is cpu"),
    ("gpu", (8, 0), "mosaic", {}, "it needs compute capability 9.0 and the target has 8.0"),
    ("gpu", (10, 0), "mosaic", {}, "it needs compute capability 9.0 and the target has 10.0"),
    ("gpu", (7, 5), "triton", {}, "it needs compute capability 8.0 or higher and the target has 7.5"),
    ("gpu", (7, 5), "jax_triton", {}, "it needs compute capability 8.0 or higher and the target has 7.5"),
    ("gpu", (9, 0), "mosaic", dict(heads=32), "it serves 64 heads, not 32"),
    ("gpu", (9, 0), "mosaic", dict(head_dim=192), "it serves multiples of 128 as head_dim, not 192"),
    ("gpu", (9, 0), "mosaic", dict(dtype="float32"), "it serves bfloat16 and float16, not float32"),
    ("gpu", (9, 0), "triton", dict(dtype="float32"), "it serves bfloat16 and float16, not float32"),
    ("gpu", (9, 0), "mosaic", dict(groups=4), "it does not serve the grouped postmix"),
]


@EVERY_PATH
@pytest.mark.parametrize("platform, capability, implementation, changes, reason", NOT_HERE)
def test_a_named_implementation_that_cannot_serve_says_why(
    platform, capability, implementation, changes, reason, path, faked_target
):
    o, u, v, tables, _ = with_options(cases.Postmix(2, 64, 128, 64), **changes).types()
    faked_target(platform, capability)

    def call(o, u, v, tables):
        return path(o, *cases.weights(u, v, changes.get("groups")), tables, implementation=implementation)

    with pytest.raises(ValueError, match=f"implementation '{implementation}' cannot run here: {reason}"):
        jax.eval_shape(call, o, u, v, tables)


def test_the_simulated_mosaic_kernel_serves_what_the_real_one_does():
    for case in (SHAPE, with_options(FOR_MOSAIC, dtype="float32"), with_options(FOR_MOSAIC, groups=8)):
        with pytest.raises(ValueError, match="implementation 'mosaic' cannot run here: it "):
            run(cases.fused, case, "mosaic")


@pytest.mark.parametrize(
    "u, v, error, message",
    [
        (jnp.ones((3, 2)), jnp.ones((3, 1)), ValueError, r"u, v: got shapes \(3, 2\) and \(3, 1\)"),
        (jnp.ones(3), jnp.ones(3), ValueError, r"u, v: got shapes \(3,\)"),
        (jnp.ones((3, 2)), jnp.ones((3, 2), jnp.bfloat16), TypeError, "u, v: got dtypes float32 and bfloat16"),
        (jnp.ones((3, 2), int), jnp.ones((3, 2), int), TypeError, "u, v: got dtypes int32"),
    ],
)
def test_postmix_matrix_names_what_does_not_fit(u, v, error, message):
    with pytest.raises(error, match=message):
        dsv4.postmix_matrix(u, v)


def test_one_attention_output_for_several_weights():
    """The unfused pair sums o's gradient before it rotates, the fused op after: this one agrees up to rounding."""
    o, (m,), tables, g = operands(SHAPE)
    many, g = jnp.stack([m, 2 * m, -m]), jnp.stack([g, g[::-1], g])

    def step(path):
        over_weights = lambda o, many: jax.vmap(lambda m: path(o, m, tables))(many)  # noqa: E731
        return jax.jit(lambda o, many: (lambda out, vjp: (out, *vjp(g)))(*jax.vjp(over_weights, o, many)))(o, many)

    (out, do, dm), (fused_out, fused_do, fused_dm) = step(cases.unfused), step(cases.fused)
    assert_trees_bitwise_equal((out, dm), (fused_out, fused_dm), names=("unfused", "fused"))
    do, fused_do = f64((do, fused_do))
    assert np.linalg.norm(fused_do - do) <= 2**-7 * np.linalg.norm(do)
