# SPDX-License-Identifier: AGPL-3.0-only
"""ModelConfig of DeepSeek-V4: the published file and the one that transformers writes say the same."""

from __future__ import annotations

from typing import Any

import pytest

from spark_py.model.config import ModelConfig
from spark_py.runtime.buffers import BufferSizes
from spark_py.runtime.errors import ConfigError

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "index_n_heads": 64,
    "max_position_embeddings": 1048576,
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""The file of DeepSeek-V4-Flash, with a layer that a compressor serves where it has one."""

KINDS = ("sliding_attention", "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")

TRANSFORMERS: dict[str, Any] = {
    name: value
    for name, value in FLASH.items()
    if name not in ("torch_dtype", "num_hash_layers", "rope_scaling", "compress_ratios", "rope_theta", "topk_method")
} | {
    "dtype": "bfloat16",
    "partial_rotary_factor": 0.125,
    "layer_types": [KINDS[0], KINDS[1], *([KINDS[2], KINDS[3]] * 20), KINDS[2]],
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
        "compress": {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16},
    },
}


@pytest.mark.parametrize("raw", [FLASH, TRANSFORMERS], ids=["DeepSeek's", "transformers'"])
def test_both_forms_of_the_file(raw: dict[str, Any]) -> None:
    c = ModelConfig.from_dict(raw)
    assert (c.model_type, c.hidden_size, c.vocab_size, c.num_hidden_layers) == ("deepseek_v4", 4096, 129280, 43)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (64, 1, 512)
    assert (c.kv_lora_rank, c.q_lora_rank, c.qk_rope_head_dim, c.rotary_dim()) == (512, 1024, 64, 64)
    assert (c.o_groups, c.o_lora_rank, c.sliding_window, c.rope_theta) == (8, 1024, 128, 10000.0)
    assert (c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size) == (256, 6, 2048)
    assert (c.shared_expert_intermediate_size, c.routed_scaling_factor, c.swiglu_limit) == (2048, 1.5, 10.0)
    assert (c.hc_mult, c.hc_sinkhorn_iters, c.hc_eps, c.num_hash_layers, c.num_mtp_modules) == (4, 20, 1e-6, 3, 1)
    assert c.layer_types[:4] == KINDS
    assert len(c.layer_types) == 43
    assert all(c.is_sparse_layer(layer) for layer in range(43))
    assert (c.eos_token_ids, c.bos_token_id, c.attn_gated) == ((1,), 0, False)
    assert {"architectures", "compress_rope_theta", "index_n_heads"} <= set(c.unknown)
    BufferSizes.from_config(c, 32, 1024, 16, 1)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"compress_ratios": None}, "layer_types"),
        ({"compress_ratios": [0] * 42}, "compress_ratios"),
        ({"compress_ratios": [0] * 42 + [7, 0]}, "compress_ratios"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"num_hash_layers": None}, "num_hash_layers"),
        ({"mlp_layer_types": ["moe", *["hash_moe"] * 42]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types"),
        ({"qk_rope_head_dim": None}, "rope_parameters.main.partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"main": {"rope_type": "yarn"}}}, "rope_parameters.main.rope_type"),
        ({"rope_theta": None}, "rope_parameters.main.rope_theta"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"n_group": 8}, "n_group"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"sliding_window": None}, "sliding_window"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(FLASH | changed)
    assert caught.value.field == field
