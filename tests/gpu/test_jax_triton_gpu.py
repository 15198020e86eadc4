"""The kernels in Triton's own language on a GPU: the bits of the Pallas ones, under every transform."""

import dataclasses
import functools
import importlib.util

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program import equations
from remap_oracle import flat_ids, random_ids

import dsv4_fusions as dsv4
from dsv4_fusions.ops import inv_rope_postmix as op
from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index
from dsv4_fusions.testing import assert_trees_bitwise_equal, count_mismatches

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None, reason="jax-triton is not installed: pip install '.[triton]'"
)

NAMES = ("triton", "jax_triton")
FEW = [cases.SMALL[2], cases.SMALL[4], cases.SMALL[6], cases.ODD[1]]
PLAIN = [*cases.SMALL, *cases.ODD, *cases.MEDIUM, cases.LARGE[-1], cases.Postmix(19, 16, 320, 130)]
OTHERS = [("bfloat16", "once"), ("float16", "each_product"), ("float16", "once")]
CASES = PLAIN + [dataclasses.replace(c, dtype=dtype, rounding=r) for c in FEW for dtype, r in OTHERS]
GROUPED = [
    (cases.Postmix(97, 4, 64, 32), 2),
    (cases.Postmix(5, 8, 34, 6, "float16"), 2),
    (cases.Postmix(33, 24, 136, 70, rounding="once"), 3),
    (cases.Postmix(9, 6, 24, 2, "float16", "once", lead=(2, 3)), 6),
    (cases.Postmix(1023, 64, 512, 64), 8),
]
BACKWARDS = pytest.mark.parametrize("backward", op.BACKWARDS)


def assert_same(fn, *operands):
    """fn(implementation) gives the same bits for both, and the same again; returns them."""
    pallas, results = (jax.jit(fn(name))(*operands) for name in NAMES)
    assert_trees_bitwise_equal(pallas, results, names=NAMES)
    assert_trees_bitwise_equal(results, jax.jit(fn("jax_triton"))(*operands), names=("first", "again"))
    return results


@pytest.mark.parametrize(
    "case, backward",
    [(case, "single_pass") for case in CASES]
    + [(case, "dot_general") for case in FEW],  # the latter: the forward's kernel
    ids=str,
)
def test_postmix_equals_pallas(case, backward):
    operands = case.operands()
    results = [
        assert_same(lambda name, path=path: cases.step(path, backward=backward, implementation=name), *operands)
        for path in (cases.unfused, cases.fused)
    ]
    assert_trees_bitwise_equal(*results, names=("unfused", "fused"))
    assert all(jnp.any(x != 0) for x in results[0])


def grouped_step(path, tables, backward, name):
    def run(o, u, v, g):
        out, vjp = jax.vjp(lambda o, u, v: path(o, u, v, tables, backward, name), o, u, v)
        return out, *vjp(g)

    return run


def grouped_unfused(o, u, v, tables, backward, name):
    return op.grouped_postmix(dsv4.rotate(o, tables, inverse=True), u, v, backward, name)


@BACKWARDS
@pytest.mark.parametrize("case, groups", GROUPED, ids=str)
def test_grouped_postmix_equals_pallas(case, groups, backward):
    o, u, v, tables, g = case.operands()
    u, v = (x.reshape(groups, case.heads // groups, -1) for x in (u, v))
    unfused, fused = (
        assert_same(functools.partial(grouped_step, path, tables, backward), o, u, v, g)
        for path in (grouped_unfused, op.inv_rope_grouped_postmix)
    )
    assert_trees_bitwise_equal(unfused, fused, names=("unfused", "fused"))


@BACKWARDS
@pytest.mark.parametrize("case", [cases.SMALL[4], cases.ODD[1]], ids=str)
def test_frozen_operands(case, backward):
    o, u, v, tables, g = case.operands()
    m = dsv4.postmix_matrix(u, v)
    path = functools.partial(op.inv_rope_vha_postmix, tables=tables, backward=backward, implementation="jax_triton")
    do, dm = jax.jit(lambda o, m, g: jax.vjp(path, o, m)[1](g))(o, m, g)
    (only_do,) = jax.jit(lambda o, m, g: jax.vjp(lambda o: path(o, m), o)[1](g))(o, m, g)
    (only_dm,) = jax.jit(lambda o, m, g: jax.vjp(lambda m: path(o, m), m)[1](g))(o, m, g)
    assert_trees_bitwise_equal((do, dm), (only_do, only_dm), names=("both", "one frozen"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_infinity_and_the_largest_numbers(dtype):
    case = cases.Postmix(8, 16, 64, 32, dtype)
    o, u, v, tables, g = case.operands()
    special = jnp.array(
        [jnp.nan, -jnp.nan, jnp.inf, -jnp.inf, *[s * float(jnp.finfo(dtype).max) for s in (1, -1)], 0, 1]
    )
    special = special.astype(dtype)
    for channel in (1, 33):
        for operands in [(o.at[:, 1, channel].set(special), g), (o, g.at[:, 1, channel].set(special))]:
            results = assert_same(
                lambda name: cases.step(cases.fused, backward="single_pass", implementation=name),
                *(operands[0], u, v, tables, operands[1]),
            )
            assert jnp.isnan(results[0 if operands[0] is not o else 1][:2, :, channel]).all()


@pytest.mark.parametrize("rounding", ["each_product", "once"])
def test_signs_of_zeros_are_those_of_xla(rounding):
    """Tiny float16 products are rounded to zeros, and the sines of position 0 are zeros: signs decide those of sums."""
    o, u, v, _, g = cases.Postmix(64, 16, 64, 64, "float16", rounding).operands()
    tables = dsv4.rope_tables(jnp.arange(64) // 2, 64, rounding=rounding, dtype="float16")
    o, g = ((x.astype(jnp.float32) * 2.0**-23).astype(jnp.float16) for x in (o, g))
    step = functools.partial(cases.step, cases.fused, backward="single_pass")
    xla, results = (step(implementation=name)(o, u, v, tables, g)[:2] for name in ("xla", "jax_triton"))
    assert jnp.any((xla[1] == 0) & jnp.signbit(xla[1]))
    assert_trees_bitwise_equal(xla, results, names=("xla", "jax_triton"))


def test_more_than_2_31_elements():
    case = cases.Postmix(2**16 + 3, 64, 512, 64)
    o, u, v, tables, g = case.operands()
    assert o.size > 2**31

    # Operands, not constants of the program: XLA cannot hold constants of more than 2 GiB.
    @functools.partial(jax.jit, static_argnums=0)
    def step(name, o, m, tables, g):
        out, vjp = jax.vjp(lambda o, m: cases.fused(o, m, tables, backward="single_pass", implementation=name), o, m)
        return out, *vjp(g)

    pallas, results = (step(name, o, dsv4.postmix_matrix(u, v), tables, g) for name in NAMES)
    assert [count_mismatches(a, b) for a, b in zip(pallas, results, strict=True)] == [0, 0, 0]


# --- transforms ---


def postmix_transforms(backward, tables, name):
    """Gradients of the fused op under transforms, each of (o [3, tokens, heads, head_dim], m, g)."""
    path = functools.partial(op.inv_rope_vha_postmix, tables=tables, backward=backward, implementation=name)

    def step(o, m, g):
        out, vjp = jax.vjp(path, o, m)
        return out, *vjp(g)

    def rematerialized(o, m, g):
        return jax.vjp(jax.checkpoint(path), o, m)[1](g)

    many = lambda m: jnp.stack([m, 2 * m, -m])  # noqa: E731
    return {
        "one": step,
        "vmap": lambda o, m, g: jax.vmap(step, (0, None, 0))(o, m, g),
        "vmap over the weights too": lambda o, m, g: jax.vmap(step)(o, many(m), g),
        "vmap over the weights alone": lambda o, m, g: jax.vmap(step, (None, 0, None))(o, many(m), g),
        "vmap twice": lambda o, m, g: jax.vmap(jax.vmap(step, (0, None, 0)), (1, 0, 1))(
            jnp.stack([o] * 3, 1), many(m), jnp.stack([g] * 3, 1)
        ),
        "scan": lambda o, m, g: jax.lax.scan(lambda c, og: (c, step(og[0], m, og[1])), 0, (o, g))[1],
        "checkpoint": rematerialized,
    }


@BACKWARDS
def test_postmix_transforms(backward):
    o, u, v, tables, g = cases.Postmix(21, 16, 64, 32, lead=(3,)).operands()
    m = dsv4.postmix_matrix(u, v)
    results = [
        {key: jax.jit(fn)(o, m, g) for key, fn in postmix_transforms(backward, tables, name).items()} for name in NAMES
    ]
    assert_trees_bitwise_equal(*results, names=NAMES)
    of = results[1]
    assert_trees_bitwise_equal(of["one"][1:], of["checkpoint"], names=("one", "rematerialized"))
    # XLA's products, which "dot_general" takes the gradients from, may sum in another order when they are mapped.
    ours = slice(3 if backward == "single_pass" else 1)
    assert_trees_bitwise_equal(of["vmap"][ours], of["scan"][ours], names=("vmap", "scan"))
    assert_trees_bitwise_equal(of["one"][ours][:2], of["vmap"][ours][:2], names=("batch axis", "vmap"))
    eager = postmix_transforms(backward, tables, "jax_triton")["one"](o, m, g)
    assert_trees_bitwise_equal(of["one"][ours], eager[ours], names=("jit", "no jit"))


@BACKWARDS
def test_grouped_postmix_vmap(backward):
    o, u, v, tables, g = cases.Postmix(21, 16, 64, 32, lead=(3,)).operands()
    u, v = (jnp.stack([s * x.reshape(2, 8, -1) for s in (1, 2, -1)]) for x in (u, v))
    step = functools.partial(grouped_step, op.inv_rope_grouped_postmix, tables, backward)
    shared = assert_same(lambda name: jax.vmap(step(name), (0, None, None, 0)), o, u[1], v[1], g)
    own = assert_same(lambda name: jax.vmap(step(name)), o, u, v, g)
    ours = slice(4 if backward == "single_pass" else 1)
    assert_trees_bitwise_equal(*([x[1] for x in results[ours]] for results in (shared, own)), names=("shared", "own"))


@BACKWARDS
def test_shard_map(backward):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    rows, replicated = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    o, u, v, tables, g = cases.Postmix(97, 32, 96, 32).operands()
    m = dsv4.postmix_matrix(u, v)

    def step(name):
        path = functools.partial(cases.fused, backward=backward, implementation=name)
        specs = dict(in_specs=(rows, replicated, rows), out_specs=rows, check_vma=True)
        body = jax.shard_map(path, mesh=mesh, **specs)
        return lambda o, m, g: (body(o, m, tables), jax.vjp(lambda o, m: body(o, m, tables), o, m)[1](g))

    out, (do, dm) = assert_same(step, o, m, g)
    path = functools.partial(op.inv_rope_vha_postmix, tables=tables, backward=backward, implementation="jax_triton")
    assert_trees_bitwise_equal((do, dm), jax.jit(lambda o, m, g: jax.vjp(path, o, m)[1](g))(o, m, g))
    ids = jnp.asarray(random_ids((4, 5, 97), 64))
    remap = lambda x: local_to_flat_kv_index(x, 64, "jax_triton")  # noqa: E731
    sharded = jax.jit(jax.shard_map(remap, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=True))
    np.testing.assert_array_equal(sharded(ids), flat_ids(np.asarray(ids), 64))


def test_the_kernels_are_what_runs():
    o, u, v, tables, g = cases.SMALL[4].operands()
    step = cases.step(cases.fused, backward="single_pass", implementation="jax_triton")
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(o, u, v, tables, g))]
    assert names.count("triton_kernel_call") == 2 and "pallas_call" not in names
    assert step.lower(o, u, v, tables, g).compile().as_text().count('custom_call_target="triton_kernel_call"') == 2


# --- the index remap ---


def remap(kv_len, name="jax_triton"):
    return jax.jit(functools.partial(local_to_flat_kv_index, kv_len=kv_len, implementation=name))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("kv_len", [7, 2**30, 2**31 - 1, 2**31, 2**32 + 5, 10**30 + 7])
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 4, 6), (4, 97, 11), (2, 2, 1024), (33, 2, 1025), (1, 7, 5)], ids=str)
def test_remap(shape, kv_len, dtype):
    ids = random_ids(shape, kv_len, dtype=dtype)
    if dtype is np.int64:
        ids[0, 0, 0], ids[-1, -1, -1] = 2**40 + 1, -(2**33) - 5
    with jax.enable_x64(dtype is np.int64):
        np.testing.assert_array_equal(remap(kv_len)(ids), flat_ids(ids, kv_len))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_remap_production_table(dtype):
    ids = random_ids((4, 16384, 640), 66048, dtype=dtype)
    with jax.enable_x64(dtype is np.int64):
        ids = jnp.asarray(ids)
        assert count_mismatches(remap(66048)(ids), remap(66048, "triton")(ids)) == 0


def test_remap_vmap_and_scan():
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 64, (70_000, 3, 2, 5), np.int32))
    one = functools.partial(local_to_flat_kv_index, kv_len=64)
    want = jax.jit(jax.vmap(functools.partial(one, implementation="xla")))(ids)
    kernel = functools.partial(one, implementation="jax_triton")
    assert_trees_bitwise_equal(want, jax.jit(jax.vmap(kernel))(ids))
    few = ids[:6]
    assert_trees_bitwise_equal(want[:6], jax.jit(lambda x: jax.lax.scan(lambda c, x: (c, kernel(x)), 0, x)[1])(few))
    twice = jax.jit(jax.vmap(jax.vmap(kernel, -1, -1), 1, 1))(
        jnp.moveaxis(few.reshape(2, 3, 3, 2, 5), 0, -1).swapaxes(0, 1)
    )
    assert_trees_bitwise_equal(want[:6].reshape(2, 3, 6, 5), jnp.moveaxis(twice.swapaxes(0, 1), -1, 0))


def test_remap_of_more_than_2_31_elements():
    batch, tokens, topk, kv_len = 3, 46337, 15467, 2**31 - 1
    assert batch * tokens * topk > 2**31
    ids = jax.jit(
        lambda: jax.random.randint(jax.random.key(0), (batch, tokens, topk), -(2**20), 2**31 - 1, jnp.int32)
    )()
    assert count_mismatches(remap(kv_len)(ids), remap(kv_len, "xla")(ids)) == 0
