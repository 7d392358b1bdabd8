# SPDX-License-Identifier: AGPL-3.0-only
"""Target, loop and MTP head together, on a checkpoint whose head is right about as often as it is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.model.layers.mtp_head import MtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import DecodeState, SpeculativeDecoder
from spark_py.runtime.errors import InvalidArgumentError, KvCacheExhausted
from spark_py.runtime.gpu import GpuBackend
from tests.model.scripted import write_drafting_tiny
from tests.model.tiny import Array, Tiny
from tests.thin import thinned

POLICIES = [(policy, refeed) for policy in RowPolicy for refeed in (False, True)]
MAX_SEQ_LEN = 128


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_drafting_tiny(tmp_path / "model", rng)


@contextmanager
def opened(gpu: GpuBackend, tiny: Tiny, max_seq_len: int = MAX_SEQ_LEN) -> Iterator[Checkpoint]:
    """The checkpoint; nothing stays on the device."""
    before = gpu.live_bytes()
    with open_checkpoint(tiny.folder, gpu, max_seq_len) as found:
        yield found
    assert gpu.live_bytes() == before


def levers(policy: RowPolicy, refeed: bool, prefill: bool = True) -> ModelLevers:
    return ModelLevers(row_policy=policy, refeed=refeed, drafter_prefill=prefill, mtp_max_seqs=2)


def drafter_rows(head: MtpHead, state: DecodeState) -> Array:
    """The bytes of the drafter's rows, K and V side by side."""
    assert state.draft is not None
    blocks = [np.stack(head.kv_cache.read_block(0, block)).reshape(2, 16, -1) for block in state.draft.block_table]
    return np.concatenate(blocks, axis=1)[:, : head.drafter_rows(state.draft)]


@pytest.mark.parametrize(("policy", "refeed"), thinned(POLICIES, keep=[0, 3]))
@pytest.mark.parametrize("prefill", thinned([True, False], keep=[0]))
def test_the_tokens_are_those_of_the_plain_run(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, policy: RowPolicy, refeed: bool, prefill: bool
) -> None:
    prompt = rng.integers(0, 300, 19).tolist()
    with opened(gpu, tiny) as found:
        plain = SpeculativeDecoder(found.target, None, 0).generate(prompt, 40)
        switches = levers(policy, refeed, prefill)
        head = found.proposer(switches)
        assert isinstance(head, MtpHead)
        accepted = 0
        for num_drafts in (1, 2, 3, 8):
            result = SpeculativeDecoder(found.target, head, num_drafts, levers=switches).generate(prompt, 40)
            assert result.tokens == plain.tokens
            accepted += result.stats.accepted
            assert result.stats.accepted_at == sorted(result.stats.accepted_at, reverse=True)
            assert head.kv_cache.num_free_blocks() == head.kv_cache.num_blocks()
        assert accepted > 0, "the checkpoint shows nothing where no draft is accepted"


@pytest.mark.parametrize(("policy", "refeed"), POLICIES)
def test_an_unsure_drafter_is_not_followed(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    prompt = rng.integers(0, 300, 19).tolist()
    with opened(gpu, tiny) as found:
        plain = SpeculativeDecoder(found.target, None, 0).generate(prompt, 30)
        drafted = []
        for tau in (0.0, 0.99):
            switches = replace(levers(policy, refeed), draft_conf_tau=tau)
            result = SpeculativeDecoder(found.target, found.proposer(switches), 2, levers=switches).generate(prompt, 30)
            assert result.tokens == plain.tokens
            drafted.append(result.stats.drafted / result.stats.verify_steps)
        assert drafted[0] == 2
        assert drafted[1] < 2


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5])
def test_with_refeed_the_drafter_holds_what_a_fresh_one_would(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, num_drafts: int
) -> None:
    """Rows, keys and bytes are those of a drafter that was given the confirmed tokens and the target's hidden rows."""
    prompt = rng.integers(0, 300, 11).tolist()
    switches = levers(RowPolicy.VERIFIED, True)
    with opened(gpu, tiny) as found:
        head = found.proposer(switches)
        assert isinstance(head, MtpHead)
        decoder = SpeculativeDecoder(found.target, head, num_drafts, levers=switches)
        state, fresh = decoder.alloc_state(), decoder.alloc_state()
        decoder.generate(prompt, 30, state)
        tokens = state.target.tokens
        assert decoder._feed is not None
        decoder._feed.missing(state)
        found.target.prefill(tokens, fresh.target, decoder.stream)
        assert fresh.draft is not None
        assert state.draft is not None
        head.prefill_drafter(tokens, fresh.target.hidden_row(0), fresh.draft, decoder._ctx, decoder.stream)
        assert head.drafter_rows(state.draft) == len(tokens) - 1
        assert head.last_pair_key(state.draft) == head.last_pair_key(fresh.draft) == len(tokens) - 2
        np.testing.assert_array_equal(drafter_rows(head, state), drafter_rows(head, fresh))
        decoder.free_state(state)
        decoder.free_state(fresh)


@pytest.mark.parametrize(("policy", "refeed"), POLICIES)
def test_a_conversation_goes_on_in_its_state(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, policy: RowPolicy, refeed: bool
) -> None:
    """Requests that end anywhere, one after another, give what one plain run over the whole text gives."""
    switches = levers(policy, refeed)
    with opened(gpu, tiny) as found:
        decoder = SpeculativeDecoder(found.target, found.proposer(switches), 3, levers=switches)
        plain = SpeculativeDecoder(found.target, None, 0)
        state, text = decoder.alloc_state(), []
        for limit in (1, 2, 7, 3, 10):
            text += (turn := rng.integers(0, 300, 6).tolist())
            result = decoder.generate(turn, limit, state)
            assert result.tokens == plain.generate(text, limit).tokens
            text += result.tokens
            assert state.target.tokens == text[:-1]
        decoder.free_state(state)


@pytest.mark.parametrize("prefill", [True, False])
def test_a_pause_of_drafting_does_not_move_positions(
    gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator, prefill: bool
) -> None:
    """The target goes on alone for a while: keys of the drafter's next rows are where the sequence is, whatever rows
    it holds; it is fed what it missed, unless it is to know nothing but its own rows."""
    prompt = rng.integers(0, 300, 10).tolist()
    switches = levers(RowPolicy.VERIFIED, False, prefill)
    with opened(gpu, tiny) as found:
        head = found.proposer(switches)
        assert isinstance(head, MtpHead)
        decoder = SpeculativeDecoder(found.target, head, 2, levers=switches)
        plain = SpeculativeDecoder(found.target, None, 0)
        wanted = plain.generate(prompt, 46).tokens
        state = decoder.alloc_state()
        tokens = decoder.generate(prompt, 5, state).tokens
        assert state.draft is not None
        before = head.drafter_rows(state.draft)
        tokens += plain.generate([], 40, state).tokens
        assert head.drafter_rows(state.draft) == before
        tokens += decoder.generate([], 1, state).tokens
        length = state.target.seq_len
        assert head.drafter_rows(state.draft) == (length - 1 if prefill else before)
        drafts = decoder._propose(tokens[-1], state, 2)
        assert len(drafts) == 2
        assert head.last_pair_key(state.draft) == length
        assert tokens == wanted
        decoder.free_state(state)


def test_drafts_begin_in_the_middle_of_a_sequence(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    """A state that was made without a proposer gets a drafter's state when it is first needed."""
    prompt = rng.integers(0, 300, 10).tolist()
    switches = levers(RowPolicy.VERIFIED, True)
    with opened(gpu, tiny) as found:
        plain = SpeculativeDecoder(found.target, None, 0)
        decoder = SpeculativeDecoder(found.target, found.proposer(switches), 3, levers=switches)
        state = plain.alloc_state()
        tokens = plain.generate(prompt, 5, state).tokens
        result = decoder.generate([], 20, state)
        assert result.stats.drafted > 0
        assert [*tokens, *result.tokens] == plain.generate(prompt, 25).tokens
        decoder.free_state(state)


def test_two_sequences_at_once(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    """Steps of two sequences in turn over one target and one head: each gives what it gives alone."""
    prompts = [rng.integers(0, 300, n).tolist() for n in (9, 17)]
    switches = levers(RowPolicy.VERIFIED, True)
    with opened(gpu, tiny, 64) as found:
        found.target.release()  # type: ignore[attr-defined]
        target = type(found.target)(found.target.weights, found.config, gpu, found.target.buffers, 2)  # type: ignore
        with target:
            decoder = SpeculativeDecoder(target, found.proposer(switches), 2, levers=switches)
            alone = [decoder.generate(prompt, 21).tokens for prompt in prompts]
            states = [decoder.alloc_state() for _ in prompts]
            together = [
                decoder.generate(prompt, 1, state).tokens for prompt, state in zip(prompts, states, strict=True)
            ]
            for _ in range(5):
                for tokens, state in zip(together, states, strict=True):
                    tokens += decoder.generate([], 4, state).tokens
            assert together == alone
            for state in states:
                decoder.free_state(state)


def test_the_drafters_pool_runs_out(gpu: GpuBackend, tiny: Tiny, rng: np.random.Generator) -> None:
    """A typed error, and the state is as it was: the plain run goes on from it."""
    prompt = rng.integers(0, 300, 20).tolist()
    switches = levers(RowPolicy.SEED, False)
    with opened(gpu, tiny) as found:
        plain = SpeculativeDecoder(found.target, None, 0)
        wanted = plain.generate(prompt, 20).tokens
        head = found.proposer(switches)
        assert isinstance(head, MtpHead)
        decoder = SpeculativeDecoder(found.target, head, 3, levers=switches)
        state = decoder.alloc_state()
        taken = head.kv_cache.alloc_blocks(head.kv_cache.num_free_blocks() - 2)
        seen: list[int] = []
        with pytest.raises(KvCacheExhausted):
            decoder.generate(prompt, 60, state, on_tokens=seen.extend)
        assert state.target.tokens == [*prompt, *seen[:-1]]
        assert state.pending == seen[-1]
        assert state.draft is not None
        assert len(state.draft.block_table) == 2
        more = plain.generate([], 5, state).tokens
        assert [*seen, *more][:20] == wanted[: len(seen) + 5]
        decoder.free_state(state)
        head.kv_cache.free_blocks(taken)
        assert head.kv_cache.num_free_blocks() == head.kv_cache.num_blocks()


def test_an_unknown_family(gpu: GpuBackend, tiny: Tiny) -> None:
    with pytest.raises(InvalidArgumentError, match="qwen3_next"), open_checkpoint(tiny.folder, gpu, 32, "qwen"):
        pass
