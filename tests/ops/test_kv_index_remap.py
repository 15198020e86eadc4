"""Local to flat KV ids. Every table is checked three ways by `check`: the XLA implementation and the kernel in
interpret mode against NumPy, and the kernel lowered for CUDA, which needs no GPU.

The cases of PaddleFleet PR #1772's test of the same remap, and where each is tested here:

| case there                                   | test here                                                          |
|----------------------------------------------|--------------------------------------------------------------------|
| smallest_possible_launch                     | test_smallest_table, gpu: test_one_row                             |
| ernielite_hca_shape, ernielite_real_shapes   | test_production_width, gpu: test_production_tables (16384 tokens)  |
| shapes_and_dtypes                            | test_shapes_and_dtypes                                             |
| edge_values                                  | test_edge_values                                                   |
| non_contiguous_input, .._and_strided         | test_views_of_a_larger_table                                       |
| large_batch_offset_int32_wraparound          | test_wraparound                                                    |
| allow_alias_matches_when_batch_is_one        | test_one_batch_entry_is_a_reshape                                  |
| alias_shares_storage_only_when_safe          | test_one_batch_entry_is_a_reshape, test_donation                   |
| output_is_fresh_storage_by_default           | test_input_is_untouched, test_donation                             |
| not_differentiable                           | test_not_differentiable, test_inside_a_differentiated_function     |
| dispatcher_matches_eager                     | test_choice_changes_no_value                                       |
| config_field_defaults_off                    | test_config_default_is_off                                         |
| cudnn_sparse_attn_end_to_end, .._unaligned   | test_sparse_attention_end_to_end (rows of topk 128 and 100)        |
| mqa_sparse_attn_end_to_end                   | test_sparse_attention_end_to_end (width 64; d_qk = d_v here)       |
| topk_block_boundaries                        | test_topk_around_powers_of_two                                     |
| batch_and_seq_shapes                         | test_batch_and_token_counts                                        |
| pad_ratios                                   | test_share_of_empty_slots                                          |
| value_boundaries                             | test_edge_values                                                   |
| int32_overflow_matrix                        | test_overflow_matrix, test_overflow_golden_values                  |
| repeatable_across_runs                       | test_repeatable                                                    |
| rejects_wrong_rank                           | test_wrong_arguments                                               |
| degenerate_shapes_skip_the_kernel            | test_empty_axes                                                    |
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from program import gpu_target, lower_for_cuda
from remap_oracle import flat_ids, random_ids

from dsv4_fusions import dispatch
from dsv4_fusions.config import DSv4Config
from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index
from dsv4_fusions.ops.sparse_attention import sparse_attention
from dsv4_fusions.testing import assert_trees_bitwise_equal


def remap(kv_len, implementation):
    return jax.jit(lambda ids: local_to_flat_kv_index(ids, kv_len, implementation))


def holds_kernel(text):
    return re.search(r'custom_call @\S*triton.*name = "local_to_flat_kv_index"', text) is not None


def assert_equal(got, want):
    assert isinstance(got, jax.Array) and got.dtype == jnp.int32 and got.shape == want.shape
    np.testing.assert_array_equal(got, want)


def check(ids, kv_len):
    want = flat_ids(ids, kv_len)
    assert_equal(remap(kv_len, "xla")(ids), want)
    with dispatch.interpret():
        assert_equal(remap(kv_len, "triton")(ids), want)
    text = lower_for_cuda(lambda x: local_to_flat_kv_index(x, kv_len, "triton"), jax.typeof(jnp.asarray(ids)))
    assert holds_kernel(text) == (ids.shape[0] > 1 or jnp.asarray(ids).dtype == jnp.int64)


@pytest.mark.smoke
@pytest.mark.lowering
def test_smallest_table():
    ids = np.array([[[3]]], np.int32)
    got = local_to_flat_kv_index(ids, 8)
    assert got.shape == (1, 1) and got[0, 0] == 3
    check(ids, 8)
    check(np.array([[[3]], [[5]], [[-1]]], np.int32), 8)


@pytest.mark.parametrize("topk", [640, 2176])
def test_production_width(topk):
    check(random_ids((3, 128, topk), 66048), 66048)
    with jax.enable_x64(True):
        check(random_ids((1, 1024, topk), 66048, dtype=np.int64), 66048)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (1, 7, 5), (1, 16, 640), (2, 4, 6), (3, 5, 1), (4, 33, 64), (2, 8, 1025), (5, 3, 2047)],
    ids=str,
)
def test_shapes_and_dtypes(shape, dtype):
    kv_len = 2 * max(shape[-1], 8) + 3
    with jax.enable_x64(dtype is np.int64):
        check(random_ids(shape, kv_len, dtype=dtype), kv_len)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "ids, kv_len",
    [
        (np.full((3, 4, 5), -1), 16),
        (np.zeros((3, 4, 5)), 16),
        ([[[-5, 0, -1, 7], [-2, 3, -9, 0]]], 32),
        ([[[0, 96, -1]], [[-2, 96, 0]], [[-5, -9, -128]], [[96, -128, 0]]], 97),
        ([[[2147480000, -1]], [[2147480000, 2**31 - 1]], [[-(2**31), 2**31 - 1]]], 66048),
    ],
    ids=["all empty", "all zero", "negatives pass", "value boundaries", "extremes"],
)
def test_edge_values(ids, kv_len, dtype):
    ids = np.array(ids, dtype)
    with jax.enable_x64(dtype is np.int64):
        check(ids, kv_len)
        got = np.asarray(local_to_flat_kv_index(ids, kv_len)).reshape(ids.shape)
    np.testing.assert_array_equal(got[ids < 0], ids[ids < 0])


@pytest.mark.parametrize(
    "view",
    [np.s_[:, 4:12, 8:72], np.s_[:, 4:20, 8:200], np.s_[:, ::2, ::2], np.s_[1:, -8:, -65:]],
    ids=["inner", "inner wide", "strided", "tail"],
)
def test_views_of_a_larger_table(view):
    """What surrounds the view holds ids that would show, both where NumPy and where the program takes the view."""
    whole = np.full((4, 32, 256), 777_777, np.int32)
    whole[view] = random_ids(whole[view].shape, 1024)
    check(whole[view], 1024)
    want = flat_ids(np.ascontiguousarray(whole[view]), 1024)
    assert_equal(jax.jit(lambda x: local_to_flat_kv_index(x[view], 1024, "xla"))(whole), want)
    with dispatch.interpret():
        assert_equal(jax.jit(lambda x: local_to_flat_kv_index(x[view], 1024, "triton"))(whole), want)


def test_wraparound():
    ids = np.array([[[0, 5, -1]], [[1, -1, 9]], [[3, 4, 0]]], np.int32)
    check(ids, 2**30)
    assert np.asarray(local_to_flat_kv_index(ids, 2**30))[2, 0] == 3 - 2**31


OVERFLOW_IDS = np.array([[[0, 5, -1, 17]], [[1, -1, 9, 0]], [[3, 4, 0, -7]]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    "kv_len", [2**20, 2**28, 2**30, 2**31 - 1, 2**31, 3 * 10**8, 2**32 - 1, 2**32, 2**32 + 5, 10**30 + 7]
)
def test_overflow_matrix(kv_len, dtype):
    with jax.enable_x64(dtype is np.int64):
        check(OVERFLOW_IDS.astype(dtype), kv_len)


@pytest.mark.parametrize(
    "kv_len, second, third",
    [
        (2**20, [1048577, -1, 1048585, 1048576], [2097155, 2097156, 2097152, -7]),
        (2**30, [1073741825, -1, 1073741833, 1073741824], [-2147483645, -2147483644, -2147483648, -7]),
        (2**31 - 1, [-2147483648, -1, -2147483640, 2147483647], [1, 2, -2, -7]),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_overflow_golden_values(kv_len, second, third, implementation):
    with dispatch.interpret():
        got = local_to_flat_kv_index(OVERFLOW_IDS.astype(np.int32), kv_len, implementation)
    np.testing.assert_array_equal(got, [[0, 5, -1, 17], second, third])


def test_int64_ids_outside_int32():
    """The sign is that of the 64-bit id: 2^31 is a row, and -2^32 an empty slot whose low half is 0."""
    ids = np.array([[[2**31, 2**32 + 3]], [[-(2**32), 2**31]], [[2**40 + 1, -(2**31) - 1]]])
    with jax.enable_x64(True):
        check(ids, 1000)
        got = np.asarray(local_to_flat_kv_index(ids, 1000))
    np.testing.assert_array_equal(got, [[-(2**31), 3], [0, 1000 - 2**31], [2001, 2**31 - 1]])


def test_numpy_int64_without_x64():
    """JAX would wrap such values without a word."""
    edge = np.array([[[2**31 - 1, -(2**31), -1]]] * 3)
    assert edge.dtype == np.int64
    np.testing.assert_array_equal(local_to_flat_kv_index(edge, 7), flat_ids(edge, 7))
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(
            ValueError, match=rf"local_index: got int64 values from .*{value}.* wanted values within int32"
        ):
            local_to_flat_kv_index(np.array([[[0, value]]]), 7)
        with pytest.raises(ValueError, match="local_index: got int64 values"):
            jax.jit(lambda value=value: local_to_flat_kv_index(np.array([[[0, value]]]), 7))()
    # An argument of the caller's jit is wrapped before the op sees it.
    assert_equal(remap(7, "xla")(np.array([[[0, 2**31 + 5]]])), np.array([[0, 5 - 2**31]]))


@pytest.mark.parametrize(
    "topk",
    [1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 511, 512, 513]
    + [640, 1023, 1024, 1025, 1536, 2047, 2048, 3072, 4097],
)
def test_topk_around_powers_of_two(topk):
    check(random_ids((2, 3, topk), 2 * topk + 5, seed=topk), 2 * topk + 5)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64])
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 8, 16, 33])
def test_batch_and_token_counts(batch, tokens):
    check(random_ids((batch, tokens, 96), 512, seed=batch), 512)


@pytest.mark.parametrize("empty", [0, 0.25, 0.5, 0.75, 1])
def test_share_of_empty_slots(empty):
    check(random_ids((4, 16, 130), 1024, empty), 1024)


def test_one_batch_entry_is_a_reshape():
    ids = random_ids((1, 64, 96), 512)
    check(ids, 512)
    for implementation in (None, "xla", "triton"):
        text = lower_for_cuda(
            lambda x, name=implementation: local_to_flat_kv_index(x, 512, name), jax.typeof(jnp.asarray(ids))
        )
        assert re.findall(r"= (?:stablehlo\.)?(\w+)", text.split("func.func")[1]) == ["reshape"]
    compiled = remap(512, "xla").lower(ids).compile().as_text()
    assert not re.search(r" (fusion|add|select)\(", compiled)


def test_input_is_untouched():
    given = random_ids((3, 32, 64), 4096)
    ids = jnp.asarray(given)
    for implementation in ("xla", "triton"):
        with dispatch.interpret():
            got = remap(4096, implementation)(ids)
        assert got.unsafe_buffer_pointer() != ids.unsafe_buffer_pointer()
        np.testing.assert_array_equal(ids, given)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_donation(batch, implementation):
    given = random_ids((batch, 32, 64), 4096)
    ids = jax.device_put(given.copy())
    with dispatch.interpret():
        got = jax.jit(lambda x: local_to_flat_kv_index(x, 4096, implementation), donate_argnums=0)(ids)
    assert_equal(got, flat_ids(given, 4096))
    assert ids.is_deleted()


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_not_differentiable(implementation):
    ids = jnp.asarray(random_ids((3, 4, 8), 32))

    def loss(ids):
        return jnp.sum(local_to_flat_kv_index(ids, 32, implementation) * 1.5)

    with dispatch.interpret():
        gradient = jax.grad(loss, allow_int=True)(ids)
    assert gradient.dtype == jax.dtypes.float0 and gradient.shape == ids.shape


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_inside_a_differentiated_function(implementation):
    """The ids gather rows: the gradient lands on the rows of the right batch entry, under remat as well."""
    ids = random_ids((3, 4, 8), 5)
    kv = jnp.arange(15.0)

    @jax.checkpoint
    def loss(kv):
        flat = local_to_flat_kv_index(ids, 5, implementation)
        return jnp.sum(jnp.where(flat >= 0, kv[flat], 0) ** 2)

    with dispatch.interpret():
        got = jax.jit(jax.grad(loss))(kv)
    flat = flat_ids(ids, 5)
    np.testing.assert_array_equal(got, 2 * np.bincount(flat[flat >= 0], minlength=15) * np.arange(15.0))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmap_and_scan(implementation):
    ids = np.stack([random_ids((3, 5, 300), 64, seed=seed) for seed in range(4)])
    want = np.stack([flat_ids(table, 64) for table in ids])

    def step(carry, table):
        return carry, local_to_flat_kv_index(table, 64, implementation)

    def op(x):
        return local_to_flat_kv_index(x, 64, implementation)

    with dispatch.interpret():
        assert_equal(jax.jit(jax.vmap(op))(ids), want)
        assert_equal(jax.jit(jax.vmap(op, -1, -1))(np.moveaxis(ids, 0, -1)), np.moveaxis(want, 0, -1))
        assert_equal(jax.jit(lambda x: jax.lax.scan(step, 0, x)[1])(ids), want)


def test_vmap_lowers_for_cuda_over_more_programs_than_a_side_axis_holds():
    shape = jax.ShapeDtypeStruct((70_000, 3, 4, 8), jnp.int32)
    text = lower_for_cuda(jax.vmap(lambda x: local_to_flat_kv_index(x, 64, "triton")), shape)
    assert holds_kernel(text)
    sizes = {axis: int(re.search(rf"grid_{axis} = (\d+)", text)[1]) for axis in "xyz"}
    assert np.prod(list(sizes.values())) == 210_000
    assert max(sizes["y"], sizes["z"]) < 2**16


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_shard_map(implementation, mesh4):
    """The offset counts the batch entries of the shard: each device holds the KV of its own."""
    spec = PartitionSpec("data")
    ids = random_ids((12, 5, 97), 512)
    with dispatch.interpret():
        op = jax.shard_map(
            lambda x: local_to_flat_kv_index(x, 512, implementation),
            mesh=mesh4,
            in_specs=spec,
            out_specs=spec,
            # JAX's interpreter of kernels pads with a constant that the check refuses; the next test has it on.
            check_vma=implementation != "triton",
        )
        got = jax.jit(op)(ids)
    assert_equal(got, np.concatenate([flat_ids(shard, 512) for shard in np.split(ids, 4)]))


@pytest.mark.lowering
def test_shard_map_lowers_for_cuda():
    spec = PartitionSpec("d")
    with gpu_target(devices=4):
        mesh = jax.sharding.get_abstract_mesh()
    op = jax.shard_map(
        lambda x: local_to_flat_kv_index(x, 512, "triton"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True
    )
    assert holds_kernel(lower_for_cuda(op, jax.ShapeDtypeStruct((12, 5, 97), jnp.int32), devices=4))


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_repeatable(implementation):
    ids = random_ids((3, 512, 640), 4096)
    want = flat_ids(ids, 4096)
    with dispatch.interpret():
        op = remap(4096, implementation)
        for _ in range(8):
            assert_equal(op(ids), want)


@pytest.mark.parametrize("shape", [(0, 8, 16), (2, 0, 16), (2, 8, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_empty_axes(shape, dtype):
    with jax.enable_x64(dtype is np.int64), dispatch.interpret():
        for implementation in (None, "xla", "triton"):
            got = local_to_flat_kv_index(np.zeros(shape, dtype), 8, implementation)
            assert got.shape == (shape[0] * shape[1], shape[2]) and got.dtype == jnp.int32


def test_choice_changes_no_value():
    ids = random_ids((3, 32, 48), 256)
    want = flat_ids(ids, 256)
    assert_equal(local_to_flat_kv_index(ids, 256), want)
    with dispatch.interpret():
        for implementation in (None, "xla", "triton"):
            assert_equal(local_to_flat_kv_index(ids, 256, implementation), want)


@pytest.mark.parametrize("capability", [None, (7, 5), (8, 0), (9, 0), (10, 3), (12, 0)])
def test_choice_by_capability(faked_target, capability):
    faked_target("gpu" if capability else "cpu", capability)
    ids = jax.ShapeDtypeStruct((3, 4, 5), jnp.int32)
    serves = capability is not None and capability >= (8, 0)
    jaxpr = str(jax.make_jaxpr(lambda x: local_to_flat_kv_index(x, 8))(ids))
    assert ("pallas_call" in jaxpr and "local_to_flat_kv_index" in jaxpr) == serves
    assert "pallas_call" not in str(jax.make_jaxpr(lambda x: local_to_flat_kv_index(x, 8, "xla"))(ids))
    if not serves:
        with pytest.raises(ValueError, match="implementation 'triton' cannot run here: it needs"):
            jax.eval_shape(lambda x: local_to_flat_kv_index(x, 8, "triton"), ids)


@pytest.mark.lowering
def test_kernel_is_in_the_lowered_program_by_default():
    assert holds_kernel(
        lower_for_cuda(lambda x: local_to_flat_kv_index(x, 8), jax.ShapeDtypeStruct((3, 4, 5), jnp.int32))
    )
    assert not holds_kernel(
        lower_for_cuda(lambda x: local_to_flat_kv_index(x, 8, "xla"), jax.ShapeDtypeStruct((3, 4, 5), jnp.int32))
    )


def test_tables_of_more_than_2_31_elements(faked_target):
    """46337 x 46400: the first causal table, padded to 64 columns, that 32-bit element offsets cannot address."""
    large = jax.ShapeDtypeStruct((2, 46337, 46400), jnp.int32)
    assert holds_kernel(lower_for_cuda(lambda x: local_to_flat_kv_index(x, 46337, "triton"), large))
    faked_target("gpu", (9, 0))
    too_large = jax.ShapeDtypeStruct((2, 2**16 + 1, 2**16), jnp.int32)
    assert "pallas_call" not in str(jax.make_jaxpr(lambda x: local_to_flat_kv_index(x, 8))(too_large))
    with pytest.raises(ValueError, match="'triton' cannot run here: it serves up to 2.32 ids"):
        jax.eval_shape(lambda x: local_to_flat_kv_index(x, 8, "triton"), too_large)


def test_wrong_arguments():
    ids = np.zeros((2, 3, 4), np.int32)
    for wrong in (ids[0], ids[None]):
        with pytest.raises(ValueError, match=r"local_index: got shape .*, wanted \[batch, tokens, topk\]"):
            local_to_flat_kv_index(wrong, 8)
    for dtype in (np.float32, np.int16, np.uint32, np.bool_):
        with pytest.raises(TypeError, match=f"local_index: got dtype {np.dtype(dtype)}, wanted int32 or int64"):
            local_to_flat_kv_index(ids.astype(dtype), 8)
    for kv_len in (0, -3):
        with pytest.raises(ValueError, match=f"kv_len: got {kv_len}, wanted > 0"):
            local_to_flat_kv_index(ids, kv_len)
    for kv_len in (8.0, True, None, jnp.int32(8)):
        with pytest.raises(TypeError, match="kv_len: got .*, wanted a Python int"):
            local_to_flat_kv_index(ids, kv_len)
    with pytest.raises(TypeError, match="kv_len: got .*, wanted a Python int"):
        jax.jit(local_to_flat_kv_index)(ids, 8)
    with pytest.raises(
        ValueError, match=f"implementation: got 'cuda', wanted None or one of {', '.join(dispatch.IMPLEMENTATIONS)}"
    ):
        local_to_flat_kv_index(ids, 8, "cuda")
    for error, name in ((NotImplementedError, "mosaic"), (ValueError, "jax_triton")):
        with pytest.raises(error, match=f"'{name}'"), jax.default_device("cpu"):
            local_to_flat_kv_index(ids, 8, name)


def test_config_default_is_off():
    assert {field.name: field.default for field in dataclasses.fields(DSv4Config)}["fuse_kv_index_remap"] is False


@pytest.mark.parametrize("topk", [128, 100, 64])
def test_sparse_attention_end_to_end(topk):
    """Output and every gradient, remap on and off, at the kv_len of the reference's cases and with batch 3."""
    rng = np.random.default_rng(topk)
    q = jnp.asarray(rng.standard_normal((3, 16, 4, 64)), jnp.bfloat16)
    kv = jnp.asarray(rng.standard_normal((3, 384, 64)), jnp.bfloat16)
    sink = jnp.asarray(rng.standard_normal(4), jnp.float32)
    ids = random_ids((3, 16, topk), 384)

    def loss(fuse, q, kv, sink):
        out = sparse_attention(q, kv, ids, sink, backend="flat", fuse_kv_index_remap=fuse)
        return jnp.sum(out.astype(jnp.float32) ** 2), out

    with dispatch.interpret():
        results = [
            jax.jit(jax.value_and_grad(lambda *x, fuse=fuse: loss(fuse, *x), (0, 1, 2), has_aux=True))(q, kv, sink)
            for fuse in (False, True)
        ]
    assert all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(results[0]))
    assert_trees_bitwise_equal(results[0], results[1], names=("unfused", "fused"))
