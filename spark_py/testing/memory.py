# SPDX-License-Identifier: AGPL-3.0-only
"""Device buffers of a test: copies that end where their allocation ends, and outputs that notice stray writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..runtime.errors import OutOfDeviceMemoryError
from ..runtime.gpu import DevicePtr, GpuBackend
from .inputs import BF16, Array

__all__ = ["GUARD_BYTES", "POISON", "Output", "alloc_or_skip", "download", "upload"]

POISON = 0xA5
GUARD_BYTES = 64


def upload(gpu: GpuBackend, array: Array, shift: int = 0) -> DevicePtr:
    """A copy of `array` on the device, `shift` bytes after a 256-byte boundary, where its allocation ends too."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    ptr = gpu.alloc(data.nbytes + shift).offset(shift)
    gpu.copy_h2d(data, ptr)
    return ptr


def alloc_or_skip(gpu: GpuBackend, nbytes: int) -> DevicePtr:
    """Memory for a pytest test beyond 2**32 elements; skips the test where the device has no room."""
    try:
        return gpu.alloc(nbytes)
    except OutOfDeviceMemoryError as error:
        import pytest

        pytest.skip(f"needs {nbytes / 1e9:.1f} GB: {error}")


def download(gpu: GpuBackend, ptr: DevicePtr, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """`shape` elements from the device."""
    array = np.empty(int(np.prod(shape)) * dtype.itemsize, np.uint8)
    gpu.copy_d2h(ptr, array)
    return array.view(dtype).reshape(shape)


class Output:
    """A buffer that a kernel writes: poisoned, or holding `content` first, between bytes that must not change.

    Without `guard` the buffer ends where its allocation ends, so that a backend that checks sees an access beyond it.
    """

    def __init__(
        self,
        gpu: GpuBackend,
        shape: Sequence[int],
        dtype: np.dtype[Any] = BF16,
        content: Array | None = None,
        shift: int = 0,
        guard: bool = True,
        label: str = "",
    ) -> None:
        self._gpu, self._shape, self._dtype, self._shift = gpu, tuple(shape), dtype, shift
        self._size = int(np.prod(shape)) * dtype.itemsize
        self._total = total = shift + self._size + (GUARD_BYTES if guard else 0)
        self.base = gpu.alloc(total, label) if label else gpu.alloc(total)
        gpu.memset(self.base, POISON, total)
        self.ptr = self.base.offset(shift)
        if content is not None:
            assert content.dtype == dtype
            assert content.shape == self._shape
            gpu.copy_h2d(np.ascontiguousarray(content).reshape(-1).view(np.uint8), self.ptr)

    def read(self) -> Array:
        """What the kernel left; AssertionError where it wrote beside the buffer."""
        raw = download(self._gpu, self.base, (self._total,), np.dtype(np.uint8))
        before, after = raw[: self._shift], raw[self._shift + self._size :]
        assert (before == POISON).all(), "bytes before the output were overwritten"
        assert (after == POISON).all(), f"byte {int(np.argmax(after != POISON))} past the output was overwritten"
        return raw[self._shift : self._shift + self._size].view(self._dtype).reshape(self._shape)
