# SPDX-License-Identifier: AGPL-3.0-only
"""Several sequences at once: each one's tokens are those of its own plain run, whatever a proposer says or breaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.batched_speculative import BatchedSpeculativeDecoder
from spark_py.model.checkpoint import open_checkpoint
from spark_py.model.drafting.gate import ThroughputGate
from spark_py.model.layer import ForwardContext, ProposerState
from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import Generation, SpeculativeDecoder
from spark_py.model.target import DecoderTarget
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import CapacityError, InvalidArgumentError, KvCacheExhausted
from spark_py.runtime.gpu import DevicePtr, GpuBackend, StreamLike
from tests.model.scripted import VOCAB, Scripted, ScriptState, plain, write_drafting_tiny
from tests.model.tiny import open_target, write_tiny
from tests.thin import thinned

MAX_SEQ_LEN, NEW = 64, 18
LEVERS = ModelLevers(mtp_k_ladder=None)


class Crowd(Scripted):
    """Drafts for several sequences; `texts` are their prompts and what follows. Prompt i begins with token i.

    share: how often a draft is right. width: of a batched propose; 1, there is none. sure: log-probabilities are told.
    """

    def __init__(self, rng: np.random.Generator, texts: Sequence[Sequence[int]]) -> None:
        super().__init__(lambda position, count: [])
        self.rng, self.texts = rng, [list(text) for text in texts]
        self.share, self.width, self.sure, self.short = 1.0, 8, False, False
        self.fault: Callable[[int], BaseException | None] = lambda call: None
        self.batches: list[list[int]] = []
        self.events: list[tuple[str, int]] = []
        self.asked_of: dict[int, list[int]] = {}

    def who(self, state: ProposerState) -> int:
        assert isinstance(state, ScriptState)
        return state.prompt[0]

    def drafts(self, state: ProposerState, position: int, count: int) -> list[int]:
        me = self.who(state)
        self.asked_of.setdefault(me, []).append(count)
        text = self.texts[me]
        n = int(self.rng.integers(0, count + 1)) if self.short else count
        following = [text[i] if i < len(text) else 0 for i in range(position + 1, position + 1 + n)]
        return [token if self.rng.random() < self.share else (token + 1) % VOCAB for token in following]

    def propose(self, last_token: int, target_hidden: DevicePtr, position: int, num_drafts: int, state: ProposerState,
                ctx: ForwardContext, stream: StreamLike, *rest: Any, **more: Any) -> list[int]:  # fmt: skip
        self.events.append(("propose", self.who(state)))
        self.guess = lambda p, count: self.drafts(state, p, count)
        return super().propose(last_token, target_hidden, position, num_drafts, state, ctx, stream)

    def propose_batch_max(self, buffers: BufferArena, config: Any) -> int:
        return self.width

    def propose_batch(self, last_tokens: Sequence[int], target_hiddens: Sequence[DevicePtr], positions: Sequence[int],
                      num_drafts: int, states: Sequence[ProposerState], ctx: ForwardContext, stream: StreamLike,
                      out_conf: list[list[float]] | None = None) -> list[list[int]] | None:  # fmt: skip
        if self.width < 2:
            return None
        assert 2 <= len(states) <= self.width
        self.batches.append([self.who(state) for state in states])
        error = self.fault(len(self.batches))
        if error is not None:
            raise error
        found = []
        for token, hidden, position, state in zip(last_tokens, target_hiddens, positions, states, strict=True):
            self.guess = lambda p, count, state=state: self.drafts(state, p, count)  # type: ignore[misc]
            found.append(super().propose(token, hidden, position, num_drafts, state, ctx, stream))
            self.events.append(("propose", self.who(state)))
        if self.sure and out_conf is not None:
            out_conf[:] = [[math.log(0.9 - 0.2 * self.who(s))] * len(row) for s, row in zip(states, found, strict=True)]
        return found

    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        self.events.append(("verdict", self.who(state)))
        super().after_verify(num_accepted, state, stream)


@pytest.fixture
def target(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> Iterator[DecoderTarget]:
    with open_target(gpu, write_tiny(tmp_path / "model", rng), MAX_SEQ_LEN, max_seqs=8) as found:
        yield found
        assert found.kv_cache.num_free_blocks() == found.kv_cache.num_blocks()


def some_prompts(rng: np.random.Generator, n: int) -> list[list[int]]:
    """Of different lengths, none like another."""
    return [[i, *rng.integers(0, VOCAB, 3 + 2 * i).tolist()] for i in range(n)]


def crowd(
    target: DecoderTarget, rng: np.random.Generator, n: int, new: int = NEW
) -> tuple[list[list[int]], list[list[int]], Crowd]:
    prompts = some_prompts(rng, n)
    wanted = [plain(target, prompt, new) for prompt in prompts]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted, strict=True)]
    return prompts, wanted, Crowd(rng, texts)


def check(found: list[Generation], wanted: list[list[int]], proposer: Crowd) -> None:
    assert [result.tokens for result in found] == wanted
    for state in proposer.states:
        assert state.freed
        assert len(state.accepted) == sum(1 for n in state.asked if n), "a verdict for every propose"
        text = proposer.texts[proposer.who(state)] if state.prompt else []
        assert all(text[position] == token for position, token in state.proposed)


@pytest.mark.parametrize("share", thinned([1.0, 0.6, 0.0], keep=[1]))
@pytest.mark.parametrize(
    ("n", "width", "num_drafts"), [(1, 8, 3), (2, 2, 1), (5, 8, 3), (5, 2, 3), (4, 1, 2), (7, 3, 8)]
)
def test_drafts_never_change_the_tokens(
    target: DecoderTarget, rng: np.random.Generator, n: int, width: int, num_drafts: int, share: float
) -> None:
    prompts, wanted, proposer = crowd(target, rng, n)
    proposer.share, proposer.width, proposer.short = share, width, share == 0.6
    found = BatchedSpeculativeDecoder(target, proposer, num_drafts, levers=LEVERS).generate_all(prompts, NEW)
    check(found, wanted, proposer)
    assert [result.finish for result in found] == ["max_new_tokens"] * n
    if share == 1.0:
        assert all(result.stats.verify_steps == -(-(NEW - 1) // (num_drafts + 1)) for result in found)
    if share == 0.0:
        assert all(result.stats.accepted == 0 for result in found)


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_without_a_proposer_or_drafts(target: DecoderTarget, rng: np.random.Generator, num_drafts: int) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    decoder = BatchedSpeculativeDecoder(target, proposer if num_drafts else None, num_drafts)
    assert [result.tokens for result in decoder.generate_all(prompts, NEW)] == wanted
    assert decoder.generate_all([], 4) == []


def test_each_sequence_ends_where_it_ends(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 4, 30)
    eos = [wanted[1][4], wanted[2][11]]
    ends = [next((i + 1 for i, token in enumerate(tokens) if token in eos), 30) for tokens in wanted]
    found = BatchedSpeculativeDecoder(target, proposer, 3, eos, LEVERS).generate_all(prompts, 30)
    assert [result.tokens for result in found] == [tokens[:end] for tokens, end in zip(wanted, ends, strict=True)]
    assert [result.finish for result in found] == ["eos" if end < 30 else "max_new_tokens" for end in ends]
    assert len(set(ends)) > 1


def test_sequences_at_their_maximum_draft_less(target: DecoderTarget, rng: np.random.Generator) -> None:
    """Near max_seq_len a sequence drafts alone, and fewer; no draft has a position beyond it."""
    lengths = (MAX_SEQ_LEN - 7, MAX_SEQ_LEN, MAX_SEQ_LEN - 2, 20)
    prompts = [[i, *rng.integers(0, VOCAB, n - 1).tolist()] for i, n in enumerate(lengths)]
    wanted = [plain(target, prompt, min(NEW, MAX_SEQ_LEN - len(prompt) + 1)) for prompt in prompts]
    proposer = Crowd(rng, [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted, strict=True)])
    proposer.share = 0.7
    found = BatchedSpeculativeDecoder(target, proposer, 3, levers=LEVERS).generate_all(prompts, NEW)
    check(found, wanted, proposer)
    assert [result.finish for result in found] == ["max_seq_len"] * 3 + ["max_new_tokens"]
    for state in proposer.states:
        for (position, _), asked in zip(state.proposed, state.asked, strict=True):
            assert position + asked < MAX_SEQ_LEN
    assert min(proposer.asked_of[0]) < 3


def test_prompts_that_wait_for_their_turn(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 6)
    seen: dict[int, list[int]] = {}
    decoder = BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS)
    found = decoder.generate_all(prompts, NEW, 2, lambda i, tokens: seen.setdefault(i, []).extend(tokens))
    check(found, wanted, proposer)
    assert [seen[i] for i in range(6)] == wanted
    assert max(map(len, proposer.batches)) == 2


# ---------------------------------------------------------------- order and groups


def test_every_verdict_comes_before_any_propose_of_the_next_step(
    target: DecoderTarget, rng: np.random.Generator
) -> None:
    """A propose destroys the rows that a verdict reads."""
    prompts, wanted, proposer = crowd(target, rng, 5)
    proposer.share, proposer.width = 0.5, 2
    check(BatchedSpeculativeDecoder(target, proposer, 3, levers=LEVERS).generate_all(prompts, NEW), wanted, proposer)
    kinds = [kind for kind, _ in proposer.events]
    steps = "".join(kind[0] for kind in kinds).replace("vp", "v|p").split("|")
    for part in steps:
        assert part == "p" * (len(part) // 2) + "v" * (len(part) // 2)
    assert len(steps) > 5


def test_the_hidden_rows_are_those_before_the_tokens(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    proposer.share = 0.7
    rows: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
    check(BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS).generate_all(prompts, NEW), wanted, proposer)
    for me, text in enumerate(proposer.texts):
        state = target.alloc_state()
        target.prefill(text, state, target.gpu.default_stream())
        for position in range(1, len(text)):
            rows[me, position] = row = np.empty(64, np.uint16)
            target.gpu.copy_d2h(state.hidden_row(position - 1), row.view(np.uint8))
        target.free_state(state)
    order = [who for kind, who in proposer.events if kind == "propose"]
    assert len(order) == len(proposer.hiddens)
    for who, (position, row) in zip(order, proposer.hiddens, strict=True):
        np.testing.assert_array_equal(row, rows[who, position])


def test_groups_as_wide_as_the_proposer_takes(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 7)
    proposer.width = 3
    check(BatchedSpeculativeDecoder(target, proposer, 1, levers=LEVERS).generate_all(prompts, NEW), wanted, proposer)
    assert proposer.batches[:2] == [[0, 1, 2], [3, 4, 5]]
    assert ("propose", 6) in proposer.events[6:7], "the one that is left drafts alone"


@pytest.mark.parametrize(
    "levers", [ModelLevers(batch_propose=False), ModelLevers(draft_conf_tau=0.1)], ids=["off", "tau"]
)
def test_one_at_a_time(target: DecoderTarget, rng: np.random.Generator, levers: ModelLevers) -> None:
    """The lever is off, or each propose must say how sure it is."""
    prompts, wanted, proposer = crowd(target, rng, 3)
    check(BatchedSpeculativeDecoder(target, proposer, 2, levers=levers).generate_all(prompts, NEW), wanted, proposer)
    assert proposer.batches == []
    assert sum(len(state.asked) for state in proposer.states) > 3


def test_a_proposer_that_refuses_a_group_drafts_one_by_one(
    target: DecoderTarget, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    monkeypatch.setattr(proposer, "propose_batch", lambda *args: None)
    found = BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS).generate_all(prompts, NEW)
    check(found, wanted, proposer)
    assert all(result.stats.drafted == 2 * result.stats.verify_steps for result in found)


@pytest.mark.parametrize(
    ("error", "level"),
    [(KvCacheExhausted(2, 0), "ERROR"), (CapacityError("entries", 449, 448, "the room"), "DEBUG")],
    ids=["pool", "stride"],
)
def test_a_group_that_fails_drafts_again_in_the_next_step(
    target: DecoderTarget, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, error: Exception, level: str
) -> None:
    """No propose alone in place of the one that failed: its rows would be there twice."""
    prompts, wanted, proposer = crowd(target, rng, 4)
    proposer.width = 2
    proposer.fault = lambda call: error if call in (2, 5) else None
    with caplog.at_level("DEBUG", "spark_py.model"):
        found = BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS).generate_all(prompts, NEW)
    check(found, wanted, proposer)
    records = [record for record in caplog.records if "do not draft" in record.message]
    assert [record.levelname for record in records] == [level] * 2
    assert proposer.batches[:5] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    assert [kind for kind, who in proposer.events[:8]] == ["propose"] * 2 + ["verdict"] * 2 + ["propose"] * 4


def test_a_pool_that_stays_short_is_an_error_once(
    target: DecoderTarget, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """And once more where it is short again after the group has drafted."""
    prompts, wanted, proposer = crowd(target, rng, 3)
    proposer.width = 3
    proposer.fault = lambda call: KvCacheExhausted(1, 0) if call in (1, 2, 3, 5, 6) else None
    with caplog.at_level("DEBUG", "spark_py.model"):
        found = BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS).generate_all(prompts, NEW)
    check(found, wanted, proposer)
    levels = [record.levelname for record in caplog.records if "3 sequences do not draft" in record.message]
    assert levels == ["ERROR", "DEBUG", "DEBUG", "ERROR", "DEBUG"]


def test_other_errors_are_errors(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, _, proposer = crowd(target, rng, 3)
    proposer.fault = lambda call: RuntimeError("broken") if call == 2 else None
    with pytest.raises(RuntimeError, match="broken"):
        BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS).generate_all(prompts, NEW)
    assert all(state.freed for state in proposer.states)


# ---------------------------------------------------------------- how much is drafted


@pytest.mark.parametrize(
    ("n", "levers", "drafts"),
    [
        (4, ModelLevers(), 3),
        (5, ModelLevers(), 1),
        (5, ModelLevers(mtp_k_ladder=None), 3),
        (2, ModelLevers(mtp_k_ladder=((1, 3), (9, 2))), 2),
        (3, ModelLevers(mtp_max_seqs=3), 3),
        (4, ModelLevers(mtp_max_seqs=3), 0),
    ],
)
def test_drafts_by_the_number_of_sequences(
    target: DecoderTarget, rng: np.random.Generator, n: int, levers: ModelLevers, drafts: int
) -> None:
    prompts, wanted, proposer = crowd(target, rng, n)
    check(BatchedSpeculativeDecoder(target, proposer, 3, levers=levers).generate_all(prompts, NEW), wanted, proposer)
    assert proposer.asked_of.get(0, [0])[0] == drafts
    if drafts == 0:
        assert proposer.asked_of == {}


def test_drafts_begin_when_enough_sequences_have_ended(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 5)
    eos = [wanted[0][2], wanted[1][3]]
    levers = ModelLevers(mtp_max_seqs=3)
    found = BatchedSpeculativeDecoder(target, proposer, 3, eos, levers).generate_all(prompts, NEW)
    for result, tokens in zip(found, wanted, strict=True):
        assert result.tokens == tokens[: len(result.tokens)]
    assert proposer.asked_of
    assert all(who > 1 for who in proposer.asked_of)


class Told(ThroughputGate):
    """Says what it was told to, and remembers what it was told."""

    def __init__(self, answers: Sequence[bool]) -> None:
        super().__init__()
        self.answers, self.asked, self.recorded = list(answers), 0, []  # type: list[bool], int, list[Any]

    def use_mtp(self, sequences: int, depth: int) -> bool:
        self.asked += 1
        return self.answers[(self.asked - 1) % len(self.answers)]

    def record(self, sequences: int, depth: int, tokens: int, seconds: float) -> None:
        assert seconds > 0
        self.recorded.append((sequences, depth, tokens))


def test_the_gate_is_asked_and_told(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    gate = Told([True, False])
    check(
        BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS, gate=gate).generate_all(prompts, NEW),
        wanted,
        proposer,
    )
    assert gate.recorded[:4] == [(3, 8, 9), (3, 11, 3), (3, 12, 9), (3, 15, 3)]
    assert sum(tokens for *_, tokens in gate.recorded) == 3 * (NEW - 1)
    assert len(proposer.batches) == -(-gate.asked // 2)


def test_a_gate_that_is_shut_or_more_sequences_than_draft(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    shut = Told([False])
    check(BatchedSpeculativeDecoder(target, proposer, 2, gate=shut).generate_all(prompts, NEW), wanted, proposer)
    assert proposer.asked_of == {}
    gate, few = Told([True]), ModelLevers(mtp_max_seqs=2)
    BatchedSpeculativeDecoder(target, proposer, 2, levers=few, gate=gate).generate_all(prompts, 3)
    assert gate.recorded == [], "steps that could not draft are no measurement"


# ---------------------------------------------------------------- which drafts are verified


def test_the_least_probable_drafts_are_not_verified(target: DecoderTarget, rng: np.random.Generator) -> None:
    """Three sequences of 3 drafts, each draft with probability 0.9, 0.7, 0.5: of the 6 behind the first ones half are
    kept. 0.81, 0.729 and 0.49 are the largest products."""
    prompts, wanted, proposer = crowd(target, rng, 3)
    proposer.sure = True
    levers = ModelLevers(dcut_ratio=0.5)
    found = BatchedSpeculativeDecoder(target, proposer, 3, levers=levers).generate_all(prompts, NEW)
    check(found, wanted, proposer)
    assert [state.accepted[0] for state in proposer.states] == [3, 2, 1]
    assert [len(result.stats.drafted_at) >= 1 for result in found] == [True] * 3
    assert found[0].stats.verify_steps < found[2].stats.verify_steps


@pytest.mark.parametrize(
    ("levers", "budget", "accepted"),
    [
        (ModelLevers(dcut_ratio=0.5), 96, [3, 2, 1]),
        (ModelLevers(dcut_ratio=1.0), 96, [3, 3, 3]),
        (ModelLevers(dcut_ratio=1.0), 8, [3, 1, 1]),
        (ModelLevers(dcut=False, dcut_ratio=0.25), 6, [3, 3, 3]),
        (ModelLevers(dcut_ratio=0.25, dcut_max_seqs=2), 96, [3, 3, 3]),
    ],
)
def test_shares_and_budgets(
    target: DecoderTarget, rng: np.random.Generator, levers: ModelLevers, budget: int, accepted: list[int]
) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    proposer.sure = True
    decoder = BatchedSpeculativeDecoder(target, proposer, 3, levers=levers, row_budget=budget)
    check(decoder.generate_all(prompts, NEW), wanted, proposer)
    assert [state.accepted[0] for state in proposer.states] == accepted


def test_a_sequence_without_drafts_takes_a_row_too(
    target: DecoderTarget, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 rows: one for it, two for each of the others, and three for the best of their deeper drafts."""
    prompts, wanted, proposer = crowd(target, rng, 3)
    proposer.sure = True
    real = proposer.drafts
    monkeypatch.setattr(proposer, "drafts", lambda state, *args: [] if proposer.who(state) == 2 else real(state, *args))
    levers = ModelLevers(dcut_ratio=1.0)
    decoder = BatchedSpeculativeDecoder(target, proposer, 3, levers=levers, row_budget=8)
    check(decoder.generate_all(prompts, NEW), wanted, proposer)
    assert [state.accepted[0] for state in proposer.states[:2]] == [3, 2]
    assert proposer.states[2].accepted == []


def test_one_draft_or_no_probabilities_leave_nothing_to_cut(target: DecoderTarget, rng: np.random.Generator) -> None:
    prompts, wanted, proposer = crowd(target, rng, 3)
    levers = ModelLevers(dcut_ratio=0.25)
    check(BatchedSpeculativeDecoder(target, proposer, 3, levers=levers).generate_all(prompts, NEW), wanted, proposer)
    assert [state.accepted[0] for state in proposer.states] == [3, 3, 3]
    proposer.sure = True
    decoder = BatchedSpeculativeDecoder(target, proposer, 1, levers=levers, row_budget=1)
    assert [result.tokens for result in decoder.generate_all(prompts, NEW)] == wanted


# ---------------------------------------------------------------- blocks


def test_a_sequence_without_a_block_waits_for_others_to_end(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator
) -> None:
    """7 blocks for 4 sequences that come to need 2 each, and drafts that would like more."""
    with open_target(gpu, write_tiny(tmp_path / "model", rng), MAX_SEQ_LEN, max_seqs=8, num_blocks=7) as target:
        prompts, wanted, proposer = crowd(target, rng, 4)
        found = BatchedSpeculativeDecoder(target, proposer, 8, levers=LEVERS).generate_all(prompts, NEW)
        check(found, wanted, proposer)
        assert target.kv_cache.num_free_blocks() == 7


def test_prompts_wait_for_blocks_too(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    with open_target(gpu, write_tiny(tmp_path / "model", rng), MAX_SEQ_LEN, max_seqs=8, num_blocks=3) as target:
        prompts, wanted, proposer = crowd(target, rng, 5)
        found = BatchedSpeculativeDecoder(target, proposer, 3, levers=LEVERS).generate_all(prompts, NEW)
        check(found, wanted, proposer)


def test_a_pool_that_no_end_of_others_can_help(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    with open_target(gpu, write_tiny(tmp_path / "model", rng), MAX_SEQ_LEN, max_seqs=8, num_blocks=2) as target:
        prompts = [[0] * 10, [1] * 10]
        proposer = Crowd(rng, [[0] * 60, [1] * 60])
        decoder = BatchedSpeculativeDecoder(target, proposer, 3, levers=LEVERS)
        with pytest.raises(KvCacheExhausted):
            decoder.generate_all(prompts, 30)
        with pytest.raises(KvCacheExhausted):
            decoder.generate_all([[1] * 40], 2)
        assert target.kv_cache.num_free_blocks() == 2
        assert all(state.freed for state in proposer.states)


def test_a_drafter_without_blocks_drafts_later_or_never(
    target: DecoderTarget, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool is not the target's: the sequences go on, and are shown their prompts when there is room."""
    prompts, wanted, proposer = crowd(target, rng, 3)
    shown, real = [0], proposer.prefill_drafter

    def prefill_drafter(*args: Any) -> int:
        shown[0] += 1
        if shown[0] in (2, 3, 4):
            raise KvCacheExhausted(1, 0)
        return real(*args)

    monkeypatch.setattr(proposer, "prefill_drafter", prefill_drafter)
    check(BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS).generate_all(prompts, NEW), wanted, proposer)
    messages = [record.message for record in caplog.records]
    assert sum("does not see prompt" in message for message in messages) == 2
    assert sum("does not draft in this step" in message for message in messages) == 1
    assert set(proposer.asked_of) == {0, 1, 2}


# ---------------------------------------------------------------- a head that drafts by itself


@pytest.mark.parametrize(("policy", "refeed"), thinned([(RowPolicy.SEED, False), (RowPolicy.VERIFIED, True)], keep=[1]))
@pytest.mark.parametrize("eager", thinned([True, False], keep=[1]))
def test_a_real_head(
    gpu: GpuBackend,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    policy: RowPolicy,
    refeed: bool,
    eager: bool,
) -> None:
    """It drafts in batches what it drafts alone; its rows of three sequences stay apart, and all its blocks come back.
    With D-Cut fewer drafts are verified, and the tokens are the same."""
    prompts = some_prompts(rng, 5)
    levers = ModelLevers(row_policy=policy, refeed=refeed, mtp_max_seqs=3, eager_drafter=eager, dcut=False)
    widths: list[int] = []
    propose = MtpHead.propose_batch

    def propose_batch(head: MtpHead, tokens: Sequence[int], *rest: Any) -> list[list[int]] | None:
        widths.append(len(tokens))
        return propose(head, tokens, *rest)

    monkeypatch.setattr(MtpHead, "propose_batch", propose_batch)
    tiny = write_drafting_tiny(tmp_path / "model", rng)
    with open_checkpoint(tiny.folder, gpu, MAX_SEQ_LEN, max_seqs=3) as found:
        plain_run = SpeculativeDecoder(found.target, None, 0)
        wanted = [plain_run.generate(prompt, NEW) for prompt in prompts]
        head = found.proposer(levers)
        assert isinstance(head, MtpHead)
        alone = [SpeculativeDecoder(found.target, head, 2, levers=levers).generate(prompt, NEW) for prompt in prompts]
        results = BatchedSpeculativeDecoder(found.target, head, 2, levers=levers).generate_all(prompts, NEW, 3)
        assert [result.tokens for result in results] == [result.tokens for result in wanted]
        assert [result.stats for result in results] == [result.stats for result in alone], "the same drafts as alone"
        assert sum(result.stats.accepted for result in results) > 0
        assert 3 in widths
        cut = BatchedSpeculativeDecoder(found.target, head, 2, levers=replace(levers, dcut=True))
        results = cut.generate_all(prompts, NEW, 3)
        assert [result.tokens for result in results] == [result.tokens for result in wanted]
        assert sum(result.stats.drafted < 2 * result.stats.verify_steps for result in results) > 0
        assert head.kv_cache.num_free_blocks() == head.kv_cache.num_blocks()


@pytest.mark.parametrize("batched", [False, True])
def test_a_head_whose_pool_is_too_small(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture, batched: bool
) -> None:
    """Blocks for one sequence and three that draft: the tokens are the same, with fewer drafts."""
    prompts = [[*prompt, *rng.integers(0, VOCAB, 20).tolist()] for prompt in some_prompts(rng, 3)]
    levers = ModelLevers(mtp_max_seqs=3, batch_propose=batched, dcut=False)
    tiny = write_drafting_tiny(tmp_path / "model", rng)
    with open_checkpoint(tiny.folder, gpu, MAX_SEQ_LEN, max_seqs=3) as found:
        plain_run = SpeculativeDecoder(found.target, None, 0)
        wanted = [plain_run.generate(prompt, NEW).tokens for prompt in prompts]
        head = found.proposer(levers)
        assert isinstance(head, MtpHead)
        taken = head.kv_cache.alloc_blocks(head.kv_cache.num_free_blocks() - 5)
        results = BatchedSpeculativeDecoder(found.target, head, 2, levers=levers).generate_all(prompts, NEW)
        assert [result.tokens for result in results] == wanted
        undrafted = [2 * result.stats.verify_steps - result.stats.drafted for result in results]
        assert max(undrafted) > 10
        errors = [record for record in caplog.records if record.levelname == "ERROR"]
        assert errors
        if not batched:
            assert len(errors) == sum(n > 0 for n in undrafted), "once a sequence"
        assert head.kv_cache.num_free_blocks() == 5
        head.kv_cache.free_blocks(taken)


# ---------------------------------------------------------------- what is refused


def test_what_a_proposer_may_not_say(
    target: DecoderTarget, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, _, proposer = crowd(target, rng, 3)
    decoder = BatchedSpeculativeDecoder(target, proposer, 2, levers=LEVERS)
    for answer, words in (
        ([[1], [2]], "a row for each of the 3"),
        ([[1], [2], [3, 4, 5]], "at most the 2"),
        ([[1], [2], [VOCAB]], r"drafts\[0\]"),
        ([[1], [2], [-1]], r"drafts\[0\]"),
    ):
        monkeypatch.setattr(proposer, "propose_batch", lambda *args, answer=answer: answer)
        with pytest.raises(InvalidArgumentError, match=words):
            decoder.generate_all(prompts, NEW)

    def unsure(*args: Any) -> list[list[int]]:
        args[-1].append([0.0])
        return [[1], [2], [3]]

    monkeypatch.setattr(proposer, "propose_batch", unsure)
    with pytest.raises(InvalidArgumentError, match="confidences of a batched propose is 1"):
        decoder.generate_all(prompts, NEW)


@pytest.mark.parametrize("wrong", [{"concurrency": 0}, {"concurrency": -1}, {"max_new_tokens": 0}])
def test_counts_that_are_refused(target: DecoderTarget, wrong: dict[str, Any]) -> None:
    decoder = BatchedSpeculativeDecoder(target, None, 0)
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        decoder.generate_all([[1]], **({"max_new_tokens": 4} | wrong))
    with pytest.raises(InvalidArgumentError, match="prompt"):
        decoder.generate_all([[1], []], 4)
    with pytest.raises(InvalidArgumentError, match="row_budget"):
        BatchedSpeculativeDecoder(target, None, 0, row_budget=0)
