# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module reshape_and_cache: rows copied into slots, bit for bit; a negative slot is skipped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..case import Argument, Case, Draw
from ..inputs import BF16, any_bits, normal

# (rows, kv heads, head_dim, block_size, blocks)
SHAPES = [
    (1, 1, 32, 16, 2),
    (5, 2, 64, 16, 3),
    (3, 8, 128, 16, 2),
    (2, 4, 256, 32, 1),
    (7, 1, 96, 1, 9),
    (2, 1, 576, 16, 2),
]


def _arguments(shape: tuple[int, ...], gap: int = 0, whole: bool = False) -> Draw:
    count, heads, size, block_size, blocks = shape
    row, capacity = heads * size, blocks * block_size

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        make = any_bits if whole else normal
        slots = rng.permutation(capacity)[:count].astype(np.int64)
        slots[0] = 0
        slots[1:][slots[1:] == 0] = capacity - 1 if capacity - 1 not in slots else -1
        if count > 2:
            slots[rng.integers(1, count)] = rng.choice([-1, -(2**40)])
        made: dict[str, Argument] = {"slot_mapping": slots, "block_size": block_size}
        made |= {"num_kv_heads": heads, "head_dim": size}
        for number, name in enumerate(("key", "value"), 1):
            stride = row + number * gap
            apart = np.full((count, stride), np.nan, BF16)
            apart[:, :row] = make(rng, count, row)
            made[name] = apart.reshape(-1)[: (count - 1) * stride + row]
            made[f"{name}_stride"] = stride
            made[f"{name[0]}_cache"] = make(rng, capacity, row)
        return made

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "reshape_and_cache_flash": (
        *(Case(str(list(shape)), _arguments(shape), grid=(shape[0], 1, 1)) for shape in SHAPES),
        *(Case(f"rows {gap} apart", _arguments((5, 2, 64, 16, 3), gap), {}, (5, 1, 1), "abi") for gap in (8, 64)),
        Case("rows of 21", _arguments((4, 3, 7, 5, 3)), {}, (4, 1, 1), "decision", "rows of any length"),
        Case("every bit pattern", _arguments(SHAPES[1], 0, True), {}, (5, 1, 1), "decision", "NaN payloads"),
    ),
}
