# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_moe_expert_silu_down_clamped`: `moe_expert_silu_down_shared` with DeepSeek-V4's limit."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from .moe_shared_expert_fused import HasNvfp4Tables, add_shared, add_tables, start
from .w4a16_gemv import HasNvfp4Weight, only

_ONE = "spark_moe_expert_silu_down_clamped::spark_moe_expert_silu_down_clamped"


def limit_of(limit: float) -> float:
    """limit, if it is finite and above 0; InvalidArgumentError otherwise."""
    if not 0.0 < limit < float("inf"):
        raise InvalidArgumentError("limit", limit, "a finite number above 0 is needed")
    return limit


def moe_expert_silu_down_clamped(
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
    limit: float,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """silu(min(gate_out, limit)) * clamp(up_out, -limit, limit), BF16 [top_k, k], through the down projections [n, k]:
    output BF16 [top_k, n]; likewise sh_gate_in and sh_up_in BF16 [k] to sh_down_out [n].

    The activation stays FP32. `kernel` is the function of the module's name or, with rows, its `_rows` form; everything
    else as `moe_expert_silu_down_shared`. limit (swiglu_limit, 10.0 in DeepSeek-V4) is finite and above 0.
    """
    only(kernel, _ONE if rows is None else f"{_ONE}_rows")
    limit_of(limit)
    launch = start(gpu, kernel, n, k, top_k, rows, held=4 * k).arg_ptr(gate_out).arg_ptr(up_out)
    add_tables(launch, down)
    launch.arg_ptr(output).arg_ptr(expert_indices).arg_ptr(sh_gate_in).arg_ptr(sh_up_in)
    add_shared(launch, sh_down)
    launch.arg_ptr(sh_down_out).arg_u32(n).arg_u32(k).arg_u32(top_k).arg_f32(limit).launch(stream)
