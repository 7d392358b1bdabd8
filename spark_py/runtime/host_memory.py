# SPDX-License-Identifier: AGPL-3.0-only
"""Host memory that stands for device memory: blocks between red zones, and raw moves."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

__all__ = ["RED_ZONE", "Block", "array_at", "fill", "move"]

RED_ZONE = 256
"""Bytes guarded on each side of an allocation; also its alignment."""
_RED = 0xFB


class Block:
    """One allocation: the array that owns the memory and the slice the user sees."""

    __slots__ = ("base", "body", "owner")

    def __init__(self, nbytes: int, fill: int | None) -> None:
        self.owner = np.empty(nbytes + 3 * RED_ZONE, np.uint8)
        start = int(self.owner.__array_interface__["data"][0])
        self.base = -(-start // RED_ZONE) * RED_ZONE + RED_ZONE
        at = self.base - start
        self.body = self.owner[at : at + nbytes]
        self.mend()
        if fill is not None:
            self.body[:] = fill

    def mend(self) -> None:
        """Paint the red zones."""
        at = self.base - int(self.owner.__array_interface__["data"][0])
        end = at + self.body.size
        self.owner[at - RED_ZONE : at] = _RED
        self.owner[end : end + RED_ZONE] = _RED

    def damage(self) -> str | None:
        """Where a red zone was overwritten, if one was."""
        at = self.base - int(self.owner.__array_interface__["data"][0])
        end = at + self.body.size
        before = np.flatnonzero(self.owner[at - RED_ZONE : at] != _RED)
        if before.size:
            return f"{RED_ZONE - int(before[-1])} bytes before the start"
        after = np.flatnonzero(self.owner[end : end + RED_ZONE] != _RED)
        return f"{int(after[0])} bytes past the end" if after.size else None


def move(dst: int, src: int, nbytes: int) -> None:
    """Copy bytes between two addresses."""
    ctypes.memmove(dst, src, nbytes)


def fill(dst: int, value: int, nbytes: int) -> None:
    """Set bytes."""
    ctypes.memset(dst, value, nbytes)


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array over memory that somebody else owns."""
    nbytes = math.prod(shape) * dtype.itemsize
    return np.ndarray(shape, dtype, memoryview((ctypes.c_uint8 * nbytes).from_address(address)))
