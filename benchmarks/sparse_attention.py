"""Time of sparse attention, forward and backward: the kernels beside XLA's gather and einsum, in one process.

    python benchmarks/sparse_attention.py --csv sparse_attention.csv

Device times (CUPTI), medians. Useful work is two products of heads x slots x channels a query in the forward and five
in the backward, at 2 operations each; every slot of a table holds a random row. The backward's time is that of both
together less the forward's. Before anything is timed, both are compared with the f32 reference on some queries.
"""

import argparse
import statistics
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler
from table import Table

from dsv4_fusions.kv_index import Runs
from dsv4_fusions.ops.sparse_attention import sparse_attention

CASES = {  # tokens, heads, head_dim, value_dim, topk, rows
    "V4-Flash, HCA at 64K on 4 ranks": (16384, 64, 512, 512, 640, 17024),
    "V4-Flash, CSA-like": (16384, 64, 512, 512, 2176, 66048),
    "absorbed latent": (16384, 64, 576, 512, 640, 16384),
}
RUNS = "V4-Flash, HCA at 64K on 4 ranks, the last rank's runs"
CASES[RUNS] = CASES["V4-Flash, HCA at 64K on 4 ranks"]
CHECKED = 256  # queries
BLOCK = 256  # queries whose rows XLA gathers at a time: all at once would take tokens * topk * channels


def gather_and_einsum(q, kv, index, sink, *, scale, value_dim):
    """What one would write: rows gathered, bf16 products with f32 sums."""

    def block(q, ids):
        rows = kv[ids]
        scores = scale * jnp.einsum("thd,tkd->thk", q, rows, preferred_element_type=jnp.float32)
        peak = jnp.maximum(scores.max(-1), sink)
        p = jnp.exp(scores - peak[..., None])
        total = p.sum(-1) + jnp.exp(sink - peak)
        out = jnp.einsum("thk,tkd->thd", p.astype(q.dtype), rows[..., :value_dim], preferred_element_type=jnp.float32)
        return (out / total[..., None]).astype(q.dtype)

    blocks = lambda x: x.reshape(-1, BLOCK, *x.shape[1:])  # noqa: E731
    block = jax.checkpoint(block, prevent_cse=False)  # else all rows are kept for the backward
    return lax.map(lambda args: block(*args), (blocks(q), blocks(index))).reshape(*q.shape[:2], value_dim)


def runs_of_last_rank(tokens, topk, kv_len):
    """Window and compressed rows of a sequence's last quarter. KV: 128 rows before it, its own, the compressed ones."""
    window = jnp.full(tokens, 128, jnp.int32)
    row = jnp.arange(tokens, dtype=jnp.int32)
    return Runs(row + 1, window, jnp.full_like(row, 128 + tokens), (3 * tokens + row + 1) // 128, topk)


def error(x, wanted):
    x, wanted = (a.astype(jnp.float32) for a in (x, wanted))
    return float(jnp.linalg.norm(x - wanted) / jnp.linalg.norm(wanted))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--csv")
    args = parser.parse_args()
    table = Table()
    for name, (tokens, heads, head_dim, value_dim, topk, kv_len) in {name: CASES[name] for name in args.cases}.items():
        keys = jax.random.split(jax.random.key(0), 4)
        q = jax.random.normal(keys[0], (tokens, heads, head_dim), jnp.bfloat16)
        kv = jax.random.normal(keys[1], (kv_len, head_dim), jnp.bfloat16)
        index = jax.random.randint(keys[2], (tokens, topk), 0, kv_len, jnp.int32)
        sink = jax.random.normal(keys[3], (heads,))
        how = dict(scale=head_dim**-0.5, value_dim=value_dim)

        def ours(q, kv, index, sink, how=how, **kwargs):
            index = jax.tree.map(lambda x: x[None], index)  # noqa: B023
            return sparse_attention(q[None], kv[None], index, sink, **how, **kwargs)[0]

        kernel = partial(ours, implementation="mosaic")
        slots = tokens * topk
        if name == RUNS:
            index = runs_of_last_rank(tokens, topk, kv_len)
            slots = int(jnp.sum(index.near_count + index.far_count))
            from_table = lambda q, kv, index, sink: kernel(q, kv, index.table(), sink)  # noqa: B023, E731
            versions = {"mosaic structured": partial(kernel, backend="structured"), "mosaic, its table": from_table}
        else:
            versions = {"mosaic": kernel, "xla gather and einsum": partial(gather_and_einsum, **how)}
        versions = {version: jax.jit(run) for version, run in versions.items()}

        def both(q, kv, index, sink, g, run):
            out, transpose = jax.vjp(lambda q, kv, sink: run(q, kv, index, sink), q, kv, sink)
            return out, transpose(g)

        some = slice(0, tokens, tokens // CHECKED)
        g = jnp.zeros((tokens, heads, value_dim), jnp.bfloat16)
        g = g.at[some].set(jax.random.normal(keys[0], g[some].shape, g.dtype))
        of_some = jax.tree.map(lambda x: x[some], index)  # noqa: B023
        reference = partial(ours, implementation="xla")
        wanted = jax.tree.leaves(jax.jit(partial(both, run=reference))(q[some], kv, of_some, sink, g[some]))
        for version, run in versions.items():
            run_both = jax.jit(partial(both, run=run))
            got = jax.tree.leaves(run_both(q, kv, index, sink, g))
            errors = [error(x[some] if x.ndim == 3 else x, y) for x, y in zip(got, wanted, strict=True)]
            if not max(errors) < (5e-3 if "mosaic" in version else 5e-2):  # XLA's sums of rows' gradients are bf16
                raise SystemExit(f"{name}, {version}: relative errors {errors}")
            measure = lambda f, *x: statistics.median(profiler.measure(f, iterations=args.repeats)(*x)[1])  # noqa: E731
            forward_ms = measure(run, q, kv, index, sink)
            backward_ms = measure(run_both, q, kv, index, sink, g) - forward_ms
            product = 2 * heads * slots / 1e9
            for which, ms, work, errors_of in (
                ("forward", forward_ms, product * (head_dim + value_dim), errors[:1]),
                ("backward", backward_ms, product * (3 * head_dim + 2 * value_dim), errors[1:]),
            ):
                what = {"case": name, "pass": which, "version": version, "tokens": tokens, "heads": heads}
                what |= dict(head_dim=head_dim, value_dim=value_dim, topk=topk, rows=kv_len, dtype="bfloat16")
                measured = dict(ms_p50=f"{ms:.4g}", tflops=f"{work / ms:.4g}", relative_error=f"{max(errors_of):.3g}")
                table.add(**what, **measured)
    table.write(args.csv)


if __name__ == "__main__":
    main()
