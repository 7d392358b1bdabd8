# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_hc_norm: what its kernels add up, and the norm of the row that they mix."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import Array, Normal
from .hyper_connection import SPARK_CASES, finished_head, finished_pre

# (tokens, hidden_size, streams)
SHAPES = ((1, 64, 4), (3, 192, 3), (2, 2112, 4), (2, 128, 1))


def _expand(shape: tuple[int, int, int], apart: int) -> Case:
    tokens, size, hc = shape
    arguments: dict[str, Argument] = {
        "own": Normal(spread=3), "common": Normal(), "hidden_size": size, "hc_mult": hc, "apart": apart
    }  # fmt: skip
    name = f"T={tokens} H={size} hc={hc}{' apart' if apart else ''}"
    return Case(name, lambda rng: arguments, {"streams": bits()}, (1, 1, tokens))


def _normed(y: Array, slack: Array, c: Call) -> tuple[Array, Array]:
    """The norm of a mixed row that is off by `slack` and then rounded, and how far off that may be: first-order."""
    r = 1.0 / np.sqrt((y * y).mean(axis=1, keepdims=True) + c.eps)
    weight = f64(c.weight)
    off = slack + 2.0**-8 * np.abs(y)
    # A change of the whole row changes r by as much.
    whole = np.sqrt((off * off).mean(axis=1, keepdims=True)) * r
    return y * r * weight, (off * r + np.abs(y * r) * (whole + 2.0**-20)) * np.abs(weight)


def _bound(oracle: Callable[[Call], tuple[Array, Array]]) -> Bound:
    return rounds(lambda c: _normed(*oracle(c), c)[0], 0.0, lambda c: _normed(*oracle(c), c)[1])


def _with_weight(draw: Draw) -> Draw:
    return lambda rng: {**draw(rng), "weight": Normal(), "eps": 1e-5}


def _fused(function: str, tokens_at: int) -> list[tuple[Case, Mapping[str, Bound], tuple[int, int, int]]]:
    """The cases of a finishing kernel whose rows are whole warps."""
    found = []
    for case in SPARK_CASES[function]:
        size = case.arguments(np.random.default_rng(0))["hidden_size"]
        assert isinstance(size, int)
        if size % 64 == 0 and case.tag == "numeric":
            grid = (1, case.grid[1], 1) if tokens_at else (case.grid[1], 1, 1)
            found.append((case, case.bounds, grid))
    return found


def _pre_cases() -> tuple[Case, ...]:
    return tuple(
        Case(
            case.name,
            _with_weight(case.arguments),
            {"post_out": bounds["post_out"], "comb_out": bounds["comb_out"], "output": _bound(finished_pre(0))},
            grid,
        )
        for case, bounds, grid in _fused("spark_hc_pre_finish", 1)
    )


def _head_cases() -> tuple[Case, ...]:
    return tuple(
        Case(
            case.name,
            _with_weight(case.arguments),
            {"y_out": bounds["y_out"], "output": _bound(finished_head)},
            grid,
        )
        for case, bounds, grid in _fused("spark_hc_head_finish", 0)
    )


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_hc_expand_sum": tuple(_expand(shape, apart) for shape in SHAPES for apart in (0, 1)),
    "spark_hc_pre_norm": _pre_cases(),
    "spark_hc_head_norm": _head_cases(),
}
