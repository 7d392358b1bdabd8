# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `moe_topk`: one block a token."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import count

BLOCK = 256
MAX_EXPERTS, MAX_TOP_K = 512, 32


def routed(num_experts: int, top_k: int) -> None:
    """InvalidArgumentError unless 1 to 512 experts, of which 1 to 32 are chosen."""
    if count("num_experts", num_experts) > MAX_EXPERTS:
        raise InvalidArgumentError("num_experts", num_experts, f"the kernel takes {MAX_EXPERTS} at most")
    if count("top_k", top_k) > MAX_TOP_K:
        raise InvalidArgumentError("top_k", top_k, f"the kernel takes {MAX_TOP_K} at most")
    if top_k > num_experts:
        raise InvalidArgumentError("top_k", top_k, f"there are {num_experts} experts to choose from")


def moe_topk_softmax(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_experts: int,
    top_k: int,
    normalize: bool,
    stream: StreamLike,
) -> None:
    """expert_indices u32 [k] and expert_weights f32 [k] of the k largest of gate_logits BF16 [E], largest first.

    Equal logits: the lowest index first. Weights are a softmax over all E experts; with `normalize` they are divided by
    their own sum. At most 512 experts, 32 of them chosen; InvalidArgumentError beyond.
    """
    routed(num_experts, top_k)
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_logits).arg_ptr(expert_indices).arg_ptr(expert_weights)
    launch.arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize)).launch(stream)


def moe_topk_softmax_batched(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_logits: DevicePtr,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    stream: StreamLike,
) -> None:
    """`moe_topk_softmax` of each of num_tokens rows, dense: [T, E] gives [T, k] and [T, k], the same bits a row."""
    routed(num_experts, top_k)
    launch = KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_logits).arg_ptr(expert_indices).arg_ptr(expert_weights)
    launch.arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize)).launch(stream)
