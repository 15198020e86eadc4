"""Fused forward against the device-to-device copy of the same bytes, in one process.

    python benchmarks/postmix_forward.py [--csv FILE]

Prints, for 16384 tokens x 64 heads x 512 channels of bfloat16, the median time of a call among many back to back with
one synchronisation, and its ratio to the copy. `dsv4_fusions` proper has no clock; nothing here is asserted.
"""

import argparse
import csv
import datetime
import os
import statistics
import time

import jax
import jax.numpy as jnp

import dsv4_fusions as dsv4
from dsv4_fusions.testing import count_mismatches

TOKENS, HEADS, HEAD_DIM, ROPE_DIM = 16384, 64, 512, 64


def milliseconds(fn, *args, calls=20, repeats=11):
    """Median over `repeats` of the mean time of `calls` calls."""
    for _ in range(3):
        jax.block_until_ready(fn(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", help="also write the rows to this file")
    csv_path = parser.parse_args().csv
    keys = jax.random.split(jax.random.key(0), 3)
    o = jax.random.normal(keys[0], (TOKENS, HEADS, HEAD_DIM), jnp.bfloat16)
    u, v = (0.05 * jax.random.normal(k, (HEADS, 16), jnp.bfloat16) for k in keys[1:])
    m = dsv4.postmix_matrix(u, v)
    tables = dsv4.rope_tables(jnp.arange(TOKENS), ROPE_DIM)

    def plain(o, m, tables):
        return jnp.einsum("hk,tkd->thd", m, dsv4.rotate(o, tables, inverse=True))

    def unfused(o, m, tables):
        return dsv4.vha_postmix(dsv4.rotate(o, tables, inverse=True), m)

    versions = {
        "copy": jax.jit(lambda o, m, tables: jnp.copy(o)),
        "fused": jax.jit(dsv4.inv_rope_vha_postmix),
        "unfused": jax.jit(unfused),
        "XLA's pair (einsum)": jax.jit(plain),
    }
    wrong = count_mismatches(versions["fused"](o, m, tables), versions["unfused"](o, m, tables))
    if wrong:
        raise SystemExit(f"fused and unfused differ in {wrong} elements: no times for a wrong result")
    times = {name: milliseconds(fn, o, m, tables) for name, fn in versions.items()}
    temp = {
        name: fn.lower(o, m, tables).compile().memory_analysis().temp_size_in_bytes for name, fn in versions.items()
    }
    rows = [
        {
            "version": name,
            "ms": f"{ms:.4f}",
            "ratio_to_copy": f"{ms / times['copy']:.3f}",
            "temp_bytes": temp[name],
            "shape": f"{TOKENS}x{HEADS}x{HEAD_DIM}",
            "dtype": "bfloat16",
            "gpu": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "date": datetime.date.today().isoformat(),
        }
        for name, ms in times.items()
    ]
    for row in rows:
        print(
            f"{row['version']:22} {row['ms']:>8} ms   {row['ratio_to_copy']:>6} x copy   {row['temp_bytes']} temp bytes"
        )
    if csv_path:
        with open(csv_path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
