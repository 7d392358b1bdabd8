# SPDX-License-Identifier: AGPL-3.0-only
"""MXFP4 weights on the device, and their dot product in exact arithmetic with every rounding written out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, upload

from .nvfp4 import rounded

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Weight:
    """What the launchers need of an `Mxfp4Weight`."""

    weight: DevicePtr
    weight_scale: DevicePtr


def on_device(gpu: GpuBackend, packed: Array, scales: Array) -> Weight:
    """A copy that ends where its allocations end."""
    return Weight(upload(gpu, packed), upload(gpu, scales))


def _tree(values: Sequence[Fraction]) -> Fraction:
    for step in (16, 8, 4, 2, 1):
        values = [rounded(values[i] + values[i + step]) for i in range(step)]
    return values[0]


def exactly(x: Array, packed: Array, scales: Array) -> np.float32:
    """One element before its rounding to BF16: x [K] BF16 or FP32, codes u8 [K / 2], scales u8 [K / 32] below 0xFF."""
    a = [Fraction(float(each)) for each in x.astype(np.float64)]
    values = []
    for byte in packed.tolist():
        for nibble in (byte & 15, byte >> 4):
            values.append(Fraction(_MAGNITUDES[nibble & 7]) * (-1 if nibble & 8 else 1))
    sums = [[Fraction(0), Fraction(0)] for _ in range(64)]
    for chunk, byte in enumerate(scales.tolist()):
        for half in (0, 1):
            part, first = Fraction(0), 32 * chunk + 16 * half
            for k in range(first, first + 16):
                part = rounded(a[k] * values[k] + part)
            lane = sums[chunk % 64]
            lane[half] = rounded(Fraction(2) ** (byte - 127) * part + lane[half])
    lanes = [rounded(first + second) for first, second in sums]
    return np.float32(float(rounded(_tree(lanes[:32]) + _tree(lanes[32:]))))
