# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_expert_silu_down_clamped_bf16: those of the BF16 down projection of rows, with a limit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..case import Argument, Case
from ..compare import bits
from ..inputs import BF16
from . import gemv
from .moe_shared_expert_fused_bf16 import CANCELLING, down, down_bounds, elsewhere
from .moe_weighted_sum_blend import grid_of
from .spark_moe_expert_silu_down_clamped import EVEN, LIMIT, activation, limited

ROWS = (3,)
Sizes = tuple[int, int, int, int]
"""Outputs, inputs, experts of a row, and experts in all."""
BOUNDS = down_bounds(activation)


def _drawn(name: str, sizes: Sizes, scale: float, limit: float) -> Case:
    return Case(name, limited(lambda rng: down(rng, ROWS, *sizes, scale=scale), limit), BOUNDS, grid_of(ROWS))


def far_below(rng: np.random.Generator) -> Mapping[str, Argument]:
    """Gates below -limit alone, where a gate that is clamped there as well is another number."""
    found = {**down(rng, ROWS, 11, 48, 2, 3), "limit": LIMIT}
    for name in ("gate_out", "sh_gate_in"):
        shape = np.shape(found[name])  # type: ignore[arg-type]
        found[name] = -rng.uniform(1.2 * LIMIT, 3 * LIMIT, shape).astype(BF16)
    return found


def even(rng: np.random.Generator, sizes: Sizes) -> Mapping[str, Argument]:
    """Sums that cancel to what was rounded on the way: every gate is above the limit, and its sigmoid is 1."""
    found = {**down(rng, ROWS, *sizes, cancel=True), "limit": EVEN}
    for name in ("gate_out", "sh_gate_in"):
        found[name] = np.full_like(found[name], 2 * EVEN)
    return found


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_expert_silu_down_clamped_bf16_rows": (
        _drawn("within the limit", (9, 2056, 2, 3), 1.5, LIMIT),
        _drawn("beyond the limit", (17, 520, 3, 4), 12.0, LIMIT),
        _drawn("a limit of 2.5", (3, 4616, 1, 2), 4.0, 2.5),
        Case("gates below -10", far_below, BOUNDS, grid_of(ROWS)),
        Case(
            "experts elsewhere",
            limited(elsewhere(lambda rng: down(rng, ROWS, 11, 264, 6, 4, scale=12.0), "sh_down_weight")),
            BOUNDS,
            grid_of(ROWS),
            tag="abi",
            shift=8,
        ),
        *(
            Case(
                f"sums that cancel, N={sizes[0]} K={sizes[1]} k={sizes[2]}",
                lambda rng, sizes=sizes: even(rng, sizes),  # type: ignore[misc]
                {"C": bits(), "sh_down_out": bits()},
                grid_of(ROWS),
                tag="decision",
                subject=gemv.ORDER,
            )
            for sizes in CANCELLING
        ),
    )
}
