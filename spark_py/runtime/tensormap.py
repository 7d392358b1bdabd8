# SPDX-License-Identifier: AGPL-3.0-only
"""TMA descriptors, passed to kernels by value. Twin of `TensorMap` in `kernel_args.rs`."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InvalidArgumentError, InvalidPointerError
from .gpu import DevicePtr

__all__ = ["TENSOR_MAP_BYTES", "TensorMap"]

TENSOR_MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An encoded descriptor of 128 bytes."""

    _data: bytes

    def bytes(self) -> bytes:
        """The 128 bytes as the driver encoded them."""
        return self._data

    @classmethod
    def tiled_2d_bf16(
        cls, global_ptr: DevicePtr, rows: int, cols: int, row_stride_elems: int, box_rows: int, box_cols: int
    ) -> TensorMap:
        """A descriptor of a row-major BF16 matrix [rows, cols], read in boxes of [box_rows, box_cols].

        No interleave, no swizzle, 128-byte L2 promotion, zeros out of bounds. `row_stride_elems` counts elements. The
        limits are the driver's: 2**32 rows and columns, strides below 2**40 bytes that are multiples of 16, boxes of at
        most 256 x 256 whose rows are multiples of 16 bytes. Needs a CUDA driver (BackendUnavailableError without).
        """
        if not isinstance(global_ptr, DevicePtr) or global_ptr.address % 16 or global_ptr.is_null:
            raise InvalidPointerError(f"global_ptr is {global_ptr!r}: a device address that is a multiple of 16")
        sizes = {
            "rows": rows,
            "cols": cols,
            "row_stride_elems": row_stride_elems,
            "box_rows": box_rows,
            "box_cols": box_cols,
        }
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InvalidArgumentError(name, value, "a positive integer")
        if row_stride_elems * 2 % 16:
            raise InvalidArgumentError("row_stride_elems", row_stride_elems, "rows must be a multiple of 16 bytes")
        if row_stride_elems < cols:
            raise InvalidArgumentError("row_stride_elems", row_stride_elems, f"at least cols, {cols}")
        most = {"rows": 2**32, "cols": 2**32, "row_stride_elems": 2**39 - 8, "box_rows": 256, "box_cols": 256}
        for name, limit in most.items():
            if sizes[name] > limit:
                raise InvalidArgumentError(name, sizes[name], f"at most {limit}")
        if box_cols * 2 % 16:
            raise InvalidArgumentError("box_cols", box_cols, "rows of a box must be a multiple of 16 bytes")
        from ._driver import encode_tiled_2d_bf16

        return cls(encode_tiled_2d_bf16(global_ptr.address, rows, cols, row_stride_elems * 2, box_rows, box_cols))
