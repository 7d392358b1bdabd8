# SPDX-License-Identifier: AGPL-3.0-only
"""Module `reshape_and_cache`: new key and value rows into a paged cache, of BF16 or of E4M3."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, to_f32
from ._e4m3 import U8Array, to_e4m3


def reshape_and_cache_flash(rows: Bf16Array, cache: Bf16Array, slots: npt.NDArray[np.int64]) -> None:
    """cache[slots[t]] = rows[t], bit for bit, where slots[t] >= 0.

    rows: BF16 [T, n]; cache: BF16 [S, n], written in place; slots: int64 [T], block * block_size + offset each. The
    kernel does this for keys and for values.
    """
    kept = slots >= 0
    target: np.ndarray[Any, Any] = cache.view(np.uint16)
    target[slots[kept]] = rows.view(np.uint16)[kept]


def reshape_and_cache_flash_fp8(
    rows: Bf16Array, cache: U8Array, slots: npt.NDArray[np.int64], scale: float, block_size: int, cache_stride: int
) -> None:
    """As `reshape_and_cache_flash`, but each element becomes E4M3(x * (1 / scale)), both factors rounded to FP32.

    rows: BF16 [T, n]; cache: E4M3 bytes seen flat, blocks cache_stride apart and slots n, written in place; slots:
    int64 [T]; scale: finite, above 0. The kernel does this for keys and for values, each with a scale of its own.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        made = to_e4m3(to_f32(rows) * (np.float32(1.0) / np.float32(scale)))
    row = rows.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            start = slot // block_size * cache_stride + slot % block_size * row
            cache[start : start + row] = made[t]
