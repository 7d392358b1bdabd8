# SPDX-License-Identifier: AGPL-3.0-only
"""The head's attention split along the sequence: right, with the bits of a row alone in every batch and graph, and
composed of the engine's kernels where the set or the head's size asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import attention
from spark_py.model.levers import ModelLevers
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.mtp_forms import hide
from tests.model.support import Rig, make_rig
from tests.model.test_mtp_head_forward import Recording, check_drafts

WIDE: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 1}
SPLIT = "spark_paged_decode_split"


def test_a_wide_head_splits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, head_class=Recording, **WIDE)
    with gpu.trace() as trace:
        check_drafts(rig, rng, 80, 3)
    assert SPLIT in str(trace.steps)
    assert "paged_decode_attn" not in str(trace.steps)


@pytest.mark.parametrize("reason", ["set", "size"])
def test_others_run_the_engines_kernels(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "set":
        hide(monkeypatch, gpu, SPLIT)
    rig = make_rig(gpu, rng, head_class=Recording, **(WIDE if reason == "set" else {}))
    assert rig.head.split_attention is None
    with gpu.trace() as trace:
        check_drafts(rig, rng, 20, 2)
    assert SPLIT not in str(trace.steps)
    assert "paged_decode_attn" in str(trace.steps)


def drafts_of(rig: Rig, hidden: DevicePtr, rows: Sequence[int], batch: bool, drafts: int) -> list[list[int]]:
    """Drafts of sequences that have `rows` rows, fed with the same random prompts each time."""
    c, step, states = rig.config, 2 * rig.config.hidden_size, []
    for sequence, count in enumerate(rows):
        rng = np.random.default_rng(sequence)
        state = rig.state()
        rig.feed(
            state,
            [int(t) for t in rng.integers(0, c.vocab_size, count + 1)],
            rng.standard_normal((count, c.hidden_size)),
        )
        states.append(state)
    at = [hidden.offset(i * step) for i in range(len(rows))]
    positions = [count + 1 for count in rows]
    if batch:
        found = rig.head.propose_batch([7] * len(rows), at, positions, drafts, states, rig.ctx, rig.stream)
        assert found is not None
        return [list(each) for each in found]
    return [
        list(rig.head.propose(7, at[i], positions[i], drafts, states[i], rig.ctx, rig.stream)) for i in range(len(rows))
    ]


@pytest.mark.parametrize("graph", [False, True])
def test_a_batch_drafts_what_each_sequence_drafts_alone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, graph: bool
) -> None:
    """More sequences than a launch takes. K and V of the second draft depend on the first one's attention."""
    monkeypatch.setattr(attention, "SPLIT_SEQUENCES", 3)
    rows = [3, 70, 1, 65]
    rig = make_rig(gpu, rng, levers=ModelLevers(propose_graph=graph, mtp_max_seqs=8), **WIDE)
    prompts = [np.random.default_rng(count).standard_normal((count, rig.config.hidden_size)) for count in rows]
    hidden = rig.put(rng.standard_normal((len(rows), rig.config.hidden_size)))
    at = [hidden.offset(2 * rig.config.hidden_size * i) for i in range(len(rows))]
    positions = [count + 1 for count in rows]

    def fed() -> list[Any]:
        states = [rig.state() for _ in rows]
        for state, prompt in zip(states, prompts, strict=True):
            rig.feed(state, [*range(len(prompt) + 1)], prompt)
        return states

    alone = fed()
    for i, state in enumerate(alone):
        rig.head.propose(7, at[i], positions[i], 2, state, rig.ctx, rig.stream)
    together = fed()
    with gpu.trace() as trace:
        assert rig.head.propose_batch([7] * 4, at, positions, 2, together, rig.ctx, rig.stream) is not None
    for one, other in zip(alone, together, strict=True):
        for mine, its in zip(rig.rows(one), rig.rows(other), strict=True):
            assert mine.tobytes() == its.tobytes()
    launches = [entry for step in trace.steps for entry in step if "spark_paged_decode_merge" in entry.name]
    assert len(launches) == 4, "two a draft"
    rig.gpu.free(hidden)


def _no_gate(real: Any) -> Any:
    return lambda *args, **more: real(*args[:5], DevicePtr.NULL, *args[6:], **more)


def _scale_of_one(real: Any) -> Any:
    return lambda *args, **more: real(*args[:16], 1.0, *args[17:], **more)


def _window_of_one(real: Any) -> Any:
    return lambda *args, **more: real(*args[:19], 1, *args[20:], **more)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("spark_paged_decode_merge", _no_gate),
        ("spark_paged_decode_split", _scale_of_one),
        ("spark_paged_decode_split", _window_of_one),
    ],
)
def test_a_patched_launch_is_seen(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, change: Any
) -> None:
    rig = make_rig(gpu, rng, head_class=Recording, **WIDE)
    monkeypatch.setattr(attention, name, change(getattr(attention, name)))
    with pytest.raises(AssertionError):
        check_drafts(rig, rng, 17, 3)


def test_strides_are_those_of_metadata_that_lies_evenly(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, **WIDE)
    states = [rig.state() for _ in range(3)]
    metas = rig.head._upload_batch_meta([1, 1, 1], _with_blocks(rig, states), rig.stream)
    words = rig.head.propose_meta_stride // 4
    assert attention._strides(metas, *attention._SPLIT) == (words, words)
    assert attention._strides(metas[:1], *attention._SPLIT) is None
    assert attention._strides(metas[::-1], *attention._SPLIT) is None
    assert attention._strides([metas[0], metas[2], metas[1]], *attention._SPLIT) is None
    assert (
        attention._strides([metas[0], replace(metas[1], seq_len=metas[1].seq_len.offset(2))], *attention._SPLIT) is None
    )


def _with_blocks(rig: Rig, states: list[Any]) -> list[Any]:
    for state in states:
        rig.head.reserve_rows(state, 1)
    return states
