# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_moe_silu_mul_clamped`: eight elements a thread."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count

BLOCK = 256
ELEMENTS = 2048


def silu_mul_clamped(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate: DevicePtr,
    up: DevicePtr,
    output: DevicePtr,
    n: int,
    limit: float,
    stream: StreamLike,
) -> None:
    """output = silu(min(gate, limit)) * min(max(up, -limit), limit), BF16 [n] each. output may be gate or up.

    limit (swiglu_limit, 10.0 in DeepSeek-V4) is finite and above 0; InvalidArgumentError otherwise.
    """
    if not 0.0 < limit < float("inf"):
        raise InvalidArgumentError("limit", limit, "a finite number above 0 is needed")
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), ELEMENTS), 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate).arg_ptr(up).arg_ptr(output).arg_u32(n).arg_f32(limit).launch(stream)
