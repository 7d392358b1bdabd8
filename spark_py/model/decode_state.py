# SPDX-License-Identifier: AGPL-3.0-only
"""DecodeState: one sequence as the decoding loop holds it."""

from __future__ import annotations

from dataclasses import dataclass

from .drafting.catchup import CatchupRing
from .layer import ProposerState
from .target.base import TargetState

__all__ = ["DecodeState"]


@dataclass(slots=True)
class DecodeState:
    """One sequence in the target and in the proposer. Between requests the target has processed all tokens of the
    sequence but the last, `pending`, which was emitted and is the first row of what comes next.

    context_due: tokens were prefilled, from token `began_at` on, that the drafter has not seen. has_context: it has
    seen the sequence from its beginning, so that only what is missing is fed. ring: the last hidden rows, where the
    levers want catch-up.
    """

    target: TargetState
    draft: ProposerState | None
    pending: int | None = None
    context_due: bool = False
    began_at: int = 0
    has_context: bool = False
    ring: CatchupRing | None = None

    @property
    def text(self) -> list[int]:
        """Every token of the sequence, the pending one included."""
        return [*self.target.tokens, *([] if self.pending is None else [self.pending])]
