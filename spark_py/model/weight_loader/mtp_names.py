# SPDX-License-Identifier: AGPL-3.0-only
"""The tensors of a Qwen3-Next, 3.5 or 3.6 MTP module: names in a checkpoint, shapes, and which of them are norms."""

from __future__ import annotations

from typing import TypeAlias

from ..config import ModelConfig

__all__ = [
    "DENSE",
    "LAYER",
    "MLP",
    "PROJECTIONS",
    "ROUTER",
    "STACKED",
    "Named",
    "attention_tensor_shapes",
    "expert_tensor_shapes",
    "ffn_tensor_shapes",
    "is_plain",
    "mtp_tensor_shapes",
    "routing_tensor_shapes",
    "stacked_tensor_shapes",
]

LAYER = "mtp.layers.0."
MLP = f"{LAYER}mlp."
DENSE, ROUTER = f"{MLP}gate_proj.weight", f"{MLP}gate.weight"
STACKED = (f"{MLP}experts.gate_up_proj", f"{MLP}experts.down_proj")
"""All routed experts in two tensors, without `.weight`."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PLAIN = frozenset({"moe_gate", "shared_expert_gate", "q_bias", "k_bias", "v_bias"})

Named: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Field -> (name in the checkpoint, shape)."""


def is_plain(field: str) -> bool:
    """Whether a field of MtpWeights is read as plain BF16 in every checkpoint: norms, biases, router and shared
    gate."""
    return "norm" in field or field in _PLAIN


def mtp_tensor_shapes(config: ModelConfig) -> Named:
    """The tensors of a head with a dense FFN: fields of MtpWeights, and of its dense_ffn."""
    return attention_tensor_shapes(config) | ffn_tensor_shapes(MLP, config.intermediate_size, config.hidden_size)


def attention_tensor_shapes(config: ModelConfig) -> Named:
    """What every head has: all fields of MtpWeights but the FFN's."""
    h, hd = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    return {
        "pre_fc_norm_embedding": ("mtp.pre_fc_norm_embedding.weight", (h,)),
        "pre_fc_norm_hidden": ("mtp.pre_fc_norm_hidden.weight", (h,)),
        "fc": ("mtp.fc.weight", (h, 2 * h)),
        "input_layernorm": (f"{LAYER}input_layernorm.weight", (h,)),
        "q_proj": (f"{LAYER}self_attn.q_proj.weight", (2 * q, h)),
        "k_proj": (f"{LAYER}self_attn.k_proj.weight", (kv, h)),
        "v_proj": (f"{LAYER}self_attn.v_proj.weight", (kv, h)),
        "o_proj": (f"{LAYER}self_attn.o_proj.weight", (h, q)),
        "q_norm": (f"{LAYER}self_attn.q_norm.weight", (hd,)),
        "k_norm": (f"{LAYER}self_attn.k_norm.weight", (hd,)),
        "post_attn_layernorm": (f"{LAYER}post_attention_layernorm.weight", (h,)),
        "norm": ("mtp.norm.weight", (h,)),
    }


def ffn_tensor_shapes(prefix: str, inter: int, h: int) -> Named:
    """The three projections of a SwiGLU FFN of width `inter`."""
    shapes = ((inter, h), (inter, h), (h, inter))
    return {name: (f"{prefix}{name}.weight", shape) for name, shape in zip(PROJECTIONS, shapes, strict=True)}


def routing_tensor_shapes(config: ModelConfig) -> Named:
    """The two BF16 gates of a mixture: fields of MtpWeights."""
    h = config.hidden_size
    return {
        "moe_gate": (ROUTER, (config.num_experts, h)),
        "shared_expert_gate": (f"{MLP}shared_expert_gate.weight", (1, h)),
    }


def expert_tensor_shapes(config: ModelConfig) -> list[Named]:
    """The shared expert, and after it the routed ones, three tensors each."""
    h, inter = config.hidden_size, config.moe_intermediate_size
    shared = ffn_tensor_shapes(f"{MLP}shared_expert.", config.shared_expert_intermediate_size or inter, h)
    return [shared, *(ffn_tensor_shapes(f"{MLP}experts.{e}.", inter, h) for e in range(config.num_experts))]


def stacked_tensor_shapes(config: ModelConfig) -> Named:
    """The routed experts as two stacks: an expert's gate rows come before its up rows."""
    experts, inter, h = config.num_experts, config.moe_intermediate_size, config.hidden_size
    shapes = ((experts, 2 * inter, h), (experts, h, inter))
    return {name.rpartition(".")[2]: (name, shape) for name, shape in zip(STACKED, shapes, strict=True)}
