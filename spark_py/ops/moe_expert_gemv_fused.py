# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `moe_expert_gemv_fused`: the NVFP4 experts that a router chose, without a shared one.

Each slot has the bits that `moe_shared_expert_fused` gives it. The kernels of a launcher differ in their grid; it takes
the one that the handle's name asks for. k is a multiple of 16; alignments and tables as of `moe_shared_expert_fused`.
"""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count
from .moe_shared_expert_fused import HasNvfp4Tables
from .w4a16_gemv import chunks_of, only

_GATE_UP = "moe_expert_gemv_fused::moe_expert_gemv_gate_up"
_SILU_DOWN = "moe_expert_gemv_fused::moe_expert_gemv_silu_down"
GATE_UP_OUTPUTS = {_GATE_UP: 4, f"{_GATE_UP}_2x": 8}
"""Outputs of a block, by kernel."""
SILU_DOWN_OUTPUTS = {_SILU_DOWN: 4, f"{_SILU_DOWN}_2x": 8, f"{_SILU_DOWN}_wide": 16}


def moe_expert_gemv_gate_up(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate: HasNvfp4Tables,
    gate_out: DevicePtr,
    up: HasNvfp4Tables,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """gate_out and up_out BF16 [top_k, n]: input BF16 [k] through the gate and up weights [n, k] of experts
    expert_indices u32 [top_k]. `kernel` is one of `GATE_UP_OUTPUTS`."""
    launch = _start(gpu, kernel, GATE_UP_OUTPUTS, n, k, top_k, 2).arg_ptr(input)
    for tables, out in ((gate, gate_out), (up, up_out)):
        launch.arg_ptr(tables.packed_ptrs).arg_ptr(tables.scale_ptrs).arg_ptr(tables.scale2_vals).arg_ptr(out)
    launch.arg_ptr(expert_indices).arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def moe_expert_gemv_silu_down(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    down: HasNvfp4Tables,
    output: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
) -> None:
    """output BF16 [top_k, n]: silu(gate_out) * up_out, BF16 [top_k, k], through the down weights [n, k]. No clamp.
    `kernel` is one of `SILU_DOWN_OUTPUTS`."""
    launch = _start(gpu, kernel, SILU_DOWN_OUTPUTS, n, k, top_k, 1).arg_ptr(gate_out).arg_ptr(up_out)
    launch.arg_ptr(down.packed_ptrs).arg_ptr(down.scale_ptrs).arg_ptr(down.scale2_vals).arg_ptr(output)
    launch.arg_ptr(expert_indices).arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def _start(
    gpu: GpuBackend, kernel: KernelHandle, outputs: dict[str, int], n: int, k: int, top_k: int, z: int
) -> KernelLaunch:
    only(kernel, *outputs)
    chunks_of(k)
    # A null handle is the launch's to refuse.
    blocks = div_ceil(count("n", n), outputs.get(kernel.name, 1))
    return KernelLaunch(gpu, kernel).grid((blocks, count("top_k", top_k), z)).block((128, 1, 1))
