# SPDX-License-Identifier: AGPL-3.0-only
"""Faults that the parity tests must see: each changes one detail of the model, and the same comparison then fails.

Faults of loading and of the formulas are put into the checkpoint and its configuration, faults of order and position
into the methods of the head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spark_py.model.checkpoint import open_checkpoint
from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.layers.mtp_head import attention as head_module
from spark_py.model.target import decoder as target_module
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.parity.support import MAX_SEQ_LEN, Array, Part, check, first_sequence, load, run_head, run_target
from tools.goldens import checkpoint

pytestmark = pytest.mark.host_only("the faults are in the checkpoint and in Python, the same on every backend")

HEADS, HEAD_DIM = checkpoint.CONFIG["num_attention_heads"], checkpoint.CONFIG["head_dim"]
ROTATED = int(HEAD_DIM * checkpoint.CONFIG["partial_rotary_factor"])
NEIGHBOURS = [*range(0, ROTATED, 2), *range(1, ROTATED, 2), *range(ROTATED, HEAD_DIM)]
"""With the elements of each head in this order, turning (i, i + half) turns what were neighbours."""

Change = Callable[[str, Array], Array]


def queries(change: Callable[[Array], Array]) -> Change:
    """A change of every q_proj, seen as [heads, query and gate, head_dim, h]."""

    def apply(name: str, w: Array) -> Array:
        if not name.endswith("q_proj.weight"):
            return w
        return change(w.reshape(HEADS, 2, HEAD_DIM, w.shape[1])).reshape(w.shape)

    return apply


def neighbours(name: str, w: Array) -> Array:
    if name.endswith("q_proj.weight"):
        seen = w.reshape(HEADS, 2, HEAD_DIM, w.shape[1]).copy()
        seen[:, 0] = seen[:, 0][:, NEIGHBOURS]
        return seen.reshape(w.shape)
    return w[NEIGHBOURS] if name.endswith(("k_proj.weight", "q_norm.weight", "k_norm.weight")) else w


def plain_norm(name: str, w: Array) -> Array:
    return (w.astype(np.float32) - 1).astype(w.dtype) if w.ndim == 1 else w


def fc_columns(name: str, w: Array) -> Array:
    return np.roll(w, w.shape[1] // 2, axis=1) if name == "mtp.fc.weight" else w


def one_norm_forgotten(name: str, w: Array) -> Array:
    return np.zeros_like(w) if name.endswith("pre_fc_norm_hidden.weight") else w


def exchanged(one: str, other: str) -> dict[str, str]:
    return {one: other, other: one}


BOTH, HEAD = ("target", "head"), ("head",)
TENSORS: dict[str, tuple[Change | dict[str, str], tuple[str, ...]]] = {
    "norms multiply with w": (plain_norm, BOTH),
    "each head's gate stands before its query": (queries(lambda w: w[:, ::-1]), BOTH),
    "all queries stand before all gates": (
        queries(lambda w: w.reshape(2, HEADS, *w.shape[2:]).swapaxes(0, 1)), BOTH
    ),
    "neighbours are turned": (neighbours, BOTH),
    "q_norm and k_norm exchanged": (exchanged("q_norm", "k_norm"), BOTH),
    "gate_proj and up_proj exchanged": (exchanged("gate_proj", "up_proj"), BOTH),
    "the layer's norms exchanged": (exchanged("input_layernorm", "post_attention_layernorm"), BOTH),
    "fc reads [hidden | embedding]": (fc_columns, HEAD),
    "the inputs' norms exchanged": (exchanged("pre_fc_norm_embedding", "pre_fc_norm_hidden"), HEAD),
    "the hidden's norm weight forgotten": (one_norm_forgotten, HEAD),
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "twice as much of each head is turned": {"partial_rotary_factor": 0.5},
    "the usual theta": {"rope_theta": 10000.0},
    "the usual epsilon": {"rms_norm_eps": 1e-6},
}


def no_gate(patch: pytest.MonkeyPatch) -> None:
    for module in (target_module, head_module):
        patch.setattr(module, "sigmoid_gate_mul", lambda *_: None)
    merge = head_module.spark_paged_decode_merge
    patch.setattr(head_module, "spark_paged_decode_merge", lambda *args: merge(*args[:5], DevicePtr.NULL, *args[6:]))


def whole_scale(patch: pytest.MonkeyPatch) -> None:
    """Attention without 1 / sqrt(head_dim), that is the only parameter between 0 and 1."""
    composed, split = "paged_decode_attn", "spark_paged_decode_split"  # the head's choice follows its shape
    for module, name in ((target_module, composed), (head_module, composed), (head_module, split)):
        attend = getattr(module, name)
        patch.setattr(
            module,
            name,
            lambda *args, attend=attend, **kind: attend(*(1.0 if isinstance(x, float) else x for x in args), **kind),
        )


def prompt_position(patch: pytest.MonkeyPatch) -> None:
    """The drafter's prompt rows stand one position too far, against those of its drafts."""
    patch.setattr(
        MtpHead, "prefill_drafter",
        lambda self, tokens, hiddens, *rest: self.catchup_drafter(tokens, hiddens, 0, 2, *rest),
    )  # fmt: skip


def draft_position(patch: pytest.MonkeyPatch) -> None:
    """Every draft of a propose stands at the position of the first."""
    step = MtpHead.forward_one

    def forward_one(self: MtpHead, token: int, hidden: Any, position: int, state: Any, *rest: Any) -> int:
        return step(self, token, hidden, position - state.last_num_drafted, state, *rest)

    patch.setattr(MtpHead, "forward_one", forward_one)


def normed_chain(patch: pytest.MonkeyPatch) -> None:
    """Later drafts read the hidden after the final norm."""
    step = MtpHead.forward_one

    def forward_one(self: MtpHead, token: int, hidden: Any, position: int, state: Any, ctx: Any, *rest: Any) -> int:
        own = hidden == ctx.buffers.hidden_states()
        return step(self, token, ctx.buffers.norm_output() if own else hidden, position, state, ctx, *rest)

    patch.setattr(MtpHead, "forward_one", forward_one)


def earlier_hidden(patch: pytest.MonkeyPatch) -> None:
    """A propose reads the target's hidden one row too early."""
    propose, row = MtpHead.propose, 2 * checkpoint.CONFIG["hidden_size"]

    def wrong(self: MtpHead, token: int, hidden: Any, *rest: Any) -> list[int]:
        return propose(self, token, type(hidden)(hidden.address - row), *rest)

    patch.setattr(MtpHead, "propose", wrong)


def rows_left(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft's row stays in the drafter's cache."""
    verdict = MtpHead.after_verify
    patch.setattr(MtpHead, "after_verify", lambda self, accepted, *rest: verdict(self, accepted + 1, *rest))


CODE: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "no output gate": (no_gate, BOTH),
    "scores are not divided": (whole_scale, BOTH),
    "prompt rows one position too far": (prompt_position, HEAD),
    "every draft at the first one's position": (draft_position, HEAD),
    "drafts chain on the normed hidden": (normed_chain, HEAD),
    "the hidden row before": (earlier_hidden, HEAD),
    "a rejected row stays": (rows_left, HEAD),
}
MUTANTS = [
    (fault, part)
    for fault, parts in (
        *((fault, parts) for fault, (_, parts) in TENSORS.items()),
        *((fault, BOTH) for fault in CONFIGS),
        *((fault, parts) for fault, (_, parts) in CODE.items()),
    )
    for part in parts
]


def write(folder: Path, fault: str) -> None:
    """The checkpoint, with the fault if it is one of a checkpoint."""
    checkpoint.write(folder)
    (folder / "config.json").write_text(json.dumps(checkpoint.CONFIG | CONFIGS.get(fault, {})))
    if fault not in TENSORS:
        return
    change, _ = TENSORS[fault]
    tensors = load_file(folder / "model.safetensors")
    if isinstance(change, dict):
        tensors = {_renamed(name, change): w for name, w in tensors.items()}
    else:
        tensors = {name: np.ascontiguousarray(change(name, w)) for name, w in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _renamed(name: str, names: dict[str, str]) -> str:
    parts = name.split(".")
    parts[-2] = names.get(parts[-2], parts[-2])
    return ".".join(parts)


def compare(gpu: GpuBackend, folder: Path, which: str, patch: pytest.MonkeyPatch) -> None:
    arrays = first_sequence(load("random"))
    target, part = Part(arrays, "target"), Part(arrays, which)
    with open_checkpoint(folder, gpu, MAX_SEQ_LEN) as model:
        rows = run_target(model.target, target) if which == "target" else run_head(model, target, part, patch)
    check(part, rows, 0.0)


@pytest.mark.parametrize("which", BOTH)
def test_without_a_fault_the_comparison_passes(
    gpu: GpuBackend, tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "none")
    compare(gpu, tmp_path, which, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize(("fault", "which"), MUTANTS)
def test_a_fault_makes_the_comparison_fail(
    gpu: GpuBackend, tmp_path: Path, fault: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, fault)
    if fault in CODE:
        CODE[fault][0](monkeypatch)
    with pytest.raises(AssertionError, match=r"bound away|times the expected|clear ids differ"):
        compare(gpu, tmp_path, which, monkeypatch)
