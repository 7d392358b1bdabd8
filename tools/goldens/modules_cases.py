# SPDX-License-Identifier: AGPL-3.0-only
"""What the fixtures of several MTP modules are computed on. Their arrays are named as those of `cases`; a head row is
one draft, a row a module at each base position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import checkpoint, modules

__all__ = ["FIRST", "NAMES", "ModulesCase", "case", "config_of"]

FIRST = 6
"""The first base position of every sequence."""
_LOOPS = ("glm4_moe_2", "glm4_moe_3")
NAMES = (*modules.CONFIGS, *(f"{name}_loop" for name in _LOOPS))


@dataclass(frozen=True)
class ModulesCase:
    """`sequences` as in `cases.Case`, or, with `new_tokens`, prompts: the sequences are what transformers'
    `generate(use_mtp=True)` writes after them, whose steps the fixture then has (`loop_positions`, `loop_drafts`)."""

    sequences: list[list[int]]
    target_step: int
    head_step: int
    clear: int = 0
    new_tokens: int = 0


def config_of(name: str) -> dict[str, Any]:
    """In a loop the tokens cannot be chosen, so all experts are: no choice may be unclear."""
    config = modules.CONFIGS[name.removesuffix("_loop")]
    if name in modules.CONFIGS:
        return config
    return config | {"num_experts_per_tok": config["n_routed_experts"], "topk_group": config["n_group"]}


def case(name: str) -> ModulesCase:
    loop = name not in modules.CONFIGS
    count, clear = 2, 0 if loop else 36
    length = FIRST if loop else 8 * clear
    vocab = np.uint64(config_of(name)["vocab_size"])
    ids = (checkpoint.raw_words(f"prompts of {name}", count * length) % vocab).tolist()
    sequences = [ids[i * length : (i + 1) * length] for i in range(count)]
    return ModulesCase(sequences, 3, 5, clear, 34 if loop else 0)
