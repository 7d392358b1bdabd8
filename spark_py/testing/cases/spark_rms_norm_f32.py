# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_rms_norm_f32: the norm of rows that have bits below BF16's."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case
from .norm import SHAPES, arguments, close

_BOUNDS = {"output": close(0.0)}

CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_rms_norm_f32": (
        *(Case(f"{rows} rows of {size}", arguments(size), _BOUNDS, (rows, 1, 1)) for rows, size in SHAPES),
        Case("eps of 0.1", arguments(96, eps=0.1), _BOUNDS, (3, 1, 1), "abi"),
    )
}
