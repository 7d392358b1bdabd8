# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module moe_silu_mul."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Alias, Argument, Case
from ..compare import f64, rounds
from ..inputs import Array, Normal
from .residual_add import SIZES

# __expf is off by 2 + 1.173 |g| ulp; |g| is below 89 where it does not overflow. Three more roundings.
SILU_BOUND = 2.0**-17 + 2.0**-21
# Where expf(-g) overflows, |g| sigmoid(g) is below 89 exp(-88.7).
SILU_FLOOR = 3e-37


def _exact(c: Call) -> Array:
    result: Array = f64(c.gate) / (1.0 + np.exp(-f64(c.gate))) * f64(c.up)
    return result


_CLOSE = rounds(_exact, SILU_BOUND, lambda c: SILU_FLOOR * np.abs(f64(c.up)))


def _arguments(n: int, scale: float, **more: Argument) -> Mapping[str, Argument]:
    return {"gate": Normal(scale), "up": Normal(scale), "total_elements": n, **more}


CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_silu_mul": (
        *(Case(f"{n} elements", lambda rng, n=n: _arguments(n, 1.5), {"output": _CLOSE}) for n in SIZES),  # type: ignore[misc]
        Case("in place", lambda rng: _arguments(257, 1.5, output=Alias("gate")), {"gate": _CLOSE}, tag="abi"),
        Case(
            "values beyond 10",
            lambda rng: _arguments(5120, 12.0),
            {"output": _CLOSE},
            tag="decision",
            subject="SwiGLU clamp",
        ),
    ),
}
