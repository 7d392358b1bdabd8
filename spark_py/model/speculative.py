# SPDX-License-Identifier: AGPL-3.0-only
"""SpeculativeDecoder: greedy decoding of one sequence, with drafts that a target verifies.

Twin of the scheduler's verify step for one sequence. Drafts change the number of target steps, never the tokens.
Words: `num_drafts` counts drafts; a verify has one row more.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..runtime.errors import InvalidArgumentError, ProposerStateError, SparkError
from ..runtime.gpu import StreamLike
from ..runtime.sizes import count
from .decode_state import DecodeState
from .drafter_feed import DrafterFeed
from .drafting.carry import DrafterCarry, common_prefix
from .layer import DraftProposer, ForwardContext
from .levers import ModelLevers
from .target.base import Target, check_token

__all__ = ["DecodeState", "Generation", "SpeculativeDecoder", "SpeculativeStats", "accepted_prefix"]

log = logging.getLogger("spark_py.model")

EOS, MAX_NEW_TOKENS, MAX_SEQ_LEN = "eos", "max_new_tokens", "max_seq_len"
"""Why a request ended."""


def accepted_prefix(drafts: Sequence[int], picks: Sequence[int]) -> int:
    """How many drafts are accepted: the longest prefix that is what the target picked. len(picks) = len(drafts) + 1."""
    for j, draft in enumerate(drafts):
        if draft != picks[j]:
            return j
    return len(drafts)


@dataclass(slots=True)
class SpeculativeStats:
    """Counts of one run. Drafts that the target accepted count as accepted also where the request ended before them.

    `drafted_at[j]` and `accepted_at[j]` count the verify steps that had, and that accepted, draft j.
    """

    verify_steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verify step."""
        self.verify_steps += 1
        for counts, n in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for j in range(n):
                counts[j] += 1

    def merge(self, other: SpeculativeStats) -> None:
        """Add another run's counts."""
        self.verify_steps += other.verify_steps
        for counts, more in ((self.drafted_at, other.drafted_at), (self.accepted_at, other.accepted_at)):
            counts.extend([0] * (len(more) - len(counts)))
            for j, n in enumerate(more):
                counts[j] += n

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_at)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verify step: 1 + accepted / verify steps; None without a step."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True, slots=True)
class Generation:
    """What a request gave. `finish` is "eos", "max_new_tokens" or "max_seq_len"; an EOS token is among `tokens`.
    `seconds` is the whole request, `prefill_seconds` its part up to the first token."""

    tokens: list[int]
    finish: str
    stats: SpeculativeStats
    seconds: float
    prefill_seconds: float


class SpeculativeDecoder:
    """Runs a target with any proposer, or with none: `num_drafts` 0 is the plain run.

    `eos_token_ids` end a request. The levers say whether the drafter sees the prompt, and with refeed or catchup its
    rows are completed from the target's hidden rows before each propose; the row policy is the proposer's own. `carry`
    is the proposer's slot for rows that outlive a sequence, with levers that carry; its owner drops it in the end.
    """

    def __init__(
        self,
        target: Target,
        proposer: DraftProposer | None,
        num_drafts: int,
        eos_token_ids: Sequence[int] = (),
        levers: ModelLevers | None = None,
        stream: StreamLike | None = None,
        carry: DrafterCarry | None = None,
    ) -> None:
        self.target, self.num_drafts = target, count("num_drafts", num_drafts, 0)
        self.proposer = proposer if num_drafts else None
        if num_drafts and proposer is None:
            raise InvalidArgumentError("num_drafts", num_drafts, "0 without a proposer")
        self.eos = frozenset(check_token("eos_token_ids", token, target.vocab_size) for token in eos_token_ids)
        self.levers = levers or ModelLevers()
        if self.proposer is not None and self.proposer.reads_streams and not target.keeps_streams:
            limit = f"one that reads no residual streams, since a {type(target).__name__} keeps none"
            raise InvalidArgumentError("proposer", type(self.proposer).__name__, limit)
        feeds = self.proposer is not None and self.proposer.supports_drafter_prefill
        if self.proposer is not None and not feeds and self.levers.feeds_drafter:
            log.warning("%s cannot be fed: it drafts without the prompt", type(self.proposer).__name__)
        if carry is not None and (carry.proposer is not proposer or not self.levers.carries):
            raise InvalidArgumentError("carry", carry, "a slot of this proposer, with levers that carry")
        self.stream: StreamLike = target.gpu.default_stream() if stream is None else stream
        self._ctx = ForwardContext(target.buffers, target.gpu, target.config, self.levers)
        self._carry = carry
        self._feed = DrafterFeed(self.proposer, self._ctx, self.stream, carry) if self.proposer and feeds else None

    # ------------------------------------------------------------ states

    def alloc_state(self) -> DecodeState:
        """A sequence without tokens."""
        state = DecodeState(self.target.alloc_state(), None)
        try:
            self._ensure_draft_state(state)
        except BaseException:
            self.target.free_state(state.target)
            raise
        return state

    def _ensure_draft_state(self, state: DecodeState) -> None:
        """A sequence that has run without drafts gets a drafter's state, without rows, from the first run with them."""
        if self.proposer is not None and state.draft is None:
            state.draft = self.proposer.alloc_state_for(self.target.gpu, self.target.max_seq_len)
        if self._feed is not None:
            self._feed.open(state)

    def free_state(self, state: DecodeState) -> None:
        """Give back everything that a sequence holds; drafter rows go to the slot where there is one. The decoder must
        have the proposer that drafted for it. A second call does nothing."""
        if self.proposer is not None and state.draft is not None:
            if self._carry is not None and not state.target.freed:
                # After an error in the middle of a step the last drafts have no verdict: their rows are nobody's.
                with contextlib.suppress(ProposerStateError):
                    self._carry.put(state.draft, state.text)
            self.proposer.free_state(self.target.gpu, state.draft)
        if state.ring is not None:
            state.ring.release()
        self.target.free_state(state.target)

    def rewind(self, state: DecodeState, tokens: Sequence[int]) -> list[int]:
        """Make `state` that of a text that begins with `tokens`: what it has in common with the text so far stays, the
        rest is dropped. Gives the tokens that are left, at least one, as the prompt of the next request.

        Drafter rows that read none but common tokens stay where the levers carry; else they are made anew.
        """
        seq, text = state.target, state.text
        wanted = [check_token(f"tokens[{i}]", token, self.target.vocab_size) for i, token in enumerate(tokens)]
        if not wanted:
            raise InvalidArgumentError("tokens", wanted, "at least one token is needed")
        keep = min(common_prefix(seq.tokens, wanted), len(wanted) - 1)
        if self.proposer is not None and state.draft is not None and state.has_context:
            slot = DrafterCarry(self.proposer, self.levers.carry_debug)
            slot.put(state.draft, text)
            state.has_context = self.levers.carries and slot.adopt(state.draft, wanted[: keep + 1])
            slot.drop()
        self.target.rollback(seq.seq_len - keep, seq)
        state.pending = None
        return wanted[keep:]

    # ------------------------------------------------------------ the loop

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        state: DecodeState | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Generation:
        """Continue `prompt` greedily by at most `max_new_tokens` tokens; `on_tokens` sees them step by step.

        With a `state` of an earlier request, `prompt` follows that request's tokens; the state then holds this request
        too, trimmed to what was emitted. An empty prompt, ids out of the vocabulary, a prompt beyond max_seq_len and
        KvCacheExhausted leave the state usable; after drafts that are refused it is only good to be freed.
        """
        limit = count("max_new_tokens", max_new_tokens)
        if state is not None:
            self._ensure_draft_state(state)
            return self._generate(prompt, limit, state, on_tokens)
        state = self.alloc_state()
        try:
            return self._generate(prompt, limit, state, on_tokens)
        finally:
            self.free_state(state)

    def _generate(
        self, prompt: Sequence[int], limit: int, state: DecodeState, on_tokens: Callable[[list[int]], None] | None
    ) -> Generation:
        started = time.perf_counter()
        tokens = [self._prefill(prompt, state)]
        prefilled = time.perf_counter()
        stats = SpeculativeStats()
        if on_tokens is not None:
            on_tokens(tokens[:])
        while (finish := self._finish(tokens, limit, state)) is None:
            new = self._step(state, limit - len(tokens), stats)
            tokens += new
            if on_tokens is not None:
                on_tokens(new)
        self._note(stats)
        return Generation(tokens, finish, stats, time.perf_counter() - started, prefilled - started)

    def _note(self, stats: SpeculativeStats) -> None:
        if self.levers.accept_debug:
            log.info(
                "accepted %d of %d drafts in %d verify steps; by position %s of %s",
                stats.accepted, stats.drafted, stats.verify_steps, stats.accepted_at, stats.drafted_at,
            )  # fmt: skip

    def _finish(self, tokens: list[int], limit: int, state: DecodeState) -> str | None:
        if tokens[-1] in self.eos:
            return EOS
        if len(tokens) >= limit:
            return MAX_NEW_TOKENS
        return MAX_SEQ_LEN if state.target.seq_len >= self.target.max_seq_len else None

    def _prefill(self, prompt: Sequence[int], state: DecodeState) -> int:
        """The prompt through the target and, if the levers say so, the drafter. Gives the first new token."""
        seq, pending, before = state.target, state.pending, state.target.seq_len
        first = self._prefill_target(prompt, state)
        if state.context_due and self.levers.eager_drafter:
            try:
                self._show(state)
            except SparkError:
                self.target.rollback(seq.seq_len - before, seq)
                state.pending, state.context_due = pending, False
                raise
        return first

    def _prefill_target(self, prompt: Sequence[int], state: DecodeState) -> int:
        seq, before = state.target, state.target.seq_len
        tokens = list(prompt) if state.pending is None else [state.pending, *prompt]
        if not tokens:
            raise InvalidArgumentError("prompt", tokens, "at least one token is needed")
        state.pending = self.target.prefill(tokens, seq, self.stream).picks[-1]
        if self._feed is not None and state.draft is not None:
            self._feed.processed(state, before, len(tokens))
            if self.levers.drafter_prefill and not state.context_due:
                state.context_due, state.began_at = True, before
        return state.pending

    def _show(self, state: DecodeState) -> None:
        assert self._feed is not None
        self._feed.context(state, state.began_at)

    def _step(self, state: DecodeState, limit: int, stats: SpeculativeStats) -> list[int]:
        """Propose, verify, accept. Gives the tokens emitted, 1 to `limit` of them."""
        token = state.pending
        assert token is not None
        drafts = self._propose(token, state, self.num_drafts)
        picks = self.target.verify([token, *drafts], state.target, self.stream).picks
        return self._verdict(state, drafts, picks, limit, stats)

    def _verdict(
        self, state: DecodeState, drafts: Sequence[int], picks: Sequence[int], limit: int, stats: SpeculativeStats
    ) -> list[int]:
        """Accept what the target picked too. Gives the tokens emitted, 1 to `limit` of them."""
        seq, position = state.target, state.target.seq_len - len(picks)
        accepted = accepted_prefix(drafts, picks)
        stats.add(len(drafts), accepted)
        new = self._until_the_end(picks[: accepted + 1], limit)

        # The last token emitted is not kept in the state: where the request ends among accepted drafts, what is kept is
        # what a verify that accepted only those before it would have left.
        kept = len(new) - 1
        self.target.rollback(len(drafts) - kept, seq)
        if drafts:
            assert self.proposer is not None
            assert state.draft is not None
            self.proposer.after_verify(kept, state.draft, self.stream)
        if self._feed is not None:
            self._feed.processed(state, position, kept + 1)
        state.pending = new[-1]
        return new

    def _until_the_end(self, new: Sequence[int], limit: int) -> list[int]:
        """`new` up to and including the first EOS, `limit` tokens at most."""
        end = next((i + 1 for i, token in enumerate(new) if token in self.eos), len(new))
        return list(new[: min(end, limit)])

    # ------------------------------------------------------------ the drafter's part

    def _propose(self, token: int, state: DecodeState, num_drafts: int) -> list[int]:
        """Drafts after `token`: fewer than `num_drafts`, or none, where the target has no room to verify them; none
        where the proposer is less sure of one than `draft_conf_tau`."""
        seq = state.target
        wanted = self._wanted(state, num_drafts)
        if self.proposer is None or state.draft is None or wanted < 1:
            return []
        self._complete(state)
        hidden = seq.hidden_row(seq.seq_len - 1)
        stack = seq.streams_row(seq.seq_len - 1) if self.proposer.reads_streams else None
        drafts = self.proposer.propose(
            token, hidden, seq.seq_len, wanted, state.draft, self._ctx, self.stream, target_hidden_stack=stack
        )
        confidence = self.proposer.last_confidence() if drafts and self.levers.draft_conf_tau > 0.0 else None
        if confidence is not None and confidence < self.levers.draft_conf_tau:
            self.proposer.after_verify(0, state.draft, self.stream)
            return []
        return self._checked(drafts, wanted)

    def _wanted(self, state: DecodeState, num_drafts: int) -> int:
        return min(num_drafts, self.target.room(state.target) - 1)

    def _complete(self, state: DecodeState) -> None:
        """Feed the drafter all that it should see before a propose."""
        if self._feed is not None:
            if state.context_due:
                self._show(state)
            self._feed.missing(state)

    def _checked(self, drafts: Sequence[int], wanted: int) -> list[int]:
        if len(drafts) > wanted:
            raise InvalidArgumentError("drafts", len(drafts), f"at most the {wanted} that were asked for")
        return [check_token(f"drafts[{j}]", draft, self.target.vocab_size) for j, draft in enumerate(drafts)]
