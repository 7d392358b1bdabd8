# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `moe_shared_expert_fused_bf16`: eight outputs a block, a slot in grid y."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .w4a16_gemv import only

BLOCK = 128
OUTPUTS = 8
WHY_CHUNKS = "each row of an expert starts on a 16-byte address"


def moe_expert_gate_up_shared_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_weight_ptrs: DevicePtr,
    gate_out: DevicePtr,
    up_weight_ptrs: DevicePtr,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_weight: Weight,
    sh_gate_out: DevicePtr,
    sh_up_weight: Weight,
    sh_up_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """gate_out and up_out [top_k, n] = input [k] through the weights [n, k] of experts expert_indices u32 [top_k],
    sh_gate_out and sh_up_out [n] through the shared expert's. BF16; any k that is a multiple of 8.

    The tables u64 [E] hold the address of each expert's weights, on 16 bytes; an address of 0, or NULL for a shared
    weight, gives zeros.
    """
    only(kernel, "moe_shared_expert_fused_bf16::moe_expert_gate_up_shared_bf16")
    multiple_of("k", k, 8, WHY_CHUNKS)
    grid = (div_ceil(count("n", n), OUTPUTS), count("top_k", top_k) + 1, 2)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1)).arg_ptr(input)
    launch.arg_ptr(gate_weight_ptrs).arg_ptr(gate_out).arg_ptr(up_weight_ptrs).arg_ptr(up_out).arg_ptr(expert_indices)
    launch.arg_ptr(weight_ptr(sh_gate_weight)).arg_ptr(sh_gate_out).arg_ptr(weight_ptr(sh_up_weight)).arg_ptr(sh_up_out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def moe_expert_silu_down_shared_bf16(
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
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """output [top_k, n] = silu(gate_out) * up_out [top_k, k] through the weights [n, k] of the chosen experts,
    sh_down_out [n] from sh_gate_in and sh_up_in [k] through the shared expert's. No clamp; the activation stays FP32.

    Tables, zeros and k as `moe_expert_gate_up_shared_bf16`.
    """
    only(kernel, "moe_shared_expert_fused_bf16::moe_expert_silu_down_shared_bf16")
    multiple_of("k", k, 8, WHY_CHUNKS)
    grid = (div_ceil(count("n", n), OUTPUTS), count("top_k", top_k) + 1, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(gate_out).arg_ptr(up_out).arg_ptr(weight_ptrs).arg_ptr(output).arg_ptr(expert_indices)
    launch.arg_ptr(sh_gate_in).arg_ptr(sh_up_in).arg_ptr(weight_ptr(sh_down_weight)).arg_ptr(sh_down_out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)
