"""The choice of an implementation: capability as a lower bound, names that run or raise, the kill switch."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from program import gpu_target

from dsv4_fusions import dispatch
from dsv4_fusions.ops.inv_rope_postmix import inv_rope_choice

CUDA = {"mosaic": dispatch.NotBuilt("later"), "triton": None, "xla": None}
CPU = {"mosaic": dispatch.NotBuilt("later"), "triton": "no GPU", "xla": None}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (13, 5)])
def test_triton_runs_from_capability_8_0_without_an_upper_bound(faked_target, capability):
    faked_target("gpu", capability)
    assert dispatch.triton_unsupported() is None
    assert inv_rope_choice("bfloat16", 64) == ("triton", None)
    assert inv_rope_choice("float16", 64) == ("triton", None)


def test_triton_is_refused_below_8_0_and_off_nvidia_gpus(faked_target):
    faked_target("gpu", (7, 5))
    assert "8.0 or higher and the target has 7.5" in dispatch.triton_unsupported()
    assert inv_rope_choice("bfloat16", 64)[0] == "xla"
    faked_target("tpu", None)
    assert "the target is tpu" in dispatch.triton_unsupported()
    faked_target("gpu", None)  # a GPU of another vendor
    assert dispatch.triton_unsupported() is not None


def test_what_no_kernel_serves_falls_back_on_a_gpu_and_fuses_on_a_cpu(faked_target):
    faked_target("gpu", (9, 0))
    for implementation, reason in [inv_rope_choice("float32", 64), inv_rope_choice("bfloat16", 64, "xla")]:
        assert implementation == "xla" and "no kernel serves this call" in reason
    faked_target("cpu", None)
    assert inv_rope_choice("float32", 64) == ("xla", None)


def test_rope_dim_0_falls_back():
    assert inv_rope_choice("bfloat16", 0) == ("xla", "rope_dim is 0: there is nothing to rotate")


def test_target_is_the_abstract_mesh_device_else_the_default_device():
    default = jax.devices()[0]
    assert dispatch.target().platform == default.platform
    for kind, capability in [("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA B300", (10, 3)), ("NVIDIA H100", (9, 0))]:
        with gpu_target(kind):
            assert dispatch.target() == ("gpu", capability)
    with jax.default_device("cpu"):
        assert dispatch.target().platform == "cpu"


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


def test_kill_switch(faked_target, monkeypatch):
    faked_target("gpu", (9, 0))
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "1")
    assert inv_rope_choice("bfloat16", 64)[0] == "xla"
    with pytest.raises(ValueError, match=dispatch.DISABLE_KERNELS):
        inv_rope_choice("bfloat16", 64, "triton")
    monkeypatch.setenv(dispatch.DISABLE_KERNELS, "0")
    assert inv_rope_choice("bfloat16", 64)[0] == "triton"


def test_interpretation_ends_with_its_block_even_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), dispatch.interpret():
        assert dispatch.interpreting()
        assert dispatch.triton_unsupported() is None
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
