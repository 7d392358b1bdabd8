# SPDX-License-Identifier: AGPL-3.0-only
"""Rows that no propose writes: the catch-up ring, the context of a sequence, and rows carried from one to the next."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model import drafter_feed
from spark_py.model.checkpoint import Checkpoint
from spark_py.model.drafting.carry import DrafterCarry
from spark_py.model.drafting.catchup import CatchupRing, fnv1a
from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import DecodeState, SpeculativeDecoder
from spark_py.runtime.errors import InvalidArgumentError, KvCacheExhausted
from spark_py.runtime.gpu import GpuBackend
from tests.model.scripted import write_drafting_tiny
from tests.model.test_decoding import drafter_rows, opened
from tests.model.tiny import Array, Tiny
from tests.thin import thinned

ONE = ModelLevers(mtp_max_seqs=1)
EXACT = replace(ONE, row_policy=RowPolicy.VERIFIED, refeed=True)


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_drafting_tiny(tmp_path / "model", rng)


class Run:
    """A decoder with a head, beside the plain run of the same target."""

    def __init__(self, found: Checkpoint, levers: ModelLevers, num_drafts: int = 2, carried: bool = False) -> None:
        head = found.proposer(levers)
        assert isinstance(head, MtpHead)
        self.head, self.target = head, found.target
        self.carry = DrafterCarry(head) if carried else None
        self.decoder = SpeculativeDecoder(found.target, head, num_drafts, levers=levers, carry=self.carry)
        self.plain = SpeculativeDecoder(found.target, None, 0)
        self.free = head.kv_cache.num_free_blocks()

    def complete(self, state: DecodeState) -> None:
        """As before a propose."""
        self.decoder._complete(state)

    def rows(self, state: DecodeState) -> tuple[int, int | None]:
        assert state.draft is not None
        return self.head.drafter_rows(state.draft), self.head.last_pair_key(state.draft)

    def fresh_rows(self, state: DecodeState) -> Array:
        """The bytes that a fresh drafter has which was fed the whole sequence."""
        assert self.decoder._feed is not None
        again = DecodeState(state.target, self.head.alloc_state(self.target.gpu))
        self.decoder._feed.context(again, 0)
        found = drafter_rows(self.head, again)
        assert again.draft is not None
        self.head.free_state(self.target.gpu, again.draft)
        return found


def small_ring(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(drafter_feed, "CatchupRing", functools.partial(CatchupRing, size=size))


# ---------------------------------------------------------------- the ring


@pytest.mark.parametrize("refeed", [False, True])
@pytest.mark.parametrize("size", [5, 512])
def test_with_catchup_no_key_is_missing(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, size: int, refeed: bool
) -> None:
    """The engine's rule for rows loses a key a step; the ring gives it back, whatever its size above a step's rows."""
    small_ring(monkeypatch, size)
    prompt = rng.integers(0, 300, 11).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, replace(ONE, catchup=True, refeed=refeed))
        wanted = run.plain.generate(prompt, 30).tokens
        state, tokens = run.decoder.alloc_state(), []
        for limit in (1, 4, 25):
            tokens += run.decoder.generate(prompt if not tokens else [], limit, state).tokens
            run.complete(state)
            length = state.target.seq_len
            assert run.rows(state) == (length - 1, length - 2)
            assert state.ring is not None
            labels = state.ring.labels
            assert (labels.start + labels.count - 1, labels.count) == (length, min(length, size))
        assert tokens == wanted
        if refeed:
            np.testing.assert_array_equal(drafter_rows(run.head, state), run.fresh_rows(state))
        run.decoder.free_state(state)
        run.decoder.free_state(state)


def test_a_ring_too_small_for_the_gap_feeds_what_it_has(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_ring(monkeypatch, 4)
    prompt = rng.integers(0, 300, 11).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, replace(ONE, catchup=True, drafter_prefill=False))
        state = run.decoder.alloc_state()
        run.decoder.generate(prompt, 2, state)
        before, key = run.rows(state)
        more = rng.integers(0, 300, 20).tolist()
        run.decoder.generate(more, 1, state)  # 21 tokens that are not shown to the drafter
        run.complete(state)
        length = state.target.seq_len
        if key is None:
            assert run.rows(state) == (0, None), "a drafter without rows is not fed"
        else:
            # The ring has labels length - 3 .. length; the last key before a propose reads label length - 1.
            assert run.rows(state) == (before + 3, length - 2)
        run.decoder.free_state(state)


def test_a_feed_that_fails_or_falls_short_ends_it(
    gpu: GpuBackend,
    tiny: Tiny,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the first of two pieces around the ring's end is not taken, the second is not tried, and drafts go on."""
    small_ring(monkeypatch, 5)
    prompt = rng.integers(0, 300, 11).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, replace(ONE, catchup=True))
        wanted = run.plain.generate(prompt, 20).tokens
        state, lengths = run.decoder.alloc_state(), []

        def refuse(*args: Any) -> int:
            lengths.append(state.target.seq_len)
            if len(lengths) % 2:
                raise KvCacheExhausted(1, 0)
            return 0

        def from_now_on(tokens: list[int]) -> None:
            monkeypatch.setattr(run.head, "catchup_drafter", refuse)

        assert run.decoder.generate(prompt, 20, state, from_now_on).tokens == wanted
        assert len(lengths) > 3
        assert len(set(lengths)) == len(lengths), "one call a step"
        assert sum("catch-up of" in record.message for record in caplog.records) == -(-len(lengths) // 2)
        run.decoder.free_state(state)


@pytest.mark.parametrize("lever", ["refeed", "catchup"])
@pytest.mark.parametrize("shift", thinned([-2, -1, 0, 1, 4], keep=[1, 2, 3]))
def test_a_shift_feeds_other_hidden_rows(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, lever: str, shift: int
) -> None:
    """0 is right: every other shift gives rows that a fresh drafter does not have, and the same tokens."""
    prompt = rng.integers(0, 300, 11).tolist()
    levers = replace(EXACT, catchup=lever == "catchup", refeed_shift=shift)
    with opened(gpu, tiny) as found:
        run = Run(found, levers, 3)
        state = run.decoder.alloc_state()
        assert run.decoder.generate(prompt, 30, state).tokens == run.plain.generate(prompt, 30).tokens
        run.complete(state)
        ours, fresh = drafter_rows(run.head, state), run.fresh_rows(state)
        same = ours.shape == fresh.shape and (ours == fresh).all()
        assert same == (shift == 0)
        run.decoder.free_state(state)


def test_hashes_of_what_is_fed(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = rng.integers(0, 300, 11).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, replace(EXACT, refeed_debug=True))
        state = run.decoder.alloc_state()
        with caplog.at_level("INFO", "spark_py.model"):
            run.decoder.generate(prompt, 3, state)
            run.decoder.generate(rng.integers(0, 300, 5).tolist(), 1, state)
        lines = [record.message for record in caplog.records if record.message.startswith("fed keys")]
        # The last is that of the second prompt: it follows the drafter's rows and ends before the next propose's key.
        last = state.target.seq_len - 2
        first = int(lines[-1].split()[2])
        raw = np.empty(2 * 64 * (last - first + 1), np.uint8)
        gpu.copy_d2h(state.target.hidden_row(first), raw)
        assert lines[-1] == f"fed keys {first} to {last}: hidden rows {fnv1a(raw.tobytes()):016x}"
        run.decoder.free_state(state)


# ---------------------------------------------------------------- context


@pytest.mark.parametrize("turns", [1, 2])
def test_a_drafter_that_is_shown_the_prompt_late_sees_the_same(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, turns: int
) -> None:
    prompt, more = rng.integers(0, 300, 11).tolist(), rng.integers(0, 300, 7).tolist()
    with opened(gpu, tiny) as found:
        rows = []
        for levers in (EXACT, replace(EXACT, eager_drafter=False)):
            run = Run(found, levers)
            state = run.decoder.alloc_state()
            run.decoder.generate(prompt, 1, state)
            assert run.rows(state) == ((10, 9) if levers.eager_drafter else (0, None))
            if turns == 2:
                run.decoder.generate(more, 1, state)
            run.decoder.generate([], 20, state)
            run.complete(state)
            rows.append(drafter_rows(run.head, state))
            run.decoder.free_state(state)
            assert run.head.kv_cache.num_free_blocks() == run.free
        np.testing.assert_array_equal(rows[0], rows[1])


def test_a_drafter_that_comes_late_is_shown_everything(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    prompt = rng.integers(0, 300, 11).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, EXACT)
        state = run.plain.alloc_state()
        tokens = run.plain.generate(prompt, 8, state).tokens
        tokens += run.decoder.generate([], 1, state).tokens
        assert run.rows(state) == (state.target.seq_len - 1, state.target.seq_len - 2)
        tokens += run.decoder.generate([], 11, state).tokens
        assert tokens == run.plain.generate(prompt, 20).tokens
        run.complete(state)
        np.testing.assert_array_equal(drafter_rows(run.head, state), run.fresh_rows(state))
        run.decoder.free_state(state)


# ---------------------------------------------------------------- carry


def test_a_prompt_from_its_beginning_gives_back_what_was_carried(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """The hidden rows of the whole prompt are there, and are better. The pool is that of one sequence: what is in the
    slot must not take it."""
    prompt = rng.integers(0, 300, 40).tolist()
    with opened(gpu, tiny, 96) as found:
        run = Run(found, ONE, carried=True)
        wanted = run.plain.generate(prompt, 40).tokens
        assert run.carry is not None
        run.carry.debug = True
        for _ in range(3):
            with caplog.at_level("INFO", "spark_py.model"):
                assert run.decoder.generate(prompt, 40).tokens == wanted
            assert run.carry.entry is not None
            assert run.carry.entry.tokens == (*prompt, *wanted)
            assert run.head.kv_cache.num_free_blocks() == run.free - len(run.carry.entry.blocks)
        run.carry.drop()
        assert run.head.kv_cache.num_free_blocks() == run.free
        assert [record.message.split()[2] for record in caplog.records if "carry" in record.message] == ["kept"] * 3


@pytest.mark.parametrize("common", [0, 1, 2, 20, 30])
def test_rows_that_hold_are_taken_over_and_completed(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, common: int
) -> None:
    """A sequence whose first tokens the target had processed before it had a drafter."""
    first = rng.integers(0, 300, 30).tolist()
    second = [*first[:common], *((token + 1) % 300 for token in first[common:]), 5, 6]
    with opened(gpu, tiny) as found:
        run = Run(found, EXACT, carried=True)
        assert run.carry is not None
        run.decoder.generate(first, 6)
        assert run.carry.entry is not None
        run.carry.debug = True
        state = run.plain.alloc_state()
        run.plain.generate(second[:-3], 1, state)
        state.pending = None
        with caplog.at_level("INFO", "spark_py.model"):
            tokens = run.decoder.generate(second[-3:], 12, state).tokens
        assert tokens == run.plain.generate(second, 12).tokens
        assert run.carry.entry is None
        took = [record.message.split()[4] for record in caplog.records if "took over" in record.message]
        assert took == ([str(common - 1)] if common >= 2 else [])
        run.complete(state)
        assert run.rows(state) == (state.target.seq_len - 1, state.target.seq_len - 2)
        np.testing.assert_array_equal(drafter_rows(run.head, state), run.fresh_rows(state))
        run.decoder.free_state(state)
        run.carry.drop()
        assert run.head.kv_cache.num_free_blocks() == run.free


def test_slots_that_do_not_belong(gpu: GpuBackend, tiny: Tiny) -> None:
    with opened(gpu, tiny) as found:
        head, other = found.proposer(ONE), found.proposer(ONE)
        for proposer, levers in (
            (other, ONE),
            (head, replace(ONE, mtp_max_seqs=2)),
            (head, replace(ONE, carry_drafter=False)),
        ):
            with pytest.raises(InvalidArgumentError, match="carry"):
                SpeculativeDecoder(found.target, head, 1, levers=levers, carry=DrafterCarry(proposer))


# ---------------------------------------------------------------- another text in the same state


@pytest.mark.parametrize("carried", [True, False])
@pytest.mark.parametrize("keep", [0, 1, 2, 17, 23, 25, 26])
def test_a_text_that_is_changed(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, keep: int, carried: bool
) -> None:
    """25 tokens and a pending one, of which the new text has `keep`."""
    prompt = rng.integers(0, 300, 18).tolist()
    levers = replace(EXACT, carry_drafter=carried)
    with opened(gpu, tiny) as found:
        run = Run(found, levers)
        state = run.decoder.alloc_state()
        text = [*prompt, *run.decoder.generate(prompt, 8, state).tokens]
        assert state.text == text
        changed = [*text[:keep], *((token + 1) % 300 for token in text[keep : keep + 1]), 7, 8, 9]
        rest = run.decoder.rewind(state, changed)
        assert rest == changed[min(keep, 25) :]
        assert state.target.tokens == changed[: min(keep, 25)]
        rows, key = run.rows(state)
        assert (rows, key) == ((keep - 1, keep - 2) if carried and keep > 1 else (0, None)) or (
            carried and keep > 17 and key is not None and rows == key + 1 <= keep - 1
        )
        result = run.decoder.generate(rest, 12, state)
        assert result.tokens == run.plain.generate(changed, 12).tokens
        run.complete(state)
        assert run.rows(state) == (state.target.seq_len - 1, state.target.seq_len - 2)
        np.testing.assert_array_equal(drafter_rows(run.head, state), run.fresh_rows(state))
        run.decoder.free_state(state)
        assert run.head.kv_cache.num_free_blocks() == run.free


@pytest.mark.parametrize("catchup", [False, True])
def test_a_text_that_is_cut(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, catchup: bool) -> None:
    """One token is always left to begin from, also where the new text is a beginning of the old one."""
    prompt = rng.integers(0, 300, 12).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, replace(EXACT, catchup=catchup))
        state = run.decoder.alloc_state()
        for length in (12, 9, 1):
            rest = run.decoder.rewind(state, prompt[:length])
            assert run.decoder.generate(rest, 5, state).tokens == run.plain.generate(prompt[:length], 5).tokens
        for wrong in ([], [1, 300], [-1]):
            with pytest.raises(InvalidArgumentError, match="tokens"):
                run.decoder.rewind(state, wrong)
        run.decoder.free_state(state)


def test_a_plain_state_is_rewound_too(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    prompt = rng.integers(0, 300, 12).tolist()
    with opened(gpu, tiny) as found:
        plain = SpeculativeDecoder(found.target, None, 0)
        state = plain.alloc_state()
        plain.generate(prompt, 4, state)
        assert plain.rewind(state, prompt[:6]) == prompt[5:6]
        assert plain.generate(prompt[5:6], 4, state).tokens == plain.generate(prompt[:6], 4).tokens
        plain.free_state(state)


def test_acceptance_in_the_log(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = rng.integers(0, 300, 11).tolist()
    with opened(gpu, tiny) as found:
        run = Run(found, replace(ONE, accept_debug=True))
        with caplog.at_level("INFO", "spark_py.model"):
            stats = run.decoder.generate(prompt, 20).stats
        counts = f"{stats.accepted} of {stats.drafted} drafts in {stats.verify_steps} verify steps"
        wanted = f"accepted {counts}; by position {stats.accepted_at} of {stats.drafted_at}"
        assert [record.message for record in caplog.records if record.message.startswith("accepted")] == [wanted]
