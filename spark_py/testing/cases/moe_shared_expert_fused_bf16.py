# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module moe_shared_expert_fused_bf16; for one row, and for several in a launch of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw, Table
from ..compare import Bound, bits, f64, rounds
from ..inputs import BF16, Array, normal
from . import gemv
from .moe_silu_mul import SILU_BOUND, SILU_FLOOR
from .moe_weighted_sum_blend import grid_of

Tokens = tuple[int, ...]
"""The axis of rows: () for the kernel of one row, (T,) for that of T."""

SHAPES = ((1, 8, 1, 1), (9, 24, 2, 3), (17, 520, 3, 4), (8, 2056, 2, 5), (3, 4616, 1, 2))
"""Outputs, inputs, experts of a row, and experts in all."""
CANCELLING = ((13, 1040, 3, 2), (6, 2064, 2, 4))


def _experts(rng: np.random.Generator, rows: Tokens, k: int, experts: int) -> Array:
    return rng.integers(0, experts, (*rows, k), dtype=np.uint32)


def _split(weights: Array, parts: int) -> list[Array]:
    return list(weights.reshape(parts, -1, weights.shape[-1]))


def _cancelling(rng: np.random.Generator, rows: Tokens, count: int, size: int) -> tuple[Array, Array]:
    """As `gemv.cancelling`, with a rest so small that the sum is little but roundings; K is even."""
    x, weights = gemv.cancelling(rng, rows, count, size)
    x[..., [size // 2 - 1, size - 1]] = 2.0**-10
    return x, weights


def gate_up(
    rng: np.random.Generator, rows: Tokens, n: int, size: int, k: int, experts: int, cancel: bool = False
) -> dict[str, Argument]:
    """Arguments of a gate and up projection. With `cancel` the sums cancel to what was rounded on the way."""
    count = 2 * (experts + 1)
    if cancel:
        x, weights = _cancelling(rng, rows, count * n, size)
    else:
        spread = 2.0 ** rng.integers(-4, 5, (*rows, size))
        x, weights = (rng.standard_normal((*rows, size)) * spread).astype(BF16), normal(rng, count * n, size)
    each = _split(weights, count)
    return {
        "A": x,
        "gate_weight_ptrs": Table(each[:experts]),
        "up_weight_ptrs": Table(each[experts : 2 * experts]),
        "expert_indices": _experts(rng, rows, k, experts),
        "sh_gate_weight": each[-2],
        "sh_up_weight": each[-1],
        "N": n,
        "K": size,
        "top_k": k,
    }


def down(
    rng: np.random.Generator,
    rows: Tokens,
    n: int,
    size: int,
    k: int,
    experts: int,
    scale: float = 1.5,
    cancel: bool = False,
) -> dict[str, Argument]:
    """Arguments of a down projection. With `cancel` gates are so large that the sigmoid is 1 and activations are exact
    on every machine, and the sums cancel to what was rounded on the way."""
    per_slot, shared = (*rows, k, size), (*rows, size)
    if cancel:
        drawn: dict[str, Argument] = {}
        for shape, gate, up in ((per_slot, "gate_out", "up_out"), (shared, "sh_gate_in", "sh_up_in")):
            rest, weights = _cancelling(rng, shape[:-1], (experts + 1) * n, size)
            wide = rng.uniform(24.0, 200.0, shape).astype(BF16)
            half = size // 2
            wide[..., half : 2 * half] = wide[..., :half]
            drawn |= {gate: wide, up: rest}
    else:
        drawn = {name: normal(rng, *per_slot, scale=scale) for name in ("gate_out", "up_out")}
        drawn |= {name: normal(rng, *shared, scale=scale) for name in ("sh_gate_in", "sh_up_in")}
        weights = normal(rng, (experts + 1) * n, size)
    each = _split(weights, experts + 1)
    return drawn | {
        "weight_ptrs": Table(each[:-1]),
        "expert_indices": _experts(rng, rows, k, experts),
        "sh_down_weight": each[-1],
        "N": n,
        "K": size,
        "top_k": k,
    }


def _routed(c: Call, table: str) -> Array:
    """The weights of each slot in FP64, [..., k, N, K]; zeros where there are none."""
    chosen = [c.behind(table, int(expert)) for expert in c.expert_indices.reshape(-1)]
    stacked = [np.zeros((c.N, c.K)) if weights is None else f64(weights) for weights in chosen]
    return np.stack(stacked).reshape(*c.expert_indices.shape, c.N, c.K)


def _shared(c: Call, name: str) -> Array:
    weights = getattr(c, name)
    return np.zeros((c.N, c.K)) if weights is None else f64(weights)


def _dot(weights: Array, x: Array) -> Array:
    result: Array = (weights @ x[..., None])[..., 0]
    return result


def _projection(weights: Callable[[Call], Array], slots: bool) -> Bound:
    def x(c: Call) -> Array:
        return f64(c.A)[..., None, :] if slots else f64(c.A)

    def lost(c: Call) -> Any:
        return (c.K / 16 + 16) * 2.0**-24 * _dot(np.abs(weights(c)), np.abs(x(c)))

    return rounds(lambda c: _dot(weights(c), x(c)), slack=lost)


def _unlimited(c: Call, gate: Array, up: Array) -> Array:
    g = f64(gate)
    result: Array = g / (1.0 + np.exp(-g)) * f64(up)
    return result


def _down_bound(weights: Callable[[Call], Array], gate: str, up: str, of: Callable[[Call, Array, Array], Any]) -> Bound:
    def activation(c: Call) -> Array:
        result: Array = of(c, getattr(c, gate), getattr(c, up))
        return result

    def lost(c: Call) -> Any:
        sizes = np.abs(weights(c))
        relative = SILU_BOUND + (c.K / 16 + 17) * 2.0**-24
        return relative * _dot(sizes, np.abs(activation(c))) + SILU_FLOOR * _dot(sizes, np.abs(f64(getattr(c, up))))

    return rounds(lambda c: _dot(weights(c), activation(c)), slack=lost)


GATE_UP: Mapping[str, Bound] = {
    "gate_out": _projection(lambda c: _routed(c, "gate_weight_ptrs"), True),
    "up_out": _projection(lambda c: _routed(c, "up_weight_ptrs"), True),
    "sh_gate_out": _projection(lambda c: _shared(c, "sh_gate_weight"), False),
    "sh_up_out": _projection(lambda c: _shared(c, "sh_up_weight"), False),
}


def down_bounds(activation: Callable[[Call, Array, Array], Any] = _unlimited) -> Mapping[str, Bound]:
    """Of a down projection behind `activation`(call, gate, up), which is in FP64."""
    return {
        "C": _down_bound(lambda c: _routed(c, "weight_ptrs"), "gate_out", "up_out", activation),
        "sh_down_out": _down_bound(lambda c: _shared(c, "sh_down_weight"), "sh_gate_in", "sh_up_in", activation),
    }


DOWN = down_bounds()


def elsewhere(draw: Draw, *shared: str) -> Draw:
    """Every other expert, and the shared expert, live elsewhere."""

    def arguments(rng: np.random.Generator) -> Mapping[str, Argument]:
        drawn = dict(draw(rng))
        for name, value in drawn.items():
            if isinstance(value, Table):
                drawn[name] = Table([None if at % 2 else entry for at, entry in enumerate(value.entries)])
            if name in shared:
                drawn[name] = None
        return drawn

    return arguments


def _ordered(draws: Callable[..., dict[str, Argument]], rows: Tokens, bounds: Mapping[str, Bound]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"sums that cancel, N={shape[0]} K={shape[1]} k={shape[2]}",
            lambda rng, shape=shape: draws(rng, rows, *shape, cancel=True),  # type: ignore[misc]
            dict.fromkeys(bounds, bits()),
            grid_of(rows),
            tag="decision",
            subject=gemv.ORDER,
        )
        for shape in CANCELLING
    )


def gate_up_cases(rows: Tokens) -> tuple[Case, ...]:
    """For `rows` () the kernel of one row, for (T,) that of T rows, whose grid has them in y."""
    grid = grid_of(rows)
    some = elsewhere(lambda rng: gate_up(rng, rows, 11, 264, 6, 4), "sh_gate_weight", "sh_up_weight")
    return (
        *(
            Case(
                "N={} K={} k={} E={}".format(*shape),
                lambda rng, shape=shape: gate_up(rng, rows, *shape),  # type: ignore[misc]
                GATE_UP,
                grid,
            )
            for shape in SHAPES
        ),
        Case("experts that live elsewhere", some, GATE_UP, grid, tag="abi", shift=16),
        *_ordered(gate_up, rows, GATE_UP),
    )


def down_cases(rows: Tokens) -> tuple[Case, ...]:
    """As `gate_up_cases`, of the down projection."""
    grid = grid_of(rows)
    some = elsewhere(lambda rng: down(rng, rows, 11, 264, 6, 4), "sh_down_weight")
    return (
        *(
            Case(
                "N={} K={} k={} E={}".format(*shape),
                lambda rng, shape=shape: down(rng, rows, *shape),  # type: ignore[misc]
                DOWN,
                grid,
            )
            for shape in SHAPES
        ),
        Case("experts that live elsewhere", some, DOWN, grid, tag="abi", shift=8),
        Case(
            "values beyond 10",
            lambda rng: down(rng, rows, 24, 264, 2, 3, scale=12.0),
            DOWN,
            grid,
            tag="decision",
            subject="SwiGLU clamp",
        ),
        *_ordered(down, rows, DOWN),
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_expert_gate_up_shared_bf16": gate_up_cases(()),
    "moe_expert_silu_down_shared_bf16": down_cases(()),
}
