"""The postmix on a GPU: every equality at production size, counted on the device."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import PRODUCTION

import dsv4_fusions as dsv4
from dsv4_fusions import rope
from dsv4_fusions.ops.inv_rope_postmix import reference
from dsv4_fusions.testing import assert_trees_bitwise_equal, count_mismatches

IMPLEMENTATIONS = ["triton", "xla"]
WIDE = cases.Postmix(256, 128, 512, 64)
SHAPES = cases.SMALL + cases.MEDIUM + cases.ODD + cases.LARGE


def jitted(path, implementation=None):
    return jax.jit(functools.partial(path, implementation=implementation))


def test_one_row():
    case = cases.Postmix(1, 64, 512, 64)
    o, u, v, tables, _ = case.operands()
    m = dsv4.postmix_matrix(u, v)
    assert_trees_bitwise_equal(jitted(cases.unfused, "xla")(o, m, tables), jitted(cases.fused, "triton")(o, m, tables))


@pytest.mark.parametrize("rounding", ["each_product", "once"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_bitwise(case, dtype, rounding):
    operands = dataclasses.replace(case, dtype=dtype, rounding=rounding).operands()
    unfused = cases.step(cases.unfused)
    results = unfused(*operands)
    assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
    assert_trees_bitwise_equal(results, cases.step(cases.fused)(*operands), names=("unfused", "fused"))


@pytest.mark.parametrize("rounding", ["each_product", "once"])
@pytest.mark.parametrize("case", [case for case in SHAPES if case.heads <= 64] + [WIDE], ids=str)
def test_triton_equals_xla(case, rounding):
    """With more than 64 heads and few tokens XLA picks a matrix product that sums in another order: an implementation
    still equals itself there, fused and unfused (test_bitwise), but the two differ in a few of 10,000 elements."""
    operands = dataclasses.replace(case, rounding=rounding).operands()
    xla = cases.step(cases.unfused, implementation="xla")(*operands)
    assert_trees_bitwise_equal(
        xla, cases.step(cases.fused, implementation="triton")(*operands), names=("xla", "triton")
    )


def test_f32_takes_the_unfused_pair():
    operands = dataclasses.replace(cases.SMALL[0], dtype="float32").operands()
    assert_trees_bitwise_equal(cases.step(cases.unfused)(*operands), cases.step(cases.fused)(*operands))


@pytest.fixture(scope="module")
def production():
    """The operands at production size, and the results of the unfused pair that two runs agree on."""
    operands = PRODUCTION.operands()
    unfused = cases.step(cases.unfused)
    results = unfused(*operands)
    assert_trees_bitwise_equal(results, unfused(*operands), names=("unfused", "again"))
    assert all(jnp.any(x != 0) for x in results)
    return operands, results


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_production_shape_fused_equals_unfused(production, implementation):
    operands, results = production
    # The weight gradient comes from XLA's transpose in both, so even implementations agree in everything.
    assert_trees_bitwise_equal(results, cases.step(cases.fused, implementation=implementation)(*operands))


def test_production_shape_run_equals_run(production):
    operands, results = production
    step = cases.step(cases.fused)
    for _ in range(20):
        assert_trees_bitwise_equal(results, step(*operands))


def test_production_shape_remat_equals_no_remat(production):
    operands, results = production
    rematerialized = lambda o, m, tables, **options: jax.checkpoint(  # noqa: E731
        functools.partial(cases.fused, **options)
    )(o, m, tables)
    assert_trees_bitwise_equal(results, cases.step(rematerialized)(*operands))


def test_production_shape_equals_plain_xla(production):
    """Forward and activation gradient of code as users write it, einsum and batched."""
    (o, u, v, tables, g), (out, do, *_) = production
    m = dsv4.postmix_matrix(u, v)

    def einsum(o):
        return jnp.einsum("hk,tkd->thd", m, dsv4.rotate(o, tables, inverse=True))

    def batched(o):
        many = jnp.broadcast_to(m, (o.shape[0], *m.shape))
        return jnp.einsum("thk,tkd->thd", many, dsv4.rotate(o, tables, inverse=True))

    for form in (einsum, batched):
        plain_out, plain_do = jax.jit(lambda o, g, form=form: (form(o), jax.vjp(form, o)[1](g)[0]))(o, g)
        assert count_mismatches(out, plain_out) == 0
        assert count_mismatches(do, plain_do) == 0


def test_production_shape_frozen_m(production):
    (o, u, v, tables, g), (_, do, *_) = production
    m = dsv4.postmix_matrix(u, v)
    frozen = jax.jit(lambda o, g: jax.vjp(lambda o: cases.fused(o, m, tables), o)[1](g)[0])(o, g)
    assert count_mismatches(do, frozen) == 0


@pytest.mark.parametrize("case", cases.SPLIT, ids=str)
def test_splitting_the_channels_changes_no_bit(case):
    whole, nope, view, copy = cases.splits(case)
    assert count_mismatches(whole[..., : nope.shape[-1]], nope) == 0
    assert count_mismatches(whole[..., nope.shape[-1] :], view) == 0
    assert count_mismatches(view, copy) == 0


def test_gradients_are_the_formulas():
    o, u, v, tables, g = cases.Postmix(2048, 64, 512, 64).operands()
    m = dsv4.postmix_matrix(u, v)
    x = jax.jit(lambda o: dsv4.rotate(o, tables, inverse=True))(o)
    dm, dx = jax.jit(reference.mix_transpose)(m, x, g)
    assert_trees_bitwise_equal((dm, dx), jax.jit(lambda m, x, g: jax.vjp(reference.mix, m, x)[1](g))(m, x, g))
    _, do, du, dv = cases.step(cases.fused)(o, u, v, tables, g)
    assert_trees_bitwise_equal(do, jax.jit(lambda dx: rope.rotate_transposed(dx, tables, inverse=True))(dx))
    assert_trees_bitwise_equal(dv, jax.jit(lambda dm: jnp.einsum("hk,kr->hr", dm, u))(dm))
    assert_trees_bitwise_equal(du, jax.jit(lambda dm: jnp.einsum("hk,hr->kr", dm, v))(dm))
    f32 = lambda a: a.astype(jnp.float32)  # noqa: E731
    want = jnp.einsum("thc,tkc->hk", f32(g), f32(x), precision="highest")
    assert jnp.linalg.norm(f32(dm) - want) < 2**-8 * jnp.linalg.norm(want)


def test_two_processes_agree():
    """With autotuning off, so that XLA's weight gradient takes the same algorithm in both."""
    program = (
        "import cases, hashlib, numpy as np\n"
        "case = cases.Postmix(2048, 64, 512, 64)\n"
        "results = cases.step(cases.fused)(*case.operands())\n"
        "print(hashlib.sha256(b''.join(np.asarray(x).tobytes() for x in results)).hexdigest())\n"
    )
    root = pathlib.Path(__file__).parents[2]
    paths = f"{root}:{root / 'tests'}:{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "PYTHONPATH": paths}
    hashes = [
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert hashes[0].stdout == hashes[1].stdout != ""


def test_production_shape_temporary_memory():
    """The fused forward keeps at least a tensor of o's size less than the pair as users write it."""
    o, m, table = (jax.ShapeDtypeStruct(s, "bfloat16") for s in (PRODUCTION.shape, (64, 64), (PRODUCTION.tokens, 64)))
    tables = dsv4.RopeTables(table, table)
    plain = lambda o, m, tables: jnp.einsum("hk,...tkd->...thd", m, dsv4.rotate(o, tables, inverse=True))  # noqa: E731
    temp = lambda fn: jax.jit(fn).lower(o, m, tables).compile().memory_analysis().temp_size_in_bytes  # noqa: E731
    assert temp(cases.fused) <= temp(plain) - o.size * 2


@pytest.mark.parametrize("where", ["rotation", "kernel"])
def test_a_dropped_rounding_is_caught(monkeypatch, where):
    """Mutation: with a plain cast there and back in place of the pinned rounding, XLA's bits move; so do the kernel's
    without any rounding."""
    o, u, v, tables, _ = cases.Postmix(256, 64, 512, 64).operands()
    m = dsv4.postmix_matrix(u, v)
    right = jitted(cases.fused, "triton")(o, m, tables)
    combine = rope.combine
    drop = {
        "rotation": lambda x, dtype: x.astype(dtype).astype(jnp.float32),
        "kernel": lambda x, dtype: x,
    }[where]
    monkeypatch.setattr(rope, "combine", lambda *args, **_: combine(*args[:5], round_to=drop))
    path, implementation = (cases.unfused, "xla") if where == "rotation" else (cases.fused, "triton")
    assert count_mismatches(right, jitted(path, implementation)(o, m, tables)) > 0


@pytest.mark.parametrize("channel", [1, 500], ids=["nope", "rotary"])
def test_no_nan_vanishes(channel):
    o, u, v, tables, g = cases.Postmix(8, 64, 512, 64).operands()
    patterns = jnp.array([0x7FFF, 0xFFFF, 0x7FC0, 0x7F81, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F], jnp.uint16)
    special = jax.lax.bitcast_convert_type(patterns, jnp.bfloat16)
    for operands in [
        (o.at[:, 1, channel].set(special), u, v, tables, g),
        (o, u, v, tables, g.at[:, 1, channel].set(special)),
    ]:
        unfused, fused = (cases.step(path)(*operands) for path in (cases.unfused, cases.fused))
        assert_trees_bitwise_equal(unfused, fused)
        result = fused[0] if operands[0] is not o else fused[1]
        assert jnp.isnan(result[:4, :, channel]).all()
        assert not jnp.isfinite(result[4:6, :, channel]).all()


def test_subnormals_are_numbers():
    """CPUs flush them under XLA; a GPU does not, in the rotation as in the kernel."""
    case = cases.Postmix(64, 16, 64, 64)
    o, u, v, tables, g = case.operands()
    tiny = (o.astype(jnp.float32) * 2.0**-128).astype(jnp.bfloat16)
    results = [cases.step(path, implementation=i)(tiny, u, v, tables, g) for path, i in [
        (cases.unfused, "xla"), (cases.unfused, "triton"), (cases.fused, "triton")
    ]]  # fmt: skip
    assert jnp.any(results[0][0] != 0)
    assert_trees_bitwise_equal(results[0], results[1])
    assert_trees_bitwise_equal(results[0], results[2])


def test_production_shape_transforms():
    o, u, v, tables, g = cases.Postmix(PRODUCTION.tokens // 2, 64, 512, 64, lead=(2,)).operands()
    m = dsv4.postmix_matrix(u, v)
    results = []
    for path in (cases.unfused, cases.fused):
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


def test_production_shape_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows = jax.sharding.PartitionSpec("d")
    o, u, v, tables, g = PRODUCTION.operands()
    m = dsv4.postmix_matrix(u, v)

    def step(path):
        specs = dict(in_specs=(rows, jax.sharding.PartitionSpec(), rows), out_specs=rows, check_vma=True)
        body = jax.shard_map(path, mesh=mesh, **specs)
        return jax.jit(lambda o, m, g: (body(o, m, tables), jax.vjp(lambda o, m: body(o, m, tables), o, m)[1](g)))

    assert_trees_bitwise_equal(step(cases.unfused)(o, m, g), step(cases.fused)(o, m, g))
