# SPDX-License-Identifier: AGPL-3.0-only
"""Modules moe_shared_expert_fused and spark_moe_shared_expert_fused_fp8: experts bit for bit in their orders of
arithmetic, for one row and for several."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.reference._e4m3 import from_e4m3
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, U32, Array, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.moe_shared_expert_fused import (
    Shape,
    gated,
    ids,
    lost,
    lost_gated,
)
from spark_py.testing.cases.w4a16_gemv import weights

from .moe_formats import FORMATS, Format, Mixture, run_down, run_gate_up
from .support import CHECKS, checks

SHAPES = [Shape(3, 2, 1, 16), Shape(5, 3, 5, 48), Shape(2, 1, 9, 2064), Shape(4, 2, 34, 544)]
CANCELLING = [Shape(3, 2, 7, 32), Shape(3, 2, 13, 1056), Shape(2, 1, 5, 4128)]
EXACT = 3
"""As many outputs of each slot are computed in exact arithmetic."""
ROWS = 3


def reference_of(module: str, function: str) -> Callable[..., Any]:
    """As the catalogue has it now: a mutant may stand there."""
    return catalog.CATALOG[module, function].reference


def matrix(expert: Any) -> Any:
    """A weight in FP64."""
    if len(expert) == 3:
        return weights(*expert)
    return f64(from_e4m3(expert[0])) * f64(expert[1])[:, None]


def mixture(fmt: Format, rng: np.random.Generator, shape: Shape, order: Array | None) -> Mixture:
    def weight() -> Any:
        if order is None:
            return fmt.flavour.draw(rng, shape.n, shape.k)
        return fmt.flavour.mirrored(rng, shape.n, shape.k, order)

    gate, up = ([weight() for _ in range(shape.experts)] for _ in range(2))
    return Mixture(gate, up, weight(), weight())


def mirrored(rng: np.random.Generator, lead: tuple[int, ...], k: int, order: Array) -> Array:
    x = (rng.standard_normal((*lead, k)) * 2.0 ** rng.integers(-10, 10, (*lead, k))).astype(BF16)
    x[..., k // 2 :] = x[..., order]
    return x


def close(got: Array, x: Any, expert: Any, most: float, what: str) -> None:
    """Within what FP32 sums may lose of the exact product."""
    weight = matrix(expert)
    assert_rounds(got, weight @ x, 0.0, most * (np.abs(weight) @ np.abs(x)), what)


def exactly(got: Array, a: Array, expert: Any, fmt: Format, what: str) -> None:
    """The first and the last outputs, with every rounding written out."""
    row = [Fraction(float(each)) for each in a.tolist()]
    for at in sorted({0, 1, len(got) - 1} & set(range(len(got))))[:EXACT]:
        alone = np.array([fmt.exact(row, expert, at)]).astype(BF16)
        assert_same_bits(got[at : at + 1], alone, f"{what}, output {at}")


def check_gate_up(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    reference = reference_of(fmt.module, fmt.gate_up_name)
    for shape, cancels in [*((each, False) for each in SHAPES), *((each, True) for each in CANCELLING)]:
        order = rng.permutation(shape.k // 2) if cancels else None
        m, chosen = mixture(fmt, rng, shape, order), ids(rng, shape)
        x = normal(rng, shape.k) if order is None else mirrored(rng, (), shape.k, order)
        got, what = run_gate_up(gpu, fmt, x, chosen, m, shape.n), f"{shape}, cancels={cancels}"
        gates, ups = [*(m.gate[e] for e in chosen), m.sh_gate], [*(m.up[e] for e in chosen), m.sh_up]
        gate, up = reference(x, gates, ups, shape.n)
        assert_same_bits(got["gate_out"], gate[:-1], f"gate, {what}")
        assert_same_bits(got["sh_gate_out"], gate[-1], f"shared gate, {what}")
        assert_same_bits(got["up_out"], up[:-1], f"up, {what}")
        assert_same_bits(got["sh_up_out"], up[-1], f"shared up, {what}")
        for slot, expert in enumerate(chosen):
            close(got["gate_out"][slot], f64(x), m.gate[expert], lost(shape.k), f"gate {slot}, {what}")
            close(got["up_out"][slot], f64(x), m.up[expert], lost(shape.k), f"up {slot}, {what}")
        if cancels:
            exactly(got["gate_out"][0], x, m.gate[chosen[0]], fmt, f"gate, {what}")
            exactly(got["sh_up_out"], x, m.sh_up, fmt, f"shared up, {what}")
    absent(gpu, rng, fmt)


def absent(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    """Experts that are not there give zeros, and so does a shared expert without a gate."""
    shape = Shape(4, 3, 11, 48)
    m, x = mixture(fmt, rng, shape, None), normal(rng, shape.k)
    m.gate[1] = m.up[2] = m.sh_gate = None
    got = run_gate_up(gpu, fmt, x, np.array([0, 1, 2], U32), m, shape.n)
    assert [bool(f64(row).any()) for row in got["gate_out"]] == [True, False, True]
    assert [bool(f64(row).any()) for row in got["up_out"]] == [True, True, False]
    for name in ("sh_gate_out", "sh_up_out"):
        assert_same_bits(got[name], np.zeros(shape.n, BF16), name)


def check_down(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    reference = reference_of(fmt.module, fmt.down_name)
    for shape in [*SHAPES, Shape(3, 2, 10, 96)]:
        # Both operands go far beyond 10, where other variants of this kernel clamp.
        scale = 12.0 if shape.k == 96 else 1.5
        m, chosen, what = mixture(fmt, rng, shape, None), ids(rng, shape), str(shape)
        rows = normal(rng, shape.top_k, shape.k, scale=scale), normal(rng, shape.top_k, shape.k, scale=scale)
        sh_rows = normal(rng, shape.k, scale=scale), normal(rng, shape.k, scale=scale)
        got, sh_got = run_down(gpu, fmt, rows, sh_rows, chosen, m.gate, m.sh_gate, shape.n)
        for slot, expert in enumerate(chosen):
            a = gated(rows[0][slot], rows[1][slot])
            close(got[slot], a, m.gate[expert], lost_gated(shape.k), f"slot {slot}, {what}")
        close(sh_got, gated(*sh_rows), m.sh_gate, lost_gated(shape.k), f"shared, {what}")
    for shape in CANCELLING:
        # The sigmoid of a gate above 20 is 1 in FP32, however exp is computed.
        order, what = rng.permutation(shape.k // 2), f"{shape}, cancels"
        m, chosen = mixture(fmt, rng, shape, order), ids(rng, shape)
        gates = rng.uniform(20.0, 120.0, (shape.top_k + 1, shape.k)).astype(BF16)
        gates[:, shape.k // 2 :] = gates[:, order]
        ups = mirrored(rng, (shape.top_k + 1,), shape.k, order)
        got, sh_got = run_down(
            gpu, fmt, (gates[:-1], ups[:-1]), (gates[-1], ups[-1]), chosen, m.gate, m.sh_gate, shape.n
        )
        expected = reference(gates, ups, [*(m.gate[e] for e in chosen), m.sh_gate], shape.n)
        assert_same_bits(got, expected[:-1], what)
        assert_same_bits(sh_got, expected[-1], f"shared, {what}")
        products = gates.astype(np.float32) * ups.astype(np.float32)
        exactly(got[0], products[0], m.gate[chosen[0]], fmt, what)
        exactly(sh_got, products[-1], m.sh_gate, fmt, f"shared, {what}")
    shape = Shape(3, 2, 9, 48)
    m, chosen = mixture(fmt, rng, shape, None), np.array([2, 0], U32)
    m.gate[2] = None
    rows, sh_rows = (normal(rng, 2, 48), normal(rng, 2, 48)), (normal(rng, 48), normal(rng, 48))
    got, sh_got = run_down(gpu, fmt, rows, sh_rows, chosen, m.gate, None, shape.n)
    assert [bool(f64(row).any()) for row in got] == [False, True]
    assert_same_bits(sh_got, np.zeros(shape.n, BF16), "no shared expert")


def check_gate_up_rows(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    """Each row has the bits that the kernel for one gives it."""
    for shape in (Shape(5, 3, 9, 80, ROWS), Shape(3, 2, 5, 2080, ROWS), Shape(4, 2, 8, 64, 1)):
        order = rng.permutation(shape.k // 2)
        m, chosen = mixture(fmt, rng, shape, order), ids(rng, shape)
        x = mirrored(rng, shape.lead, shape.k, order)
        together = run_gate_up(gpu, fmt, x, chosen, m, shape.n)
        for row in range(len(x)):
            alone = run_gate_up(gpu, fmt, x[row], chosen[row], m, shape.n)
            for name, values in alone.items():
                assert_same_bits(together[name][row], values, f"{name} of row {row}, {shape}")


def check_down_rows(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    for shape in (Shape(5, 3, 9, 80, ROWS), Shape(3, 2, 5, 2080, ROWS), Shape(4, 2, 8, 64, 1)):
        m, chosen = mixture(fmt, rng, shape, None), ids(rng, shape)
        lead = (shape.rows or 1, shape.top_k, shape.k)
        rows = normal(rng, *lead), normal(rng, *lead)
        sh_rows = normal(rng, lead[0], shape.k), normal(rng, lead[0], shape.k)
        got, sh_got = run_down(gpu, fmt, rows, sh_rows, chosen, m.gate, m.sh_gate, shape.n)
        for row in range(lead[0]):
            one, sh_one = (rows[0][row], rows[1][row]), (sh_rows[0][row], sh_rows[1][row])
            alone, sh_alone = run_down(gpu, fmt, one, sh_one, chosen[row], m.gate, m.sh_gate, shape.n)
            assert_same_bits(got[row], alone, f"row {row}, {shape}")
            assert_same_bits(sh_got[row], sh_alone, f"shared, row {row}, {shape}")


def _registered() -> list[str]:
    names = []
    for fmt in FORMATS.values():
        for function, check in (
            (fmt.gate_up_name, check_gate_up),
            (fmt.down_name, check_down),
            (fmt.rows_of(fmt.gate_up_name), check_gate_up_rows),
            (fmt.rows_of(fmt.down_name), check_down_rows),
        ):
            names.append(f"{fmt.module}::{function}")
            checks(names[-1])(lambda gpu, rng, check=check, fmt=fmt: check(gpu, rng, fmt))  # type: ignore[misc]
    return names


@pytest.mark.parametrize("name", _registered())
def test_experts(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    CHECKS[name](gpu, rng)


each_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


@each_format
def test_an_expert_chosen_twice_is_computed_twice(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    shape = Shape(3, 3, 10, 48)
    m = mixture(fmt, rng, shape, None)
    got = run_gate_up(gpu, fmt, normal(rng, shape.k), np.array([2, 2, 0], U32), m, shape.n)
    assert_same_bits(got["up_out"][0], got["up_out"][1], "the same expert")
    assert got["up_out"][0].tobytes() != got["up_out"][2].tobytes()


@each_format
def test_every_number_of_outputs_is_covered(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    shape = Shape(2, 1, 20, 32)
    m, x, chosen = mixture(fmt, rng, shape, None), normal(rng, shape.k), np.array([1], U32)
    whole = run_gate_up(gpu, fmt, x, chosen, m, shape.n)
    for n in range(1, shape.n):
        part = Mixture([_cut(e, n) for e in m.gate], [_cut(e, n) for e in m.up], _cut(m.sh_gate, n), _cut(m.sh_up, n))
        for name, values in run_gate_up(gpu, fmt, x, chosen, part, n).items():
            assert_same_bits(values, np.ascontiguousarray(whole[name][..., :n]), f"{name}, N={n}")


def _cut(expert: Any, n: int) -> Any:
    return tuple(part[:n] if isinstance(part, np.ndarray) else part for part in expert)


@each_format
def test_nan_and_infinity_stay_in_their_slot(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    shape = Shape(3, 3, 9, 48)
    m = mixture(fmt, rng, shape, None)
    rows = normal(rng, 3, 48), normal(rng, 3, 48)
    rows[0][1, 20] = np.nan
    sh_rows = normal(rng, 48), normal(rng, 48)
    got, sh_got = run_down(gpu, fmt, rows, sh_rows, np.array([0, 1, 2], U32), m.gate, m.sh_gate, shape.n)
    assert np.isnan(f64(got[1])).all()
    assert np.isfinite(f64(got[[0, 2]])).all()
    assert np.isfinite(f64(sh_got)).all()


@each_format
def test_a_down_projection_larger_than_the_default_shared_memory(
    gpu: GpuBackend, rng: np.random.Generator, fmt: Format
) -> None:
    shape = Shape(1, 1, 3, 12304)
    m = mixture(fmt, rng, shape, None)
    rows, sh_rows = (normal(rng, 1, shape.k), normal(rng, 1, shape.k)), (normal(rng, shape.k), normal(rng, shape.k))
    got, _ = run_down(gpu, fmt, rows, sh_rows, np.array([0], U32), m.gate, m.sh_gate, shape.n)
    close(got[0], gated(rows[0][0], rows[1][0]), m.gate[0], lost_gated(shape.k), str(shape))


@each_format
@pytest.mark.parametrize(
    ("change", "name"),
    [({"n": 0}, "n"), ({"k": 0}, "k"), ({"k": 24}, "k"), ({"top_k": -1}, "top_k"), ({"rows": 0}, "rows")],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, fmt: Format, change: dict[str, Any], name: str
) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    tables = fmt.tables(gpu, [None])
    numbers = {"n": 4, "k": 32, "top_k": 1} | change
    rows = numbers.get("rows")

    def handle(function: str) -> Any:
        return gpu.kernel(fmt.module, function if rows is None else fmt.rows_of(function))

    with pytest.raises(InvalidArgumentError) as error:
        fmt.gate_up(
            gpu, handle(fmt.gate_up_name), ptr, tables, ptr, tables, ptr, ptr, None, ptr, None, ptr, stream=stream,
            **numbers,
        )  # fmt: skip
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        fmt.down(gpu, handle(fmt.down_name), ptr, ptr, tables, ptr, ptr, ptr, ptr, None, ptr, stream=stream, **numbers)
    assert error.value.name == name


@each_format
def test_the_kernel_of_another_grid_is_refused(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    ptr, stream, tables = upload(gpu, normal(rng, 64)), gpu.default_stream(), fmt.tables(gpu, [None])
    for function, rows in ((fmt.rows_of(fmt.gate_up_name), None), (fmt.gate_up_name, 1)):
        with pytest.raises(InvalidArgumentError, match=function):
            fmt.gate_up(
                gpu, gpu.kernel(fmt.module, function), ptr, tables, ptr, tables, ptr, ptr, None, ptr, None, ptr, 4, 32,
                1, stream, rows=rows,
            )  # fmt: skip
    for function, rows in ((fmt.rows_of(fmt.down_name), None), (fmt.down_name, 1)):
        with pytest.raises(InvalidArgumentError, match=function):
            fmt.down(
                gpu, gpu.kernel(fmt.module, function), ptr, ptr, tables, ptr, ptr, ptr, ptr, None, ptr, 4, 32, 1,
                stream, rows=rows,
            )  # fmt: skip


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
@each_format
def test_an_expert_beyond_the_tables_is_refused(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    shape = Shape(2, 2, 5, 48)
    m = mixture(fmt, rng, shape, None)
    with pytest.raises(ArgumentPointerError, match="_ptrs"):
        run_gate_up(gpu, fmt, normal(rng, shape.k), np.array([0, 2], U32), m, shape.n)
    short = [*m.gate[:1], _cut(m.gate[1], 3)]
    with pytest.raises(ArgumentPointerError, match="entry 1"):
        run_gate_up(gpu, fmt, normal(rng, shape.k), np.array([0, 1], U32), Mixture(short, m.up, None, None), shape.n)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
@each_format
def test_half_a_shared_expert_is_refused(gpu: GpuBackend, rng: np.random.Generator, fmt: Format) -> None:
    shape = Shape(2, 1, 5, 48)
    m = mixture(fmt, rng, shape, None)
    m.sh_up = None
    with pytest.raises(ArgumentRangeError, match="sh_up"):
        run_gate_up(gpu, fmt, normal(rng, shape.k), np.array([0], U32), m, shape.n)
