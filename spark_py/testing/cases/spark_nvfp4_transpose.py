# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_nvfp4_transpose, bit for bit: edges of tiles, rows on any address, zeros up to ldb."""

from __future__ import annotations

from collections.abc import Mapping

from ..case import Case, Draw
from ..inputs import AnyBits

SHAPES = [(1, 1, 16), (5, 3, 16), (64, 64, 64), (65, 67, 128), (127, 8, 128), (130, 200, 256), (63, 129, 192)]


def _arguments(rows: int, columns: int, ldb: int) -> Draw:
    return lambda rng: {"source": AnyBits(), "rows": rows, "columns": columns, "ldb": ldb}


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_nvfp4_transpose": (
        *(Case(f"[{rows}, {columns}] to {ldb}", _arguments(rows, columns, ldb)) for rows, columns, ldb in SHAPES),
        Case("off 4 bytes", _arguments(65, 68, 128), tag="abi", shift=1),
        Case("on 4 bytes", _arguments(65, 68, 128), tag="abi", shift=4),
    ),
}
