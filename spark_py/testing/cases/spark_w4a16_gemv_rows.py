# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_w4a16_gemv_rows: values within what a tensor core's sums may lose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...catalog.spec import Call
from ..case import Case
from ..inputs import Array
from ._gemv_argmax import gemv_argmax_cases
from ._gemv_rows import Shape, gemv_rows_cases
from .paged_decode_fp8 import E4M3
from .w4a16_gemv import nvfp4, weights

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GROUP = 16

SHAPES: tuple[Shape, ...] = (
    (1, (5, 0, 0), 256, 0, 1, 0),
    (8, (33, 7, 16), 512, 0, 2, 0),
    (3, (64, 17, 16), 2304, 16, 3, 5),
    (5, (16, 40, 0), 2048, 8, 2, 0),
    # Tiles alone and in pairs, in every order that there is, and a stripe for each.
    (1, (80, 16, 40), 256, 0, 1, 0),
    (2, (96, 20, 0), 1024, 0, 1, 0),
    # Stripes that four warps do not share evenly.
    (2, (37, 0, 0), 2816, 0, 1, 0),
)


def _dense(c: Call, i: int) -> Array:
    dense: Array = weights(getattr(c, f"W{i}"), getattr(c, f"S{i}"), getattr(c, f"scale2_{i}"))
    return dense


def _drawn(rng: np.random.Generator, i: int, n: int, size: int) -> Mapping[str, Array | float]:
    """Every scale there is, but NaN, which one output of a matrix has."""
    packed, scales = nvfp4(rng, n, size, 0x00, 0x7F)
    scales[n // 2 : n // 2 + (n > 4), size // 32] = 0x7F
    return {"W": packed, "S": scales, "scale2_": 0.0123 * (i + 1)}


def whole_numbers(weights: Array) -> Mapping[str, Array | float]:
    """The arguments that are FP64 [N, K] exactly: groups of 16 whose largest is a code times a power of two. NaN is a
    scale."""
    groups = weights.reshape(len(weights), -1, GROUP)
    scales = np.where(np.abs(groups).max(axis=2) > 4.0, 64.0, 1.0)
    values = np.nan_to_num(groups) / scales[:, :, None]
    codes = np.searchsorted(E2M1, np.abs(values)).astype(np.uint8) | np.where(values < 0, 8, 0).astype(np.uint8)
    codes = codes.reshape(weights.shape)
    scale_bytes = scales.astype(E4M3).view(np.uint8)
    scale_bytes[np.isnan(groups).any(axis=2)] = 0x7F
    return {"W": codes[:, ::2] | codes[:, 1::2] << 4, "S": scale_bytes, "scale2": 1.0}


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_w4a16_gemv_rows": gemv_rows_cases(SHAPES, _dense, _drawn),
    "spark_w4a16_gemv_rows_argmax": gemv_argmax_cases((256, 768), whole_numbers),
}
