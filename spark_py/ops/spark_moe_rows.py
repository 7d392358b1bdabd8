# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_rows`: the experts of several rows in a launch, each row as if it were alone."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .moe_shared_expert_fused_bf16 import BLOCK, OUTPUTS, WHY_CHUNKS
from .moe_weighted_sum_blend import BLOCK as BLEND_BLOCK
from .w4a16_gemv import only


def spark_moe_expert_gate_up_shared_bf16_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - as the kernel for one row
    gate_weight_ptrs: DevicePtr,
    gate_out: DevicePtr,
    up_weight_ptrs: DevicePtr,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_weight: Weight,
    sh_gate_out: DevicePtr,
    sh_up_weight: Weight,
    sh_up_out: DevicePtr,
    rows: int,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """`moe_expert_gate_up_shared_bf16` of each of `rows` rows, dense: input [T, k], expert_indices [T, top_k], gate_out
    and up_out [T, top_k, n], sh_gate_out and sh_up_out [T, n]."""
    only(kernel, "spark_moe_rows::spark_moe_expert_gate_up_shared_bf16_rows")
    multiple_of("k", k, 8, WHY_CHUNKS)
    grid = (div_ceil(count("n", n), OUTPUTS), count("rows", rows), 2 * (count("top_k", top_k) + 1))
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1)).arg_ptr(input)
    launch.arg_ptr(gate_weight_ptrs).arg_ptr(gate_out).arg_ptr(up_weight_ptrs).arg_ptr(up_out).arg_ptr(expert_indices)
    launch.arg_ptr(weight_ptr(sh_gate_weight)).arg_ptr(sh_gate_out).arg_ptr(weight_ptr(sh_up_weight)).arg_ptr(sh_up_out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def spark_moe_expert_silu_down_shared_bf16_rows(
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
    stream: StreamLike,
) -> None:
    """`moe_expert_silu_down_shared_bf16` of each of `rows` rows, dense: gate_out and up_out [T, top_k, k], output
    [T, top_k, n], expert_indices [T, top_k], sh_gate_in and sh_up_in [T, k], sh_down_out [T, n]."""
    only(kernel, "spark_moe_rows::spark_moe_expert_silu_down_shared_bf16_rows")
    multiple_of("k", k, 8, WHY_CHUNKS)
    grid = (div_ceil(count("n", n), OUTPUTS), count("rows", rows), count("top_k", top_k) + 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_out).arg_ptr(up_out).arg_ptr(weight_ptrs).arg_ptr(output).arg_ptr(expert_indices)
    launch.arg_ptr(sh_gate_in).arg_ptr(sh_up_in).arg_ptr(weight_ptr(sh_down_weight)).arg_ptr(sh_down_out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def spark_moe_weighted_sum_blend_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    output: DevicePtr,
    expert_out: DevicePtr,
    expert_weights: DevicePtr,
    shared_out: DevicePtr,
    input: DevicePtr,  # noqa: A002 - as the kernel for one row
    gate_weight: Weight,
    rows: int,
    hidden: int,
    top_k: int,
    k: int,
    stream: StreamLike,
) -> None:
    """`moe_weighted_sum_blend` of each of `rows` rows, dense: expert_out [T, top_k, hidden], expert_weights [T, top_k],
    shared_out and output [T, hidden], input [T, k]; gate_weight [k] is one for all, or NULL."""
    only(kernel, "spark_moe_rows::spark_moe_weighted_sum_blend_rows")
    multiple_of("k", k, 8, "the gate is read 16 bytes at a time")
    grid = (div_ceil(count("hidden", hidden), BLEND_BLOCK), count("rows", rows), 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLEND_BLOCK, 1, 1))
    launch.arg_ptr(output).arg_ptr(expert_out).arg_ptr(expert_weights).arg_ptr(shared_out)
    launch.arg_ptr(input).arg_ptr(weight_ptr(gate_weight))
    launch.arg_u32(hidden).arg_u32(count("top_k", top_k)).arg_u32(k).launch(stream)
