# SPDX-License-Identifier: AGPL-3.0-only
"""A small DeepSeek-V4 checkpoint made from a seed as those of `checkpoint`, under the published names, with its MTP
module; and what the fixture `v4` is computed on.

No number is the published one: norms are not 1, sinks and biases not 0, epsilons large enough to be missed, few enough
steps of Sinkhorn that their order shows, and a limit of SwiGLU that activations exceed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from . import checkpoint

__all__ = ["CONFIG", "FIRST", "LENGTHS", "NAME", "WINDOW", "V4Case", "case", "streams", "tensors", "write"]

Array = np.ndarray[Any, Any]

NAME = "v4"
WINDOW = 8
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
"""Of the sequences that a layer alone is held against."""
FIRST = 6
"""The first base position of every sequence's drafts."""

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 139,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention"] * 2,
    "mlp_layer_types": ["hash_moe", "moe"],
    "rope_theta": 300.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 0.02,
    "rms_norm_eps": 0.01,
    "n_routed_experts": 7,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.25,
    "swiglu_limit": 1.5,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ROUTER_WIDTH = 3.0


@dataclass(frozen=True)
class V4Case:
    """Candidates for token sequences, of which `clear` are taken as in `cases.Case`. Of every `target_step`-th and
    `head_step`-th row all logits are kept."""

    sequences: list[list[int]]
    clear: int
    target_step: int
    head_step: int


def case() -> V4Case:
    count, clear = 2, 4 * WINDOW
    ids = (checkpoint.raw_words("prompts of v4", count * 6 * clear) % np.uint64(CONFIG["vocab_size"])).tolist()
    return V4Case([ids[i * 6 * clear : (i + 1) * 6 * clear] for i in range(count)], clear, 3, 4)


def wide(name: str, *shape: int, width: float, centre: float = 0.0) -> Array:
    """FP32, uniform as `checkpoint.draw` is, of more bits than BF16 has."""
    unit = (checkpoint.raw_words(name, math.prod(shape)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    values: Array = (centre + (unit - 0.5) * (width * math.sqrt(12.0))).astype(np.float32).reshape(shape)
    return values


def streams(layer: int) -> Array:
    """What a layer alone is given: FP32 [3 WINDOW, hc_mult, hidden_size], streams of sizes that differ."""
    shape = (LENGTHS[-1], CONFIG["hc_mult"], CONFIG["hidden_size"])
    sizes = np.array([1.0, 0.5, 4.0, 2.0], np.float32)[:, None]
    found: Array = wide(f"streams of layer {layer}", *shape, width=1.0) * sizes
    return found


def tensors() -> dict[str, Array]:
    """The whole checkpoint."""
    c = CONFIG
    h, vocab = c["hidden_size"], c["vocab_size"]
    found = {
        "embed.weight": checkpoint.draw("v4 embed", vocab, h, width=1.0),
        "head.weight": _matrix("head", vocab, h),
        "norm.weight": _norm("norm", h),
        **_site("hc_head", c["hc_mult"], 1),
        **{f"mtp.0.{name}.weight": _norm(f"mtp.0.{name}", h) for name in ("enorm", "hnorm", "norm")},
        **{f"mtp.0.{name}.weight": _matrix(f"mtp.0.{name}", h, h) for name in ("e_proj", "h_proj")},
        **_site("mtp.0.hc_head", c["hc_mult"], 1),
    }
    for layer, kind in enumerate(c["mlp_layer_types"]):
        found |= _block(f"layers.{layer}.", kind == "hash_moe")
    return found | _block("mtp.0.", hashed=False)


def _matrix(name: str, n: int, k: int, gain: float = 1.0) -> Array:
    """A projection that keeps the size of its input, times `gain`."""
    return checkpoint.draw(f"v4 {name}", n, k, width=gain * k**-0.5)


def _norm(name: str, size: int) -> Array:
    return checkpoint.draw(f"v4 {name}", size, width=0.3, centre=0.9)


def _site(prefix: str, mixes: int, scales: int) -> dict[str, Array]:
    """Parameters of a hyper-connection: mixes of about 1."""
    size = CONFIG["hc_mult"] * CONFIG["hidden_size"]
    return {
        f"{prefix}_fn": wide(f"{prefix}_fn", mixes, size, width=size**-0.5),
        f"{prefix}_base": wide(f"{prefix}_base", mixes, width=1.0),
        f"{prefix}_scale": wide(f"{prefix}_scale", scales, width=0.2, centre=1.0),
    }


def _block(prefix: str, hashed: bool) -> dict[str, Array]:
    c = CONFIG
    h, d, heads, rank, hc = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["q_lora_rank"], c["hc_mult"]
    out, inter, experts, top = (
        c["o_groups"] * c["o_lora_rank"], c["moe_intermediate_size"], c["n_routed_experts"], c["num_experts_per_tok"],
    )  # fmt: skip
    sinks = wide(f"{prefix}attn_sink", heads, width=1.0)
    sinks[:2] = 8.0, -30.0  # one that takes nearly all weight, one that takes none
    found = {
        "attn.wq_a.weight": _matrix(f"{prefix}wq_a", rank, h),
        "attn.q_norm.weight": _norm(f"{prefix}q_norm", rank),
        "attn.wq_b.weight": _matrix(f"{prefix}wq_b", heads * d, rank),
        "attn.wkv.weight": _matrix(f"{prefix}wkv", d, h),
        "attn.kv_norm.weight": _norm(f"{prefix}kv_norm", d),
        "attn.wo_a.weight": _matrix(f"{prefix}wo_a", out, heads * d // c["o_groups"]),
        "attn.wo_b.weight": _matrix(f"{prefix}wo_b", h, out),
        "attn.attn_sink": sinks,
        "attn_norm.weight": _norm(f"{prefix}attn_norm", h),
        "ffn_norm.weight": _norm(f"{prefix}ffn_norm", h),
        "ffn.gate.weight": _matrix(f"{prefix}gate", experts, h, _ROUTER_WIDTH),
    }
    for site in ("hc_attn", "hc_ffn"):
        found |= {name.removeprefix(prefix): value for name, value in _site(prefix + site, (2 + hc) * hc, 3).items()}
    if hashed:
        words = checkpoint.raw_words(f"{prefix}tid2eid", c["vocab_size"] * experts).reshape(-1, experts)
        found["ffn.gate.tid2eid"] = np.argsort(words, axis=1)[:, :top].astype(np.int64)
    else:
        found["ffn.gate.bias"] = wide(f"{prefix}bias", experts, width=1.0)
    for name in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
        for part, (n, k) in {"w1": (inter, h), "w3": (inter, h), "w2": (h, inter)}.items():
            found[f"ffn.{name}.{part}.weight"] = _matrix(f"{prefix}{name}.{part}", n, k)
    return {prefix + name: value for name, value in found.items()}


def write(folder: Path, values: dict[str, Array] | None = None) -> None:
    """config.json and model.safetensors in `folder`, which must exist; with `values` instead of `tensors`."""
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    save_file(tensors() if values is None else values, folder / "model.safetensors", metadata={"format": "pt"})
