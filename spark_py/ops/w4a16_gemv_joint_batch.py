# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `w4a16_gemv` for joint NVFP4 projections of two and three rows.

k must be a multiple of 16; input lies on a 16-byte address and the packed codes on 4-byte ones. The kernel's name says
how many rows it computes.
"""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count
from .w4a16_gemv import HasNvfp4Weight, chunks_of, only

OUTPUTS, BLOCK = 4, 256
QG = tuple(f"w4a16_gemv::w4a16_gemv_qg_batch{rows}" for rows in (2, 3))
DUAL = tuple(f"w4a16_gemv::w4a16_gemv_dual_batch{rows}" for rows in (2, 3))


def w4a16_gemv_qg_batch(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    num_heads: int,
    head_dim: int,
    stream: StreamLike,
) -> None:
    """output [rows, 2, num_heads, head_dim]: each row of input [rows, k] as `w4a16_gemv_qg` has it, bit for bit.

    weight is [num_heads, 2, head_dim, k], so n = 2 * num_heads * head_dim. `kernel` is one of `QG`.
    """
    only(kernel, *QG)
    chunks_of(k)
    both = 2 * count("num_heads", num_heads) * count("head_dim", head_dim)
    if count("n", n) != both:
        raise InvalidArgumentError("n", n, f"2 * num_heads * head_dim = {both} is needed")
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(n, OUTPUTS), 1, 1)).block((BLOCK, 1, 1)).arg_ptr(input)
    launch.arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_f32(weight.weight_scale_2).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_heads).arg_u32(head_dim).launch(stream)


def w4a16_gemv_dual_batch(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight0: HasNvfp4Weight,
    output0: DevicePtr,
    weight1: HasNvfp4Weight,
    output1: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output0 and output1 [rows, n] = weight0 and weight1 [n, k] . input [rows, k], in the order of sums of
    `w4a16_gemv_qg`, which is not that of `w4a16_gemv_dual`. `kernel` is one of `DUAL`."""
    only(kernel, *DUAL)
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), OUTPUTS), 1, 2)).block((BLOCK, 1, 1))
    launch.arg_ptr(input)
    for weight, output in ((weight0, output0), (weight1, output1)):
        launch.arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_f32(weight.weight_scale_2).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).launch(stream)
