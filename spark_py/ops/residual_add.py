# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `residual_add`: one thread an element."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count

BLOCK = 256


def residual_add(
    gpu: GpuBackend, kernel: KernelHandle, residual: DevicePtr, src: DevicePtr, n: int, stream: StreamLike
) -> None:
    """residual += src, BF16 [n]. `kernel` is `residual_add::bf16_residual_add`."""
    grid = (div_ceil(count("n", n), BLOCK), 1, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(residual).arg_ptr(src).arg_u32(n).launch(stream)


def sigmoid_gate_mul(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the kernel's parameter name
    gate: DevicePtr,
    output: DevicePtr,
    n: int,
    stream: StreamLike,
) -> None:
    """output = input * sigmoid(gate), BF16 [n] each. output may be input."""
    grid = (div_ceil(count("n", n), BLOCK), 1, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(input).arg_ptr(gate).arg_ptr(output).arg_u32(n).launch(stream)


def bf16_concat(
    gpu: GpuBackend, kernel: KernelHandle, a: DevicePtr, b: DevicePtr, out: DevicePtr, n: int, stream: StreamLike
) -> None:
    """out = [a | b]: BF16 [n] and [n] to [2n], bit for bit."""
    grid = (div_ceil(count("n", n), BLOCK), 1, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(a).arg_ptr(b).arg_ptr(out).arg_u32(n).launch(stream)
