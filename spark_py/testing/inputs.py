# SPDX-License-Identifier: AGPL-3.0-only
"""Random kernel inputs: functions for BF16 arrays, and distributions that are drawn when a shape is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

__all__ = [
    "BF16",
    "F32",
    "U32",
    "AnyBits",
    "Array",
    "Distribution",
    "Integers",
    "Large",
    "Normal",
    "Subnormal",
    "Ties",
    "WithNan",
    "any_bits",
    "normal",
]

BF16 = np.dtype(ml_dtypes.bfloat16)
U32 = np.dtype(np.uint32)
F32 = np.dtype(np.float32)

Array: TypeAlias = "np.ndarray[Any, Any]"
Distribution: TypeAlias = "Callable[[np.random.Generator, tuple[int, ...], np.dtype[Any]], Array]"
"""Draws an array of a shape and type."""


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """BF16 numbers of a normal distribution."""
    return (rng.standard_normal(shape) * scale).astype(BF16)


def any_bits(rng: np.random.Generator, *shape: int) -> Array:
    """BF16 of random bits: every NaN payload, infinity, subnormal and signed zero may be among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(BF16)


@dataclass(frozen=True, slots=True)
class Normal:
    """Numbers of a normal distribution. `spread` multiplies each by a power of two between 2**-spread and 2**spread."""

    scale: float = 1.0
    spread: int = 0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        values = rng.standard_normal(shape) * self.scale
        if self.spread:
            values = values * 2.0 ** rng.integers(-self.spread, self.spread + 1, shape)
        return values.astype(dtype)


@dataclass(frozen=True, slots=True)
class Large:
    """Numbers whose squares leave FP32's range: signed, between 10**`low` and 10**`high`."""

    low: float = 19.0
    high: float = 38.0

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return (rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(self.low, self.high, shape)).astype(dtype)


@dataclass(frozen=True, slots=True)
class Ties:
    """Few distinct values, so that every maximum is held by many elements."""

    values: int = 7

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return (rng.integers(0, self.values, shape) - self.values // 2).astype(dtype)


@dataclass(frozen=True, slots=True)
class WithNan:
    """`base` with a `share` of its elements, at least one, replaced by NaN."""

    base: Distribution = Normal()
    share: float = 0.1

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        values = self.base(rng, shape, dtype)
        flat = values.reshape(-1)
        flat[rng.random(flat.size) < self.share] = np.nan
        if flat.size:
            flat[rng.integers(flat.size)] = np.nan
        return values


@dataclass(frozen=True, slots=True)
class Subnormal:
    """Subnormal numbers of BF16 or FP32 and signed zeros."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        word = np.dtype(f"u{dtype.itemsize}")
        mantissa = {2: 7, 4: 23}[dtype.itemsize]
        bits = rng.integers(0, 1 << mantissa, shape, dtype=word)
        sign = rng.integers(0, 2, shape, dtype=word) << word.type(8 * dtype.itemsize - 1)
        values: Array = (bits | sign).view(dtype)
        return values


@dataclass(frozen=True, slots=True)
class AnyBits:
    """Every bit pattern of the type alike."""

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        count = int(np.prod(shape)) * dtype.itemsize
        return rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True)
class Integers:
    """Integers from `low` to below `high`."""

    low: int
    high: int

    def __call__(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return rng.integers(self.low, self.high, shape).astype(dtype)
