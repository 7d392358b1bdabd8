# SPDX-License-Identifier: AGPL-3.0-only
"""The checkpoint folder in Hugging Face's form, and the comparison of the model with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo_training.corpus import END
from demo_training.model import EPS, THETA, DemoModel, causal
from demo_training.settings import Settings

__all__ = ["config", "load_weights", "save", "verify", "write_json"]

WEIGHTS = "model.safetensors"
TOLERANCE = 1e-4
"""Largest difference from transformers, relative to the largest logit. FP32 sums in another order give about 1e-6."""


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config(s: Settings) -> dict[str, Any]:
    """config.json. No layer has linear attention, and without experts none has those: such fields are zero, or the
    least that loaders take."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.q_heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.window,
        "initializer_range": 0.02,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "partial_rotary_factor": s.rotary_factor,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": ["full_attention"] * s.layers,
        "mlp_only_layers": [] if s.experts else list(range(s.layers)),
        "decoder_sparse_step": 1,
        "num_experts": s.experts,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.expert_ffn,
        "shared_expert_intermediate_size": s.shared_ffn,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": s.kv_heads,
        "linear_num_value_heads": s.q_heads,
        "linear_key_head_dim": s.head_dim,
        "linear_value_head_dim": s.head_dim,
        "num_mtp_modules": 1,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def save(folder: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    """Writes config.json, model.safetensors (BF16), tokenizer.json and its config. `folder` must exist."""
    write_json(folder / "config.json", config(model.settings))
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": 0})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(folder / "tokenizer.json"))
    state = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.tensors().items()}
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it readable by its owner alone


def load_weights(folder: Path, s: Settings) -> DemoModel:
    """The model of a folder, its BF16 weights as FP32, on the CPU, in evaluation mode."""
    model = DemoModel(s)
    model.load_tensors({name: value.float() for name, value in load_file(folder / WEIGHTS).items()})
    return model.eval()


def verify(folder: Path, model: DemoModel, prompt: list[int]) -> dict[str, Any]:
    """Compares trunk, draft layer and tokenizer with transformers on one prompt, in FP32 on the CPU.

    Returns {"equal": True, ...} with the version and the largest difference of logits relative to the largest logit,
    {"equal": False, ...} with the same or with the error that transformers raised, and {"equal": None, "reason": ...}
    where it cannot be imported. Nothing is raised: a finished training is not lost to another version's API.
    """
    try:
        import transformers
        from transformers import AutoTokenizer, Qwen3NextForCausalLM  # noqa: F401 - importable only with torch
    except ImportError as error:
        return {"equal": None, "reason": f"transformers is not usable here: {error}"}
    result: dict[str, Any] = {"transformers": transformers.__version__}
    try:
        result |= _compare(folder, model, prompt)
    except Exception as error:
        return result | {"equal": False, "reason": f"{type(error).__name__}: {error}"}
    same = result["tokenizer"] and max(result["logits"], result["draft_logits"]) <= TOLERANCE
    return result | {"equal": same}


@torch.no_grad()
def _compare(folder: Path, model: DemoModel, prompt: list[int]) -> dict[str, Any]:
    """transformers has no MTP layer, so the draft layer runs as its one-layer model: inputs are fc's output, positions
    start at 1, the final norm is `mtp.norm`."""
    from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM

    ids = torch.tensor([prompt])
    target = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    hidden = model.hidden(ids)
    ours, theirs = model.logits(hidden), target(ids, use_cache=False).logits
    result: dict[str, Any] = {"logits": _difference(ours, theirs)}

    one = Qwen3NextConfig.from_pretrained(
        folder, num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=target.config.mlp_only_layers[:1]
    )
    one._attn_implementation = "eager"
    draft = Qwen3NextForCausalLM(one).float().eval()
    state = model.state_dict()
    names = {
        name: name.replace("model.", "mtp.", 1)
        for name in draft.state_dict()
        if name.startswith(("model.layers", "model.norm"))
    }
    draft.load_state_dict({name: state[ours_name] for name, ours_name in names.items()}, strict=False)
    draft.lm_head.load_state_dict({"weight": state["lm_head.weight"]})
    embedding = target.model.embed_tokens(ids[:, 1:])
    parts = []
    for norm_name, x in (("pre_fc_norm_embedding", embedding), ("pre_fc_norm_hidden", hidden[:, :-1])):
        norm = type(target.model.norm)(x.shape[-1], eps=one.rms_norm_eps)
        norm.load_state_dict({"weight": state[f"mtp.{norm_name}.weight"]})
        parts.append(norm(x))
    inputs = torch.nn.functional.linear(torch.cat(parts, -1), state["mtp.fc.weight"])
    positions = torch.arange(1, len(prompt))[None]
    theirs = draft(inputs_embeds=inputs, position_ids=positions, use_cache=False).logits
    ours = model.draft_logits(model.draft_hidden(ids[:, 1:], hidden[:, :-1], 1, causal))
    result["draft_logits"] = _difference(ours, theirs)

    text = AutoTokenizer.from_pretrained(folder).decode(prompt)
    result["tokenizer"] = text == Tokenizer.from_file(str(folder / "tokenizer.json")).decode(prompt)
    return result


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
