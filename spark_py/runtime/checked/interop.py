# SPDX-License-Identifier: AGPL-3.0-only
"""Arrays over device memory, and other libraries' arrays as device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..callsite import call_site
from ..errors import InvalidArgumentError, UnknownPointerError
from ..gpu import DevicePtr
from .core import guarded
from .memory import MemoryOps


class InteropOps(MemoryOps):
    """`view`, `wrap` and `unwrap`."""

    @guarded
    def view(self, ptr: DevicePtr, shape: Sequence[int], dtype: Any) -> Any:
        extents = tuple(self._size("shape", n) for n in shape)
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise InvalidArgumentError("dtype", dtype, str(error)) from None
        if kind.hasobject or kind.itemsize == 0:
            raise InvalidArgumentError("dtype", dtype, "elements of a fixed number of plain bytes")
        if kind.name.startswith(("float8_", "float6_", "float4_")):
            kind = np.dtype(np.uint8)
        nbytes = int(np.prod(extents, dtype=object)) * kind.itemsize
        if self._range(ptr, nbytes, "view") is None:
            return self._device.array(0, extents, kind)
        if ptr.address % kind.itemsize:
            raise InvalidArgumentError("pointer", ptr, f"a multiple of the {kind.itemsize}-byte element of {kind}")
        return self._device.array(ptr.address, extents, kind)

    @guarded
    def wrap(self, array: Any) -> DevicePtr:
        self._refuse_in_capture("wrap", "wrap before begin_capture")
        address, nbytes = self._device.foreign_range(array)
        if nbytes == 0:
            return DevicePtr.NULL
        with self._lock:
            known = self._memory.overlapping(address, nbytes)
            if known is not None:
                raise InvalidArgumentError("array", f"memory at {address:#x}", f"is known already: {known}")
            self._memory.add(address, nbytes, f"wrapped {type(array).__name__}", call_site(), "wrapped")
            self._wrapped[address] = array
        return DevicePtr(address)

    @guarded
    def unwrap(self, ptr: DevicePtr) -> None:
        address = self._address(ptr)
        if address == 0:
            return
        self._refuse_in_capture("unwrap", "unwrap after end_capture")
        if address in self._wrapped:
            self._drain()
        with self._lock:
            if self._wrapped.pop(address, None) is None:
                raise UnknownPointerError(f"unwrap of {ptr!r}, which was not wrapped", address)
            self._memory.remove(address)
