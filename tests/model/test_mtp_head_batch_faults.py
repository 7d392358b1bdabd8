# SPDX-License-Identifier: AGPL-3.0-only
"""Batched proposes: proof that the comparison would see a fault; probabilities, logs, refusals and errors."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spark_py.model.layer import AttnMetadataDev
from spark_py.model.layers.mtp_head import (
    MtpHead,
    MtpProposerState,
    new,
    projection,
)
from spark_py.model.levers import ModelLevers
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    ProposerStateError,
    ScratchOverlapError,
    SparkError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend, StreamLike
from spark_py.runtime.scratch import ScratchRegion
from tests.model.mtp_forms import FUSED, Form, hide, make_form
from tests.model.mtp_head_batch_support import (
    BY_STEP,
    DRAFTS,
    Q,
    agree,
    batch,
    batch_of,
    chain,
    launched,
    long_states,
    one,
    pairs,
    row,
)
from tests.model.support import (
    Rig,
    make_rig,
    upload,
)

# ---------------------------------------------------------------- faults that must show


def packed_norm(self: Any, qg: DevicePtr, n: int, stream: StreamLike) -> None:
    self._rms_norm(qg, self.q_norm, qg, n * self.nq, self.hd, stream)


def first_slab(self: Any, *args: Any) -> list[AttnMetadataDev]:
    metas = upload_meta(self, *args)
    return [metas[0]] * len(metas)


def stale_tables(self: Any, positions: Any, states: Any, stream: Any, tables: bool) -> list[AttnMetadataDev]:
    return upload_meta(self, positions, states, stream, False)


def one_run(self: Any, sources: Any, target: DevicePtr, row_bytes: int, stream: StreamLike) -> None:
    self.gpu.copy_d2d_async(sources[0], target, len(sources) * row_bytes, stream)


def shared_row(self: Any, normed: DevicePtr, ctx: Any, stream: StreamLike, row: int = 0) -> DevicePtr:
    return generic(self, normed, ctx, stream, 0)


upload_meta, generic = MtpHead._upload_batch_meta, MtpHead.moe_forward_generic
FAULTS: dict[str, tuple[str, Any, Form]] = {
    "a norm over rows of [Q | gate]": (
        "_norm_queries",
        packed_norm,
        Form(Q.BF16, hidden=("spark_qk_norm_rope_cache",)),
    ),
    "one sequence's metadata for all": ("_upload_batch_meta", first_slab, Form(Q.BF16)),
    "block tables that are not uploaded": ("_upload_batch_meta", stale_tables, Form(Q.BF16)),
    "hidden rows taken for one run": ("_copy_rows", one_run, Form(Q.BF16)),
    "experts of all rows in one place": ("moe_forward_generic", shared_row, Form(Q.BF16, moe=True, hidden=FUSED)),
}


@pytest.mark.no_sanitizer("the faults read memory that nobody wrote")
@pytest.mark.parametrize(("method", "mutant", "form"), FAULTS.values(), ids=FAULTS.keys())
def test_faults_show(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    mutant: Any,
    form: Form,
) -> None:
    rig, _ = make_form(gpu, rng, monkeypatch, form, levers=BY_STEP)
    assert agree(rig, rng, 4, steps=1)
    # Block 0 for all, where nobody says which.
    gpu.memset(rig.head.propose_meta, 0, 4 * rig.head.propose_meta_stride)
    monkeypatch.setattr(MtpHead, method, mutant)
    try:
        alike = agree(rig, rng, 4, steps=1)
    except SparkError:
        return  # a backend that checks memory refuses
    assert not alike


def test_a_tier_with_more_rows_than_it_takes_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would leave the others as they were."""
    rig, _ = make_form(gpu, rng, monkeypatch, Form(Q.NVFP4, moe=True, nvfp4_lm_head=True))
    monkeypatch.setattr(projection, "lm_head_batch_width", lambda *args: 4)
    with pytest.raises(InvalidArgumentError, match="takes 4 rows at most"):
        batch_of(rig, rng, 5)


def test_a_fixed_stride_is_refused_and_not_overrun(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new, "propose_meta_stride", lambda *args: 2048)
    rig = make_rig(gpu, rng, max_seq_len=8192)
    with pytest.raises(CapacityError, match="entries of the MTP block table"):
        batch(rig, [1, 2], [row(rig, rng), row(rig, rng)], [7500, 7600], long_states(rig, 2))


def drafted_at_each_position(rig: Rig, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    states, seen = [rig.state() for _ in range(3)], []
    body = MtpHead._forward_batch_rows

    def forward(self: MtpHead, *args: Any) -> None:
        seen.append([state.last_num_drafted for state in states])
        body(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(MtpHead, "_forward_batch_rows", forward)
        batch(rig, [1, 2, 3], [row(rig, rng) for _ in range(3)], [4, 5, 6], states)
    return [*seen, [state.last_num_drafted for state in states]]


def test_drafts_are_counted_as_their_rows_are_written(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, wanted = make_rig(gpu, rng, levers=BY_STEP), [[0] * 3, [1] * 3, [2] * 3, [3] * 3]
    assert drafted_at_each_position(rig, rng, monkeypatch) == wanted
    count, calls = MtpHead._count_rows, []

    def late(self: MtpHead, positions: Sequence[int], states: Sequence[MtpProposerState]) -> None:
        calls.append(1)
        count(self, positions, states)
        for state in states:
            state.last_num_drafted = DRAFTS if len(calls) == DRAFTS else 0

    monkeypatch.setattr(MtpHead, "_count_rows", late)
    assert drafted_at_each_position(rig, rng, monkeypatch) != wanted


# ---------------------------------------------------------------- probabilities


def test_probabilities_of_the_drafts(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """ln softmax in FP32: 203 terms, each and their sum off by a few 2^-24."""
    rig, n = make_rig(gpu, rng, levers=ModelLevers(draft_conf_tau=0.01)), 4
    conf: list[list[float]] = [[5.0]]
    states, rows, tokens = [rig.state() for _ in range(n)], [row(rig, rng) for _ in range(n)], [3, 1, 4, 1]
    found = batch(rig, tokens, rows, [7] * n, states, DRAFTS, conf)
    least = rig.head.last_confidence()
    wanted: list[list[float]] = []
    for i in range(n):
        _, logits = chain(rig, rig.state(), tokens[i], rows[i], 7)
        wanted.append([float(each.max() - np.log(np.exp(each).sum())) for each in logits])
    assert found is not None
    np.testing.assert_allclose(conf, wanted, atol=1e-4)
    assert least == pytest.approx(np.exp(min(map(min, wanted))), abs=1e-4)


def test_without_the_kernel_each_draft_counts_as_certain(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, gpu, "nothing", function="argmax::argmax_bf16_batch_lp")
    rig, conf = make_rig(gpu, rng), [[1.0]] * 7
    batch_of(rig, rng, 3, conf)
    assert conf == [[0.0] * DRAFTS] * 3


def test_logs_of_each_row(gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    """What a propose alone says of its drafts, for every sequence of a batch."""
    rig, n = make_rig(gpu, rng, levers=ModelLevers(shadow_topk=3, debug_norms=True)), 3
    sequences = pairs(rig, rng, n)
    tokens, rows = [one(rig, rng) for _ in range(n)], [row(rig, rng) for _ in range(n)]
    with caplog.at_level(logging.INFO):
        caplog.clear()
        batch(rig, tokens, rows, [pair.length for pair in sequences], [pair.batch for pair in sequences])
        together = sorted(record.message for record in caplog.records)
        caplog.clear()
        for i, pair in enumerate(sequences):
            rig.propose(pair.alone, tokens[i], rows[i], pair.length, DRAFTS)
    assert together == sorted(record.message for record in caplog.records)
    assert len(together) == 2 * n * DRAFTS


# ---------------------------------------------------------------- refusals and errors


def test_what_is_not_offered_is_none(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """One sequence, more than the arena holds, and states of another type, which are left alone."""

    class Other:
        block_table: list[int] = []  # noqa: RUF012 - the protocol's attribute

    rig = make_rig(gpu, rng)
    with gpu.trace() as trace:
        assert batch(rig, [1], [row(rig, rng)], [4], [rig.state()]) is None
        assert batch(rig, [1] * 9, [row(rig, rng)] * 9, [4] * 9, [rig.state() for _ in range(9)]) is None
        states: list[Any] = [rig.state(), Other()]
        assert batch(rig, [1, 2], [row(rig, rng)] * 2, [4, 4], states) is None
    assert launched(trace, "") == 0
    assert states[0].snapshot() == rig.state().snapshot()


def test_no_drafts_touch_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, conf = make_rig(gpu, rng), [[1.0]]
    with gpu.trace() as trace:
        found, states = batch_of(rig, rng, 3, conf, drafts=0)
    assert (found, conf) == ([[]] * 3, [[]] * 3)
    assert launched(trace, "") == 0
    assert all(state.snapshot() == rig.state().snapshot() for state in states)


def test_what_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, other = make_rig(gpu, rng), make_rig(gpu, rng)
    state, second = rig.state(), rig.state()
    gates = rig.ctx.buffers.ssm_gates()
    hidden = upload(gpu, row(rig, rng))

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        given: dict[str, Any] = {
            "last_tokens": [1, 2], "target_hiddens": [hidden, hidden], "positions": [4, 5], "num_drafts": 2,
            "states": [state, second],
        }  # fmt: skip
        with gpu.trace() as trace, pytest.raises(error, match=match):
            rig.head.propose_batch(**(given | changes), ctx=rig.ctx, stream=rig.stream)
        assert launched(trace, "") == 0
        assert state.snapshot() == second.snapshot() == rig.state().snapshot()

    refused(InvalidArgumentError, "length of last_tokens", last_tokens=[1])
    refused(InvalidArgumentError, "length of target_hiddens", target_hiddens=[hidden] * 3)
    refused(InvalidArgumentError, "length of positions", positions=[])
    refused(InvalidArgumentError, "length of grammar_bitmasks", grammar_bitmasks=[None])
    refused(InvalidArgumentError, r"last_tokens\[1\]", last_tokens=[1, rig.config.vocab_size])
    refused(InvalidArgumentError, "num_drafts", num_drafts=-1)
    refused(InvalidArgumentError, "position", positions=[4, 0])
    refused(CapacityError, "position of the last draft", positions=[4, 254])
    refused(InvalidArgumentError, r"target_hiddens\[1\]", target_hiddens=[hidden, DevicePtr(0)])
    refused(InvalidArgumentError, "ssm_gates", target_hiddens=[hidden, gates.offset(2)])
    refused(InvalidArgumentError, "one is there twice", states=[state, state])
    refused(ProposerStateError, "belongs to another MtpHead", states=[state, other.state()])
    batch(rig, [1, 2], [row(rig, rng)] * 2, [4, 5], [state, second], 1)
    before = state.snapshot()
    with pytest.raises(ProposerStateError, match="verdict on the last 1 drafts"):
        batch(rig, [1, 2], [row(rig, rng)] * 2, [6, 7], [state, second], 1)
    assert state.snapshot() == before


@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_exhausted_pool_leaves_all_states_as_they_were(gpu: GpuBackend, rng: np.random.Generator, left: int) -> None:
    """Three sequences need a block each. Afterwards one with a block in hand still drafts alone."""
    rig, conf = make_rig(gpu, rng), [[7.0]]
    kv, states = rig.head.kv_cache, [rig.state() for _ in range(3)]
    held = kv.alloc_blocks(kv.num_free_blocks() - left)
    with gpu.trace() as trace, pytest.raises(KvCacheExhausted):
        batch(rig, [1, 2, 3], [row(rig, rng)] * 3, [4, 5, 6], states, DRAFTS, conf)
    assert launched(trace, "") == 0
    assert (kv.num_free_blocks(), conf) == (left, [[7.0]])
    assert all(state.snapshot() == rig.state().snapshot() for state in states)
    kv.free_blocks(held)
    assert batch(rig, [1, 2, 3], [row(rig, rng)] * 3, [4, 5, 6], states)


@pytest.mark.parametrize("fails", range(DRAFTS))
def test_an_error_at_any_position_is_undone(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    rig, n = make_rig(gpu, rng), 3
    sequences, conf = pairs(rig, rng, n), [[7.0]]
    before = [pair.batch.snapshot() for pair in sequences]
    free, calls, body = rig.head.kv_cache.num_free_blocks(), [], MtpHead._argmax_rows

    def argmax(self: MtpHead, *args: Any) -> None:
        calls.append(1)
        if len(calls) == fails + 1:
            raise RuntimeError("on purpose")
        body(self, *args)

    tokens, rows = [one(rig, rng) for _ in range(n)], [row(rig, rng) for _ in range(n)]
    lengths, states = [pair.length for pair in sequences], [pair.batch for pair in sequences]
    with monkeypatch.context() as patch:
        patch.setattr(MtpHead, "_argmax_rows", argmax)
        with pytest.raises(RuntimeError, match="on purpose"):
            batch(rig, tokens, rows, lengths, states, DRAFTS, conf)
    assert [state.snapshot() for state in states] == before
    assert (rig.head.kv_cache.num_free_blocks(), conf) == (free, [[7.0]])
    assert rig.ctx.buffers.scratch_map.live() == ()
    found = batch(rig, tokens, rows, lengths, states)
    assert found == [rig.propose(p.alone, tokens[i], rows[i], p.length, DRAFTS) for i, p in enumerate(sequences)]


@pytest.mark.parametrize("offset", [0, 256 + 4], ids=["ids", "probabilities"])
def test_a_region_that_someone_holds_is_not_written(gpu: GpuBackend, rng: np.random.Generator, offset: int) -> None:
    rig = make_rig(gpu, rng, levers=BY_STEP)
    states, rows = [rig.state(), rig.state()], [row(rig, rng)] * 2
    with (
        rig.ctx.buffers.lease(ScratchRegion("someone", offset, 4)),
        pytest.raises(ScratchOverlapError, match="someone"),
    ):
        batch(rig, [1, 2], rows, [4, 5], states, DRAFTS, [])
    assert all(state.snapshot() == rig.state().snapshot() for state in states)
    assert batch(rig, [1, 2], rows, [4, 5], states)
