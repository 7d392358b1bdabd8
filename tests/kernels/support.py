# SPDX-License-Identifier: AGPL-3.0-only
"""What the kernel tests share: buffers that notice stray writes, and comparisons that say how far off a result is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from spark_py.runtime.errors import OutOfDeviceMemoryError
from spark_py.runtime.gpu import DevicePtr, GpuBackend

BF16 = np.dtype(ml_dtypes.bfloat16)
U32 = np.dtype(np.uint32)
F32 = np.dtype(np.float32)

POISON = 0xA5
GUARD_BYTES = 64

Array: TypeAlias = "np.ndarray[Any, Any]"
Check: TypeAlias = Callable[[GpuBackend, np.random.Generator], None]

CHECKS: dict[str, Check] = {}
"""The core check of each kernel, "module::function" or "module::function@aspect"; mutants must fail theirs."""


def checks(name: str) -> Callable[[Check], Check]:
    """Register a function `check(gpu, rng)` under `name`."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


# ---------------------------------------------------------------- memory


def upload(gpu: GpuBackend, array: Array, shift: int = 0) -> DevicePtr:
    """A copy of `array` on the device, `shift` bytes after a 256-byte boundary, where its allocation ends too."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    ptr = gpu.alloc(data.nbytes + shift).offset(shift)
    gpu.copy_h2d(data, ptr)
    return ptr


def alloc_or_skip(gpu: GpuBackend, nbytes: int) -> DevicePtr:
    """Memory for a test beyond 2**32 elements; skips where the device has no room."""
    try:
        return gpu.alloc(nbytes)
    except OutOfDeviceMemoryError as error:
        pytest.skip(f"needs {nbytes / 1e9:.1f} GB: {error}")


def download(gpu: GpuBackend, ptr: DevicePtr, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """`shape` elements from the device."""
    array = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    gpu.copy_d2h(ptr, array)
    return array.view(dtype).reshape(shape)


class Output:
    """A buffer that a kernel writes: poisoned, or holding `content` first, between bytes that must not change."""

    def __init__(
        self,
        gpu: GpuBackend,
        shape: Sequence[int],
        dtype: np.dtype[Any] = BF16,
        content: Array | None = None,
        shift: int = 0,
    ) -> None:
        self._gpu, self._shape, self._dtype, self._shift = gpu, tuple(shape), dtype, shift
        self._size = int(np.prod(shape)) * dtype.itemsize
        total = shift + self._size + GUARD_BYTES
        self._base = gpu.alloc(total)
        gpu.memset(self._base, POISON, total)
        self.ptr = self._base.offset(shift)
        if content is not None:
            assert content.dtype == dtype
            assert content.shape == self._shape
            gpu.copy_h2d(np.ascontiguousarray(content).reshape(-1).view(np.uint8), self.ptr)

    def read(self) -> Array:
        """What the kernel left; AssertionError where it wrote beside the buffer."""
        raw = download(self._gpu, self._base, (self._shift + self._size + GUARD_BYTES,), np.dtype(np.uint8))
        before, after = raw[: self._shift], raw[self._shift + self._size :]
        assert (before == POISON).all(), "bytes before the output were overwritten"
        assert (after == POISON).all(), f"byte {int(np.argmax(after != POISON))} past the output was overwritten"
        return raw[self._shift : self._shift + self._size].view(self._dtype).reshape(self._shape)


# ---------------------------------------------------------------- numbers


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """BF16 numbers of a normal distribution."""
    return (rng.standard_normal(shape) * scale).astype(BF16)


def any_bits(rng: np.random.Generator, *shape: int) -> Array:
    """BF16 of random bits: every NaN payload, infinity, subnormal and signed zero may be among them."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(BF16)


def f64(array: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Values as FP64: exact for BF16 and FP32."""
    return array.astype(np.float64)


def ordered(array: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """BF16 as integers in order of value, neighbours 1 apart; +0 and -0 are both 0."""
    bits = array.view(np.uint16).astype(np.int64)
    return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)


def ulps(actual: Array, expected: Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """BF16 steps between two arrays; two NaN are equal, one NaN alone is 65536 off."""
    distance = np.abs(ordered(actual) - ordered(expected))
    nan, other = np.isnan(f64(actual)), np.isnan(f64(expected))
    distance[nan & other] = 0
    distance[nan ^ other] = 1 << 16
    return distance


def relative_l2(actual: Array, expected: Array) -> float:
    """|actual - expected| / |expected| over finite entries, in FP64."""
    finite = np.isfinite(f64(actual)) & np.isfinite(f64(expected))
    a, e = f64(actual)[finite], f64(expected)[finite]
    return float(np.linalg.norm(a - e) / max(float(np.linalg.norm(e)), 1e-300))


def assert_same_bits(actual: Array, expected: Array, what: str = "") -> None:
    """Equal bytes: for copies and indices."""
    a, e = actual.view(np.uint8), expected.view(np.uint8)
    assert actual.shape == expected.shape
    wrong = np.flatnonzero((a != e).reshape(actual.size, -1).any(axis=1))
    assert wrong.size == 0, (
        f"{what}: {wrong.size} of {actual.size} differ, first at {wrong[0]}: "
        f"{actual.reshape(-1)[wrong[0]]} instead of {expected.reshape(-1)[wrong[0]]}"
    )


def assert_ulps(actual: Array, expected: Array, most: int, l2: float, what: str = "") -> None:
    """BF16 arrays at most `most` steps apart anywhere and `l2` in relative L2."""
    distance = ulps(actual, expected)
    worst = int(np.argmax(distance))
    assert distance.max(initial=0) <= most, (
        f"{what}: {int(distance.max())} ulp at {worst}: "
        f"{actual.reshape(-1)[worst]} instead of {expected.reshape(-1)[worst]}"
    )
    error = relative_l2(actual, expected)
    assert error <= l2, f"{what}: relative L2 {error:.3g} > {l2:.3g}"


def assert_rounds(actual: Array, exact: Array, relative: float, absolute: Array | float = 0.0, what: str = "") -> None:
    """`actual` BF16 is a correct rounding of a number within `relative` (and `absolute`) of `exact` FP64.

    Sharper than a whole ulp: only values that close to a rounding boundary may fall on either side, so a rounding in
    the wrong place shows. NaN must stand where `exact` has NaN.
    """
    with np.errstate(all="ignore"):
        slack = np.abs(exact) * relative + absolute
        slack = np.where(np.isfinite(exact), slack, 0.0)
        low, high = ordered((exact - slack).astype(BF16)), ordered((exact + slack).astype(BF16))
    nan = np.isnan(exact)
    got = ordered(actual)
    wrong = np.where(nan, ~np.isnan(f64(actual)), (got < low) | (got > high) | np.isnan(f64(actual)))
    first = int(np.argmax(wrong))
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.size} are no rounding of the exact value, first at {first}: "
        f"{actual.reshape(-1)[first]} for {exact.reshape(-1)[first]!r}"
    )
