# SPDX-License-Identifier: AGPL-3.0-only
"""ModelConfig of MiniMax-M2 and GLM-4.5, HeadBody and MoeRouting of them, and what is said of bad files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layers.moe_routing import MoeRouting
from spark_py.model.layers.mtp_head import HeadBody, NormConvention, QkNorm, SharedExpert
from spark_py.model.target.weights import check_offered
from spark_py.runtime.errors import ConfigError, UnsupportedError
from tests.model.support import RAW

MINIMAX: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
"""As published."""
MINIMAX_SAVED = {
    name: MINIMAX[name]
    for name in (
        "model_type", "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_experts_per_tok",
        "num_hidden_layers", "num_key_value_heads", "num_local_experts", "rms_norm_eps", "vocab_size",
    )
} | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5}}  # fmt: skip
"""As transformers writes it."""
GLM: dict[str, Any] = {
    "model_type": "glm4_moe",
    "attention_bias": False,
    "eos_token_id": [1, 2],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "use_qk_norm": True,
    "vocab_size": 151552,
}


@pytest.mark.parametrize("raw", [MINIMAX, MINIMAX_SAVED], ids=["published", "saved"])
def test_minimax_m2(raw: dict[str, Any]) -> None:
    c = ModelConfig.from_dict(raw)
    assert (c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size) == (256, 1536, 0)
    assert (c.rope_theta, c.rotary_dim(), c.num_mtp_modules) == (5e6, 64, raw.get("num_mtp_modules", 0))
    assert all(c.is_sparse_layer(layer) for layer in range(62))
    assert MoeRouting.of(c) == MoeRouting(sigmoid=True, biased=True)
    assert HeadBody.of(c) == HeadBody(
        gated=False, qk_norm=QkNorm.WHOLE, norm=NormConvention.PLAIN, shared_expert=SharedExpert.NONE
    )
    assert set(c.unknown) <= {"architectures", "use_mtp"}


def test_glm_4_5() -> None:
    c = ModelConfig.from_dict(GLM)
    assert (c.num_experts, c.moe_intermediate_size, c.shared_expert_intermediate_size) == (160, 1536, 3072)
    assert [c.is_sparse_layer(layer) for layer in (0, 2, 3, 91)] == [False, False, True, True]
    assert (c.rotary_dim(), c.num_mtp_modules, dict(c.unknown)) == (64, 1, {})
    assert MoeRouting.of(c) == MoeRouting(True, True, True, n_group=8, topk_group=4, scaling_factor=2.5)
    body = HeadBody(False, QkNorm.PER_HEAD, NormConvention.PLAIN, SharedExpert.PLAIN, chain_after_norm=True)
    assert HeadBody.of(c) == body
    assert HeadBody.of(ModelConfig.from_dict(GLM | {"attention_bias": True})) == replace(body, qkv_bias=True)
    bare = {name: value for name, value in GLM.items() if name not in ("partial_rotary_factor", "use_qk_norm")}
    c = ModelConfig.from_dict(bare | {"n_shared_experts": 0, "mtp_hidden_states_first": True})
    assert c.rotary_dim() == 64
    assert HeadBody.of(c).qk_norm is QkNorm.NONE
    assert HeadBody.of(c).shared_expert is SharedExpert.NONE
    assert HeadBody.of(c).hidden_first


def test_a_target_refuses_the_biases_that_a_head_may_have() -> None:
    check_offered(ModelConfig.from_dict(GLM))
    with pytest.raises(UnsupportedError, match="attention_bias"):
        check_offered(ModelConfig.from_dict(GLM | {"attention_bias": True}))


def test_qwen_is_the_default() -> None:
    c = ModelConfig.from_dict(RAW)
    assert HeadBody.of(c) == HeadBody()
    assert MoeRouting.of(c) == MoeRouting()
    assert not HeadBody.of(ModelConfig.from_dict(RAW | {"attn_output_gate": False})).gated


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (MINIMAX | {"scoring_func": "tanh"}, "scoring_func"),
        (MINIMAX | {"qk_norm_type": "none"}, "qk_norm_type"),
        (MINIMAX | {"attn_type_list": [1, 0] * 31}, "attn_type_list"),
        (MINIMAX | {"mtp_transformer_layers": 2}, "mtp_transformer_layers"),
        (MINIMAX | {"layer_types": ["full_attention"]}, "layer_types"),
        (MINIMAX | {"rope_scaling": {"type": "yarn"}}, "rope_scaling.rope_type"),
        (MINIMAX | {"num_local_experts": None}, "num_local_experts"),
        (MINIMAX | {"rotary_dim": 130}, "rotary_dim"),
        (GLM | {"scoring_func": "softmax"}, "scoring_func"),
        (GLM | {"topk_method": "greedy"}, "topk_method"),
        (GLM | {"n_group": 0}, "n_group"),
        (MINIMAX | {"attention_bias": True}, "attention_bias"),
    ],
)
def test_bad_fields_are_named(raw: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(raw)
    assert error.value.field == field


def test_latent_attention_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"deepseek_v3.*latent attention.*DeepSeek-V4's"):
        ModelConfig.from_dict({"model_type": "deepseek_v3"})


@pytest.mark.parametrize(
    "changes", [{"use_routing_bias": True}, {"routed_scaling_factor": 2.0}, {"n_group": 2}], ids=str
)
def test_softmax_has_nothing_of_sigmoid(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="softmax routing with"):
        MoeRouting.of(replace(ModelConfig.from_dict(RAW), **changes))
