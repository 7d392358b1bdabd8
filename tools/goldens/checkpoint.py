# SPDX-License-Identifier: AGPL-3.0-only
"""Small checkpoints made from a seed, the same bits wherever NumPy runs, so that they need not be stored.

Their shape differs from the demo's in every number, and no parameter has the value that a loader would put there if it
were missing: norms are not 0, epsilon and theta are not the usual ones.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

__all__ = ["CONFIG", "MOE_CONFIG", "SEED", "digest", "draw", "raw_words", "tensors", "write"]

SEED = 20

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 157,
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.01,
    "rope_theta": 300.0,
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "tie_word_embeddings": False,
    "layer_types": ["full_attention", "full_attention"],
    "mlp_only_layers": [0, 1],
    "num_experts": 0,
    "num_mtp_modules": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}

MOE_CONFIG: dict[str, Any] = CONFIG | {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
    "mlp_only_layers": [1],
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": True,
}
"""Experts in the first and the last layer, and in the MTP head."""
_ROUTER_WIDTH = 3.0
"""Standard deviation of router logits: the experts of a row have quite different weights, and few rows are unclear."""


def raw_words(name: str, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """`count` random words that depend on SEED and `name` alone. A bit generator's raw stream is fixed by NumPy's
    policy; those of the distributions are not."""
    key = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(key[:16], "little")).random_raw(count)


def draw(name: str, *shape: int, width: float, centre: float = 0.0) -> np.ndarray[Any, Any]:
    """BF16, uniform around `centre` with the standard deviation `width`."""
    unit = (raw_words(name, math.prod(shape)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    values = centre + (unit - 0.5) * (width * math.sqrt(12.0))
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).reshape(shape)


def tensors(config: Mapping[str, Any] = CONFIG) -> dict[str, np.ndarray[Any, Any]]:
    """The whole checkpoint under Hugging Face's names: target, and `mtp.` head, which has experts if any layer has."""
    c = config
    h, vocab, layers = c["hidden_size"], c["vocab_size"], range(c["num_hidden_layers"])
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (vocab, h),
        "model.norm": (h,),
        "lm_head": (vocab, h),
        "mtp.pre_fc_norm_embedding": (h,),
        "mtp.pre_fc_norm_hidden": (h,),
        "mtp.fc": (h, 2 * h),
        "mtp.norm": (h,),
    }
    sparse = [bool(c["num_experts"]) and i not in c["mlp_only_layers"] for i in layers]
    for prefix, experts in (
        *((f"model.layers.{i}.", sparse[i]) for i in layers),
        ("mtp.layers.0.", any(sparse)),
    ):
        shapes |= _attention_shapes(prefix, c) | (_expert_shapes if experts else _ffn_shapes)(f"{prefix}mlp.", c)
    found = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            width, centre = 0.3, -0.2  # used as 1 + w
        elif name == "model.embed_tokens":
            width, centre = 1.0, 0.0
        else:
            width, centre = shape[-1] ** -0.5, 0.0  # keeps the size of its input
            if name.endswith("mlp.gate"):
                width *= _ROUTER_WIDTH
        found[f"{name}.weight"] = draw(name, *shape, width=width, centre=centre)
    return found


def _attention_shapes(prefix: str, c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, hd = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    return {
        f"{prefix}input_layernorm": (h,),
        f"{prefix}post_attention_layernorm": (h,),
        f"{prefix}self_attn.q_proj": (2 * q, h),
        f"{prefix}self_attn.k_proj": (kv, h),
        f"{prefix}self_attn.v_proj": (kv, h),
        f"{prefix}self_attn.o_proj": (h, q),
        f"{prefix}self_attn.q_norm": (hd,),
        f"{prefix}self_attn.k_norm": (hd,),
    }


def _ffn_shapes(prefix: str, c: Mapping[str, Any], width: str = "intermediate_size") -> dict[str, tuple[int, ...]]:
    h, inter = c["hidden_size"], c[width]
    return {f"{prefix}gate_proj": (inter, h), f"{prefix}up_proj": (inter, h), f"{prefix}down_proj": (h, inter)}


def _expert_shapes(prefix: str, c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, experts = c["hidden_size"], c["num_experts"]
    shapes = {f"{prefix}gate": (experts, h), f"{prefix}shared_expert_gate": (1, h)}
    shapes |= _ffn_shapes(f"{prefix}shared_expert.", c, "shared_expert_intermediate_size")
    for expert in range(experts):
        shapes |= _ffn_shapes(f"{prefix}experts.{expert}.", c, "moe_intermediate_size")
    return shapes


def write(folder: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """config.json and model.safetensors in `folder`, which must exist."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors(config), folder / "model.safetensors", metadata={"format": "pt"})


def digest(folder: Path) -> str:
    """SHA-256 of a checkpoint's configuration and tensors, whatever the order in its files."""
    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, value in sorted(load_file(folder / "model.safetensors").items()):
        found.update(f"{name} {value.dtype} {value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    return found.hexdigest()
