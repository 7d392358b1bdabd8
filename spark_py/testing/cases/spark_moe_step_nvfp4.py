# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_step_nvfp4: values within what a tensor core's sums may lose, experts elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import F32, Array, normal
from ._moe_step import activation, output
from .moe_shared_expert_fused import NVFP4
from .moe_topk import ties

SHAPES = (
    (1, 1, 32, 1, 1, 1),
    (3, 9, 288, 3, 5, 3),
    (2, 24, 2080, 2, 33, 2),
    (1, 40, 2304, 3, 4, 3),
    (2, 2, 32, 9, 100, 2),
)
"""Rows, width of an expert, width of the model, experts of a row, and experts in all, of a gate and up projection; and
its blocks."""
DOWN_SHAPES = ((1, 1, 32, 1, 1), (3, 24, 288, 3, 5), (2, 40, 160, 10, 33), (1, 17, 2080, 2, 3), (1, 1032, 32, 2, 3))
"""The same of a down projection, the model's width before the expert's; with a gate where that is whole chunks."""


def gate_up(
    rng: np.random.Generator, rows: int, n: int, size: int, k: int, experts: int, elsewhere: bool = False
) -> dict[str, Argument]:
    """Arguments of a gate and up projection. With `elsewhere` every other expert is, and the shared one."""
    drawn: dict[str, Argument] = {
        "A": normal(rng, rows, size, scale=4.0 * size**-0.5),
        "gate_logits": ties(rng, rows, experts) if experts >= 33 else normal(rng, rows, experts, scale=2.0),
        "N": n,
        "K": size,
        "num_experts": experts,
        "top_k": k,
    }
    for name in ("gate", "up"):
        each = [None if elsewhere and e % 2 else NVFP4.draw(rng, n, size) for e in range(experts)]
        drawn |= NVFP4.tables(f"{name}_", each)
        drawn |= NVFP4.shared(f"sh_{name}", None if elsewhere else NVFP4.draw(rng, n, size))
    return drawn


def down(
    rng: np.random.Generator, rows: int, n: int, size: int, k: int, experts: int, elsewhere: bool = False
) -> dict[str, Argument]:
    """Arguments of a down projection; `elsewhere` as above."""
    logits = normal(rng, rows, experts, scale=2.0)
    order = np.argsort(-f64(logits), axis=1, kind="stable")[:, :k]
    spread = 2.0 ** rng.integers(-6, 7, (rows, k + 1, size))
    each = [None if elsewhere and e % 2 else NVFP4.draw(rng, n, size) for e in range(experts)]
    return {
        "activation": (rng.standard_normal(spread.shape) * spread).astype(F32),
        **NVFP4.tables("", each),
        **NVFP4.shared("sh_down", None if elsewhere else NVFP4.draw(rng, n, size)),
        "gate_logits": logits,
        "expert_indices": order.astype(np.uint32),
        "input": normal(rng, rows, n),
        "gate_weight": None if n % 8 else normal(rng, n, scale=2.0 * n**-0.5),
        "N": n,
        "K": size,
        "num_experts": experts,
        "top_k": k,
        "normalize": k % 2,
    }


def _slots(c: Call, prefix: str, shared: str, indices: Array) -> Array:
    """The weights of each row's slots in FP64, [T, k + 1, N, K]; zeros where there are none."""

    def of(weights: Any) -> Array:
        return np.zeros((c.N, c.K)) if weights is None else np.asarray(weights)

    last = of(NVFP4.alone(c, shared))
    return np.stack([np.stack([*(of(NVFP4.routed(c, prefix, int(e))) for e in row), last]) for row in indices])


def _lost(c: Call) -> float:
    """What sums may lose, of the sum of sizes: a step adds products to a sum and may lose a bit of it; scales, lanes,
    slices and a factor round."""
    return float((c.K / 64 + 32) * 2.0**-23)


def _activation(c: Call) -> tuple[Array, Array]:
    return activation(c, lambda name, order: _slots(c, f"{name}_", f"sh_{name}", order), 0.0, _lost(c))


def _output(c: Call) -> tuple[Array, Array]:
    """An activation is the sum of two BF16."""
    return output(c, _slots(c, "", "sh_down", c.expert_indices), 0.0, 2.0**-16 + _lost(c))


GATE_UP = {"activation": rounds(lambda c: _activation(c)[0], slack=lambda c: _activation(c)[1])}
DOWN = {"output": rounds(lambda c: _output(c)[0], slack=lambda c: _output(c)[1])}


def _draw(draws: Any, *shape: int, **options: bool) -> Draw:
    return lambda rng: draws(rng, *shape, **options)


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_route_gate_up_nvfp4": (
        *(
            Case(f"T={t} N={n} K={size} k={k} E={e}", _draw(gate_up, t, n, size, k, e), GATE_UP, (blocks, t, 1))
            for t, n, size, k, e, blocks in SHAPES
        ),
        Case("some experts elsewhere", _draw(gate_up, 2, 11, 288, 4, 6, elsewhere=True), GATE_UP, (4, 2, 1), "abi"),
    ),
    "spark_moe_down_blend_nvfp4": (
        *(
            Case(f"T={t} N={n} K={size} k={k} E={e}", _draw(down, t, n, size, k, e), DOWN, (1, t, 1))
            for t, n, size, k, e in DOWN_SHAPES
        ),
        Case("some experts elsewhere", _draw(down, 2, 24, 288, 4, 6, elsewhere=True), DOWN, (1, 2, 1), "abi"),
    ),
}
