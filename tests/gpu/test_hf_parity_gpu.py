"""Parity with transformers on a GPU, with fresh weights. transformers runs on the CPU."""

# Collected here as well, to run on the GPU.
from test_hf_parity import test_live  # noqa: F401
