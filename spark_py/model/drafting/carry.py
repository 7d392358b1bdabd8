# SPDX-License-Identifier: AGPL-3.0-only
"""Drafter rows that outlive their sequence: the next one that begins alike takes them over instead of making them anew.

Twin of the drafter context in `speculative.rs`. Row i of captured hidden rows is the hidden of token i.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...runtime.sizes import count
from ..layer import DraftProposer, ProposerState

__all__ = ["CarriedKv", "DrafterCarry", "PrefillCapture", "common_prefix", "merge_interval", "plan_append"]

log = logging.getLogger("spark_py.model")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def merge_interval(have: tuple[int, int] | None, lo: int, hi: int) -> tuple[int, int] | None:
    """[lo, hi) joined to what is held where they overlap or touch. One apart from it takes its place; an empty one
    changes nothing."""
    if count("lo", lo, 0) >= count("hi", hi, 0):
        return have
    if have is None or lo > have[1] or hi < have[0]:
        return lo, hi
    return min(lo, have[0]), max(hi, have[1])


def plan_append(last_pair_key: int, prompt_len: int, lo: int, hi: int) -> tuple[int, int] | None:
    """(first key, rows) that complete carried rows for a prompt of `prompt_len` tokens, from hidden rows [lo, hi).

    Rows follow the carried ones up to key prompt_len - 2, the last before a propose's own; None where nothing is
    missing or the hidden rows do not reach so far. Feed tokens first .. prompt_len - 1 and hidden row `first`, at
    position first + 1. Keys between the carried rows and lo stay missing.
    """
    first, last = max(last_pair_key + 1, lo), prompt_len - 2
    return (first, last - first + 1) if first <= last < hi else None


@dataclass(frozen=True, slots=True)
class CarriedKv:
    """Rows without a sequence: their blocks, their number, the last one's pair key, and the tokens they belong to."""

    blocks: tuple[int, ...]
    rows: int
    last_pair_key: int
    tokens: tuple[int, ...]

    def usable_by(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """(rows, last pair key) that hold for `prompt`; None where none do.

        A row of key k reads tokens 0 .. k + 1, so that L common tokens leave keys up to L - 2. As many rows are dropped
        as keys; across gaps in the keys that is a row too many, never one too few.
        """
        common = common_prefix(self.tokens, prompt)
        if common < 2:
            return None
        key = min(self.last_pair_key, common - 2)
        rows = self.rows - (self.last_pair_key - key)
        return (rows, key) if rows > 0 else None


@dataclass(slots=True)
class PrefillCapture:
    """Whose prompt one shared buffer of hidden rows holds.

    A prefill's first chunk claims the buffer with a new generation; later chunks count only while they go on where it
    ends and the generation is still theirs, since another prefill may have come between. `store` is the range of rows
    that anybody wrote, for carried rows.
    """

    generation: int = 0
    captured: int = 0
    store: tuple[int, int] | None = None

    def chunk(self, start: int, rows: int, stamp: int | None = None) -> int | None:
        """Hidden rows `start` .. `start + rows - 1` were written by the sequence that holds `stamp`; gives the stamp it
        holds from now on, None where its capture is broken."""
        n = count("rows", rows)
        self.store = merge_interval(self.store, start, start + n)
        if start == 0:
            self.generation += 1
            self.captured = n
            return self.generation
        if stamp != self.generation or start != self.captured:
            return None
        self.captured += n
        return stamp

    def covers(self, stamp: int | None, prompt_len: int) -> bool:
        """Whether the buffer holds the whole prompt of the sequence with `stamp`."""
        return stamp is not None and stamp == self.generation and self.captured >= prompt_len


class DrafterCarry:
    """One slot for the rows of one proposer. `put` fills it, `adopt` and `drop` empty it; blocks are never lost.

    Rows in the slot hold blocks of the proposer's pool: drop them before the proposer is released.
    """

    def __init__(self, proposer: DraftProposer, debug: bool = False) -> None:
        self.proposer, self.debug = proposer, debug
        self.entry: CarriedKv | None = None

    def put(self, state: ProposerState, tokens: Sequence[int]) -> bool:
        """Take the rows out of `state`, whose sequence is `tokens`; whether there were any. What was in the slot is
        given back."""
        taken = self.proposer.take_drafter_kv(state)
        if taken is None:
            return False
        self.drop()
        blocks, rows, key = taken
        self.entry = CarriedKv(tuple(blocks), rows, key, tuple(tokens))
        self._note("kept %d rows up to key %d of %d tokens", rows, key, len(tokens))
        return True

    def adopt(self, state: ProposerState, prompt: Sequence[int]) -> bool:
        """Move the rows that hold for `prompt` into `state`, which has none; whether any did. The slot is empty then in
        either case."""
        entry, self.entry = self.entry, None
        if entry is None:
            return False
        usable = entry.usable_by(prompt)
        try:
            if usable is not None and self.proposer.install_drafter_kv(state, entry.blocks, *usable):
                self._note("took over %d of %d rows, up to key %d", usable[0], entry.rows, usable[1])
                return True
        except BaseException:
            self.proposer.free_drafter_kv(entry.blocks)
            raise
        self.proposer.free_drafter_kv(entry.blocks)
        self._note("gave back %d rows: the prompt does not begin as their sequence", entry.rows)
        return False

    def drop(self) -> None:
        """Give back what is in the slot."""
        entry, self.entry = self.entry, None
        if entry is not None:
            self.proposer.free_drafter_kv(entry.blocks)

    def _note(self, text: str, *values: int) -> None:
        if self.debug:
            log.info("drafter carry: " + text, *values)
