# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_moe_silu_mul_clamped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Alias, Argument, Case
from ..compare import f64, rounds
from ..inputs import Array, Normal, normal
from .moe_silu_mul import SILU_BOUND, SILU_FLOOR

SIZES = (1, 2, 7, 8, 9, 31, 255, 2047, 2048, 2057, 5120)


def exact(gate: Array, up: Array, limit: float) -> Array:
    """silu(min(gate, limit)) * clip(up, -limit, limit) in FP64."""
    with np.errstate(all="ignore"):
        g = np.minimum(f64(gate), limit)
        result: Array = g / (1.0 + np.exp(-g)) * np.clip(f64(up), -limit, limit)
    return result


def _exact(c: Call) -> Array:
    return exact(c.gate, c.up, float(np.float32(c.limit)))


_CLOSE = rounds(_exact, SILU_BOUND, lambda c: SILU_FLOOR * c.limit)


def _far(rng: np.random.Generator, n: int, limit: float, **more: Argument) -> Mapping[str, Argument]:
    """Operands on both sides of the limit, and beyond it on both sides of 0."""
    gate, up = normal(rng, n, scale=1.5 * limit), normal(rng, n, scale=1.5 * limit)
    return {"gate": gate, "up": up, "total_elements": n, "limit": limit, **more}


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_moe_silu_mul_clamped": (
        *(Case(f"{n} elements", lambda rng, n=n: _far(rng, n, 10.0), {"output": _CLOSE}) for n in SIZES),  # type: ignore[misc]
        *(
            Case(f"limit {limit:g}", lambda rng, limit=limit: _far(rng, 1000, limit), {"output": _CLOSE})  # type: ignore[misc]
            for limit in (0.3, 2.5, 50.0)
        ),
        Case(
            "below the limit",
            lambda rng: {"gate": Normal(), "up": Normal(), "total_elements": 777, "limit": 10.0},
            {"output": _CLOSE},
        ),
        Case("in place", lambda rng: _far(rng, 2309, 10.0, output=Alias("gate")), {"gate": _CLOSE}, tag="abi"),
        Case("into up", lambda rng: _far(rng, 2309, 10.0, output=Alias("up")), {"up": _CLOSE}, tag="abi"),
        Case("buffers 2 bytes off", lambda rng: _far(rng, 2309, 10.0), {"output": _CLOSE}, tag="abi", shift=2),
    ),
}
