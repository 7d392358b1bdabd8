# SPDX-License-Identifier: AGPL-3.0-only
"""What a table of runs cannot say in its rows: whether the difference of two hidden modes is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_py.model.layers.hidden_mode import HiddenMode

if TYPE_CHECKING:
    from .decoding import Run

__all__ = ["note_on_modes"]

_ERRORS = 2.0
"""Standard errors from which on a difference is called one."""


def note_on_modes(runs: Sequence[Run]) -> str | None:
    """A sentence where runs of both modes drafted alike and the best is not one of the reference mode that saw the
    prompt; None otherwise.

    A verify step gives 1 + accepted tokens; steps are taken for independent, so that the mean over n of them has the
    standard error sqrt(variance / n).
    """
    most = max((run.num_drafts for run in runs), default=0)
    drafted = [run for run in runs if run.num_drafts == most and run.mean_accepted_length is not None and most]
    expected = [run for run in drafted if run.hidden_mode == HiddenMode.REFERENCE.value and run.drafter_prefill]
    if not expected or all(run.hidden_mode == HiddenMode.REFERENCE.value for run in drafted):
        return None
    best, reference = max(drafted, key=_length), max(expected, key=_length)
    difference = _length(best) - _length(reference)
    if difference <= 0.0:
        return None
    error = math.hypot(_standard_error(best), _standard_error(reference))
    what = f"{best.hidden_mode}{'' if best.drafter_prefill else '*'} is {difference:.2f} tokens a step above reference"
    if difference < _ERRORS * error:
        return f"{what}, with a standard error of {error:.2f}: this text does not tell them apart"
    return f"{what}, with a standard error of {error:.2f}: on this text the head drafts better so"


def _length(run: Run) -> float:
    return run.mean_accepted_length or 0.0


def _standard_error(run: Run) -> float:
    """Of the mean accepted length; the number of steps that accepted at least j drafts is per_position[j - 1]."""
    mean = sum(run.per_position) / run.verify_steps
    square = sum((2 * j - 1) * count for j, count in enumerate(run.per_position, 1)) / run.verify_steps
    return math.sqrt(max(square - mean * mean, 0.0) / run.verify_steps)
