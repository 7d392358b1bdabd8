# SPDX-License-Identifier: AGPL-3.0-only
"""How many drafts a step makes when several sequences share it. Twin of `mtp_ladder_drafts` in `speculative.rs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...runtime.errors import InvalidArgumentError
from ...runtime.sizes import count
from ..env_rules import parse_usize

__all__ = ["DEFAULT_LADDER", "Ladder", "check_ladder", "mtp_ladder_drafts", "parse_ladder"]

Ladder: TypeAlias = "tuple[tuple[int, int], ...]"
"""(sequences, drafts) in order: the first step whose sequences are not exceeded gives the drafts."""

DEFAULT_LADDER: Ladder = ((4, 3), (8, 1))
"""`4:3,8:1`: 3 drafts for up to 4 sequences, 1 beyond. Of the engine's ladders (later ones are 4:3,8:3 and
4:3,8:3,16:1,32:1) it is the one that belongs to a cap of 8 sequences and a verify of 32 rows, the ported version's: the
later ones came with wider batches of the verify."""


def parse_ladder(text: str | None) -> Ladder | None:
    """The steps of a text `n:k,n:k`; blanks around a number do not count. None where it is not set or any part of it
    is bad, since the engine then takes its whole default."""
    steps = []
    for part in ("" if text is None else text).split(","):
        numbers = [parse_usize(number.strip()) for number in part.split(":")]
        if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
            return None
        steps.append((numbers[0], numbers[1]))
    return tuple(steps)


def check_ladder(name: str, ladder: object) -> Ladder:
    """`ladder` as a tuple of pairs; InvalidArgumentError for an empty one and for what are no counts."""
    if not isinstance(ladder, Sequence) or isinstance(ladder, str) or not ladder:
        raise InvalidArgumentError(name, ladder, "pairs (sequences, drafts) are needed, one at least")
    steps = []
    for i, step in enumerate(ladder):
        if not isinstance(step, Sequence) or isinstance(step, str) or len(step) != 2:
            raise InvalidArgumentError(f"{name}[{i}]", step, "a pair (sequences, drafts) is needed")
        steps.append((count(f"{name}[{i}] sequences", step[0], 0), count(f"{name}[{i}] drafts", step[1], 0)))
    return tuple(steps)


def mtp_ladder_drafts(sequences: int, num_drafts: int, ladder: Ladder | None) -> int:
    """Drafts of a step of `sequences` sequences: what the ladder says, at least 1 and at most `num_drafts`.

    The last step also holds beyond its sequences. Without a ladder `num_drafts` stands; 0 drafts stay 0.
    """
    n, most = count("sequences", sequences), count("num_drafts", num_drafts, 0)
    if most == 0 or ladder is None:
        return most
    drafts = next((drafts for limit, drafts in ladder if n <= limit), ladder[-1][1])
    return min(max(drafts, 1), most)
