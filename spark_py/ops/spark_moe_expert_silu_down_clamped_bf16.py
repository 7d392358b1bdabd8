# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_moe_expert_silu_down_clamped_bf16`: `spark_moe_expert_silu_down_shared_bf16_rows` with
DeepSeek-V4's limit."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .moe_shared_expert_fused_bf16 import BLOCK, OUTPUTS, WHY_CHUNKS
from .spark_moe_expert_silu_down_clamped import limit_of
from .w4a16_gemv import only


def moe_expert_silu_down_clamped_bf16_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    weight_ptrs: DevicePtr,
    output: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_in: DevicePtr,
    sh_up_in: DevicePtr,
    sh_down_weight: Weight,
    sh_down_out: DevicePtr,
    rows: int,
    n: int,
    k: int,
    top_k: int,
    limit: float,
    stream: StreamLike,
) -> None:
    """silu(min(gate_out, limit)) * clamp(up_out, -limit, limit), BF16 [T, top_k, k], through the down projections
    [n, k] of experts expert_indices u32 [T, top_k]: output BF16 [T, top_k, n]; likewise sh_gate_in and sh_up_in BF16
    [T, k] to sh_down_out [T, n].

    The activation stays FP32. `kernel` is
    `spark_moe_expert_silu_down_clamped_bf16::spark_moe_expert_silu_down_clamped_bf16_rows`; table, zeros and k as
    `moe_expert_gate_up_shared_bf16`. limit (swiglu_limit, 10.0 in DeepSeek-V4) is finite and above 0.
    """
    only(kernel, "spark_moe_expert_silu_down_clamped_bf16::spark_moe_expert_silu_down_clamped_bf16_rows")
    limit_of(limit)
    multiple_of("k", k, 8, WHY_CHUNKS)
    grid = (div_ceil(count("n", n), OUTPUTS), count("rows", rows), count("top_k", top_k) + 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_out).arg_ptr(up_out).arg_ptr(weight_ptrs).arg_ptr(output).arg_ptr(expert_indices)
    launch.arg_ptr(sh_gate_in).arg_ptr(sh_up_in).arg_ptr(weight_ptr(sh_down_weight)).arg_ptr(sh_down_out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).arg_f32(limit).launch(stream)
