# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `w4a16_gemv_fused`: two NVFP4 projections of one row in one launch."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count
from .w4a16_gemv import HasNvfp4Weight, chunks_of, only


def w4a16_gemv_dual(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight1: HasNvfp4Weight,
    output1: DevicePtr,
    weight2: HasNvfp4Weight,
    output2: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output1 [n] and output2 [n] = weight1 and weight2 [n, k] . input [k], each with the bits of `w4a16_gemv`.

    `kernel` is `w4a16_gemv_fused::w4a16_gemv_dual`. k must be a multiple of 16; alignments as of `w4a16_gemv`.
    """
    only(kernel, "w4a16_gemv_fused::w4a16_gemv_dual")
    _dual(gpu, kernel, input, weight1, output1, weight2, output2, n, k, 4).launch(stream)


def w4a16_gemv_dual_sw(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight1: HasNvfp4Weight,
    output1: DevicePtr,
    weight2: HasNvfp4Weight,
    output2: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """`w4a16_gemv_dual` by a warp an output. `kernel` is `w4a16_gemv_fused::w4a16_gemv_dual_sw`."""
    only(kernel, "w4a16_gemv_fused::w4a16_gemv_dual_sw")
    _dual(gpu, kernel, input, weight1, output1, weight2, output2, n, k, 8).launch(stream)


def _dual(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight1: HasNvfp4Weight,
    output1: DevicePtr,
    weight2: HasNvfp4Weight,
    output2: DevicePtr,
    n: int,
    k: int,
    outputs: int,
) -> KernelLaunch:
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), outputs), 1, 2)).block((256, 1, 1)).arg_ptr(input)
    for weight, output in ((weight1, output1), (weight2, output2)):
        launch.arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_f32(weight.weight_scale_2).arg_ptr(output)
    return launch.arg_u32(n).arg_u32(k)
