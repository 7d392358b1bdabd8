# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_topk_sigmoid. Ties, NaN and logits where exp overflows are decisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import BF16, F32, Array

# expf within 2 ulp, an addition and a division, twice; a sum of 32, a division and a product.
WEIGHT_BOUND = 2.0**-20
# Scores below it are subnormal in FP32, or come from an exp that overflows.
WEIGHT_FLOOR = 1e-37
# Biased scores and groups' sums that should not tie are apart by more than FP32 can confuse.
APART = 1e-5

SIZES = (
    (1, 1, 1, 1), (2, 2, 1, 1), (8, 2, 1, 1), (33, 32, 1, 1), (200, 5, 1, 1), (512, 32, 1, 1),
    (256, 8, 8, 4), (64, 6, 4, 2), (16, 4, 8, 2), (60, 7, 3, 2), (30, 4, 2, 1), (512, 32, 32, 16), (40, 8, 2, 2),
    (128, 8, 2, 1), (512, 8, 4, 2),
)  # fmt: skip
"""(experts, top_k, n_group, topk_group)."""

Logits = tuple[Array, "Array | None"]
Rows = Callable[[np.random.Generator, int, int, int], Logits]


def score(logits: Array) -> Array:
    """sigmoid(l) in FP64."""
    with np.errstate(all="ignore"):
        result: Array = 1.0 / (1.0 + np.exp(-f64(logits)))
    return result


def _ranks(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), -values[i], i))


def _worth(run: list[float]) -> float:
    first, second = (run[i] for i in _ranks(run)[:2])
    return float(F32.type(F32.type(first) + F32.type(second)))


def choose(logits: Array, bias: Array | None, k: int, n_group: int, topk_group: int) -> list[int]:
    """The experts of one token, chosen one by one: logits [E], bias [E]."""
    with np.errstate(all="ignore"):
        sums = (score(logits).astype(F32) + (F32.type(0) if bias is None else bias)).tolist()
        size = len(sums) // n_group
        groups = range(n_group)
        if n_group > 1:
            worth = [_worth(sums[g * size : (g + 1) * size]) for g in groups]
            groups = _ranks(worth)[:topk_group]  # type: ignore[assignment]
    return [e for e in _ranks(sums) if e // size in groups][:k]


def clear(logits: Array, bias: Array | None, n_group: int) -> bool:
    """Whether no two sums of groups are nearly the same, in any row."""
    if n_group == 1:
        return True
    sums = score(logits) + (0.0 if bias is None else f64(bias))
    best = np.sort(np.nan_to_num(sums, nan=-np.inf).reshape(len(logits), n_group, -1), axis=2)[:, :, -2:].sum(axis=2)
    with np.errstate(invalid="ignore"):
        gaps = np.diff(np.sort(best, axis=1), axis=1)
    return bool((~np.isfinite(gaps) | (gaps > APART)).all())


def _clear(draw: Rows) -> Rows:
    """`draw`, again and again until it is clear."""

    def drawn(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
        logits, bias = draw(rng, rows, experts, n_group)
        for row in range(rows):
            while not clear(logits[row : row + 1], bias, n_group):
                logits[row] = draw(rng, 1, experts, n_group)[0][0]
        return logits, bias

    drawn.__name__ = draw.__name__
    return drawn


def _grid(rng: np.random.Generator, rows: int, experts: int) -> Array:
    order = np.stack([rng.permutation(experts) for _ in range(rows)]) - experts // 2
    return (order * 2.0**-7).astype(BF16)


@_clear
def unbiased(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """Logits that all differ, without a bias."""
    return _grid(rng, rows, experts), None


@_clear
def rising(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """Logits that all differ, under one bias."""
    return _grid(rng, rows, experts), np.full(experts, -0.75, F32)


@_clear
def paired(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """As unbiased; where groups have more than 32 experts, one has the two best, 32 apart, and else the worst: without
    the second of the two it is the last of the groups."""
    logits, size = _grid(rng, rows, experts), experts // n_group
    if n_group == 1 or size <= 32:
        return logits, None
    for row in logits:
        order = np.sort(row)
        group = int(rng.integers(n_group)) * size
        at = group + int(rng.integers(size - 32))
        own = np.setdiff1d(np.arange(group, group + size), [at, at + 32])
        others = np.setdiff1d(np.arange(experts), np.arange(group, group + size))
        row[[at, at + 32]] = order[[-1, -2]]
        row[own] = rng.permutation(order[: size - 2])
        row[others] = rng.permutation(order[size - 2 : -2])
    return logits, None


def apart(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """Sums that lie apart, in an order that scores alone do not have. All tokens have the same logits."""
    while True:
        logits = (rng.standard_normal(experts) * 2.0).astype(BF16)
        bias = ((rng.permutation(experts) - experts / 3) * 2.0**-4 - score(logits)).astype(F32)
        if clear(logits[None], bias, n_group):
            return np.broadcast_to(logits, (rows, experts)).copy(), bias


def ties(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """Few values and one bias, so that many experts, and groups, have the same sum; the last row has one value."""
    logits = rng.integers(0, 3, (rows, experts)).astype(BF16)
    logits[-1] = BF16.type(0.5)
    return logits, np.full(experts, -0.25, F32)


def holes(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """NaN of either sign among logits and biases; the last row is NaN but for one number."""
    logits, bias = rising(rng, rows, experts, n_group)
    assert bias is not None
    bias[rng.integers(experts)] = np.nan
    bias[experts // 2] = -np.inf
    for row in range(rows - 1):
        while True:
            holed = _grid(rng, 1, experts)
            holed[rng.random((1, experts)) < 0.3] = np.nan
            if clear(holed, bias, n_group):
                break
        logits[row] = holed[0]
    logits[0, 0] = -logits[0, 0].dtype.type(np.nan)
    logits[-1] = np.nan
    logits[-1, experts // 2] = 1.0
    return logits, bias


def extreme(rng: np.random.Generator, rows: int, experts: int, n_group: int) -> Logits:
    """Scores of 0, a half and 1 from logits where exp overflows or vanishes."""
    return rng.choice([-np.inf, -3e38, -200.0, 0.0, 100.0, 3e38, np.inf], (rows, experts)).astype(BF16), None


def weights(logits: Array, chosen: Array, normalize: bool, scaling: float) -> Array:
    """FP64 weights of the experts `chosen` [T, k]."""
    scores = np.take_along_axis(score(logits), chosen.astype(np.intp), axis=1)
    if normalize:
        scores = scores / (scores.sum(axis=1, keepdims=True) + 1e-20)
    result: Array = scores * scaling
    return result


def _weights(c: Call) -> Any:
    logits = c.gate_logits.reshape(-1, c.num_experts)
    chosen = np.array([choose(row, c.correction_bias, c.top_k, c.n_group, c.topk_group) for row in logits])
    return weights(logits, chosen, bool(c.normalize), c.scaling_factor)


_CLOSE = {"expert_indices": bits(), "expert_weights": rounds(_weights, WEIGHT_BOUND, WEIGHT_FLOOR)}


def _arguments(draw: Rows, rows: int, size: tuple[int, int, int, int], normalize: int) -> Draw:
    experts, k, n_group, topk_group = size

    def arguments(rng: np.random.Generator) -> Mapping[str, Argument]:
        logits, bias = draw(rng, max(rows, 3), experts, n_group)
        logits = logits[rng.integers(len(logits))] if rows == 0 else logits[:rows]
        scalars = {"num_experts": experts, "top_k": k, "n_group": n_group, "topk_group": topk_group}
        return {
            "gate_logits": logits, "correction_bias": bias, "scaling_factor": 2.5, "normalize": normalize, **scalars
        }  # fmt: skip

    return arguments


def _cases(rows: int) -> tuple[Case, ...]:
    """`rows` 0 is the kernel of one token."""
    grid = (max(rows, 1), 1, 1)

    def decision(name: str, draw: Rows, subject: str) -> tuple[Case, ...]:
        return tuple(
            Case(f"{name}, {size}, {turn}", _arguments(draw, rows, size, 1), _CLOSE, grid, "decision", subject)
            for size in ((40, 8, 1, 1), (512, 32, 1, 1), (256, 8, 8, 4), (60, 7, 3, 2))
            for turn in range(1 if rows else 4)  # one token at a time, the special rows come by chance
        )

    return (
        *(
            Case(f"{draw.__name__}, {size} normalize={n}", _arguments(draw, rows, size, n), _CLOSE, grid)
            for size in SIZES
            for n in (0, 1)
            for draw in (unbiased, rising, paired, apart)
        ),
        *decision("equal sums", ties, "top-k ties"),
        *decision("NaN among logits and biases", holes, "top-k NaN"),
        *decision("extreme logits", extreme, "sigmoid of extreme logits"),
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_topk_sigmoid": _cases(0),
    "spark_moe_topk_sigmoid_batched": _cases(5),
}
