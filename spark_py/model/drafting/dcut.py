# SPDX-License-Identifier: AGPL-3.0-only
"""D-Cut: which drafts of a batch are worth a row of the verify.

Every sequence keeps its first draft. The deeper ones compete by how probable it is that they are reached and right: the
sum of the log-probabilities of a sequence's drafts up to and including it. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...runtime.errors import InvalidArgumentError
from ...runtime.sizes import count

__all__ = ["DCUT_RATIOS", "dcut_depths", "dcut_keep", "snap_ratio"]

DCUT_RATIOS = (0.25, 0.5, 0.75, 1.0)
"""Shares of the deeper drafts that can be kept."""


def snap_ratio(ratio: float) -> float:
    """The share that the engine makes of ATLAS_MTP_DCUT_RATIO: held within 0 and 1, then the nearest of DCUT_RATIOS,
    halfway the larger."""
    quarters = math.floor(min(max(ratio, 0.0), 1.0) * 4 + 0.5)
    return max(quarters, 1) / 4


def dcut_keep(candidates: int, sequences: int, ratio: float, row_budget: int) -> int:
    """How many of the `candidates` (drafts behind a first one) are kept: the share `ratio`, halves up, and no more than
    a verify of `row_budget` rows has room for beside two rows a sequence."""
    n = count("sequences", sequences)
    room = count("row_budget", row_budget) - 2 * n
    if room < 0:
        raise InvalidArgumentError("row_budget", row_budget, f"at least {2 * n}, two rows for each of {n} sequences")
    return min(math.floor(ratio * count("candidates", candidates, 0) + 0.5), room)


def dcut_depths(
    drafted: Sequence[int], log_probs: Sequence[Sequence[float]], ratio: float, row_budget: int
) -> list[int]:
    """Drafts that each sequence keeps of the `drafted` it has: at least 1, or 0 where it has none.

    log_probs[i][j]: ln of the probability of draft j of sequence i. One that is missing counts as 0.0, certainty;
    NaN, which a row without a distribution gives, as the least. Equal sums are kept in the order of (sequence, depth).
    """
    if len(log_probs) != len(drafted):
        raise InvalidArgumentError("log_probs", len(log_probs), f"a row for each of the {len(drafted)} sequences")
    ranked: list[tuple[float, int, int]] = []
    for i, (n, known) in enumerate(zip(drafted, log_probs, strict=True)):
        total = 0.0
        for depth in range(count(f"drafted[{i}]", n, 0)):
            step = known[depth] if depth < len(known) else 0.0
            if step > 0.0:
                raise InvalidArgumentError(
                    f"log_probs[{i}][{depth}]", step, "at most 0, as a logarithm of a probability"
                )
            total += -math.inf if math.isnan(step) else step
            if depth:
                ranked.append((-total, i, depth))
    kept = [min(n, 1) for n in drafted]
    if not ranked:
        return kept
    # A sum never grows with the depth, so that what is kept of a sequence is its beginning.
    for _, i, _ in sorted(ranked)[: dcut_keep(len(ranked), sum(kept), ratio, row_budget)]:
        kept[i] += 1
    return kept
