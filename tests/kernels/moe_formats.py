# SPDX-License-Identifier: AGPL-3.0-only
"""Experts of a mixture in NVFP4 and in FP8: on the device, through their launchers, and in exact arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from spark_py.ops import moe_shared_expert_fused as nvfp4_ops
from spark_py.ops import spark_moe_shared_expert_fused_fp8 as fp8_ops
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, Output, upload
from spark_py.testing.cases.moe_shared_expert_fused import NVFP4, Flavour
from spark_py.testing.cases.spark_moe_shared_expert_fused_fp8 import FP8

from .nvfp4 import Weight, rounded

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Expert = Any
"""A weight as the references take it: (packed, scales, factor) or (bytes, row factors)."""


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """What the launchers need of an `Fp8DenseWeight`."""

    weight: DevicePtr
    row_scale: DevicePtr


@dataclass(frozen=True, slots=True)
class Format:
    """`gate_up` and `down` are launchers of `module`, whose functions are called `gate_up_name` and `down_name`.

    `tables` and `weight` put experts on the device; `exact(a, expert, row)` is one output before its rounding to BF16.
    """

    module: str
    flavour: Flavour
    gate_up_name: str
    down_name: str
    rows_name: str
    gate_up: Callable[..., None]
    down: Callable[..., None]
    tables: Callable[[GpuBackend, Sequence[Expert | None]], Any]
    weight: Callable[[GpuBackend, Expert], Any]
    exact: Callable[[Sequence[Fraction], Expert, int], np.float32]

    def on_device(self, gpu: GpuBackend, expert: Expert | None) -> Any:
        """The shared expert's weight; None where there is none."""
        return None if expert is None else self.weight(gpu, expert)

    def rows_of(self, name: str) -> str:
        """The function for several rows beside the one for one."""
        return self.rows_name.format(name)


def addresses(gpu: GpuBackend, arrays: Sequence[Array | None]) -> DevicePtr:
    """A table of the addresses of copies; 0 for None."""
    entries = [0 if each is None else upload(gpu, each).address for each in arrays]
    return upload(gpu, np.array(entries, np.uint64))


def _nvfp4_tables(gpu: GpuBackend, experts: Sequence[Expert | None]) -> nvfp4_ops.Nvfp4Tables:
    factors = np.array([1.0 if each is None else each[2] for each in experts], np.float32)
    packed, scales = ([each and each[part] for each in experts] for part in (0, 1))
    return nvfp4_ops.Nvfp4Tables(addresses(gpu, packed), addresses(gpu, scales), upload(gpu, factors))


def _nvfp4_weight(gpu: GpuBackend, expert: Expert) -> Weight:
    return Weight(upload(gpu, expert[0]), upload(gpu, expert[1]), expert[2])


def _fp8_tables(gpu: GpuBackend, experts: Sequence[Expert | None]) -> fp8_ops.Fp8Tables:
    weights, scales = ([each and each[part] for each in experts] for part in (0, 1))
    return fp8_ops.Fp8Tables(addresses(gpu, weights), addresses(gpu, scales))


def _fp8_weight(gpu: GpuBackend, expert: Expert) -> Fp8Rows:
    return Fp8Rows(upload(gpu, expert[0]), upload(gpu, expert[1]))


def _tree(values: Sequence[Fraction]) -> np.float32:
    for step in (16, 8, 4, 2, 1):
        values = [rounded(values[i] + values[i + step]) for i in range(step)]
    return np.float32(float(values[0]))


def _fraction(value: Any) -> Fraction:
    return Fraction(float(np.float32(value)))


def _nvfp4_exact(a: Sequence[Fraction], expert: Expert, row: int) -> np.float32:
    packed, scales, scale2 = expert
    values = []
    for byte in packed[row].tolist():
        for nibble in (byte & 15, byte >> 4):
            values.append(Fraction(_MAGNITUDES[nibble & 7]) * (-1 if nibble & 8 else 1))
    numbers = scales[row].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    lanes = [Fraction(0)] * 32
    for k in range(0, len(values), 2):
        factor = rounded(Fraction(float(numbers[k // 16])) * _fraction(scale2))
        first, second = (rounded(a[i] * rounded(values[i] * factor)) for i in (k, k + 1))
        lane = k // 16 % 32
        lanes[lane] = rounded(lanes[lane] + rounded(first + second))
    return _tree(lanes)


def _fp8_exact(a: Sequence[Fraction], expert: Expert, row: int) -> np.float32:
    values, scales = expert
    numbers = values[row].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    lanes = [Fraction(0)] * 32
    for k, number in enumerate(numbers.tolist()):
        lane = k // 16 % 32
        lanes[lane] = rounded(lanes[lane] + a[k] * Fraction(number))
    return _tree([rounded(lane * _fraction(scales[row])) for lane in lanes])


FORMATS = {
    "nvfp4": Format(
        "moe_shared_expert_fused",
        NVFP4,
        "moe_expert_gate_up_shared",
        "moe_expert_silu_down_shared",
        "spark_{}_rows",
        nvfp4_ops.moe_expert_gate_up_shared,
        nvfp4_ops.moe_expert_silu_down_shared,
        _nvfp4_tables,
        _nvfp4_weight,
        _nvfp4_exact,
    ),
    "fp8": Format(
        "spark_moe_shared_expert_fused_fp8",
        FP8,
        "spark_moe_expert_gate_up_shared_fp8",
        "spark_moe_expert_silu_down_shared_fp8",
        "{}_rows",
        fp8_ops.spark_moe_expert_gate_up_shared_fp8,
        fp8_ops.spark_moe_expert_silu_down_shared_fp8,
        _fp8_tables,
        _fp8_weight,
        _fp8_exact,
    ),
}


@dataclass(slots=True)
class Mixture:
    """Gate and up projections of some experts, and of the shared one."""

    gate: list[Expert | None]
    up: list[Expert | None]
    sh_gate: Expert | None
    sh_up: Expert | None


def run_gate_up(gpu: GpuBackend, fmt: Format, x: Array, ids: Array, m: Mixture, n: int) -> dict[str, Array]:
    """Launch: x [K] and ids [k], or [rows, K] and [rows, k] through the kernel for several rows."""
    lead, (top_k, k) = x.shape[:-1], (ids.shape[-1], x.shape[-1])
    outputs = {name: Output(gpu, (*lead, top_k, n)) for name in ("gate_out", "up_out")}
    outputs |= {name: Output(gpu, (*lead, n)) for name in ("sh_gate_out", "sh_up_out")}
    at = {name: each.ptr for name, each in outputs.items()}
    name = fmt.rows_of(fmt.gate_up_name) if lead else fmt.gate_up_name
    fmt.gate_up(
        gpu, gpu.kernel(fmt.module, name), upload(gpu, x), fmt.tables(gpu, m.gate), at["gate_out"],
        fmt.tables(gpu, m.up), at["up_out"], upload(gpu, ids), fmt.on_device(gpu, m.sh_gate), at["sh_gate_out"],
        fmt.on_device(gpu, m.sh_up), at["sh_up_out"], n, k, top_k, gpu.default_stream(),
        rows=lead[0] if lead else None,
    )  # fmt: skip
    return {name: each.read() for name, each in outputs.items()}


def run_down(
    gpu: GpuBackend,
    fmt: Format,
    rows: tuple[Array, Array],
    sh_rows: tuple[Array, Array],
    ids: Array,
    down: list[Expert | None],
    sh_down: Expert | None,
    n: int,
) -> tuple[Array, Array]:
    """Launch: (gate, up) [k, K] and for the shared expert [K], or with an axis of rows before."""
    *lead, top_k, k = rows[0].shape
    output, sh_output = Output(gpu, (*lead, top_k, n)), Output(gpu, (*lead, n))
    name = fmt.rows_of(fmt.down_name) if lead else fmt.down_name
    gate, up, sh_gate, sh_up = (upload(gpu, each) for each in (*rows, *sh_rows))
    fmt.down(
        gpu, gpu.kernel(fmt.module, name), gate, up, fmt.tables(gpu, down), output.ptr, upload(gpu, ids), sh_gate,
        sh_up, fmt.on_device(gpu, sh_down), sh_output.ptr, n, k, top_k, gpu.default_stream(),
        rows=lead[0] if lead else None,
    )  # fmt: skip
    return output.read(), sh_output.read()
