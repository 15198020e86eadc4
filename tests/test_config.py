import copy
import dataclasses
import pickle
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_fusions.config import DSv4Config, TrainConfig, load_yaml

CONFIGS = Path(__file__).parent.parent / "configs"


def test_defaults_are_v4_flash():
    cfg = DSv4Config()
    assert (cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim, cfg.qk_rope_head_dim) == (4096, 64, 512, 64)
    assert len(cfg.compress_ratios) == 43 and cfg.compress_ratios[:6] == (0, 0, 4, 128, 4, 128)
    assert (cfg.fuse_inv_rope, cfg.fuse_kv_index_remap, cfg.postmix_backward) == (False, False, "dot_general")


def test_every_field_is_described():
    described = re.findall(r"^      (\w+): ", DSv4Config.__doc__, re.MULTILINE)
    assert described == [field.name for field in dataclasses.fields(DSv4Config)] + ["ValueError"]


def test_remat_is_a_set_of_segments():
    assert DSv4Config(remat=["vha_postmix", "qkv", "qkv"]).remat == ("qkv", "vha_postmix")
    assert DSv4Config(remat="full_attn").remat == ("full_attn",) and DSv4Config().remat == ()


def test_which_layers_have_an_indexer():
    ratios = (-2, -1, 0, 2, 127, 128)
    for phase, wanted in (("sparse", [-2, 2, 127]), ("warm_up", [-2, 2, 127]), ("dense", [])):
        cfg = DSv4Config(num_hidden_layers=6, compress_ratios=ratios, indexer_phase=phase)
        assert [ratio for ratio in ratios if cfg.has_indexer(ratio)] == wanted
    no_indexer = dict(num_hidden_layers=1, compress_ratios=(128,), index_head_dim=24)
    assert DSv4Config(**no_indexer).index_head_dim == 24


def test_layer_rope_follows_the_compress_ratio():
    cfg = DSv4Config(num_hidden_layers=5, compress_ratios=[-2, -1, 0, 4, 128])
    assert [cfg.layer_rope(i) for i in range(3)] == [(10000.0, None)] * 3
    yarn = {"factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32.0, "beta_slow": 1.0}
    assert [cfg.layer_rope(i) for i in (3, 4)] == [(160000.0, yarn)] * 2


def test_is_frozen_hashable_and_survives_copies():
    cfg = DSv4Config(num_hidden_layers=2, compress_ratios=[0, 128], yarn={"factor": 4})
    same = DSv4Config(num_hidden_layers=2, compress_ratios=(0, 128), yarn={"factor": 4})
    assert cfg == same and hash(cfg) == hash(same) and {cfg: 1}[same] == 1
    assert pickle.loads(pickle.dumps(cfg)) == cfg == copy.deepcopy(cfg)
    assert hash(dataclasses.replace(cfg, yarn=None)) != hash(cfg)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.head_dim = 3


def test_values_are_normalised():
    # PaddleFleet's configurations carry the compressed layers' base as a string; YAML reads 1e-6 as one.
    cfg = DSv4Config(compress_rope_theta="160000.0", rms_norm_eps="1e-6", rope_theta=10000, head_dim=np.int64(512))
    assert (cfg.compress_rope_theta, cfg.rms_norm_eps, cfg.rope_theta) == (160000.0, 1e-6, 10000.0)
    assert type(cfg.rope_theta) is float and type(cfg.head_dim) is int
    assert DSv4Config(dtype=jnp.bfloat16, param_dtype=np.float32).dtype == "bfloat16"


@pytest.mark.parametrize(
    "heads, rank, wanted", [(64, None, 16), (3, None, 1), (8, 8, 8)], ids=["quarter", "at_least_one", "given"]
)
def test_postmix_rank(heads, rank, wanted):
    assert DSv4Config(num_attention_heads=heads, o_groups=1, vha_rank=rank).postmix_rank == wanted


@pytest.mark.parametrize(
    "values, message",
    [
        ({"hidden_size": 0}, "hidden_size: got 0"),
        ({"hidden_size": True}, "hidden_size: got True, wanted an integer"),
        ({"hidden_size": 4096.0}, "hidden_size: got 4096.0"),
        ({"use_vha_attention": 1}, "use_vha_attention: got 1"),
        ({"fuse_inv_rope": "yes"}, "fuse_inv_rope: got 'yes'"),
        ({"rope_theta": "ten"}, "rope_theta: got 'ten'"),
        ({"rope_theta": 1.0}, "rope_theta: got 1.0"),
        ({"rope_theta": float("inf")}, "rope_theta: got inf"),
        ({"rope_theta": True}, "rope_theta: got True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: got 0"),
        ({"indexer_loss_coeff": -1}, "indexer_loss_coeff: got -1"),
        ({"indexer_phase": "cold"}, "indexer_phase: got 'cold'.*'dense', 'warm_up', 'sparse'"),
        ({"index_head_dim": 96}, "index_head_dim: got 96, wanted a power of two"),
        ({"remat": True}, "remat: got True, wanted a list of segments.*full_attn"),
        ({"remat": ["qkv", "mlp"]}, r"remat: got \['qkv', 'mlp'\]"),
        ({"remat": [["qkv"]]}, "remat: got"),
        ({"v_head_dim": 0}, "v_head_dim: got 0"),
        ({"compress_ratios": [0]}, "num_hidden_layers = 43"),
        ({"compress_ratios": 0}, "compress_ratios: got 0"),
        ({"compress_ratios": [0] * 42 + [1]}, r"compress_ratios\[42\]: got 1"),
        ({"compress_ratios": [129] + [0] * 42}, r"compress_ratios\[0\]: got 129"),
        ({"compress_ratios": [-3] + [0] * 42}, r"compress_ratios\[0\]: got -3"),
        ({"compress_ratios": [False] + [0] * 42}, r"compress_ratios\[0\]: got False"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: got 63"),
        ({"qk_rope_head_dim": 514}, "qk_rope_head_dim: got 514.*head_dim = 512"),
        ({"qk_rope_head_dim": 256}, "index_head_dim: got 128.*qk_rope_head_dim = 256"),
        ({"o_groups": 7}, "o_groups: got 7.*num_attention_heads = 64"),
        ({"vha_rank": 0}, "vha_rank: got 0"),
        ({"vha_rank": 65}, "vha_rank: got 65.*num_attention_heads = 64"),
        ({"vha_postmix_grouped": True, "use_vha_attention": False}, "vha_postmix_grouped.*use_vha_attention"),
        ({"yarn": 16}, "yarn: got 16"),
        ({"yarn": {"factor": 16, "mscale": 1}}, "yarn: got unknown 'mscale'.*beta_slow"),
        ({"yarn": {"factor": 0.5}}, "yarn.factor: got 0.5"),
        ({"yarn": {"original_max_position_embeddings": 0}}, "yarn.original_max_position_embeddings: got 0"),
        ({"yarn": {"beta_slow": 33}}, "yarn.beta_slow: got 33.0.*beta_fast = 32"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"param_dtype": 7}, "param_dtype: got 7"),
        ({"rope_rounding": "twice"}, "rope_rounding: got 'twice'.*each_product"),
        ({"sparse_attention_backend": "cudnn"}, "sparse_attention_backend: got 'cudnn'.*flat"),
        ({"postmix_backward": None}, "postmix_backward: got None"),
        ({"implementation": "cuda"}, "implementation: got 'cuda'.*triton"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_impossible_values_name_field_and_value(values, message):
    with pytest.raises(ValueError, match=message):
        DSv4Config(**values)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"steps": 10, "warmup_steps": 10}, "warmup_steps: got 10.*steps = 10"),
        ({"learning_rate": 0}, "learning_rate: got 0"),
        ({"adam_b2": 1}, "adam_b2: got 1"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_impossible_training_values_name_field_and_value(values, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize("name", [path.name for path in sorted(CONFIGS.glob("*.yaml"))])
def test_shipped_configurations_load(name):
    cfg, config = load_yaml(CONFIGS / name)
    assert cfg == DSv4Config.from_yaml(CONFIGS / name)
    assert cfg.fuse_inv_rope and cfg.fuse_kv_index_remap and cfg.use_vha_attention
    assert config.sequence_length >= 256  # at least two compressed slots of 128 tokens


@pytest.mark.parametrize(
    "content, message",
    [
        ("model: {hidden_sise: 3}", "model: got unknown 'hidden_sise'.*hidden_size"),
        ("model: {}\ntrain: {epochs: 3}", "train: got unknown 'epochs'.*steps"),
        ("model: {}\noptimizer: {}", "top level: got unknown 'optimizer'.*model, train"),
        ("train: {}", "wanted the top-level key model"),
        ("", "wanted the top-level key model"),
        ("model: [1]", "model: got"),
        ("model: {hidden_size: 0}", "hidden_size: got 0"),
        ("model: {", "not valid YAML"),
    ],
)
def test_bad_files_raise_with_the_path(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_yaml(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_missing_sections_take_the_defaults(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model:\ntrain:\n")
    assert load_yaml(path) == (DSv4Config(), TrainConfig())
