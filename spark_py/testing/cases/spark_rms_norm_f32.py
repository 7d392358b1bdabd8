# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_rms_norm_f32: the norm of rows that have bits below BF16's."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case
from ..compare import Bound, f64, rounds
from ..inputs import Array, Normal
from .norm import SHAPES, arguments, close

_BOUNDS = {"output": close(0.0)}


def _both(tokens: int, size: int, hc: int) -> Case:
    def normed(name: str) -> Bound:
        x, weight = name, "embed_weight" if name == "embed" else "stream_weight"

        def exact(c: Call) -> Array:
            values = f64(getattr(c, x))
            root = np.sqrt((values * values).mean(-1, keepdims=True) + c.eps)
            result: Array = values / root * f64(getattr(c, weight))
            return result

        return rounds(exact, slack=lambda c: 2.0**-18 * np.abs(exact(c)))

    made: dict[str, Argument] = {
        "embed": Normal(), "embed_weight": Normal(), "streams": Normal(spread=3), "stream_weight": Normal(),
        "hidden_size": size, "hc_mult": hc, "eps": 1e-6,
    }  # fmt: skip
    bounds = {"embed_out": normed("embed"), "streams_out": normed("streams")}
    return Case(f"{tokens} tokens of {hc} x {size}", lambda rng: made, bounds, (tokens * (hc + 1), 1, 1))


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_rms_norm_f32": (
        *(Case(f"{rows} rows of {size}", arguments(size), _BOUNDS, (rows, 1, 1)) for rows, size in SHAPES),
        Case("eps of 0.1", arguments(96, eps=0.1), _BOUNDS, (3, 1, 1), "abi"),
    ),
    "spark_rms_norm_both": (_both(1, 96, 4), _both(3, 33, 2), _both(2, 2050, 1)),
}
