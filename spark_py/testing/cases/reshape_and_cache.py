# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module reshape_and_cache: rows copied into slots, bit for bit, or as E4M3; a negative slot is skipped."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ..case import Argument, Case, Draw, Tag
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


def _fp8_arguments(
    shape: tuple[int, ...], scales: tuple[float, float], gap: int = 0, block_gap: int = 0, content: str = "spread"
) -> Draw:
    """As `_arguments`; rows "spread" over E4M3's range and beyond it, of every bit pattern ("whole"), or half way
    between two numbers of it ("ties"; scales of few bits)."""
    _, heads, size, block_size, blocks = shape
    stride = heads * size * block_size + block_gap
    base = _arguments(shape, gap, content == "whole")

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made = dict(base(rng))
        for name, scale in zip(("key", "value"), scales, strict=True):
            rows = made[name]
            assert isinstance(rows, np.ndarray)
            if content == "spread":
                spread = 2.0 ** rng.integers(-8, 10, rows.shape) * scale
                made[name] = (rows.astype(np.float32) * spread).astype(BF16)
            elif content == "ties":
                made[name] = (rng.choice(_HALVES, rows.shape) * scale).astype(BF16)
            made[f"{name[0]}_cache"] = rng.integers(0, 256, (blocks, stride), np.uint8)
            made[f"{name[0]}_scale"] = scale
        return made | {"cache_stride": stride}

    return draw


def _fp8_case(name: str, shape: tuple[int, ...], draw: Draw, tag: Tag = "numeric", subject: str = "") -> Case:
    return Case(name, draw, {}, (shape[0], 1, 1), tag, subject)


_NUMBERS = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
_HALVES = np.concatenate([(_NUMBERS[:-1] + _NUMBERS[1:]) / 2, -(_NUMBERS[:-1] + _NUMBERS[1:]) / 2])
_FEW, _ODD = (5, 2, 64, 16, 3), (4, 3, 7, 5, 3)

CASES: Mapping[str, tuple[Case, ...]] = {
    "reshape_and_cache_flash": (
        *(Case(str(list(shape)), _arguments(shape), grid=(shape[0], 1, 1)) for shape in SHAPES),
        *(Case(f"rows {gap} apart", _arguments((5, 2, 64, 16, 3), gap), {}, (5, 1, 1), "abi") for gap in (8, 64)),
        Case("rows of 21", _arguments((4, 3, 7, 5, 3)), {}, (4, 1, 1), "decision", "rows of any length"),
        Case("every bit pattern", _arguments(SHAPES[1], 0, True), {}, (5, 1, 1), "decision", "NaN payloads"),
    ),
    "reshape_and_cache_flash_fp8": (
        *(_fp8_case(str(list(shape)), shape, _fp8_arguments(shape, (1.0, 0.25))) for shape in SHAPES),
        _fp8_case("scales 0.003 and 7", _FEW, _fp8_arguments(_FEW, (0.003, 7.0))),
        _fp8_case("every bit pattern", _FEW, _fp8_arguments(_FEW, (1.0, 1.0), content="whole")),
        _fp8_case("ties", _FEW, _fp8_arguments(_FEW, (448.0, 7.0), content="ties")),
        _fp8_case("rows 8 apart", _FEW, _fp8_arguments(_FEW, (1.0, 0.5), 8), "abi"),
        _fp8_case("blocks 64 apart", _FEW, _fp8_arguments(_FEW, (1.0, 0.5), 0, 64), "abi"),
        _fp8_case("rows of 21", _ODD, _fp8_arguments(_ODD, (1.0, 0.5)), "decision", "rows of any length"),
    ),
}
