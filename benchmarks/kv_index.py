"""Time of flat KV ids on a GPU: the remap of a table, and the whole table written at once, beside XLA's.

    python benchmarks/kv_index.py --csv kv_index.csv

Device times (CUPTI), medians in one process, beside a copy of 1 GiB. A version's roof is the time in which that copy
would move its bytes: what it must read once and the table that it writes. Integers are compared before that.
"""

import argparse
import statistics
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler
from table import Table

from dsv4_fusions import kv_index
from dsv4_fusions.ops.kv_index_remap import local_to_flat_kv_index
from dsv4_fusions.ops.kv_index_table import flat_kv_index_table
from dsv4_fusions.ops.kv_index_table.reference import local_table

WINDOW, MULTIPLE = 128, 128
CASES = {  # batch, tokens, compress ratio, selected slots
    "V4-Flash, HCA, 16K": (4, 16384, 128, None),
    "V4-Flash, HCA, 64K": (2, 65536, 128, None),
    "V4-Flash, CSA, 16K": (4, 16384, 4, 512),
    "CSA with 2048 selected, 16K": (4, 16384, 4, 2048),
}


def parts_of(batch, tokens, ratio, topk):
    window = kv_index.window_span(tokens, WINDOW)
    if topk is None:
        return window, kv_index.compressed_span(tokens, ratio, tokens)
    start, count = kv_index.visible_slots(tokens, ratio)
    selected = jax.random.randint(jax.random.key(0), (batch, tokens, topk), -1, tokens // ratio, jnp.int32)
    return window, kv_index.selection(selected, start, count, tokens)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--csv")
    args = parser.parse_args()
    table = Table()
    measure = lambda f, *x: statistics.median(profiler.measure(f, iterations=args.repeats)(*x)[1])  # noqa: E731
    whole = jnp.zeros(2**28, jnp.int32)
    bytes_per_ms = 2 * whole.nbytes / measure(jax.jit(jnp.copy), whole)
    del whole
    for name, (batch, tokens, ratio, topk) in CASES.items():
        parts, kv_len = parts_of(batch, tokens, ratio, topk), tokens + tokens // ratio
        local = jax.jit(partial(local_table, batch=batch))(parts)
        read = sum(x.nbytes for x in jax.tree.leaves(parts))
        how = dict(batch=batch, kv_len=kv_len, multiple=MULTIPLE)
        versions = {
            "remap": (partial(local_to_flat_kv_index, kv_len=kv_len), local, 2 * local.nbytes),
            "table": (partial(flat_kv_index_table, **how), parts, None),
            "table, compacted": (partial(flat_kv_index_table, compact=True, **how), parts, None),
        }
        for version, (run, operand, moved) in versions.items():
            programs = {i: jax.jit(partial(run, implementation=i)) for i in ("triton", "xla")}
            results = [jax.tree.leaves(program(operand)) for program in programs.values()]
            if not all(jnp.array_equal(x, y) for x, y in zip(*results, strict=True)):
                raise SystemExit(f"{name}, {version}: other integers")
            moved = moved or read + sum(x.nbytes for x in results[0])
            for implementation, program in programs.items():
                ms, roof_ms = measure(program, operand), moved / bytes_per_ms
                what = dict(case=name, what=version, implementation=implementation, batch=batch, tokens=tokens)
                what |= dict(topk=local.shape[2], megabytes=f"{moved / 1e6:.4g}")
                table.add(**what, ms_p50=f"{ms:.4g}", roof_ms=f"{roof_ms:.4g}", of_roof=f"{roof_ms / ms:.3g}")
    table.write(args.csv)


if __name__ == "__main__":
    main()
