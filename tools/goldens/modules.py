# SPDX-License-Identifier: AGPL-3.0-only
"""Small checkpoints with several MTP modules, made from a seed as those of `checkpoint`: GLM-4.5 and MiniMax-M2.

Module i is layer `num_hidden_layers + i`. What the layers add to the residual stream is small, and `eh_proj` has the
identity over the embedding, so that what follows a token depends on it above all, for the target as for every module:
drafts of random weights would never be accepted otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from .checkpoint import draw

__all__ = ["CONFIGS", "DRAFTS", "module_count", "tensors", "write"]

_SHAPE: dict[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.01,
    "rope_theta": 300.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_GLM: dict[str, Any] = _SHAPE | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "vocab_size": 113,
    "intermediate_size": 88,
    "moe_intermediate_size": 40,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe_2": _GLM
    | {
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 2,
    },
    "glm4_moe_3": _GLM
    | {
        "vocab_size": 127,
        "hidden_size": 72,
        "num_key_value_heads": 1,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 3,
    },
    "minimax_m2": _SHAPE
    | {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "vocab_size": 109,
        "intermediate_size": 40,
        "shared_intermediate_size": 0,
        "rotary_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_mtp_modules": 3,
    },
}
"""GLM-4.5 with groups of experts and norms of each head, and without both; MiniMax-M2, whose norms are of whole
vectors."""

_ADDED = 0.35
"""How wide what a layer adds is drawn, beside what would keep the size of its input; eh_proj too, beside its 1."""
_ROUTER_WIDTH = 3.0


def module_count(config: Mapping[str, Any]) -> int:
    return int(config.get("num_nextn_predict_layers", 0) or config["num_mtp_modules"])


DRAFTS = {name: module_count(config) for name, config in CONFIGS.items()}


def tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The whole checkpoint under its published names. BF16, but for the routers' biases, which are FP32."""
    c = config
    h, vocab, layers = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    minimax = c["model_type"] == "minimax_m2"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, h),
        "model.norm.weight": (h,),
        "lm_head.weight": (vocab, h),
    }
    for i in range(layers + module_count(c)):
        prefix = f"model.layers.{i}."
        shapes |= _attention_shapes(prefix, c, minimax) | (_minimax_experts if minimax else _glm_ffn)(prefix, c, i)
        if i >= layers:
            norm = "norm" if minimax else "shared_head.norm"
            shapes |= {f"{prefix}{name}.weight": (h,) for name in ("enorm", "hnorm", norm)}
            shapes[f"{prefix}eh_proj.weight"] = (h, 2 * h)
    return {name: _drawn(name, shape) for name, shape in shapes.items()}


def _drawn(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if name.endswith("e_score_correction_bias"):
        return draw(name, *shape, width=0.1).astype(np.float32)
    if len(shape) == 1:
        return draw(name, *shape, width=0.3, centre=0.9)
    width = shape[-1] ** -0.5
    if name == "model.embed_tokens.weight":
        width = 1.0
    elif name.endswith("gate.weight"):
        width *= _ROUTER_WIDTH
    elif name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight", "eh_proj.weight")):
        width *= _ADDED
    values = draw(name, *shape, width=width)
    if name.endswith("eh_proj.weight"):
        values = values.astype(np.float32)
        values[:, : shape[0]] += np.eye(shape[0], dtype=np.float32)
        values = values.astype(ml_dtypes.bfloat16)
    return values


def _attention_shapes(prefix: str, c: Mapping[str, Any], whole: bool) -> dict[str, tuple[int, ...]]:
    h, hd = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (q, h),
        "self_attn.k_proj": (kv, h),
        "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, q),
    }
    if c["use_qk_norm"]:
        shapes |= {"self_attn.q_norm": (q if whole else hd,), "self_attn.k_norm": (kv if whole else hd,)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _swiglu(prefix: str, inter: int, h: int, names: tuple[str, str, str]) -> dict[str, tuple[int, ...]]:
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    return {gate: (inter, h), up: (inter, h), down: (h, inter)}


def _glm_ffn(prefix: str, c: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    h, inter, names = c["hidden_size"], c["moe_intermediate_size"], ("gate_proj", "up_proj", "down_proj")
    if layer < c["first_k_dense_replace"]:
        return _swiglu(f"{prefix}mlp.", c["intermediate_size"], h, names)
    experts = c["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}mlp.gate.weight": (experts, h),
        f"{prefix}mlp.gate.e_score_correction_bias": (experts,),
        **_swiglu(f"{prefix}mlp.shared_experts.", inter * c["n_shared_experts"], h, names),
    }
    for expert in range(experts):
        shapes |= _swiglu(f"{prefix}mlp.experts.{expert}.", inter, h, names)
    return shapes


def _minimax_experts(prefix: str, c: Mapping[str, Any], _layer: int) -> dict[str, tuple[int, ...]]:
    h, experts, prefix = c["hidden_size"], c["num_local_experts"], f"{prefix}block_sparse_moe."
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}gate.weight": (experts, h),
        f"{prefix}e_score_correction_bias": (experts,),
    }
    for expert in range(experts):
        shapes |= _swiglu(f"{prefix}experts.{expert}.", c["intermediate_size"], h, ("w1", "w3", "w2"))
    return shapes


def write(folder: Path, config: Mapping[str, Any]) -> None:
    """config.json and model.safetensors in `folder`, which must exist."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors(config), folder / "model.safetensors", metadata={"format": "pt"})
