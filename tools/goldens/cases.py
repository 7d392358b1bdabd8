# SPDX-License-Identifier: AGPL-3.0-only
"""What the fixtures are computed on, and how they are kept.

A fixture is one .npz a checkpoint. Sequences of all cases lie one behind the other; `*_lengths` says where each ends.
A target row is a position of a sequence. A head row is one draft: DRAFTS rows a base position, base positions
`head_first` to the end of each sequence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import checkpoint

__all__ = ["CONFIGS", "DEMO", "DRAFTS", "NAMES", "ROOT", "Case", "case", "load", "save"]

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "spark_py" / "demo_models" / "qwen3_next"
NAMES = ("random", "random_moe", "demo")
CONFIGS = {"random": checkpoint.CONFIG, "random_moe": checkpoint.MOE_CONFIG}
"""The configurations of checkpoints that a seed gives."""
DRAFTS = 3
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """Token sequences of one checkpoint. `decided[i]` is the first position of sequence i whose pick matters: where the
    prompt ends, 0 for random tokens. The head runs on the first `head_sequences`, from base position `head_first[i]`.
    Of every `target_step`-th and `head_step`-th row all logits are kept; the latter is no multiple of DRAFTS, so that
    each draft of a chain has its turn.

    With `clear`, a sequence is what may become one: its tokens are taken in order, without those at whose row a router
    chooses between nearly equal experts, where BF16 may choose otherwise and be right, until there are so many."""

    sequences: list[list[int]]
    decided: list[int]
    head_sequences: int
    head_first: list[int]
    target_step: int
    head_step: int
    clear: int = 0


def case(name: str) -> Case:
    """`random...`: random tokens. `demo`: the first ten held-out prompts and what the checkpoint wrote after them when
    it was trained, which is where decoding goes."""
    if name in CONFIGS:
        config = CONFIGS[name]
        count, clear = 6, 50 if config["num_experts"] else 0
        length = 3 * clear or 50
        ids = (checkpoint.raw_words("prompts", count * length) % np.uint64(config["vocab_size"])).tolist()
        sequences = [ids[i * length : (i + 1) * length] for i in range(count)]
        return Case(sequences, [0] * count, 4, [6] * 4, 1, 4, clear)
    prompts = json.loads((DEMO / "prompts.json").read_text(encoding="utf-8"))["prompts"][:10]
    written = json.loads((DEMO / "metrics.json").read_text(encoding="utf-8"))["prompts"][:10]
    pairs = [(prompt["ids"], new["tokens"]) for prompt, new in zip(prompts, written, strict=True)]
    sequences = [[*prompt, *new] for prompt, new in pairs]
    decided = [len(prompt) - 1 for prompt, _ in pairs]
    # The drafter sees the prompt; it drafts from the first new token on.
    return Case(sequences, decided, 4, [at + 1 for at in decided[:4]], 20, 13)


def save(path: Path, meta: dict[str, Any], arrays: dict[str, Array]) -> None:
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)  # type: ignore[arg-type]


def load(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """(meta, arrays) of a fixture."""
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    return json.loads(str(arrays.pop("meta"))), arrays
