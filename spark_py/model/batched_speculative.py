# SPDX-License-Identifier: AGPL-3.0-only
"""BatchedSpeculativeDecoder: greedy decoding of several sequences at once, with drafts that one target verifies.

Twin of the scheduler's step for several sequences. The order of a step is fixed: every sequence's rows are verified and
judged, and their hidden rows are out of the shared buffers, before any sequence drafts again, since a propose destroys
`hidden_states` and `logits`. Here each sequence keeps its own hidden rows, and a step begins with the proposes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..runtime.errors import CapacityError, InvalidArgumentError, KvCacheExhausted
from ..runtime.gpu import StreamLike
from ..runtime.scratch import VERIFY_MAX_ROWS
from ..runtime.sizes import count
from .decode_state import DecodeState
from .drafting.dcut import dcut_depths
from .drafting.gate import ThroughputGate
from .drafting.ladder import mtp_ladder_drafts
from .layer import DraftProposer
from .levers import ModelLevers
from .speculative import Generation, SpeculativeDecoder, SpeculativeStats
from .target.base import Target

__all__ = ["BatchedSpeculativeDecoder"]

log = logging.getLogger("spark_py.model")


@dataclass(slots=True)
class _Waiting:
    """A sequence that is not in work: not yet, or no more, with what it has emitted."""

    index: int
    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    stats: SpeculativeStats = field(default_factory=SpeculativeStats)
    prefill_seconds: float = 0.0


@dataclass(slots=True)
class _Running:
    """A sequence in work. drafts: of this step; log_probs: of theirs, where the proposer said them. noted: whether the
    log has that it drafts no more."""

    request: _Waiting
    state: DecodeState
    drafts: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    noted: bool = False

    @property
    def index(self) -> int:
        return self.request.index

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens

    @property
    def token(self) -> int:
        assert self.state.pending is not None
        return self.state.pending


def _note_undrafted(sequences: Sequence[_Running], what: str, error: KvCacheExhausted) -> None:
    """An error when a sequence's drafts end, and not again until it drafts: a pool that is short is so for many
    steps."""
    new = any(not sequence.noted for sequence in sequences)
    log.log(logging.ERROR if new else logging.DEBUG, "%s in this step: %s", what, error)
    for sequence in sequences:
        sequence.noted = True


class BatchedSpeculativeDecoder(SpeculativeDecoder):
    """As SpeculativeDecoder, with `generate_all` for several prompts. Each sequence's tokens are those of its own run.

    How much a step drafts: nothing while more than `mtp_max_seqs` sequences run or where the gate, if one is given,
    finds that it does not pay; else what the ladder says. Which drafts are verified: D-Cut, for steps whose proposes
    said probabilities, with a verify of at most `row_budget` rows.
    """

    def __init__(
        self,
        target: Target,
        proposer: DraftProposer | None,
        num_drafts: int,
        eos_token_ids: Sequence[int] = (),
        levers: ModelLevers | None = None,
        stream: StreamLike | None = None,
        gate: ThroughputGate | None = None,
        row_budget: int = VERIFY_MAX_ROWS,
    ) -> None:
        super().__init__(target, proposer, num_drafts, eos_token_ids, levers, stream)
        self.gate, self.row_budget = gate, count("row_budget", row_budget)

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        concurrency: int | None = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Generation]:
        """Continue each prompt greedily; results in the order of the prompts, `on_tokens` sees (prompt, new tokens).

        At most `concurrency` sequences run at once, all by default; the next prompt begins when one has ended. A
        sequence for which the target has no KV block waits for others to end; where all wait, the youngest gives its
        blocks back and begins again later, with what it has emitted. KvCacheExhausted where one alone has too few.
        """
        limit = count("max_new_tokens", max_new_tokens)
        width = count("concurrency", len(prompts) or 1 if concurrency is None else concurrency)
        waiting = deque(_Waiting(i, prompt) for i, prompt in enumerate(prompts))
        running: list[_Running] = []
        done: dict[int, Generation] = {}
        started = time.perf_counter()
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    admitted = self._admit(waiting[0], alone=not running)
                    if admitted is None:
                        break
                    waiting.popleft()
                    running.append(admitted)
                    if on_tokens is not None:
                        on_tokens(admitted.index, admitted.tokens[-1:])
                self._retire(running, done, limit, started)
                stalled = self._step_all(running, limit, on_tokens) if running else None
                if stalled is not None:
                    if len(running) == 1:
                        raise stalled
                    youngest = running.pop()
                    log.info("sequence %d gives its KV blocks back and waits", youngest.index)
                    self.free_state(youngest.state)
                    waiting.appendleft(youngest.request)
                self._retire(running, done, limit, started)
        finally:
            for sequence in running:
                self.free_state(sequence.state)
        return [done[i] for i in range(len(prompts))]

    def _admit(self, request: _Waiting, alone: bool) -> _Running | None:
        """Prefill a sequence and emit its next token; None where the target has no blocks for it and others may give
        some back."""
        state = self.alloc_state()
        begun = time.perf_counter()
        try:
            token = self._prefill_target([*request.prompt, *request.tokens], state)
            if state.context_due and self.levers.eager_drafter:
                self._show_or_wait(request, state)
        except KvCacheExhausted:
            self.free_state(state)
            if alone:
                raise
            return None
        except BaseException:
            self.free_state(state)
            raise
        request.prefill_seconds += time.perf_counter() - begun
        request.tokens.append(token)
        return _Running(request, state)

    def _show_or_wait(self, request: _Waiting, state: DecodeState) -> None:
        """A drafter's pool is not the target's: where it has no blocks, it is shown the prompt later."""
        try:
            self._show(state)
        except KvCacheExhausted as error:
            log.warning("the drafter does not see prompt %d yet: %s", request.index, error)

    def _retire(self, running: list[_Running], done: dict[int, Generation], limit: int, started: float) -> None:
        for sequence in running[:]:
            finish = self._finish(sequence.tokens, limit, sequence.state)
            if finish is None:
                continue
            running.remove(sequence)
            self.free_state(sequence.state)
            request = sequence.request
            self._note(request.stats)
            seconds = time.perf_counter() - started
            done[request.index] = Generation(request.tokens, finish, request.stats, seconds, request.prefill_seconds)

    # ------------------------------------------------------------ a step

    def _step_all(
        self, running: list[_Running], limit: int, on_tokens: Callable[[int, list[int]], None] | None
    ) -> KvCacheExhausted | None:
        """Propose, verify every sequence, then accept. An error where no sequence has a block to go on."""
        n, depth = len(running), max(sequence.state.target.seq_len for sequence in running)
        drafts = mtp_ladder_drafts(n, self.num_drafts, self.levers.mtp_k_ladder) if self.proposer is not None else 0
        judged = drafts > 0 and n <= self.levers.mtp_max_seqs
        if not judged or (self.gate is not None and not self.gate.use_mtp(n, depth)):
            drafts = 0
        begun = time.perf_counter()
        self._propose_all(running, drafts)

        picks = [self._verify(sequence) for sequence in running]
        stalled = [found for found in picks if isinstance(found, KvCacheExhausted)]
        if len(stalled) == len(running):
            return stalled[0]
        emitted = 0
        for sequence, found in zip(running, picks, strict=True):
            if isinstance(found, KvCacheExhausted):
                continue
            room = limit - len(sequence.tokens)
            new = self._verdict(sequence.state, sequence.drafts, found, room, sequence.request.stats)
            sequence.request.tokens += new
            emitted += len(new)
            if on_tokens is not None:
                on_tokens(sequence.index, new)
        if judged and self.gate is not None:
            self.gate.record(n, depth, emitted, max(time.perf_counter() - begun, 1e-9))
        return None

    def _verify(self, sequence: _Running) -> Sequence[int] | KvCacheExhausted:
        """The target's picks; where it has no block for the drafts they are given up, and where it has none for the
        token itself, the error: the sequence waits a step."""
        state, stream = sequence.state, self.stream
        try:
            return self.target.verify([sequence.token, *sequence.drafts], state.target, stream).picks
        except KvCacheExhausted as error:
            if not sequence.drafts:
                return error
        assert self.proposer is not None
        assert state.draft is not None
        self.proposer.after_verify(0, state.draft, stream)
        sequence.drafts = []
        try:
            return self.target.verify([sequence.token], state.target, stream).picks
        except KvCacheExhausted as error:
            return error

    # ------------------------------------------------------------ drafts

    def _propose_all(self, running: list[_Running], num_drafts: int) -> None:
        """Fill each sequence's drafts. One that lacks room for all, or drafter blocks, drafts fewer or none."""
        ready: list[_Running] = []
        for sequence in running:
            sequence.drafts, sequence.log_probs = [], []
            if num_drafts < 1 or sequence.state.draft is None or self._wanted(sequence.state, num_drafts) < 1:
                continue
            try:
                self._complete(sequence.state)
            except KvCacheExhausted as error:
                _note_undrafted([sequence], f"sequence {sequence.index} does not draft", error)
                continue
            ready.append(sequence)

        batch = [sequence for sequence in ready if self._wanted(sequence.state, num_drafts) == num_drafts]
        singles = [sequence for sequence in ready if self._wanted(sequence.state, num_drafts) < num_drafts]
        width = self._batch_width() if len(batch) > 1 else 1
        for at in range(0, len(batch), width):
            group = batch[at : at + width]
            if len(group) == 1 or not self._propose_group(group, num_drafts):
                singles += group
        for sequence in singles:
            try:
                sequence.drafts = self._propose(sequence.token, sequence.state, num_drafts)
            except KvCacheExhausted as error:
                _note_undrafted([sequence], f"sequence {sequence.index} does not draft", error)
        for sequence in ready:
            sequence.noted = sequence.noted and not sequence.drafts
        self._cut(running, num_drafts)

    def _batch_width(self) -> int:
        """Sequences of one batched propose; 1 where there is none. A confidence floor needs each propose alone."""
        if self.proposer is None or not self.levers.batch_propose or self.levers.draft_conf_tau > 0.0:
            return 1
        return self.proposer.propose_batch_max(self.target.buffers, self.target.config)

    def _propose_group(self, group: list[_Running], num_drafts: int) -> bool:
        """One batched propose; False where the proposer does not offer it for this group.

        An error ends drafting for the group in this step and nothing else: its sequences do not propose alone, since
        what made the group fail fails them too, and a proposer that left rows of its earlier positions has them once.
        """
        assert self.proposer is not None
        seqs = [sequence.state.target for sequence in group]
        drafters = [sequence.state.draft for sequence in group if sequence.state.draft is not None]
        hidden, positions = [seq.hidden_row(seq.seq_len - 1) for seq in seqs], [seq.seq_len for seq in seqs]
        confidences: list[list[float]] = []
        try:
            found = self.proposer.propose_batch(
                [sequence.token for sequence in group], hidden, positions, num_drafts, drafters, self._ctx, self.stream,
                confidences,
            )  # fmt: skip
        except KvCacheExhausted as error:
            _note_undrafted(group, f"{len(group)} sequences do not draft", error)
            return True
        except CapacityError as error:
            log.debug("%d sequences do not draft in this step: %s", len(group), error)
            return True
        if found is None:
            return False
        for name, rows in (("drafts of a batched propose", found), ("confidences of a batched propose", confidences)):
            if len(rows) != len(group) and (rows or name.startswith("drafts")):
                raise InvalidArgumentError(name, len(rows), f"a row for each of the {len(group)} sequences")
        for i, (sequence, drafts) in enumerate(zip(group, found, strict=True)):
            sequence.drafts = self._checked(drafts, num_drafts)
            sequence.log_probs = list(confidences[i]) if confidences else []
        return True

    def _cut(self, running: list[_Running], num_drafts: int) -> None:
        """Give up the drafts that D-Cut leaves out. Their rows go with the verdict, as those of rejected drafts do."""
        few = num_drafts < 2 or len(running) > self.levers.dcut_max_seqs
        if few or not self.levers.dcut or not any(sequence.log_probs for sequence in running):
            return
        drafting = [sequence for sequence in running if sequence.drafts]
        depths = dcut_depths(
            [len(sequence.drafts) for sequence in drafting],
            [sequence.log_probs for sequence in drafting],
            self.levers.dcut_ratio,
            self.row_budget - (len(running) - len(drafting)),
        )
        for sequence, depth in zip(drafting, depths, strict=True):
            del sequence.drafts[depth:]
