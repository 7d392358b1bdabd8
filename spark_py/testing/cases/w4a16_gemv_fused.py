# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module w4a16_gemv_fused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import Normal
from .gemv import ORDER
from .w4a16_gemv import SCALE2, cancelling, nvfp4, weights


def _exact(c: Call, number: int) -> Any:
    packed, scales, scale2 = (
        (c.B1_packed, c.B1_scale, c.scale2_1) if number == 1 else (c.B2_packed, c.B2_scale, c.scale2_2)
    )
    return weights(packed, scales, scale2)


def _lost(c: Call, number: int) -> Any:
    return (c.K / 16 + 24) * 2.0**-24 * (np.abs(_exact(c, number)) @ np.abs(f64(c.A)))


_CLOSE = {
    "C1": rounds(lambda c: _exact(c, 1) @ f64(c.A), slack=lambda c: _lost(c, 1)),
    "C2": rounds(lambda c: _exact(c, 2) @ f64(c.A), slack=lambda c: _lost(c, 2)),
}


def _random(n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        (packed1, scales1), (packed2, scales2) = nvfp4(rng, n, k), nvfp4(rng, n, k)
        first: Mapping[str, Argument] = {"B1_packed": packed1, "B1_scale": scales1, "scale2_1": SCALE2}
        second: Mapping[str, Argument] = {"B2_packed": packed2, "B2_scale": scales2, "scale2_2": 3 * SCALE2}
        return {"A": Normal(spread=4), **first, **second, "N": n, "K": k}

    return draw


def _ordered(n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x, packed, scales = cancelling(rng, (), 2 * n, k)
        first: Mapping[str, Argument] = {"B1_packed": packed[:n], "B1_scale": scales[:n], "scale2_1": SCALE2}
        second: Mapping[str, Argument] = {"B2_packed": packed[n:], "B2_scale": scales[n:], "scale2_2": 3 * SCALE2}
        return {"A": x, **first, **second, "N": n, "K": k}

    return draw


_DUAL = (
    *(
        Case(f"N={n} K={k}", _random(n, k), _CLOSE)
        for n, k in ((1, 16), (5, 48), (127, 80), (129, 32), (7, 2064), (6, 4112))
    ),
    *(
        Case(
            f"sums that cancel, N={n} K={k}",
            _ordered(n, k),
            {"C1": bits(), "C2": bits()},
            tag="decision",
            subject=ORDER,
        )
        for n, k in ((37, 64), (30, 2080))
    ),
)

CASES: Mapping[str, tuple[Case, ...]] = {"w4a16_gemv_dual": _DUAL, "w4a16_gemv_dual_sw": _DUAL}
