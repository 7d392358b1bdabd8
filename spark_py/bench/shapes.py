# SPDX-License-Identifier: AGPL-3.0-only
"""The draft heads that are measured, by name, and how many bytes a draft of each must read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from spark_py.model.config import ModelConfig
from spark_py.model.layers.deepseek_v4 import V4Shapes
from spark_py.runtime.errors import InvalidArgumentError

__all__ = ["DRAFT_VOCAB", "MODES", "NAMES", "BenchShape", "Reads", "bytes_read", "shape_of", "v4_parts_read"]

DRAFT_VOCAB = 100_000
"""Rows of the tables of the shapes that have more: the default of the engine's command line for its drafts."""
MODES = ("bf16", "fp8", "fp8+nvfp4", "nvfp4", "mxfp4")
"""fp8+nvfp4: the head in FP8 over a target whose LM head is NVFP4, as `--mtp-quantization fp8` has it there."""
_WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "fp8+nvfp4": 1.0, "nvfp4": 0.5625}
_LM_HEAD_BYTES = {"bf16": 2.0, "fp8": 2.0, "fp8+nvfp4": 0.5625, "nvfp4": 0.5625}
_MXFP4_BYTES = 17 / 32

_QWEN: dict[str, Any] = {
    "model_type": "qwen3_next", "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "num_hidden_layers": 1, "layer_types": ["full_attention"],
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
_V4: dict[str, Any] = {
    "model_type": "deepseek_v4", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "num_hidden_layers": 1,
    "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"], "num_key_value_heads": 1, "hc_eps": 1e-6,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
_CONFIGS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "qwen3.6-27b": _QWEN | {
            "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
            "intermediate_size": 17408, "vocab_size": DRAFT_VOCAB, "mlp_only_layers": [0],
        },
        "qwen3-next-80b": _QWEN | _EXPERTS | {
            "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
            "intermediate_size": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts": 512, "num_experts_per_tok": 10, "vocab_size": DRAFT_VOCAB,
        },
        "deepseek-v4-flash": _V4 | {
            "hidden_size": 4096, "num_attention_heads": 64, "head_dim": 512, "qk_rope_head_dim": 64,
            "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "n_routed_experts": 256,
            "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "hc_mult": 4, "hc_sinkhorn_iters": 20,
            "vocab_size": 129280,
        },
        "minimax-m2": {
            "model_type": "minimax_m2", "rms_norm_eps": 1e-6, "rope_theta": 5e6, "rotary_dim": 64,
            "hidden_size": 3072, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "num_mtp_modules": 1,
            "vocab_size": DRAFT_VOCAB, "num_hidden_layers": 1,
        },
        "demo": _QWEN | _EXPERTS | {
            "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
            "intermediate_size": 192, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192,
            "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024, "partial_rotary_factor": 0.5,
        },
    }
)  # fmt: skip
NAMES = tuple(_CONFIGS)
_MODES_OF = {
    "qwen3.6-27b": ("bf16", "fp8", "fp8+nvfp4"),
    "qwen3-next-80b": ("bf16", "fp8", "nvfp4"),
    "deepseek-v4-flash": ("bf16", "mxfp4"),
    "minimax-m2": ("bf16", "fp8", "nvfp4"),
    "demo": ("bf16", "fp8", "fp8+nvfp4", "nvfp4"),
}
_WHY_NOT = {
    ("qwen3.6-27b", "nvfp4"): "a head with a dense FFN is not offered in nvfp4",
    ("deepseek-v4-flash", "fp8"): "its projections are FP8 in mode mxfp4, as in the published files",
}


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A head to be measured. `modes`: what its weights may be stored as. `context`: KV rows of a sequence by default.
    Of a mode mxfp4 the experts are MXFP4 and the other projections block-scaled FP8."""

    name: str
    config: ModelConfig
    modes: tuple[str, ...]
    context: int

    @property
    def is_v4(self) -> bool:
        """Whether the head is DeepSeek-V4's."""
        return self.config.model_type == "deepseek_v4"

    def check_mode(self, mode: str) -> None:
        """InvalidArgumentError for a mode that this shape does not have."""
        if mode not in self.modes:
            why = _WHY_NOT.get((self.name, mode), "no head of this family stores its weights so")
            raise InvalidArgumentError("--mode", mode, f"{self.name} has {', '.join(self.modes)}: {why}")


@cache
def shape_of(name: str) -> BenchShape:
    """The shape called `name`; InvalidArgumentError, with those that there are, for another word."""
    if name not in _CONFIGS:
        raise InvalidArgumentError("--shape", name, f"one of {', '.join(NAMES)}")
    context = 256 if name == "demo" else 4096
    return BenchShape(name, ModelConfig.from_dict(_CONFIGS[name], f"shape {name}"), _MODES_OF[name], context)


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes of a draft. `shared`: weights that all rows of a batch share. `expert`: a routed expert, of which a row
    takes `top_k` of `experts`. `own`: the KV rows of one sequence."""

    shared: float
    own: float
    expert: float = 0.0
    experts: int = 0
    top_k: int = 0

    def rows(self, n: int) -> float:
        """Bytes that a draft of n sequences must read. Experts that several rows choose are read once: where each row
        chooses at random, E * (1 - (1 - k / E)^n) of them are chosen."""
        chosen = self.experts * (1.0 - (1.0 - self.top_k / self.experts) ** n) if self.experts else 0.0
        return self.shared + self.expert * chosen + n * self.own


def bytes_read(shape: BenchShape, mode: str, context: int) -> Reads:
    """What a draft reads after `context` KV rows. Norms, ids and row scales, below a thousandth, are left out."""
    shape.check_mode(mode)
    c = shape.config
    if shape.is_v4:
        parts = v4_parts_read(V4Shapes.of(c), c.vocab_size, mode)
        return Reads(
            sum(reads.shared for reads in parts.values()),
            2.0 * min(context, c.sliding_window) * c.head_dim,
            parts["mixture"].expert,
            c.num_experts,
            c.num_experts_per_tok,
        )
    h, each, packed = c.hidden_size, _WEIGHT_BYTES[mode], mode == "nvfp4"
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shared = each * (2 * h * h + (2 if c.attn_gated else 1) * q * h + 2 * kv * h + h * q)
    shared += c.vocab_size * h * _LM_HEAD_BYTES[mode]
    own = 2.0 * kv * context * (1.0 if packed else 2.0)
    if not c.num_experts:
        return Reads(shared + each * 3 * h * c.intermediate_size, own)
    shared += 2.0 * c.num_experts * h + each * 3 * h * c.shared_expert_intermediate_size
    return Reads(shared, own, each * 3 * h * c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok)


def v4_parts_read(shapes: V4Shapes, vocab: int, mode: str = "mxfp4") -> dict[str, Reads]:
    """What each part of a DeepSeek-V4 draft reads, with a full window."""
    a, ffn, hyper = shapes.attention, shapes.ffn, shapes.hyper
    h, out = a.hidden_size, a.o_groups * a.o_lora_rank
    each, routed = (2.0, 2.0) if mode == "bf16" else (1.0, _MXFP4_BYTES)
    attention = each * (a.q_lora_rank * h + a.q_size * a.q_lora_rank + a.head_dim * h + out * a.group_size + h * out)
    expert = 3.0 * h * ffn.inter
    mixture = 2.0 * ffn.num_experts * h + each * expert
    return {
        "combiner": Reads(each * 2 * h * h, 0.0),
        "attention": Reads(attention, 2.0 * a.window * a.head_dim),
        "mixture": Reads(mixture, 0.0, routed * expert, ffn.num_experts, ffn.top_k),
        "connections": Reads(2 * 4.0 * (2 + hyper.hc_mult) * hyper.hc_mult * hyper.hc_mult * h, 0.0),
        "LM head": Reads(2.0 * vocab * h + 4.0 * hyper.hc_mult**2 * h, 0.0),
    }
