# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `w8a16_gemv`: E4M3 weights with block scales, as checkpoints have them.

`weight` is the codes u8 [n, k]; `row_scale`, which has its name from Rust, is FP32 [ceil(n / 128), ceil(k / 128)] and
multiplies. k must be a multiple of 16, and input and weight lie on 16-byte addresses. A group of rows that starts at a
multiple of 128 is a weight by itself: offset both pointers. The GEMVs of `gemv_fp8w` take the same kinds of arguments
but scales of rows, so each launcher refuses the handle of another kernel.
"""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, weight_ptr
from .gemv_fp8w import chunks_of, rows_of
from .w4a16_gemv import only


def w8a16_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    row_scale: DevicePtr,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [n] = weight [n, k] . input [k], BF16. `kernel` is `w8a16_gemv::w8a16_gemv`."""
    only(kernel, "w8a16_gemv::w8a16_gemv")
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), 4), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight_ptr(weight)).arg_ptr(row_scale).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).launch(stream)


def w8a16_gemv_batchm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    row_scale: DevicePtr,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    out_stride: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16; rows of output are out_stride elements apart.

    m is 1 to 8; each row has the bits that `w8a16_gemv` gives. `kernel` is `w8a16_gemv::spark_w8a16_gemv_batchm`.
    """
    only(kernel, "w8a16_gemv::spark_w8a16_gemv_batchm")
    rows_of(m, n, out_stride)
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(n, 8), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight_ptr(weight)).arg_ptr(row_scale).arg_ptr(output)
    launch.arg_u32(m).arg_u32(n).arg_u32(k).arg_u32(out_stride).launch(stream)
