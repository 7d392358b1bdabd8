# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `gemm`. Any m, n and k, and no alignment beyond the element's, in both."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, weight_ptr

TILE = 16
PIPELINED_TILE = 128


def _launch(
    launch: KernelLaunch, a: DevicePtr, b: Weight, c: DevicePtr, m: int, n: int, k: int, stream: StreamLike
) -> None:
    launch.arg_ptr(a).arg_ptr(weight_ptr(b)).arg_ptr(c).arg_u32(m).arg_u32(n).arg_u32(count("k", k)).launch(stream)


def _grid(m: int, n: int, tile: int) -> tuple[int, int, int]:
    return div_ceil(count("n", n), tile), div_ceil(count("m", m), tile), 1


def dense_gemm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16, each output summed in ascending k.

    `kernel` is `gemm::dense_gemm_bf16`. A row's bits do not depend on m.
    """
    launch = KernelLaunch(gpu, kernel).grid(_grid(m, n, TILE)).block((TILE, TILE, 1))
    _launch(launch, input, weight, output, m, n, k, stream)


def dense_gemm_pipelined(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """As `dense_gemm`, on tensor cores, in their own order of the FP32 sum. `kernel` is
    `gemm::dense_gemm_bf16_pipelined`."""
    launch = KernelLaunch(gpu, kernel).grid(_grid(m, n, PIPELINED_TILE)).block((256, 1, 1))
    _launch(launch, input, weight, output, m, n, k, stream)
