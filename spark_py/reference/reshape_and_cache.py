# SPDX-License-Identifier: AGPL-3.0-only
"""Module `reshape_and_cache`: new key and value rows into a paged cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array


def reshape_and_cache_flash(rows: Bf16Array, cache: Bf16Array, slots: npt.NDArray[np.int64]) -> None:
    """cache[slots[t]] = rows[t], bit for bit, where slots[t] >= 0.

    rows: BF16 [T, n]; cache: BF16 [S, n], written in place; slots: int64 [T], block * block_size + offset each. The
    kernel does this for keys and for values.
    """
    kept = slots >= 0
    target: np.ndarray[Any, Any] = cache.view(np.uint16)
    target[slots[kept]] = rows.view(np.uint16)[kept]
