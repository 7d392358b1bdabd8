# SPDX-License-Identifier: AGPL-3.0-only
"""TMA descriptors: what is refused before the driver is asked, and what it makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend, TensorMap
from spark_py.runtime.errors import InvalidArgumentError, InvalidPointerError

from .support import refused

RIGHT: dict[str, Any] = {
    "global_ptr": DevicePtr(4096),
    "rows": 100,
    "cols": 64,
    "row_stride_elems": 72,
    "box_rows": 16,
    "box_cols": 64,
}


@pytest.mark.parametrize("ptr", [DevicePtr.NULL, DevicePtr(4104), DevicePtr(4097), 4096, None], ids=repr)
def test_addresses(ptr: Any) -> None:
    with refused(InvalidPointerError, "global_ptr", "16"):
        TensorMap.tiled_2d_bf16(**RIGHT | {"global_ptr": ptr})


@pytest.mark.parametrize("name", ["rows", "cols", "row_stride_elems", "box_rows", "box_cols"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, None, np.float32(8)], ids=repr)
def test_sizes(name: str, value: Any) -> None:
    with refused(InvalidArgumentError, name, "positive integer"):
        TensorMap.tiled_2d_bf16(**RIGHT | {name: value})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"row_stride_elems": 68}, ("row_stride_elems", "68", "16 bytes")),
        ({"row_stride_elems": 56}, ("row_stride_elems", "56", "64")),
        ({"box_rows": 257}, ("box_rows", "257", "256")),
        ({"box_cols": 264}, ("box_cols", "264", "256")),
        ({"box_cols": 60}, ("box_cols", "60", "16 bytes")),
        ({"rows": 2**32 + 1}, ("rows", str(2**32))),
        ({"row_stride_elems": 2**39}, ("row_stride_elems", str(2**39))),
    ],
    ids=str,
)
def test_limits(changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refused(InvalidArgumentError, *parts):
        TensorMap.tiled_2d_bf16(**RIGHT | changes)


@pytest.mark.gpu_only("only a driver encodes descriptors")
def test_encoding(gpu: GpuBackend) -> None:
    ptr = gpu.alloc(100 * 72 * 2)
    one = TensorMap.tiled_2d_bf16(**RIGHT | {"global_ptr": ptr})
    again = TensorMap.tiled_2d_bf16(**RIGHT | {"global_ptr": ptr})
    assert len(one.bytes()) == 128
    assert one.bytes() == again.bytes()
    assert ptr.address.to_bytes(8, "little") in one.bytes()
    for changes in ({"rows": 101}, {"cols": 63}, {"row_stride_elems": 80}, {"box_rows": 8}, {"box_cols": 32}):
        assert TensorMap.tiled_2d_bf16(**RIGHT | {"global_ptr": ptr} | changes).bytes() != one.bytes()
