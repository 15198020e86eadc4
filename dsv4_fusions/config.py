"""Model and training configurations: frozen, hashable, checked when they are made, read from YAML."""

import dataclasses
import math
import operator
import os
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from flax.core import FrozenDict

from dsv4_fusions.dispatch import IMPLEMENTATIONS
from dsv4_fusions.ops.inv_rope_postmix import BACKWARDS
from dsv4_fusions.ops.sparse_attention import BACKENDS
from dsv4_fusions.rope import DTYPES, ROUNDINGS, YARN_DEFAULTS

LATENT_RATIO = -2  # layers of absorbed latent attention
RATIOS_WITHOUT_COMPRESSOR = (LATENT_RATIO, -1, 0)
HCA_RATIO = 128  # the ratio whose layers attend to every complete compressed slot, without an indexer
INDEXER_PHASES = ("dense", "warm_up", "sparse")
REMAT_SEGMENTS = ("full_attn", "qkv", "post_core", "vha_postmix", "gated_attn")


@dataclasses.dataclass(frozen=True)
class DSv4Config:
    """Shapes and numerics of a DeepSeek-V4-style hybrid attention model; the defaults are DeepSeek-V4-Flash's.

    Two defaults are this project's own: the VHA postmix is on (V4-Flash has none; the fusion of the inverse rotation
    lives in it), and `intermediate_size` is that of a dense SwiGLU block (V4-Flash has a mixture of experts there).

    Names are Hugging Face's where it has one. Lists become tuples and `yarn` a frozen mapping, so an instance is
    hashable and can be a static argument. The four switches at the end are defaults, which a layer's own arguments
    override.

    Attributes:
      hidden_size: channels of the residual stream.
      num_hidden_layers: number of layers.
      num_attention_heads: query heads.
      head_dim: channels of a query head, and of the one key/value row per token.
      qk_rope_head_dim: how many of `head_dim`, at its end, are rotated; even, 0 for no rotation.
      q_lora_rank: width of the bottleneck between the hidden state and the queries.
      kv_lora_rank: width of the latent value row of layers with ratio -2, whose keys have `qk_rope_head_dim` more.
      qk_nope_head_dim: unrotated channels of a query head before absorption, in layers with ratio -2.
      v_head_dim: channels of a value head behind the latent row, in layers with ratio -2.
      o_groups: groups of heads in the output projection, and in the grouped postmix; a divisor of the heads.
      o_lora_rank: width to which the output projection reduces each group before it joins them.
      sliding_window: tokens that a token attends to directly, itself included, in layers with ratio 0 or more.
      compress_ratios: one entry a layer. -2: absorbed latent attention (`MQALatentAttention`), -1: full causal
        attention, 0: window only, 2 to 127: window and the rows of an overlapping compressor that an indexer selects
        (CSA), 128: window and every complete row of a non-overlapping compressor (HCA).
      rope_theta: rotary base of the layers without a compressor.
      compress_rope_theta: rotary base of the layers with one.
      yarn: as `rope_tables` takes it, or None for plain frequencies. Used by the layers with a compressor; the others
        rotate with `rope_theta` alone.
      index_n_heads: query heads of the indexer.
      index_head_dim: channels of an indexer's head, a power of two and at least `qk_rope_head_dim`.
      index_topk: rows that the indexer selects for a token.
      indexer_loss_coeff: weight of the indexer's auxiliary loss, 0 for none.
      indexer_phase: of the layers with ratio -2 and 2 to 127. "sparse": a token attends to its window and the rows that
        the indexer selects, which is trained on them. "warm_up": a token attends to all rows, the indexer is trained on
        all and selects nothing. "dense": no indexer; CSA attends to every complete compressed row, the latent layers
        to every token before.
      rms_norm_eps: what every RMS normalisation adds to the mean square.
      use_vha_attention: whether the heads are mixed by the VHA postmix behind the inverse rotation.
      vha_rank: rank of the postmix's low-rank part; None means a quarter of the heads (see `postmix_rank`).
      vha_postmix_grouped: mix heads within each of `o_groups` groups rather than over all of them.
      gated_attention: whether the reduced output is multiplied by sigmoid of a projection of the layer's input.
      rope_rounding: where the rotation rounds, "each_product" or "once", as `rope_tables` takes it.
      sparse_attention_backend: "flat" reads rows by ids of the whole batch, "batched" by ids of a batch entry, in the
        same kernel; "structured" needs no ids where no indexer selects rows, and is "batched" elsewhere; "xla" is the
        reference.
      remat: segments of an attention layer that the backward pass computes again instead of having them saved: any of
        "full_attn" (all of the layer), "qkv" (projections, norms, rotation), "post_core" (inverse rotation, postmix,
        grouped output projection), "vha_postmix" and "gated_attn".
      vocab_size: rows of the embedding, which is also the output head.
      intermediate_size: width of the SwiGLU block.
      dtype: of the computation, "bfloat16", "float16" or "float32".
      param_dtype: of the parameters; sinks and the compressor's position embedding are float32 whatever it says.
      fuse_inv_rope: fold the inverse rotation into the postmix.
      fuse_kv_index_remap: make the table of row ids flat in one kernel.
      postmix_backward: how the postmix's gradients are taken, "dot_general" or "single_pass" (see `vha_postmix`).
      implementation: of the postmix, and of nothing else: a name, or None for the best that can run.

    Raises:
      ValueError: a value is impossible or contradicts another one; the message names the field and the value.
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0) + (4, 128) * 20 + (4,)
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Mapping[str, float] | None = dataclasses.field(
        default_factory=lambda: FrozenDict(factor=16.0, original_max_position_embeddings=65536)
    )
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    indexer_loss_coeff: float = 0.0
    indexer_phase: str = "sparse"
    rms_norm_eps: float = 1e-6
    use_vha_attention: bool = True
    vha_rank: int | None = None
    vha_postmix_grouped: bool = False
    gated_attention: bool = False
    rope_rounding: str = "each_product"
    sparse_attention_backend: str = "flat"
    remat: tuple[str, ...] = ()
    vocab_size: int = 129280
    intermediate_size: int = 12288
    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    fuse_inv_rope: bool = False
    fuse_kv_index_remap: bool = False
    postmix_backward: str = "dot_general"
    implementation: str | None = None

    def __post_init__(self):
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if not isinstance(value, str):
                try:
                    object.__setattr__(self, name, np.dtype(value).name)
                except TypeError:
                    raise _invalid(name, value, f"one of {DTYPES}") from None
        object.__setattr__(self, "compress_ratios", _ratios(self.compress_ratios))
        object.__setattr__(self, "yarn", _yarn(self.yarn))
        object.__setattr__(self, "remat", _segments(self.remat))
        _normalise_scalars(self)

        _require(
            self,
            lambda value: value >= 1,
            "1 or more",
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank", "kv_lora_rank"),
            *("o_groups", "o_lora_rank", "sliding_window", "index_n_heads", "index_head_dim", "index_topk"),
            *("vocab_size", "intermediate_size", "qk_nope_head_dim", "v_head_dim"),
        )
        _require(self, lambda value: value > 1, "greater than 1", "rope_theta", "compress_rope_theta")
        _require(self, lambda value: value > 0, "greater than 0", "rms_norm_eps")
        _require(self, lambda value: value >= 0, "0 or more", "indexer_loss_coeff")
        for name, known in (
            ("dtype", DTYPES),
            ("param_dtype", DTYPES),
            ("rope_rounding", ROUNDINGS),
            ("sparse_attention_backend", BACKENDS),
            ("indexer_phase", INDEXER_PHASES),
            ("postmix_backward", BACKWARDS),
            ("implementation", (None, *IMPLEMENTATIONS)),
        ):
            _require(self, lambda value, known=known: value in known, f"one of {known}", name)

        heads = self.num_attention_heads
        if len(self.compress_ratios) != self.num_hidden_layers:
            wanted = f"one entry for each of num_hidden_layers = {self.num_hidden_layers} layers"
            raise _invalid("compress_ratios", self.compress_ratios, wanted)
        _require(
            self,
            lambda width: width % 2 == 0 and 0 <= width <= self.head_dim,
            f"even and between 0 and head_dim = {self.head_dim}",
            "qk_rope_head_dim",
        )
        # The output projection and the grouped postmix share their groups.
        _require(self, lambda value: heads % value == 0, f"a divisor of num_attention_heads = {heads}", "o_groups")
        _require(
            self,
            lambda rank: rank is None or 1 <= rank <= heads,
            f"None or between 1 and num_attention_heads = {heads}",
            "vha_rank",
        )
        if self.vha_postmix_grouped and not self.use_vha_attention:
            wanted = "False where use_vha_attention is False: there is no postmix to group"
            raise _invalid("vha_postmix_grouped", True, wanted)
        if any(map(self.has_indexer, self.compress_ratios)):
            rope_dim = self.qk_rope_head_dim
            wanted = f"at least qk_rope_head_dim = {rope_dim}: the indexer rotates that many of its channels"
            _require(self, lambda width: width >= rope_dim, wanted, "index_head_dim")
            wanted = "a power of two: the indexer's Hadamard rotation has no other size"
            _require(self, lambda width: width & (width - 1) == 0, wanted, "index_head_dim")

    @property
    def postmix_rank(self) -> int:
        """Rank of the VHA postmix: `vha_rank`, or a quarter of the heads and at least 1."""
        return max(1, self.num_attention_heads // 4) if self.vha_rank is None else self.vha_rank

    def layer_ratio(self, layer_index: int) -> int:
        """Compress ratio of a layer; ValueError for one that the configuration does not have."""
        if not 0 <= layer_index < self.num_hidden_layers:
            raise ValueError(f"layer_index: got {layer_index}, wanted 0 to {self.num_hidden_layers - 1}")
        return self.compress_ratios[layer_index]

    def has_indexer(self, ratio: int) -> bool:
        """Whether layers with this compress ratio have an indexer."""
        return self.indexer_phase != "dense" and (ratio == LATENT_RATIO or 1 < ratio < HCA_RATIO)

    def selects(self, ratio: int) -> bool:
        """Whether layers with this compress ratio attend to what an indexer selects."""
        return self.has_indexer(ratio) and self.indexer_phase == "sparse"

    def teaches(self, ratio: int) -> bool:
        """Whether layers with this compress ratio have an indexer's loss."""
        return self.has_indexer(ratio) and self.indexer_loss_coeff > 0

    def layer_rope(self, layer_index: int) -> tuple[float, Mapping[str, float] | None]:
        """Rotary base and YaRN parameters of a layer.

        Args:
          layer_index: which layer, from 0.

        Returns:
          (`compress_rope_theta`, `yarn`) for a layer with a compressor, else (`rope_theta`, None), as in DeepSeek-V4.
        """
        if self.compress_ratios[layer_index] in RATIOS_WITHOUT_COMPRESSOR:
            return self.rope_theta, None
        return self.compress_rope_theta, self.yarn

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from a mapping of field names; an unknown name raises `ValueError`."""
        return _from_dict(cls, values, "model")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike) -> Self:
        """The `model:` part of a YAML file; see `load_yaml`."""
        return load_yaml(path)[0]

    @classmethod
    def from_hf(cls, source: Any, **overrides: Any) -> Self:
        """The attention of a Hugging Face `deepseek_v4` configuration, in either of its spellings.

        The older one has `compress_ratios`, `rope_theta`, `compress_rope_theta`, `rope_scaling` and `qk_rope_head_dim`
        (what DeepSeek publishes), the newer one `layer_types`, `compress_rates`, nested `rope_parameters` and
        `partial_rotary_factor` (what transformers 5.17 saves). What is left out has transformers' default.

        There is no VHA postmix and no gate, and the rotation rounds once. The mixture of experts and the
        hyper-connections have no counterpart here: `intermediate_size` is set to the width of all experts that serve
        one token, the shared ones included, and the output head is tied to the embedding whatever the source says. The
        dtypes stay this library's. Layers that predict further tokens are dropped. Keys that say nothing about the
        attention are not looked at, so a misspelt one goes unnoticed.

        Args:
          source: path of a `config.json` or of the folder that holds it, a mapping, or an object with `to_dict()`.
          **overrides: fields of this class that replace what the source says, such as `dtype="float32"`.

        Raises:
          OSError: the file cannot be read.
          ValueError: no `deepseek_v4` configuration, or one that the layers here cannot compute, such as a bias, a
            YaRN `attention_factor` other than 1, or an HCA rate other than 128.
        """
        from dsv4_fusions.hf import config_fields

        return cls.from_dict(config_fields(source) | overrides)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How `dsv4-fusions train` trains: AdamW, linear warm-up and cosine decay to zero, clipping by the global norm.

    Attributes:
      batch_size: rows a step. sequence_length: tokens a row.
      eval_interval: steps between evaluations on the held-out text; 0: only at the end.
      seed: of the initial parameters and of the order of the rows.
      train_only: "indexer": every other parameter stays as it is, as when an indexer is taught beside a trained model
        (`indexer_phase="warm_up"` and an `indexer_loss_coeff`); None: all are trained.

    Raises:
      ValueError: a value is impossible or contradicts another one; the message names the field and the value.
    """

    batch_size: int = 2
    sequence_length: int = 512
    steps: int = 100
    learning_rate: float = 3e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    eval_interval: int = 0
    seed: int = 0
    train_only: str | None = None

    def __post_init__(self):
        _normalise_scalars(self)
        _require(self, lambda value: value in (None, "indexer"), "None or 'indexer'", "train_only")
        _require(self, lambda value: value >= 1, "1 or more", "batch_size", "sequence_length", "steps")
        _require(self, lambda value: value > 0, "greater than 0", "learning_rate", "grad_clip", "adam_eps")
        _require(self, lambda value: value >= 0, "0 or more", "weight_decay", "eval_interval", "seed")
        _require(self, lambda value: 0 <= value < 1, "at least 0 and less than 1", "adam_b1", "adam_b2")
        _require(self, lambda value: value < 2**32, "less than 2^32", "seed")
        wanted = f"0 or more and less than steps = {self.steps}"
        _require(self, lambda value: 0 <= value < self.steps, wanted, "warmup_steps")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from a mapping of field names; an unknown name raises `ValueError`."""
        return _from_dict(cls, values, "train")


def load_yaml(path: str | os.PathLike) -> tuple[DSv4Config, TrainConfig]:
    """Both configurations from a YAML file with the top-level keys `model:` and, optionally, `train:`.

    Args:
      path: the file.

    Returns:
      The model's and the training's configuration; fields that the file leaves out keep their defaults.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is not YAML, a key is unknown, or a value is impossible.
    """
    import yaml

    with open(path, encoding="utf-8") as file:
        try:
            content = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping) or "model" not in content:
        raise ValueError(f"{path}: wanted the top-level key model, and optionally train")
    try:
        _reject_unknown("top level", content, ("model", "train"))
        return DSv4Config.from_dict(content["model"] or {}), TrainConfig.from_dict(content.get("train") or {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _invalid(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{name}: got {value!r}, wanted {wanted}")


def _require(config: Any, holds: Any, wanted: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not holds(value):
            raise _invalid(name, value, wanted)


def _reject_unknown(where: str, values: Mapping[str, Any], known: Any) -> None:
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"{where}: got unknown {', '.join(map(repr, unknown))}, wanted keys of {', '.join(known)}")


def _from_dict(cls: Any, values: Mapping[str, Any], section: str) -> Any:
    if not isinstance(values, Mapping):
        raise _invalid(section, values, "a mapping of field names to values")
    _reject_unknown(section, values, [field.name for field in dataclasses.fields(cls)])
    return cls(**values)


def _normalise_scalars(config: Any) -> None:
    """Converts every int, float, bool and string field to exactly that Python type, or raises."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        optional = field.type in (int | None, str | None)
        if optional and value is None:
            continue
        if field.type in (int, int | None):
            value = _integer(field.name, value)
        elif field.type is float:
            value = _number(field.name, value)
        elif field.type is bool and type(value) is not bool:
            raise _invalid(field.name, value, "True or False")
        elif field.type in (str, str | None) and not isinstance(value, str):
            raise _invalid(field.name, value, "a string")
        object.__setattr__(config, field.name, value)


def _integer(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool | np.bool_):
            return operator.index(value)
    except TypeError:
        pass
    raise _invalid(name, value, "an integer")


def _number(name: str, value: Any) -> float:
    # A string that spells a number is one: YAML reads 1e-6 as a string, and published configurations quote their bases.
    try:
        if not isinstance(value, bool | np.bool_) and math.isfinite(float(value)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise _invalid(name, value, "a finite number")


def _ratios(ratios: Any) -> tuple[int, ...]:
    if isinstance(ratios, str | Mapping) or not hasattr(ratios, "__iter__"):
        raise _invalid("compress_ratios", ratios, "a list of integers, one for each layer")
    ratios = tuple(_integer(f"compress_ratios[{i}]", ratio) for i, ratio in enumerate(ratios))
    for i, ratio in enumerate(ratios):
        if not (ratio in RATIOS_WITHOUT_COMPRESSOR or 2 <= ratio <= HCA_RATIO):
            raise _invalid(f"compress_ratios[{i}]", ratio, f"-2, -1, 0, or between 2 and {HCA_RATIO}")
    return ratios


def _segments(remat: Any) -> tuple[str, ...]:
    names = (remat,) if isinstance(remat, str) else remat
    if not isinstance(names, list | tuple) or any(name not in REMAT_SEGMENTS for name in names):
        raise _invalid("remat", remat, f"a list of segments, each one of {', '.join(REMAT_SEGMENTS)}")
    return tuple(name for name in REMAT_SEGMENTS if name in names)


def _yarn(yarn: Any) -> FrozenDict | None:
    if yarn is None:
        return None
    if not isinstance(yarn, Mapping):
        raise _invalid("yarn", yarn, "a mapping or None")
    _reject_unknown("yarn", yarn, YARN_DEFAULTS)
    values = {name: yarn.get(name, default) for name, default in YARN_DEFAULTS.items()}
    for name in ("factor", "beta_fast", "beta_slow"):
        values[name] = _number(f"yarn.{name}", values[name])
    length = "original_max_position_embeddings"
    values[length] = _integer(f"yarn.{length}", values[length])
    if values["factor"] < 1:
        raise _invalid("yarn.factor", values["factor"], "1 or more")
    if values[length] < 1:
        raise _invalid(f"yarn.{length}", values[length], "1 or more")
    if not 0 < values["beta_slow"] < values["beta_fast"]:
        wanted = f"greater than 0 and less than yarn.beta_fast = {values['beta_fast']}"
        raise _invalid("yarn.beta_slow", values["beta_slow"], wanted)
    return FrozenDict(values)
