"""Tests in this folder run on an NVIDIA GPU and are skipped, with the reason, where there is none."""

import jax
import pytest

from dsv4_fusions import dispatch

# In the names of tests that need several GiB, and how many of them run at a time.
LARGE = ("production", "32_bits", "2_31", "processes", "xla_flags", "memcheck")
LARGE_AT_A_TIME = 4


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu)


def pytest_collection_modifyitems(items):
    """With `pytest -n N --dist loadgroup`, N processes share the GPU; few of them run tests that fill its memory.

    Those few start first and deal the large tests out among them, since the longest of them is as long as the run.
    """
    large = [i for i in items if i.get_closest_marker("gpu") and any(word in i.name for word in LARGE)]
    for i, item in enumerate(large):
        item.add_marker(pytest.mark.xdist_group(f"large{i % LARGE_AT_A_TIME}"))
    items.sort(key=lambda item: item not in large)


def pytest_runtest_setup(item):
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs an NVIDIA GPU, and JAX's default backend here is {jax.default_backend()!r}")
    if "mosaic" in item.name and (reason := dispatch.mosaic_unsupported()):
        pytest.skip(f"mosaic: {reason}")
