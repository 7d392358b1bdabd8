# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module w4a16's tile GEMM: loosely, as the engine's kernel computes, and as W4A16 by decision.

The engine's kernel narrows activations and weights to E4M3 on the way; ours does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...catalog.spec import Call
from ...reference.w4a16_gemm_t import weights
from ..case import Argument, Case, Draw
from ..compare import f64, rounds
from ..inputs import BF16, Array, normal

SCALE2 = 0.0123
SUBJECT = "activations and weights of the tile GEMM in BF16, not E4M3"

# (M, N, K, ldb): edges of tiles of 8, 16 and 32 rows, passes of 32 and blocks of 64; of 128 outputs; of 64 along K.
SHAPES = [
    (1, 1, 16, 16),
    (5, 130, 48, 256),
    (8, 127, 64, 128),
    (9, 16, 80, 48),
    (16, 129, 272, 144),
    (17, 33, 320, 128),
    (33, 100, 96, 128),
    (40, 20, 592, 32),
    (65, 70, 128, 128),
]


def twin(rng: np.random.Generator, columns: int, depth: int, low: int = 0x28, high: int = 0x58) -> tuple[Array, Array]:
    """Any codes [K / 2, columns], and scales [K / 16, columns] of either sign and magnitudes from code `low` on."""
    packed = rng.integers(0, 256, (depth // 2, columns), dtype=np.uint8)
    scales = rng.integers(low, high, (depth // 16, columns), dtype=np.uint8)
    return packed, scales | rng.choice(np.array([0, 0x80], np.uint8), scales.shape)


def terms(a: Array, packed: Array, scales: Array, scale2: float, n: int) -> tuple[Any, Any]:
    """The products' sum [M, N] in FP64, and the sum of their magnitudes."""
    with np.errstate(invalid="ignore"):
        matrix, factor = f64(weights(packed, scales))[:, :n], float(np.float32(scale2))
        return f64(a) @ matrix * factor, np.abs(f64(a)) @ np.abs(matrix) * factor


def lost(depth: int) -> float:
    """What a sum of `depth` products may lose, as a share of their magnitudes.

    One step of a tensor core adds 16 products to a sum, and cuts off below 2^-23 of the largest of them; a few steps
    for the sums of the warps and the global factor.
    """
    return (depth / 16 + 6) * 2.0**-22


def _of(c: Call) -> tuple[Any, Any]:
    return terms(c.A, c.B_packed, c.B_scale, c.scale2, c.N)


CLOSE = rounds(lambda c: _of(c)[0], slack=lambda c: lost(c.K) * _of(c)[1])
# Two roundings to 4 significant bits, at most 2^-4 of a product each.
_LOOSE = rounds(lambda c: _of(c)[0], slack=lambda c: (2.0**-3 + 2.0**-7) * _of(c)[1])


def _arguments(shape: tuple[int, int, int, int], low: int = 0x28, high: int = 0x58) -> Draw:
    m, n, k, ldb = shape

    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        packed, scales = twin(rng, ldb, k, low, high)
        # Between 2^-4 and 2^5, where E4M3 has no subnormals.
        a = np.copysign(np.abs(normal(rng, m, k)) + BF16.type(0.0625), normal(rng, m, k)).astype(BF16)
        numbers = {"M": m, "N": n, "K": k, "ldb": ldb}
        return {"A": a, "B_packed": packed, "B_scale": scales, "scale2": SCALE2, **numbers}

    return draw


def _name(shape: tuple[int, int, int, int]) -> str:
    return "M={} N={} K={} ldb={}".format(*shape)


def _decided(name: str, draw: Draw) -> Case:
    return Case(name, draw, {"C": CLOSE}, tag="decision", subject=SUBJECT)


CASES: Mapping[str, tuple[Case, ...]] = {
    "w4a16_gemm_t": (
        *(Case(f"loosely, {_name(shape)}", _arguments(shape), {"C": _LOOSE}) for shape in SHAPES if shape[2] % 32 == 0),
        *(_decided(_name(shape), _arguments(shape)) for shape in SHAPES),
        _decided("any scale but NaN", _arguments((7, 60, 336, 64), 0, 0x7F)),
        _decided("subnormal scales", _arguments((3, 40, 80, 48), 0, 8)),
        _decided("NaN among the scales", _arguments((3, 128, 48, 128), 0x60, 0x80)),
    ),
}
