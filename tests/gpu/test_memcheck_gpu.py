"""Every kernel once under compute-sanitizer's memcheck, at a small shape with ragged ends."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ERROR = 99  # exit code that memcheck is told to use

EVERY_KERNEL = """
import cases, jax, jax.numpy as jnp
import dsv4_fusions as dsv4
from dsv4_fusions.ops.sparse_attention import mosaic, sparse_attention
from dsv4_fusions.ops.sparse_attention.slots import Slots
from dsv4_fusions import dispatch
names = ["mosaic"] * (dispatch.mosaic_unsupported() is None) + ["triton"]
names += ["jax_triton"] * (dispatch.jax_triton_unsupported() is None)
def run(case, name, groups=None):
    o, u, v, tables, g = case.operands()
    for path in (cases.unfused, cases.fused):
        jax.block_until_ready(cases.step(path, groups, implementation=name, backward="single_pass")(o, u, v, tables, g))
    weights = [dsv4.postmix_matrix(u, v)] if groups is None else [w.reshape(groups, -1, w.shape[1]) for w in (u, v)]
    fused = lambda o, *w: cases.fused(o, *w, tables, implementation=name, backward="single_pass")
    frozen = jax.jit(lambda o, g, *w: jax.vjp(lambda o: fused(o, *w), o)[1](g))(o, g, *weights)
    alone = jax.jit(lambda o, g, *w: jax.vjp(lambda *w: fused(o, *w), *w)[1](g))(o, g, *weights)
    jax.block_until_ready((frozen, alone))
for name in names:
    run(cases.Postmix(77, 64, 256, 50), name)
    if name != "mosaic":
        run(cases.Postmix(21, 12, 136, 50), name)
        run(cases.Postmix(21, 12, 136, 50), name, groups=4)
    if name != "mosaic":
        ids = jnp.arange(3 * 7 * 350, dtype=jnp.int32).reshape(3, 7, 350)
        jax.block_until_ready(jax.jit(lambda ids: dsv4.local_to_flat_kv_index(ids, 5, name))(ids))
if "mosaic" in names:
    q, kv = jnp.ones((2, 5, 64, 192), jnp.bfloat16), jnp.ones((2, 7, 192), jnp.bfloat16)
    index = jnp.arange(2 * 5 * 70, dtype=jnp.int32).reshape(2, 5, 70) % 9 - 1
    index = index.at[0, 0, :3].set(jnp.array([2147480000, 7, -2147483648]))
    for backend in ("flat", "batched"):
        attend = lambda *x: sparse_attention(*x, value_dim=128, backend=backend, implementation="mosaic")
        step = lambda q, kv, sink: jax.vjp(lambda *x: attend(x[0], x[1], index, x[2]), q, kv, sink)
        jax.block_until_ready(jax.jit(lambda *x: step(*x)[1](step(*x)[0]))(q, kv, jnp.zeros(64)))
    q, rows, slots = q.reshape(10, 64, 192), kv.reshape(14, 192), Slots(index.reshape(10, 70), None, 5, 7)
    out, lse = mosaic.forward(q, rows, slots, jnp.zeros(64), scale=0.1, value_dim=128)
    jax.block_until_ready(mosaic.backward(q, rows, slots, jnp.zeros(64), out, lse, out, scale=0.1))
print("ran", *names)
"""

OUT_OF_BOUNDS = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
def kernel(x_ref, y_ref):
    triton.store(y_ref.at[jnp.arange(16) + 2**22], x_ref[...])
spec = jax.ShapeDtypeStruct((16,), jnp.float32)
x = jnp.ones(16)
print("ran", jax.block_until_ready(
    pl.pallas_call(kernel, out_shape=spec, compiler_params=triton.CompilerParams(num_warps=1))(x)))
"""


def memcheck(program):
    """Exit code and output of a Python program under memcheck, every array an allocation of its own."""
    root = pathlib.Path(__file__).parents[2]
    environment = os.environ | {
        "PYTHONPATH": f"{root}:{root / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }
    tool = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(ERROR)]
    done = subprocess.run([*tool, sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def working_memcheck():
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer, which CUDA's toolkit brings")
    code, output = memcheck(OUT_OF_BOUNDS)
    if "not supported" in output.lower():
        pytest.skip("compute-sanitizer does not support this machine's GPU")
    assert code != 0 and "Invalid __global__ write" in output, f"memcheck overlooked a planted error:\n{output[-3000:]}"


def test_memcheck_is_clean(working_memcheck):
    code, output = memcheck(EVERY_KERNEL)
    assert code == 0 and "ERROR SUMMARY: 0 errors" in output, output[-3000:]
    assert "ran " in output
