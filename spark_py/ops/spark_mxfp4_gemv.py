# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_mxfp4_gemv`: MXFP4 weights, for one row and for several.

k must be a multiple of 32 (a block scale covers 32 values); input and packed codes lie on 16-byte addresses. The two
kernels differ in their grid, so each launcher refuses the handle of another kernel.
"""

from __future__ import annotations

from typing import Protocol

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of
from .gemv_fp8w import rows_of
from .w4a16_gemv import only

CHUNK = 32


class HasMxfp4Weight(Protocol):
    """An MXFP4 weight [n, k]: E2M1 codes [n, k / 2], the low nibble first, and E8M0 scales [n, k / 32]."""

    @property
    def weight(self) -> DevicePtr: ...

    @property
    def weight_scale(self) -> DevicePtr: ...


def chunks_of(k: int) -> int:
    """k, if it is a multiple of 32."""
    return multiple_of("k", k, CHUNK, f"a block scale covers {CHUNK} values")


def mxfp4_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasMxfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [n] = weight [n, k] . input [k], BF16. `kernel` is `spark_mxfp4_gemv::spark_mxfp4_gemv`."""
    only(kernel, "spark_mxfp4_gemv::spark_mxfp4_gemv")
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), 4), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).launch(stream)


def mxfp4_gemv_batchm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasMxfp4Weight,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    out_stride: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16; rows of output are out_stride elements apart.

    m is 1 to 8; each row has the bits that `mxfp4_gemv` gives. `kernel` is `spark_mxfp4_gemv::spark_mxfp4_gemv_batchm`.
    """
    only(kernel, "spark_mxfp4_gemv::spark_mxfp4_gemv_batchm")
    rows_of(m, n, out_stride)
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(n, 8), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_ptr(output)
    launch.arg_u32(m).arg_u32(n).arg_u32(k).arg_u32(out_stride).launch(stream)
