"""Fused and unfused postmix: the same bits, proved from the outputs, and a real fusion, proved from the program.

PaddleFleet PR #1772's cases and where they are tested here ("gpu" is tests/gpu/test_inv_rope_postmix_gpu.py):

| case there | test |
|---|---|
| bitwise_default_shape, multiple_seeds | gpu: test_bitwise |
| bitwise_production_shape | gpu: test_production_shape_* |
| bitwise_odd_token_count | gpu: test_bitwise; test_bitwise |
| o_restored_after_backward | test_inputs_are_untouched_and_repeats_agree |
| frozen_postmix_skips_wgrad | test_frozen_operands_cost_nothing |
| no_wide_rotated_intermediate | test_temporary_memory; test_the_fusion_is_in_the_program |
| split_n_gemm_is_bitwise | test_splitting_the_channels_changes_no_bit; gpu: the same |
| backward_formulas_match_matmul_grad | test_gradients_are_the_formulas |
| pe_scatter_matches_paddle, scatter_shape | test_the_fusion_is_in_the_program (the tail is written in place) |
| compact_rope_matches_wide_rope | test_compact_rotation_equals_the_wide_one |
| enabled_by_default_config, disabled_cases, nested_recompute, eval_mode | tests/layers |
| method_matches_unfused_pair, entry point | tests/layers/test_dsv4_attention.py |
| small heads bitwise | test_bitwise |
| rank, channel split, width, freqs checks | test_names_what_does_not_fit; tests/test_rope.py |
| freqs_broadcast_over_batch | test_tables_broadcast_over_batch_axes |
| entry accepts non-contiguous | test_inputs_are_untouched_and_repeats_agree, test_donation (no strides in JAX) |
"""

import contextlib
import dataclasses
import functools

import cases
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from program import equations, flattened, gpu_target, lower_for_cuda, primitives

import dsv4_fusions as dsv4
from dsv4_fusions import dispatch, rope
from dsv4_fusions.ops.inv_rope_postmix import reference, xla
from dsv4_fusions.testing import assert_trees_bitwise_equal

IMPLEMENTATIONS = ["xla", "triton"]
ROUNDINGS = ["each_product", "once"]
SHAPE = cases.Postmix(7, 3, 40, 8)


def running(implementation):
    return dispatch.interpret() if implementation == "triton" else contextlib.nullcontext()


def run(path, case, implementation, **kwargs):
    with running(implementation):
        return cases.step(path, implementation=implementation)(*case.operands(**kwargs))


def with_options(case, **changes):
    return dataclasses.replace(case, **changes)


SMALL = cases.SMALL + cases.ODD
FEW = [cases.SMALL[2], cases.SMALL[4], cases.ODD[0], cases.ODD[1]]
ALL_CASES = [
    *[(case, implementation) for case in SMALL + cases.MEDIUM for implementation in IMPLEMENTATIONS],
    # f32 shows every change of an accumulation's order.
    *[(with_options(case, dtype="float32"), "xla") for case in SMALL + cases.MEDIUM],
    *[
        (with_options(case, dtype=dtype, rounding=rounding), "xla")
        for case in FEW
        for dtype, rounding in [("bfloat16", "once"), ("float16", "each_product"), ("float32", "once")]
    ],
    *[(with_options(case, rounding="once"), "triton") for case in FEW],
    *[(with_options(case, dtype="float16"), "triton") for case in SMALL],
    (with_options(cases.SMALL[2], dtype="float16", rounding="once"), "triton"),
]


@pytest.mark.parametrize(
    "case, implementation",
    [pytest.param(*call, marks=pytest.mark.smoke if call[0] in FEW else ()) for call in ALL_CASES],
    ids=str,
)
def test_bitwise(case, implementation):
    operands = case.operands()
    unfused, fused = (cases.step(path, implementation=implementation) for path in (cases.unfused, cases.fused))
    with running(implementation):
        results = unfused(*operands)
        assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
        assert_trees_bitwise_equal(results, fused(*operands), names=("unfused", "fused"))
    assert all(np.asarray(result, np.float32).any() for result in results)


@hypothesis.settings(max_examples=12)
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


@pytest.mark.parametrize("case", cases.SMALL + cases.ODD, ids=str)
def test_triton_equals_xla_forward_and_in_the_activation_gradient(case):
    # The weight gradient comes from the same transpose as well.
    assert_trees_bitwise_equal(run(cases.fused, case, "xla"), run(cases.fused, case, "triton"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_against_float64_loops_with_an_unsymmetric_matrix(implementation):
    # pypto-lib#197: m[i, j] = 10 i + j tells M from its transpose.
    heads, head_dim, rope_dim, tokens = 3, 12, 4, 5
    o = np.random.default_rng(0).integers(-4, 5, (tokens, heads, head_dim)).astype(np.float64)
    m = 10.0 * np.arange(heads)[:, None] + np.arange(heads)
    positions = np.array([3, -1, 0, 7, 2])
    tables = dsv4.rope_tables(jnp.asarray(positions), rope_dim, rounding="once")
    x = o.copy()
    for t, k in np.ndindex(tokens, rope_dim // 2):
        angle = positions[t] * 10000.0 ** (-2 * k / rope_dim)
        a, b = o[t, :, 8 + 2 * k], o[t, :, 9 + 2 * k]
        x[t, :, 8 + 2 * k], x[t, :, 9 + 2 * k] = (
            a * np.cos(angle) + b * np.sin(angle),
            b * np.cos(angle) - a * np.sin(angle),
        )
    with running(implementation):
        got = dsv4.inv_rope_vha_postmix(
            jnp.asarray(o, jnp.bfloat16), jnp.asarray(m, jnp.bfloat16), tables, implementation=implementation
        )
    want = np.einsum("hk,tkd->thd", m, x)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-6, atol=2.0)
    np.testing.assert_array_equal(
        np.asarray(got[..., :8], np.float64), np.asarray(want[..., :8].astype("bfloat16"), np.float64)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "case", [case for case in cases.SPLIT if case.tokens * case.heads < 2**16] + cases.ODD, ids=str
)
def test_splitting_the_channels_changes_no_bit(case, dtype):
    """The library property that the XLA fusion rests on; the two largest of the ten shapes are in tests/gpu."""
    whole, nope, view, copy = cases.splits(with_options(case, dtype=dtype))
    assert_trees_bitwise_equal(whole[..., : nope.shape[-1]], nope)
    assert_trees_bitwise_equal(whole[..., nope.shape[-1] :], view)
    assert_trees_bitwise_equal(view, copy)


def test_tables_of_more_bits_than_the_mode_wants_are_rounded_first():
    case = cases.Postmix(7, 3, 40, 8, rounding="once")
    o, u, v, wide, _ = case.operands()
    m = dsv4.postmix_matrix(u, v)
    exact = rope.prepare_tables(wide, jnp.bfloat16)
    assert np.asarray(exact.cos != wide.cos).any()
    narrow = dsv4.RopeTables(wide.cos.astype(jnp.bfloat16), wide.sin.astype(jnp.bfloat16))
    for implementation in IMPLEMENTATIONS:
        with running(implementation):
            path = jax.jit(functools.partial(cases.fused, implementation=implementation))
            assert_trees_bitwise_equal(path(o, m, exact), path(o, m, wide))
            assert_trees_bitwise_equal(path(o, m, narrow), path(o, m, dsv4.RopeTables(wide.cos, wide.sin)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_does_not_see_how_many_there_are(implementation):
    # TransformerEngine#2986
    o, u, v, tables, _ = cases.Postmix(257, 4, 32, 16).operands()
    m = dsv4.postmix_matrix(u, v)
    with running(implementation):
        first = [
            jax.jit(functools.partial(cases.fused, implementation=implementation))(
                o[:n], m, jax.tree.map(lambda t, n=n: t[:n], tables)
            )[0]
            for n in (1, 2, 17, 33, 128, 257)
        ]
    for row in first[1:]:
        assert_trees_bitwise_equal(first[0], row)


@pytest.mark.parametrize("case", [SHAPE, cases.Postmix(33, 8, 64, 32)], ids=str)
def test_gradients_are_the_formulas(case):
    o, u, v, tables, g = case.operands()
    x = dsv4.rotate(o, tables, inverse=True)
    m = dsv4.postmix_matrix(u, v)
    dm, dx = jax.jit(reference.mix_transpose)(m, x, g)
    assert_trees_bitwise_equal((dm, dx), jax.jit(lambda m, x, g: jax.vjp(reference.mix, m, x)[1](g))(m, x, g))
    _, do, du, dv = run(cases.unfused, case, "xla")
    assert_trees_bitwise_equal(do, jax.jit(lambda dx: rope.rotate_transposed(dx, tables, inverse=True))(dx))
    f64 = lambda a: np.asarray(a, np.float64)  # noqa: E731
    np.testing.assert_allclose(f64(dm), np.einsum("thc,tkc->hk", f64(g), f64(x)), rtol=2**-7, atol=2**-4)
    np.testing.assert_allclose(f64(dx), np.einsum("hk,thc->tkc", f64(m), f64(g)), rtol=2**-7, atol=2**-7)
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
    o, u, v, tables, _ = case.operands()
    jaxpr = jax.make_jaxpr(lambda o, m, tables: path(o, m, tables, **options))(o, dsv4.postmix_matrix(u, v), tables)
    names = []
    for eqn in equations(jaxpr):
        if eqn.primitive.name in ("dot_general", "pallas_call"):
            return set(names) - {"optimization_barrier"}
        names += [eqn.primitive.name for out in eqn.outvars if out.aval.shape == o.shape]
    raise AssertionError("no product in the program")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_fusion_is_in_the_program(implementation):
    """What makes a tensor of o's width: with the rotation outside, the rotation; with it inside, at most the result."""
    case = cases.Postmix(8, 4, 64, 16)
    result = {"broadcast_in_dim"} if implementation == "xla" else set()  # made empty, then written block by block
    with running(implementation):
        assert full_width_before_the_product(cases.fused, case, implementation=implementation) == result
        assert full_width_before_the_product(cases.unfused, case, implementation=implementation) == {
            "concatenate",
            *result,
        }


@pytest.mark.lowering
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", SMALL + cases.MEDIUM + cases.LARGE[-1:] + [cases.PRODUCTION], ids=str)
def test_cuda_lowering_holds_the_kernel(case, dtype, rounding):
    o = jax.ShapeDtypeStruct(case.shape, dtype)
    m = jax.ShapeDtypeStruct((case.heads, case.heads), dtype)
    table = jax.ShapeDtypeStruct((case.tokens, case.rope_dim), dtype if rounding == "each_product" else "float32")
    tables = dsv4.RopeTables(table, table, rounding)
    assert "inv_rope_vha_postmix" in lower_for_cuda(cases.fused, o, m, tables)
    unfused = lower_for_cuda(cases.unfused, o, m, tables)
    assert "vha_postmix" in unfused and "inv_rope_vha_postmix" not in unfused


@pytest.mark.lowering
def test_the_gradient_lowers_for_cuda():
    o, u, v, tables, g = SHAPE.operands()
    text = lower_for_cuda(cases.step(cases.fused), o, u, v, tables, g)
    assert text.count("dot_general") >= 5 and "inv_rope_vha_postmix" in text  # M, dM, dX, dU, dV


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


LAYOUT_CHANGES = {"transpose", "reshape", "broadcast_in_dim", "pad"}


def test_barriers_stand_around_operands_and_results():
    o, u, v, tables, g = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    for path in (cases.unfused, cases.fused):
        with dispatch.interpret():
            kernel = functools.partial(path, implementation="triton")
            forward = jax.make_jaxpr(lambda o, m, t, kernel=kernel: kernel(o, m, t))(o, m, tables)
            assert_behind_barriers(forward, "pallas_call", LAYOUT_CHANGES)
            _, vjp = jax.vjp(lambda o, m, kernel=kernel: kernel(o, m, tables), o, m)
            assert_behind_barriers(jax.make_jaxpr(vjp)(g), "dot_general", LAYOUT_CHANGES)
        forward = jax.make_jaxpr(lambda o, m, t, path=path: path(o, m, t, implementation="xla"))(o, m, tables)
        assert_behind_barriers(forward, "scan", LAYOUT_CHANGES)  # the loop over blocks of tokens


def test_the_first_rounding_of_the_postmix_matrix_is_pinned():
    u = jnp.ones((4, 2), jnp.bfloat16)
    assert primitives(dsv4.postmix_matrix, u, u)[:2] == ["dot_general", "optimization_barrier"]


def test_roundings_are_pinned():
    o, u, v, tables, _ = cases.Postmix(8, 4, 64, 16).operands()
    m = dsv4.postmix_matrix(u, v)
    assert primitives(lambda o, m: cases.fused(o, m, tables, implementation="xla"), o, m).count("reduce_precision") == 3
    with dispatch.interpret():
        jaxpr = jax.make_jaxpr(lambda o, m: cases.fused(o, m, tables, implementation="triton"))(o, m)
    (kernel,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call")
    inside = [eqn.primitive.name for eqn in equations(kernel.params["jaxpr"])]
    assert inside.count("bitcast_convert_type") == 6  # there and back, for two products and their sum


@pytest.mark.parametrize("path", [cases.unfused, cases.fused])
def test_frozen_operands_cost_nothing(path):
    o, u, v, tables, g = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    both = primitives(lambda o, m: jax.vjp(lambda o, m: path(o, m, tables), o, m)[1](g), o, m)
    only_o = primitives(lambda o, m: jax.vjp(lambda o: path(o, m, tables), o)[1](g), o, m)
    only_m = primitives(lambda o, m: jax.vjp(lambda m: path(o, m, tables), m)[1](g), o, m)
    stopped = primitives(lambda o, m: jax.vjp(lambda o: path(o, jax.lax.stop_gradient(m), tables), o)[1](g), o, m)
    for names in (only_o, only_m, stopped):
        assert names.count("dot_general") == both.count("dot_general") - 1
    frozen_m = jax.jit(lambda o, m: jax.vjp(lambda o: path(o, m, tables), o)[1](g)[0])(o, m)
    assert_trees_bitwise_equal(frozen_m, cases.step(path)(o, u, v, tables, g)[1])


def test_frozen_operands_save_nothing_for_the_backward():
    o, u, v, tables, _ = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)

    def saved(fn, *args):
        shapes = [x.shape for x in jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(fn, *a)[1], *args))]
        return shapes.count(o.shape), shapes.count(m.shape)

    assert saved(lambda o, m: cases.fused(o, m, tables), o, m) == (1, 1)
    assert saved(lambda o: cases.fused(o, m, tables), o)[0] == 0
    assert saved(lambda m: cases.fused(o, m, tables), m) == (1, 0)


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


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("channel", [1, 35], ids=["nope", "rotary"])
def test_nan_infinity_and_overflow_stay_in_their_places(implementation, channel, rounding):
    o, u, v, tables, g = with_options(cases.Postmix(8, 3, 40, 8), rounding=rounding).operands()
    largest = float(jnp.finfo(jnp.bfloat16).max)
    special = [*np.array(PATTERNS, np.uint16).view("bfloat16"), largest, -largest]
    bad = np.asarray(o).copy()
    bad_g = np.asarray(g).copy()
    for token, value in enumerate(special):
        bad[token, 1, channel] = value
        bad_g[token, 2, channel] = value
    for operands in ((jnp.asarray(bad), u, v, tables, g), (o, u, v, tables, jnp.asarray(bad_g))):
        with running(implementation):
            unfused = cases.step(cases.unfused, implementation=implementation)(*operands)
            fused = cases.step(cases.fused, implementation=implementation)(*operands)
        assert_trees_bitwise_equal(unfused, fused)
        result = np.asarray(fused[0] if operands[0] is not o else fused[1], np.float32)
        for token in range(4):
            assert np.isnan(result[token, :, channel]).all(), f"NaN {PATTERNS[token]:04x} vanished"
        for token in (4, 5):
            assert (~np.isfinite(result[token, :, channel])).any(), "infinity vanished"
        for token in (6, 7):  # the largest finite numbers, mixed: some sums overflow or stay near the largest
            assert np.abs(result[token]).max() > largest / 4


@pytest.mark.parametrize("channel", [1, 35], ids=["nope", "rotary"])
def test_f32_nan_patterns(channel):
    case = with_options(cases.Postmix(6, 3, 40, 8), dtype="float32")
    o, u, v, tables, g = case.operands()
    bad = np.asarray(o).copy()
    bad[np.arange(6), 1, channel] = np.array(FLOAT32_PATTERNS, np.uint32).view(np.float32)
    outs = [cases.step(path)(jnp.asarray(bad), u, v, tables, g) for path in (cases.unfused, cases.fused)]
    assert_trees_bitwise_equal(*outs)
    assert np.isnan(np.asarray(outs[0][0])[:4, :, channel]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_poisoned_neighbours_do_not_leak(implementation):
    # Heads are padded to a power of two and channels to a tile: what lies there belongs to the next token.
    o, u, v, tables, _ = cases.Postmix(4, 3, 34, 6).operands()
    m = dsv4.postmix_matrix(u, v)
    with running(implementation):
        path = jax.jit(functools.partial(cases.fused, implementation=implementation))
        clean = path(o, m, tables)
        poisoned = path(o.at[1].set(jnp.nan), m, tables)
    assert np.isnan(np.asarray(poisoned[1], np.float32)).all()
    for token in (0, 2, 3):
        assert_trees_bitwise_equal(clean[token], poisoned[token])


# --- transforms ---

BOTH = pytest.mark.parametrize("path", [cases.unfused, cases.fused])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tables_broadcast_over_batch_axes(implementation):
    o, u, v, tables, _ = cases.Postmix(5, 3, 24, 8, lead=(2,)).operands()
    m = dsv4.postmix_matrix(u, v)
    with running(implementation):
        path = jax.jit(functools.partial(cases.fused, implementation=implementation))
        got = path(o, m, tables)
        assert_trees_bitwise_equal(got, path(o, m, jax.tree.map(lambda t: t[None], tables)))
        assert_trees_bitwise_equal(got, path(o, m, jax.tree.map(lambda t: jnp.stack([t, t]), tables)))
        different = jax.tree.map(lambda t: jnp.stack([t, -t]), tables)  # Liger-Kernel#477: each entry has its own
        assert_trees_bitwise_equal(path(o, m, different)[1], path(o[1], m, jax.tree.map(jnp.negative, tables)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inputs_are_untouched_and_repeats_agree(implementation):
    # vllm#46685: writing the row and then its tail again must not race.
    operands = SHAPE.operands()
    before = jax.tree.map(lambda x: np.array(x), operands)
    with running(implementation):
        step = cases.step(cases.fused, implementation=implementation)
        results = [step(*operands) for _ in range(50 if implementation == "xla" else 3)]
    for result in results[1:]:
        assert_trees_bitwise_equal(results[0], result)
    assert_trees_bitwise_equal(before, operands)


@BOTH
def test_donation(path):
    o, u, v, tables, _ = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    want = jax.jit(path)(o, m, tables)
    donated = o + 0
    got = jax.jit(path, donate_argnums=0)(donated, m, tables)
    assert donated.is_deleted()
    assert_trees_bitwise_equal(want, got)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_transforms_keep_the_bits(implementation):
    case = cases.Postmix(6, 3, 24, 8, lead=(3,))
    o, u, v, tables, g = case.operands()

    def step(path):
        def loss(u, v, o):
            out = path(o, dsv4.postmix_matrix(u, v), tables, implementation=implementation)
            return (out * g).astype(jnp.float32).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))

    def checkpointed(path):
        return step(lambda o, m, tables, **options: jax.checkpoint(functools.partial(path, **options))(o, m, tables))

    def scanned(path):
        one = lambda u, v, o: path(o, dsv4.postmix_matrix(u, v), tables, implementation=implementation)  # noqa: E731
        body = lambda total, og: (total + (one(u, v, og[0]) * og[1]).astype(jnp.float32).sum(), None)  # noqa: E731
        return lambda u, v, o: jax.grad(lambda o: jax.lax.scan(body, jnp.float32(0), (o, g))[0])(o)

    def vmapped(path):
        one = lambda u, v, o, g: jax.vjp(  # noqa: E731
            lambda u, v, o: path(o, dsv4.postmix_matrix(u, v), tables, implementation=implementation), u, v, o
        )[1](g)
        return lambda u, v, o: jax.vmap(one, in_axes=(None, None, 0, 0))(u, v, o, g)

    with running(implementation):
        for transform in (step, scanned, vmapped, checkpointed):
            unfused, fused = (jax.jit(transform(path))(u, v, o) for path in (cases.unfused, cases.fused))
            assert_trees_bitwise_equal(unfused, fused)
            if transform is step:
                plain = unfused
        assert_trees_bitwise_equal(plain, fused)  # remat = no remat


def sharded(path, mesh, implementation=None, check_vma=True):
    """(o, m, tables, g) -> (out, dO, dM), tokens sharded, m replicated."""
    rows = P("d")

    def step(o, m, tables, g):
        body = functools.partial(path, implementation=implementation)
        specs = dict(in_specs=(rows, P(), rows), out_specs=rows, check_vma=check_vma)
        out, vjp = jax.vjp(lambda o, m: jax.shard_map(body, mesh=mesh, **specs)(o, m, tables), o, m)
        return out, *vjp(g)

    return jax.jit(step)


@pytest.mark.skipif(jax.device_count("cpu") < 4, reason="needs 4 simulated CPU devices")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shard_map(implementation):
    """Sharded over tokens: fused = unfused, the unsharded output, and a single all-reduce, the weight's (jax#21855)."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])
    o, u, v, tables, g = cases.Postmix(8, 3, 24, 8).operands()
    m = dsv4.postmix_matrix(u, v)
    # JAX's interpreter of Pallas kernels knows no manual axes; the kernel itself is checked with them just below.
    options = dict(mesh=mesh, implementation=implementation, check_vma=implementation == "xla")
    with running(implementation):
        unfused, fused = (sharded(path, **options)(o, m, tables, g) for path in (cases.unfused, cases.fused))
        text = sharded(cases.fused, **options).lower(o, m, tables, g).compile().as_text()
        whole = jax.jit(functools.partial(cases.fused, implementation=implementation))(o, m, tables)
    assert_trees_bitwise_equal(unfused, fused)
    assert_trees_bitwise_equal(whole, fused[0])
    assert text.count(" all-reduce(") == 1


@pytest.mark.lowering
def test_the_kernel_lowers_under_shard_map_with_manual_axes_checked():
    o, u, v, tables, g = cases.Postmix(8, 3, 24, 8).operands()
    with gpu_target(devices=4):
        step = sharded(cases.fused, jax.sharding.get_abstract_mesh())
    assert "inv_rope_vha_postmix" in lower_for_cuda(step, o, dsv4.postmix_matrix(u, v), tables, g, devices=4)


def test_forward_mode_is_refused_by_both():
    o, u, v, tables, _ = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    for path in (cases.unfused, cases.fused):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda o, path=path: path(o, m, tables), (o,), (o,))


@BOTH
@pytest.mark.parametrize("shape", [(0, 3, 24), (2, 0, 3, 24), (0, 4, 3, 24)])
def test_empty_inputs(path, shape):
    o = jnp.ones(shape, jnp.bfloat16)
    tables = dsv4.rope_tables(jnp.arange(shape[-3]), 8)
    m = jnp.ones((3, 3), jnp.bfloat16)
    for implementation in IMPLEMENTATIONS:
        with running(implementation):
            out, vjp = jax.vjp(lambda o, m: path(o, m, tables, implementation=implementation), o, m)  # noqa: B023
            do, dm = vjp(out)
        assert out.shape == do.shape == shape
        assert not np.asarray(dm, np.float32).any()


def test_the_rotation_is_not_lost_where_a_gradient_is_traced_for_another_target(faked_target):
    """A gradient may be traced after its call, and with it the fused forward: under a GPU target here."""
    o, u, v, tables, _ = SHAPE.operands()
    m = dsv4.postmix_matrix(u, v)
    with_target = lambda target: [faked_target(*target), xla.forward(m, o, tables)][1]  # noqa: E731
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


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((OUT[0], M, TABLES), ValueError, r"o: got shape \(3, 8\), wanted \[..., tokens, heads, head_dim\]"),
        ((OUT, M[:2], TABLES), ValueError, r"m: got shape \(2, 3\), wanted \(3, 3\) for o's 3 heads"),
        ((OUT, M[None], TABLES), ValueError, r"m: got shape \(1, 3, 3\)"),
        ((OUT, M.astype(jnp.float32), TABLES), TypeError, "m: got dtype float32, wanted o's dtype bfloat16"),
        ((OUT.astype(jnp.int32), M, TABLES), TypeError, "o: got dtype int32"),
        ((OUT[..., :2], M, TABLES), ValueError, "rope_dim 4, wanted at most o's head_dim 2"),
        ((OUT[:4], M, TABLES), ValueError, r"tables: got shape \(5, 4\), wanted \[..., 4, rope_dim\]"),
        ((OUT, M, TABLES, "fast"), ValueError, "backward: got 'fast', wanted one of dot_general, single_pass"),
        ((OUT, M, TABLES, "single_pass"), NotImplementedError, "single_pass"),
        ((OUT, M, TABLES, "dot_general", "mosaic"), NotImplementedError, "mosaic"),
        ((OUT, M, TABLES, "dot_general", "jax_triton"), NotImplementedError, "jax_triton"),
        ((OUT, M, TABLES, "dot_general", "cublas"), ValueError, "implementation: got 'cublas'"),
        ((OUT, M, TABLES, "dot_general", "triton"), ValueError, "'triton' cannot run here: it needs an NVIDIA GPU"),
    ],
)
def test_names_what_does_not_fit(arguments, error, message, faked_target):
    faked_target("cpu", None)
    with pytest.raises(error, match=message):
        dsv4.inv_rope_vha_postmix(*arguments)


def test_a_kernel_refuses_a_dtype_it_does_not_serve():
    with dispatch.interpret(), pytest.raises(ValueError, match="serves bfloat16 and float16, not float32"):
        dsv4.vha_postmix(jnp.ones((5, 3, 8)), jnp.ones((3, 3)), implementation="triton")


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
