# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module argmax. Which index wins a tie, what NaN does and what counts as no winner are decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import BF16, Array, normal

TIES = [(0, 5), (31, 32), (1, 2), (5, 1027), (1023, 1024), (7, 8), (1031, 2047)]
PADDING = 3.0e38
# __expf within (2 + 1.173 |v - max|) ulp for the terms that count (|v - max| < 20), logf and the sum within 8 ulp of
# a result below 16.
LOGPROB_BOUND = 2e-5

Rows = Callable[[np.random.Generator], Array]


def _distinct(n: int, count: int = 4) -> Rows:
    """Rows with one maximum, anywhere: the first, the last and random columns."""

    def draw(rng: np.random.Generator) -> Array:
        rows = normal(rng, count, n, scale=2.0)
        places = [0, n - 1, *rng.integers(0, n, count)][:count]
        rows[np.arange(count), places] = 100.0
        return rows

    return draw


def _flat(n: int) -> Rows:
    """Rows without a planted maximum that stands out; the winner is unique all the same."""

    def draw(rng: np.random.Generator) -> Array:
        rows = normal(rng, 3, n, scale=0.5)
        best = rng.integers(0, n, 3)
        rows[np.arange(3), best] = f64(rows).max(axis=1).astype(BF16) + BF16.type(0.25)
        return rows

    return draw


def _ties(rng: np.random.Generator) -> Array:
    rows = normal(rng, len(TIES) + 2, 2051)
    for row, pair in zip(rows, TIES, strict=False):
        row[list(pair)] = 50.0
    rows[-2:] = rng.integers(-3, 4, (2, 2051)).astype(BF16)
    return rows


def _holes(rng: np.random.Generator) -> Array:
    """NaN in a third of the places, at the first, and just before the maximum wherever chunks of 8 begin."""
    rows = normal(rng, 10, 2051, scale=2.0)
    rows[0][rng.random(2051) < 0.3] = np.nan
    rows[0, 0], rows[0, 1025] = np.nan, 90.0
    for at in range(1, 10):
        rows[at, at - 1], rows[at, at] = np.nan, 60.0
    return rows


def _hopeless(rng: np.random.Generator) -> Array:
    """Rows of very negative numbers, of -Inf and of NaN, alone and mixed."""
    rows = np.full((5, 2051), -np.inf).astype(BF16)
    rows[0] = np.nan
    rows[1] = (-(10.0 ** rng.uniform(31, 38, 2051))).astype(BF16)
    rows[1, 77] = -2e30
    rows[2] = np.nan
    rows[2, [1300, 700]] = -np.inf
    rows[3, :5] = np.nan
    return rows


def _undefined(rng: np.random.Generator) -> Array:
    rows = normal(rng, 4, 1200)
    rows[0, 1199] = np.nan
    rows[1, [2, 900]] = np.inf
    rows[2, 600] = np.inf
    rows[3] = -np.inf
    return rows


def _single(rows: Rows) -> Draw:
    """One of the rows, for the kernel that takes one."""

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        row = rows(rng)[0]
        return {"logits": row, "n": row.size}

    return draw


def _batch(rows: Rows, gap: int) -> Draw:
    """All rows, `gap` huge values between them."""

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        content = rows(rng)
        count, n = content.shape
        apart = np.full((count, n + gap), PADDING).astype(BF16)
        apart[:, :n] = content
        return {"logits": apart.reshape(-1)[: (count - 1) * (n + gap) + n], "n": n, "row_stride": n + gap}

    return draw


def _logprob(c: Call) -> Any:
    step = c.logits.itemsize
    rows = f64(np.lib.stride_tricks.as_strided(c.logits, (c.grid[0], c.n), (c.row_stride * step, step)))
    top = rows.max(axis=1, keepdims=True)
    result = -np.log(np.exp(rows - top).sum(axis=1))
    infinite = np.isinf(top[:, 0])
    certain = (top[:, 0] > 0) & ((rows == top).sum(axis=1) == 1)
    return np.where(infinite, np.where(certain, 0.0, np.nan), result)


_CLOSE = rounds(_logprob, slack=LOGPROB_BOUND)
_SIZES = [1, 2, 31, 1024, 1027, 8193]


def _batches(bounds: Mapping[str, Bound]) -> tuple[Case, ...]:
    def decision(name: str, rows: Rows, count: int, subject: str) -> Case:
        return Case(name, _batch(rows, 3), bounds, (count, 1, 1), "decision", subject)

    return (
        *(Case(f"n={n}", _batch(_distinct(n), 0), bounds, (4, 1, 1)) for n in _SIZES),
        *(Case(f"n={n}, no planted maximum", _batch(_flat(n), 0), bounds, (3, 1, 1)) for n in (33, 2051)),
        Case("rows apart", _batch(_distinct(1027), 37), bounds, (4, 1, 1), "abi"),
        decision("equal maxima", _ties, len(TIES) + 2, "argmax ties"),
        decision("NaN among the logits", _holes, 10, "argmax NaN"),
        decision("no finite winner", _hopeless, 5, "argmax of very negative rows"),
    )


def _alone(at: int) -> Rows:
    def draw(rng: np.random.Generator) -> Array:
        row = np.full((1, 11), np.nan).astype(BF16)
        row[0, at] = -np.inf
        return row

    return draw


def _nth(rows: Rows, at: int) -> Rows:
    return lambda rng: rows(rng)[at : at + 1]


CASES: Mapping[str, tuple[Case, ...]] = {
    "argmax_bf16": (
        *(Case(f"n={n}, place {at}", _single(_nth(_distinct(n), at))) for n in _SIZES for at in range(3)),
        *(
            Case(f"equal maxima at {pair}", _single(_nth(_ties, at)), tag="decision", subject="argmax ties")
            for at, pair in enumerate(TIES)
        ),
        Case("few values", _single(_nth(_ties, len(TIES))), tag="decision", subject="argmax ties"),
        *(
            Case(f"NaN, row {at}", _single(_nth(_holes, at)), tag="decision", subject="argmax NaN", shift=2 * (at % 8))
            for at in range(10)
        ),
        *(
            Case(
                f"no finite winner, row {at}",
                _single(_nth(_hopeless, at)),
                tag="decision",
                shift=6,
                subject="argmax of very negative rows",
            )
            for at in range(5)
        ),
        *(
            Case(
                f"-Inf alone at {at} among NaN",
                _single(_alone(at)),
                tag="decision",
                shift=6,
                subject="argmax of very negative rows",
            )
            for at in (2, 10)
        ),
    ),
    "argmax_bf16_batch": _batches({"out": bits()}),
    "argmax_bf16_batch_lp": (
        *_batches({"out": bits(), "out_logprob": _CLOSE}),
        Case(
            "NaN and infinities",
            _batch(_undefined, 0),
            {"out_logprob": _CLOSE},
            (4, 1, 1),
            "decision",
            "log-probability of NaN and infinities",
        ),
    ),
}
