# SPDX-License-Identifier: AGPL-3.0-only
"""E4M3 (OCP FP8, 4 exponent bits, no infinities, 0x7f and 0xff NaN) from FP32, and as BF16."""

from __future__ import annotations

from typing import TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, F32Array, to_bf16

U8Array: TypeAlias = npt.NDArray[np.uint8]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = np.float32(448.0)
NAN = np.uint8(0x7F)

_VALUES: Bf16Array = to_bf16(np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32))


def to_e4m3(values: F32Array) -> U8Array:
    """Bytes of FP32 values: nearest, ties to even, saturating at +-448; any NaN is 0x7f. Shape is kept."""
    rounded: U8Array = np.clip(values, -LARGEST, LARGEST).astype(E4M3).view(np.uint8)
    return np.where(np.isnan(values), NAN, rounded)


def from_e4m3(codes: U8Array) -> Bf16Array:
    """The values of bytes as BF16: exact. Shape is kept."""
    return _VALUES[codes]
