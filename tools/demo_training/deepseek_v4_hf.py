# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4's config.json, and the comparison of the training script's model with transformers."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from demo_training.base import EPS, THETA, DemoModel, difference
from demo_training.settings import Settings

__all__ = ["ITERATIONS", "LIMIT", "SCALING", "compare", "config"]

LIMIT = 10.0  # of SwiGLU's factors
SCALING = 1.5  # of the routed experts' weights
ITERATIONS = 20  # of Sinkhorn


def config(s: Settings) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": s.q_heads,
        "num_key_value_heads": 1,
        "head_dim": s.head_dim,
        "qk_rope_head_dim": int(s.rotary_factor * s.head_dim),
        "partial_rotary_factor": s.rotary_factor,
        "q_lora_rank": s.q_rank,
        "o_lora_rank": s.out_rank,
        "o_groups": s.out_groups,
        "sliding_window": s.attention_window,
        "layer_types": ["sliding_attention"] * s.layers,
        "rope_theta": THETA,
        "hc_mult": s.streams,
        "hc_sinkhorn_iters": ITERATIONS,
        "hc_eps": EPS,
        "mlp_layer_types": ["hash_moe" if index < s.hash_layers else "moe" for index in range(s.layers)],
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.expert_ffn,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": SCALING,
        "swiglu_limit": LIMIT,
        "hidden_act": "silu",
        "max_position_embeddings": s.window,
        "initializer_range": 0.02,
        "rms_norm_eps": EPS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


@torch.no_grad()
def compare(folder: Path, model: DemoModel, prompt: list[int]) -> dict[str, Any]:
    """transformers has no MTP module, so this one runs as its one-layer model: the layer reads what the module's
    projections give, at positions from 1, and the module's head and norm stand for the model's."""
    from transformers import DeepseekV4ForCausalLM

    def read(name: Path) -> Any:
        return DeepseekV4ForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager").eval()

    ids = torch.tensor([prompt])
    hidden = model.hidden(ids)
    ours, theirs = model.logits(hidden), read(folder)(ids, use_cache=False).logits
    result: dict[str, Any] = {"logits": difference(ours, theirs)}
    with tempfile.TemporaryDirectory() as name:
        one = config(model.settings) | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
        (Path(name) / "config.json").write_text(json.dumps(one | {"mlp_layer_types": ["moe"]}), encoding="utf-8")
        own = ("norm.", "hc_head_")
        state = {part: value.contiguous() for part, value in model.tensors().items() if part.startswith("mtp.0.")}
        state = {part.removeprefix("mtp.0."): value for part, value in state.items()}
        state = {part if part.startswith(own) else f"layers.0.{part}": value for part, value in state.items()}
        state |= {part: model.tensors()[part].clone() for part in ("embed.weight", "head.weight")}
        outside = ("layers.0.enorm", "layers.0.hnorm", "layers.0.e_proj", "layers.0.h_proj")
        kept = {part: value for part, value in state.items() if not part.startswith(outside)}
        save_file(kept, Path(name) / "model.safetensors", metadata={"format": "pt"})
        draft = read(Path(name))
    embedding = model.embed(ids[:, 1:])
    parts = {}
    for norm, x in (("enorm", embedding), ("hnorm", hidden[:, :-1])):
        theirs_norm = type(draft.model.norm)(x.shape[-1], eps=EPS)
        theirs_norm.load_state_dict({"weight": state[f"layers.0.{norm}.weight"]})
        parts[norm] = functional.linear(theirs_norm(x), state[f"layers.0.{norm[0]}_proj.weight"])
    streams = parts["enorm"].unsqueeze(2) + parts["hnorm"]
    positions = torch.arange(1, len(prompt))[None]
    row, column = positions.T, positions
    seen = (column <= row) & (column > row - model.settings.attention_window)
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    turns = {kind: draft.model.rotary_emb(embedding, positions, layer_type=kind) for kind in ("main", "compress")}
    out = draft.model.layers[0](streams, position_embeddings=turns, position_ids=positions, attention_mask=mask)
    theirs = draft.lm_head(draft.model.norm(draft.model.hc_head(out)))
    return result | {"draft_logits": difference(model.draft_logits(model.first_drafts(ids, hidden)), theirs)}
