# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module moe_topk. Which expert wins a tie, what NaN does and what follows -1e30 are decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import BF16, Array, normal

# __expf is off by 2 + 1.173 |l - max| ulp, |l - max| < 104 where it is not 0: 124 ulp in a weight's own term and as
# much in a sum, 2**-16 together; the sum of 512 terms and three divisions stay far below the rest.
WEIGHT_BOUND = 2.0**-15
# Below FP32's normal numbers.
WEIGHT_FLOOR = 1e-37

SIZES = ((1, 1), (2, 2), (8, 2), (31, 7), (33, 32), (128, 8), (200, 5), (512, 32), (512, 10))

Rows = Callable[[np.random.Generator, int, int], Array]


def distinct(rng: np.random.Generator, rows: int, experts: int) -> Array:
    """Logits that all differ."""
    apart = np.stack([rng.permutation(experts) for _ in range(rows)]) - experts // 2
    return (apart * 2.0**-6).astype(BF16)


def ties(rng: np.random.Generator, rows: int, experts: int) -> Array:
    """Few values, so that each is held by many experts; the last row has one value, the first both zeros alone."""
    logits = rng.integers(-2, 3, (rows, experts)).astype(BF16)
    logits[-1] = BF16.type(0.5)
    logits[0] = np.where(rng.random(experts) < 0.5, 0.0, -0.0).astype(BF16)
    return logits


def holes(rng: np.random.Generator, rows: int, experts: int) -> Array:
    """NaN of either sign among the logits; the last row is NaN but for one -Inf."""
    logits = normal(rng, rows, experts, scale=2.0)
    logits[rng.random((rows, experts)) < 0.3] = np.nan
    logits[0, 0] = -logits[0, 0].dtype.type(np.nan)
    logits[-1] = np.nan
    logits[-1, experts // 2] = -np.inf
    return logits


def low(rng: np.random.Generator, rows: int, experts: int) -> Array:
    """Rows of very negative logits: around -1e30, and -Inf."""
    logits = (-(10.0 ** rng.uniform(29, 38, (rows, experts)))).astype(BF16)
    logits[-1] = -np.inf
    logits[-1, 1::3] = BF16.type(-3e38)
    return logits


def infinite(rng: np.random.Generator, rows: int, experts: int) -> Array:
    """One +Inf a row."""
    logits = normal(rng, rows, experts)
    logits[np.arange(rows), rng.integers(0, experts, rows)] = np.inf
    return logits


def softmax(c: Call) -> Any:
    """The weights [T, k] in FP64."""
    logits = f64(c.gate_logits).reshape(-1, c.num_experts)
    with np.errstate(all="ignore"):
        top = np.fmax.reduce(logits, axis=1, keepdims=True)
        terms = np.exp(logits - top)
        chosen = -np.sort(-logits, axis=1)[:, : c.top_k]
        weights = np.exp(chosen - top) / terms.sum(axis=1, keepdims=True)
        if c.normalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
    return weights


CLOSE = {"expert_indices": bits(), "expert_weights": rounds(softmax, WEIGHT_BOUND, WEIGHT_FLOOR)}


def _arguments(draw: Rows, rows: int, experts: int, k: int, normalize: int) -> Draw:
    def arguments(rng: np.random.Generator) -> Mapping[str, Argument]:
        logits = draw(rng, max(rows, 3), experts)
        logits = logits[rng.integers(len(logits))] if rows == 0 else logits[:rows]
        return {"gate_logits": logits, "num_experts": experts, "top_k": k, "normalize": normalize}

    return arguments


def _cases(rows: int) -> tuple[Case, ...]:
    """`rows` 0 is the kernel of one token."""
    grid = (max(rows, 1), 1, 1)

    def decision(name: str, draw: Rows, subject: str, times: int) -> tuple[Case, ...]:
        return tuple(
            Case(f"{name}, E={e} k={k}, {turn}", _arguments(draw, rows, e, k, 1), CLOSE, grid, "decision", subject)
            for e, k in ((40, 8), (512, 32))
            for turn in range(times)
        )

    times = 1 if rows else 4  # one token at a time, the special rows come by chance
    return (
        *(
            Case(f"E={e} k={k} normalize={n}", _arguments(distinct, rows, e, k, n), CLOSE, grid)
            for e, k in SIZES
            for n in (0, 1)
        ),
        *decision("equal logits", ties, "top-k ties", times),
        *decision("NaN among the logits", holes, "top-k NaN", times),
        *decision("very negative logits", low, "top-k of very negative rows", times),
        Case("an infinite logit", _arguments(infinite, rows, 64, 4, 0), CLOSE, grid),
    )


CASES: Mapping[str, tuple[Case, ...]] = {"moe_topk_softmax": _cases(0), "moe_topk_softmax_batched": _cases(5)}
