# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_moe_shared_expert_fused_fp8`: experts in E4M3 with an FP32 factor a row.

As `moe_shared_expert_fused`, but that weights lie on 16-byte addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from .gemv_fp8w import HasFp8Rows
from .moe_shared_expert_fused import start
from .w4a16_gemv import only

_MODULE = "spark_moe_shared_expert_fused_fp8"
_GATE_UP = f"{_MODULE}::spark_moe_expert_gate_up_shared_fp8"
_SILU_DOWN = f"{_MODULE}::spark_moe_expert_silu_down_shared_fp8"


class HasFp8Tables(Protocol):
    """Device tables with an entry an expert: u64 addresses of the bytes [n, k] and of the row factors FP32 [n]."""

    @property
    def weight_ptrs(self) -> DevicePtr: ...

    @property
    def scale_ptrs(self) -> DevicePtr: ...


@dataclass(frozen=True, slots=True)
class Fp8Tables:
    """See `HasFp8Tables`."""

    weight_ptrs: DevicePtr
    scale_ptrs: DevicePtr


def _tables(launch: KernelLaunch, tables: HasFp8Tables) -> None:
    launch.arg_ptr(tables.weight_ptrs).arg_ptr(tables.scale_ptrs)


def _shared(launch: KernelLaunch, weight: HasFp8Rows | None) -> None:
    launch.arg_ptr(DevicePtr.NULL if weight is None else weight.weight)
    launch.arg_ptr(DevicePtr.NULL if weight is None else weight.row_scale)


def spark_moe_expert_gate_up_shared_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate: HasFp8Tables,
    gate_out: DevicePtr,
    up: HasFp8Tables,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate: HasFp8Rows | None,
    sh_gate_out: DevicePtr,
    sh_up: HasFp8Rows | None,
    sh_up_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """Gate and up projections [n, k] of input BF16 [k]: gate_out and up_out BF16 [top_k, n], sh_gate_out and sh_up_out
    BF16 [n]. expert_indices u32 [top_k]. `kernel` is the module's function of
    this name or, with rows, the one with `_rows` behind it."""
    only(kernel, _GATE_UP if rows is None else f"{_GATE_UP}_rows")
    launch = start(gpu, kernel, n, k, top_k, rows, projections=2).arg_ptr(input)
    for tables, out in ((gate, gate_out), (up, up_out)):
        _tables(launch, tables)
        launch.arg_ptr(out)
    launch.arg_ptr(expert_indices)
    for weight, out in ((sh_gate, sh_gate_out), (sh_up, sh_up_out)):
        _shared(launch, weight)
        launch.arg_ptr(out)
    launch.arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)


def spark_moe_expert_silu_down_shared_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    down: HasFp8Tables,
    output: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_in: DevicePtr,
    sh_up_in: DevicePtr,
    sh_down: HasFp8Rows | None,
    sh_down_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """silu(gate_out) * up_out, BF16 [top_k, k], through the down projections [n, k]: output BF16 [top_k, n]; likewise
    sh_gate_in and sh_up_in BF16 [k] to sh_down_out [n]. No clamp. `kernel` is the module's function of this name
    or, with rows, the one with `_rows` behind it."""
    only(kernel, _SILU_DOWN if rows is None else f"{_SILU_DOWN}_rows")
    launch = start(gpu, kernel, n, k, top_k, rows, held=4 * k).arg_ptr(gate_out).arg_ptr(up_out)
    _tables(launch, down)
    launch.arg_ptr(output).arg_ptr(expert_indices).arg_ptr(sh_gate_in).arg_ptr(sh_up_in)
    _shared(launch, sh_down)
    launch.arg_ptr(sh_down_out).arg_u32(n).arg_u32(k).arg_u32(top_k).launch(stream)
