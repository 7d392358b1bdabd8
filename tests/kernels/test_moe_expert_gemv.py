# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel moe_expert_gemv and module moe_expert_gemv_fused: slots with the bits of moe_shared_expert_fused, and of the
reference."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import moe_expert_gemv as gemv_ops
from spark_py.ops import moe_expert_gemv_fused as ops
from spark_py.runtime.errors import InvalidArgumentError, NullHandleError
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from spark_py.testing import BF16, U32, Array, Output, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.moe_shared_expert_fused import NVFP4, Shape, gated, ids, lost, lost_gated, mirrored_rows
from spark_py.testing.cases.w4a16_gemv import weights

from .moe_formats import FORMATS, Mixture, run_down, run_gate_up
from .support import CHECKS, checks

FMT = FORMATS["nvfp4"]
GATE_UP = ("moe_expert_gemv_gate_up", "moe_expert_gemv_gate_up_2x")
SILU_DOWN = ("moe_expert_gemv_silu_down", "moe_expert_gemv_silu_down_2x", "moe_expert_gemv_silu_down_wide")
SHAPES = [Shape(3, 2, 1, 32), Shape(5, 3, 7, 96), Shape(4, 2, 35, 544), Shape(2, 1, 18, 4128)]
MISSING = Shape(4, 3, 21, 64)
"""Expert 1 is elsewhere."""


def run(gpu: GpuBackend, x: Array, chosen: Array, experts: list[Any], n: int, k: int, stride: int) -> Array:
    output, kernel = Output(gpu, (len(chosen), n)), gpu.kernel("moe_expert_gemv", "moe_expert_gemv")
    gemv_ops.moe_expert_gemv(
        gpu, kernel, upload(gpu, x), FMT.tables(gpu, experts), output.ptr, upload(gpu, chosen), n, k, len(chosen),
        stride, gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def run_pair(
    gpu: GpuBackend, function: str, x: Array, chosen: Array, gate: list[Any], up: list[Any], n: int
) -> tuple[Array, Array]:
    first, second = (Output(gpu, (len(chosen), n)) for _ in range(2))
    ops.moe_expert_gemv_gate_up(
        gpu, gpu.kernel("moe_expert_gemv_fused", function), upload(gpu, x), FMT.tables(gpu, gate), first.ptr,
        FMT.tables(gpu, up), second.ptr, upload(gpu, chosen), n, x.size, len(chosen), gpu.default_stream(),
    )  # fmt: skip
    return first.read(), second.read()


def run_gated(
    gpu: GpuBackend, function: str, gate: Array, up: Array, chosen: Array, experts: list[Any], n: int
) -> Array:
    output, kernel = Output(gpu, (len(chosen), n)), gpu.kernel("moe_expert_gemv_fused", function)
    ops.moe_expert_gemv_silu_down(
        gpu, kernel, upload(gpu, gate), upload(gpu, up), FMT.tables(gpu, experts), output.ptr, upload(gpu, chosen), n,
        gate.shape[1], len(chosen), gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def cancelling(rng: np.random.Generator, shape: Shape) -> tuple[Array, Callable[[], list[Any]]]:
    """An order, and a source of experts whose sums cancel with rows of that order."""
    order = rng.permutation(shape.k // 2)
    return order, lambda: [NVFP4.mirrored(rng, shape.n, shape.k, order) for _ in range(shape.experts)]


def assert_exact(got: Array, a: Array, expert: Any, what: str) -> None:
    row = [Fraction(float(each)) for each in a.tolist()]
    for at in {0, len(got) - 1}:
        alone = np.array([FMT.exact(row, expert, at)]).astype(BF16)
        assert_same_bits(got[at : at + 1], alone, f"{what}, output {at}")


@checks("moe_expert_gemv::moe_expert_gemv")
def check_moe_expert_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    reference = catalog.CATALOG["moe_expert_gemv", "moe_expert_gemv"].reference
    for shape in SHAPES:
        order, draw = cancelling(rng, shape)
        chosen, experts = ids(rng, shape), draw()
        for stride in (0, shape.k, shape.k + 24):
            x = mirrored_rows(rng, (shape.top_k,), shape.k, order)
            rows = np.broadcast_to(x[:1], x.shape) if stride == 0 else x
            flat = np.full(stride * (shape.top_k - 1) + shape.k, np.nan, BF16)
            for slot in range(shape.top_k):
                flat[slot * stride : slot * stride + shape.k] = rows[slot]
            got, what = run(gpu, flat, chosen, experts, shape.n, shape.k, stride), f"{shape} stride={stride}"
            assert_same_bits(got, reference(rows, [experts[e] for e in chosen], shape.n), what)
            assert_exact(got[-1], rows[-1], experts[chosen[-1]], what)
            for slot, expert in enumerate(chosen):
                weight, row = weights(*experts[expert]), f64(rows[slot])
                assert_rounds(got[slot], weight @ row, 0.0, lost(shape.k) * (np.abs(weight) @ np.abs(row)), what)
    experts = [NVFP4.draw(rng, MISSING.n, MISSING.k) for _ in range(4)]
    experts[1] = None
    got = run(gpu, normal(rng, MISSING.k), np.array([3, 1, 0], U32), experts, MISSING.n, MISSING.k, 0)
    assert [bool(f64(row).any()) for row in got] == [True, False, True]


def check_gate_up(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    reference = catalog.CATALOG["moe_expert_gemv_fused", function].reference
    for shape in SHAPES:
        order, draw = cancelling(rng, shape)
        chosen, gate, up = ids(rng, shape), draw(), draw()
        x = mirrored_rows(rng, (), shape.k, order)
        got = run_pair(gpu, function, x, chosen, gate, up, shape.n)
        fused = run_gate_up(gpu, FMT, x, chosen, Mixture(list(gate), list(up), None, None), shape.n)
        expected = reference(x, [gate[e] for e in chosen], [up[e] for e in chosen], shape.n)
        for values, wanted, name in zip(got, expected, ("gate_out", "up_out"), strict=True):
            assert_same_bits(values, wanted, f"{name}, {shape}")
            assert_same_bits(values, fused[name], f"{name}, {shape}, against the kernel with a shared expert")
        assert_exact(got[1][0], x, up[chosen[0]], f"up, {shape}")
    gate, up = ([NVFP4.draw(rng, MISSING.n, MISSING.k) for _ in range(4)] for _ in range(2))
    gate[1] = None
    got = run_pair(gpu, function, normal(rng, MISSING.k), np.array([3, 1, 0], U32), gate, up, MISSING.n)
    assert [bool(f64(row).any()) for row in (*got[0], *got[1])] == [True, False, True, True, True, True]


def check_silu_down(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    for shape in SHAPES:
        # Both operands go far beyond 10, where other variants of such a kernel clamp.
        for scale in (1.5, 12.0):
            chosen, experts = ids(rng, shape), [NVFP4.draw(rng, shape.n, shape.k) for _ in range(shape.experts)]
            gate, up = normal(rng, shape.top_k, shape.k, scale=scale), normal(rng, shape.top_k, shape.k, scale=scale)
            got, what = run_gated(gpu, function, gate, up, chosen, experts, shape.n), f"{shape} scale={scale}"
            alone = normal(rng, shape.k), normal(rng, shape.k)
            fused, _ = run_down(gpu, FMT, (gate, up), alone, chosen, list(experts), None, shape.n)
            assert_same_bits(got, fused, f"{what}, against the kernel with a shared expert")
            for slot, expert in enumerate(chosen):
                weight, row = weights(*experts[expert]), gated(gate[slot], up[slot])
                slack = lost_gated(shape.k) * (np.abs(weight) @ np.abs(row))
                assert_rounds(got[slot], weight @ row, 0.0, slack, what)


def _registered() -> list[str]:
    for function in GATE_UP:
        checks(f"moe_expert_gemv_fused::{function}")(lambda gpu, rng, f=function: check_gate_up(gpu, rng, f))  # type: ignore[misc]
    for function in SILU_DOWN:
        checks(f"moe_expert_gemv_fused::{function}")(lambda gpu, rng, f=function: check_silu_down(gpu, rng, f))  # type: ignore[misc]
    return [f"moe_expert_gemv_fused::{function}" for function in (*GATE_UP, *SILU_DOWN)]


def test_moe_expert_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_expert_gemv(gpu, rng)


@pytest.mark.parametrize("name", _registered())
def test_both_projections_and_the_gated_one(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    CHECKS[name](gpu, rng)


@pytest.mark.parametrize("function", SILU_DOWN)
def test_every_number_of_outputs_is_covered(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    shape = Shape(2, 1, 36, 32)
    expert, chosen = NVFP4.draw(rng, shape.n, shape.k), np.array([0], U32)
    gate, up = normal(rng, 1, shape.k), normal(rng, 1, shape.k)
    whole = run_gated(gpu, function, gate, up, chosen, [expert], shape.n)
    for n in range(1, shape.n):
        part = (expert[0][:n], expert[1][:n], expert[2])
        got = run_gated(gpu, function, gate, up, chosen, [part], n)
        assert_same_bits(got, np.ascontiguousarray(whole[:, :n]), f"N={n}")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n": 0}, "n"),
        ({"k": 24}, "k"),
        ({"top_k": 0}, "top_k"),
        ({"input_stride": 36}, "input_stride"),
        ({"input_stride": 16}, "input_stride"),
        ({"input_stride": True}, "input_stride"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, tables, stream = upload(gpu, normal(rng, 64)), FMT.tables(gpu, [None]), gpu.default_stream()
    numbers = {"n": 4, "k": 32, "top_k": 1} | change
    stride = numbers.pop("input_stride", 0)
    with pytest.raises(InvalidArgumentError) as error:
        gemv_ops.moe_expert_gemv(
            gpu, gpu.kernel("moe_expert_gemv", "moe_expert_gemv"), ptr, tables, ptr, ptr, **numbers,
            input_stride=stride, stream=stream,
        )  # fmt: skip
    assert error.value.name == name
    if "input_stride" in change:
        return
    gate_up, down = (gpu.kernel("moe_expert_gemv_fused", each) for each in (GATE_UP[0], SILU_DOWN[0]))
    for launch in (
        lambda: ops.moe_expert_gemv_gate_up(gpu, gate_up, ptr, tables, ptr, tables, ptr, ptr, **numbers, stream=stream),
        lambda: ops.moe_expert_gemv_silu_down(gpu, down, ptr, ptr, tables, ptr, ptr, **numbers, stream=stream),
    ):
        with pytest.raises(InvalidArgumentError) as error:
            launch()
        assert error.value.name == name


def test_another_kernel_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, tables, stream = upload(gpu, normal(rng, 64)), FMT.tables(gpu, [None]), gpu.default_stream()
    gate_up, down = (gpu.kernel("moe_expert_gemv_fused", each) for each in (GATE_UP[1], SILU_DOWN[1]))
    with pytest.raises(InvalidArgumentError, match="silu_down"):
        ops.moe_expert_gemv_gate_up(gpu, down, ptr, tables, ptr, tables, ptr, ptr, 4, 32, 1, stream)
    with pytest.raises(InvalidArgumentError, match="gate_up"):
        ops.moe_expert_gemv_silu_down(gpu, gate_up, ptr, ptr, tables, ptr, ptr, 4, 32, 1, stream)
    with pytest.raises(NullHandleError):
        ops.moe_expert_gemv_silu_down(gpu, KernelHandle(0), ptr, ptr, tables, ptr, ptr, 4, 32, 1, stream)
