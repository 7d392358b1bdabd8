# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_mxfp4_experts: experts within a tensor core's sums, all scales, and a slot's bits are its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_mxfp4_experts as ops
from spark_py.reference.spark_moe_expert_silu_down_clamped import gated_within
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, U32, Array, Output, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.moe_shared_expert_fused import Shape, ids, lost, lost_gated
from spark_py.testing.cases.spark_moe_expert_silu_down_clamped import LIMIT
from spark_py.testing.cases.spark_moe_silu_mul_clamped import exact

from .support import check_cases, checks
from .test_spark_moe_expert_mxfp4 import Experts, close, draw, tables

MODULE = "spark_mxfp4_experts"
GATE_UP, DOWN = "spark_mxfp4_experts_gate_up", "spark_mxfp4_experts_silu_down"


def run_gate_up(gpu: GpuBackend, x: Array, chosen: Array, gate: Experts, up: Experts, n: int) -> tuple[Array, Array]:
    """x [rows, K] and chosen [rows, k]."""
    (rows, k), top_k = x.shape, chosen.shape[1]
    first, second = (Output(gpu, (rows, top_k, n)) for _ in range(2))
    ops.mxfp4_experts_gate_up(
        gpu, gpu.kernel(MODULE, GATE_UP), upload(gpu, x), tables(gpu, gate), first.ptr, tables(gpu, up), second.ptr,
        upload(gpu, chosen), n, k, top_k, gpu.default_stream(), rows=rows,
    )  # fmt: skip
    return first.read(), second.read()


def run_down(
    gpu: GpuBackend, gate: Array, up: Array, chosen: Array, experts: Experts, n: int, limit: float = LIMIT
) -> Array:
    """gate and up [rows, k, K]."""
    rows, top_k, k = gate.shape
    output = Output(gpu, (rows, top_k, n))
    ops.mxfp4_experts_silu_down(
        gpu, gpu.kernel(MODULE, DOWN), upload(gpu, gate), upload(gpu, up), tables(gpu, experts), output.ptr,
        upload(gpu, chosen), n, k, top_k, limit, gpu.default_stream(), rows=rows,
    )  # fmt: skip
    return output.read()


def exact_units(rng: np.random.Generator, k: int) -> Array:
    """A row of which one element is not zero, in each chunk of 32 in turn another one."""
    x = np.zeros((k // 32, k), BF16)
    for chunk in range(k // 32):
        x[chunk, 32 * chunk + rng.integers(32)] = 2.0 ** rng.integers(3, 6)
    return x


@checks(f"{MODULE}::{GATE_UP}")
def check_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{GATE_UP}")


@checks(f"{MODULE}::{GATE_UP}@scales")
def check_scales(gpu: GpuBackend, rng: np.random.Generator) -> None:
    # Every scale but the largest, whose weights are no BF16 numbers, and NaN: products that are exact.
    codes, scales = rng.integers(0, 256, (3, 16 * 8), dtype=np.uint8), np.empty((3, 8), np.uint8)
    x = exact_units(rng, 256)
    for first in (0, 96, 120, 121, 128, 240):
        scales[:] = np.arange(first, first + 8)
        scales[2, 5] = 0xFF if first % 2 else first
        got = run_gate_up(gpu, x, np.zeros((8, 1), U32), [(codes, scales)], [(codes, scales)], 3)
        expected = catalog.CATALOG[MODULE, GATE_UP].reference
        for row in range(8):
            wanted = expected(x[row], [(codes, scales)], [None], 3)[0]
            np.testing.assert_array_equal(f64(got[0][row]), f64(wanted), f"scales from {first}")


@checks(f"{MODULE}::{DOWN}")
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::{DOWN}")


@checks(f"{MODULE}::{DOWN}@unrounded")
def check_unrounded(gpu: GpuBackend, rng: np.random.Generator) -> None:
    # Two activations whose difference two BF16 numbers for each would not show; a tensor core's sums keep it but for
    # their last bits.
    gates, ups = (rng.uniform(1, 2, 4096).astype(BF16) for _ in range(2))
    values = gated_within(gates[None], ups[None], LIMIT)[0]
    order = np.argsort(values)
    apart = np.diff(values[order])
    at = int(np.argmin(np.where(apart > 2.0**-18, apart, np.inf)))
    codes = np.zeros((4, 32), np.uint8)
    codes[:, 3], codes[:, 20] = 0x20, 0x0A  # 1 and -1
    gate, up = np.zeros((1, 1, 64), BF16), np.zeros((1, 1, 64), BF16)
    for where, which in ((7, order[at + 1]), (40, order[at])):
        gate[0, 0, where], up[0, 0, where] = gates[which], ups[which]
    experts = [(codes, np.full((4, 2), 127, np.uint8))]
    got = run_down(gpu, gate, up, np.zeros((1, 1), U32), experts, 4)
    difference = f64(values[order[at + 1]]) - f64(values[order[at]])
    assert difference < 2.0**-16
    np.testing.assert_allclose(f64(got[0, 0]), difference, rtol=0, atol=2.0**-20)


def test_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gate_up(gpu, rng)


def test_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down(gpu, rng)


def test_scales_of_all_sizes(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_scales(gpu, rng)


def test_the_activation_is_not_rounded(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_unrounded(gpu, rng)


def test_a_slot_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for shape in (Shape(5, 3, 70, 96, 3), Shape(3, 2, 5, 2080, 2)):
        gate, up, chosen = draw(rng, shape), draw(rng, shape), ids(rng, shape)
        x = normal(rng, *shape.lead, shape.k)
        rows = normal(rng, 2, *shape.lead, shape.top_k, shape.k, scale=4.0)
        projected, down = run_gate_up(gpu, x, chosen, gate, up, shape.n), run_down(gpu, *rows, chosen, gate, shape.n)
        for row in range(len(x)):
            slot = row % shape.top_k
            one = np.ascontiguousarray(chosen[row : row + 1, slot : slot + 1])
            alone = run_gate_up(gpu, x[row : row + 1], one, gate, up, shape.n)
            for whole, part in zip(projected, alone, strict=True):
                assert_same_bits(part[0, 0], whole[row, slot], f"row {row}, {shape}")
            own = (np.ascontiguousarray(each[row : row + 1, slot : slot + 1]) for each in rows)
            part = run_down(gpu, *own, one, gate, shape.n)
            assert_same_bits(part[0, 0], down[row, slot], f"down, row {row}, {shape}")


def test_every_number_of_outputs_is_covered(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape, chosen = Shape(1, 1, 67, 64), np.zeros((1, 1), U32)
    (packed, scales), gate, up = draw(rng, shape)[0], normal(rng, 1, 1, 64), normal(rng, 1, 1, 64)
    whole = run_down(gpu, gate, up, chosen, [(packed, scales)], shape.n)
    for n in (1, 2, 3, 7, 8, 9, 63, 64, 65):
        got = run_down(gpu, gate, up, chosen, [(packed[:n], scales[:n])], n)
        assert_same_bits(got, np.ascontiguousarray(whole[..., :n]), f"N={n}")


@checks(f"{MODULE}::{GATE_UP}@whole")
def check_whole_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """DeepSeek-V4's width has code of its own, with the bits of that for any."""
    shape, chosen = Shape(2, 1, 128, 4096), np.array([[1]], U32)
    gate, up = draw(rng, shape), draw(rng, shape)
    gate[1][1][5, 100] = 140  # a scale that takes two factors
    x = normal(rng, 1, shape.k)
    whole = run_gate_up(gpu, x, chosen, gate, up, shape.n)
    for part, experts in zip(whole, (gate, up), strict=True):
        close(part[0, 0], f64(x[0]), experts[1], lost(shape.k), str(shape))
    fewer = [[(codes[:127], scales[:127]) for codes, scales in experts] for experts in (gate, up)]
    for part, other in zip(whole, run_gate_up(gpu, x, chosen, *fewer, 127), strict=True):
        assert_same_bits(other[0, 0], part[0, 0, :127], "any width")


@checks(f"{MODULE}::{DOWN}@whole")
def check_whole_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape, chosen = Shape(2, 1, 128, 2048), np.array([[1]], U32)
    experts, rows = draw(rng, shape), normal(rng, 2, 1, 1, shape.k, scale=4.0)
    whole = run_down(gpu, *rows, chosen, experts, shape.n)
    close(whole[0, 0], exact(rows[0, 0, 0], rows[1, 0, 0], LIMIT), experts[1], lost_gated(shape.k), str(shape))
    fewer = [(codes[:127], scales[:127]) for codes, scales in experts]
    assert_same_bits(run_down(gpu, *rows, chosen, fewer, 127)[0, 0], whole[0, 0, :127], "any width")


def test_the_widths_of_the_model(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_whole_gate_up(gpu, rng)
    check_whole_down(gpu, rng)


def test_nan_and_infinity_stay_in_their_slot(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape, chosen = Shape(3, 3, 9, 64), np.array([[0, 1, 2]], U32)
    gate, up = normal(rng, 1, 3, shape.k), normal(rng, 1, 3, shape.k)
    gate[0, 1, 20], gate[0, 2, 5], up[0, 2, 6] = np.nan, np.inf, -np.inf  # the limit takes the infinities away
    got = run_down(gpu, gate, up, chosen, draw(rng, shape), shape.n)[0]
    assert np.isnan(f64(got[1])).all()
    assert np.isfinite(f64(got[[0, 2]])).all()


def test_a_down_projection_larger_than_the_default_shared_memory(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape = Shape(1, 1, 3, 8224)
    experts, gate, up = draw(rng, shape), normal(rng, 1, 1, shape.k), normal(rng, 1, 1, shape.k)
    got = run_down(gpu, gate, up, np.zeros((1, 1), U32), experts, shape.n)
    close(got[0, 0], exact(gate[0, 0], up[0, 0], LIMIT), experts[0], lost_gated(shape.k), str(shape))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"n": 0}, "n"),
        ({"k": 0}, "k"),
        ({"k": 48}, "k"),
        ({"top_k": 0}, "top_k"),
        ({"rows": 0}, "rows"),
        ({"limit": 0.0}, "limit"),
        ({"limit": float("nan")}, "limit"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, stream, some = upload(gpu, normal(rng, 64)), gpu.default_stream(), tables(gpu, [None])
    numbers: dict[str, Any] = {"n": 4, "k": 32, "top_k": 1, "rows": 1, "limit": 10.0} | change
    limit = numbers.pop("limit")
    if "limit" not in change:
        with pytest.raises(InvalidArgumentError) as error:
            ops.mxfp4_experts_gate_up(
                gpu, gpu.kernel(MODULE, GATE_UP), ptr, some, ptr, some, ptr, ptr, stream=stream, **numbers
            )
        assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.mxfp4_experts_silu_down(
            gpu, gpu.kernel(MODULE, DOWN), ptr, ptr, some, ptr, ptr, limit=limit, stream=stream, **numbers
        )
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_operands_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, some = upload(gpu, normal(rng, 512)), tables(gpu, [None])
    chosen = upload(gpu, np.zeros(1, U32))
    with pytest.raises(ArgumentPointerError, match="16"):
        ops.mxfp4_experts_gate_up(
            gpu, gpu.kernel(MODULE, GATE_UP), ptr.offset(2), some, ptr, some, ptr, chosen, 1, 32, 1,
            gpu.default_stream(),
        )  # fmt: skip
