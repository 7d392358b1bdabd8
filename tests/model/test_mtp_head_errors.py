# SPDX-License-Identifier: AGPL-3.0-only
"""What MtpHead refuses while it drafts, and what it does with blocks when things go wrong."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpProposerState
from spark_py.model.levers import ModelLevers
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import (
    CapacityError,
    InvalidArgumentError,
    KvCacheExhausted,
    ProposerStateError,
    ScratchOverlapError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.scratch import ScratchRegion
from tests.model.support import a_hidden, config, download, make_rig

ONE = ModelLevers(mtp_max_seqs=1)


# ---------------------------------------------------------------- ids and positions


@pytest.mark.parametrize(
    "token",
    [-1, 203, 2**32 - 1, 2**64, np.int32(-1), np.uint32(2**32 - 1), True, 3.0, "3", None],
    ids=lambda t: f"{type(t).__name__}_{t}",
)
def test_a_token_outside_the_table_is_refused_before_any_copy(
    gpu: GpuBackend, rng: np.random.Generator, token: Any
) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rig.put(a_hidden(rig, rng))
    with gpu.trace() as trace:
        with pytest.raises(ValueError, match="last_token"):
            rig.head.propose(token, hidden, 4, 2, state, rig.ctx, rig.stream)
        with pytest.raises(ValueError, match=r"tokens\[1\]"):
            rig.head.prefill_drafter([1, token, 2], hidden, state, rig.ctx, rig.stream)
    assert len(trace.steps) == 0
    assert state.snapshot() == rig.state().snapshot()


def test_integers_of_numpy_are_tokens(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    hidden = a_hidden(rig, rng)
    ids = [rig.propose(rig.state(), token, hidden, 4, 1) for token in (202, np.int32(202), np.uint8(202))]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize("position", [0, -1, True, 4.0], ids=str)
def test_a_position_without_a_token_before_it(gpu: GpuBackend, rng: np.random.Generator, position: Any) -> None:
    rig = make_rig(gpu, rng)
    with pytest.raises(InvalidArgumentError, match="position"):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), position, 1)


def test_drafts_end_with_the_sequence(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Of 32 tokens the last has position 31; the drafts of a propose at 28 are at 29, 30 and 31."""
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ONE)
    state, hidden = rig.state(), rng.standard_normal((32, rig.config.hidden_size))
    rig.feed(state, [1] * 28, hidden)
    before, free = state.snapshot(), rig.head.kv_cache.num_free_blocks()
    with pytest.raises(CapacityError, match=r"position of the last draft is 32: the limit is 31"):
        rig.propose(state, 3, hidden[0], 28, 4)
    with pytest.raises(CapacityError):
        rig.propose(state, 3, hidden[0], 31, 1)
    assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (before, free)
    assert len(rig.propose(state, 3, hidden[0], 28, 3)) == 3
    assert len(state.block_table) == 2


def test_no_drafts_touch_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), rig.put(a_hidden(rig, rng))
    with gpu.trace() as trace:
        assert rig.head.propose(3, hidden, 4, 0, state, rig.ctx, rig.stream) == []
    assert len(trace.steps) == 0
    assert state.snapshot() == rig.state().snapshot()
    with pytest.raises(InvalidArgumentError, match="num_drafts is -1"):
        rig.head.propose(3, hidden, 4, -1, state, rig.ctx, rig.stream)


def test_a_hidden_row_must_be_somewhere(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    with pytest.raises(InvalidArgumentError, match="target_hidden"):
        rig.head.propose(3, DevicePtr.NULL, 4, 1, rig.state(), rig.ctx, rig.stream)


def test_states_of_others_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig, other = make_rig(gpu, rng), make_rig(gpu, rng)
    hidden = a_hidden(rig, rng)
    with pytest.raises(ProposerStateError, match="another MtpHead"):
        rig.propose(other.state(), 3, hidden, 4, 1)
    with pytest.raises(ProposerStateError, match="another MtpHead"):
        rig.propose(MtpProposerState(), 3, hidden, 4, 1)
    with pytest.raises(ProposerStateError, match="a dict is no state"):
        rig.head.free_state(gpu, {})  # type: ignore[arg-type]


# ---------------------------------------------------------------- blocks


def test_an_exhausted_pool_leaves_the_state_as_it_was(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """3 blocks: a neighbour has 2, the sequence 15 rows in the third; its second draft would need a fourth."""
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ONE)
    assert rig.head.kv_cache.num_blocks() == 3
    hidden = rng.standard_normal((20, rig.config.hidden_size))
    neighbour, state = rig.state(), rig.state()
    rig.feed(neighbour, [1] * 18, hidden)
    tokens = [int(t) for t in rng.integers(0, 203, 16)]
    rig.feed(state, tokens, hidden)
    before, rows = state.snapshot(), rig.rows(state)
    with pytest.raises(KvCacheExhausted) as caught:
        rig.propose(state, 5, hidden[16], 16, 3)
    assert (caught.value.need, caught.value.free) == (1, 0)
    assert state.snapshot() == before
    assert [a.tobytes() for a in rig.rows(state)] == [a.tobytes() for a in rows]
    assert rig.head.drafter_rows(neighbour) == 17

    rig.head.free_state(gpu, neighbour)
    again = rig.propose(state, 5, hidden[16], 16, 3)
    roomy = make_rig(gpu, rng, arrays=rig.arrays)
    fresh = roomy.state()
    roomy.feed(fresh, tokens, hidden)
    assert again == roomy.propose(fresh, 5, hidden[16], 16, 3)


def test_a_prompt_that_does_not_fit_takes_no_block(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, max_seq_len=32, levers=ONE)
    hidden = rng.standard_normal((32, rig.config.hidden_size))
    neighbour, state = rig.state(), rig.state()
    rig.feed(neighbour, [1] * 18, hidden)
    with pytest.raises(KvCacheExhausted):
        rig.feed(state, [1] * 32, hidden)
    assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (rig.state().snapshot(), 1)


class FailsAt(MtpHead):
    """A head whose n-th draft fails after it wrote its row."""

    fail_at = 2
    calls = 0

    def forward_one(self, *args: Any) -> int:
        picked = super().forward_one(*args)
        self.calls += 1
        if self.calls == self.fail_at:
            raise RuntimeError("on purpose")
        return picked


def test_an_error_between_drafts_is_undone(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, head_class=FailsAt, levers=ModelLevers(draft_conf_tau=0.1))
    state, hidden = rig.state(), rng.standard_normal((20, rig.config.hidden_size))
    rig.feed(state, [7] * 16, hidden)
    before, free, conf = state.snapshot(), rig.head.kv_cache.num_free_blocks(), rig.head.last_confidence()
    target = gpu.alloc(2 * rig.config.hidden_size)
    with pytest.raises(RuntimeError, match="on purpose"):
        rig.propose(state, 5, hidden[16], 16, 3)
    assert (state.snapshot(), rig.head.kv_cache.num_free_blocks()) == (before, free)
    assert rig.head.last_confidence() == conf
    with pytest.raises(ProposerStateError):
        rig.head.after_verify(0, state, rig.stream)
    FailsAt.fail_at, rig.head.calls = 10**9, 0  # type: ignore[attr-defined]
    try:
        assert len(rig.propose(state, 5, hidden[16], 16, 3, draft_embed_target=target)) == 3
    finally:
        FailsAt.fail_at = 2


class Counting(MtpHead):
    """A head that keeps books and computes nothing."""

    def forward_one(self, token: Any, target_hidden: Any, position: Any, state: Any, *rest: Any) -> int:
        self.reserve_rows(state, state.seq_len + 1)
        state.seq_len += 1
        state.last_pair_key = position - 1
        return 0


def test_a_thousand_requests_lose_no_block(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(gpu, rng, head_class=Counting)
    hidden = rig.put(a_hidden(rig, rng))
    free = rig.head.kv_cache.num_free_blocks()
    for n in range(1000):
        state = rig.state()
        position = 1
        for _ in range(int(rng.integers(1, 9))):
            drafts = int(rng.integers(1, 9))
            rig.head.propose(1, hidden, position, drafts, state, rig.ctx, rig.stream)
            accepted = int(rng.integers(0, drafts + 1))
            position += accepted + 1
            if n % 3:
                rig.head.after_verify(accepted, state, rig.stream)
            else:
                break
        if n % 5 == 0:
            with pytest.raises(CapacityError):
                rig.head.propose(1, hidden, 10**6, 1, rig.state(), rig.ctx, rig.stream)
        if n % 7:
            rig.head.free_state(gpu, state)
            rig.head.free_state(gpu, state)
            assert state.snapshot() == rig.state().snapshot()
        else:
            del state  # dropped without free_state
            gc.collect(0)
        assert rig.head.kv_cache.num_free_blocks() == free, f"request {n}"
    assert sum("without free_state" in r.message for r in caplog.records) == 143


def test_a_freed_state_begins_again(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    state, hidden = rig.state(), a_hidden(rig, rng)
    first = rig.propose(state, 5, hidden, 9, 3)
    rig.head.free_state(gpu, state)
    assert rig.propose(state, 5, hidden, 9, 3) == first


# ---------------------------------------------------------------- shared buffers


def test_an_arena_of_another_model_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    small = BufferArena(config(vocab_size=8, hidden_size=8, intermediate_size=8), 8, 256, 16, 4, gpu)
    rig.ctx = replace(rig.ctx, buffers=small)
    with pytest.raises(CapacityError, match="bytes that the MTP head writes to"):
        rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 1)


@pytest.mark.parametrize("offset", [0, 49152 + 200], ids=["picked id", "metadata"])
def test_a_region_that_someone_holds_is_not_written(gpu: GpuBackend, rng: np.random.Generator, offset: int) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(propose_graph=False))
    state = rig.state()
    with (
        rig.ctx.buffers.lease(ScratchRegion("someone", offset, 64)),
        pytest.raises(ScratchOverlapError, match="someone"),
    ):
        rig.propose(state, 3, a_hidden(rig, rng), 4, 1)
    assert state.snapshot() == rig.state().snapshot()
    assert rig.ctx.buffers.scratch_map.live() == ()
    assert rig.propose(state, 3, a_hidden(rig, rng), 4, 1)


# ---------------------------------------------------------------- ids that stay on the device, confidence


def test_a_deferred_draft(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng)
    hidden, target = a_hidden(rig, rng), gpu.alloc(2 * rig.config.hidden_size)
    with pytest.raises(ProposerStateError, match="no draft on the device"):
        rig.head.read_deferred_draft_token(gpu)
    wanted = rig.propose(rig.state(), 5, hidden, 9, 3)
    with pytest.raises(ProposerStateError):
        rig.head.read_deferred_draft_token(gpu)
    for drafts in (1, 3):
        gpu.memset(target, 0xFF, 2 * rig.config.hidden_size)
        ids = rig.propose(rig.state(), 5, hidden, 9, drafts, draft_embed_target=target)
        assert ids == [*wanted[: drafts - 1], 0]
        assert rig.head.read_deferred_draft_token(gpu) == wanted[drafts - 1]
        row = download(gpu, target, (rig.config.hidden_size,))
        assert row.tobytes() == rig.arrays["embed_tokens"][wanted[drafts - 1]].tobytes()


def test_confidence_is_the_probability_of_the_least_sure_draft(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rig = make_rig(gpu, rng, levers=ModelLevers(draft_conf_tau=0.5))
    hidden = a_hidden(rig, rng)
    found = []
    for drafts in (1, 2, 3):
        rig.propose(rig.state(), 5, hidden, 9, drafts)
        logits = rig.logits()
        probability = float(np.exp(logits - logits.max()).sum() ** -1)
        found.append((rig.head.last_confidence(), probability))
    least = 1.0
    for confidence, probability in found:
        least = min(least, probability)
        assert confidence == pytest.approx(least, rel=1e-9)
    assert make_rig(gpu, rng).head.last_confidence() is None
