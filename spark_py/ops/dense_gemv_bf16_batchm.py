# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `dense_gemv_bf16_batchm`: four outputs of every row a block."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr

MAX_ROWS = 16


def dense_gemv_batchm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    out_stride: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16; rows of output are out_stride elements apart.

    `kernel` is `dense_gemv_bf16_batchm::dense_gemv_bf16_batchm`; each row has the bits that `gemv.dense_gemv` gives.
    m is at most 16, k a multiple of 8, input and weight lie on 16-byte addresses.
    """
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, 8, "each row starts on a 16-byte address")
    if count("out_stride", out_stride) < count("n", n):
        raise InvalidArgumentError("out_stride", out_stride, f"at least n = {n} is needed")
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(n, 4), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight_ptr(weight)).arg_ptr(output)
    launch.arg_u32(m).arg_u32(n).arg_u32(k).arg_u32(out_stride).launch(stream)
