# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of `moe_expert_gemv::moe_weighted_sum_blend`: one thread an element."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .w4a16_gemv import only

BLOCK = 256


def moe_weighted_sum_blend(
    gpu: GpuBackend,
    kernel: KernelHandle,
    output: DevicePtr,
    expert_out: DevicePtr,
    expert_weights: DevicePtr,
    shared_out: DevicePtr,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_weight: Weight,
    hidden: int,
    top_k: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [hidden] = sum of expert_weights f32 [top_k] x expert_out [top_k, hidden] + g x shared_out [hidden].

    g = sigmoid(input [k] . gate_weight [k]), or 1 where gate_weight is NULL. BF16 but for the weights. k is a multiple
    of 8, input and gate_weight lie on 16-byte addresses; shared_out is always read.
    """
    only(kernel, "moe_expert_gemv::moe_weighted_sum_blend")
    multiple_of("k", k, 8, "the gate is read 16 bytes at a time")
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("hidden", hidden), BLOCK), 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(output).arg_ptr(expert_out).arg_ptr(expert_weights).arg_ptr(shared_out)
    launch.arg_ptr(input).arg_ptr(weight_ptr(gate_weight))
    launch.arg_u32(hidden).arg_u32(count("top_k", top_k)).arg_u32(k).launch(stream)
