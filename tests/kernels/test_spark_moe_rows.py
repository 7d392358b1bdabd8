# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_rows: every row has the bits that the kernel for one row gives it."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py.ops import moe_shared_expert_fused_bf16 as single_ops
from spark_py.ops import spark_moe_rows as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Array, Output, Table, assert_same_bits, normal, upload
from spark_py.testing.cases import moe_weighted_sum_blend as blend
from spark_py.testing.cases.moe_shared_expert_fused_bf16 import down, gate_up

from .experts import on_device, row, weights
from .support import checks
from .test_moe_shared_expert_fused_bf16 import Drawn, run_down, run_gate_up
from .test_moe_weighted_sum_blend import run as run_blend

MODULE = "spark_moe_rows"
# Rows, then outputs, inputs, experts of a row and experts in all.
SHAPES = ((1, 9, 24, 2, 3), (4, 17, 520, 3, 4), (3, 8, 2064, 2, 5), (7, 5, 1040, 1, 2))


def rows_gate_up(gpu: GpuBackend, drawn: Drawn, rows: int) -> tuple[Array, ...]:
    """(gate_out, up_out, sh_gate_out, sh_up_out)."""
    d, n, k = on_device(gpu, drawn), int(drawn["N"]), int(drawn["top_k"])  # type: ignore[arg-type]
    outputs = [Output(gpu, shape) for shape in ((rows, k, n), (rows, k, n), (rows, n), (rows, n))]
    gate, up, sh_gate, sh_up = (output.ptr for output in outputs)
    ops.spark_moe_expert_gate_up_shared_bf16_rows(
        gpu,
        gpu.kernel(MODULE, "spark_moe_expert_gate_up_shared_bf16_rows"),
        d["A"],
        d["gate_weight_ptrs"],
        gate,
        d["up_weight_ptrs"],
        up,
        d["expert_indices"],
        d["sh_gate_weight"],
        sh_gate,
        d["sh_up_weight"],
        sh_up,
        rows,
        n,
        d["K"],
        k,
        gpu.default_stream(),
    )
    return tuple(output.read() for output in outputs)


def rows_down(gpu: GpuBackend, drawn: Drawn, rows: int) -> tuple[Array, Array]:
    """(C, sh_down_out)."""
    d, n, k = on_device(gpu, drawn), int(drawn["N"]), int(drawn["top_k"])  # type: ignore[arg-type]
    routed, shared = Output(gpu, (rows, k, n)), Output(gpu, (rows, n))
    ops.spark_moe_expert_silu_down_shared_bf16_rows(
        gpu,
        gpu.kernel(MODULE, "spark_moe_expert_silu_down_shared_bf16_rows"),
        d["gate_out"],
        d["up_out"],
        d["weight_ptrs"],
        routed.ptr,
        d["expert_indices"],
        d["sh_gate_in"],
        d["sh_up_in"],
        d["sh_down_weight"],
        shared.ptr,
        rows,
        n,
        d["K"],
        k,
        gpu.default_stream(),
    )
    return routed.read(), shared.read()


def rows_blend(gpu: GpuBackend, drawn: dict[str, Array], gated: bool) -> Array:
    rows, k, hidden = drawn["expert_out"].shape
    output, size = Output(gpu, (rows, hidden)), drawn["input"].shape[1]
    experts, factors, shared, x, gate = (upload(gpu, drawn[name]) for name in drawn)
    ops.spark_moe_weighted_sum_blend_rows(
        gpu,
        gpu.kernel(MODULE, "spark_moe_weighted_sum_blend_rows"),
        output.ptr,
        experts,
        factors,
        shared,
        x,
        gate if gated else DevicePtr.NULL,
        rows,
        hidden,
        k,
        size,
        gpu.default_stream(),
    )
    return output.read()


def elsewhere(drawn: Drawn) -> dict[str, object]:
    """The first expert of each table lives elsewhere."""
    return {
        name: Table([None, *weights(drawn, name)[1:]]) if isinstance(value, Table) else value
        for name, value in drawn.items()
    }


@checks("spark_moe_rows::spark_moe_expert_gate_up_shared_bf16_rows")
def check_gate_up_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows, *shape in SHAPES:
        for cancel in (False, True) if shape[1] % 16 == 0 else (False,):
            drawn = gate_up(rng, (rows,), *shape, cancel=cancel)
            if shape[-1] == 4:
                drawn = elsewhere(drawn)  # type: ignore[assignment]
            got = rows_gate_up(gpu, drawn, rows)
            for t in range(rows):
                alone = run_gate_up(gpu, row(drawn, t, "A", "expert_indices"))
                for name, part, whole in zip(("gate", "up", "shared gate", "shared up"), alone, got, strict=True):
                    assert_same_bits(whole[t], part, f"{rows} rows, N, K, k, E = {shape}, row {t}, {name}")


@checks("spark_moe_rows::spark_moe_expert_silu_down_shared_bf16_rows")
def check_down_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    by_row = "gate_out", "up_out", "expert_indices", "sh_gate_in", "sh_up_in"
    for rows, *shape in SHAPES:
        for cancel in (False, True) if shape[1] % 16 == 0 else (False,):
            drawn = down(rng, (rows,), *shape, cancel=cancel)
            if shape[-1] == 4:
                drawn = elsewhere(drawn)  # type: ignore[assignment]
            got = rows_down(gpu, drawn, rows)
            for t in range(rows):
                alone = run_down(gpu, row(drawn, t, *by_row))
                for name, part, whole in zip(("routed", "shared"), alone, got, strict=True):
                    assert_same_bits(whole[t], part, f"{rows} rows, N, K, k, E = {shape}, row {t}, {name}")


@checks("spark_moe_rows::spark_moe_weighted_sum_blend_rows")
def check_blend_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows, hidden, k, size in ((1, 5, 2, 16), (4, 300, 3, 264), (3, 257, 10, 2056), (9, 64, 1, 8)):
        draws = [blend.inputs(rng, (rows,), hidden, k, size)]
        if k % 2 == 0:
            draws.append(blend.cancelling(rng, (rows,), hidden, k))
        for drawn in draws:
            for gated in (True, False):
                got = rows_blend(gpu, drawn, gated)
                for t in range(rows):
                    alone = {name: value if name == "gate_weight" else value[t] for name, value in drawn.items()}
                    what = f"{rows} rows, H={hidden} k={k}, row {t}, gated={gated}"
                    assert_same_bits(got[t], run_blend(gpu, alone, gated), what)


def test_gate_up_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gate_up_rows(gpu, rng)


def test_down_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down_rows(gpu, rng)


def test_blend_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_blend_rows(gpu, rng)


@pytest.mark.parametrize(
    ("rows", "n", "k", "top_k", "name"),
    [(0, 4, 8, 1, "rows"), (1, 0, 8, 1, "n"), (1, 4, 12, 1, "k"), (1, 4, 8, 0, "top_k"), (True, 4, 8, 1, "rows")],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, rows: int, n: int, k: int, top_k: int, name: str
) -> None:
    p, s, sizes = upload(gpu, normal(rng, 64)), gpu.default_stream(), (rows, n, k, top_k)
    forms = ("expert_gate_up_shared_bf16", "expert_silu_down_shared_bf16", "weighted_sum_blend")
    first, second, third = (gpu.kernel(MODULE, f"spark_moe_{form}_rows") for form in forms)
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_expert_gate_up_shared_bf16_rows(gpu, first, p, p, p, p, p, p, p, p, p, p, *sizes, s)
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_expert_silu_down_shared_bf16_rows(gpu, second, p, p, p, p, p, p, p, p, p, *sizes, s)
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_weighted_sum_blend_rows(gpu, third, p, p, p, p, p, p, rows, n, top_k, k, s)
    assert error.value.name == ("hidden" if name == "n" else name)


def test_the_kernel_of_another_grid_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    p, s = upload(gpu, normal(rng, 64)), gpu.default_stream()
    one = gpu.kernel("moe_shared_expert_fused_bf16", "moe_expert_gate_up_shared_bf16")
    with pytest.raises(InvalidArgumentError, match="gate_up_shared_bf16_rows"):
        ops.spark_moe_expert_gate_up_shared_bf16_rows(gpu, one, p, p, p, p, p, p, p, p, p, p, 1, 1, 8, 1, s)
    many = gpu.kernel(MODULE, "spark_moe_expert_silu_down_shared_bf16_rows")
    with pytest.raises(InvalidArgumentError, match="moe_expert_silu_down_shared_bf16"):
        single_ops.moe_expert_silu_down_shared_bf16(gpu, many, p, p, p, p, p, p, p, p, p, 1, 8, 1, s)
