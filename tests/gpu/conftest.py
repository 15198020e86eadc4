"""Tests in this folder run on an NVIDIA GPU and are skipped, with the reason, where there is none."""

import jax
import pytest


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item):
    if jax.default_backend() != "gpu":
        pytest.skip(f"needs an NVIDIA GPU, and JAX's default backend here is {jax.default_backend()!r}")
