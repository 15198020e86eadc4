"""The choice of an implementation: which capabilities each serves, names that run or raise, the kill switch."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from program import gpu_target

from dsv4_fusions import dispatch
from dsv4_fusions.ops.inv_rope_postmix import postmix_choice

CUDA = {"mosaic": dispatch.NotBuilt("later"), "triton": None, "xla": None}
CPU = {"mosaic": dispatch.NotBuilt("later"), "triton": "no GPU", "xla": None}
PRODUCTION = ("bfloat16", 64, 512, 64)


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch):
    monkeypatch.delenv(dispatch.DISABLE_KERNELS, raising=False)


@pytest.fixture
def with_jax_triton(monkeypatch):
    """with_jax_triton(True or False): whether jax-triton and triton can be imported."""
    find = importlib.util.find_spec

    def pretend(there):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *args: there or None if name in ("jax_triton", "triton") else find(name, *args),
        )

    return pretend


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (13, 5)])
def test_triton_runs_from_capability_8_0_without_an_upper_bound(faked_target, capability):
    faked_target("gpu", capability)
    assert dispatch.triton_unsupported() is None
    for dtype in ("bfloat16", "float16"):
        assert postmix_choice(dtype, 64, 512, 64, implementation="triton") == ("triton", None)
        # what Mosaic does not serve on any chip
        for call in ((dtype, 48, 512, 64), (dtype, 64, 500, 64), (dtype, 64, 512, 64, 8)):
            assert postmix_choice(*call) == ("triton", None)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (9, 1), (10, 0), (10, 3), (12, 0)])
def test_mosaic_runs_on_hopper_alone(faked_target, capability):
    faked_target("gpu", capability)
    serves = capability == (9, 0)
    assert (dispatch.mosaic_unsupported() is None) == serves
    assert postmix_choice(*PRODUCTION) == ("mosaic" if serves else "triton", None)
    if not serves:
        reason = f"needs compute capability 9.0 and the target has {capability[0]}.{capability[1]}"
        assert reason in dispatch.mosaic_unsupported()


def test_what_is_not_served_is_refused_below_8_0_and_off_nvidia_gpus(faked_target, with_jax_triton):
    with_jax_triton(True)
    unsupported = (dispatch.mosaic_unsupported, dispatch.triton_unsupported, dispatch.jax_triton_unsupported)
    faked_target("gpu", (7, 5))
    for reason, wanted in zip(unsupported, ("9.0", "8.0 or higher", "8.0 or higher"), strict=True):
        assert f"capability {wanted} and the target has 7.5" in reason()
    assert postmix_choice(*PRODUCTION)[0] == "xla"
    faked_target("tpu", None)
    assert all("needs an NVIDIA GPU and the target is tpu" in reason() for reason in unsupported)
    faked_target("gpu", None)  # a GPU of another vendor
    assert all(reason() is not None for reason in unsupported)


def test_jax_triton_needs_its_package(faked_target, with_jax_triton):
    faked_target("gpu", (9, 0))
    with_jax_triton(True)
    assert dispatch.jax_triton_unsupported() is None
    assert postmix_choice(*PRODUCTION, implementation="jax_triton") == ("jax_triton", None)
    with_jax_triton(False)
    assert "pip install '.[triton]'" in dispatch.jax_triton_unsupported()
    with pytest.raises(ValueError, match="implementation 'jax_triton' cannot run here: it needs jax-triton"):
        postmix_choice(*PRODUCTION, implementation="jax_triton")


def test_the_order_of_preference(faked_target, with_jax_triton, monkeypatch):
    faked_target("gpu", (9, 0))
    with_jax_triton(True)
    chosen = []
    for name in ("mosaic", "triton", "jax_triton"):
        chosen.append(postmix_choice(*PRODUCTION)[0])
        monkeypatch.setattr(dispatch, f"{name}_unsupported", lambda: "not here")
    assert [*chosen, postmix_choice(*PRODUCTION)[0]] == ["mosaic", "triton", "jax_triton", "xla"]


def test_interpretation_takes_the_same_order_where_it_can(with_jax_triton):
    with_jax_triton(True)
    with dispatch.interpret():
        assert postmix_choice(*PRODUCTION)[0] == "mosaic"
        assert postmix_choice("bfloat16", 48, 512, 64)[0] == "triton"
        assert dispatch.jax_triton_unsupported() is not None  # it has no interpreter
        assert postmix_choice("float32", 64, 512, 64)[0] == "xla"


@pytest.mark.parametrize("rope_dim", [0, 64])
def test_the_rotation_does_not_change_the_choice(faked_target, rope_dim):
    """Or fused and unfused would differ in more than the rotation."""
    for target in (("gpu", (9, 0)), ("gpu", (8, 0)), ("cpu", None)):
        faked_target(*target)
        for dtype in ("bfloat16", "float32"):
            for groups in (None, 8):
                chosen, _ = postmix_choice(dtype, 64, 512, rope_dim, groups)
                assert chosen == postmix_choice(dtype, 64, 512, 2, groups)[0]


def test_what_no_kernel_serves_falls_back_on_a_gpu_and_fuses_on_a_cpu(faked_target):
    faked_target("gpu", (9, 0))
    for groups in (None, 8):
        for implementation, reason in [
            postmix_choice("float32", 64, 512, 64, groups),
            postmix_choice(*PRODUCTION, groups, implementation="xla"),
        ]:
            assert implementation == "xla" and "no kernel serves this call" in reason
    faked_target("cpu", None)
    for dtype in ("float32", "bfloat16"):
        for groups in (None, 8):
            assert postmix_choice(dtype, 64, 512, 64, groups) == ("xla", None)


def test_rope_dim_0_falls_back(faked_target):
    nothing = "rope_dim is 0: there is nothing to rotate"
    assert postmix_choice("bfloat16", 64, 512, 0) == ("xla", nothing)
    faked_target("gpu", (9, 0))
    assert postmix_choice("bfloat16", 64, 512, 0) == ("mosaic", nothing)


@pytest.mark.parametrize(
    "heads, head_dim, dtype, groups, reason",
    [
        (32, 512, "bfloat16", None, "it serves 64 heads, not 32"),
        (128, 512, "bfloat16", None, "it serves 64 heads, not 128"),
        (64, 64, "bfloat16", None, "it serves multiples of 128 as head_dim, not 64"),
        (64, 0, "bfloat16", None, "it serves multiples of 128 as head_dim, not 0"),
        (64, 512, "float32", None, "it serves bfloat16 and float16, not float32"),
        (64, 512, "bfloat16", 8, "it does not serve the grouped postmix"),
    ],
)
def test_what_mosaic_does_not_serve(faked_target, heads, head_dim, dtype, groups, reason):
    faked_target("gpu", (9, 0))
    with pytest.raises(ValueError, match=f"implementation 'mosaic' cannot run here: {reason}"):
        postmix_choice(dtype, heads, head_dim, 64, groups, "mosaic")
    assert postmix_choice(dtype, heads, head_dim, 64, groups)[0] == ("xla" if dtype == "float32" else "triton")


def test_target_is_the_abstract_mesh_device_else_the_default_device():
    default = jax.devices()[0]
    assert dispatch.target().platform == default.platform
    for kind, capability in [("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA B300", (10, 3)), ("NVIDIA H100", (9, 0))]:
        with gpu_target(kind):
            assert dispatch.target() == ("gpu", capability, 132)
    with jax.default_device("cpu"):
        assert dispatch.target() == ("cpu", None, None)


@pytest.mark.parametrize("table, chosen", [(CUDA, "triton"), (CPU, "xla")])
def test_none_takes_the_first_that_can_serve(table, chosen):
    assert dispatch.choose(None, table) == chosen


def test_a_named_implementation_runs_or_raises_with_the_reason():
    assert dispatch.choose("xla", CUDA) == "xla"
    with pytest.raises(ValueError, match="implementation 'triton' cannot run here: no GPU"):
        dispatch.choose("triton", CPU)
    with pytest.raises(NotImplementedError, match="mosaic.*later"):
        dispatch.choose("mosaic", CUDA)
    with pytest.raises(ValueError, match="implementation: got 'cudnn', wanted None or one of mosaic, triton, xla"):
        dispatch.choose("cudnn", CUDA)


def test_kill_switch(faked_target, monkeypatch, with_jax_triton):
    faked_target("gpu", (9, 0))
    with_jax_triton(True)
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "1")
    for groups in (None, 8):
        assert postmix_choice(*PRODUCTION, groups)[0] == "xla"
    for name in ("mosaic", "triton", "jax_triton"):
        with pytest.raises(ValueError, match=dispatch.DISABLE_KERNELS):
            postmix_choice(*PRODUCTION, implementation=name)
        with dispatch.interpret(), pytest.raises(ValueError, match=dispatch.DISABLE_KERNELS):
            postmix_choice(*PRODUCTION, implementation=name)
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "0")
    assert postmix_choice(*PRODUCTION)[0] == "mosaic"


def test_interpretation_ends_with_its_block_even_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), dispatch.interpret():
        assert dispatch.interpreting()
        assert dispatch.triton_unsupported() is dispatch.mosaic_unsupported() is None
        raise RuntimeError("inside")
    assert not dispatch.interpreting()


@pytest.mark.skipif(jax.device_count("cpu") < 4, reason="needs 4 simulated CPU devices")
def test_operands_and_outputs_agree_on_their_manual_axes():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cpu")[:4])
    seen = []

    def body(x, weight):
        x, weight = dispatch.align_manual_axes(x, weight)
        out = dispatch.output_type((2,), jnp.bfloat16, x)
        seen.append([jax.typeof(x).manual_axis_type, jax.typeof(weight).manual_axis_type, out.manual_axis_type])
        return x * weight

    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))(jnp.ones(4), jnp.ones(1))
    assert all(axes.varying == {"d"} for axes in seen[0])


def test_triton_mixes_up_to_128_heads(faked_target):
    faked_target("gpu", (9, 0))
    assert postmix_choice("bfloat16", 128, 512, 64)[0] == "triton"
    assert postmix_choice("bfloat16", 256, 512, 64)[0] == "xla"
    assert postmix_choice("bfloat16", 256, 512, 64, groups=2)[0] == "triton"
    with pytest.raises(ValueError, match="'triton' cannot run here: it serves up to 128 heads that are mixed, not 129"):
        postmix_choice("bfloat16", 129, 512, 64, implementation="triton")


def test_a_jax_without_the_pallas_triton_backend(faked_target, monkeypatch):
    faked_target("gpu", (8, 0))
    find = dispatch.importlib.util.find_spec
    missing = "jax.experimental.pallas.triton"
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert postmix_choice(*PRODUCTION)[0] in ("jax_triton", "xla")
    assert "no Pallas Triton backend" in dispatch.triton_unsupported()
