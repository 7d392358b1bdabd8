# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_step_bf16`: a mixture of BF16 experts in two launches, for one row and several."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, dynamic_shared, multiple_of, weight_ptr
from .moe_topk import routed

BLOCK = 256
OUTPUTS = BLOCK // 32
"""Outputs that a block makes at a time, one a warp."""
RESIDENT = 264
"""Blocks of the gate and up projection of a row that run at the same time on the GPU that this was tuned on, two on
each of 132 multiprocessors. Bits do not depend on it."""
RING = 65536
"""Bytes of dynamic shared memory for the rings of a block."""
GATE_UP_SHARED, DOWN_SHARED = 26624, 29632
"""Those that either kernel may have beside: with all that it has a block fits where shared memory is smallest."""
WHY_CHUNKS = "each row starts on a 16-byte address"


def fits(n: int, k: int, top_k: int) -> bool:
    """Whether experts of width n for a model of width k fit into shared memory."""
    return 2 * k <= GATE_UP_SHARED and 4 * (top_k + 1) * n <= DOWN_SHARED


def _held(gpu: GpuBackend, kernel: KernelHandle, k: int, nbytes: int, limit: int) -> int:
    """Dynamic shared memory of a launch, for which the kernel's limit is raised; GeometryError says so where the device
    has less."""
    if nbytes > limit:
        raise InvalidArgumentError("k", k, f"{nbytes} bytes of shared memory, {limit} at most are taken")
    return dynamic_shared(gpu, kernel, RING + nbytes)


def spark_moe_route_gate_up_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_logits: DevicePtr,
    gate_weight_ptrs: DevicePtr,
    up_weight_ptrs: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_weight: Weight,
    sh_up_weight: Weight,
    activation: DevicePtr,
    rows: int,
    n: int,
    k: int,
    num_experts: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """expert_indices u32 [T, top_k] as `moe_topk_softmax` of gate_logits [T, E], and activation FP32 [T, top_k + 1, n],
    silu(g) * u of each chosen expert and, last, of the shared one, where g and u are those of
    `moe_expert_gate_up_shared_bf16` of input [T, k]. Tables have E entries.

    k is a multiple of 8, 13312 at most; input and weights lie on 16-byte addresses; E is 512 at most, top_k 32.
    """
    routed(num_experts, top_k)
    held = _held(gpu, kernel, k, 2 * multiple_of("k", k, 8, WHY_CHUNKS), GATE_UP_SHARED)
    # As many blocks as give each warp the same number of outputs, as long as they all run at once.
    blocks = min(RESIDENT, div_ceil((top_k + 1) * count("n", n), OUTPUTS))
    grid = (blocks, count("rows", rows), 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1)).shared_mem(held)
    launch.arg_ptr(input).arg_ptr(gate_logits).arg_ptr(gate_weight_ptrs).arg_ptr(up_weight_ptrs)
    launch.arg_ptr(expert_indices)
    launch.arg_ptr(weight_ptr(sh_gate_weight)).arg_ptr(weight_ptr(sh_up_weight)).arg_ptr(activation)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_experts).arg_u32(top_k).launch(stream)


def spark_moe_down_blend_bf16(
    gpu: GpuBackend,
    kernel: KernelHandle,
    activation: DevicePtr,
    weight_ptrs: DevicePtr,
    gate_logits: DevicePtr,
    expert_indices: DevicePtr,
    sh_down_weight: Weight,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_weight: Weight,
    output: DevicePtr,
    rows: int,
    n: int,
    k: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    stream: StreamLike,
) -> None:
    """output [T, n] = `moe_weighted_sum_blend` of activation FP32 [T, top_k + 1, k] through the down weights [n, k] of
    the chosen experts and the shared one, each product rounded to BF16, and of the weights that `moe_topk_softmax`
    gives them; expert_indices are those of `spark_moe_route_gate_up_bf16` of gate_logits [T, E];
    input [T, n], gate_weight [n] or NULL.

    k is a multiple of 8, and with a gate n too; (top_k + 1) * k is 7408 at most; activation, weights, input and
    gate_weight lie on 16-byte addresses. The table has E entries.
    """
    routed(num_experts, top_k)
    held = _held(gpu, kernel, k, 4 * (top_k + 1) * multiple_of("k", k, 8, WHY_CHUNKS), DOWN_SHARED)
    gate = weight_ptr(gate_weight)
    if not gate.is_null:
        multiple_of("n", n, 8, "the gate is read 16 bytes at a time")
    grid = (div_ceil(count("n", n), OUTPUTS), count("rows", rows), 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1)).shared_mem(held)
    launch.arg_ptr(activation).arg_ptr(weight_ptrs).arg_ptr(gate_logits).arg_ptr(expert_indices)
    launch.arg_ptr(weight_ptr(sh_down_weight)).arg_ptr(input).arg_ptr(gate).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize)).launch(stream)
