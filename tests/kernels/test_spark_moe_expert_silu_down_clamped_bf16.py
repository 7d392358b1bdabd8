# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_expert_silu_down_clamped_bf16: the limit holds for routed experts and for the shared one, row by
row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_moe_expert_silu_down_clamped_bf16 as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import Array, Output, assert_rounds, assert_same_bits, f64
from spark_py.testing.cases.moe_shared_expert_fused import lost_gated
from spark_py.testing.cases.moe_shared_expert_fused_bf16 import down
from spark_py.testing.cases.spark_moe_expert_silu_down_clamped import EVEN, LIMIT
from spark_py.testing.cases.spark_moe_expert_silu_down_clamped_bf16 import even, far_below
from spark_py.testing.cases.spark_moe_silu_mul_clamped import exact

from .experts import on_device, row
from .support import checks
from .test_moe_shared_expert_fused_bf16 import Drawn
from .test_spark_moe_rows import elsewhere, rows_down

MODULE = "spark_moe_expert_silu_down_clamped_bf16"
BY_ROW = ("gate_out", "up_out", "expert_indices", "sh_gate_in", "sh_up_in")
# Rows, then outputs, inputs, experts of a row and experts in all.
SHAPES = ((1, 9, 24, 2, 3), (4, 17, 520, 3, 4), (2, 8, 2064, 2, 5))


def run(gpu: GpuBackend, drawn: Drawn, limit: float) -> tuple[Array, Array]:
    """(C, sh_down_out)."""
    d, n, k = on_device(gpu, drawn), int(drawn["N"]), int(drawn["top_k"])  # type: ignore[arg-type]
    rows = len(drawn["expert_indices"])  # type: ignore[arg-type]
    routed, shared = Output(gpu, (rows, k, n)), Output(gpu, (rows, n))
    ops.moe_expert_silu_down_clamped_bf16_rows(
        gpu, gpu.kernel(MODULE, f"{MODULE}_rows"), d["gate_out"], d["up_out"], d["weight_ptrs"], routed.ptr,
        d["expert_indices"], d["sh_gate_in"], d["sh_up_in"], d["sh_down_weight"], shared.ptr, rows, n, d["K"], k,
        limit, gpu.default_stream(),
    )  # fmt: skip
    return routed.read(), shared.read()


def close(got: Array, gate: Array, up: Array, limit: float, weight: Array | None, what: str) -> None:
    if weight is None:
        assert not got.any(), what
        return
    a = exact(gate, up, limit)
    assert_rounds(got, f64(weight) @ a, 0.0, lost_gated(gate.size) * (np.abs(f64(weight)) @ np.abs(a)), what)


@checks(f"{MODULE}::{MODULE}_rows")
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    draws: list[tuple[Any, float]] = [(far_below(rng), LIMIT), (even(rng, (13, 1040, 2, 3)), EVEN)]
    for rows, *shape in SHAPES:
        for scale, limit in ((12.0, LIMIT), (4.0, 2.5)):
            drawn = down(rng, (rows,), *shape, scale=scale)
            draws.append((elsewhere(drawn) if shape[-1] == 4 else drawn, limit))
    for drawn, limit in draws:
        routed, shared = run(gpu, drawn, limit)
        table, alone = drawn["weight_ptrs"].entries, drawn["sh_down_weight"]
        for t, chosen in enumerate(drawn["expert_indices"]):
            what = f"limit {limit}, K={drawn['K']}, row {t}"
            for slot, expert in enumerate(chosen):
                gate, up = drawn["gate_out"][t, slot], drawn["up_out"][t, slot]
                close(routed[t, slot], gate, up, limit, table[expert], f"{what}, slot {slot}")
            close(shared[t], drawn["sh_gate_in"][t], drawn["sh_up_in"][t], limit, alone, f"{what}, shared")


def test_outputs(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down(gpu, rng)


def test_a_row_has_its_bits_alone(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for drawn, limit in ((down(rng, (4,), 17, 520, 3, 4, scale=12.0), LIMIT), (even(rng, (6, 2064, 2, 4)), EVEN)):
        got = run(gpu, drawn, limit)  # type: ignore[arg-type]
        for t in range(len(got[0])):
            for whole, alone in zip(got, run(gpu, row(drawn, slice(t, t + 1), *BY_ROW), limit), strict=True):  # type: ignore[arg-type]
                assert_same_bits(whole[t : t + 1], alone, f"row {t}")


def test_below_the_limit_the_bits_are_those_without_one(gpu: GpuBackend, rng: np.random.Generator) -> None:
    drawn = down(rng, (3,), 9, 2056, 2, 3)
    for limited, plain in zip(run(gpu, drawn, 1e30), rows_down(gpu, drawn, 3), strict=True):
        assert_same_bits(limited, plain)


def test_bad_arguments_raise(gpu: GpuBackend, rng: np.random.Generator) -> None:
    drawn = down(rng, (1,), 9, 24, 2, 3)
    for limit in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="limit"):
            run(gpu, drawn, limit)
    with pytest.raises(InvalidArgumentError, match="k is 20"):
        run(gpu, drawn | {"K": 20}, LIMIT)
