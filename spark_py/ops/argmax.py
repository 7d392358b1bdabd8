# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `argmax`: one block of 1024 threads a row."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import count

BLOCK = 1024


def _rows(gpu: GpuBackend, kernel: KernelHandle, rows: int, n: int, row_stride: int) -> KernelLaunch:
    if count("row_stride", row_stride) < count("n", n):
        raise InvalidArgumentError("row_stride", row_stride, f"at least n = {n} is needed")
    return KernelLaunch(gpu, kernel).grid((count("rows", rows), 1, 1)).block((BLOCK, 1, 1))


def argmax_bf16(
    gpu: GpuBackend, kernel: KernelHandle, logits: DevicePtr, out: DevicePtr, n: int, stream: StreamLike
) -> None:
    """out u32 [1] = the index of the largest of logits BF16 [n]; equal maxima give the lowest index."""
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(logits).arg_ptr(out).arg_u32(count("n", n)).launch(stream)


def argmax_bf16_batch(
    gpu: GpuBackend,
    kernel: KernelHandle,
    logits: DevicePtr,
    out: DevicePtr,
    rows: int,
    n: int,
    row_stride: int,
    stream: StreamLike,
) -> None:
    """out u32 [rows]: `argmax_bf16` of the first n logits of each row; rows are row_stride elements apart."""
    launch = _rows(gpu, kernel, rows, n, row_stride)
    launch.arg_ptr(logits).arg_ptr(out).arg_u32(n).arg_u32(row_stride).launch(stream)


def argmax_bf16_batch_lp(
    gpu: GpuBackend,
    kernel: KernelHandle,
    logits: DevicePtr,
    out: DevicePtr,
    out_logprob: DevicePtr,
    rows: int,
    n: int,
    row_stride: int,
    stream: StreamLike,
) -> None:
    """As `argmax_bf16_batch`, and out_logprob f32 [rows] = ln softmax of each winner; NaN where it is undefined
    (a NaN in the row, two or more +Inf, nothing above -Inf), which the engine's own kernel reports as 0.0."""
    launch = _rows(gpu, kernel, rows, n, row_stride)
    launch.arg_ptr(logits).arg_ptr(out).arg_ptr(out_logprob).arg_u32(n).arg_u32(row_stride).launch(stream)
