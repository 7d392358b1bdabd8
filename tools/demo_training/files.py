# SPDX-License-Identifier: AGPL-3.0-only
"""The checkpoint folder in Hugging Face's form, and the comparison of the model with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from demo_training.base import DemoModel, build, family
from demo_training.corpus import END
from demo_training.settings import Settings

__all__ = ["load_weights", "save", "verify", "write_json"]

WEIGHTS = "model.safetensors"
TOLERANCE = 1e-4
"""Largest difference from transformers, relative to the largest logit. FP32 sums in another order give about 1e-6."""


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save(folder: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and its config. `folder` must exist."""
    write_json(folder / "config.json", family(model.settings).config(model.settings))
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": 0})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    tokenizer.save(str(folder / "tokenizer.json"))
    state = {
        name: value.detach().to("cpu", model.dtype_of(name)).contiguous() for name, value in model.tensors().items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # safetensors makes it readable by its owner alone


def load_weights(folder: Path, s: Settings) -> DemoModel:
    """The model of a folder, its BF16 weights as FP32, on the CPU, in evaluation mode."""
    model = build(s)
    tensors = load_file(folder / WEIGHTS).items()
    model.load_tensors({name: value.float() if value.is_floating_point() else value for name, value in tensors})
    return model.eval()


def verify(folder: Path, model: DemoModel, prompt: list[int]) -> dict[str, Any]:
    """Compares trunk, draft layer and tokenizer with transformers on one prompt, in FP32 on the CPU.

    Returns {"equal": True, ...} with the version and the largest difference of logits relative to the largest logit,
    {"equal": False, ...} with the same or with the error that transformers raised, and {"equal": None, "reason": ...}
    where it cannot be imported. Nothing is raised: a finished training is not lost to another version's API.
    """
    try:
        import transformers
        from transformers import AutoTokenizer
    except ImportError as error:
        return {"equal": None, "reason": f"transformers is not usable here: {error}"}
    result: dict[str, Any] = {"transformers": transformers.__version__}
    try:
        result |= family(model.settings).compare(folder, model, prompt)
        text = AutoTokenizer.from_pretrained(folder).decode(prompt)
        result["tokenizer"] = text == Tokenizer.from_file(str(folder / "tokenizer.json")).decode(prompt)
    except Exception as error:
        return result | {"equal": False, "reason": f"{type(error).__name__}: {error}"}
    same = result["tokenizer"] and max(result["logits"], result["draft_logits"]) <= TOLERANCE
    return result | {"equal": same}
