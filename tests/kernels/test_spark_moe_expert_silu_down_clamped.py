# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_expert_silu_down_clamped: the limit holds for routed experts and for the shared one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_moe_expert_silu_down_clamped as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, U32, Array, Output, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.moe_shared_expert_fused import NVFP4, Shape, ids, lost_gated, mirrored_rows
from spark_py.testing.cases.spark_moe_expert_silu_down_clamped import EVEN, LIMIT
from spark_py.testing.cases.spark_moe_silu_mul_clamped import exact
from spark_py.testing.cases.w4a16_gemv import weights

from .moe_formats import FORMATS
from .moe_formats import run_down as run_unlimited
from .support import checks

FMT = FORMATS["nvfp4"]
MODULE = "spark_moe_expert_silu_down_clamped"
SHAPES = [Shape(3, 2, 1, 16), Shape(5, 3, 5, 48), Shape(2, 1, 9, 2064), Shape(4, 2, 34, 544)]

Pair = tuple[Array, Array]


def run(
    gpu: GpuBackend, rows: Pair, alone: Pair, chosen: Array, down: list[Any], shared: Any, n: int, limit: float
) -> Pair:
    """(gate, up) [k, K] and for the shared expert [K], or with an axis of rows before."""
    *lead, top_k, k = rows[0].shape
    output, sh_output = Output(gpu, (*lead, top_k, n)), Output(gpu, (*lead, n))
    gate, up, sh_gate, sh_up = (upload(gpu, each) for each in (*rows, *alone))
    ops.moe_expert_silu_down_clamped(
        gpu, gpu.kernel(MODULE, f"{MODULE}_rows" if lead else MODULE), gate, up, FMT.tables(gpu, down), output.ptr,
        upload(gpu, chosen), sh_gate, sh_up, FMT.on_device(gpu, shared), sh_output.ptr, n, k, top_k, limit,
        gpu.default_stream(), rows=lead[0] if lead else None,
    )  # fmt: skip
    return output.read(), sh_output.read()


def draw(rng: np.random.Generator, shape: Shape) -> tuple[list[Any], Any]:
    return [NVFP4.draw(rng, shape.n, shape.k) for _ in range(shape.experts)], NVFP4.draw(rng, shape.n, shape.k)


def pairs(rng: np.random.Generator, shape: Shape, scale: float) -> tuple[Pair, Pair]:
    lead = (*shape.lead, shape.top_k, shape.k)
    rows = normal(rng, *lead, scale=scale), normal(rng, *lead, scale=scale)
    return rows, (normal(rng, *shape.lead, shape.k, scale=scale), normal(rng, *shape.lead, shape.k, scale=scale))


def close(got: Array, gate: Array, up: Array, limit: float, expert: Any, what: str) -> None:
    weight, a = weights(*expert), exact(gate, up, limit)
    assert_rounds(got, weight @ a, 0.0, lost_gated(gate.size) * (np.abs(weight) @ np.abs(a)), what)


@checks(f"{MODULE}::{MODULE}")
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    reference = catalog.CATALOG[MODULE, MODULE].reference
    for shape in SHAPES:
        for scale, limit in ((12.0, LIMIT), (4.0, 2.5)):
            (experts, shared), chosen = draw(rng, shape), ids(rng, shape)
            rows, alone = pairs(rng, shape, scale)
            got, sh_got = run(gpu, rows, alone, chosen, experts, shared, shape.n, limit)
            for slot, expert in enumerate(chosen):
                close(got[slot], rows[0][slot], rows[1][slot], limit, experts[expert], f"slot {slot}, {shape}")
            close(sh_got, *alone, limit, shared, f"shared, {shape}")
    for shape in (Shape(3, 2, 7, 32), Shape(2, 1, 5, 4128)):
        order = rng.permutation(shape.k // 2)
        experts = [NVFP4.mirrored(rng, shape.n, shape.k, order) for _ in range(shape.experts + 1)]
        gates = rng.uniform(20.0, 120.0, (shape.top_k + 1, shape.k)).astype(BF16)
        gates[:, shape.k // 2 :] = gates[:, order]
        ups, chosen = mirrored_rows(rng, (shape.top_k + 1,), shape.k, order), ids(rng, shape)
        got, sh_got = run(
            gpu, (gates[:-1], ups[:-1]), (gates[-1], ups[-1]), chosen, experts[:-1], experts[-1], shape.n, EVEN
        )
        expected = reference(gates, ups, [*(experts[e] for e in chosen), experts[-1]], shape.n, EVEN)
        assert_same_bits(got, expected[:-1], f"{shape}, cancels")
        assert_same_bits(sh_got, expected[-1], f"shared, {shape}, cancels")
    shape = Shape(3, 2, 9, 48)
    (experts, shared), chosen = draw(rng, shape), np.array([2, 0], U32)
    # Gates far below -limit are not clamped there: what is left of them is a few orders of magnitude smaller.
    rows = -rng.uniform(12.0, 30.0, (2, shape.k)).astype(BF16), normal(rng, 2, shape.k)
    alone = -rng.uniform(12.0, 30.0, shape.k).astype(BF16), normal(rng, shape.k)
    got, sh_got = run(gpu, rows, alone, chosen, experts, shared, shape.n, LIMIT)
    close(got[1], rows[0][1], rows[1][1], LIMIT, experts[0], "gates below -limit")
    close(sh_got, *alone, LIMIT, shared, "shared, gates below -limit")
    experts[2] = None
    got, sh_got = run(gpu, rows, alone, chosen, experts, None, shape.n, LIMIT)
    assert [bool(f64(row).any()) for row in got] == [False, True]
    assert_same_bits(sh_got, np.zeros(shape.n, BF16), "no shared expert")


@checks(f"{MODULE}::{MODULE}_rows")
def check_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Each row has the bits that the kernel for one gives it."""
    for shape in (Shape(5, 3, 9, 80, 3), Shape(3, 2, 5, 2080, 3), Shape(4, 2, 8, 64, 1)):
        (experts, shared), chosen = draw(rng, shape), ids(rng, shape)
        rows, alone = pairs(rng, shape, 12.0)
        got, sh_got = run(gpu, rows, alone, chosen, experts, shared, shape.n, LIMIT)
        for row in range(len(chosen)):
            one, sh_one = (rows[0][row], rows[1][row]), (alone[0][row], alone[1][row])
            single, sh_single = run(gpu, one, sh_one, chosen[row], experts, shared, shape.n, LIMIT)
            assert_same_bits(got[row], single, f"row {row}, {shape}")
            assert_same_bits(sh_got[row], sh_single, f"shared, row {row}, {shape}")


def test_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down(gpu, rng)


def test_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rows(gpu, rng)


def test_within_the_limit_it_is_the_plain_kernel(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for shape in SHAPES:
        (experts, shared), chosen = draw(rng, shape), ids(rng, shape)
        rows, alone = pairs(rng, shape, 1.5)
        got = run(gpu, rows, alone, chosen, experts, shared, shape.n, 1000.0)
        plain = run_unlimited(gpu, FMT, rows, alone, chosen, experts, shared, shape.n)
        for values, wanted in zip(got, plain, strict=True):
            assert_same_bits(values, wanted, str(shape))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n": 0}, "n"),
        ({"k": 24}, "k"),
        ({"top_k": -1}, "top_k"),
        ({"rows": 0}, "rows"),
        ({"limit": 0.0}, "limit"),
        ({"limit": -1.0}, "limit"),
        ({"limit": float("inf")}, "limit"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, numbers = upload(gpu, normal(rng, 64)), {"n": 4, "k": 32, "top_k": 1, "limit": LIMIT} | change
    kernel = gpu.kernel(MODULE, f"{MODULE}_rows" if "rows" in change else MODULE)
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_expert_silu_down_clamped(
            gpu, kernel, ptr, ptr, FMT.tables(gpu, [None]), ptr, ptr, ptr, ptr, None, ptr,
            stream=gpu.default_stream(), **numbers,
        )  # fmt: skip
    assert error.value.name == name


def test_another_kernel_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream, some = upload(gpu, normal(rng, 64)), gpu.default_stream(), FMT.tables(gpu, [None])
    for kernel, rows in ((gpu.kernel(MODULE, f"{MODULE}_rows"), None), (gpu.kernel(MODULE, MODULE), 1)):
        with pytest.raises(InvalidArgumentError, match=kernel.name):
            ops.moe_expert_silu_down_clamped(
                gpu, kernel, ptr, ptr, some, ptr, ptr, ptr, ptr, None, ptr, 4, 32, 1, LIMIT, stream, rows=rows
            )
