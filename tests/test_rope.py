"""Tables and rotation: frequencies, positions, both rounding modes, inverse, transpose, what stays untouched."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from program import primitives

import dsv4_fusions as dsv4
from dsv4_fusions import numerics, rope

DTYPES = ["bfloat16", "float16", "float32"]


def numpy_rotation(x, cos, sin, inverse, transposed=False):
    """Op-by-op arithmetic in x's own dtype; x [tokens, heads, head_dim], tables [tokens, rope_dim]."""
    rope_dim = cos.shape[-1]
    nope, half = x.shape[-1] - rope_dim, rope_dim // 2
    y = x.copy()
    sin = -sin if inverse else sin
    for k in range(half):
        x1, x2 = x[..., nope + 2 * k], x[..., nope + 2 * k + 1]
        cl, cr, sl, sr = (t[:, None] for t in (cos[:, k], cos[:, half + k], sin[:, k], sin[:, half + k]))
        if transposed:
            y[..., nope + 2 * k], y[..., nope + 2 * k + 1] = x1 * cl + x2 * sr, x2 * cr - x1 * sl
        else:
            y[..., nope + 2 * k], y[..., nope + 2 * k + 1] = x1 * cl - x2 * sl, x2 * cr + x1 * sr
    return y


def random_problem(dtype, tokens=33, heads=3, head_dim=20, rope_dim=12, seed=0):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    x = rng.standard_normal((tokens, heads, head_dim)).astype(dtype)
    x[0, 0, -4:] = [0.0, -0.0, 0.0, -0.0]
    x[1] = -0.0  # a sum of two negative zeros is one
    return x, *(rng.standard_normal((tokens, rope_dim)).astype(dtype) for _ in range(2))


def assert_same_bits(a, b):
    np.testing.assert_array_equal(numerics.bits(np.asarray(a)), numerics.bits(np.asarray(b)))


@pytest.mark.smoke
@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_product_is_op_by_op_arithmetic_forward_and_backward(dtype, inverse, mirrored):
    x, cos, sin = random_problem(dtype)
    if mirrored:
        cos[:, 6:], sin[:, 6:] = cos[:, :6], sin[:, :6]
    tables = dsv4.RopeTables(jnp.asarray(cos), jnp.asarray(sin))
    out, vjp = jax.jit(lambda x: jax.vjp(lambda x: dsv4.rotate(x, tables, inverse), x))(jnp.asarray(x))
    assert_same_bits(out, numpy_rotation(x, cos, sin, inverse))
    g = random_problem(dtype, seed=1)[0]
    (dx,) = jax.jit(vjp)(jnp.asarray(g))
    assert_same_bits(dx, numpy_rotation(g, cos, sin, inverse, transposed=True))
    if mirrored:  # then the transpose is the rotation the other way
        assert_same_bits(dx, jax.jit(lambda g: dsv4.rotate(g, tables, not inverse))(jnp.asarray(g)))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype, bits", [("bfloat16", 16), ("float16", 13)])
def test_once_rounds_an_exact_product_sum_a_single_time(dtype, bits, inverse):
    x, cos, sin = random_problem("float32")
    x = x.astype(dtype)
    tables = dsv4.RopeTables(jnp.asarray(cos), jnp.asarray(sin), "once")
    cos, sin = (np.asarray(numerics.round_significand(jnp.asarray(t), bits)) for t in (cos, sin))
    # Products are exact in f32 (and f64); their sum is rounded to f32 first, as in f32 arithmetic.
    want = numpy_rotation(x.astype(np.float64), cos.astype(np.float64), sin.astype(np.float64), inverse)
    got = jax.jit(lambda x: dsv4.rotate(x, tables, inverse))(jnp.asarray(x))
    assert_same_bits(got, want.astype(np.float32).astype(dtype))
    each = jax.jit(lambda x: dsv4.rotate(x, dsv4.RopeTables(tables.cos, tables.sin), inverse))(jnp.asarray(x))
    assert np.mean(np.asarray(each) != np.asarray(got)) > 0.05  # the two modes are not the same thing


def test_f32_uses_full_tables_in_both_modes():
    x, cos, sin = random_problem("float32")
    for rounding in rope.ROUNDINGS:
        tables = dsv4.RopeTables(jnp.asarray(cos), jnp.asarray(sin), rounding)
        assert_same_bits(jax.jit(dsv4.rotate)(jnp.asarray(x), tables), numpy_rotation(x, cos, sin, False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nope_and_its_gradient_pass_bit_for_bit(dtype):
    x, cos, sin = random_problem(dtype, tokens=5, heads=2, head_dim=512, rope_dim=64)
    x[0, 0, :4] = [np.nan, np.inf, -np.inf, -0.0]
    tables = dsv4.RopeTables(jnp.asarray(cos), jnp.asarray(sin))
    out, vjp = jax.vjp(lambda x: dsv4.rotate(x, tables), jnp.asarray(x))
    assert_same_bits(out[..., :448], x[..., :448])
    assert_same_bits(vjp(jnp.asarray(x))[0][..., :448], x[..., :448])


def test_interleaved_pairs_at_position_1_against_a_loop():
    # lattice#392: x = arange(64) tells the interleaved layout from the half layout.
    x = np.arange(64, dtype=np.float32)
    tables = dsv4.rope_tables(jnp.array([1]), 64, dtype=jnp.float32)
    want = np.empty(64)
    for k in range(32):
        angle = 10000.0 ** (-2 * k / 64)
        want[2 * k] = x[2 * k] * np.cos(angle) - x[2 * k + 1] * np.sin(angle)
        want[2 * k + 1] = x[2 * k + 1] * np.cos(angle) + x[2 * k] * np.sin(angle)
    got = dsv4.rotate(jnp.asarray(x)[None, None], tables)
    np.testing.assert_allclose(np.asarray(got)[0, 0], want, rtol=1e-5, atol=1e-5)


def test_a_single_head_is_rotated():
    # Liger-Kernel#342
    x = jnp.ones((1, 3, 1, 4))
    got = np.asarray(dsv4.rotate(x, dsv4.rope_tables(jnp.arange(3), 4, dtype=jnp.float32)))
    assert (got[0, 0] == 1).all() and (got[0, 1:] != 1).all()


def test_gradient_against_finite_differences():
    # flash-attention#569: the backward must rotate the other way.
    x, cos, sin = random_problem("float32", tokens=2, heads=2, head_dim=6, rope_dim=4)
    w = random_problem("float32", tokens=2, heads=2, head_dim=6, rope_dim=4, seed=1)[0].astype(np.float64)
    tables = dsv4.RopeTables(jnp.asarray(cos), jnp.asarray(sin))
    loss = lambda x: float((numpy_rotation(x, cos.astype(np.float64), sin.astype(np.float64), True) * w).sum())  # noqa: E731
    want = np.empty_like(x, dtype=np.float64)
    for i in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[i] = 1e-3
        want[i] = (loss(x + step) - loss(x - step)) / 2e-3
    got = jax.grad(lambda x: (dsv4.rotate(x, tables, inverse=True) * w.astype(np.float32)).sum())(jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-4, atol=1e-5)


def test_rope_dim_6_leaves_its_neighbours():
    # sglang#35096
    x = jnp.full((2, 8, 16), 7.0, jnp.bfloat16)
    got = dsv4.rotate(x, dsv4.rope_tables(jnp.arange(5, 7), 6))
    assert (got[..., :10] == 7).all() and (got[..., 10:] != 7).any()


def test_positions_per_batch_entry_with_offset_and_negative():
    # Liger-Kernel#477, flash-linear-attention#967
    positions = jnp.array([[0, 1, 2], [7, 8, 9], [-2, -1, 0]])
    tables = dsv4.rope_tables(positions, 8, dtype=jnp.float32)
    assert tables.cos.shape == (3, 3, 8)
    angles = np.asarray(positions)[..., None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(np.asarray(tables.cos), np.cos(np.tile(angles, 2)), atol=1e-6)
    np.testing.assert_allclose(np.asarray(tables.sin), np.sin(np.tile(angles, 2)), atol=1e-6)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3, 2, 8)), jnp.float32)
    got = dsv4.rotate(x, tables)
    for b in range(3):
        alone = dsv4.rotate(x[b], dsv4.rope_tables(positions[b], 8, dtype=jnp.float32))
        assert_same_bits(got[b], alone)


def test_tables_broadcast_over_the_batch():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 3, 8)), jnp.bfloat16)
    tables = dsv4.rope_tables(jnp.arange(5), 8)
    tiled = jax.tree.map(lambda t: jnp.tile(t[None], (2, 1, 1)), tables)
    one = jax.tree.map(lambda t: t[None], tables)
    assert_same_bits(dsv4.rotate(x, tables), dsv4.rotate(x, tiled))
    assert_same_bits(dsv4.rotate(x, one), dsv4.rotate(x, tiled))


def test_inverse_undoes_the_rotation():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 2, 16)), jnp.float32)
    tables = dsv4.rope_tables(jnp.arange(9) + 1000, 8, dtype=jnp.float32)
    np.testing.assert_allclose(dsv4.rotate(dsv4.rotate(x, tables), tables, inverse=True), x, atol=1e-6)


def test_angle_error_at_a_long_position_is_the_documented_one():
    # TransformerEngine#1245: f32 angles lose t * 2**-24 radians, bf16 tables round the values and not the angles.
    position = 131071
    tables = dsv4.rope_tables(jnp.array([position]), 64, dtype=jnp.float32)
    exact = position * 10000.0 ** (-np.arange(0, 64, 2) / 64)
    error = np.abs(np.asarray(tables.cos)[0, :32] - np.cos(exact)).max()
    assert 0 < error < 2 * position * 2.0**-24
    low = dsv4.rope_tables(jnp.array([position]), 64)
    assert_same_bits(low.cos, np.asarray(tables.cos).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    "base, length, low, high",
    [(160000, 65536, 15, 25), (40000, 4096, 9, 20), (10000, 4096, 10, 23), (160000, 4096, 8, 18)],
)
def test_yarn_correction_range(base, length, low, high):
    yarn = {"original_max_position_embeddings": length}
    assert rope.yarn_correction_range(64, base, yarn) == (low, high)


def test_yarn_frequencies_ramp_from_extrapolation_to_interpolation():
    plain = rope.inverse_frequencies(64, 160000.0)
    yarn = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    got = rope.inverse_frequencies(64, 160000.0, yarn)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got[:16], plain[:16])
    np.testing.assert_allclose(got[25:], plain[25:] / 16, rtol=1e-6)
    share = (np.arange(16, 25) - 15) / 10
    np.testing.assert_allclose(got[16:25], plain[16:25] * (1 - share) + plain[16:25] / 16 * share, rtol=1e-5)
    assert (rope.inverse_frequencies(64, 160000.0, {}) != plain).any()  # the defaults: factor 40, length 4096


def test_yarn_with_an_empty_ramp_has_finite_frequencies():
    yarn = {"original_max_position_embeddings": 8, "beta_fast": 1.2, "beta_slow": 1.2}
    got = rope.inverse_frequencies(8, 1e30, yarn)
    assert np.isfinite(got).all()


def test_a_base_written_as_text_is_a_number():
    np.testing.assert_array_equal(rope.inverse_frequencies(8, "160000.0"), rope.inverse_frequencies(8, 160000.0))


def test_table_dtypes():
    # Liger-Kernel#1313: frequencies stay f32 whatever the tables' dtype, so a bf16 table is the rounded f32 table.
    exact = dsv4.rope_tables(jnp.arange(300), 16, dtype=jnp.float32)
    for dtype in ("bfloat16", "float16"):
        tables = dsv4.rope_tables(jnp.arange(300), 16, dtype=dtype)
        assert tables.cos.dtype == dtype and tables.rounding == "each_product"
        assert_same_bits(tables.sin, np.asarray(exact.sin).astype(dtype))
        assert dsv4.rope_tables(jnp.arange(300), 16, dtype=dtype, rounding="once").cos.dtype == jnp.float32
    half = np.asarray(dsv4.rope_tables(jnp.arange(3), 16).cos)
    np.testing.assert_array_equal(half[:, :8], half[:, 8:])


def test_tables_of_another_dtype_are_rounded_to_x():
    x, cos, sin = random_problem("float32")
    x = jnp.asarray(x, jnp.bfloat16)
    wide = dsv4.RopeTables(jnp.asarray(cos), jnp.asarray(sin))
    narrow = jax.tree.map(lambda t: t.astype(jnp.bfloat16), wide)
    assert_same_bits(jax.jit(dsv4.rotate)(x, wide), jax.jit(dsv4.rotate)(x, narrow))


@pytest.mark.parametrize("where", ["nope", "rotary"])
@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001])
def test_no_nan_vanishes(pattern, where):
    x = np.ones((2, 1, 8), np.float32)
    x[0, 0, 0 if where == "nope" else 5] = np.array(pattern, np.uint32).view(np.float32)
    x = (x.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    nan_in = np.isnan(x.astype(np.float32))
    got = np.isnan(np.asarray(dsv4.rotate(jnp.asarray(x), dsv4.rope_tables(jnp.arange(2), 4)), np.float32))
    assert got[nan_in].all()


def test_roundings_are_pinned_in_the_jaxpr():
    x, tables = jnp.ones((2, 1, 8), jnp.bfloat16), dsv4.rope_tables(jnp.arange(2), 4)
    names = primitives(lambda x: dsv4.rotate(x, tables), x)
    assert names.count("reduce_precision") == 3  # two products and their sum
    once = dsv4.RopeTables(tables.cos.astype(jnp.float32), tables.sin.astype(jnp.float32), "once")
    assert primitives(lambda x: dsv4.rotate(x, once), x).count("reduce_precision") == 1
    f32 = dsv4.rope_tables(jnp.arange(2), 4, dtype=jnp.float32)
    assert primitives(lambda x: dsv4.rotate(x, f32), x.astype(jnp.float32)).count("optimization_barrier") == 1


def test_no_gradient_to_the_tables_and_no_forward_mode():
    x, tables = jnp.ones((2, 1, 8)), dsv4.rope_tables(jnp.arange(2), 4, dtype=jnp.float32)
    grads = jax.grad(lambda t: dsv4.rotate(x, t).sum())(tables)
    assert not any(np.asarray(g).any() for g in jax.tree.leaves(grads))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: dsv4.rotate(x, tables), (x,), (x,))


def test_tables_and_positions_are_traced_under_jit_scan_and_vmap():
    # jax#20889
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3, 2, 8)), jnp.bfloat16)
    positions = jnp.arange(12).reshape(4, 3)
    rotated = jax.jit(lambda x, p: dsv4.rotate(x, dsv4.rope_tables(p, 4)))
    want = rotated(x, positions)
    assert_same_bits(jax.jit(jax.vmap(rotated))(x, positions), want)
    assert_same_bits(jax.lax.scan(lambda c, xp: (c, rotated(*xp)), 0, (x, positions))[1], want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_producer_in_the_same_program_changes_nothing(dtype):
    # XLA on a CPU once ran the rotation inside an update in place of the array that a loop had just made.
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 4, 12)), dtype)
    tables = dsv4.rope_tables(jnp.arange(16), 6, dtype=dtype)
    made = lambda x: jax.lax.map(lambda e: e * 2, x[None])  # noqa: E731
    for rotated in (dsv4.rotate, lambda x, t: jax.vjp(lambda x: dsv4.rotate(x, t), x)[1](x)[0]):
        alone = jnp.stack([jax.jit(rotated)(made(e), tables) for e in x])
        assert_same_bits(jax.jit(jax.vmap(lambda x, f=rotated: f(made(x), tables)))(x), alone)


def test_zero_tokens():
    assert dsv4.rotate(jnp.ones((0, 2, 8)), dsv4.rope_tables(jnp.arange(0), 4)).shape == (0, 2, 8)


X = jnp.ones((2, 5, 3, 8), jnp.bfloat16)


def tables_of(*shape, sin=None, dtype=jnp.bfloat16):
    return dsv4.RopeTables(jnp.ones(shape, dtype), jnp.ones(sin or shape, dtype))


@pytest.mark.parametrize(
    "x, tables, error, message",
    [
        (X[0, 0], tables_of(5, 4), ValueError, r"x: got shape \(3, 8\), wanted \[..., tokens, heads, head_dim\]"),
        (X, tables_of(5, 10), ValueError, "rope_dim 10, wanted at most x's head_dim 8"),
        (X, tables_of(5, 5), ValueError, "rope_dim 5, wanted an even number"),
        (X, tables_of(4, 4), ValueError, r"tables: got shape \(4, 4\), wanted \[..., 5, rope_dim\]"),
        (X, tables_of(3, 5, 4), ValueError, r"leading axes that broadcast to \(2,\)"),
        (X, tables_of(1, 2, 5, 4), ValueError, r"leading axes that broadcast to \(2,\)"),
        (X, tables_of(5, 4, sin=(5, 2)), ValueError, r"cos \(5, 4\) and sin \(5, 2\), wanted equal shapes"),
        (X, tables_of(4), ValueError, r"tables: got shape \(4,\)"),
        (X, tables_of(5, 4, dtype=jnp.int32), TypeError, "tables.cos: got dtype int32"),
        (X.astype(jnp.int32), tables_of(5, 4), TypeError, "x: got dtype int32"),
        (X, (X, X), TypeError, "tables: got tuple, wanted RopeTables"),
        ([[[1.0]]], tables_of(5, 4), TypeError, "x: got list, wanted an array"),
        (X, dsv4.RopeTables(X[0, :, 0, :4], X[0, :, 0, :4], "twice"), ValueError, "tables.rounding: got 'twice'"),
    ],
)
def test_rotate_names_what_does_not_fit(x, tables, error, message):
    with pytest.raises(error, match=message):
        dsv4.rotate(x, tables)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(rope_dim=7), ValueError, "rope_dim: got 7"),
        (dict(rope_dim=-2), ValueError, "rope_dim: got -2"),
        (dict(rope_dim=8, base=1.0), ValueError, "base: got 1.0"),
        (dict(rope_dim=8, yarn={"faktor": 2}), ValueError, "yarn: got unknown faktor"),
        (dict(rope_dim=8, base=float("inf")), ValueError, "base: got inf"),
        (dict(rope_dim=8, yarn={"factor": 0}), ValueError, r"yarn\['factor'\]: got 0, wanted a finite number above 0"),
        (dict(rope_dim=8, yarn={"beta_slow": 0}), ValueError, r"yarn\['beta_slow'\]: got 0"),
        (dict(rope_dim=8, yarn={"beta_fast": 1, "beta_slow": 2}), ValueError, "beta_fast 1 below beta_slow 2"),
        (dict(rope_dim=8, yarn=[1]), TypeError, "yarn: got list, wanted a mapping"),
        (dict(rope_dim=8, rounding="never"), ValueError, "rounding: got 'never'"),
        (dict(rope_dim=8, dtype=jnp.int8), TypeError, "dtype: got dtype int8"),
    ],
)
def test_rope_tables_names_what_does_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        dsv4.rope_tables(jnp.arange(3), **arguments)


def test_positions_must_be_integers_of_rank_one_or_more():
    with pytest.raises(TypeError, match="positions: got dtype float32"):
        dsv4.rope_tables(jnp.ones(3), 8)
    with pytest.raises(ValueError, match="positions: got a scalar"):
        dsv4.rope_tables(jnp.int32(3), 8)


def test_one_row_for_every_shard_of_the_tables(mesh4):
    """In `shard_map`, x replicated and the tables not: its gradient is the sum over the shards."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 8))
    tables, rows = dsv4.rope_tables(jnp.arange(8), 4, dtype=jnp.float32), jax.sharding.PartitionSpec("data")

    def gradient(x, tables):
        return jax.grad(lambda x: jax.lax.psum(jnp.sum(dsv4.rotate(x, tables) ** 3), "data"))(x)

    everywhere = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(gradient, mesh=mesh4, in_specs=(everywhere, rows), out_specs=everywhere)
    got = jax.jit(sharded)(x, tables)
    whole = lambda x: jnp.sum(dsv4.rotate(jnp.tile(x, (4, 1, 1)), tables) ** 3)  # noqa: E731
    np.testing.assert_allclose(got, jax.jit(jax.grad(whole))(x), rtol=1e-5)
