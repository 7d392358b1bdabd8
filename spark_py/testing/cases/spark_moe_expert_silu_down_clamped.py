# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_expert_silu_down_clamped: those of moe_expert_silu_down_shared, with a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits
from ..inputs import BF16, Array
from .gemv import ORDER
from .moe_shared_expert_fused import NVFP4, Shape, down, down_bounds, down_mirrored
from .spark_moe_silu_mul_clamped import exact

LIMIT = 10.0
EVEN = 63.7
"""A limit that needs all bits of FP32, of gates above 20, whose sigmoid is 1 in FP32 however exp is computed."""


def limited(draw: Draw, limit: float = LIMIT) -> Draw:
    """The arguments, and the limit."""
    return lambda rng: {**draw(rng), "limit": limit}


def far_below(draw: Draw, shape: Shape) -> Draw:
    """Gates below -limit alone, where a gate that is clamped there as well is another number."""

    def gates(rng: np.random.Generator, *lead: int) -> Array:
        drawn: Array = -rng.uniform(1.2 * LIMIT, 3 * LIMIT, (*lead, shape.k)).astype(BF16)
        return drawn

    def drawn(rng: np.random.Generator) -> Mapping[str, Argument]:
        arguments = {**limited(draw)(rng), "gate_out": gates(rng, *shape.lead, shape.top_k)}
        alone = {"sh_gate_in": gates(rng, *shape.lead)} if "sh_gate_in" in arguments else {}
        return arguments | alone

    return drawn


def activation(c: Call, gate: Array, up: Array) -> Any:
    """In FP64."""
    return exact(gate, up, float(np.float32(c.limit)))


def _cases(rows: int | None) -> tuple[Case, ...]:
    grid = (1, 1 if rows is None else rows, 1)
    bounds, few = down_bounds(NVFP4, activation=activation), Shape(4, 3, 11, 48, rows)
    close = {
        "within the limit": limited(down(NVFP4, Shape(3, 2, 9, 2064, rows))),
        "beyond the limit": limited(down(NVFP4, Shape(4, 2, 10, 96, rows, gate=12.0))),
        "a limit of 2.5": limited(down(NVFP4, Shape(3, 2, 7, 544, rows, gate=4.0)), 2.5),
        "gates below -10": far_below(down(NVFP4, few), few),
        "experts elsewhere": limited(down(NVFP4, Shape(6, 4, 13, 80, rows, missing=(1, 5), alone=False, gate=12.0))),
    }
    cases = [Case(name, draw, bounds, grid=grid) for name, draw in close.items()]
    alone = {name: bound for name, bound in bounds.items() if name.startswith("sh_")}
    only_shared = limited(down(NVFP4, Shape(2, 0, 12, 48, rows, gate=12.0)))
    cases.append(Case("the shared expert alone", only_shared, alone, grid=grid))
    for shape in (Shape(4, 2, 19, 96, rows), Shape(2, 1, 5, 4128, rows)):
        draw, equal = limited(down_mirrored(NVFP4, shape), EVEN), {"C": bits(), "sh_down_out": bits()}
        cases.append(Case(f"sums that cancel, {shape}", draw, equal, grid=grid, tag="decision", subject=ORDER))
    return tuple(cases)


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_expert_silu_down_clamped": _cases(None),
    "spark_moe_expert_silu_down_clamped_rows": _cases(3),
}
