"""Hugging Face's `deepseek_v4` models: their configurations, and the weights of their attention layers.

Names, defaults and the order of precedence are those of transformers 5.17.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv4_fusions import config
from dsv4_fusions.config import HCA_RATIO
from dsv4_fusions.layers import DSv4HybridSelfAttention

# The fields of `DSv4Config` that have the same name, meaning and default in both.
_SAME = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank"),
    *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps"),
)
# What the attention layers have no counterpart of, unless it has this value.
_ONLY = {"model_type": "deepseek_v4", "num_key_value_heads": 1, "attention_bias": False, "attention_dropout": 0.0}
_WINDOW, _CSA, _HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


def config_fields(source: Any) -> dict[str, Any]:
    """What `DSv4Config.from_hf` takes from a Hugging Face configuration.

    Args:
      source: see there.

    Returns:
      Names and values of fields of `DSv4Config`.

    Raises:
      OSError, ValueError: see there.
    """
    values = _read_config(source)
    for name, only in _ONLY.items():
        if values.get(name, only) != only:
            raise _invalid(name, values[name], repr(only))
    fields = {name: values[name] for name in _SAME if name in values}
    main, compress, rope_dim = _rope(values)
    experts = _integer(values, "num_experts_per_tok", 6) + _integer(values, "n_shared_experts", 1)
    return fields | {
        "qk_rope_head_dim": rope_dim,
        "compress_ratios": _compress_ratios(values),
        "rope_theta": main["rope_theta"],
        "compress_rope_theta": compress["rope_theta"],
        "yarn": _yarn(compress),
        "intermediate_size": _integer(values, "moe_intermediate_size", 2048) * experts,
        "use_vha_attention": False,
        "gated_attention": False,
        "rope_rounding": "once",
    }


def _read_config(source):
    if hasattr(source, "to_dict"):
        source = source.to_dict()
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        try:
            source = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(source, Mapping):
        raise _invalid("source", source, "a deepseek_v4 configuration: its path, a mapping, or to_dict()")
    return source


def _integer(values, name, default):
    value = values.get(name, default)
    if type(value) is not int:
        raise _invalid(name, value, "an integer")
    return value


def _compress_ratios(values):
    layers = _integer(values, "num_hidden_layers", 43)
    given = values.get("compress_rates")
    if not isinstance(given, Mapping | None):
        raise _invalid("compress_rates", given, f"a mapping from {_CSA} and {_HCA} to integers")
    rates = {_CSA: 4, _HCA: HCA_RATIO, **(given or {})}
    for kind, older in ((_CSA, "compress_rate_csa"), (_HCA, "compress_rate_hca")):
        if values.get(older) is not None:
            rates[kind] = values[older]

    if values.get("layer_types") is not None:
        name, ratio_of = "layer_types", functools.partial(_ratio_of_type, rates=rates)
    elif values.get("compress_ratios") is not None:
        name, ratio_of = "compress_ratios", functools.partial(_ratio_of_older, rates=rates)
    else:
        return tuple(_ratio_of_type(_CSA if i % 2 and i > 2 else _HCA, rates) for i in range(layers))
    entries = values[name]
    # The entries behind the last layer are those of the layers that predict further tokens, which this library has not.
    most = layers + _integer(values, "num_nextn_predict_layers", 1)
    if not isinstance(entries, list | tuple) or not layers <= len(entries) <= most:
        raise _invalid(name, entries, f"a list of num_hidden_layers = {layers} entries, or up to {most}")
    return tuple(ratio_of(entry) for entry in entries[:layers])


def _ratio_of_type(kind, rates):
    if kind == _WINDOW:
        return 0
    if kind not in (_CSA, _HCA):  # whatever the rates name besides
        raise _invalid("layer_types", kind, f"one of {_WINDOW}, {_CSA}, {_HCA}")
    wanted = range(HCA_RATIO, HCA_RATIO + 1) if kind == _HCA else range(2, HCA_RATIO)
    rate = config._integer(f"compress rate of {kind}", rates[kind])
    if rate not in wanted:
        raise _invalid(f"compress rate of {kind}", rate, f"{wanted.start} to {wanted.stop - 1}")
    return rate


def _ratio_of_older(ratio, rates):
    """In transformers 0, 4 and 128 are names of the kinds; other ratios, which it has not, stand for themselves."""
    kinds = {0: _WINDOW, 4: _CSA, HCA_RATIO: _HCA}
    ratio = config._integer("compress_ratios", ratio)
    if ratio in kinds:
        return _ratio_of_type(kinds[ratio], rates)
    if ratio not in range(2, HCA_RATIO):
        raise _invalid("compress_ratios", ratio, f"0, or 2 to {HCA_RATIO}")
    return ratio


def _rope(values):
    """Parameters of the layers without and with a compressor, each with "rope_theta", and the rotary channels."""
    head_dim, share = _integer(values, "head_dim", 512), values.get("partial_rotary_factor")
    rope_dim = _integer(values, "qk_rope_head_dim", head_dim // 8) if share is None else _channels(head_dim, share)
    # transformers prefers the older name where both are given.
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _invalid("rope_parameters", rope, "a mapping")
    nested = [name for name in ("main", "compress") if isinstance(rope.get(name), Mapping)]
    if len(nested) == 1:
        raise _invalid("rope_parameters", rope, "both main and compress, or neither")
    if nested:
        main, compress = rope["main"], rope["compress"]
    else:
        # Not scaled by YaRN's temperature: transformers says so for this spelling alone.
        main, compress = {}, {"attention_factor": 1.0} | {k: v for k, v in rope.items() if k != "rope_theta"}
    thetas = values.get("rope_theta", 10000.0), values.get("compress_rope_theta", 160000.0)
    main, compress = ({"rope_theta": theta} | dict(p) for theta, p in zip(thetas, (main, compress), strict=True))

    kind = _rope_type(main)
    if kind != "default":
        raise _invalid("rope_type of the layers without a compressor", kind, "'default'")
    shares = [p.get("partial_rotary_factor") for p in (main, compress)] if nested else []
    widths = {rope_dim if share is None else _channels(head_dim, share) for share in shares} or {rope_dim}
    if len(widths) > 1:
        raise _invalid("rotary channels of rope_parameters main and compress", sorted(widths), "equal ones")
    return main, compress, widths.pop()


def _channels(head_dim, share):
    if not 0 <= _number("partial_rotary_factor", share) <= 1:
        raise _invalid("partial_rotary_factor", share, "0 to 1")
    return int(head_dim * share)


def _number(name, value):
    """A number to compute with: what is only handed on may be quoted, but transformers cannot compute with that."""
    if isinstance(value, str):
        raise _invalid(name, value, "a finite number")
    return config._number(name, value)


def _rope_type(parameters):
    return parameters.get("rope_type", parameters.get("type", "default"))


def _yarn(parameters):
    kind = _rope_type(parameters)
    if kind == "default":
        return None
    if kind != "yarn":
        raise _invalid("rope_type of the layers with a compressor", kind, "'default' or 'yarn'")
    for name in ("factor", "original_max_position_embeddings"):
        if parameters.get(name) is None:
            raise _invalid(f"rope_parameters {name}", None, "a number: YaRN needs it")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = _default_attention_factor(parameters)
    if attention_factor != 1:
        raise _invalid("attention_factor", attention_factor, "1.0: DeepSeek-V4's rotation preserves norms")
    truncate = parameters.get("truncate", True)
    if not truncate:
        raise _invalid("rope_parameters truncate", truncate, "True: the bounds of YaRN's ramp are whole numbers")
    return {
        "factor": parameters["factor"],
        "original_max_position_embeddings": parameters["original_max_position_embeddings"],
        "beta_fast": parameters.get("beta_fast") or 32.0,
        "beta_slow": parameters.get("beta_slow") or 1.0,
    }


def _default_attention_factor(parameters):
    """The temperature of YaRN (Peng et al. 2023, section 3.4), as transformers fills it in."""
    factor, *mscales = (
        None if parameters.get(name) is None else _number(f"rope_parameters {name}", parameters[name])
        for name in ("factor", "mscale", "mscale_all_dim")
    )

    def temperature(mscale):
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    return temperature(mscales[0]) / temperature(mscales[1]) if all(mscales) else temperature(1)


class HFWeight(NamedTuple):
    """A parameter of a layer, and how Hugging Face holds it.

    Attributes:
      param: the parameter.
      shape: its shape in a state dict.
      to_layer: turns an array of that shape into the parameter's value.
    """

    param: nnx.Param
    shape: tuple[int, ...]
    to_layer: Callable[[np.ndarray], np.ndarray]


def attention_weights(layer: DSv4HybridSelfAttention) -> dict[str, HFWeight]:
    """The parameters of a layer by the names that transformers' `DeepseekV4Attention` has for them."""
    if not isinstance(layer, DSv4HybridSelfAttention):
        raise _invalid("layer", type(layer).__name__, "a DSv4HybridSelfAttention")
    if layer.cfg.gated_attention:
        raise _invalid("gated_attention", True, "False: Hugging Face's layer has no gate")
    core = layer.core_attention
    weights = {
        "q_a_proj.weight": _transposed(layer.q_down.kernel),
        "q_a_norm.weight": _as_is(layer.q_norm.weight),
        "q_b_proj.weight": _transposed(layer.q_up.kernel),
        "kv_proj.weight": _transposed(layer.kv_proj.kernel),
        "kv_norm.weight": _as_is(layer.kv_norm.weight),
        "o_a_proj.weight": _grouped(layer.o_down),
        "o_b_proj.weight": _transposed(layer.o_proj.kernel),
        "sinks": _as_is(core.sink),
    }
    indexer = getattr(core, "indexer", None)
    if core.compressor is not None:
        weights |= _compressor_weights("compressor.", core.compressor)
    if indexer is not None:
        prefix = "compressor.indexer."
        weights |= _compressor_weights(prefix, indexer.compressor)
        weights[f"{prefix}q_b_proj.weight"] = _transposed(indexer.q_proj.kernel)
        weights[f"{prefix}scorer.weights_proj.weight"] = _transposed(indexer.weights_proj.kernel)
    return weights


def _compressor_weights(prefix, compressor):
    # In an overlapping compressor both sides keep what a group gives to the next one in front of its own part.
    return {
        f"{prefix}kv_proj.weight": _transposed(compressor.kv_proj.kernel),
        f"{prefix}gate_proj.weight": _transposed(compressor.gate_proj.kernel),
        f"{prefix}position_bias": _as_is(compressor.ape),
        f"{prefix}kv_norm.weight": _as_is(compressor.norm.weight),
    }


def _as_is(param):
    return HFWeight(param, param.shape, lambda w: w)


def _transposed(param):
    return HFWeight(param, param.shape[::-1], lambda w: w.T)


def _grouped(param):
    groups, width, rank = param.shape
    return HFWeight(param, (groups * rank, width), lambda w: w.reshape(groups, rank, width).swapaxes(1, 2))


def load_hf_attention(
    layer: DSv4HybridSelfAttention, state_dict: Mapping[str, Any] | str | os.PathLike, *, prefix: str = ""
) -> None:
    """Fills a layer with the weights of one of transformers' `DeepseekV4Attention` modules.

    The configuration must be the weights' own, from `DSv4Config.from_hf`. The parameters of the VHA postmix, which
    Hugging Face's layer has not, stay as they are: at their initial values they change nothing. The values are cast to
    the parameters' dtypes and put where the parameters lie.

    Args:
      layer: the layer to fill; one from `nnx.eval_shape` too, which takes no memory before.
      state_dict: arrays by name (NumPy, JAX or torch, at least 16 bits wide); or a path, which needs the package
        safetensors: a `.safetensors` file, or a folder with `model.safetensors.index.json` or `model.safetensors`.
        The names are those of the module in transformers. The files that DeepSeek publishes have other names, and
        quantised weights: save them from transformers, dequantised, first.
      prefix: what the layer's names begin with, such as "model.layers.3.self_attn."; names that do not are ignored.

    Raises:
      TypeError: a name or the prefix that is no string.
      ValueError: weights that are missing, unknown under the prefix, of another shape or not floating point; all of
        them are listed, and the layer is not touched. Or a file that is not what its name says.
      ImportError: a path without the package safetensors.
      OSError: a file that cannot be read.
    """
    weights = attention_weights(layer)
    readers = _readers(state_dict, prefix)
    problems = []
    if missing := [f"{prefix}{name}" for name in weights if name not in readers]:
        problems.append(f"missing {', '.join(missing)}")
    if unknown := [f"{prefix}{name}" for name in readers if name not in weights]:
        problems.append(f"unknown {', '.join(unknown)}")
    values = {}
    for name, weight in weights.items():
        if name not in readers:
            continue
        try:
            value = readers[name]()
        except ValueError as error:
            problems.append(f"{prefix}{name}: {error}")
            continue
        if value.shape != weight.shape:
            problems.append(f"{prefix}{name}: got shape {value.shape}, wanted {weight.shape}")
        values[name] = value
    if problems:
        raise ValueError("state_dict: " + "; ".join(problems))

    for name, (param, _, to_layer) in weights.items():
        old = param.get_value()
        param.set_value(jax.device_put(to_layer(values[name]).astype(old.dtype), old.sharding))


def _readers(state_dict, prefix):
    """By name without the prefix: a function that returns the array, and raises ValueError if it is no weight."""
    if not isinstance(prefix, str):
        raise TypeError(f"prefix: got {prefix!r}, wanted a string")
    if isinstance(state_dict, Mapping):
        if odd := [name for name in state_dict if not isinstance(name, str)]:
            raise TypeError(f"state_dict: got keys {', '.join(map(repr, odd))}, wanted strings")
        named = {name: functools.partial(_to_numpy, value) for name, value in state_dict.items()}
    elif isinstance(state_dict, str | os.PathLike):
        named = {}
        for file in _files(Path(state_dict), prefix):
            named |= {name: functools.partial(_read, file, name) for name in file.keys()}
    else:
        raise _invalid("state_dict", state_dict, "a mapping from names to arrays, or a path")
    return {name.removeprefix(prefix): reader for name, reader in named.items() if name.startswith(prefix)}


def _files(path, prefix):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        message = f"{path}: reading it needs the package safetensors: pip install safetensors"
        raise ImportError(message) from error
    folder, paths, files = path, [path], []
    try:
        if folder.is_dir():
            paths = [folder / "model.safetensors"]
            path = folder / "model.safetensors.index.json"
            if path.exists():
                weight_map = _weight_map(json.loads(path.read_text(encoding="utf-8")))
                paths = sorted({folder / file for name, file in weight_map.items() if name.startswith(prefix)})
        for path in paths:
            files.append(safe_open(path, framework="numpy"))
    except (ValueError, SafetensorError) as error:  # neither says which file it is about
        raise ValueError(f"{path}: {error}") from error
    return files


def _weight_map(index):
    weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weight_map, Mapping):
        raise _invalid("weight_map", weight_map, "a mapping from names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise _invalid(f"weight_map {name}", file, "the name of a file")
    return weight_map


def _read(file, name):
    dtype = file.get_slice(name).get_dtype()
    if dtype not in ("F64", "F32", "F16", "BF16"):  # NumPy has no name for some others
        raise _unfit(dtype)
    return file.get_tensor(name)


def _to_numpy(value):
    if hasattr(value, "detach"):  # torch, whose bfloat16 NumPy does not know
        if not value.is_floating_point() or value.element_size() < 2:
            raise _unfit(value.dtype)
        return value.detach().cpu().float().numpy()
    value = np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize < 2:
        raise _unfit(value.dtype)
    return value


def _unfit(dtype):
    return ValueError(f"got dtype {dtype}, wanted bfloat16, float16, float32 or float64")


def _invalid(name, value, wanted):
    return ValueError(f"{name}: got {value!r}, wanted {wanted}")
