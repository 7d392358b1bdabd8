# SPDX-License-Identifier: AGPL-3.0-only
"""Host buffers as bytes and addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import InvalidArgumentError


def host_bytes(buffer: object, writable: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A flat uint8 view of a host buffer, without a copy."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise InvalidArgumentError("host array", f"strides {buffer.strides}", "must be C-contiguous")
        if buffer.dtype.hasobject:
            raise InvalidArgumentError("host array", buffer.dtype, "holds Python objects, not bytes")
        if writable and not buffer.flags.writeable:
            raise InvalidArgumentError("host array", "read-only", "must be writable")
        return buffer.reshape(-1).view(np.uint8)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]
    except TypeError:
        kinds = "bytes, bytearray, memoryview or a NumPy array"
        raise InvalidArgumentError("host buffer", type(buffer).__name__, kinds) from None
    if not view.c_contiguous:
        raise InvalidArgumentError("host buffer", f"strides {view.strides}", "must be C-contiguous")
    if writable and view.readonly:
        raise InvalidArgumentError("host buffer", type(buffer).__name__, "must be writable")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, np.uint8)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Host address of an array's first byte."""
    return int(array.__array_interface__["data"][0])
