# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of modules moe_topk_sqrt and moe_hash_route. Ties, NaN, large logits and ids that are none are decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import BF16, F32, U32, Array, normal

# expf within 2 ulp, log1pf within 1, a sum, a root, 5 additions, a division and a product.
WEIGHT_BOUND = 2.0**-20
# Scores of logits below -87 come from subnormal exponentials.
WEIGHT_FLOOR = 2e-22

SIZES = ((1, 1), (2, 2), (8, 2), (31, 7), (33, 32), (128, 8), (256, 6), (512, 32))

Logits = tuple[Array, Array]
Rows = Callable[[np.random.Generator, int, int], Logits]


def score(logits: Array) -> Array:
    """sqrt(softplus(l)) in FP64."""
    with np.errstate(all="ignore"):
        result: Array = np.sqrt(np.logaddexp(0.0, f64(logits)))
    return result


def apart(rng: np.random.Generator, rows: int, experts: int) -> Logits:
    """(logits [T, E], bias [E]): sums that lie apart, in an order that scores alone do not have. The bias is what takes
    one token's scores to a grid, so the other tokens get the same logits in other columns of the same bias."""
    steps = rng.permutation(experts) * 2.0**-4
    logits = (normal(rng, experts, scale=4.0)).astype(BF16)
    return np.broadcast_to(logits, (rows, experts)).copy(), (steps - score(logits)).astype(F32)


def rising(rng: np.random.Generator, rows: int, experts: int) -> Logits:
    """Logits that differ by much, with a bias that no rounding turns into a tie."""
    grid = np.stack([rng.permutation(experts) for _ in range(rows)])
    return (grid * 0.5 + 1.0).astype(BF16), np.full(experts, 0.25, F32)


def ties(rng: np.random.Generator, rows: int, experts: int) -> Logits:
    """Few values and one bias, so that each sum is held by many experts; the last row has one value."""
    logits = rng.integers(-2, 3, (rows, experts)).astype(BF16)
    logits[-1] = BF16.type(0.5)
    return logits, np.full(experts, -0.75, F32)


def holes(rng: np.random.Generator, rows: int, experts: int) -> Logits:
    """NaN of either sign among logits and biases; the last row is NaN but for one number."""
    logits, bias = rising(rng, rows, experts)
    logits[rng.random((rows, experts)) < 0.3] = np.nan
    logits[0, 0] = -logits[0, 0].dtype.type(np.nan)
    logits[-1] = np.nan
    logits[-1, experts // 2] = -np.inf
    bias[rng.integers(experts)] = np.nan
    bias[experts // 2] = -np.inf
    return logits, bias


def large(rng: np.random.Generator, rows: int, experts: int) -> Logits:
    """Logits where exp overflows (beyond 88), up to 1e30."""
    logits = (
        10.0 ** (2.0 + 28.0 * (1 + rng.permuted(np.tile(np.arange(experts), (rows, 1)), axis=1)) / experts)
    ).astype(BF16)
    return logits, np.zeros(experts, F32)


def small(rng: np.random.Generator, rows: int, experts: int) -> Logits:
    """Logits around -20 to -60: log(1 + exp(l)) rounds to 0, the score does not. The bias decides."""
    logits = rng.uniform(-60, -20, (rows, experts)).astype(BF16)
    return logits, (rng.permutation(experts) - experts / 2).astype(F32)


def weights(logits: Array, chosen: Array, normalize: bool, scaling: float) -> Array:
    """FP64 weights of the experts `chosen` [T, k]."""
    scores = np.take_along_axis(score(logits), chosen.astype(np.intp), axis=1)
    with np.errstate(all="ignore"):
        if normalize:
            total = scores.sum(axis=1, keepdims=True)
            scores = np.where(total <= 1e-20, scores, scores / total)
        result: Array = scores * scaling
    return result


def _weights(c: Call) -> Any:
    logits = c.gate_logits.reshape(-1, c.num_experts)
    with np.errstate(all="ignore"):
        sums = score(logits).astype(F32) + c.bias
    chosen = np.argsort(-sums, axis=1, kind="stable")[:, : c.top_k]
    return weights(logits, chosen, bool(c.normalize), c.scaling_factor)


_CLOSE = {"expert_indices": bits(), "expert_weights": rounds(_weights, WEIGHT_BOUND, WEIGHT_FLOOR)}


def _arguments(draw: Rows, rows: int, experts: int, k: int, normalize: int) -> Draw:
    def arguments(rng: np.random.Generator) -> Mapping[str, Argument]:
        logits, bias = draw(rng, max(rows, 3), experts)
        logits = logits[rng.integers(len(logits))] if rows == 0 else logits[:rows]
        scalars: dict[str, Argument] = {"num_experts": experts, "top_k": k, "normalize": normalize}
        return {"gate_logits": logits, "bias": bias, "scaling_factor": 1.5, **scalars}

    return arguments


def _cases(rows: int) -> tuple[Case, ...]:
    """`rows` 0 is the kernel of one token."""
    grid = (max(rows, 1), 1, 1)

    def decision(name: str, draw: Rows, subject: str) -> tuple[Case, ...]:
        return tuple(
            Case(f"{name}, E={e} k={k}, {turn}", _arguments(draw, rows, e, k, 1), _CLOSE, grid, "decision", subject)
            for e, k in ((40, 8), (512, 32))
            for turn in range(1 if rows else 4)  # one token at a time, the special rows come by chance
        )

    return (
        *(
            Case(f"{draw.__name__}, E={e} k={k} normalize={n}", _arguments(draw, rows, e, k, n), _CLOSE, grid)
            for e, k in SIZES
            for n in (0, 1)
            for draw in (apart, rising)
        ),
        *decision("equal sums", ties, "top-k ties"),
        *decision("NaN among logits and biases", holes, "top-k NaN"),
        *decision("large logits", large, "softplus of large logits"),
        *decision("small logits", small, "softplus of small logits"),
    )


def hash_row(rng: np.random.Generator, vocabulary: int, experts: int, k: int) -> Array:
    """A table i64 [V, k] of distinct experts a token."""
    return np.stack([rng.permutation(experts)[:k] for _ in range(vocabulary)]).astype(np.int64)


def _entries(c: Call) -> tuple[Array, Array]:
    known = (c.tid2eid >= 0) & (c.tid2eid < c.num_experts)
    return np.where(known, c.tid2eid, 0), known


def hash_weights(c: Call) -> Any:
    """FP64 weights of a token's row; NaN where an entry is no expert."""
    chosen, known = _entries(c)
    scores = np.where(known, score(c.gate_logits)[chosen], np.nan)
    if c.normalize:
        scores = scores / scores.sum()
    return scores * np.float32(c.scaling_factor)


_ROUTED = {"expert_indices": bits(), "expert_weights": rounds(hash_weights, WEIGHT_BOUND, WEIGHT_FLOOR)}
VOCABULARY = 97


def _hash(experts: int, k: int, token: int, normalize: int, scale: float = 4.0, wrong: int | None = None) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        table = hash_row(rng, VOCABULARY, experts, k)
        if wrong is not None:
            table[token, rng.integers(k)] = wrong
        return {
            "gate_logits": normal(rng, experts, scale=scale),
            "tid2eid": table,
            "token_id_ptr": np.array([token], U32),
            "num_experts": experts,
            "top_k": k,
            "normalize": normalize,
            "scaling_factor": 1.5,
        }

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_topk_sqrtsoftplus": _cases(0),
    "moe_topk_sqrtsoftplus_batched": _cases(5),
}

HASH_CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_hash_route": (
        *(
            Case(f"E={e} k={k} id={token} normalize={n}", _hash(e, k, token, n), _ROUTED)
            for e, k in ((1, 1), (8, 2), (33, 32), (256, 6), (700, 7))
            for token in (0, 41, VOCABULARY - 1)
            for n in (0, 1)
        ),
        *(
            Case(f"logits x{scale:g}, E=64", _hash(64, 6, 5, 1, scale), _ROUTED, (1, 1, 1), "decision", "large logits")
            for scale in (300.0, 1e4)
        ),
        *(
            Case(
                f"entry {wrong}, normalize={n}",
                _hash(64, 6, 5, n, wrong=wrong),
                _ROUTED,
                (1, 1, 1),
                "decision",
                "experts out of range",
            )
            for wrong in (64, -1, 2**32 + 3, -(2**63))
            for n in (0, 1)
        ),
    )
}
