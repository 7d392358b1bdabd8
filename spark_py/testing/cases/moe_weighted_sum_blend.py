# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of moe_expert_gemv::moe_weighted_sum_blend; for one token, and for several in a launch of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call, Dim3
from ..case import Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import F32, Array, normal
from .gemv import ORDER
from .residual_add import SIGMOID_FLOOR

# __expf is off by 2 + 1.173 |z| ulp, |z| < 89 where it does not overflow; an addition and a division follow.
GATE_BOUND = 2.0**-16

SHAPES = ((1, 1, 8), (2, 4, 16), (255, 3, 264), (257, 8, 2048), (700, 10, 2056), (256, 32, 4112))
"""Elements, experts, and the length of the gate."""


def inputs(rng: np.random.Generator, rows: tuple[int, ...], hidden: int, k: int, size: int) -> dict[str, Array]:
    """Random rows, weights that add up to 1, and gates around 0."""
    weights = rng.random((*rows, k))
    return {
        "expert_out": normal(rng, *rows, k, hidden, scale=3.0),
        "expert_weights": (weights / weights.sum(axis=-1, keepdims=True)).astype(F32),
        "shared_out": normal(rng, *rows, hidden, scale=3.0),
        "input": normal(rng, *rows, size),
        "gate_weight": normal(rng, size, scale=2.0 * size**-0.5),
    }


def cancelling(rng: np.random.Generator, rows: tuple[int, ...], hidden: int, k: int) -> dict[str, Array]:
    """Experts that cancel in pairs (k is even), so that the rounding of every step stays in the sum."""
    drawn = inputs(rng, rows, hidden, k, 8)
    half, order = k // 2, rng.permutation(k // 2)
    for name, sign in (("expert_out", -1), ("expert_weights", 1)):
        axis = -2 if name == "expert_out" else -1
        first = np.take(drawn[name], np.arange(half), axis)
        second = np.take(first, order, axis) * first.dtype.type(sign)
        drawn[name] = np.concatenate([first, second], axis)
    drawn["shared_out"] = normal(rng, *rows, hidden, scale=2.0**-22)
    return drawn


def exact(experts: Array, weights: Array, shared: Array, x: Array, gate_weight: Array | None) -> tuple[Array, Array]:
    """The sum [..., H] in FP64, and what FP32 in any order may lose of it."""
    terms = f64(weights)[..., None] * f64(experts)
    gate, lost = np.ones((*shared.shape[:-1], 1)), np.zeros((*shared.shape[:-1], 1))
    if gate_weight is not None:
        gate = 1.0 / (1.0 + np.exp(-(f64(x) @ f64(gate_weight))[..., None]))
        summed = (np.abs(f64(x)) @ np.abs(f64(gate_weight)))[..., None]
        lost = GATE_BOUND + (x.shape[-1] / 16 + 16) * 2.0**-24 * summed
    part = gate * f64(shared)
    size = np.abs(terms).sum(axis=-2) + np.abs(part)
    slack: Array = (weights.shape[-1] + 2) * 2.0**-24 * size + lost * np.abs(part) + SIGMOID_FLOOR * np.abs(f64(shared))
    return terms.sum(axis=-2) + part, slack


def _exact(c: Call, which: int) -> Any:
    return exact(c.expert_out, c.expert_weights, c.shared_out, c.input, c.gate_weight)[which]


CLOSE = rounds(lambda c: _exact(c, 0), slack=lambda c: _exact(c, 1))


def _random(rows: tuple[int, ...], hidden: int, k: int, size: int, gated: bool) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        drawn: dict[str, Argument] = {**inputs(rng, rows, hidden, k, size)}
        if not gated:
            drawn["gate_weight"] = None
        return {**drawn, "hidden": hidden, "top_k": k, "K": size}

    return draw


def _ordered(rows: tuple[int, ...], hidden: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        drawn: dict[str, Argument] = {**cancelling(rng, rows, hidden, k), "gate_weight": None}
        return {**drawn, "hidden": hidden, "top_k": k, "K": 8}

    return draw


def grid_of(rows: tuple[int, ...]) -> Dim3:
    """The row counts of a launch: none, or T in y."""
    return (1, rows[0] if rows else 1, 1)


def blend_cases(rows: tuple[int, ...]) -> tuple[Case, ...]:
    """For `rows` () the kernel of one token, for (T,) that of T tokens, whose grid has them in y."""
    grid = grid_of(rows)
    close: Mapping[str, Bound] = {"output": CLOSE}
    return (
        *(Case(f"H={h} k={k} K={n}", _random(rows, h, k, n, True), close, grid) for h, k, n in SHAPES),
        Case("no gate", _random(rows, 300, 6, 64, False), close, grid, tag="abi"),
        *(
            Case(
                f"sums that cancel, H={h} k={k}",
                _ordered(rows, h, k),
                {"output": bits()},
                grid,
                tag="decision",
                subject=ORDER,
            )
            for h, k in ((300, 8), (65, 32))
        ),
    )


CASES: Mapping[str, tuple[Case, ...]] = {"moe_weighted_sum_blend": blend_cases(())}
