# SPDX-License-Identifier: AGPL-3.0-only
"""DrafterFeed: the drafter's rows that no propose writes. Those of the prompt and of accepted drafts, and those carried
over from an earlier sequence.

Twin of `ensure_drafter_context` and of the catch-up feed in `speculative.rs`. Rust keeps the hidden rows of one prompt
and a ring of the last ones; a TargetState here has those of its whole sequence, so that a drafter can be completed at
any time. The ring is there for whoever tries a rule of Rust's.
"""

from __future__ import annotations

import logging

import numpy as np

from ..runtime.errors import KvCacheExhausted
from ..runtime.gpu import DevicePtr, StreamLike
from .decode_state import DecodeState
from .drafting.carry import DrafterCarry, plan_append
from .drafting.catchup import CatchupRing, fnv1a, plan_catchup
from .layer import DraftProposer, ForwardContext, ProposerState
from .row_policy import catchup_range

__all__ = ["DrafterFeed"]

log = logging.getLogger("spark_py.model")


class DrafterFeed:
    """Feeds one proposer, which must support it. The levers are the context's; `carry` is used where they carry."""

    def __init__(
        self, proposer: DraftProposer, ctx: ForwardContext, stream: StreamLike, carry: DrafterCarry | None = None
    ) -> None:
        self.proposer, self.ctx, self.stream, self.carry = proposer, ctx, stream, carry
        self.levers = ctx.levers

    def open(self, state: DecodeState) -> None:
        """Give a sequence what it needs to be fed."""
        if self.levers.catchup and state.ring is None:
            state.ring = CatchupRing(self.ctx.gpu, self._row_bytes(state))

    def context(self, state: DecodeState, start: int) -> None:
        """Show the drafter what was prefilled from token `start` on.

        From the beginning of a sequence: the whole prompt, and what was carried is given back. Later, to a drafter
        that has seen nothing: carried rows that hold for the sequence and what they lack, else the whole sequence. To
        one that has: what it lacks. KvCacheExhausted leaves the drafter as it was.
        """
        seq, draft = state.target, state.draft
        assert draft is not None
        if not state.has_context:
            adopted = start > 0 and self.carry is not None and self.carry.adopt(draft, seq.tokens)
            if self.carry is not None:
                self.carry.drop()
            if not adopted:
                rows = self._row(state, 0)
                self.proposer.prefill_drafter(seq.tokens, rows, draft, self.ctx, self.stream, self._stacks(rows))
            state.has_context = True
        last = self.proposer.last_pair_key(draft)
        missing = None if last is None else plan_append(last, seq.seq_len, 0, seq.seq_len)
        if missing is not None:
            self._feed(state, draft, *missing, self._row(state, missing[0]))
        state.context_due = False

    def missing(self, state: DecodeState) -> None:
        """Feed what a propose must find, if the levers want rows of accepted drafts fed."""
        if state.draft is None:
            return
        if state.ring is not None:
            self._from_ring(state, state.ring, state.draft)
        elif self.levers.refeed:
            self._from_the_sequence(state, state.draft)

    def processed(self, state: DecodeState, position: int, rows: int) -> None:
        """Tokens `position` .. `position + rows - 1` belong to the sequence now: their hidden rows go to the ring."""
        if state.ring is not None:
            state.ring.save(position, self._row(state, position), rows, self.stream)

    def _from_the_sequence(self, state: DecodeState, draft: ProposerState) -> None:
        seq, shift = state.target, self.levers.refeed_shift
        first_key = max(0, -shift)
        found = catchup_range(
            self.proposer.last_pair_key(draft), seq.seq_len, first_key, max(seq.seq_len - shift - first_key, 0)
        )
        if found is not None:
            first, rows = found
            self._feed(state, draft, first, rows, self._row(state, first + shift))

    def _from_ring(self, state: DecodeState, ring: CatchupRing, draft: ProposerState) -> None:
        """Segment by segment; one that is not taken whole ends it, and the drafter goes without."""
        seq, rows = state.target, self.proposer.drafter_rows(draft)
        last, shift = self.proposer.last_pair_key(draft), self.levers.refeed_shift
        for part in plan_catchup(last, rows, seq.seq_len, ring.labels, shift):
            try:
                fed = self._feed(state, draft, part.first, part.rows, ring.row(part.slot))
            except KvCacheExhausted as error:
                log.warning("catch-up of %d drafter rows: %s", part.rows, error)
                return
            if fed != part.rows:
                return

    def _feed(self, state: DecodeState, draft: ProposerState, first: int, rows: int, hidden: DevicePtr) -> int:
        """Keys first .. first + rows - 1 from hidden rows that lie one after another."""
        if self.levers.refeed_debug:
            read = self._read(hidden, rows * self._row_bytes(state))
            log.info("fed keys %d to %d: hidden rows %016x", first, first + rows - 1, fnv1a(read))
        tokens, held = state.target.tokens[first : first + rows + 1], self.proposer.drafter_rows(draft)
        return self.proposer.catchup_drafter(
            tokens, hidden, held, first + 1, draft, self.ctx, self.stream, self._stacks(hidden)
        )

    def _row(self, state: DecodeState, position: int) -> DevicePtr:
        """What the drafter reads of the token at `position`, those of later tokens behind it: its hidden row, or its
        residual streams."""
        seq = state.target
        return seq.streams_row(position) if self.proposer.reads_streams else seq.hidden_row(position)

    def _row_bytes(self, state: DecodeState) -> int:
        return state.target.stream_bytes if self.proposer.reads_streams else 2 * self.ctx.config.hidden_size

    def _stacks(self, rows: DevicePtr) -> DevicePtr | None:
        return rows if self.proposer.reads_streams else None

    def _read(self, hidden: DevicePtr, nbytes: int) -> bytes:
        raw = np.empty(nbytes, np.uint8)
        self.ctx.gpu.copy_d2h_on_stream(hidden, raw, self.stream)
        return raw.tobytes()
