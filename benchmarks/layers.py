"""Time and memory of one attention layer of each kind, forward and backward, beside transformers' eager one.

    python benchmarks/layers.py configs/v4_flash_layer.yaml --tokens 4096 --csv layers.csv

Times are medians of the host's clock around whole calls, in one process. The peak is what the compiled step needs:
arguments, results and temporaries. transformers' layer has the same dimensions but no VHA postmix; it runs where torch,
a GPU and transformers are found.
"""

import argparse
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx
from table import Table

from dsv4_fusions import DSv4Config
from dsv4_fusions.layers import attention_layer
from dsv4_fusions.verify import build_layers

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def median_ms(call, repeats):
    call()  # compiles
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def ours(cfg, index, tokens, repeats):
    """(ms, peak bytes) of one of our layers, a training step's work: all gradients, the auxiliary loss included."""
    layer = attention_layer(cfg, index, rngs=nnx.Rngs(0))
    shape = (1, tokens, cfg.hidden_size)
    x, g = (jax.random.normal(jax.random.key(i), shape, jnp.dtype(cfg.dtype)) for i in range(2))

    @jax.jit
    def step(layer, x, g):
        (y, aux), pull = jax.vjp(lambda layer, x: layer(x), layer, x)
        return y, pull((g, jax.tree.map(jnp.ones_like, aux)))

    memory = step.lower(layer, x, g).compile().memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return median_ms(lambda: jax.block_until_ready(step(layer, x, g)), repeats), peak


def transformers(cfg, index, tokens, repeats):
    """The same of transformers' layer, or None where it cannot run."""
    try:
        import torch
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
    except ImportError:
        return None
    if not torch.cuda.is_available() or cfg.compress_ratios[index] not in KINDS:
        return None
    rope = dict(rope_type="default", partial_rotary_factor=cfg.qk_rope_head_dim / cfg.head_dim)
    config = hf.DeepseekV4Config(
        layer_types=[KINDS[cfg.compress_ratios[index]]],
        num_hidden_layers=1,
        rope_parameters={
            "main": rope | {"rope_theta": cfg.rope_theta},
            "compress": rope | {"rope_theta": cfg.compress_rope_theta},
        },
        **{
            name: getattr(cfg, name)
            for name in (
                *("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank", "o_groups", "o_lora_rank"),
                *("sliding_window", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps"),
            )
        },
    )
    config._attn_implementation = "eager"
    device, dtype = torch.device("cuda"), getattr(torch, cfg.dtype)
    layer = hf.DeepseekV4Attention(config, 0).to(device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
        parameter.data = parameter.data.to(dtype)
    x = torch.randn(1, tokens, cfg.hidden_size, device=device, dtype=dtype, requires_grad=True)
    g = torch.randn_like(x)
    position = torch.arange(tokens, device=device)
    distance = position[:, None] - position
    hidden = (distance < 0) | (distance >= cfg.sliding_window)
    mask = torch.zeros(1, 1, tokens, tokens, device=device, dtype=dtype).masked_fill(hidden, float("-inf"))
    embedding = hf.DeepseekV4RotaryEmbedding(config).to(device)
    tables = {name: embedding(x, position_ids=position[None], layer_type=name) for name in ("main", "compress")}

    def step():
        layer.zero_grad()
        x.grad = None
        layer(x, tables, position[None], mask)[0].backward(g)
        torch.cuda.synchronize()

    torch.cuda.reset_peak_memory_stats()
    return median_ms(step, repeats), torch.cuda.max_memory_allocated()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096])
    parser.add_argument(
        "--ratios", type=int, nargs="+", help="compress ratios of the layers; all of the configuration's"
    )
    parser.add_argument("--backends", nargs="+", help="sparse attention backends; the configuration's")
    parser.add_argument("--alone", action="store_true", help="without transformers'")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--csv")
    args = parser.parse_args()
    cfg, table = DSv4Config.from_yaml(args.config), Table()
    variants = [dataclasses.replace(cfg, sparse_attention_backend=name) for name in args.backends or ()] or [cfg]
    for tokens in args.tokens:
        for kind in build_layers(cfg, 1, tokens):
            if kind.ratio not in (args.ratios or [kind.ratio]):
                continue
            calls = [("dsv4_fusions", variant.sparse_attention_backend, ours, variant) for variant in variants]
            if not args.alone:
                calls.append(("transformers", "eager", transformers, cfg))
            for name, backend, measure, variant in calls:
                measured = measure(variant, kind.indices[0], tokens, args.repeats)
                if measured is not None:
                    ms, peak = measured
                    what = dict(layer=name, backend=backend, compress_ratio=kind.ratio, tokens=tokens, dtype=cfg.dtype)
                    table.add(**what, ms_p50=f"{ms:.4g}", peak_bytes=peak)
    table.write(args.csv)


if __name__ == "__main__":
    main()
