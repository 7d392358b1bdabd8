# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module ssm_preprocess: queries and gates taken apart in place, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..case import Argument, Case, Draw
from ..inputs import any_bits, normal
from ..memory import POISON

# (rows, heads, head_dim)
SHAPES = [(1, 1, 1), (1, 24, 256), (3, 4, 128), (2, 5, 64), (2, 7, 33), (2, 16, 80)]


def _arguments(shape: tuple[int, ...], gap: int = 0, whole: bool = False) -> Draw:
    count, heads, size = shape
    row = 2 * heads * size

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        content = (any_bits if whole else normal)(rng, count, row)
        apart = np.full((count, row + gap), 0, content.dtype)
        apart.view(np.uint8)[...] = POISON
        apart[:, :row] = content
        return {"data": apart, "num_heads": heads, "head_dim": size, "stride": row + gap}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "deinterleave_qg": (
        *(Case(str(list(shape)), _arguments(shape), grid=(shape[0], 1, 1)) for shape in SHAPES),
        *(Case(f"rows {gap} apart", _arguments((3, 4, 128), gap), {}, (3, 1, 1), "abi") for gap in (8, 64)),
        Case("every bit pattern", _arguments((3, 4, 128), 0, True), {}, (3, 1, 1), "decision", "NaN payloads"),
    ),
}
