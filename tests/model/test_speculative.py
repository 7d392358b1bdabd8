# SPDX-License-Identifier: AGPL-3.0-only
"""The decoding loop: whatever a proposer says, the tokens are those of the plain run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.levers import ModelLevers
from spark_py.model.speculative import SpeculativeDecoder, SpeculativeStats, accepted_prefix
from spark_py.model.target import DecoderTarget
from spark_py.runtime.errors import CapacityError, InvalidArgumentError, KvCacheExhausted
from spark_py.runtime.gpu import GpuBackend
from tests.model.scripted import MAX_SEQ_LEN, VOCAB, Scripted, noisy, plain, right, wrong
from tests.model.tiny import open_target, write_tiny
from tests.thin import thinned


@pytest.fixture
def target(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> Iterator[DecoderTarget]:
    with open_target(gpu, write_tiny(tmp_path / "model", rng), MAX_SEQ_LEN) as found:
        yield found
        assert found.kv_cache.num_free_blocks() == found.kv_cache.num_blocks()


@pytest.fixture
def prompt(rng: np.random.Generator) -> list[int]:
    found: list[int] = rng.integers(0, VOCAB, 13).tolist()
    return found


@pytest.mark.parametrize("num_drafts", thinned([0, 1, 3, 8, 9, 17], keep=[1, 2, 4]))
@pytest.mark.parametrize("kind", ["right", "wrong", "noisy", "random"])
def test_drafts_never_change_the_tokens(
    target: DecoderTarget, prompt: list[int], rng: np.random.Generator, kind: str, num_drafts: int
) -> None:
    wanted = plain(target, prompt, 25)
    proposer = {
        "right": lambda: right(prompt, wanted),
        "wrong": lambda: wrong(prompt, wanted),
        "noisy": lambda: noisy(prompt, wanted, rng, 0.7),
        "random": lambda: noisy(prompt, wanted, rng, 0.0),
    }[kind]()
    result = SpeculativeDecoder(target, proposer, num_drafts).generate(prompt, 25)
    assert result.tokens == wanted
    assert result.finish == "max_new_tokens"
    stats = result.stats
    if num_drafts == 0:
        assert (stats.verify_steps, stats.drafted, stats.acceptance_rate) == (24, 0, None)
        assert stats.mean_accepted_length == 1
        assert proposer.states == []
    elif kind == "right":
        assert stats.verify_steps == -(-24 // (num_drafts + 1))
    elif kind == "wrong":
        assert (stats.accepted, stats.verify_steps) == (0, 24)
    for state in proposer.states:
        assert state.freed
        assert state.prompt == prompt
        whole = [*prompt, *wanted]
        assert all(whole[position] == token for position, token in state.proposed)
        assert len(state.accepted) == sum(1 for n in state.asked if n), "after_verify once a propose with drafts"
    assert target.gpu.live_bytes() > 0


def test_the_proposer_gets_the_hidden_row_before_its_token(
    target: DecoderTarget, prompt: list[int], rng: np.random.Generator
) -> None:
    wanted = plain(target, prompt, 30)
    proposer = noisy(prompt, wanted, rng, 0.6)
    SpeculativeDecoder(target, proposer, 3).generate(prompt, 30)
    state, whole = target.alloc_state(), [*prompt, *wanted]
    target.prefill(whole, state, target.gpu.default_stream())
    assert len(proposer.hiddens) > 5
    for position, row in proposer.hiddens:
        found = np.empty_like(row)
        target.gpu.copy_d2h(state.hidden_row(position - 1), found.view(np.uint8))
        np.testing.assert_array_equal(row, found)
    target.free_state(state)


def test_unsure_drafts_are_not_verified(
    target: DecoderTarget, prompt: list[int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other propose is unsure; the threshold itself is sure enough."""
    wanted = plain(target, prompt, 20)
    proposer = right(prompt, wanted)
    monkeypatch.setattr(proposer, "last_confidence", lambda: 0.5 if len(proposer.states[0].asked) % 2 else 0.25)
    result = SpeculativeDecoder(target, proposer, 3, levers=ModelLevers(draft_conf_tau=0.5)).generate(prompt, 20)
    assert result.tokens == wanted
    assert result.stats.drafted_at == [4, 4, 4]
    assert result.stats.verify_steps == 7
    assert proposer.states[0].accepted == [3, 0, 3, 0, 3, 0, 3]


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**32 - 1, np.int32(-1), True, None])
def test_drafts_out_of_the_vocabulary_are_refused(target: DecoderTarget, prompt: list[int], bad: Any) -> None:
    proposer = Scripted(lambda position, count: [1, bad])
    with pytest.raises(InvalidArgumentError, match=r"drafts\[1\]"):
        SpeculativeDecoder(target, proposer, 2).generate(prompt, 8)
    assert proposer.states[0].freed


def test_more_drafts_than_asked_for_are_refused(target: DecoderTarget, prompt: list[int]) -> None:
    proposer = Scripted(lambda position, count: [1] * (count + 1))
    with pytest.raises(InvalidArgumentError, match="at most the 2"):
        SpeculativeDecoder(target, proposer, 2).generate(prompt, 8)


# ---------------------------------------------------------------- where a request ends


@pytest.mark.parametrize("at", thinned(range(1, 9), keep=[0, 3, 4, 7]))
@pytest.mark.parametrize("why", ["eos", "max_new_tokens"])
def test_a_request_that_ends_among_accepted_drafts_keeps_what_it_emitted(
    target: DecoderTarget, prompt: list[int], rng: np.random.Generator, at: int, why: str
) -> None:
    """All drafts are right, so that the end falls on each place of a verify in turn."""
    wanted = plain(target, prompt, 30)
    eos = [wanted[at - 1]] if why == "eos" else []
    stop = wanted.index(wanted[at - 1]) + 1 if why == "eos" else at
    proposer = right(prompt, wanted)
    decoder = SpeculativeDecoder(target, proposer, 3, eos)
    state = decoder.alloc_state()
    result = decoder.generate(prompt, 30 if why == "eos" else at, state)
    assert result.tokens == wanted[:stop]
    assert result.finish == why
    assert state.target.tokens == [*prompt, *wanted[: stop - 1]]
    assert state.pending == wanted[stop - 1]
    script = proposer.states[0]
    assert sum(n + 1 for n in script.accepted) == stop - 1, "the drafter keeps what was emitted"

    # The state goes on as a fresh one that was given the whole text.
    more = rng.integers(0, VOCAB, 5).tolist()
    again = SpeculativeDecoder(target, None, 0).generate(more, 10, state)
    assert again.tokens == plain(target, [*prompt, *wanted[:stop], *more], 10)
    decoder.free_state(state)
    decoder.free_state(state)


def test_one_new_token(target: DecoderTarget, prompt: list[int]) -> None:
    wanted = plain(target, prompt, 1)
    result = SpeculativeDecoder(target, right(prompt, wanted), 3).generate(prompt, 1)
    assert result.tokens == wanted
    assert (result.stats.verify_steps, result.stats.mean_accepted_length) == (0, None)


def test_a_prompt_of_one_token(target: DecoderTarget) -> None:
    wanted = plain(target, [7], 12)
    result = SpeculativeDecoder(target, right([7], wanted), 3).generate([7], 12)
    assert result.tokens == wanted


@pytest.mark.parametrize("length", [MAX_SEQ_LEN - 4, MAX_SEQ_LEN - 3, MAX_SEQ_LEN - 2, MAX_SEQ_LEN - 1, MAX_SEQ_LEN])
def test_prompts_up_to_max_seq_len(target: DecoderTarget, rng: np.random.Generator, length: int) -> None:
    """Fewer drafts near the end, none past it; as many tokens as the plain run has."""
    prompt = rng.integers(0, VOCAB, length).tolist()
    wanted = plain(target, prompt, MAX_SEQ_LEN - length + 1)
    for num_drafts in (0, 3):
        proposer = right(prompt, wanted)
        result = SpeculativeDecoder(target, proposer, num_drafts).generate(prompt, 50)
        assert result.tokens == wanted
        assert result.finish == "max_seq_len"
        for state in proposer.states:
            for (position, _), asked in zip(state.proposed, state.asked, strict=True):
                assert position + asked < MAX_SEQ_LEN


def test_prompts_that_are_refused(target: DecoderTarget, prompt: list[int]) -> None:
    decoder = SpeculativeDecoder(target, right(prompt, []), 2)
    before = target.gpu.live_bytes()
    for bad, kind in (([], InvalidArgumentError), ([1, VOCAB], InvalidArgumentError), ([1] * 97, CapacityError)):
        with pytest.raises(kind):
            decoder.generate(bad, 4)
        assert target.gpu.live_bytes() == before
    for count in (0, -1, True, 1.5):
        with pytest.raises(InvalidArgumentError, match="max_new_tokens"):
            decoder.generate(prompt, count)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="num_drafts"):
        SpeculativeDecoder(target, None, -1)
    with pytest.raises(InvalidArgumentError, match="num_drafts"):
        SpeculativeDecoder(target, None, 1)
    with pytest.raises(InvalidArgumentError, match="eos_token_ids"):
        SpeculativeDecoder(target, None, 0, [VOCAB])


def test_a_drafter_that_fails_in_its_prefill_leaves_the_state_as_it_was(
    target: DecoderTarget, prompt: list[int]
) -> None:
    class Exhausted(Scripted):
        def prefill_drafter(self, *args: Any, **kwargs: Any) -> int:
            raise KvCacheExhausted(2, 0)

    wanted = plain(target, prompt, 5)
    decoder = SpeculativeDecoder(target, Exhausted(lambda position, count: []), 2)
    state = decoder.alloc_state()
    with pytest.raises(KvCacheExhausted):
        decoder.generate(prompt, 5, state)
    assert (state.target.tokens, state.pending) == ([], None)
    assert SpeculativeDecoder(target, None, 0).generate(prompt, 5, state).tokens == wanted
    decoder.free_state(state)


def test_drafts_never_take_the_last_blocks_from_the_plain_run(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator
) -> None:
    """A pool of two blocks holds 32 tokens: drafts that would need a third are not asked for."""
    tiny = write_tiny(tmp_path / "model", rng)
    prompt = rng.integers(0, VOCAB, 20).tolist()
    with open_target(gpu, tiny, MAX_SEQ_LEN, num_blocks=2) as target:
        wanted = plain(target, prompt, 13)
        assert SpeculativeDecoder(target, wrong(prompt, wanted), 3).generate(prompt, 13).tokens == wanted
        with pytest.raises(KvCacheExhausted):
            SpeculativeDecoder(target, wrong(prompt, wanted), 3).generate(prompt, 14)


def test_without_drafter_prefill_the_drafter_never_sees_the_prompt(target: DecoderTarget, prompt: list[int]) -> None:
    wanted = plain(target, prompt, 6)
    proposer = right(prompt, wanted)
    levers = ModelLevers(drafter_prefill=False)
    assert SpeculativeDecoder(target, proposer, 2, levers=levers).generate(prompt, 6).tokens == wanted
    assert proposer.states[0].prompt == []


def test_a_drafter_that_cannot_be_fed_says_so(
    target: DecoderTarget, prompt: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = plain(target, prompt, 6)
    proposer = right(prompt, wanted)
    proposer.supports_drafter_prefill = False
    with caplog.at_level("WARNING", "spark_py.model"):
        result = SpeculativeDecoder(target, proposer, 2).generate(prompt, 6)
    assert result.tokens == wanted
    assert proposer.states[0].prompt == []
    assert [record.message for record in caplog.records] == ["Scripted cannot be fed: it drafts without the prompt"]


def test_tokens_are_reported_as_they_come(target: DecoderTarget, prompt: list[int]) -> None:
    wanted = plain(target, prompt, 10)
    seen: list[list[int]] = []
    SpeculativeDecoder(target, right(prompt, wanted), 2).generate(prompt, 10, on_tokens=seen.append)
    assert [len(step) for step in seen] == [1, 3, 3, 3]
    assert [token for step in seen for token in step] == wanted


# ---------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("drafts", "picks", "accepted"),
    [
        ([], [4], 0),
        ([4], [4, 5], 1),
        ([4], [3, 5], 0),
        ([4, 5, 6], [4, 5, 6, 7], 3),
        ([4, 5, 6], [4, 9, 6, 7], 1),
        ([4, 4, 4], [4, 4, 5, 4], 2),
    ],
)
def test_the_longest_prefix_is_accepted(drafts: list[int], picks: list[int], accepted: int) -> None:
    assert accepted_prefix(drafts, picks) == accepted


def test_statistics() -> None:
    stats = SpeculativeStats()
    for drafted, accepted in ((3, 3), (3, 1), (1, 0), (0, 0), (3, 2)):
        stats.add(drafted, accepted)
    assert stats.verify_steps == 5
    assert (stats.drafted, stats.drafted_at) == (10, [4, 3, 3])
    assert (stats.accepted, stats.accepted_at) == (6, [3, 2, 1])
    assert stats.acceptance_rate == 0.6
    assert stats.mean_accepted_length == 1 + 6 / 5
