# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `moe_silu_mul`: one thread an element."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count

BLOCK = 256


def silu_mul(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate: DevicePtr,
    up: DevicePtr,
    output: DevicePtr,
    n: int,
    stream: StreamLike,
) -> None:
    """output = silu(gate) * up, BF16 [n] each, without a clamp. output may be gate."""
    grid = (div_ceil(count("n", n), BLOCK), 1, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(gate).arg_ptr(up).arg_ptr(output).arg_u32(n).launch(stream)
