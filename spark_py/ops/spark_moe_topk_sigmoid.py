# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_topk_sigmoid`: the router of DeepSeek-V3 and MiniMax-M2, one warp a token."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, finite, weight_ptr
from .moe_topk import routed

BLOCK = 32
MAX_GROUPS = 32


def grouped(num_experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    """InvalidArgumentError unless the experts are n_group runs of at least two, 32 at most, and those of topk_group
    runs are enough for top_k. One group is no grouping, whatever its size."""
    if count("n_group", n_group) > MAX_GROUPS:
        raise InvalidArgumentError("n_group", n_group, f"the kernel takes {MAX_GROUPS} at most")
    if num_experts % n_group:
        raise InvalidArgumentError("n_group", n_group, f"{num_experts} experts are no multiple of it")
    if n_group > 1 and num_experts // n_group < 2:
        raise InvalidArgumentError("n_group", n_group, f"a group of {num_experts} experts needs two of them")
    if count("topk_group", topk_group) > n_group:
        raise InvalidArgumentError("topk_group", topk_group, f"there are {n_group} groups to choose from")
    if top_k > (reach := topk_group * (num_experts // n_group)):
        raise InvalidArgumentError("top_k", top_k, f"the {topk_group} groups that are chosen have {reach} experts")


def spark_moe_topk_sigmoid(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    correction_bias: Weight | None,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
    stream: StreamLike,
) -> None:
    """expert_indices u32 [k] of the k largest of s + correction_bias, s = sigmoid(gate_logits), largest first.

    gate_logits BF16 [E], correction_bias FP32 [E] or None. With n_group > 1 only experts of the topk_group best of
    n_group runs are chosen, a run being worth the sum of its two largest s + correction_bias; n_group 1 and topk_group
    1: no groups. Equal sums: the lowest index first. expert_weights FP32 [k] are s alone, with `normalize` divided by
    their sum + 1e-20, times scaling_factor. At most 512 experts, 32 of them chosen, 32 groups; InvalidArgumentError
    beyond.
    """
    _launch(
        gpu, kernel, gate_logits, correction_bias, expert_indices, expert_weights, 1, num_experts, top_k, n_group,
        topk_group, normalize, scaling_factor, stream,
    )  # fmt: skip


def spark_moe_topk_sigmoid_batched(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    correction_bias: Weight | None,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
    stream: StreamLike,
) -> None:
    """`spark_moe_topk_sigmoid` of each of num_tokens rows, dense, with one bias: the same bits a row."""
    _launch(
        gpu, kernel, gate_logits, correction_bias, expert_indices, expert_weights, count("num_tokens", num_tokens),
        num_experts, top_k, n_group, topk_group, normalize, scaling_factor, stream,
    )  # fmt: skip


def _launch(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    correction_bias: Weight | None,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    rows: int,
    num_experts: int,
    top_k: int,
    n_group: int,
    topk_group: int,
    normalize: bool,
    scaling_factor: float,
    stream: StreamLike,
) -> None:
    routed(num_experts, top_k)
    grouped(num_experts, top_k, n_group, topk_group)
    bias = DevicePtr.NULL if correction_bias is None else weight_ptr(correction_bias)
    launch = KernelLaunch(gpu, kernel).grid((rows, 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_logits).arg_ptr(bias).arg_ptr(expert_indices).arg_ptr(expert_weights)
    launch.arg_u32(num_experts).arg_u32(top_k).arg_u32(n_group).arg_u32(topk_group).arg_u32(int(normalize))
    launch.arg_f32(finite("scaling_factor", scaling_factor)).launch(stream)
