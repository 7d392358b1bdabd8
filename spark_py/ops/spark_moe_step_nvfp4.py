# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_step_nvfp4`: a mixture of NVFP4 experts in two launches, for one row and several."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .moe_shared_expert_fused import HasNvfp4Tables, add_shared, add_tables
from .moe_topk import routed
from .spark_moe_step_bf16 import RESIDENT
from .w4a16_gemv import HasNvfp4Weight

BLOCK = 512
DOWN_OUTPUTS, TILE, TILES = 16, 8, 16
"""Outputs of a block of the down projection, those of a tile of the other, and the tiles that a block of it has at
most."""
STEP = 32
WHY_STEP = "two blocks of a row are read at once"
SLICE, SLICE_BYTES = 128, 512
"""Inputs of a slice of the down projection, and the shared memory that they take."""
SHARED_LIMIT = 36864
"""Bytes of dynamic shared memory that a launch gets by itself, beside what the kernel has."""


def fits(n: int, k: int, top_k: int) -> bool:
    """Whether experts of width n for a model of width k are taken."""
    return n % STEP == 0 and k % STEP == 0 and (top_k + 1) * div_ceil(n, SLICE) * SLICE_BYTES <= SHARED_LIMIT


def spark_moe_route_gate_up_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_logits: DevicePtr,
    gate: HasNvfp4Tables,
    up: HasNvfp4Tables,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    sh_gate: HasNvfp4Weight | None,
    sh_up: HasNvfp4Weight | None,
    activation: DevicePtr,
    rows: int,
    n: int,
    k: int,
    num_experts: int,
    top_k: int,
    normalize: bool,
    stream: StreamLike,
) -> None:
    """expert_indices u32 and expert_weights f32 [T, top_k] as `moe_topk_softmax` of gate_logits [T, E], and activation
    FP32 [T, top_k + 1, n] = silu(g) * u of each chosen expert and, last, of the shared one, where g and u are input
    [T, k] through its gate and up weights, in FP32. Tables have E entries.

    k is a multiple of 32; input and codes lie on 16-byte addresses, scales on even ones; E is 512 at most, top_k 32.
    """
    routed(num_experts, top_k)
    multiple_of("k", k, STEP, WHY_STEP)
    tiles = (top_k + 1) * div_ceil(count("n", n), TILE)
    blocks = max(min(RESIDENT, tiles), div_ceil(tiles, TILES))
    launch = KernelLaunch(gpu, kernel).grid((blocks, count("rows", rows), 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(input).arg_ptr(gate_logits)
    add_tables(launch, gate)
    add_tables(launch, up)
    launch.arg_ptr(expert_indices).arg_ptr(expert_weights)
    add_shared(launch, sh_gate)
    add_shared(launch, sh_up)
    launch.arg_ptr(activation)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize)).launch(stream)


def spark_moe_down_blend_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    activation: DevicePtr,
    down: HasNvfp4Tables,
    expert_indices: DevicePtr,
    expert_weights: DevicePtr,
    sh_down: HasNvfp4Weight | None,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_weight: Weight,
    output: DevicePtr,
    rows: int,
    n: int,
    k: int,
    num_experts: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """output [T, n] = the sum of expert_weights [T, top_k] times activation FP32 [T, top_k + 1, k] through the down
    weights [n, k] of the chosen experts, and of sigmoid(input [T, n] . gate_weight [n]) times the shared one's, which
    is 1 for a gate_weight of NULL.

    k is a multiple of 32, and with a gate n one of 8; all slices of 128 k of a row's slots are 72 at most. Codes, input
    and gate_weight lie on 16-byte addresses, scales on even ones. Tables have E entries.
    """
    routed(num_experts, top_k)
    multiple_of("k", k, STEP, WHY_STEP)
    held = (top_k + 1) * div_ceil(k, SLICE) * SLICE_BYTES
    if held > SHARED_LIMIT:
        raise InvalidArgumentError("k", k, f"{held} bytes of shared memory, {SHARED_LIMIT} at most are taken")
    gate = weight_ptr(gate_weight)
    if not gate.is_null:
        multiple_of("n", n, 8, "the gate is read 16 bytes at a time")
    grid = (div_ceil(count("n", n), DOWN_OUTPUTS), count("rows", rows), 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1)).shared_mem(held).arg_ptr(activation)
    add_tables(launch, down)
    launch.arg_ptr(expert_indices).arg_ptr(expert_weights)
    add_shared(launch, sh_down)
    launch.arg_ptr(input).arg_ptr(gate).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_experts).arg_u32(top_k).launch(stream)
