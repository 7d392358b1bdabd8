# SPDX-License-Identifier: AGPL-3.0-only
"""What differs between mixtures of experts in NVFP4, BF16 and FP8: their device tables, kernels and launchers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops import spark_moe_step_bf16, spark_moe_step_nvfp4
from ...ops.gemv import dense_gemv
from ...ops.gemv_fp8w import dense_gemv_fp8w
from ...ops.moe_shared_expert_fused import (
    Nvfp4Tables,
    moe_expert_gate_up_shared,
    moe_expert_silu_down_shared,
)
from ...ops.moe_shared_expert_fused_bf16 import moe_expert_gate_up_shared_bf16, moe_expert_silu_down_shared_bf16
from ...ops.spark_moe_rows import (
    spark_moe_expert_gate_up_shared_bf16_rows,
    spark_moe_expert_silu_down_shared_bf16_rows,
)
from ...ops.spark_moe_shared_expert_fused_fp8 import (
    Fp8Tables,
    spark_moe_expert_gate_up_shared_fp8,
    spark_moe_expert_silu_down_shared_fp8,
)
from ...ops.spark_moe_step_bf16 import spark_moe_down_blend_bf16, spark_moe_route_gate_up_bf16
from ...ops.w4a16_gemv import w4a16_gemv
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..weight_map import (
    DenseExpertWeight,
    DenseWeight,
    ExpertWeight,
    Fp8DenseExpertWeight,
    Fp8DenseWeight,
    QuantizedWeight,
)

__all__ = ["FORMATS", "ExpertFormat", "expert_format"]

Kernel = tuple[str, str]
"""(module, function)."""


@dataclass(frozen=True, slots=True)
class StepFormat:
    """Kernels for all that follows a softmax router's product, in two launches, and their launchers.

    `fits(n, k, top_k)`: whether they take experts of width n in a model of width k; `takes(projection)`: whether they
    take a projection's tensors where they lie; `several_rows`: whether they are the quicker ones for several rows too.
    """

    gate_up_k: Kernel
    down_k: Kernel
    gate_up: Callable[..., None]
    down: Callable[..., None]
    fits: Callable[[int, int, int], bool]
    takes: Callable[[Any], bool]
    several_rows: bool


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """One format of experts.

    `quantum` divides every K. `columns` are the tables of a projection, with an entry an expert; `entry(projection)`
    has one value for each, and `tables(pointers)` is what the launchers take. `check(name, projection, n, k)` refuses a
    projection that does not fit. `gate_up` and `down` launch one row, or with `rows` several; `gemv` a single product.
    `step` has more at once, where there are such kernels.
    """

    name: str
    quantum: int
    columns: Mapping[str, Any]
    entry: Callable[[Any], tuple[float, ...]]
    tables: Callable[[Sequence[DevicePtr]], Any]
    check: Callable[[str, Any, int, int], None]
    gate_up_k: Kernel
    down_k: Kernel
    gate_up_rows_k: Kernel
    down_rows_k: Kernel
    gemv_k: Kernel
    gate_up: Callable[..., None]
    down: Callable[..., None]
    gemv: Callable[..., None]
    step: StepFormat | None = None


def _nvfp4_entry(weight: QuantizedWeight) -> tuple[float, ...]:
    return weight.weight.address, weight.weight_scale.address, weight.weight_scale_2


def _fp8_entry(weight: Fp8DenseWeight) -> tuple[float, ...]:
    return weight.weight.address, weight.row_scale.address


def _check_plain(name: str, weight: DenseWeight | QuantizedWeight, n: int, k: int) -> None:
    weight.check_shape(name, n, k)


def _check_fp8(name: str, weight: Fp8DenseWeight, n: int, k: int) -> None:
    DenseWeight(weight.row_scale).check_shape(f"row_scale of {name}")
    DenseWeight(weight.weight, (weight.n, weight.k)).check_shape(name, n, k)


def _bf16_gate_up(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate: DevicePtr,
    gate_out: DevicePtr,
    up: DevicePtr,
    up_out: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate: DenseWeight | None,
    sh_gate_out: DevicePtr,
    sh_up: DenseWeight | None,
    sh_up_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    """The BF16 launchers with the arguments of the others."""
    shared = (sh_gate or DevicePtr.NULL, sh_gate_out, sh_up or DevicePtr.NULL, sh_up_out)
    args = (gpu, kernel, input, gate, gate_out, up, up_out, expert_indices, *shared)
    if rows is None:
        moe_expert_gate_up_shared_bf16(*args, n, k, top_k, stream)
    else:
        spark_moe_expert_gate_up_shared_bf16_rows(*args, rows, n, k, top_k, stream)


def _bf16_step_gate_up(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    gate_logits: DevicePtr,
    gate: DevicePtr,
    up: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate: DenseWeight | None,
    sh_up: DenseWeight | None,
    activation: DevicePtr,
    *sizes: Any,
) -> None:
    shared = (sh_gate or DevicePtr.NULL, sh_up or DevicePtr.NULL)
    spark_moe_route_gate_up_bf16(gpu, kernel, input, gate_logits, gate, up, expert_indices, *shared, activation, *sizes)


def _bf16_step_down(
    gpu: GpuBackend,
    kernel: KernelHandle,
    activation: DevicePtr,
    down: DevicePtr,
    gate_logits: DevicePtr,
    expert_indices: DevicePtr,
    sh_down: DenseWeight | None,
    *rest: Any,
) -> None:
    routing = (gate_logits, expert_indices)
    spark_moe_down_blend_bf16(gpu, kernel, activation, down, *routing, sh_down or DevicePtr.NULL, *rest)


def _bf16_down(
    gpu: GpuBackend,
    kernel: KernelHandle,
    gate_out: DevicePtr,
    up_out: DevicePtr,
    down: DevicePtr,
    output: DevicePtr,
    expert_indices: DevicePtr,
    sh_gate_in: DevicePtr,
    sh_up_in: DevicePtr,
    sh_down: DenseWeight | None,
    sh_down_out: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    stream: StreamLike,
    rows: int | None = None,
) -> None:
    shared = (sh_gate_in, sh_up_in, sh_down or DevicePtr.NULL, sh_down_out)
    args = (gpu, kernel, gate_out, up_out, down, output, expert_indices, *shared)
    if rows is None:
        moe_expert_silu_down_shared_bf16(*args, n, k, top_k, stream)
    else:
        spark_moe_expert_silu_down_shared_bf16_rows(*args, rows, n, k, top_k, stream)


_NVFP4, _BF16 = "moe_shared_expert_fused", "moe_shared_expert_fused_bf16"
_FP8, _ROWS = "spark_moe_shared_expert_fused_fp8", "spark_moe_rows"
_STEP_BF16, _STEP_NVFP4 = "spark_moe_step_bf16", "spark_moe_step_nvfp4"

FORMATS: Mapping[type, ExpertFormat] = {
    ExpertWeight: ExpertFormat(
        name="NVFP4",
        quantum=16,
        columns={"packed_ptrs": np.uint64, "scale_ptrs": np.uint64, "scale2_vals": np.float32},
        entry=_nvfp4_entry,
        tables=lambda pointers: Nvfp4Tables(*pointers),
        check=_check_plain,
        gate_up_k=(_NVFP4, "moe_expert_gate_up_shared"),
        down_k=(_NVFP4, "moe_expert_silu_down_shared"),
        gate_up_rows_k=(_NVFP4, "spark_moe_expert_gate_up_shared_rows"),
        down_rows_k=(_NVFP4, "spark_moe_expert_silu_down_shared_rows"),
        gemv_k=("w4a16_gemv", "w4a16_gemv"),
        gate_up=moe_expert_gate_up_shared,
        down=moe_expert_silu_down_shared,
        gemv=w4a16_gemv,
        step=StepFormat(
            gate_up_k=(_STEP_NVFP4, "spark_moe_route_gate_up_nvfp4"),
            down_k=(_STEP_NVFP4, "spark_moe_down_blend_nvfp4"),
            gate_up=spark_moe_step_nvfp4.spark_moe_route_gate_up_nvfp4,
            down=spark_moe_step_nvfp4.spark_moe_down_blend_nvfp4,
            fits=spark_moe_step_nvfp4.fits,
            takes=lambda weight: weight.weight.address % 16 == 0 and weight.weight_scale.address % 2 == 0,
            several_rows=True,
        ),
    ),
    DenseExpertWeight: ExpertFormat(
        name="BF16",
        quantum=8,
        columns={"weight_ptrs": np.uint64},
        entry=lambda weight: (weight.weight.address,),
        tables=lambda pointers: pointers[0],
        check=_check_plain,
        gate_up_k=(_BF16, "moe_expert_gate_up_shared_bf16"),
        down_k=(_BF16, "moe_expert_silu_down_shared_bf16"),
        gate_up_rows_k=(_ROWS, "spark_moe_expert_gate_up_shared_bf16_rows"),
        down_rows_k=(_ROWS, "spark_moe_expert_silu_down_shared_bf16_rows"),
        gemv_k=("gemv", "dense_gemv_bf16"),
        gate_up=_bf16_gate_up,
        down=_bf16_down,
        gemv=dense_gemv,
        step=StepFormat(
            gate_up_k=(_STEP_BF16, "spark_moe_route_gate_up_bf16"),
            down_k=(_STEP_BF16, "spark_moe_down_blend_bf16"),
            gate_up=_bf16_step_gate_up,
            down=_bf16_step_down,
            fits=spark_moe_step_bf16.fits,
            takes=lambda weight: True,
            several_rows=False,
        ),
    ),
    Fp8DenseExpertWeight: ExpertFormat(
        name="FP8",
        quantum=16,
        columns={"weight_ptrs": np.uint64, "scale_ptrs": np.uint64},
        entry=_fp8_entry,
        tables=lambda pointers: Fp8Tables(*pointers),
        check=_check_fp8,
        gate_up_k=(_FP8, "spark_moe_expert_gate_up_shared_fp8"),
        down_k=(_FP8, "spark_moe_expert_silu_down_shared_fp8"),
        gate_up_rows_k=(_FP8, "spark_moe_expert_gate_up_shared_fp8_rows"),
        down_rows_k=(_FP8, "spark_moe_expert_silu_down_shared_fp8_rows"),
        gemv_k=("gemv_fp8w", "dense_gemv_fp8w"),
        gate_up=spark_moe_expert_gate_up_shared_fp8,
        down=spark_moe_expert_silu_down_shared_fp8,
        gemv=dense_gemv_fp8w,
    ),
}
"""By the type of an expert's weights."""


def expert_format(experts: Sequence[Any]) -> ExpertFormat:
    """The format that all of `experts` have. UnsupportedError for one that no kernel takes, say block-scaled."""
    if not experts:
        raise InvalidArgumentError("experts", 0, "at least one expert is needed")
    kinds = sorted({type(each).__name__ for each in experts})
    if len(kinds) > 1:
        raise InvalidArgumentError("experts", ", ".join(kinds), "all of one format are needed, the shared one too")
    found = FORMATS.get(type(experts[0]))
    if found is None:
        offered = ", ".join(kind.__name__ for kind in FORMATS)
        raise UnsupportedError(f"experts as {kinds[0]} are not offered: make them one of {offered}")
    return found
