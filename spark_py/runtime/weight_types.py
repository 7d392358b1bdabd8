# SPDX-License-Identifier: AGPL-3.0-only
"""WeightDtype, WeightTensor and WeightInfo: a tensor on the device, and the same tensor in a file.

Twin of spark-runtime's `WeightDtype` and `WeightTensor`. The dtype names are those of the safetensors header.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import InvalidArgumentError, UnsupportedWeightDtypeError
from .gpu import DevicePtr, exact_int

__all__ = ["WeightDtype", "WeightInfo", "WeightTensor"]

_NUMPY: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F4": ml_dtypes.float4_e2m1fn,
    "U8": np.uint8,
    "I8": np.int8,
    "I16": np.int16,
    "U16": np.uint16,
    "I32": np.int32,
    "I64": np.int64,
}


class WeightDtype(StrEnum):
    """Element types that a checkpoint tensor may have on the device. F4 is E2M1, two elements to a byte."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    F4 = "F4"
    U8 = "U8"
    I8 = "I8"
    I16 = "I16"
    U16 = "U16"
    I32 = "I32"
    I64 = "I64"

    @property
    def numpy(self) -> np.dtype[Any]:
        """The NumPy or ml_dtypes type of one element; for F4 an array takes a byte an element."""
        dtype: np.dtype[Any] = np.dtype(_NUMPY[self.value])
        return dtype

    @property
    def bits(self) -> int:
        """Bits of one element in a file and on the device."""
        return 4 if self is WeightDtype.F4 else self.numpy.itemsize * 8


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A tensor on the device: base, logical shape (elements, also for F4) and dtype; row-major and dense.

    A tensor without elements has DevicePtr.NULL. An F4 tensor has an even number of elements.
    """

    ptr: DevicePtr
    shape: tuple[int, ...]
    dtype: WeightDtype

    def __post_init__(self) -> None:
        if not isinstance(self.ptr, DevicePtr):
            raise InvalidArgumentError("ptr", self.ptr, "a DevicePtr")
        shape = tuple(exact_int(n, "dimension") for n in self.shape)
        if any(n < 0 for n in shape):
            raise InvalidArgumentError("shape", shape, "no dimension below 0")
        if self.dtype not in WeightDtype.__members__:
            raise InvalidArgumentError("dtype", self.dtype, f"one of {', '.join(WeightDtype)}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "dtype", WeightDtype(self.dtype))
        if self.num_elements * self.dtype.bits % 8:
            raise InvalidArgumentError("shape", shape, f"{self.dtype} needs an even number of elements")

    @property
    def num_elements(self) -> int:
        """Product of the dimensions; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def byte_size(self) -> int:
        """Bytes on the device."""
        return self.num_elements * self.dtype.bits // 8


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """A tensor in a file. `offset` counts bytes from the start of the file, `nbytes` the stored bytes; `dtype_name`
    is the header's word, which may be one that `dtype` refuses."""

    name: str
    shape: tuple[int, ...]
    dtype_name: str
    file: Path
    offset: int
    nbytes: int

    @property
    def dtype(self) -> WeightDtype:
        """The element type; UnsupportedWeightDtypeError for those that have no place on the device."""
        if self.dtype_name not in WeightDtype.__members__:
            raise UnsupportedWeightDtypeError(self.file, self.name, self.dtype_name, tuple(WeightDtype))
        return WeightDtype(self.dtype_name)
