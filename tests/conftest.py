"""Set-up of the test process; the environment must be complete before JAX is imported."""

import os

# Both flags concern the CPU alone: where there is a GPU, tests use it.
# Four simulated devices for the shard_map tests.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
# No program is cut into pieces to be compiled in parallel: that is a tenth more work, and the cores are busy anyway.
if "xla_cpu_parallel_codegen_split_count" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Several test processes share one GPU: none may keep memory that it does not use.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import hypothesis
import pytest

# The first example of a test compiles, so a deadline for one example says nothing.
hypothesis.settings.register_profile("dsv4_fusions", deadline=None)
hypothesis.settings.load_profile("dsv4_fusions")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Compiles a test's programs, and its fixtures', quickly unless it is marked `optimised`."""
    from compilation import free_programs, quick

    try:
        if item.get_closest_marker("optimised") or item.get_closest_marker("gpu"):
            return (yield)
        with quick():
            return (yield)
    finally:
        free_programs()


@pytest.fixture
def faked_target(monkeypatch):
    """Makes programs be traced for faked_target(platform, capability, cores), whatever device there is."""
    from dsv4_fusions import dispatch

    def fake(platform, capability, cores=None):
        monkeypatch.setattr(dispatch, "target", lambda: dispatch.Target(platform, capability, cores))

    return fake


@pytest.fixture
def mesh4():
    """A mesh of four devices, its axis called "data"."""
    import jax

    if jax.device_count() < 4:
        pytest.skip(f"needs four devices, and there are {jax.device_count()} ({jax.default_backend()})")
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
