# SPDX-License-Identifier: AGPL-3.0-only
"""ModelConfig: the fields of real config.json files, old and new, nested or not, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_py.model.config import ModelConfig
from spark_py.runtime.buffers import BufferSizes
from spark_py.runtime.errors import ConfigError
from tests.model.support import RAW

NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""Older style: RoPE in two fields, torch_dtype, an interval instead of layer types."""

DENSE_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": [248044, 248046],
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
    "vision_config": {"depth": 27},
}
"""Newer style: everything in text_config, RoPE in a table, dtype."""


def test_an_older_file() -> None:
    c = ModelConfig.from_dict(NEXT_80B)
    assert (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (2048, 16, 2, 256)
    assert (c.rope_theta, c.rotary_dim(), c.rms_norm_eps, c.dtype) == (1e7, 64, 1e-6, "bfloat16")
    assert c.layer_types[:5] == ("linear_attention",) * 3 + ("full_attention", "linear_attention")
    assert (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (512, 10, 512)
    assert c.is_sparse_layer(0)
    assert c.attn_gated
    assert (c.eos_token_ids, c.bos_token_id) == ((151645,), 151643)
    assert (c.ssm_qkvz_size(), c.ssm_ba_size(), c.moe_input_size()) == (12288, 64, 2048)
    assert sorted(c.unknown) == ["architectures", "output_router_logits"]


def test_a_newer_file() -> None:
    c = ModelConfig.from_dict(DENSE_27B)
    assert (c.model_type, c.hidden_size, c.intermediate_size, c.num_experts) == ("qwen3_5", 5120, 17408, 0)
    assert (c.rope_theta, c.rotary_dim(), c.mrope_interleaved) == (1e7, 64, True)
    assert (c.eos_token_ids, c.num_mtp_modules, c.vocab_size) == ((248044, 248046), 1, 248320)
    assert not any(c.is_sparse_layer(layer) for layer in range(64))
    assert dict(c.unknown) == {
        "mtp_use_dedicated_embeddings": False,
        "outer.architectures": ["Qwen3_5ForConditionalGeneration"],
        "outer.image_token_id": 248056,
        "outer.vision_config": {"depth": 27},
    }


def test_the_text_part_alone() -> None:
    inner = ModelConfig.from_dict(DENSE_27B["text_config"])
    assert inner.hidden_size == 5120
    assert inner.model_type == "qwen3_5_text"


def test_both_places_of_rope_may_agree_but_not_differ() -> None:
    table = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "default"}
    fields = {name: value for name, value in RAW.items() if name not in ("rope_theta", "partial_rotary_factor")}
    assert ModelConfig.from_dict(fields | {"rope_parameters": table}).rope_theta == 5e5
    assert ModelConfig.from_dict(fields | {"rope_theta": 5e5, "rope_parameters": table}).rope_theta == 5e5
    with pytest.raises(ConfigError, match=r"rope_theta is 10000\.0: rope_parameters\.rope_theta says 500000\.0"):
        ModelConfig.from_dict(RAW | {"rope_parameters": table})


def test_an_explicit_rotary_dim() -> None:
    assert ModelConfig.from_dict(RAW | {"rotary_dim": 8}).rotary_dim() == 8
    assert ModelConfig.from_dict(RAW).rotary_dim() == 16


def test_the_arena_takes_it() -> None:
    for raw in (RAW, NEXT_80B, DENSE_27B):
        sizes = BufferSizes.from_config(ModelConfig.from_dict(raw), 64, 4096, 16, 8)
        assert sizes.hidden_states == 64 * ModelConfig.from_dict(raw).hidden_size * 2


def test_a_dense_model_needs_no_field_of_experts() -> None:
    leftover = {"num_experts": 512, "mlp_only_layers": [0, 1]}
    c = ModelConfig.from_dict(RAW | leftover)
    assert (c.num_experts, c.num_experts_per_tok, dict(c.unknown)) == (0, 0, {"num_experts": 512})
    assert not ModelConfig.from_dict(DENSE_27B["text_config"] | {"num_experts": 8}).is_sparse_layer(0)


NEEDED = (
    "hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_theta", "partial_rotary_factor", "intermediate_size", "layer_types", "model_type",
)  # fmt: skip


@pytest.mark.parametrize("value", ["absent", None], ids=["absent", "null"])
@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_field_that_is_missing_is_named(name: str, value: str | None) -> None:
    raw = {key: field for key, field in RAW.items() if key != name} | ({name: None} if value is None else {})
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_dict(raw)


@pytest.mark.parametrize("name", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_a_sparse_model_needs_the_fields_of_experts(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_dict({key: value for key, value in NEXT_80B.items() if key != name})


def test_a_token_has_no_more_experts_than_there_are() -> None:
    assert ModelConfig.from_dict(NEXT_80B | {"num_experts_per_tok": 512}).num_experts_per_tok == 512
    with pytest.raises(ConfigError, match="num_experts_per_tok is 513: at most num_experts = 512"):
        ModelConfig.from_dict(NEXT_80B | {"num_experts_per_tok": 513})
    leftover = {"num_experts": 4, "num_experts_per_tok": 8, "mlp_only_layers": [0, 1]}
    assert ModelConfig.from_dict(RAW | leftover).num_experts_per_tok == 8


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"mlp_only_layers": [0, 3, 17]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [5]),
        ({"num_experts": 0}, []),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], sparse: list[int]) -> None:
    c = ModelConfig.from_dict(NEXT_80B | {"num_hidden_layers": 6} | changes)
    assert [layer for layer in range(6) if c.is_sparse_layer(layer)] == sparse


@pytest.mark.parametrize("name", ["linear_num_value_heads", "linear_key_head_dim", "linear_conv_kernel_dim"])
def test_linear_attention_needs_its_fields(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        ModelConfig.from_dict({key: value for key, value in NEXT_80B.items() if key != name})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not offered; offered: qwen3_next"),
        ({"model_type": 3}, "model_type 3"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -64}, "hidden_size is -64"),
        ({"hidden_size": 64.0}, r"hidden_size is 64\.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta is 0: a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.01}, "rotary_dim is 0"),
        ({"rotary_dim": 7}, "rotary_dim is 7"),
        ({"rotary_dim": 34}, "rotary_dim is 34"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3"),
        ({"layer_types": ["full_attention"]}, "layer_types is 1: one for each of the 2"),
        ({"layer_types": ["full_attention", "sliding"]}, "layer_types is 'sliding'"),
        ({"layer_types": "full_attention"}, "list of strings"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type is 'linear'"),
        ({"rope_scaling": "yarn"}, "an object is needed"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_bias": 0}, "true or false"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"torch_dtype": 16}, "a string is needed"),
        ({"eos_token_id": 203}, "eos_token_id is 203"),
        ({"eos_token_id": [-1]}, "eos_token_id is -1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"text_config": 3}, "an object is needed, not int"),
        ({"text_config": {"model_type": "qwen3_5_text"}}, "does not belong to 'qwen3_next'"),
    ],
    ids=lambda v: None if isinstance(v, str) else "_".join(v),
)
def test_a_bad_value_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig.from_dict(RAW | changes, "here.json")
    assert str(caught.value).startswith("here.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [[], "x", None, 3])
def test_something_else_than_an_object(raw: Any) -> None:
    with pytest.raises(ConfigError, match="a JSON object is needed"):
        ModelConfig.from_dict(raw)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read: No such file or directory$"):
        ModelConfig.from_file(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(RAW))
    assert ModelConfig.from_file(tmp_path) == ModelConfig.from_file(file) == ModelConfig.from_dict(RAW)
    file.write_text(json.dumps(RAW)[:-20])
    with pytest.raises(ConfigError, match="is not JSON"):
        ModelConfig.from_file(file)
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_file(file)
    file.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON"):
        ModelConfig.from_file(file)
