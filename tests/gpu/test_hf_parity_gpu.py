"""Parity with transformers on a GPU. transformers runs on the CPU, also for the live cases."""

# Collected here as well, to run on the GPU.
from test_hf_parity import test_live, test_recorded  # noqa: F401
