# SPDX-License-Identifier: AGPL-3.0-only
"""Faults in a mixture of experts that the parity tests must see, put into the checkpoint and its configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from spark_py.model.checkpoint import open_checkpoint
from spark_py.runtime.gpu import GpuBackend
from tests.parity.support import MAX_SEQ_LEN, Array, Part, check, first_sequence, load, run_head, run_target
from tools.goldens import checkpoint

pytestmark = pytest.mark.host_only("the faults are in the checkpoint, the same on every backend")

CONFIG = checkpoint.MOE_CONFIG
EXPERTS = CONFIG["num_experts"]

Change = Callable[[dict[str, Array]], dict[str, Array]]


def numbered(change: Callable[[int], int]) -> Change:
    """Expert e's tensors are those of expert change(e); the router's rows stay."""

    def renamed(name: str) -> str:
        return re.sub(r"(?<=\.experts\.)\d+", lambda match: str(change(int(match[0]))), name)

    return lambda tensors: {name: tensors[renamed(name)] for name in tensors}


def exchanged(within: str) -> Change:
    """gate_proj and up_proj change places in the tensors with `within` in their names."""
    names = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

    def renamed(name: str) -> str:
        return re.sub("gate_proj|up_proj", lambda match: names[match[0]], name) if within in name else name

    return lambda tensors: {name: tensors[renamed(name)] for name in tensors}


def changed(ending: str, change: Callable[[Array], Array]) -> Change:
    """The tensors whose names end so are others."""
    return lambda tensors: {
        name: np.ascontiguousarray(change(w)) if name.endswith(ending) else w for name, w in tensors.items()
    }


TENSORS: dict[str, Change] = {
    "experts 0 and 1 exchanged": numbered(lambda e: 1 - e if e < 2 else e),
    "every expert is the next one": numbered(lambda e: (e + 1) % EXPERTS),
    "the experts' gate_proj and up_proj exchanged": exchanged(".experts."),
    "the shared expert's gate_proj and up_proj exchanged": exchanged(".shared_expert."),
    "no shared expert": changed("shared_expert.down_proj.weight", np.zeros_like),
    "the shared expert is not gated": changed("shared_expert_gate.weight", np.zeros_like),
    "the router's rows from the last to the first": changed("mlp.gate.weight", lambda w: w[::-1]),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "weights do not sum to 1": {"norm_topk_prob": False},
    "one expert less": {"num_experts_per_tok": CONFIG["num_experts_per_tok"] - 1},
    "one expert more": {"num_experts_per_tok": CONFIG["num_experts_per_tok"] + 1},
}


def compare(gpu: GpuBackend, folder: Path, fault: str | None, which: str, patch: pytest.MonkeyPatch) -> None:
    config = CONFIG | CONFIGS.get(fault or "", {})
    change = TENSORS.get(fault or "", dict)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(change(checkpoint.tensors(CONFIG)), folder / "model.safetensors", metadata={"format": "pt"})
    arrays = first_sequence(load("random_moe"))
    target, part = Part(arrays, "target"), Part(arrays, which)
    with open_checkpoint(folder, gpu, MAX_SEQ_LEN, "qwen3_next_moe") as model:
        rows = run_target(model.target, target) if which == "target" else run_head(model, target, part, patch)
    check(part, rows, 0.0)


@pytest.mark.parametrize("which", ["target", "head"])
def test_without_a_fault_the_comparison_passes(
    gpu: GpuBackend, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(gpu, tmp_path, None, which, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize("which", ["target", "head"])
@pytest.mark.parametrize("fault", [*TENSORS, *CONFIGS])
def test_a_fault_makes_the_comparison_fail(
    gpu: GpuBackend, tmp_path: Path, fault: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=r"bound away|times the expected|clear ids differ"):
        compare(gpu, tmp_path, fault, which, monkeypatch)
