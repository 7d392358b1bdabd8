# SPDX-License-Identifier: AGPL-3.0-only
"""ModelConfig: what a Hugging Face config.json says of a Qwen3-Next, Qwen3.5 or Qwen3.6 text model.

Twin of `atlas_core::config::ModelConfig`; it satisfies the arena's BufferConfig. Sources: the `config.json` files of
these models, `Qwen3NextConfig` and `Qwen3_5TextConfig` of transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..runtime.errors import ConfigError
from ._config_reader import ConfigReader

__all__ = ["FULL_ATTENTION", "LINEAR_ATTENTION", "MODEL_TYPES", "ModelConfig"]

FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"

MODEL_TYPES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""model_type of a config.json, or of its text_config, and the family it stands for."""

_IGNORE_LISTS = ("ignore", "ignored_layers", "ignore_modules", "modules_to_not_convert", "exclude_modules")
"""Names that compressed-tensors, Hugging Face's FP8 and modelopt have for one and the same list."""
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Names are the engine's, which are mostly those of config.json. Counts are elements; 0 where a model lacks a part.

    `unknown` holds the fields of the file that nothing here reads, with their values; a nested text_config counts as
    the file, and what stands beside it in the outer object is `outer.NAME`. `rotary_dim_field` is an explicit
    rotary_dim. `ignore_modules` are the entries of quantization_config's lists of what is not quantised, under whatever
    name its maker gives the list.
    """

    # fmt: off
    model_type: str
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    intermediate_size: int = 0
    max_position_embeddings: int = 0
    rotary_dim_field: int = 0
    attn_gated: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    dtype: str = "bfloat16"
    layer_types: tuple[str, ...] = ()
    mlp_only_layers: tuple[int, ...] = ()
    decoder_sparse_step: int = 1
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mrope_interleaved: bool = False
    ignore_modules: tuple[str, ...] = ()

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    num_mtp_modules: int = 0

    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    # fmt: on

    unknown: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    # What no model of these families has; the arena asks for it.
    zero_expert_num: int = 0
    moe_latent_size: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    o_groups: int = 0
    o_lora_rank: int = 0
    hc_mult: int = 0
    hc_lowrank: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_compress_ratio: int = 0
    index_topk: int = 0
    mamba_num_heads: int = 0
    ssm_state_size: int = 0
    n_groups: int = 0
    adapter_max_rank: int = 0

    # ------------------------------------------------------------ from a file

    @classmethod
    def from_file(cls, path: Path | str) -> ModelConfig:
        """The configuration in a config.json, or in the folder that holds one. ConfigError names file and field."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(file, f"cannot be read: {reason}") from error
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(file, f"is not JSON: {error}") from error
        return cls.from_dict(raw, file)

    @classmethod
    def from_dict(cls, raw: object, source: Path | str = "config") -> ModelConfig:
        """The configuration in a parsed config.json; `source` is what errors call it.

        ConfigError for an unknown model_type, for a field that is needed and missing, has the wrong type, or asks for
        something that is not offered (scaled RoPE, biases, another activation). Unknown fields are kept, not judged.
        """
        return _read(cls, ConfigReader.of(raw, source, MODEL_TYPES))

    # ------------------------------------------------------------ derived values

    def rotary_dim(self) -> int:
        """Elements of a head that RoPE turns: rotary_dim where the file has one, else partial_rotary_factor * head_dim,
        rounded down."""
        return self.rotary_dim_field or int(self.partial_rotary_factor * self.head_dim)

    def is_sparse_layer(self, layer: int) -> bool:
        """Whether a layer of the target has experts instead of a dense FFN."""
        return (
            self.num_experts > 0 and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )

    def moe_input_size(self) -> int:
        """Width of an expert's input and output."""
        return self.moe_latent_size or self.hidden_size

    def ssm_qkvz_size(self) -> int:
        """Elements of a row of linear attention's [q, k, v, z]."""
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        return 2 * keys + 2 * self.linear_num_value_heads * self.linear_value_head_dim

    def ssm_ba_size(self) -> int:
        """Elements of a row of linear attention's [beta, alpha]."""
        return 2 * self.linear_num_value_heads

    def mamba2_d_inner(self) -> int:
        """0: no Mamba-2 layers."""
        return 0

    def mamba2_in_proj_size(self) -> int:
        """0: no Mamba-2 layers."""
        return 0

    def mamba2_d_xbc(self) -> int:
        """0: no Mamba-2 layers."""
        return 0


def _read(cls: type[ModelConfig], r: ConfigReader) -> ModelConfig:
    layers = r.positive("num_hidden_layers")
    layer_types = _layer_types(r, layers)
    linear = LINEAR_ATTENTION in layer_types
    linear_field = r.positive if linear else r.count
    sparse_step = r.positive("decoder_sparse_step", 1)
    mlp_only = r.integers("mlp_only_layers", ())
    # Layers that have experts, if there are any; then the file must say how many.
    may = [i for i in range(layers) if r.family != "qwen3_5" and i not in mlp_only and (i + 1) % sparse_step == 0]
    experts = r.count("num_experts") if may else 0
    sparse = may if experts else []
    # A field of a part that the model has must be there; of one that it has not, it may stay.
    expert_field = r.positive if sparse else r.count
    intermediate = r.positive("intermediate_size") if len(sparse) < layers else r.count("intermediate_size", 0)
    rope = _rope(r)
    config = cls(
        model_type=r.model_type,
        hidden_size=r.positive("hidden_size"),
        vocab_size=r.positive("vocab_size"),
        num_hidden_layers=layers,
        num_attention_heads=r.positive("num_attention_heads"),
        num_key_value_heads=r.positive("num_key_value_heads"),
        head_dim=r.positive("head_dim"),
        rms_norm_eps=r.number("rms_norm_eps", least=0.0),
        rope_theta=rope[0],
        partial_rotary_factor=rope[1],
        rotary_dim_field=r.count("rotary_dim", 0),
        mrope_interleaved=rope[2],
        ignore_modules=_ignore_modules(r),
        intermediate_size=intermediate,
        max_position_embeddings=r.count("max_position_embeddings", 0),
        attn_gated=r.flag("attn_output_gate", True),
        attention_bias=r.flag("attention_bias", False),
        tie_word_embeddings=r.flag("tie_word_embeddings", False, outer=True),
        hidden_act=r.text("hidden_act", "silu"),
        dtype=_dtype(r),
        layer_types=layer_types,
        mlp_only_layers=mlp_only,
        decoder_sparse_step=sparse_step,
        eos_token_ids=r.integers("eos_token_id", (), outer=True),
        bos_token_id=r.optional_count("bos_token_id", outer=True),
        num_experts=experts,
        num_experts_per_tok=expert_field("num_experts_per_tok", *(() if sparse else (0,))),
        moe_intermediate_size=expert_field("moe_intermediate_size", *(() if sparse else (0,))),
        shared_expert_intermediate_size=r.count("shared_expert_intermediate_size", 0),
        norm_topk_prob=r.flag("norm_topk_prob", True),
        num_mtp_modules=r.first_count(("num_mtp_modules", "mtp_num_hidden_layers", "num_nextn_predict_layers"), 0),
        linear_num_key_heads=linear_field("linear_num_key_heads", *(() if linear else (0,))),
        linear_num_value_heads=linear_field("linear_num_value_heads", *(() if linear else (0,))),
        linear_key_head_dim=linear_field("linear_key_head_dim", *(() if linear else (0,))),
        linear_value_head_dim=linear_field("linear_value_head_dim", *(() if linear else (0,))),
        linear_conv_kernel_dim=linear_field("linear_conv_kernel_dim", *(() if linear else (0,))),
        unknown=r.rest(),
    )
    _check(r, config)
    return config


def _layer_types(r: ConfigReader, layers: int) -> tuple[str, ...]:
    """The kind of each layer; from full_attention_interval where the file does not list them."""
    interval = r.count("full_attention_interval", 0)
    kinds = r.texts("layer_types", None)
    if kinds is None:
        if interval == 0:
            raise r.missing("layer_types", "full_attention_interval")
        kinds = tuple(LINEAR_ATTENTION if (i + 1) % interval else FULL_ATTENTION for i in range(layers))
    if len(kinds) != layers:
        raise r.bad("layer_types", len(kinds), f"one for each of the {layers} layers is needed")
    for kind in kinds:
        if kind not in (FULL_ATTENTION, LINEAR_ATTENTION):
            raise r.bad("layer_types", kind, f"{FULL_ATTENTION} or {LINEAR_ATTENTION} is needed")
    return kinds


def _rope(r: ConfigReader) -> tuple[float, float, bool]:
    """(rope_theta, partial_rotary_factor, mrope_interleaved), from rope_parameters or from the fields of older
    files."""
    nested = r.table("rope_parameters") or {}
    scaling = r.table("rope_scaling") or {}
    for name, table in (("rope_parameters", nested), ("rope_scaling", scaling)):
        kind = table.get("rope_type", table.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise r.bad(f"{name}.rope_type", kind, "only unscaled RoPE (default) is offered")
    theta = r.number("rope_theta", least=0.0, nested=("rope_parameters", nested), above=True)
    factor = r.number("partial_rotary_factor", least=0.0, nested=("rope_parameters", nested), above=True)
    interleaved = nested.get("mrope_interleaved", scaling.get("mrope_interleaved", False))
    if not isinstance(interleaved, bool):
        raise r.bad("mrope_interleaved", interleaved, "true or false is needed")
    return theta, factor, interleaved


def _ignore_modules(r: ConfigReader) -> tuple[str, ...]:
    """All entries, in order, each once; null counts as no list."""
    table = r.table("quantization_config", outer=True) or {}
    entries: dict[str, None] = {}
    for name in _IGNORE_LISTS:
        listed = table.get(name)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(isinstance(entry, str) and entry for entry in listed):
            raise r.bad(f"quantization_config.{name}", listed, "a list of strings that are not empty is needed")
        entries |= dict.fromkeys(listed)
    return tuple(entries)


def _dtype(r: ConfigReader) -> str:
    """dtype, or torch_dtype of older files; bfloat16 where the file has neither."""
    name = r.first_text(("dtype", "torch_dtype"), "bfloat16", outer=True).removeprefix("torch.")
    if name not in _DTYPES:
        raise r.bad("dtype", name, f"one of {', '.join(_DTYPES)} is needed")
    return name


def _check(r: ConfigReader, c: ModelConfig) -> None:
    if c.num_attention_heads % c.num_key_value_heads:
        raise r.bad("num_attention_heads", c.num_attention_heads, f"a multiple of {c.num_key_value_heads} KV heads")
    sparse = any(c.is_sparse_layer(layer) for layer in range(c.num_hidden_layers))
    if sparse and c.num_experts_per_tok > c.num_experts:
        raise r.bad("num_experts_per_tok", c.num_experts_per_tok, f"at most num_experts = {c.num_experts}")
    if c.partial_rotary_factor > 1.0:
        raise r.bad("partial_rotary_factor", c.partial_rotary_factor, "at most 1")
    rotary = c.rotary_dim()
    if rotary < 2 or rotary % 2 or rotary > c.head_dim:
        raise r.bad("rotary_dim", rotary, f"an even number from 2 to head_dim = {c.head_dim} is needed")
    if c.hidden_act != "silu":
        raise r.bad("hidden_act", c.hidden_act, "only silu is offered")
    if c.attention_bias:
        raise r.bad("attention_bias", True, "projections with a bias are not offered")
    if not math.isfinite(c.rope_theta):
        raise r.bad("rope_theta", c.rope_theta, "a finite number is needed")
    for token in c.eos_token_ids:
        if not 0 <= token < c.vocab_size:
            raise r.bad("eos_token_id", token, f"0 to {c.vocab_size - 1} is needed")
