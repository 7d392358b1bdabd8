# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module moe_expert_gemv_fused: those of moe_shared_expert_fused, without the shared expert."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case, Draw
from .moe_expert_gemv import CANCELLING, CLOSE, ordered
from .moe_shared_expert_fused import (
    CLAMP,
    NVFP4,
    Shape,
    down,
    down_bounds,
    down_mirrored,
    project,
    project_bounds,
    project_mirrored,
)


def _without_shared(draw: Draw) -> Draw:
    return lambda rng: {name: value for name, value in draw(rng).items() if not name.startswith("sh_")}


_ROUTED = {name: bound for name, bound in project_bounds(NVFP4).items() if not name.startswith("sh_")}
_GATE_UP = (
    *(Case(str(each), _without_shared(project(NVFP4, each)), _ROUTED) for each in CLOSE),
    *(ordered(each, _without_shared(project_mirrored(NVFP4, each)), "gate_out", "up_out") for each in CANCELLING),
)

_DOWN = down_bounds(NVFP4, shared=False)
_LARGE = Shape(3, 2, 18, 96, gate=12.0)
_SILU_DOWN = (
    *(Case(str(each), down(NVFP4, each, shared=False), _DOWN) for each in CLOSE),
    Case("values beyond 10", down(NVFP4, _LARGE, shared=False), _DOWN, tag="decision", subject=CLAMP),
    *(ordered(each, down_mirrored(NVFP4, each, shared=False), "C") for each in CANCELLING),
)

CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_expert_gemv_gate_up": _GATE_UP,
    "moe_expert_gemv_gate_up_2x": _GATE_UP,
    "moe_expert_gemv_silu_down": _SILU_DOWN,
    "moe_expert_gemv_silu_down_2x": _SILU_DOWN,
    "moe_expert_gemv_silu_down_wide": _SILU_DOWN,
}
