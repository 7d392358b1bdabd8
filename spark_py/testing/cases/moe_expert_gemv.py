# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of `moe_expert_gemv::moe_expert_gemv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ..case import Argument, Case, Draw
from ..compare import Bound, bits, f64, rounds
from ..inputs import Normal
from .gemv import ORDER
from .moe_shared_expert_fused import (
    NVFP4,
    Shape,
    ids,
    lost,
    mirrored_rows,
    routed_slots,
    sizes,
)

CLOSE = [
    Shape(1, 1, 1, 16),
    Shape(5, 3, 5, 48),
    Shape(4, 2, 9, 2064),
    Shape(3, 2, 34, 544),
    Shape(6, 4, 13, 80, missing=(1, 5)),
    Shape(4, 2, 19, 64, repeated=True),
]
CANCELLING = [Shape(4, 2, 19, 96), Shape(3, 2, 9, 1056), Shape(2, 1, 5, 4128)]


def ordered(name: Shape, draw: Draw, *outputs: str) -> Case:
    """A case of sums that cancel to what was rounded on the way."""
    equal = {output: bits() for output in outputs}
    return Case(f"sums that cancel, {name}", draw, equal, tag="decision", subject=ORDER)


def _rows(c: Call) -> Any:
    starts = np.arange(c.top_k) * c.input_stride
    return f64(c.A)[starts[:, None] + np.arange(c.K)]


_ONE: Mapping[str, Bound] = {
    "C": rounds(
        lambda c: routed_slots(NVFP4, c, _rows(c), "", None), slack=lambda c: routed_slots(NVFP4, c, _rows(c), "", lost)
    )
}


def _one(shape: Shape, stride: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        found = range(shape.experts)
        experts = [None if e in shape.missing else NVFP4.draw(rng, shape.n, shape.k) for e in found]
        return {
            "A": Normal(spread=4),
            **NVFP4.tables("", experts),
            "expert_indices": ids(rng, shape),
            **sizes(shape),
            "input_stride": stride,
        }

    return draw


def _one_mirrored(shape: Shape) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        order = rng.permutation(shape.k // 2)
        experts = [NVFP4.mirrored(rng, shape.n, shape.k, order) for _ in range(shape.experts)]
        return {
            "A": mirrored_rows(rng, (shape.top_k,), shape.k, order),
            **NVFP4.tables("", experts),
            "expert_indices": ids(rng, shape),
            **sizes(shape),
            "input_stride": shape.k,
        }

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "moe_expert_gemv": (
        *(Case(f"one row for all, {each}", _one(each, 0), _ONE) for each in CLOSE),
        *(Case(f"a row each, {each}", _one(each, each.k), _ONE) for each in CLOSE[1:]),
        Case("rows apart", _one(CLOSE[1], 80), _ONE, tag="abi"),
        *(ordered(each, _one_mirrored(each), "C") for each in CANCELLING),
    )
}
