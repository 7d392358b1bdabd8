# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `moe_shared_expert_fused`: the NVFP4 experts that a router chose, and the shared one.

k must be a multiple of 16; activations lie on 16-byte addresses, packed codes on 8-byte ones. Tables have an entry an
expert, and expert_indices must be smaller than their number. top_k 0 computes the shared expert alone; a shared expert
of None gives zeros in its outputs. With `rows`, the kernel is the `spark_..._rows` form: input, outputs and indices
have that many rows, and each gets the bits of the kernel for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, dynamic_shared
from .w4a16_gemv import HasNvfp4Weight, chunks_of, only

OUTPUTS = 8
"""Outputs of a block."""
_GATE_UP = "moe_shared_expert_fused::moe_expert_gate_up_shared"
_GATE_UP_ROWS = "moe_shared_expert_fused::spark_moe_expert_gate_up_shared_rows"
_SILU_DOWN = "moe_shared_expert_fused::moe_expert_silu_down_shared"
_SILU_DOWN_ROWS = "moe_shared_expert_fused::spark_moe_expert_silu_down_shared_rows"


class HasNvfp4Tables(Protocol):
    """Device tables with an entry an expert: u64 addresses of packed codes and of block scales, FP32 factors."""

    @property
    def packed_ptrs(self) -> DevicePtr: ...

    @property
    def scale_ptrs(self) -> DevicePtr: ...

    @property
    def scale2_vals(self) -> DevicePtr: ...


@dataclass(frozen=True, slots=True)
class Nvfp4Tables:
    """See `HasNvfp4Tables`."""

    packed_ptrs: DevicePtr
    scale_ptrs: DevicePtr
    scale2_vals: DevicePtr


def start(
    gpu: GpuBackend,
    kernel: KernelHandle,
    n: int,
    k: int,
    top_k: int,
    rows: int | None,
    projections: int = 1,
    held: int = 0,
) -> KernelLaunch:
    """Geometry of an expert kernel with `held` bytes of dynamic shared memory; `projections` blocks a slot.

    Where that memory is more than a launch gets by itself, the kernel's limit is raised; GeometryError says so where
    the device has less.
    """
    chunks_of(k)
    slots = 1 + (top_k if top_k == 0 and not isinstance(top_k, bool) else count("top_k", top_k))
    blocks = div_ceil(count("n", n), OUTPUTS)
    grid = (blocks, slots, projections) if rows is None else (blocks, count("rows", rows), projections * slots)
    return KernelLaunch(gpu, kernel).grid(grid).block((128, 1, 1)).shared_mem(dynamic_shared(gpu, kernel, held))


def add_tables(launch: KernelLaunch, tables: HasNvfp4Tables) -> None:
    """The three tables as arguments."""
    launch.arg_ptr(tables.packed_ptrs).arg_ptr(tables.scale_ptrs).arg_ptr(tables.scale2_vals)


def add_shared(launch: KernelLaunch, weight: HasNvfp4Weight | None) -> None:
    """The shared expert's weight as arguments; NULL where there is none."""
    if weight is None:
        launch.arg_ptr(DevicePtr.NULL).arg_ptr(DevicePtr.NULL).arg_f32(1.0)
    else:
        launch.arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_f32(weight.weight_scale_2)


def moe_expert_gate_up_shared(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate: HasNvfp4Tables,
    gate_out: DevicePtr,
    up: HasNvfp4Tables,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate: HasNvfp4Weight | None,
    sh_gate_out: DevicePtr,
    sh_up: HasNvfp4Weight | None,
    sh_up_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """Gate and up projections [n, k] of input BF16 [k]: gate_out and up_out BF16 [top_k, n], sh_gate_out and sh_up_out
    BF16 [n]. expert_indices u32 [top_k]. `kernel` is `moe_shared_expert_fused::moe_expert_gate_up_shared` or, with
    rows, `spark_moe_expert_gate_up_shared_rows`."""
    only(kernel, _GATE_UP if rows is None else _GATE_UP_ROWS)
    launch = start(gpu, kernel, n, k, top_k, rows, projections=2).arg_ptr(input)
    for tables, out in ((gate, gate_out), (up, up_out)):
        add_tables(launch, tables)
        launch.arg_ptr(out)
    launch.arg_ptr(expert_indices)
    for weight, out in ((sh_gate, sh_gate_out), (sh_up, sh_up_out)):
        add_shared(launch, weight)
        launch.arg_ptr(out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def moe_expert_silu_down_shared(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    down: HasNvfp4Tables,
    output: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_in: DevicePtr,
    sh_up_in: DevicePtr,
    sh_down: HasNvfp4Weight | None,
    sh_down_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """silu(gate_out) * up_out, BF16 [top_k, k], through the down projections [n, k]: output BF16 [top_k, n]; likewise
    sh_gate_in and sh_up_in BF16 [k] to sh_down_out [n]. No clamp. `kernel` is
    `moe_shared_expert_fused::moe_expert_silu_down_shared` or, with rows, `spark_moe_expert_silu_down_shared_rows`."""
    only(kernel, _SILU_DOWN if rows is None else _SILU_DOWN_ROWS)
    launch = start(gpu, kernel, n, k, top_k, rows, held=4 * k).arg_ptr(gate_out).arg_ptr(up_out)
    add_tables(launch, down)
    launch.arg_ptr(output).arg_ptr(expert_indices).arg_ptr(sh_gate_in).arg_ptr(sh_up_in)
    add_shared(launch, sh_down)
    launch.arg_ptr(sh_down_out).arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)
