# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes: what is launched and captured, which slots are written, and how many sequences find room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.drafting.rows import propose_batch_cap
from spark_py.model.layer import AttnMetadataDev, ForwardContext
from spark_py.model.layers.mtp_head import (
    MtpHead,
)
from spark_py.runtime.buffers import BufferSizes
from spark_py.runtime.gpu import GpuBackend
from tests.model.mtp_forms import Form, hide, make_form
from tests.model.mtp_head_batch_support import BY_STEP, DRAFTS, Q, batch, batch_of, launched, one, pairs, rig_slab, row
from tests.model.support import (
    Array,
    make_rig,
)

# ---------------------------------------------------------------- what is launched


@pytest.mark.parametrize("own", [True, False])
def test_what_a_pass_launches(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Weights are read once for all rows; what a sequence's own cache is for runs once a sequence; ids come back in one
    copy, and block tables go out once a propose. With the engine's kernels and with this project's own."""
    if not own:
        hide(monkeypatch, gpu, "spark_gemv_rows", "spark_qk_norm_rope_cache")
    rig, n = make_rig(gpu, rng, levers=BY_STEP), 5
    with gpu.trace() as trace:
        batch_of(rig, rng, n, conf=[])
    entries = [entry for step in trace.steps for entry in step]
    assert launched(trace, "gemv::") == 0
    if own:
        assert launched(trace, "spark_gemv_rows::") == 6 * DRAFTS, "fc, Q and K and V, o, gate and up, down, LM head"
        assert launched(trace, "dense_gemv_bf16_batchm::") == launched(trace, "rope::") == 0
        assert launched(trace, "spark_qk_norm_rope_cache::") == DRAFTS
    else:
        assert launched(trace, "dense_gemv_bf16_batchm::") == 9 * DRAFTS, "fc, Q, K, V, o, three of the FFN, LM head"
        assert launched(trace, "rope::") == n * DRAFTS
    assert launched(trace, "paged_decode::") == n * DRAFTS
    assert launched(trace, "argmax::argmax_bf16_batch_lp") == launched(trace, "argmax::") == DRAFTS
    assert sum(entry.kind.startswith("copy_d2h") for entry in entries) == DRAFTS
    slabs = [entry for entry in entries if entry.kind.startswith("copy_h2d") and rig_slab(rig, entry)]
    assert len(slabs) == n * DRAFTS


@pytest.mark.parametrize("form", [Form(Q.BF16), Form(Q.FP8, moe=True), Form(Q.NVFP4, moe=True)], ids=str)
def test_a_pass_can_be_captured(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    """Between the uploads and the ids nothing is asked of the host: the replay of a graph gives the same logits."""
    rig, n = make_form(gpu, rng, monkeypatch, form, levers=BY_STEP)[0], 4
    head, stream, graphs = rig.head, gpu.create_stream(), []
    rig.stream = stream
    _, states = batch_of(rig, rng, n)
    body = MtpHead._forward_batch_rows
    logits: list[Array] = []

    def captured(n: int, metas: Sequence[AttnMetadataDev], ctx: ForwardContext, stream: Any) -> None:
        gpu.begin_capture(stream)
        body(head, n, metas, ctx, stream)
        graphs.append(gpu.end_capture(stream))
        gpu.launch_graph(graphs[-1], stream)

    for state in states:
        head.after_verify(0, state, stream)
    rows, tokens = [row(rig, rng) for _ in range(n)], [one(rig, rng) for _ in range(n)]
    found = []
    for patched in (None, captured):
        if patched is not None:
            monkeypatch.setattr(head, "_forward_batch_rows", patched)
        found.append(batch(rig, tokens, rows, [9] * n, states))
        logits.append(np.concatenate([rig.logits()]))
        for state in states:
            head.after_verify(0, state, stream)
    assert len(graphs) == DRAFTS
    assert found[0] == found[1]
    np.testing.assert_array_equal(logits[0], logits[1])
    for graph in graphs:
        gpu.destroy_graph(graph)
    gpu.destroy_stream(stream)


def test_a_batch_writes_its_own_slots_and_nothing_else(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, n = make_rig(gpu, rng), 4
    sequences = pairs(rig, rng, n)
    kv = rig.head.kv_cache

    def whole() -> Array:
        return np.stack([np.stack(kv.read_block(0, block)) for block in range(kv.num_blocks())])

    before, lengths = whole(), [pair.batch.seq_len for pair in sequences]
    rows = [row(rig, rng) for _ in range(n)]
    batch(rig, [one(rig, rng) for _ in range(n)], rows, [pair.length for pair in sequences],
          [pair.batch for pair in sequences])  # fmt: skip
    slots = {
        pair.batch.block_table[at // 16] * 16 + at % 16
        for pair, start in zip(sequences, lengths, strict=True) for at in range(start, start + DRAFTS)
    }  # fmt: skip
    shape = (kv.num_blocks(), 2, 16, -1)
    changed = np.argwhere((before.reshape(shape) != whole().reshape(shape)).any(axis=(1, 3)))
    assert {int(block) * 16 + int(slot) for block, slot in changed} == slots


# ---------------------------------------------------------------- how many


class Sized:
    """An arena's sizes, without the memory."""

    def __init__(self, sizes: BufferSizes, rows: int) -> None:
        self._sizes, self._rows = sizes, rows

    def sizes(self) -> BufferSizes:
        return self._sizes

    def max_batch_tokens(self) -> int:
        return self._rows


@pytest.mark.parametrize(
    ("m", "nv", "h", "cap"), [(8192, 48, 5120, 32), (2048, 48, 5120, 19), (512, 48, 5120, 4), (256, 32, 2048, 4)]
)
def test_the_engines_worked_numbers(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, m: int, nv: int, h: int, cap: int
) -> None:
    rig = make_rig(gpu, rng)
    monkeypatch.setattr(rig.head, "h", h)
    ample = {name: 1 << 40 for name, _ in rig.ctx.buffers.sizes().items()}
    sizes = replace(rig.ctx.buffers.sizes(), **(ample | {"ssm_ba": 4 * m * nv, "ssm_gates": 8 * m * nv}))
    buffers: Any = Sized(sizes, m)
    assert propose_batch_cap(sizes, h, m) == rig.head.propose_batch_max(buffers, rig.config) == cap
    offered = [n for n in range(40) if rig.head.can_propose_batch(n, buffers)]
    assert offered == list(range(2, cap + 1))


def test_no_buffer_is_overrun(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Those that the engine's formula leaves out bound the batch too."""
    rig = make_rig(gpu, rng)
    ample = {name: 1 << 40 for name, _ in rig.ctx.buffers.sizes().items()}
    for name, nbytes in rig.head.row_bytes().items():
        sizes = replace(rig.ctx.buffers.sizes(), **(ample | {name: 4 * nbytes - 1}))
        buffers: Any = Sized(sizes, 64)
        assert rig.head.propose_batch_max(buffers, rig.config) == 3, name
