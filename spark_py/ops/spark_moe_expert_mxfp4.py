# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_expert_mxfp4`: the MXFP4 experts that a router chose, without a shared one.

k must be a multiple of 32; activations and packed codes lie on 16-byte addresses. Tables have an entry an expert, and
expert_indices must be smaller than their number; an address of 0 gives zeros. With `rows`, the kernel is the `_rows`
form: input, outputs and indices have that many rows, and each gets the bits of the kernel for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, dynamic_shared
from .spark_moe_expert_silu_down_clamped import limit_of
from .spark_mxfp4_gemv import chunks_of
from .w4a16_gemv import only

OUTPUTS = 8
"""Outputs of a block of the gate and up projections."""
DOWN_OUTPUTS = 32
"""Those of the down projection, whose blocks compute the activation too."""
_GATE_UP = "spark_moe_expert_mxfp4::spark_moe_expert_gate_up_mxfp4"
_SILU_DOWN = "spark_moe_expert_mxfp4::spark_moe_expert_silu_down_clamped_mxfp4"


class HasMxfp4Tables(Protocol):
    """Device tables with an entry an expert: u64 addresses of packed codes [n, k / 2] and of scales [n, k / 32]."""

    @property
    def packed_ptrs(self) -> DevicePtr: ...

    @property
    def scale_ptrs(self) -> DevicePtr: ...


@dataclass(frozen=True, slots=True)
class Mxfp4Tables:
    """See `HasMxfp4Tables`."""

    packed_ptrs: DevicePtr
    scale_ptrs: DevicePtr


def _start(
    gpu: GpuBackend, kernel: KernelHandle, n: int, k: int, top_k: int, rows: int | None, down: bool
) -> KernelLaunch:
    """Geometry; where a launch gets less dynamic shared memory by itself than it needs, the limit is raised."""
    chunks_of(k)
    slots, held = count("top_k", top_k), 4 * k if down else 0
    projections, outputs = (1, DOWN_OUTPUTS) if down else (2, OUTPUTS)
    blocks = div_ceil(count("n", n), outputs)
    grid = (blocks, slots, projections) if rows is None else (blocks, count("rows", rows), projections * slots)
    return KernelLaunch(gpu, kernel).grid(grid).block((128, 1, 1)).shared_mem(dynamic_shared(gpu, kernel, held))


def moe_expert_gate_up_mxfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate: HasMxfp4Tables,
    gate_out: DevicePtr,
    up: HasMxfp4Tables,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """gate_out and up_out BF16 [top_k, n]: input BF16 [k] through the gate and up weights [n, k] of experts
    expert_indices u32 [top_k], with the bits of `mxfp4_gemv`. `kernel` is
    `spark_moe_expert_mxfp4::spark_moe_expert_gate_up_mxfp4` or, with rows, its `_rows` form."""
    only(kernel, _GATE_UP if rows is None else f"{_GATE_UP}_rows")
    launch = _start(gpu, kernel, n, k, top_k, rows, down=False).arg_ptr(input)
    for tables, out in ((gate, gate_out), (up, up_out)):
        launch.arg_ptr(tables.packed_ptrs).arg_ptr(tables.scale_ptrs).arg_ptr(out)
    launch.arg_ptr(expert_indices).arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def moe_expert_silu_down_clamped_mxfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    down: HasMxfp4Tables,
    output: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    limit: float,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """silu(min(gate_out, limit)) * clamp(up_out, -limit, limit), BF16 [top_k, k], through the down weights [n, k]:
    output BF16 [top_k, n]. The activation stays FP32. limit (swiglu_limit, 10.0 in DeepSeek-V4) is finite and above 0.
    `kernel` is `spark_moe_expert_mxfp4::spark_moe_expert_silu_down_clamped_mxfp4` or, with rows, its `_rows` form."""
    only(kernel, _SILU_DOWN if rows is None else f"{_SILU_DOWN}_rows")
    limit_of(limit)
    launch = _start(gpu, kernel, n, k, top_k, rows, down=True).arg_ptr(gate_out).arg_ptr(up_out)
    launch.arg_ptr(down.packed_ptrs).arg_ptr(down.scale_ptrs).arg_ptr(output).arg_ptr(expert_indices)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).arg_f32(limit).launch(stream)
