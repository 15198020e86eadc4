"""Writes tests/fixtures/hf: what transformers' `DeepseekV4Attention` computes for the cases of tests/test_hf_parity.py.

    pip install torch "transformers>=5.17"
    python tools/make_hf_fixtures.py

Nothing here needs JAX or this project. torch is imported where it is used, because the tests, which take their cases
from here, run without it as well.
"""

import argparse
import copy
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "hf"
KINDS = ("window", "csa", "hca")
LENGTHS = (1, 127, 128, 129, 300, 517)
DTYPES = ("float32", "bfloat16")
BATCH = 2
# With other seeds a gradient that is a short sum of cancelling terms can miss the tests' tolerance in bf16, mostly for
# transformers' part: window, seed 0, 300 tokens, gradient of the sinks: it is 3.1% from its own f32 run, we are 0.6%.
SEED = 6

# YaRN with a short original context, so that it changes the angles within the cases' lengths.
CONFIG = dict(
    model_type="deepseek_v4",
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=16,
    q_lora_rank=12,
    o_groups=2,
    o_lora_rank=8,
    sliding_window=24,
    index_n_heads=8,
    index_head_dim=16,
    index_topk=8,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    partial_rotary_factor=0.5,
    max_position_embeddings=1024,
    rope_parameters={
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 40000.0,
            "partial_rotary_factor": 0.5,
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.0,
        },
    },
)

# How far apart the scores of the last selected and the first left-out row must be, in parts of the token's largest
# score, for a token's selection to be sure: f32 scores are good to 1e-6 or so, bf16 ones to 1e-2.
SURE = {"float32": 2e-5, "bfloat16": 4e-2}


class Source(NamedTuple):
    """Weights by transformers' names, input and cotangent of the longest length: f32 numbers that bf16 can hold."""

    config: dict
    kind: str
    weights: dict[str, np.ndarray]
    x: np.ndarray
    g: np.ndarray


class Case(NamedTuple):
    """A source cut to a length. `counts` [batch, tokens] says which output rows are compared."""

    config: dict
    kind: str
    dtype: str
    weights: dict[str, np.ndarray]
    x: np.ndarray
    g: np.ndarray
    counts: np.ndarray


def make_source(config, kind, seed):
    """The source and its seed; for a layer that selects rows, the first from `seed` on that is sure of it in f32."""
    shapes = {name: tuple(p.shape) for name, p in _make_layer(config, kind, "float32").named_parameters()}
    for tried in itertools.count(seed):
        rng = np.random.default_rng(tried)
        weights = {name: _random(rng, name, shape) for name, shape in shapes.items()}
        x, g = _to_bfloat16(rng.normal(size=(2, BATCH, max(LENGTHS), config["hidden_size"])))
        source = Source(config, kind, weights, x, g)
        if _selection_margins(source).min() > SURE["float32"]:
            return source, tried


def _random(rng, name, shape):
    values = rng.normal(size=shape)
    if "norm" in name:
        values = 1 + 0.2 * values
    elif name.endswith(".weight"):
        values = values / np.sqrt(shape[1])
    return _to_bfloat16(values)


def _to_bfloat16(values):
    import torch

    return torch.tensor(values).bfloat16().float().numpy()


def make_case(source, dtype, tokens):
    """A case of a source.

    Where a selection is not sure in bf16 the two sides may select differently. Such rows are not compared, and their
    cotangent is 0, so that no gradient comes from them.
    """
    config, kind, weights, x, g = source
    counts = np.ones((BATCH, tokens), bool)
    if dtype == "bfloat16":
        counts = _selection_margins(source)[:, :tokens] > SURE[dtype]
    return cut_case(config, kind, dtype, weights, x, g, counts)


def cut_case(config, kind, dtype, weights, x, g, counts):
    tokens = counts.shape[1]
    return Case(config, kind, dtype, weights, x[:, :tokens], np.where(counts[..., None], g[:, :tokens], 0), counts)


def _selection_margins(source):
    """How sure each token's selection is, [batch, tokens]; see `SURE`. Infinite where nothing is left out."""
    import torch

    config, kind, weights, x, _ = source
    if kind != "csa":
        return np.full(x.shape[:2], np.inf)
    layer = _make_layer(config, kind, "float32")
    _load(layer, weights)
    kept = []
    layer.compressor.indexer.scorer.register_forward_hook(lambda *args: kept.append(args[-1]))
    with torch.no_grad():
        _forward(layer, torch.tensor(x))
    scores = kept[0].numpy()
    tokens, slots = scores.shape[1:]
    topk = config["index_topk"]
    if slots <= topk:
        return np.full(x.shape[:2], np.inf)
    ready = (np.arange(tokens) + 1) // config["compress_rates"]["compressed_sparse_attention"]
    is_ready = np.arange(slots) < ready[:, None]
    ranked = np.sort(np.where(is_ready, scores, np.finfo(np.float32).min), axis=-1)[..., ::-1]
    largest = np.max(np.abs(scores), axis=-1, where=is_ready, initial=1e-30)
    gap = np.where(ready > topk, ranked[..., topk - 1] - ranked[..., topk], 0)
    return np.where(ready > topk, gap / largest, np.inf)


def reference(case):
    """Output "y", input gradient "dx" and the gradient of every parameter by name, as f32 NumPy arrays."""
    import torch

    layer = _make_layer(case.config, case.kind, case.dtype)
    _load(layer, case.weights)
    x, g = (torch.tensor(a).to(getattr(torch, case.dtype)) for a in (case.x, case.g))
    x.requires_grad_()
    y = _forward(layer, x)
    y.backward(g)
    results = {"y": y, "dx": x.grad}
    for name, parameter in layer.named_parameters():
        # None: of an indexer, whose selection has no gradient, and of a compressor without a complete group.
        results[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: a.detach().float().numpy() for name, a in results.items()}


def _make_layer(config, kind, dtype):
    """transformers' module with its parameters in a dtype."""
    import torch
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention, DeepseekV4Config

    config = DeepseekV4Config(**copy.deepcopy(config))  # it writes into what it is given
    config._attn_implementation = "eager"
    layer = DeepseekV4Attention(config, KINDS.index(kind))
    # The parameters alone: `layer.to(bfloat16)` would round the rotary frequencies as well. Nor is it what
    # `from_pretrained(dtype=bfloat16)` makes, which keeps norms and sinks in f32 and then cannot run: a norm with an
    # f32 weight hands f32 to a bf16 projection (transformers 5.17).
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return layer


def _load(layer, weights):
    import torch

    layer.load_state_dict({name: torch.tensor(w) for name, w in weights.items()})


def _forward(layer, x):
    import torch
    from transformers.masking_utils import create_sliding_window_causal_mask
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    batch, tokens, _ = x.shape
    positions = torch.arange(tokens).expand(batch, -1)
    mask = create_sliding_window_causal_mask(layer.config, x, None, None, positions)
    rope = DeepseekV4RotaryEmbedding(layer.config)
    tables = {name: rope(x, position_ids=positions, layer_type=name) for name in ("main", "compress")}
    return layer(x, tables, positions, mask)[0]


def write_fixture(path, config, kind, seed):
    """All lengths and dtypes of one kind of layer."""
    source, seed = make_source(config, kind, seed)
    arrays = {"x": source.x, "g": source.g} | {f"weights/{name}": w for name, w in source.weights.items()}
    for dtype, tokens in itertools.product(DTYPES, LENGTHS):
        case = make_case(source, dtype, tokens)
        arrays[f"{dtype}/{tokens}/counts"] = case.counts
        arrays |= {f"{dtype}/{tokens}/{name}": a for name, a in reference(case).items()}
        print(f"{kind} {dtype} {tokens}: {case.counts.mean():.0%} of the rows are compared")
    description = json.dumps({"kind": kind, "seed": seed, "config": config})
    np.savez_compressed(path, description=description, **arrays)


def read_fixture(kind):
    """The cases of a kind of layer with their wanted results, by (dtype, tokens)."""
    with np.load(FIXTURES / f"{kind}.npz") as file:
        arrays = dict(file)
    config = json.loads(str(arrays["description"]))["config"]

    def under(prefix):
        return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}

    weights, cases = under("weights/"), {}
    for dtype, tokens in itertools.product(DTYPES, LENGTHS):
        wanted = under(f"{dtype}/{tokens}/")
        counts = wanted.pop("counts")
        cases[dtype, tokens] = cut_case(config, kind, dtype, weights, arrays["x"], arrays["g"], counts), wanted
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=SEED)
    seed = parser.parse_args().seed
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        path = FIXTURES / f"{kind}.npz"
        write_fixture(path, CONFIG, kind, seed)
        print(f"{path.relative_to(FIXTURES.parents[2])}: {path.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
