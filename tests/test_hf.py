"""Hugging Face's configurations and weights; tests/test_hf_parity.py compares what the layers compute."""

import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dsv4_fusions import DSv4Config, DSv4HybridSelfAttention
from dsv4_fusions.hf import attention_weights, load_hf_attention
from tools import make_hf_fixtures as hf

# What DeepSeek publishes with V4-Flash, but for what is only about experts, hyper-connections and quantisation.
FLASH = dict(
    model_type="deepseek_v4",
    attention_bias=False,
    attention_dropout=0.0,
    compress_ratios=[0, 0] + [4, 128] * 20 + [4, 0],
    compress_rope_theta=160000,
    head_dim=512,
    hidden_size=4096,
    index_head_dim=128,
    index_n_heads=64,
    index_topk=512,
    max_position_embeddings=1048576,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    num_attention_heads=64,
    num_experts_per_tok=6,
    num_hidden_layers=43,
    num_key_value_heads=1,
    num_nextn_predict_layers=1,
    o_groups=8,
    o_lora_rank=1024,
    q_lora_rank=1024,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-06,
    rope_scaling=dict(beta_fast=32, beta_slow=1, factor=16, original_max_position_embeddings=65536, type="yarn"),
    rope_theta=10000,
    sliding_window=128,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    vocab_size=129280,
)
OURS = DSv4Config(use_vha_attention=False, rope_rounding="once", intermediate_size=7 * 2048)

WINDOW, CSA, HCA = hf.CONFIG["layer_types"]
YARN = FLASH["rope_scaling"] | dict(rope_type="yarn", attention_factor=1.0)


def newer(source):
    """The same in transformers' newer spelling."""
    older = ("compress_ratios", "rope_scaling", "qk_rope_head_dim", "rope_theta", "compress_rope_theta")
    kinds = {0: WINDOW, 4: CSA, 128: HCA}
    share = source["qk_rope_head_dim"] / source["head_dim"]
    return {name: value for name, value in source.items() if name not in older} | dict(
        layer_types=[kinds[ratio] for ratio in source["compress_ratios"][: source["num_hidden_layers"]]],
        compress_rates={CSA: 4, HCA: 128},
        partial_rotary_factor=share,
        rope_parameters=dict(
            main=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=share),
            compress=YARN | dict(rope_theta=160000.0, partial_rotary_factor=share),
        ),
    )


def with_yarn(**changes):
    return {"rope_scaling": FLASH["rope_scaling"] | changes}


def nested(main=None, **compress):
    return {"rope_scaling": None, "rope_parameters": dict(main=main or {}, compress=YARN | compress)}


def test_published_values_of_v4_flash():
    assert DSv4Config.from_hf(FLASH) == OURS


def test_both_spellings_are_equal():
    assert DSv4Config.from_hf(newer(FLASH)) == OURS


def test_what_transformers_makes_of_it_is_equal():
    transformers = pytest.importorskip("transformers", reason="needs transformers 5.17 or newer")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"needs transformers 5.17 or newer, and this is {transformers.__version__}")
    assert DSv4Config.from_hf(transformers.DeepseekV4Config(**json.loads(json.dumps(FLASH)))) == OURS
    assert DSv4Config.from_hf(transformers.DeepseekV4Config()) == DSv4Config.from_hf({})


def test_what_is_left_out_has_transformers_defaults():
    assert DSv4Config.from_hf(dict(head_dim=128)).qk_rope_head_dim == 16
    # Its own schedule starts with two HCA layers, and without scaling parameters no layer has YaRN.
    assert DSv4Config.from_hf({}) == DSv4Config.from_hf(
        FLASH | dict(compress_ratios=[128, 128] + [128, 4] * 20 + [128], rope_scaling=None)
    )


def test_sources(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLASH))

    class Config:
        def to_dict(self):
            return FLASH

    for source in (path, str(path), tmp_path, Config()):
        assert DSv4Config.from_hf(source) == OURS


def test_overrides():
    cfg = DSv4Config.from_hf(FLASH, dtype="float32", use_vha_attention=True)
    assert (cfg.dtype, cfg.use_vha_attention, cfg.head_dim) == ("float32", True, 512)
    with pytest.raises(ValueError, match="unknown 'window'"):
        DSv4Config.from_hf(FLASH, window=3)


@pytest.mark.parametrize(
    "changes, ratios",
    [
        (dict(compress_ratios=[0, 4, 128]), (0, 4, 128)),
        (dict(compress_ratios=[0, 4, 128, 0]), (0, 4, 128)),
        (dict(compress_ratios=[2, 127, 0]), (2, 127, 0)),
        (dict(compress_ratios=[0, 4, 2], compress_rate_csa=8, compress_rate_hca=128), (0, 8, 2)),
        (dict(layer_types=[HCA, WINDOW, CSA], compress_rates={CSA: 16, HCA: 128}), (128, 0, 16)),
        (dict(layer_types=[CSA, CSA, HCA, WINDOW], compress_rates=None), (4, 4, 128)),
        # As in transformers, the newer name wins.
        (dict(layer_types=[WINDOW] * 3, compress_ratios=[4] * 3), (0, 0, 0)),
    ],
)
def test_compress_ratios(changes, ratios):
    source = {name: value for name, value in FLASH.items() if name != "compress_ratios"}
    assert DSv4Config.from_hf(source | changes | {"num_hidden_layers": 3}).compress_ratios == ratios


@pytest.mark.parametrize(
    "changes, field, value",
    [
        (dict(qk_rope_head_dim=32), "qk_rope_head_dim", 32),
        (dict(partial_rotary_factor=0.25), "qk_rope_head_dim", 128),
        (dict(rope_theta="20000"), "rope_theta", 20000.0),
        (dict(rope_scaling=None), "yarn", None),
        (dict(rope_scaling=None, rope_parameters=FLASH["rope_scaling"]), "yarn", OURS.yarn),
        (dict(rope_parameters=dict(main={}, compress={}), rope_scaling=None), "compress_rope_theta", 160000.0),
        (nested(main=dict(partial_rotary_factor=0.25), partial_rotary_factor=0.25), "qk_rope_head_dim", 128),
        (nested(main=dict(rope_theta=500.0)), "rope_theta", 500.0),
        (nested(rope_theta=500.0), "compress_rope_theta", 500.0),
        (nested(rope_type="default"), "yarn", None),
        # The temperature that transformers fills in is 1.
        (nested(attention_factor=None, mscale=0.7, mscale_all_dim=0.7), "yarn", OURS.yarn),
        (nested(attention_factor=None, factor=1.0), "yarn", OURS.yarn.copy({"factor": 1.0})),
        (with_yarn(beta_fast=None, beta_slow=None), "yarn", OURS.yarn),
        (with_yarn(mscale=0.7, mscale_all_dim=0.3), "yarn", OURS.yarn),
    ],
)
def test_rotation(changes, field, value):
    assert getattr(DSv4Config.from_hf(FLASH | changes), field) == value


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="deepseek_v3"), "model_type: got 'deepseek_v3', wanted 'deepseek_v4'"),
        (dict(num_key_value_heads=2), "num_key_value_heads: got 2, wanted 1"),
        (dict(attention_bias=True), "attention_bias: got True, wanted False"),
        (dict(attention_dropout=0.1), "attention_dropout: got 0.1, wanted 0.0"),
        (dict(num_hidden_layers=None), "num_hidden_layers: got None, wanted an integer"),
        (dict(head_dim="512"), "head_dim: got '512'"),
        (dict(hidden_size=0), "hidden_size: got 0"),
        (dict(compress_ratios=[0] * 42), "compress_ratios: got .* num_hidden_layers = 43 entries, or up to 44"),
        (dict(compress_ratios=[0] * 45), "compress_ratios: got .* or up to 44"),
        (dict(compress_ratios=4), "compress_ratios: got 4, wanted a list"),
        (dict(compress_ratios=[1] * 43), "compress_ratios: got 1, wanted 0, or 2 to 128"),
        (dict(compress_ratios=[-1] * 43), "compress_ratios: got -1"),
        (dict(compress_ratios=["4"] * 43), "compress_ratios: got '4'"),
        (dict(compress_ratios=[[4]] * 43), r"compress_ratios: got \[4\], wanted an integer"),
        (dict(compress_ratios=[False] * 43), "compress_ratios: got False, wanted an integer"),
        (dict(compress_ratios=[4.0] * 43), "compress_ratios: got 4.0, wanted an integer"),
        (dict(layer_types=["full_attention"] * 43), "layer_types: got 'full_attention', wanted one of sliding_att"),
        (dict(layer_types=[[CSA]] * 43), r"layer_types: got \['compressed_sparse_attention'\], wanted one of"),
        (dict(layer_types=["foo"] * 43, compress_rates={"foo": 7}), "layer_types: got 'foo', wanted one of"),
        (dict(layer_types=[WINDOW] * 42), "layer_types: got .* num_hidden_layers = 43"),
        (dict(compress_rate_hca=64), "heavily_compressed_attention: got 64, wanted 128"),
        (dict(compress_rates={CSA: 128}), "compressed_sparse_attention: got 128, wanted 2 to 127"),
        (dict(compress_rates={CSA: [4]}), r"compressed_sparse_attention: got \[4\], wanted an integer"),
        (dict(compress_rate_csa=4.0), "compressed_sparse_attention: got 4.0, wanted an integer"),
        *((dict(compress_rates=x), "compress_rates: got .*, wanted a mapping") for x in ([4, 128], "4", 4, [], False)),
        (dict(partial_rotary_factor="0.125"), "partial_rotary_factor: got '0.125', wanted a finite number"),
        (dict(partial_rotary_factor=[0.1]), r"partial_rotary_factor: got \[0.1\]"),
        (dict(partial_rotary_factor=float("nan")), "partial_rotary_factor: got nan"),
        (dict(partial_rotary_factor=1e308), r"partial_rotary_factor: got 1e\+308, wanted 0 to 1"),
        (nested(partial_rotary_factor="0.125"), "partial_rotary_factor: got '0.125'"),
        (with_yarn(type="linear"), "rope_type of the layers with a compressor: got 'linear'"),
        (with_yarn(factor=None), "factor: got None"),
        (with_yarn(original_max_position_embeddings=None), "original_max_position_embeddings: got None"),
        (with_yarn(attention_factor=1.2), "attention_factor: got 1.2, wanted 1.0"),
        (with_yarn(truncate=False), "truncate: got False"),
        (with_yarn(truncate=None), "truncate: got None, wanted True"),
        (dict(rope_scaling="yarn"), "rope_parameters: got 'yarn', wanted a mapping"),
        # Not given, it is not 1 but YaRN's own: 0.1 ln 16 + 1.
        (nested(attention_factor=None), "attention_factor: got 1.277"),
        (nested(attention_factor=None, mscale=0.7, mscale_all_dim=0.3), "attention_factor: got 1.10"),
        (nested(attention_factor=None, factor="16"), "rope_parameters factor: got '16', wanted a finite number"),
        (nested(attention_factor=None, factor=[]), r"rope_parameters factor: got \[\]"),
        (nested(attention_factor=None, mscale="0.7"), "rope_parameters mscale: got '0.7'"),
        (nested(attention_factor=None, mscale=0.7, mscale_all_dim="0.7"), "rope_parameters mscale_all_dim: got '0.7'"),
        (nested(main=dict(rope_type="yarn")), "without a compressor: got 'yarn', wanted 'default'"),
        (nested(partial_rotary_factor=0.25), r"rotary channels .* got \[64, 128\], wanted equal ones"),
        (dict(rope_scaling=None, rope_parameters=dict(main={})), "rope_parameters: got .* wanted both"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        DSv4Config.from_hf(FLASH | changes)


def test_source_errors(tmp_path):
    with pytest.raises(ValueError, match="source: got 3, wanted a deepseek_v4 configuration"):
        DSv4Config.from_hf(3)
    with pytest.raises(FileNotFoundError, match="config.json"):
        DSv4Config.from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        DSv4Config.from_hf(tmp_path)


PREFIX = "model.layers.1.self_attn."


@pytest.fixture(scope="module")
def weights():
    case, _ = hf.read_fixture("csa")["float32", 1]
    return {f"{PREFIX}{name}": w for name, w in case.weights.items()}


@pytest.fixture
def layer():
    return DSv4HybridSelfAttention(DSv4Config.from_hf(hf.CONFIG, dtype="float32"), 1, rngs=nnx.Rngs(0))


def parameters(layer):
    return {str(path): np.asarray(param[...]) for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param))}


def assert_holds(layer, weights):
    held = attention_weights(layer)
    assert len(held) == len(parameters(layer)) == len(weights)
    for name, (param, shape, to_layer) in held.items():
        w = weights[f"{PREFIX}{name}"]
        assert w.shape == shape
        np.testing.assert_array_equal(param[...], to_layer(w), err_msg=name)


def test_load(layer, weights):
    load_hf_attention(layer, weights | {"model.layers.11.self_attn.sinks": np.ones(3)}, prefix=PREFIX)
    assert_holds(layer, weights)
    bare = {name.removeprefix(PREFIX): w for name, w in weights.items()}
    np.testing.assert_array_equal(layer.q_down.kernel[...], bare["q_a_proj.weight"].T)
    # Group by group: output r of group g is row g * rank + r.
    rank = layer.cfg.o_lora_rank
    np.testing.assert_array_equal(layer.o_down[1][:, 3], bare["o_a_proj.weight"][rank + 3])
    changed = {name: w + 1 for name, w in bare.items()}
    load_hf_attention(layer, changed)
    assert_holds(layer, {f"{PREFIX}{name}": w for name, w in changed.items()})


def test_load_casts_to_the_parameters(weights):
    cfg = DSv4Config.from_hf(hf.CONFIG, param_dtype="bfloat16")
    layer = DSv4HybridSelfAttention(cfg, 1, rngs=nnx.Rngs(0))
    dtypes = {name: p.dtype for name, p in parameters(layer).items()}
    arrays = [jnp.float16, jnp.bfloat16, np.float64]
    mixed = {
        n: jnp.asarray(w, arrays[i % 3]) if i % 3 < 2 else np.float64(w) for i, (n, w) in enumerate(weights.items())
    }
    load_hf_attention(layer, mixed, prefix=PREFIX)
    assert {name: p.dtype for name, p in parameters(layer).items()} == dtypes
    assert dtypes["('core_attention', 'sink')"] == jnp.float32
    np.testing.assert_allclose(layer.q_up.kernel[...], weights[f"{PREFIX}q_b_proj.weight"].T, rtol=2**-8)


def test_load_into_a_layer_without_values(weights):
    cfg = DSv4Config.from_hf(hf.CONFIG, dtype="float32")
    layer = nnx.eval_shape(lambda: DSv4HybridSelfAttention(cfg, 1, rngs=nnx.Rngs(0)))
    load_hf_attention(layer, weights, prefix=PREFIX)
    assert_holds(layer, weights)


def test_load_keeps_the_sharding(layer, weights, mesh4):
    sharding = jax.NamedSharding(mesh4, jax.P(None, "data"))
    layer.q_up.kernel[...] = jax.device_put(layer.q_up.kernel[...], sharding)
    load_hf_attention(layer, weights, prefix=PREFIX)
    assert layer.q_up.kernel[...].sharding == sharding
    assert_holds(layer, weights)


def test_load_takes_torch_tensors(layer, weights):
    torch = pytest.importorskip("torch", reason="needs torch")
    tensors = {name: torch.nn.Parameter(torch.tensor(w).bfloat16()) for name, w in weights.items()}
    load_hf_attention(layer, tensors, prefix=PREFIX)
    assert_holds(layer, weights)
    tensors[f"{PREFIX}sinks"] = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="sinks: got dtype torch.int32, wanted bfloat16"):
        load_hf_attention(layer, tensors, prefix=PREFIX)


def test_the_postmix_stays_as_it_is(weights):
    cfg = DSv4Config.from_hf(hf.CONFIG, use_vha_attention=True, dtype="float32")
    layer = DSv4HybridSelfAttention(cfg, 1, rngs=nnx.Rngs(0))
    u = np.asarray(layer.postmix_u[...])
    load_hf_attention(layer, weights, prefix=PREFIX)
    np.testing.assert_array_equal(layer.postmix_u[...], u)
    np.testing.assert_array_equal(layer.postmix_v[...], 0)


def test_load_lists_every_problem_and_touches_nothing(layer, weights):
    before = parameters(layer)
    wrong = dict(weights)
    del wrong[f"{PREFIX}sinks"], wrong[f"{PREFIX}compressor.kv_norm.weight"]
    wrong[f"{PREFIX}q_a_proj.weight"] = np.zeros((16, 12), np.float32)
    wrong[f"{PREFIX}q_b_proj.weight_scale_inv"] = np.zeros(1, np.float32)
    wrong[f"{PREFIX}q_b_proj.weight"] = np.zeros((64, 12), ml_dtypes.float8_e4m3fn)
    wrong[f"{PREFIX}kv_norm.weight"] = np.zeros(16, np.int32)
    with pytest.raises(ValueError) as raised:
        load_hf_attention(layer, wrong, prefix=PREFIX)
    message = str(raised.value)
    for part in (
        f"state_dict: missing {PREFIX}sinks, {PREFIX}compressor.kv_norm.weight;",
        f"unknown {PREFIX}q_b_proj.weight_scale_inv;",
        f"{PREFIX}q_a_proj.weight: got shape (16, 12), wanted (12, 16)",
        f"{PREFIX}q_b_proj.weight: got dtype float8_e4m3fn, wanted bfloat16, float16, float32 or float64",
        f"{PREFIX}kv_norm.weight: got dtype int32",
    ):
        assert part in message
    after = parameters(layer)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_load_refuses_another_kind_of_layer(weights):
    window = DSv4HybridSelfAttention(DSv4Config.from_hf(hf.CONFIG), 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=f"unknown {PREFIX}compressor.position_bias"):
        load_hf_attention(window, weights, prefix=PREFIX)
    gated = DSv4HybridSelfAttention(DSv4Config.from_hf(hf.CONFIG, gated_attention=True), 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="gated_attention: got True, wanted False"):
        load_hf_attention(gated, weights, prefix=PREFIX)
    with pytest.raises(ValueError, match="layer: got 'Compressor', wanted a DSv4HybridSelfAttention"):
        load_hf_attention(gated.core_attention.compressor, weights, prefix=PREFIX)
    with pytest.raises(ValueError, match="state_dict: got 3, wanted a mapping"):
        load_hf_attention(window, 3)


def test_load_from_safetensors(layer, weights, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    half = {name: w.astype(ml_dtypes.bfloat16) for name, w in weights.items()}
    names = sorted(half)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2], "model.safetensors": names}
    for file, part in parts.items():
        safetensors.save_file({name: half[name] for name in part}, tmp_path / file)

    load_hf_attention(layer, tmp_path / "model.safetensors", prefix=PREFIX)
    assert_holds(layer, weights)
    for in_folder in ("model.safetensors", "index"):
        if in_folder == "index":
            (tmp_path / "model.safetensors").unlink()
            # Files without a weight of the layer are not opened: this one does not exist.
            placed = {"model.embed_tokens.weight": "c.safetensors"}
            placed |= {name: file for file, part in parts.items() if file != "model.safetensors" for name in part}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
        layer.core_attention.sink[...] = jnp.zeros(4)
        load_hf_attention(layer, str(tmp_path), prefix=PREFIX)
        assert_holds(layer, weights)


@pytest.mark.parametrize(
    "state_dict, prefix, message",
    [
        ({3: np.ones(1), "a": np.ones(1)}, "", "state_dict: got keys 3, wanted strings"),
        ({}, None, "prefix: got None, wanted a string"),
        ("model.safetensors", b"model.", "prefix: got b'model.', wanted a string"),
    ],
)
def test_names_are_strings(layer, state_dict, prefix, message):
    with pytest.raises(TypeError, match=message):
        load_hf_attention(layer, state_dict, prefix=prefix)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("model.safetensors", "no weights", "header"),
        ("model.safetensors", "", "header"),
        ("model.safetensors.index.json", "{}", "weight_map: got None, wanted a mapping from names to files"),
        ("model.safetensors.index.json", "[]", "weight_map: got None"),
        ("model.safetensors.index.json", '{"weight_map": []}', r"weight_map: got \[\]"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}', "weight_map a: got 3, wanted the name of a file"),
        ("model.safetensors.index.json", "{", "Expecting property name"),
        ("model.safetensors.index.json", "\xff", "codec can't decode"),
    ],
)
def test_broken_files_are_named(layer, tmp_path, file, content, message):
    pytest.importorskip("safetensors")
    path = tmp_path / file
    path.write_bytes(content.encode("latin1"))
    with pytest.raises(ValueError, match=f"^{path}: .*{message}"):
        load_hf_attention(layer, tmp_path)


def test_a_broken_part_is_named(layer, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"sinks": "a.safetensors"}}')
    with pytest.raises(FileNotFoundError, match="a.safetensors"):
        load_hf_attention(layer, tmp_path)
    (tmp_path / "a.safetensors").write_text("no weights")
    with pytest.raises(ValueError, match=f"^{tmp_path}/a.safetensors: "):
        load_hf_attention(layer, tmp_path)


def test_safetensors_with_a_dtype_that_is_no_weight(layer, weights, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "fp8.safetensors"
    name = f"{PREFIX}q_b_proj.weight"
    safetensors.save_file(weights | {name: weights[name].astype(ml_dtypes.float8_e4m3fn)}, path)
    with pytest.raises(ValueError, match="state_dict: .*q_b_proj.weight: got dtype F8_E4M3, wanted bfloat16"):
        load_hf_attention(layer, path, prefix=PREFIX)


def test_a_path_without_safetensors(layer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"needs the package safetensors: pip install safetensors"):
        load_hf_attention(layer, tmp_path)
