# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_expert_mxfp4: experts with the bits of spark_mxfp4_gemv, the limited activation, several rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_moe_expert_mxfp4 as ops
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, U32, Array, Output, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.moe_shared_expert_fused import Shape, ids, lost, lost_gated, mirrored_rows
from spark_py.testing.cases.spark_moe_expert_mxfp4 import MXFP4
from spark_py.testing.cases.spark_moe_expert_silu_down_clamped import EVEN, LIMIT
from spark_py.testing.cases.spark_moe_silu_mul_clamped import exact
from spark_py.testing.cases.spark_mxfp4_gemv import weights

from .moe_formats import addresses
from .mxfp4 import exactly
from .support import checks
from .test_spark_mxfp4_gemv import run as run_gemv

MODULE = "spark_moe_expert_mxfp4"
GATE_UP, DOWN = "spark_moe_expert_gate_up_mxfp4", "spark_moe_expert_silu_down_clamped_mxfp4"
SHAPES = [Shape(3, 2, 1, 32), Shape(5, 3, 7, 96), Shape(3, 2, 35, 544), Shape(2, 1, 9, 4160)]
ROWS = [Shape(5, 3, 9, 96, 3), Shape(3, 2, 5, 2080, 3), Shape(4, 2, 8, 64, 1)]

Experts = list[Any]


def tables(gpu: GpuBackend, experts: Experts) -> ops.Mxfp4Tables:
    packed, scales = (addresses(gpu, [each and each[part] for each in experts]) for part in (0, 1))
    return ops.Mxfp4Tables(packed, scales)


def run_gate_up(gpu: GpuBackend, x: Array, chosen: Array, gate: Experts, up: Experts, n: int) -> tuple[Array, Array]:
    """x [K] and chosen [k], or [rows, K] and [rows, k]."""
    lead, top_k = x.shape[:-1], chosen.shape[-1]
    first, second = (Output(gpu, (*lead, top_k, n)) for _ in range(2))
    ops.moe_expert_gate_up_mxfp4(
        gpu, gpu.kernel(MODULE, f"{GATE_UP}_rows" if lead else GATE_UP), upload(gpu, x), tables(gpu, gate), first.ptr,
        tables(gpu, up), second.ptr, upload(gpu, chosen), n, x.shape[-1], top_k, gpu.default_stream(),
        rows=lead[0] if lead else None,
    )  # fmt: skip
    return first.read(), second.read()


def run_down(
    gpu: GpuBackend, gate: Array, up: Array, chosen: Array, experts: Experts, n: int, limit: float = LIMIT
) -> Array:
    """gate and up [k, K], or with an axis of rows before."""
    *lead, top_k, k = gate.shape
    output, name = Output(gpu, (*lead, top_k, n)), f"{DOWN}_rows" if lead else DOWN
    ops.moe_expert_silu_down_clamped_mxfp4(
        gpu, gpu.kernel(MODULE, name), upload(gpu, gate), upload(gpu, up), tables(gpu, experts), output.ptr,
        upload(gpu, chosen), n, k, top_k, limit, gpu.default_stream(), rows=lead[0] if lead else None,
    )  # fmt: skip
    return output.read()


def draw(rng: np.random.Generator, shape: Shape, order: Array | None = None) -> Experts:
    if order is None:
        return [MXFP4.draw(rng, shape.n, shape.k) for _ in range(shape.experts)]
    return [MXFP4.mirrored(rng, shape.n, shape.k, order) for _ in range(shape.experts)]


def close(got: Array, x: Any, expert: Any, most: float, what: str) -> None:
    weight = weights(*expert)
    assert_rounds(got, weight @ x, 0.0, most * (np.abs(weight) @ np.abs(x)), what)


@checks(f"{MODULE}::{GATE_UP}")
def check_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    reference = catalog.CATALOG[MODULE, GATE_UP].reference
    for shape in SHAPES:
        order, chosen = rng.permutation(shape.k // 2), ids(rng, shape)
        for mirrored in (False, True):
            gate, up = (draw(rng, shape, order if mirrored else None) for _ in range(2))
            x = mirrored_rows(rng, (), shape.k, order) if mirrored else normal(rng, shape.k)
            got, what = run_gate_up(gpu, x, chosen, gate, up, shape.n), f"{shape} {mirrored=}"
            expected = reference(x, [gate[e] for e in chosen], [up[e] for e in chosen], shape.n)
            for experts, values, wanted in zip((gate, up), got, expected, strict=True):
                assert_same_bits(values, wanted, what)
                for slot, expert in enumerate(chosen):
                    close(values[slot], f64(x), experts[expert], lost(shape.k), f"slot {slot}, {what}")
                alone = run_gemv(gpu, x, *experts[chosen[-1]])
                assert_same_bits(values[-1], alone, f"{what}, against spark_mxfp4_gemv")
    shape = Shape(4, 3, 21, 64)
    gate, up = draw(rng, shape), draw(rng, shape)
    gate[1] = up[0] = None
    got = run_gate_up(gpu, normal(rng, shape.k), np.array([3, 1, 0], U32), gate, up, shape.n)
    assert [bool(f64(row).any()) for row in (*got[0], *got[1])] == [True, False, True, True, True, False]


@checks(f"{MODULE}::{DOWN}")
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    reference = catalog.CATALOG[MODULE, DOWN].reference
    for shape in SHAPES:
        for scale, limit in ((1.5, LIMIT), (12.0, LIMIT), (4.0, 2.5)):
            chosen, experts = ids(rng, shape), draw(rng, shape)
            gate, up = normal(rng, shape.top_k, shape.k, scale=scale), normal(rng, shape.top_k, shape.k, scale=scale)
            got, what = run_down(gpu, gate, up, chosen, experts, shape.n, limit), f"{shape} {scale=} {limit=}"
            for slot, expert in enumerate(chosen):
                a = exact(gate[slot], up[slot], limit)
                close(got[slot], a, experts[expert], lost_gated(shape.k), f"slot {slot}, {what}")
        order, chosen = rng.permutation(shape.k // 2), ids(rng, shape)
        experts = draw(rng, shape, order)
        gate = rng.uniform(20.0, 120.0, (shape.top_k, shape.k)).astype(BF16)
        gate[:, shape.k // 2 :] = gate[:, order]
        up = mirrored_rows(rng, (shape.top_k,), shape.k, order)
        got, what = run_down(gpu, gate, up, chosen, experts, shape.n, EVEN), f"{shape}, cancels"
        assert_same_bits(got, reference(gate, up, [experts[e] for e in chosen], shape.n, EVEN), what)
        a = np.minimum(gate[0].astype(np.float32), np.float32(EVEN)) * np.clip(up[0].astype(np.float32), -EVEN, EVEN)
        codes, scales = experts[chosen[0]]
        alone = np.array([exactly(a, codes[-1], scales[-1])], np.float32).astype(BF16)
        assert_same_bits(got[0, -1:], alone, f"{what}, in exact arithmetic")
    shape = Shape(3, 2, 9, 64)
    experts, chosen = draw(rng, shape), np.array([2, 0], U32)
    # Gates far below -limit are not clamped there: what is left of them is a few orders of magnitude smaller.
    gate, up = -rng.uniform(12.0, 30.0, (2, shape.k)).astype(BF16), normal(rng, 2, shape.k)
    got = run_down(gpu, gate, up, chosen, experts, shape.n)
    for slot, expert in enumerate(chosen):
        close(got[slot], exact(gate[slot], up[slot], LIMIT), experts[expert], lost_gated(shape.k), "gates below -limit")
    experts[2] = None
    got = run_down(gpu, normal(rng, 2, shape.k), up, chosen, experts, shape.n)
    assert [bool(f64(row).any()) for row in got] == [False, True]


@checks(f"{MODULE}::{GATE_UP}_rows")
def check_gate_up_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Each row has the bits that the kernel for one gives it."""
    for shape in ROWS:
        order, chosen = rng.permutation(shape.k // 2), ids(rng, shape)
        gate, up = draw(rng, shape, order), draw(rng, shape, order)
        x = mirrored_rows(rng, shape.lead, shape.k, order)
        together = run_gate_up(gpu, x, chosen, gate, up, shape.n)
        for row in range(len(x)):
            alone = run_gate_up(gpu, x[row], chosen[row], gate, up, shape.n)
            for values, wanted in zip(together, alone, strict=True):
                assert_same_bits(values[row], wanted, f"row {row}, {shape}")


@checks(f"{MODULE}::{DOWN}_rows")
def check_down_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for shape in ROWS:
        experts, chosen = draw(rng, shape), ids(rng, shape)
        gate, up = (normal(rng, *shape.lead, shape.top_k, shape.k, scale=12.0) for _ in range(2))
        together = run_down(gpu, gate, up, chosen, experts, shape.n)
        for row in range(len(gate)):
            alone = run_down(gpu, gate[row], up[row], chosen[row], experts, shape.n)
            assert_same_bits(together[row], alone, f"row {row}, {shape}")


def test_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gate_up(gpu, rng)


def test_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down(gpu, rng)


def test_gate_up_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gate_up_rows(gpu, rng)


def test_down_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down_rows(gpu, rng)


def test_every_number_of_outputs_is_covered(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape, chosen = Shape(1, 1, 20, 64), np.array([0], U32)
    (packed, scales), gate, up = draw(rng, shape)[0], normal(rng, 1, shape.k), normal(rng, 1, shape.k)
    whole = run_down(gpu, gate, up, chosen, [(packed, scales)], shape.n)
    for n in range(1, shape.n):
        got = run_down(gpu, gate, up, chosen, [(packed[:n], scales[:n])], n)
        assert_same_bits(got, np.ascontiguousarray(whole[:, :n]), f"N={n}")


def test_nan_and_infinity_stay_in_their_slot(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape, chosen = Shape(3, 3, 9, 64), np.array([0, 1, 2], U32)
    gate, up = normal(rng, 3, shape.k), normal(rng, 3, shape.k)
    gate[1, 20], gate[2, 5], up[2, 6] = np.nan, np.inf, -np.inf  # the limit takes the infinities away
    got = run_down(gpu, gate, up, chosen, draw(rng, shape), shape.n)
    assert np.isnan(f64(got[1])).all()
    assert np.isfinite(f64(got[[0, 2]])).all()


def test_a_down_projection_larger_than_the_default_shared_memory(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape = Shape(1, 1, 3, 12320)
    experts, gate, up = draw(rng, shape), normal(rng, 1, shape.k), normal(rng, 1, shape.k)
    got = run_down(gpu, gate, up, np.array([0], U32), experts, shape.n)
    close(got[0], exact(gate[0], up[0], LIMIT), experts[0], lost_gated(shape.k), str(shape))


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
        ({"limit": float("inf")}, "limit"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, stream, some = upload(gpu, normal(rng, 64)), gpu.default_stream(), tables(gpu, [None])
    numbers = {"n": 4, "k": 32, "top_k": 1, "limit": LIMIT} | change
    suffix = "_rows" if "rows" in change else ""
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_expert_silu_down_clamped_mxfp4(
            gpu, gpu.kernel(MODULE, DOWN + suffix), ptr, ptr, some, ptr, ptr, stream=stream, **numbers
        )
    assert error.value.name == name
    del numbers["limit"]
    if name != "limit":
        with pytest.raises(InvalidArgumentError) as error:
            ops.moe_expert_gate_up_mxfp4(
                gpu, gpu.kernel(MODULE, GATE_UP + suffix), ptr, some, ptr, some, ptr, ptr, stream=stream, **numbers
            )
        assert error.value.name == name


def test_the_kernel_of_another_grid_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream, some = upload(gpu, normal(rng, 64)), gpu.default_stream(), tables(gpu, [None])
    for name, rows in ((f"{GATE_UP}_rows", None), (GATE_UP, 1)):
        with pytest.raises(InvalidArgumentError, match=name):
            ops.moe_expert_gate_up_mxfp4(
                gpu, gpu.kernel(MODULE, name), ptr, some, ptr, some, ptr, ptr, 4, 32, 1, stream, rows=rows
            )
    for name, rows in ((f"{DOWN}_rows", None), (DOWN, 1)):
        with pytest.raises(InvalidArgumentError, match=name):
            ops.moe_expert_silu_down_clamped_mxfp4(
                gpu, gpu.kernel(MODULE, name), ptr, ptr, some, ptr, ptr, 4, 32, 1, LIMIT, stream, rows=rows
            )


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_an_expert_beyond_the_tables_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    shape = Shape(2, 2, 5, 64)
    gate, up, x = draw(rng, shape), draw(rng, shape), normal(rng, shape.k)
    with pytest.raises(ArgumentPointerError, match="_ptrs"):
        run_gate_up(gpu, x, np.array([0, 2], U32), gate, up, shape.n)
    short = [gate[0], (gate[1][0][:3], gate[1][1])]
    with pytest.raises(ArgumentPointerError, match="entry 1"):
        run_gate_up(gpu, x, np.array([0, 1], U32), short, up, shape.n)
