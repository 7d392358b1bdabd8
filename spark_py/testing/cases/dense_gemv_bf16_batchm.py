# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module dense_gemv_bf16_batchm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import bits, f64, rounds
from ..inputs import Normal
from .gemv import ORDER, cancelling


def _spread(c: Call, rows: Any) -> Any:
    """[M, N] as the flat output has it: between rows stays what was there, with nothing lost (`rows` a function)."""
    flat = f64(c.C).copy() if rows is _exact else np.zeros(c.C.shape)
    step = flat.itemsize
    view = np.lib.stride_tricks.as_strided(flat, (c.M, c.N), (c.out_stride * step, step))
    view[...] = rows(c)
    return flat


def _exact(c: Call) -> Any:
    return f64(c.A) @ f64(c.B).T


def _lost(c: Call) -> Any:
    return (c.K / 16 + 16) * 2.0**-24 * (np.abs(f64(c.A)) @ np.abs(f64(c.B)).T)


_CLOSE = rounds(lambda c: _spread(c, _exact), slack=lambda c: _spread(c, _lost))


def _arguments(m: int, n: int, k: int, gap: int) -> Draw:
    return lambda rng: {"A": Normal(spread=4), "B": Normal(), "M": m, "N": n, "K": k, "out_stride": n + gap}


def _ordered(m: int, n: int, k: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        x, weights = cancelling(rng, (m,), n, k)
        return {"A": x, "B": weights, "M": m, "N": n, "K": k, "out_stride": n}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "dense_gemv_bf16_batchm": (
        *(
            Case(f"M={m} N={n} K={k}", _arguments(m, n, k, 0), {"C": _CLOSE})
            for m, n, k in ((1, 5, 8), (3, 33, 520), (16, 7, 264), (9, 6, 2056), (8, 4, 1032), (2, 9, 3000))
        ),
        Case("rows of output apart", _arguments(12, 7, 264, 3), {"C": _CLOSE}, tag="abi"),
        *(
            Case(f"sums that cancel, M={m} K={k}", _ordered(m, n, k), {"C": bits()}, tag="decision", subject=ORDER)
            for m, n, k in ((16, 37, 64), (5, 30, 2056))
        ),
    ),
}
