# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module w4a16_gemv, joint projections: values within what any order may lose, our order as a decision."""

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


def _sums(a: Any, packed: Any, scales: Any, scale2: float) -> tuple[Any, Any]:
    """Exact sums, and what any order of FP32 sums and three roundings a product may lose."""
    matrix = weights(packed, scales, scale2).T
    return f64(a) @ matrix, (a.shape[1] / 16 + 24) * 2.0**-24 * (np.abs(f64(a)) @ np.abs(matrix))


def _apart(c: Call, values: Any) -> Any:
    return values.reshape(-1, c.num_heads, 2, c.head_dim).transpose(0, 2, 1, 3).reshape(len(values), -1)


def _qg(c: Call, which: int) -> Any:
    return _apart(c, _sums(c.A, c.B_packed, c.B_scale, c.scale2)[which])


def _dual(c: Call, number: int, which: int) -> Any:
    of = (getattr(c, f"B{number}_{name}") for name in ("packed", "scale", "scale2"))
    return _sums(c.A, *of)[which]


_CLOSE_QG = {"C": rounds(lambda c: _qg(c, 0), slack=lambda c: _qg(c, 1))}
_CLOSE_DUAL = {
    "C0": rounds(lambda c: _dual(c, 0, 0), slack=lambda c: _dual(c, 0, 1)),
    "C1": rounds(lambda c: _dual(c, 1, 0), slack=lambda c: _dual(c, 1, 1)),
}
_SAME_DUAL = {"C0": bits(), "C1": bits()}


def _qg_arguments(rows: int, heads: int, size: int, k: int, cancel: bool) -> Draw:
    n = 2 * heads * size

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        a: Argument = Normal(spread=4)
        packed, scales = nvfp4(rng, n, k)
        if cancel:
            a, packed, scales = cancelling(rng, (rows,), n, k)
        numbers = {"N": n, "K": k, "num_heads": heads, "head_dim": size}
        return {"A": a, "B_packed": packed, "B_scale": scales, "scale2": SCALE2, **numbers}

    return draw


def _dual_arguments(rows: int, n: int, k: int, cancel: bool) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        a: Argument = Normal(spread=4)
        packed, scales = nvfp4(rng, 2 * n, k)
        if cancel:
            a, packed, scales = cancelling(rng, (rows,), 2 * n, k)
        first: Mapping[str, Argument] = {"B0_packed": packed[:n], "B0_scale": scales[:n], "B0_scale2": SCALE2}
        second: Mapping[str, Argument] = {"B1_packed": packed[n:], "B1_scale": scales[n:], "B1_scale2": 3 * SCALE2}
        return {"A": a, **first, **second, "N": n, "K_in": k}

    return draw


def _qg_cases(rows: int) -> tuple[Case, ...]:
    close = [(1, 1, 16), (3, 5, 48), (2, 16, 2064)]
    decided = [(5, 7, 64), (2, 9, 2080)]
    return (
        *(Case(f"{h} heads of {d}, K={k}", _qg_arguments(rows, h, d, k, False), _CLOSE_QG) for h, d, k in close),
        *(
            Case(
                f"sums that cancel, {h} heads of {d}, K={k}",
                _qg_arguments(rows, h, d, k, True),
                {"C": bits()},
                tag="decision",
                subject=ORDER,
            )
            for h, d, k in decided
        ),
    )


def _dual_cases(rows: int) -> tuple[Case, ...]:
    close = [(1, 16), (5, 48), (127, 80), (6, 2064)]
    decided = [(37, 64), (9, 2080)]
    return (
        *(Case(f"N={n} K={k}", _dual_arguments(rows, n, k, False), _CLOSE_DUAL) for n, k in close),
        *(
            Case(
                f"sums that cancel, N={n} K={k}",
                _dual_arguments(rows, n, k, True),
                _SAME_DUAL,
                tag="decision",
                subject=ORDER,
            )
            for n, k in decided
        ),
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    **{f"w4a16_gemv_qg_batch{rows}": _qg_cases(rows) for rows in (2, 3)},
    **{f"w4a16_gemv_dual_batch{rows}": _dual_cases(rows) for rows in (2, 3)},
}
