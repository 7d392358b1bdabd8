# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `gemv`: four outputs a block."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr


def dense_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [n] = weight [n, k] . input [k], BF16. `kernel` is `gemv::dense_gemv_bf16`.

    k must be a multiple of 8, and input and weight lie on 16-byte addresses: rows are read 16 bytes at a time.
    """
    multiple_of("k", k, 8, "each row starts on a 16-byte address")
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), 4), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight_ptr(weight)).arg_ptr(output).arg_u32(n).arg_u32(k).launch(stream)
