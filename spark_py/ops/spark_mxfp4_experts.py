# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_mxfp4_experts`: the MXFP4 experts that a router chose for rows, on tensor cores.

Tables and limits are those of `spark_moe_expert_mxfp4`; a row's bits do not depend on the others, and are not those of
its kernels.
"""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, dynamic_shared
from .spark_moe_expert_mxfp4 import HasMxfp4Tables
from .spark_moe_expert_silu_down_clamped import limit_of
from .spark_mxfp4_gemv import chunks_of
from .w4a16_gemv import only

OUTPUTS = 64
"""Outputs of a block."""
_MODULE = "spark_mxfp4_experts"


def _start(gpu: GpuBackend, kernel: KernelHandle, n: int, k: int, rows: int, slots: int, planes: int) -> KernelLaunch:
    """Geometry; where a launch gets less dynamic shared memory by itself than it needs, the limit is raised."""
    chunks_of(k)
    held = planes * 2048 * div_ceil(k, 1024)
    grid = (div_ceil(count("n", n), OUTPUTS), count("rows", rows), slots)
    return KernelLaunch(gpu, kernel).grid(grid).block((256, 1, 1)).shared_mem(dynamic_shared(gpu, kernel, held))


def mxfp4_experts_gate_up(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate: HasMxfp4Tables,
    gate_out: DevicePtr,
    up: HasMxfp4Tables,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int = 1,
) -> None:
    """gate_out and up_out BF16 [rows, top_k, n]: input BF16 [rows, k] through the gate and up weights [n, k] of experts
    expert_indices u32 [rows, top_k]. `kernel` is `spark_mxfp4_experts::spark_mxfp4_experts_gate_up`."""
    only(kernel, f"{_MODULE}::spark_mxfp4_experts_gate_up")
    launch = _start(gpu, kernel, n, k, rows, 2 * count("top_k", top_k), 1).arg_ptr(input)
    for tables, out in ((gate, gate_out), (up, up_out)):
        launch.arg_ptr(tables.packed_ptrs).arg_ptr(tables.scale_ptrs).arg_ptr(out)
    launch.arg_ptr(expert_indices).arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def mxfp4_experts_silu_down(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    down: HasMxfp4Tables,
    output: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    limit: float,
    stream: StreamLike,
    rows: int = 1,
) -> None:
    """silu(min(gate_out, limit)) * clamp(up_out, -limit, limit), BF16 [rows, top_k, k], through the down weights
    [n, k]: output BF16 [rows, top_k, n]. The activation stays FP32. `kernel` is
    `spark_mxfp4_experts::spark_mxfp4_experts_silu_down`."""
    only(kernel, f"{_MODULE}::spark_mxfp4_experts_silu_down")
    limit_of(limit)
    launch = _start(gpu, kernel, n, k, rows, count("top_k", top_k), 3).arg_ptr(gate_out).arg_ptr(up_out)
    launch.arg_ptr(down.packed_ptrs).arg_ptr(down.scale_ptrs).arg_ptr(output).arg_ptr(expert_indices)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).arg_f32(limit).launch(stream)
