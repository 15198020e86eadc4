"""The postmix on a GPU: every equality at production size, counted on the device."""

import dataclasses
import functools
import hashlib
import os
import pathlib
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import PRODUCTION

import dsv4_fusions as dsv4
from dsv4_fusions import dispatch, rope
from dsv4_fusions.ops.inv_rope_postmix import BACKWARDS, Wanted, mosaic, postmix_choice, reference, triton
from dsv4_fusions.testing import assert_trees_bitwise_equal, count_mismatches

IMPLEMENTATIONS = ["mosaic", "triton", "xla"]
KERNELS = ["mosaic", "triton"]
WIDE = cases.Postmix(256, 128, 512, 64)
SHAPES = cases.SMALL + cases.MEDIUM + cases.ODD + cases.LARGE
# 64 heads and a multiple of 128 channels; rotary channels in part of a block, in several tiles, everywhere
MOSAIC_SHAPES = [
    cases.Postmix(1, 64, 512, 64),
    cases.Postmix(33, 64, 128, 128),
    cases.Postmix(77, 64, 256, 50),
    cases.Postmix(2047, 64, 384, 200),
    cases.Postmix(5, 64, 128, 2, lead=(3, 7)),
    cases.LARGE[0],
]
CALLS = [(case, "triton") for case in SHAPES] + [(case, "mosaic") for case in MOSAIC_SHAPES]


def jitted(path, implementation=None, **options):
    return jax.jit(functools.partial(path, implementation=implementation, **options))


def test_one_row():
    case = cases.Postmix(1, 64, 512, 64)
    o, u, v, tables, _ = case.operands()
    m = dsv4.postmix_matrix(u, v)
    for implementation in available_kernels():
        assert_trees_bitwise_equal(
            jitted(cases.unfused, "xla")(o, m, tables), jitted(cases.fused, implementation)(o, m, tables)
        )


@pytest.mark.parametrize(
    "numbers, backward",
    [
        *[(numbers, "dot_general") for numbers in ("bfloat16-each_product", "float16-once")],
        *[(f"{dtype}-{r}", "single_pass") for dtype in ("bfloat16", "float16") for r in ("each_product", "once")],
    ],
)
@pytest.mark.parametrize("case, implementation", CALLS, ids=str)
def test_bitwise(case, implementation, numbers, backward):
    dtype, rounding = numbers.split("-")
    operands = dataclasses.replace(case, dtype=dtype, rounding=rounding).operands()
    options = {"implementation": implementation, "backward": backward}
    unfused = cases.step(cases.unfused, **options)
    results = unfused(*operands)
    assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
    assert_trees_bitwise_equal(results, cases.step(cases.fused, **options)(*operands), names=("unfused", "fused"))


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("rounding", ["each_product", "once"])
@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("heads, groups", [(64, 8), (12, 4), (6, 1)])
def test_grouped_bitwise(heads, groups, implementation, rounding, backward):
    case = cases.Postmix(77, heads, 136, 50, rounding=rounding)
    options = {"implementation": implementation, "backward": backward, "groups": groups}
    operands = case.operands()
    unfused = cases.step(cases.unfused, **options)
    results = unfused(*operands)
    assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
    assert_trees_bitwise_equal(results, cases.step(cases.fused, **options)(*operands), names=("unfused", "fused"))
    xla = cases.step(cases.unfused, groups=groups, implementation="xla")(*operands)
    assert_trees_bitwise_equal(results[:2], xla[:2], names=(implementation, "xla"))
    for got, want in zip(results[2:], xla[2:], strict=True):
        assert_small_error(got, want, 2**-6)


def assert_small_error(got, want, bound):
    got, want = (a.astype(jnp.float32) for a in (got, want))
    assert jnp.linalg.norm(got - want) <= bound * jnp.linalg.norm(want)


@pytest.mark.parametrize(
    "case, implementation, rounding",
    [
        *[(*call, "each_product") for call in CALLS if call[0].heads <= 64],
        *[(case, implementation, "once") for implementation in KERNELS for case in MOSAIC_SHAPES[:4]],
        (WIDE, "triton", "each_product"),
    ],
    ids=str,
)
def test_kernels_equal_xla(case, implementation, rounding):
    """With more than 64 heads and few tokens XLA picks a matrix product that sums in another order: an implementation
    still equals itself there, fused and unfused (test_bitwise), but the two differ in a few of 10,000 elements."""
    operands = dataclasses.replace(case, rounding=rounding).operands()
    xla = cases.step(cases.unfused, implementation="xla")(*operands)
    for backward, shared in (("dot_general", 4), ("single_pass", 2)):  # the latter sums dM in an order of its own
        kernel = cases.step(cases.fused, implementation=implementation, backward=backward)(*operands)
        assert_trees_bitwise_equal(xla[:shared], kernel[:shared], names=("xla", implementation))
        for got, want in zip(kernel[shared:], xla[shared:], strict=True):
            assert_small_error(got, want, 2**-6)


def test_f32_takes_the_unfused_pair():
    operands = dataclasses.replace(cases.SMALL[0], dtype="float32").operands()
    for backward in BACKWARDS:
        assert_trees_bitwise_equal(
            *(cases.step(path, backward=backward)(*operands) for path in (cases.unfused, cases.fused))
        )


# --- at production size ---


@pytest.fixture(scope="module")
def production():
    """The operands at production size, and the results of the unfused pair that two runs agree on."""
    operands = PRODUCTION.operands()
    unfused = cases.step(cases.unfused)
    results = unfused(*operands)
    assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
    assert all(jnp.any(x != 0) for x in results)
    return operands, results


def test_the_fastest_implementation_is_the_default():
    best = "mosaic" if jax.devices()[0].compute_capability == "9.0" else "triton"
    assert postmix_choice("bfloat16", 64, 512, 64) == (best, None)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_production_shape_fused_equals_unfused(production, implementation, backward):
    operands, results = production
    options = {"implementation": implementation, "backward": backward}
    fused = cases.step(cases.fused, **options)(*operands)
    if backward == "dot_general":  # the weight gradient comes from XLA's transpose in all implementations
        assert_trees_bitwise_equal(results, fused)
    else:
        assert_trees_bitwise_equal(cases.step(cases.unfused, **options)(*operands), fused)
        assert_trees_bitwise_equal(results[:2], fused[:2])


@pytest.mark.parametrize("backward, implementation", [("dot_general", None), *[("single_pass", i) for i in KERNELS]])
def test_production_shape_run_equals_run(production, backward, implementation):
    operands, _ = production
    step = cases.step(cases.fused, backward=backward, implementation=implementation)
    results = step(*operands)
    for _ in range(20):
        assert_trees_bitwise_equal(results, step(*operands))


@pytest.mark.parametrize("backward, implementation", [("dot_general", None), *[("single_pass", i) for i in KERNELS]])
def test_production_shape_remat_equals_no_remat(production, backward, implementation):
    operands, _ = production
    options = {"backward": backward, "implementation": implementation}
    rematerialized = lambda o, m, tables, **options: jax.checkpoint(  # noqa: E731
        functools.partial(cases.fused, **options)
    )(o, m, tables)
    assert_trees_bitwise_equal(
        cases.step(cases.fused, **options)(*operands), cases.step(rematerialized, **options)(*operands)
    )


def plain_einsum(o, m, tables):
    """As users write it."""
    return jnp.einsum("hk,tkd->thd", m, dsv4.rotate(o, tables, inverse=True))


def plain_batched(o, m, tables):
    return jnp.einsum("thk,tkd->thd", jnp.broadcast_to(m, (o.shape[0], *m.shape)), dsv4.rotate(o, tables, inverse=True))


@pytest.mark.parametrize("form", [plain_einsum, plain_batched])
def test_production_shape_equals_plain_xla(production, form):
    """Forward and activation gradient."""
    (o, u, v, tables, g), (out, do, *_) = production
    m = dsv4.postmix_matrix(u, v)
    plain_out, plain_do = jax.jit(
        lambda o, m, g: (form(o, m, tables), jax.vjp(lambda o: form(o, m, tables), o)[1](g)[0])
    )(o, m, g)
    assert count_mismatches(out, plain_out) == 0
    assert count_mismatches(do, plain_do) == 0


@pytest.mark.parametrize("implementation", KERNELS)
def test_production_shape_error_of_the_weight_gradient(production, implementation):
    """No larger than that of XLA's best form, against sums in f64 of f32 products."""
    (o, u, v, tables, g), _ = production
    m = dsv4.postmix_matrix(u, v)
    x = jax.jit(lambda o: dsv4.rotate(o, tables, inverse=True))(o)
    part = jax.jit(
        lambda g, x: jnp.einsum("thc,tkc->hk", g.astype(jnp.float32), x.astype(jnp.float32), precision="highest")
    )
    exact = sum(np.asarray(part(g[i : i + 256], x[i : i + 256]), np.float64) for i in range(0, PRODUCTION.tokens, 256))

    def error(form, **options):
        dm = jax.jit(lambda o, m, g: jax.vjp(lambda m: form(o, m, tables, **options), m)[1](g)[0])(o, m, g)
        return np.linalg.norm(np.asarray(dm, np.float64) - exact) / np.linalg.norm(exact)

    ours = error(cases.fused, backward="single_pass", implementation=implementation)
    # Both are the error of the one rounding to bf16, of sums that differ in their last f32 bits: equal to three digits.
    assert ours <= 1.005 * min(error(plain_einsum), error(plain_batched))


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_production_shape_frozen_operands(production, backward, implementation):
    (o, u, v, tables, g), _ = production
    m = dsv4.postmix_matrix(u, v)
    fused = functools.partial(cases.fused, backward=backward, implementation=implementation)
    do, dm = jax.jit(lambda o, m, g: jax.vjp(lambda o, m: fused(o, m, tables), o, m)[1](g))(o, m, g)
    frozen_m = jax.jit(lambda o, m, g: jax.vjp(lambda o: fused(o, m, tables), o)[1](g)[0])(o, m, g)
    frozen_o = jax.jit(lambda o, m, g: jax.vjp(lambda m: fused(o, m, tables), m)[1](g)[0])(o, m, g)
    assert count_mismatches(do, frozen_m) == 0
    assert count_mismatches(dm, frozen_o) == 0


@pytest.mark.parametrize("implementation", KERNELS)
def test_more_elements_than_32_bits_count(implementation):
    """Addresses: the last rows must be those of a call with the last rows alone. Sums: of two halves."""
    tokens, kept = 70_000, 64
    case = cases.Postmix(tokens, 64, 512, 64)
    o, u, v, tables, g = case.operands()
    m = dsv4.postmix_matrix(u, v)
    fused = functools.partial(cases.fused, backward="single_pass", implementation=implementation)
    both = jax.jit(
        lambda o, m, tables, g: (lambda out, vjp: (out, *vjp(g)))(*jax.vjp(lambda o, m: fused(o, m, tables), o, m))
    )
    out, do, dm = both(o, m, tables, g)
    tail = lambda t: jax.tree.map(lambda a: a[-kept:], t)  # noqa: E731
    want_out, want_do, _ = both(tail(o), m, tail(tables), tail(g))
    assert_trees_bitwise_equal((out[-kept:], do[-kept:]), (want_out, want_do))
    del out, do
    halves = [both(o[i : i + 35_000], m, jax.tree.map(lambda t, i=i: t[i : i + 35_000], tables), g[i : i + 35_000])[2]
              for i in (0, 35_000)]  # fmt: skip
    assert_small_error(dm, sum(h.astype(jnp.float32) for h in halves), 2**-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_does_not_see_how_many_there_are(implementation):
    o, u, v, tables, _ = cases.Postmix(257, 64, 512, 64).operands()
    m = dsv4.postmix_matrix(u, v)
    path = jitted(cases.fused, implementation)
    first = [path(o[:n], m, jax.tree.map(lambda t, n=n: t[:n], tables))[0] for n in (1, 2, 17, 33, 128, 257)]
    for row in first[1:]:
        assert_trees_bitwise_equal(first[0], row)


@pytest.mark.parametrize("implementation", KERNELS)
def test_the_weight_gradient_does_not_see_batch_axes_or_multiprocessors(implementation, monkeypatch):
    o, u, v, tables, g = cases.Postmix(700, 64, 256, 64).operands()
    m = dsv4.postmix_matrix(u, v)
    module = {"mosaic": mosaic, "triton": triton}[implementation]
    split = lambda a: a.reshape(2, 350, *a.shape[1:])  # noqa: E731
    backward = lambda o, tables, g: module.single_pass_backward((m,), o, tables, g, Wanted(True, True))[1]  # noqa: E731
    whole = jax.jit(backward)(o, tables, g)
    assert_trees_bitwise_equal(whole, jax.jit(backward)(split(o), jax.tree.map(split, tables), split(g)))
    if implementation == "mosaic":
        target = mosaic.dispatch.target()
        for cores in (1, 7, 78, 300):
            monkeypatch.setattr(mosaic.dispatch, "target", lambda cores=cores: target._replace(cores=cores))
            assert_trees_bitwise_equal(whole, jax.jit(lambda *args: backward(*args))(o, tables, g))


FLAGS = ["--xla_gpu_enable_triton_gemm=false", "--xla_gpu_autotune_level=0", "--xla_gpu_deterministic_ops=true"]


@pytest.mark.parametrize("flag", FLAGS)
def test_xla_flags(flag):
    """Under each: fused = unfused in everything, and forward and dO of the kernels equal to XLA's."""
    program = (
        "import cases, itertools\n"
        "from dsv4_fusions.testing import assert_trees_bitwise_equal as check\n"
        "operands = cases.Postmix(4096, 64, 512, 64).operands()\n"
        "xla = cases.step(cases.unfused, implementation='xla')(*operands)\n"
        f"for i, b in itertools.product({[*available_kernels(), 'xla']}, ('dot_general', 'single_pass')):\n"
        "    unfused, fused = (\n"
        "        cases.step(p, implementation=i, backward=b)(*operands) for p in (cases.unfused, cases.fused)\n"
        "    )\n"
        "    check(unfused, fused)\n"
        "    check(xla[:2], fused[:2])\n"
        "print('equal')\n"
    )
    assert run_program(program, flag).strip() == "equal"


def available_kernels():
    unsupported = {"mosaic": dispatch.mosaic_unsupported(), "triton": dispatch.triton_unsupported()}
    return [name for name, reason in unsupported.items() if reason is None]


def run_program(program, flags):
    root = pathlib.Path(__file__).parents[2]
    paths = f"{root}:{root / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("backward, flags", [*[(b, FLAGS[1]) for b in BACKWARDS], ("single_pass", "")])
def test_two_processes_agree(backward, flags):
    """With autotuning off, so that XLA's weight gradients take the same algorithm in both, and without."""
    program = (
        "import cases, hashlib, numpy as np\n"
        "operands = cases.Postmix(2048, 64, 512, 64).operands()\n"
        f"for implementation in {available_kernels() + ['xla'] * bool(flags)}:\n"
        f"    results = cases.step(cases.fused, implementation=implementation, backward='{backward}')(*operands)\n"
        "    print(hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in results)).hexdigest())\n"
    )
    hashes = [run_program(program, flags) for _ in range(2)]
    assert hashes[0] == hashes[1]
    assert len(hashes[0].split()[0]) == len(hashlib.sha256(b"").hexdigest())


@pytest.mark.parametrize("implementation", KERNELS)
def test_production_shape_peak_memory(implementation):
    """O, its gradient, the output or its gradient, and partial sums: four tensors and at most 64 MiB."""
    o, m, table = (jax.ShapeDtypeStruct(s, "bfloat16") for s in (PRODUCTION.shape, (64, 64), (PRODUCTION.tokens, 64)))
    tables = dsv4.RopeTables(table, table)
    fused = functools.partial(cases.fused, backward="single_pass", implementation=implementation)

    def step(o, m, tables, g):
        out, vjp = jax.vjp(lambda o, m: fused(o, m, tables), o, m)
        return out, *vjp(g)

    memory = jax.jit(step).lower(o, m, tables, o).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert peak - memory.alias_size_in_bytes <= 4 * 2 * o.size + 64 * 2**20


@pytest.mark.parametrize("implementation", KERNELS)
def test_production_shape_temporary_memory(implementation):
    """The fused forward keeps a tensor of o's size less than the pair as users write it; "mosaic" keeps copies of the
    two tables, in the order of the channels."""
    o, m, table = (jax.ShapeDtypeStruct(s, "bfloat16") for s in (PRODUCTION.shape, (64, 64), (PRODUCTION.tokens, 64)))
    tables = dsv4.RopeTables(table, table)
    temp = lambda fn: jax.jit(fn).lower(o, m, tables).compile().memory_analysis().temp_size_in_bytes  # noqa: E731
    copies = 2 * 2 * table.size if implementation == "mosaic" else 0
    assert (
        temp(functools.partial(cases.fused, implementation=implementation)) <= temp(plain_einsum) - o.size * 2 + copies
    )


def test_gradients_are_the_formulas():
    o, u, v, tables, g = cases.Postmix(2048, 64, 512, 64).operands()
    m = dsv4.postmix_matrix(u, v)
    x = jax.jit(lambda o: dsv4.rotate(o, tables, inverse=True))(o)
    (dm,), dx = jax.jit(lambda m, x, g: reference.mix_transpose((m,), x, g))(m, x, g)
    assert_trees_bitwise_equal(
        (dm, dx), jax.jit(lambda m, x, g: jax.vjp(lambda m, x: reference.mix((m,), x), m, x)[1](g))(m, x, g)
    )
    _, do, du, dv = cases.step(cases.fused)(o, u, v, tables, g)
    assert_trees_bitwise_equal(do, jax.jit(lambda dx: rope.rotate_transposed(dx, tables, inverse=True))(dx))
    assert_trees_bitwise_equal(dv, jax.jit(lambda dm: jnp.einsum("hk,kr->hr", dm, u))(dm))
    assert_trees_bitwise_equal(du, jax.jit(lambda dm: jnp.einsum("hk,hr->kr", dm, v))(dm))
    f32 = lambda a: a.astype(jnp.float32)  # noqa: E731
    want = jnp.einsum("thc,tkc->hk", f32(g), f32(x), precision="highest")
    assert jnp.linalg.norm(f32(dm) - want) < 2**-8 * jnp.linalg.norm(want)


@pytest.mark.parametrize("where", ["rotation", "mosaic", "triton"])
def test_a_dropped_rounding_is_caught(monkeypatch, where):
    """Mutation: with a plain cast there and back in place of the pinned rounding, XLA's bits move; so do the kernel's
    without any rounding."""
    o, u, v, tables, _ = cases.Postmix(256, 64, 512, 64).operands()
    m = dsv4.postmix_matrix(u, v)
    right = jitted(cases.fused, "triton")(o, m, tables)
    combine = rope.combine
    drop = (lambda x, dtype: x.astype(dtype).astype(jnp.float32)) if where == "rotation" else (lambda x, dtype: x)
    monkeypatch.setattr(rope, "combine", lambda *args, **_: combine(*args[:5], round_to=drop))
    path, implementation = (cases.unfused, "xla") if where == "rotation" else (cases.fused, where)
    assert count_mismatches(right, jitted(path, implementation)(o, m, tables)) > 0


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("channel", [1, 500], ids=["nope", "rotary"])
def test_no_nan_vanishes_and_none_spreads(channel, implementation, backward):
    o, u, v, tables, g = cases.Postmix(8, 64, 512, 64).operands()
    patterns = jnp.array([0x7FFF, 0xFFFF, 0x7FC0, 0x7F81, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F], jnp.uint16)
    special = jax.lax.bitcast_convert_type(patterns, jnp.bfloat16)
    for operands in [
        (o.at[:, 1, channel].set(special), u, v, tables, g),
        (o, u, v, tables, g.at[:, 1, channel].set(special)),
    ]:
        options = {"implementation": implementation, "backward": backward}
        unfused, fused = (cases.step(path, **options)(*operands) for path in (cases.unfused, cases.fused))
        assert_trees_bitwise_equal(unfused, fused)
        assert_trees_bitwise_equal(cases.step(cases.unfused, implementation="xla")(*operands)[:2], fused[:2])
        result = fused[0] if operands[0] is not o else fused[1]
        assert jnp.isnan(result[:4, :, channel]).all()
        assert not jnp.isfinite(result[4:6, :, channel]).all()
        pair = jnp.array([channel - channel % 2, channel - channel % 2 + 1])
        elsewhere = jnp.delete(result[:6], pair, axis=-1, assume_unique_indices=True)
        assert jnp.isfinite(elsewhere).all()


@pytest.mark.parametrize("implementation", KERNELS)
def test_subnormals_are_numbers(implementation):
    """CPUs flush them under XLA; a GPU does not, in the rotation as in the kernel."""
    o, u, v, tables, g = cases.Postmix(64, 64, 128, 128).operands()
    tiny = (o.astype(jnp.float32) * 2.0**-128).astype(jnp.bfloat16)
    xla, *kernel = (
        cases.step(path, implementation=i)(tiny, u, v, tables, g)
        for path, i in [(cases.unfused, "xla"), (cases.unfused, implementation), (cases.fused, implementation)]
    )
    assert jnp.any(xla[0] != 0)
    assert_trees_bitwise_equal(xla, kernel[0])
    assert_trees_bitwise_equal(xla, kernel[1])


KERNEL_BACKWARDS = pytest.mark.parametrize(
    "options",
    [{"implementation": i, "backward": b} for i in KERNELS for b in BACKWARDS],
    ids=lambda options: "-".join(options.values()),
)


@KERNEL_BACKWARDS
def test_production_shape_transforms(options):
    o, u, v, tables, g = cases.Postmix(PRODUCTION.tokens // 2, 64, 512, 64, lead=(2,)).operands()
    m = dsv4.postmix_matrix(u, v)
    results = []
    for path in (cases.unfused, cases.fused):
        path = functools.partial(path, **options)
        gradient = lambda o, m, g, path=path: jax.vjp(lambda o, m: path(o, m, tables), o, m)[1](g)  # noqa: E731
        scan = lambda o, m, g, gradient=gradient: jax.lax.scan(  # noqa: E731
            lambda c, og: (c, gradient(og[0], m, og[1])), 0, (o, g)
        )[1]
        results.append(
            (
                jax.jit(jax.vmap(gradient, in_axes=(0, None, 0)))(o, m, g),
                jax.jit(scan)(o, m, g),
                jax.jit(path, donate_argnums=0)(o + 0, m, tables),
            )
        )
    assert_trees_bitwise_equal(*results)


@KERNEL_BACKWARDS
def test_production_shape_shard_map(options):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows = jax.sharding.PartitionSpec("d")
    o, u, v, tables, g = PRODUCTION.operands()
    m = dsv4.postmix_matrix(u, v)

    def step(path):
        specs = dict(in_specs=(rows, jax.sharding.PartitionSpec(), rows), out_specs=rows, check_vma=True)
        body = jax.shard_map(functools.partial(path, **options), mesh=mesh, **specs)
        return jax.jit(lambda o, m, g: (body(o, m, tables), jax.vjp(lambda o, m: body(o, m, tables), o, m)[1](g)))

    assert_trees_bitwise_equal(step(cases.unfused)(o, m, g), step(cases.fused)(o, m, g))
