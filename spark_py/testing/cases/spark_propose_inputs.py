# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module spark_propose_inputs: rows that go 16 bytes at a time and rows that do not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..case import Argument, Case, Draw, Table
from ..inputs import U32, any_bits

VOCABULARY = 40
SHAPES = [
    (1, 16, 8, 1),
    (1, 2, 1, 3),
    (3, 64, 32, 40),
    (2, 4112, 2056, 300),
    (1, 10240, 5120, 70),
    (2, 36, 17, 5),
    (2, 16, 8, 300),
    (1, 16, 8, 600),
]
"""(rows, row_bytes, hidden_size, pieces of the slab)"""


def _draw(rows: int, row_bytes: int, hidden_size: int, pieces: int) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        def octets(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
            return rng.integers(0, 256, shape, np.uint8)

        return {
            "given": octets(16 * pieces),
            "used": np.array([pieces], U32),
            "sources": Table([octets(row_bytes) for _ in range(rows)]),
            "tokens": np.array([VOCABULARY - 1, *rng.integers(0, VOCABULARY, rows)][:rows], U32),
            "embed_table": any_bits(rng, VOCABULARY, hidden_size),
            "row_bytes": row_bytes,
            "hidden_size": hidden_size,
        }

    return draw


def _case(shape: tuple[int, int, int, int], shift: int = 0) -> Case:
    rows, row_bytes, h, pieces = shape
    name = f"{rows} rows of {row_bytes} bytes, H={h}, {pieces} pieces" + (
        f", {shift} bytes further on" if shift else ""
    )
    return Case(name, _draw(*shape), grid=(1, rows, 1), shift=shift)


CASES: Mapping[str, tuple[Case, ...]] = {
    "spark_propose_inputs": (*map(_case, SHAPES), _case(SHAPES[3], 2)),
}
