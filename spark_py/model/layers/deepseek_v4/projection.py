# SPDX-License-Identifier: AGPL-3.0-only
"""V4Projection: y = x . W transposed for several rows, in whatever format W has.

The values of a checkpoint's E4M3 tensor times its power of two are BF16 numbers, so that a tensor computes the same
whether it stays E4M3 or was made BF16, but for the order of sums; as E4M3 it is half the bytes, which is what a product
of a few rows costs. Where the set has `spark_w8a16_rows`, it is what multiplies E4M3 tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ....ops.dense_gemv_bf16_batchm import MAX_ROWS as BF16_ROWS
from ....ops.dense_gemv_bf16_batchm import dense_gemv_batchm
from ....ops.gemv import dense_gemv
from ....ops.spark_mxfp4_gemv import mxfp4_gemv, mxfp4_gemv_batchm
from ....ops.spark_v4_grouped_gemv import spark_v4_grouped_gemv
from ....ops.spark_w8a16_rows import MAX_ROWS as W8_ROWS
from ....ops.spark_w8a16_rows import TILE, W8Projection, spark_w8a16_rows
from ....ops.w8a16_gemv import w8a16_gemv, w8a16_gemv_batchm
from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ....runtime.sizes import count
from ...weight_map import DenseWeight, Fp8Weight, Mxfp4Weight

__all__ = ["V4GroupedProjection", "V4Projection", "V4Weight"]

V4Weight: TypeAlias = DenseWeight | Fp8Weight | Mxfp4Weight
"""A matrix in BF16, in E4M3 with a scale a block of 128 x 128, or in MXFP4."""

_BF16 = 2  # bytes
_QUANTISED_ROWS = 8  # of a launch
_W8 = "spark_w8a16_rows", "spark_w8a16_rows"


def _fp8(gpu: GpuBackend, kernel: KernelHandle, x: DevicePtr, weight: Fp8Weight, y: DevicePtr, *rest: Any) -> None:
    w8a16_gemv(gpu, kernel, x, weight.weight, weight.row_scale, y, *rest)


def _fp8_rows(gpu: GpuBackend, kernel: KernelHandle, x: DevicePtr, weight: Fp8Weight, y: DevicePtr, *rest: Any) -> None:
    w8a16_gemv_batchm(gpu, kernel, x, weight.weight, weight.row_scale, y, *rest)


@dataclass(frozen=True, slots=True)
class _Format:
    """A format's kernels for one row and for up to `most`, with their launchers; `step` divides k."""

    step: int
    one_k: tuple[str, str]
    rows_k: tuple[str, str]
    one: Callable[..., None]
    rows: Callable[..., None]
    most: int


_FORMATS: dict[type[Any], _Format] = {
    DenseWeight: _Format(
        8, ("gemv", "dense_gemv_bf16"), ("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm"),
        dense_gemv, dense_gemv_batchm, BF16_ROWS,
    ),
    Fp8Weight: _Format(
        16, ("w8a16_gemv", "w8a16_gemv"), ("w8a16_gemv", "spark_w8a16_gemv_batchm"), _fp8, _fp8_rows, _QUANTISED_ROWS
    ),
    Mxfp4Weight: _Format(
        32, ("spark_mxfp4_gemv", "spark_mxfp4_gemv"), ("spark_mxfp4_gemv", "spark_mxfp4_gemv_batchm"),
        mxfp4_gemv, mxfp4_gemv_batchm, _QUANTISED_ROWS,
    ),
}  # fmt: skip


class V4Projection:
    """The product with a weight [n, k]; it owns nothing.

    InvalidArgumentError for a weight that does not fit, or a k that the format's kernels do not take; a KernelSetError
    for a kernel that the set lacks. That for several rows may be missing: rows are then launched one by one.
    """

    def __init__(self, weight: V4Weight, n: int, k: int, gpu: GpuBackend, name: str) -> None:
        weight.check_shape(name, n, k)
        self.weight, self.n, self.k, self._gpu = weight, count(f"rows of {name}", n), k, gpu
        self._format = _FORMATS[type(weight)]
        if count(f"columns of {name}", k) % self._format.step:
            limit = f"a multiple of {self._format.step} is needed by a {type(weight).__name__}"
            raise InvalidArgumentError(f"columns of {name}", k, limit)
        self._one_k, self._rows_k = gpu.kernel(*self._format.one_k), gpu.try_kernel(*self._format.rows_k)
        self._w8_k = gpu.try_kernel(*_W8) if isinstance(weight, Fp8Weight) else KernelHandle(0)

    def run(self, x: DevicePtr, y: DevicePtr, rows: int, stream: StreamLike) -> None:
        """y BF16 [rows, n] of x BF16 [rows, k]; each row has the bits that it has alone. x and y lie apart."""
        if self._w8_k:
            self._run_w8(x, (self,), (y,), rows, stream)
            return
        fmt, n, k = self._format, self.n, self.k
        step = fmt.most if self._rows_k and count("rows", rows) > 1 else 1
        for first in range(0, rows, step):
            m = min(step, rows - first)
            source, target = x.offset(first * k * _BF16), y.offset(first * n * _BF16)
            if m > 1:
                fmt.rows(self._gpu, self._rows_k, source, self.weight, target, m, n, k, n, stream)
            else:
                fmt.one(self._gpu, self._one_k, source, self.weight, target, n, k, stream)

    def run_with(
        self, other: V4Projection, x: DevicePtr, y: DevicePtr, other_y: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        """`run`, and that of `other`, of as many columns, on the same x: in one launch where both are E4M3."""
        if self._w8_k and other._w8_k:
            self._run_w8(x, (self, other), (y, other_y), rows, stream)
            return
        self.run(x, y, rows, stream)
        other.run(x, other_y, rows, stream)

    def run_beside(
        self,
        other: V4Projection,
        x: DevicePtr,
        y: DevicePtr,
        rows: int,
        other_x: DevicePtr,
        other_y: DevicePtr,
        other_rows: int,
        stream: StreamLike,
    ) -> None:
        """`run`, and that of `other`, of as many columns, on rows of its own: in one launch where both are E4M3 and a
        launch takes the rows."""
        if not (self._w8_k and other._w8_k and max(rows, other_rows) <= W8_ROWS):
            self.run(x, y, rows, stream)
            other.run(other_x, other_y, other_rows, stream)
            return
        parts = [W8Projection(each._fp8(), to, each.n, each.n) for each, to in ((self, y), (other, other_y))]
        beside = (other_x, other_rows)
        spark_w8a16_rows(self._gpu, self._w8_k, x, parts, rows, self.k, stream, other=beside)

    def _run_w8(
        self,
        x: DevicePtr,
        projections: tuple[V4Projection, ...],
        outputs: tuple[DevicePtr, ...],
        rows: int,
        stream: StreamLike,
    ) -> None:
        for first in range(0, count("rows", rows), W8_ROWS):
            m, source = min(W8_ROWS, rows - first), x.offset(first * self.k * _BF16)
            parts = [
                W8Projection(each._fp8(), y.offset(first * each.n * _BF16), each.n, each.n)
                for each, y in zip(projections, outputs, strict=True)
            ]
            spark_w8a16_rows(self._gpu, self._w8_k, source, parts, m, self.k, stream)

    def _fp8(self) -> Fp8Weight:
        assert isinstance(self.weight, Fp8Weight)
        return self.weight


class V4GroupedProjection:
    """The product with a block-diagonal weight: `groups` matrices [n, k] below each other, BF16 or E4M3; it owns
    nothing. Errors as V4Projection; in E4M3 n is a multiple of 16, and the set has `spark_w8a16_rows`."""

    def __init__(
        self, weight: DenseWeight | Fp8Weight, groups: int, n: int, k: int, gpu: GpuBackend, name: str
    ) -> None:
        weight.check_shape(name, groups * n, k)
        self.weight, self.groups, self.n, self.k, self._gpu = weight, groups, n, k, gpu
        if isinstance(weight, DenseWeight):
            self._grouped_k = gpu.kernel("spark_v4_grouped_gemv", "spark_v4_grouped_gemv")
            return
        if n % TILE:
            raise InvalidArgumentError(f"rows of a group of {name}", n, f"a multiple of {TILE} is needed by E4M3")
        if k % _FORMATS[Fp8Weight].step:
            limit = f"a multiple of {_FORMATS[Fp8Weight].step} is needed by an Fp8Weight"
            raise InvalidArgumentError(f"columns of {name}", k, limit)
        self._grouped_k = gpu.kernel(*_W8)

    def run(self, x: DevicePtr, y: DevicePtr, rows: int, stream: StreamLike) -> None:
        """y BF16 [rows, groups, n] of x BF16 [rows, groups, k]; each row has the bits that it has alone."""
        groups, n, k, weight = self.groups, self.n, self.k, self.weight
        if isinstance(weight, DenseWeight):
            spark_v4_grouped_gemv(self._gpu, self._grouped_k, x, weight, y, rows, groups, n, k, stream)
            return
        for first in range(0, count("rows", rows), W8_ROWS):
            m, outputs = min(W8_ROWS, rows - first), groups * n
            source, target = x.offset(first * groups * k * _BF16), y.offset(first * outputs * _BF16)
            part = W8Projection(weight, target, outputs, outputs)
            spark_w8a16_rows(self._gpu, self._grouped_k, source, [part], m, k, stream, groups=groups)
