# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_step_bf16: routing with ties and holes, experts that are elsewhere, sums that cancel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw, Table
from ..compare import bits, f64, rounds
from ..inputs import BF16, F32, Array, normal
from . import gemv
from ._moe_step import activation, output
from .moe_shared_expert_fused_bf16 import elsewhere
from .moe_topk import ties

SHAPES = ((1, 1, 8, 1, 1), (3, 9, 264, 3, 5), (2, 17, 2056, 2, 33), (1, 5, 4112, 4, 8), (5, 2, 16, 9, 300))
"""Rows, width of an expert, width of the model, experts of a row, and experts in all, of a gate and up projection."""
DOWN_SHAPES = ((1, 1, 8, 1, 1), (3, 24, 264, 3, 5), (2, 40, 1032, 2, 33), (1, 17, 512, 10, 12), (1, 1032, 8, 2, 3))
"""The same of a down projection, the model's width before the expert's; with a gate where that is whole chunks."""


def gate_up(
    rng: np.random.Generator, rows: int, n: int, size: int, k: int, experts: int, cancel: bool = False
) -> dict[str, Argument]:
    """Arguments of a gate and up projection. With `cancel`, for one row, gates are so large that silu(g) is g on every
    machine, and the sums of the others cancel to what was rounded on the way."""
    count = 2 * experts + 2
    if cancel:
        x, ups = gemv.cancelling(rng, (rows,), count * n, size)
        weights = list(ups.reshape(count, n, size))
        for gate in [*range(experts), count - 2]:
            spread = rng.uniform(16.0, 64.0, (n, size))
            weights[gate] = (np.sign(f64(x[0])) * spread / np.abs(f64(x[0])).sum() * 4.0).astype(BF16)
    else:
        x, weights = normal(rng, rows, size), [normal(rng, n, size, scale=2.0 * size**-0.5) for _ in range(count)]
    return {
        "A": x,
        "gate_logits": ties(rng, rows, experts) if experts >= 33 else normal(rng, rows, experts, scale=2.0),
        "gate_weight_ptrs": Table(weights[:experts]),
        "up_weight_ptrs": Table(weights[experts : 2 * experts]),
        "sh_gate_weight": weights[-2],
        "sh_up_weight": weights[-1],
        "N": n,
        "K": size,
        "num_experts": experts,
        "top_k": k,
    }


def down(
    rng: np.random.Generator, rows: int, n: int, size: int, k: int, experts: int, cancel: bool = False
) -> dict[str, Argument]:
    """Arguments of a down projection. With `cancel` its sums cancel to what was rounded on the way, logits are
    equal and there is no gate: no exponential is left but that of 0."""
    weights = normal(rng, (experts + 1) * n, size, scale=size**-0.5)
    acts = (rng.standard_normal((rows, k + 1, size)) * 2.0 ** rng.integers(-6, 7, (rows, k + 1, size))).astype(F32)
    if cancel:
        half = size // 2
        order = rng.permutation(half)
        weights[:, half:] = -weights[:, order]
        acts[..., half:] = acts[..., order]
        acts[..., [half - 1, size - 1]] *= F32.type(1.0 + 2.0**-20)
    logits = np.zeros((rows, experts), BF16) if cancel else normal(rng, rows, experts, scale=2.0)
    order = np.argsort(-f64(logits), axis=1, kind="stable")[:, :k]
    each = list(weights.reshape(experts + 1, n, size))
    return {
        "activation": acts,
        "weight_ptrs": Table(each[:-1]),
        "gate_logits": logits,
        "expert_indices": order.astype(np.uint32),
        "sh_down_weight": each[-1],
        "input": normal(rng, rows, n),
        "gate_weight": None if cancel or n % 8 else normal(rng, n, scale=2.0 * n**-0.5),
        "N": n,
        "K": size,
        "num_experts": experts,
        "top_k": k,
        "normalize": k % 2,
    }


def _slots(c: Call, table: str, shared: str, indices: Array) -> Array:
    """The weights of each row's slots in FP64, [T, k + 1, N, K]; zeros where there are none."""
    empty, last = np.zeros((c.N, c.K)), getattr(c, shared)

    def of(weights: Array | None) -> Array:
        return empty if weights is None else f64(weights)

    return np.stack([np.stack([*(of(c.behind(table, int(e))) for e in row), of(last)]) for row in indices])


def _activation(c: Call) -> tuple[Array, Array]:
    """g and u are rounded to BF16."""
    return activation(
        c,
        lambda name, order: _slots(c, f"{name}_weight_ptrs", f"sh_{name}_weight", order),
        2.0**-8,
        (c.K / 16 + 16) * 2.0**-24,
    )


def _output(c: Call) -> tuple[Array, Array]:
    """Each slot's product is rounded to BF16."""
    return output(c, _slots(c, "weight_ptrs", "sh_down_weight", c.expert_indices), 2.0**-8, (c.K / 8 + 16) * 2.0**-24)


GATE_UP = {"activation": rounds(lambda c: _activation(c)[0], slack=lambda c: _activation(c)[1])}
DOWN = {"output": rounds(lambda c: _output(c)[0], slack=lambda c: _output(c)[1])}


def _draw(draws: Any, *shape: Any, **options: Any) -> Draw:
    return lambda rng: draws(rng, *shape, **options)


def _gate_up_cases() -> tuple[Case, ...]:
    some = elsewhere(_draw(gate_up, 2, 11, 264, 4, 6), "sh_gate_weight", "sh_up_weight")
    return (
        *(
            Case(f"T={t} N={n} K={size} k={k} E={e}", _draw(gate_up, t, n, size, k, e), GATE_UP, (2, t, 1))
            for t, n, size, k, e in SHAPES
        ),
        Case("some experts elsewhere", some, GATE_UP, (3, 2, 1), "abi"),
        *(
            Case(
                f"sums that cancel, N={n} K={size} k={k}",
                _draw(gate_up, 1, n, size, k, 3, cancel=True),
                {"activation": bits()},
                (2, 1, 1),
                "decision",
                gemv.ORDER,
            )
            for n, size, k in ((24, 1040, 2), (16, 4112, 1))
        ),
    )


def _plain(rng: np.random.Generator) -> dict[str, Argument]:
    """Logits that are equal and no gate, so that the result has no exponential but that of 0."""
    drawn = down(rng, 2, 33, 264, 3, 4)
    return drawn | {"gate_logits": np.zeros((2, 4), BF16), "gate_weight": None}


def _down_cases() -> tuple[Case, ...]:
    some = elsewhere(_draw(down, 2, 24, 264, 4, 6), "sh_down_weight")
    return (
        *(
            Case(f"T={t} N={n} K={size} k={k} E={e}", _draw(down, t, n, size, k, e), DOWN, (1, t, 1))
            for t, n, size, k, e in DOWN_SHAPES
        ),
        Case("some experts elsewhere", some, DOWN, (1, 2, 1), "abi"),
        *(
            Case(
                f"sums that cancel, N={n} K={size} k={k}",
                _draw(down, 2, n, size, k, 4, cancel=True),
                {"output": bits()},
                (1, 2, 1),
                "decision",
                gemv.ORDER,
            )
            for n, size, k in ((19, 1040, 3), (6, 528, 2))
        ),
        Case(
            "each slot's product is rounded",
            _plain,
            {"output": bits()},
            (1, 2, 1),
            "decision",
            gemv.ORDER,
        ),
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_route_gate_up_bf16": _gate_up_cases(),
    "spark_moe_down_blend_bf16": _down_cases(),
}
