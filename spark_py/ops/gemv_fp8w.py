# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `gemv_fp8w`, and `quantize_to_fp8`, which makes the weight that its GEMVs read.

k of a GEMV must be a multiple of 16, and input and weight lie on 16-byte addresses. The GEMVs of `w8a16_gemv` take the
same kinds of arguments but block scales, so each launcher refuses the handle of another kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .w4a16_gemv import only

CHUNK = 16
MAX_ROWS = 8


class HasFp8Rows(Protocol):
    """E4M3 codes [n, k] and an FP32 scale a row [n], as Rust's `Fp8DenseWeight`."""

    @property
    def weight(self) -> DevicePtr: ...

    @property
    def row_scale(self) -> DevicePtr: ...


@dataclass(frozen=True, slots=True)
class Fp8RowWeight:
    """An FP8 tensor made at run time, with the fields of `Fp8DenseWeight`; whoever asked for it frees it.

    `weight`: E4M3 codes u8 [n, k]; `row_scale`: FP32 [n]. w = value * row_scale of its row. The block-scaled FP8 of
    checkpoints is another thing, for `w8a16_gemv`.
    """

    weight: DevicePtr
    row_scale: DevicePtr
    n: int
    k: int

    def free(self, gpu: GpuBackend) -> None:
        """Free both buffers."""
        gpu.free(self.weight)
        gpu.free(self.row_scale)


def chunks_of(k: int) -> int:
    """k, if it is a multiple of 16."""
    return multiple_of("k", k, CHUNK, "each row is read 16 bytes at a time")


def rows_of(m: int, n: int, out_stride: int) -> None:
    """InvalidArgumentError unless a kernel for several rows takes m rows of n outputs, out_stride apart."""
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    if count("out_stride", out_stride) < count("n", n):
        raise InvalidArgumentError("out_stride", out_stride, f"at least n = {n} is needed")


def quantize_bf16_to_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    output: DevicePtr,
    row_scales: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output u8 [n, k] and row_scales FP32 [n] of BF16 input [n, k], any k. `kernel` is
    `gemv_fp8w::quantize_bf16_to_fp8`."""
    only(kernel, "gemv_fp8w::quantize_bf16_to_fp8")
    launch = KernelLaunch(gpu, kernel).grid((count("n", n), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(output).arg_ptr(row_scales).arg_u32(n).arg_u32(count("k", k)).launch(stream)


def dense_gemv_fp8w(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasFp8Rows,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [n] = weight [n, k] . input [k], BF16. `kernel` is `gemv_fp8w::dense_gemv_fp8w`."""
    only(kernel, "gemv_fp8w::dense_gemv_fp8w")
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), 4), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight.weight).arg_ptr(weight.row_scale).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).launch(stream)


def dense_gemv_fp8w_batchm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasFp8Rows,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    out_stride: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16; rows of output are out_stride elements apart.

    m is 1 to 8; each row has the bits that `dense_gemv_fp8w` gives. `kernel` is
    `gemv_fp8w::spark_dense_gemv_fp8w_batchm`.
    """
    only(kernel, "gemv_fp8w::spark_dense_gemv_fp8w_batchm")
    rows_of(m, n, out_stride)
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(n, 8), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight.weight).arg_ptr(weight.row_scale).arg_ptr(output)
    launch.arg_u32(m).arg_u32(n).arg_u32(k).arg_u32(out_stride).launch(stream)


def quantize_to_fp8(
    gpu: GpuBackend, kernel: KernelHandle, weight: Weight, n: int, k: int, stream: StreamLike
) -> Fp8RowWeight:
    """A BF16 weight [n, k] as FP8 with a scale a row, in new memory; waits until it is done. k % 16 == 0.

    row_scale = largest magnitude of the row / 448, in FP32, or 1 for a row of zeros. Refused with InvalidArgumentError:
    a row with an infinity; a row whose largest magnitude is above 0 but so small that its scale has no finite
    reciprocal. A NaN is passed over by the maximum and stays NaN, so that every product with its row is NaN. `kernel`
    is `gemv_fp8w::quantize_bf16_to_fp8`.
    """
    chunks_of(k)
    source = weight_ptr(weight)
    codes = gpu.alloc(count("n", n) * k, "fp8 weight")
    try:
        scales = gpu.alloc(4 * n, "fp8 row scales")
        try:
            quantize_bf16_to_fp8(gpu, kernel, source, codes, scales, n, k, stream)
            made = np.empty(n, np.float32)
            gpu.copy_d2h_on_stream(scales, made, stream)
            _check_scales(made)
        except BaseException:
            gpu.free(scales)
            raise
    except BaseException:
        gpu.free(codes)
        raise
    return Fp8RowWeight(codes, scales, n, k)


def _check_scales(scales: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    with np.errstate(all="ignore"):
        usable = np.isfinite(scales) & np.isfinite(np.float32(1) / scales)
    if not usable.all():
        row = int(np.argmin(usable))
        raise InvalidArgumentError(
            f"scale of row {row} of weight",
            float(scales[row]),
            "largest magnitude / 448 has to be finite, and so has its reciprocal in FP32",
        )
