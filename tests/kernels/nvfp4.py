# SPDX-License-Identifier: AGPL-3.0-only
"""NVFP4 weights on the device, and their two dot products in exact arithmetic with every rounding written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np

from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, upload

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Weight:
    """What the launchers need of a `QuantizedWeight`."""

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float


def on_device(gpu: GpuBackend, packed: Array, scales: Array, scale2: float) -> Weight:
    """A copy that ends where its allocations end."""
    return Weight(upload(gpu, packed), upload(gpu, scales), scale2)


def rounded(value: Fraction) -> Fraction:
    """The FP32 number nearest to `value`, ties to even; no overflow."""
    near = np.float32(float(value))
    around = [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
    return Fraction(
        float(min(around, key=lambda each: (abs(Fraction(float(each)) - value), int(each.view(np.uint32)) & 1)))
    )


def _decoded(packed: Array, scales: Array, scale2: float) -> tuple[list[Fraction], list[Fraction]]:
    """Codes and factors of one row."""
    values = []
    for byte in packed.tolist():
        for nibble in (byte & 15, byte >> 4):
            values.append(Fraction(_MAGNITUDES[nibble & 7]) * (-1 if nibble & 8 else 1))
    numbers = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values, [rounded(Fraction(float(each)) * Fraction(float(np.float32(scale2)))) for each in numbers]


def _tree(values: Sequence[Fraction]) -> Fraction:
    for step in (16, 8, 4, 2, 1):
        values = [rounded(values[i] + values[i + step]) for i in range(step)]
    return values[0]


def _over_lanes(lanes: Sequence[Fraction]) -> np.float32:
    return np.float32(float(rounded(_tree(lanes[:32]) + _tree(lanes[32:]))))


def by_chunk(x: Array, packed: Array, scales: Array, scale2: float) -> np.float32:
    """One element of what all kernels but qg and logits compute, before its rounding to BF16."""
    a = [Fraction(float(each)) for each in x.astype(np.float64)]
    values, factors = _decoded(packed, scales, scale2)
    sums = [[Fraction(0), Fraction(0)] for _ in range(64)]
    for chunk, factor in enumerate(factors):
        part = Fraction(0)
        for k in range(16 * chunk, 16 * chunk + 16):
            part = rounded(a[k] * values[k] + part)
        lane = sums[chunk % 128 // 2]
        lane[chunk % 2] = rounded(factor * part + lane[chunk % 2])
    return _over_lanes([rounded(first + second) for first, second in sums])


def by_weight(x: Array, packed: Array, scales: Array, scale2: float) -> np.float32:
    """One element of what qg and logits compute, before a rounding to BF16."""
    a = [Fraction(float(each)) for each in x.astype(np.float64)]
    values, factors = _decoded(packed, scales, scale2)
    lanes = [Fraction(0)] * 64
    for k, value in enumerate(values):
        lane = k // 8 % 64
        lanes[lane] = rounded(lanes[lane] + rounded(a[k] * rounded(value * factors[k // 16])))
    return _over_lanes(lanes)
