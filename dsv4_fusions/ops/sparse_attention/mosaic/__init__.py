"""Sparse attention on Pallas' Mosaic GPU backend, for Hopper."""

from dsv4_fusions.ops.sparse_attention.mosaic.backward_pass import backward
from dsv4_fusions.ops.sparse_attention.mosaic.forward_pass import forward
from dsv4_fusions.ops.sparse_attention.mosaic.launch import HEADS, LOG2E

__all__ = ["HEADS", "LOG2E", "backward", "forward"]
