# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_step_nvfp4`: a mixture of NVFP4 experts in two launches, for one row and several."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr
from .moe_shared_expert_fused import HasNvfp4Tables, add_shared, add_tables
from .moe_topk import routed
from .w4a16_gemv import HasNvfp4Weight

GATE_UP_BLOCK, DOWN_BLOCK = 256, 512
DOWN_OUTPUTS, TILE, TILES = 16, 8, 16
"""Outputs of a block of the down projection, those of a tile of the other, and the tiles that a block of it has at
most."""
RESIDENT = 264
"""Blocks of the gate and up projection of a row that run at the same time on the GPU that this was tuned on, two on
each of 132 multiprocessors. Bits do not depend on it."""
STEP = 32
WHY_STEP = "two blocks of a row are read at once"
SLICE, SLICE_BYTES = 128, 512
"""Inputs of a slice of the down projection, and the shared memory that they take."""
GATE_UP_SHARED, DOWN_SHARED = 24320, 36864
"""Bytes of dynamic shared memory that a launch of either gets by itself, beside what the kernel has."""


def fits(n: int, k: int, top_k: int) -> bool:
    """Whether experts of width n for a model of width k are taken."""
    slices = (top_k + 1) * div_ceil(n, SLICE)
    return n % STEP == 0 and k % STEP == 0 and 2 * k <= GATE_UP_SHARED and slices * SLICE_BYTES <= DOWN_SHARED


def _held(k: int, nbytes: int, limit: int) -> int:
    if nbytes > limit:
        raise InvalidArgumentError("k", k, f"{nbytes} bytes of shared memory, {limit} at most are taken")
    return nbytes


def spark_moe_route_gate_up_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_logits: DevicePtr,
    gate: HasNvfp4Tables,
    up: HasNvfp4Tables,
    expert_indices: DevicePtr,
    sh_gate: HasNvfp4Weight | None,
    sh_up: HasNvfp4Weight | None,
    activation: DevicePtr,
    rows: int,
    n: int,
    k: int,
    num_experts: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """expert_indices u32 [T, top_k] as `moe_topk_softmax` of gate_logits [T, E], and activation FP32 [T, top_k + 1, n],
    silu(g) * u of each chosen expert and, last, of the shared one, where g and u are input [T, k] through its
    gate and up weights, in FP32. Tables have E entries.

    k is a multiple of 32, 12160 at most; input and codes lie on 16-byte addresses, scales on even ones; E is 512 at
    most, top_k 32.
    """
    routed(num_experts, top_k)
    multiple_of("k", k, STEP, WHY_STEP)
    tiles = (top_k + 1) * div_ceil(count("n", n), TILE)
    blocks = max(min(RESIDENT, tiles), div_ceil(tiles, TILES))
    launch = KernelLaunch(gpu, kernel).grid((blocks, count("rows", rows), 1)).block((GATE_UP_BLOCK, 1, 1))
    launch.shared_mem(_held(k, 2 * k, GATE_UP_SHARED))
    launch.arg_ptr(input).arg_ptr(gate_logits)
    add_tables(launch, gate)
    add_tables(launch, up)
    launch.arg_ptr(expert_indices)
    add_shared(launch, sh_gate)
    add_shared(launch, sh_up)
    launch.arg_ptr(activation)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_experts).arg_u32(top_k).launch(stream)


def spark_moe_down_blend_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    activation: DevicePtr,
    down: HasNvfp4Tables,
    gate_logits: DevicePtr,
    expert_indices: DevicePtr,
    sh_down: HasNvfp4Weight | None,
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
    """output [T, n] = the sum of the weights that `moe_topk_softmax` gives the chosen experts times activation FP32
    [T, top_k + 1, k] through their down weights [n, k], and of sigmoid(input [T, n] . gate_weight [n]) times the shared
    one's, which is 1 for a gate_weight of NULL. expert_indices are those of
    `spark_moe_route_gate_up_nvfp4` of gate_logits [T, E].

    k is a multiple of 32, and with a gate n one of 8; all slices of 128 k of a row's slots are 72 at most. Codes,
    activation, input and gate_weight lie on 16-byte addresses, scales on even ones. Tables have E entries.
    """
    routed(num_experts, top_k)
    multiple_of("k", k, STEP, WHY_STEP)
    held = _held(k, (top_k + 1) * div_ceil(k, SLICE) * SLICE_BYTES, DOWN_SHARED)
    gate = weight_ptr(gate_weight)
    if not gate.is_null:
        multiple_of("n", n, 8, "the gate is read 16 bytes at a time")
    grid = (div_ceil(count("n", n), DOWN_OUTPUTS), count("rows", rows), 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((DOWN_BLOCK, 1, 1)).shared_mem(held).arg_ptr(activation)
    add_tables(launch, down)
    launch.arg_ptr(gate_logits).arg_ptr(expert_indices)
    add_shared(launch, sh_down)
    launch.arg_ptr(input).arg_ptr(gate).arg_ptr(output)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_experts).arg_u32(top_k).arg_u32(int(normalize)).launch(stream)
