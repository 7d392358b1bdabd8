# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_expert_mxfp4: those of moe_shared_expert_fused with MXFP4 and without a shared expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Case, Table
from ..compare import bits
from ..inputs import Array
from .gemv import ORDER
from .moe_shared_expert_fused import (
    Arguments,
    Flavour,
    Shape,
    down,
    down_bounds,
    down_mirrored,
    project,
    project_bounds,
    project_mirrored,
)
from .spark_moe_expert_silu_down_clamped import EVEN, activation, far_below, limited
from .spark_mxfp4_gemv import mirrored_codes, mxfp4, weights


def _tables(prefix: str, experts: Sequence[Any]) -> Arguments:
    return {
        f"{prefix}packed_ptrs": Table([each and each[0] for each in experts]),
        f"{prefix}scale_ptrs": Table([each and each[1] for each in experts]),
    }


def _draw(rng: np.random.Generator, n: int, k: int) -> Any:
    return mxfp4(rng, n, k, 115, 130)


def _mirrored(rng: np.random.Generator, n: int, k: int, order: Array) -> Any:
    return mirrored_codes(rng, n, k, order)


def _routed(c: Call, prefix: str, expert: int) -> Any:
    packed, scales = c.behind(f"{prefix}packed_ptrs", expert), c.behind(f"{prefix}scale_ptrs", expert)
    return None if packed is None else weights(packed, scales)


def _no_shared(prefix: str, weight: Any) -> Arguments:
    return {}


MXFP4 = Flavour(_draw, _mirrored, _tables, _no_shared, _routed, lambda c, prefix: None)


def _cases(rows: int | None) -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    grid = (1, 1 if rows is None else rows, 1)
    close = [
        Shape(1, 1, 1, 32, rows),
        Shape(5, 3, 5, 96, rows),
        Shape(3, 2, 9, 2080, rows),
        Shape(3, 2, 34, 544, rows),
        Shape(6, 4, 13, 160, rows, missing=(1, 5)),
        Shape(4, 2, 11, 64, rows, repeated=True),
    ]
    ordered = [Shape(4, 2, 19, 96, rows), Shape(3, 2, 9, 1056, rows), Shape(2, 1, 5, 4160, rows)]
    projected = {name: bound for name, bound in project_bounds(MXFP4).items() if not name.startswith("sh_")}
    gate_up = [Case(str(each), project(MXFP4, each), projected, grid=grid) for each in close]
    bounds = down_bounds(MXFP4, shared=False, activation=activation)
    silu_down = [Case(str(each), limited(down(MXFP4, each, shared=False)), bounds, grid=grid) for each in close]
    few = Shape(4, 3, 11, 64, rows)
    for name, draw in {
        "beyond the limit": limited(down(MXFP4, Shape(4, 2, 10, 96, rows, gate=12.0), shared=False)),
        "a limit of 2.5": limited(down(MXFP4, Shape(3, 2, 7, 544, rows, gate=4.0), shared=False), 2.5),
        "gates below -10": far_below(down(MXFP4, few, shared=False), few),
    }.items():
        silu_down.append(Case(name, draw, bounds, grid=grid))
    for each in ordered:
        name, both = f"sums that cancel, {each}", {"gate_out": bits(), "up_out": bits()}
        gate_up.append(Case(name, project_mirrored(MXFP4, each), both, grid=grid, tag="decision", subject=ORDER))
        mirrored = limited(down_mirrored(MXFP4, each, shared=False), EVEN)
        silu_down.append(Case(name, mirrored, {"C": bits()}, grid=grid, tag="decision", subject=ORDER))
    return tuple(gate_up), tuple(silu_down)


_ONE, _ROWS = _cases(None), _cases(3)

CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_expert_gate_up_mxfp4": _ONE[0],
    "spark_moe_expert_silu_down_clamped_mxfp4": _ONE[1],
    "spark_moe_expert_gate_up_mxfp4_rows": _ROWS[0],
    "spark_moe_expert_silu_down_clamped_mxfp4_rows": _ROWS[1],
}
