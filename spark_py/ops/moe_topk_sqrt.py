# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `moe_topk_sqrt`: DeepSeek-V4's learned router, one block a token."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, finite, weight_ptr
from .moe_topk import BLOCK, routed


def moe_topk_sqrtsoftplus(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    bias: Weight,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_experts: int,
    top_k: int,
    normalize: bool,
    scaling_factor: float,
    stream: StreamLike,
) -> None:
    """expert_indices u32 [k] of the k largest of s + bias, s = sqrt(softplus(gate_logits)), largest first.

    gate_logits BF16 [E], bias FP32 [E]. Equal sums: the lowest index first. expert_weights FP32 [k] are s alone, with
    `normalize` divided by their sum, times scaling_factor. At most 512 experts, 32 of them chosen; InvalidArgumentError
    beyond.
    """
    routed(num_experts, top_k)
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_logits).arg_ptr(weight_ptr(bias)).arg_ptr(expert_indices).arg_ptr(expert_weights)
    launch.arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize))
    launch.arg_f32(finite("scaling_factor", scaling_factor)).launch(stream)


def moe_topk_sqrtsoftplus_batched(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    bias: Weight,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    scaling_factor: float,
    stream: StreamLike,
) -> None:
    """`moe_topk_sqrtsoftplus` of each of num_tokens rows, dense, with one bias: the same bits a row."""
    routed(num_experts, top_k)
    launch = KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_logits).arg_ptr(weight_ptr(bias)).arg_ptr(expert_indices).arg_ptr(expert_weights)
    launch.arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize))
    launch.arg_f32(finite("scaling_factor", scaling_factor)).launch(stream)
