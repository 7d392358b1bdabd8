# SPDX-License-Identifier: AGPL-3.0-only
"""ModelConfig: what a Hugging Face config.json says of a text model of one of the families in MODEL_TYPES.

Twin of `atlas_core::config::ModelConfig`; it satisfies the arena's BufferConfig. Sources: the `config.json` files of
these models, and their configuration classes in transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..runtime.errors import ConfigError
from ._config_deepseek_v4 import deepseek_v4_fields
from ._config_modules import LATENT_ATTENTION, glm4_moe_fields, minimax_m2_fields
from ._config_qwen import FULL_ATTENTION, LINEAR_ATTENTION, qwen_fields
from ._config_reader import ConfigReader

__all__ = ["FULL_ATTENTION", "LINEAR_ATTENTION", "MODEL_TYPES", "ModelConfig"]

MODEL_TYPES = {
    "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v4": "deepseek_v4",
    "minimax_m2": "minimax_m2",
    "glm4_moe": "glm4_moe",
}
"""model_type of a config.json, or of its text_config, and the family it stands for."""

_MTP_MODULES = ("num_mtp_modules", "mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
_BIASED = ("glm4_moe",)
"""Families whose draft heads may have biases in their attention; targets refuse them."""
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
    scoring_func: str = "softmax"
    use_routing_bias: bool = False
    n_group: int = 1
    topk_group: int = 1
    use_qk_norm: bool = True
    qk_norm_type: str = "per_head"
    mtp_hidden_states_first: bool = False

    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0

    sliding_window: int = 0
    num_hash_layers: int = 0
    routed_scaling_factor: float = 1.0
    swiglu_limit: float = 0.0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    o_groups: int = 0
    o_lora_rank: int = 0
    hc_mult: int = 0
    hc_sinkhorn_iters: int = 0
    hc_eps: float = 0.0
    # fmt: on

    unknown: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    # What no model of these families has; the arena asks for it.
    zero_expert_num: int = 0
    moe_latent_size: int = 0
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
        kind = raw.get("model_type") if isinstance(raw, Mapping) else None
        if isinstance(kind, str) and kind in LATENT_ATTENTION:
            raise ConfigError(source, f"model_type {kind!r}: {LATENT_ATTENTION[kind]}", "model_type", kind)
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


_FAMILY_FIELDS: Mapping[str, Callable[[ConfigReader], dict[str, Any]]] = {
    "deepseek_v4": deepseek_v4_fields,
    "minimax_m2": minimax_m2_fields,
    "glm4_moe": glm4_moe_fields,
}
"""Family of MODEL_TYPES -> what only it reads; the others are Qwen's."""


def _read(cls: type[ModelConfig], r: ConfigReader) -> ModelConfig:
    config = cls(
        **_FAMILY_FIELDS.get(r.family, qwen_fields)(r),
        model_type=r.model_type,
        hidden_size=r.positive("hidden_size"),
        vocab_size=r.positive("vocab_size"),
        num_hidden_layers=r.positive("num_hidden_layers"),
        num_attention_heads=r.positive("num_attention_heads"),
        num_key_value_heads=r.positive("num_key_value_heads"),
        head_dim=r.positive("head_dim"),
        rms_norm_eps=r.number("rms_norm_eps", least=0.0),
        ignore_modules=_ignore_modules(r),
        max_position_embeddings=r.count("max_position_embeddings", 0),
        attention_bias=r.flag("attention_bias", False),
        tie_word_embeddings=r.flag("tie_word_embeddings", False, outer=True),
        hidden_act=r.text("hidden_act", "silu"),
        dtype=_dtype(r),
        eos_token_ids=r.integers("eos_token_id", (), outer=True),
        bos_token_id=r.optional_count("bos_token_id", outer=True),
        norm_topk_prob=r.flag("norm_topk_prob", True),
        num_mtp_modules=r.first_count(_MTP_MODULES, 0),
        unknown=r.rest(),
    )
    _check(r, config)
    return config


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
    if c.attention_bias and r.family not in _BIASED:
        raise r.bad("attention_bias", True, "projections with a bias are not offered")
    if not math.isfinite(c.rope_theta):
        raise r.bad("rope_theta", c.rope_theta, "a finite number is needed")
    for token in c.eos_token_ids:
        if not 0 <= token < c.vocab_size:
            raise r.bad("eos_token_id", token, f"0 to {c.vocab_size - 1} is needed")
