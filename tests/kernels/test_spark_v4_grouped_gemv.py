# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_v4_grouped_gemv: every group of every row has the bits of the GEMV of that group alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import gemv
from spark_py.ops import spark_v4_grouped_gemv as ops
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import Array, Output, alloc_or_skip, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.gemv import cancelling
from spark_py.testing.cases.spark_v4_grouped_gemv import SHAPES

from . import v4_oracle
from .support import checks

NAMES = ("spark_v4_grouped_gemv", "spark_v4_grouped_gemv")


def run(gpu: GpuBackend, x: Array, weights: Array) -> Array:
    """The outputs [M, groups, N] of x [M, groups, K] and weights [groups, N, K]."""
    groups, count, size = weights.shape
    output = Output(gpu, (len(x), groups, count))
    ops.spark_v4_grouped_gemv(
        gpu, gpu.kernel(*NAMES), upload(gpu, x), upload(gpu, weights), output.ptr, len(x), groups, count, size,
        gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def single(gpu: GpuBackend, x: Array, weights: Array) -> Array:
    """The GEMV of one group of one row."""
    count, size = weights.shape
    output, kernel = Output(gpu, (count,)), gpu.kernel("gemv", "dense_gemv_bf16")
    gemv.dense_gemv(gpu, kernel, upload(gpu, x), upload(gpu, weights), output.ptr, count, size, gpu.default_stream())
    return output.read()


def draw(rng: np.random.Generator, rows: int, groups: int, count: int, size: int) -> tuple[Array, Array]:
    """Sums that cancel in every group: the rounding of every step stays in the result."""
    parts = [cancelling(rng, (rows,), count, size) for _ in range(groups)]
    x, weights = (np.stack(each) for each in zip(*parts, strict=True))
    return np.ascontiguousarray(x.swapaxes(0, 1)), weights


@checks("::".join(NAMES))
def check_grouped_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows, groups, count, size in SHAPES:
        x, weights = draw(rng, rows, groups, count, size)
        got, what = run(gpu, x, weights), f"M={rows} groups={groups} N={count} K={size}"
        assert_same_bits(got, catalog.CATALOG[NAMES].reference(x, weights), what)
        for row, group in {(0, 0), (rows - 1, groups - 1), (rows // 2, groups // 2)}:
            alone = single(gpu, np.ascontiguousarray(x[row, group]), weights[group])
            assert_same_bits(got[row, group], alone, f"{what}, row {row}, group {group}")
        exact, terms = (
            np.stack([v4_oracle.grouped(each, way(weights).reshape(-1, size), groups) for each in way(x)])
            for way in (f64, lambda values: np.abs(f64(values)))
        )
        bound = (size / 64 + 8) * 2.0**-23 * terms + 2.0**-8 * np.abs(exact)
        assert (np.abs(f64(got).reshape(rows, -1) - exact) <= bound).all(), what


def test_grouped_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_grouped_gemv(gpu, rng)


@pytest.mark.parametrize("rows", range(1, 18))
def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    x, weights = normal(rng, rows, 2, 136), normal(rng, 2, 6, 136)
    together = run(gpu, x, weights)
    for row in {0, rows // 2, rows - 1}:
        assert_same_bits(run(gpu, x[row : row + 1], weights)[0], together[row], f"row {row} of {rows}")


def test_nan_stays_in_its_group(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weights = normal(rng, 2, 3, 64), normal(rng, 3, 5, 64)
    x[1, 2, 63], weights[0, 4, 0] = np.nan, np.nan
    nan = np.isnan(f64(run(gpu, x, weights)))
    assert nan[1, 2].all()
    assert nan[:, 0, 4].all()
    assert nan.sum() == 5 + 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"groups": 0}, "groups"),
        ({"n": 0}, "n"),
        ({"groups": 1 << 16, "n": 1 << 16}, "n"),
        ({"k": 0}, "k"),
        ({"k": 12}, "k"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    numbers: dict[str, Any] = {"m": 1, "groups": 1, "n": 1, "k": 8} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_v4_grouped_gemv(gpu, kernel, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_rows_that_would_lie_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="K is 12"):
        launch.arg_u32(1).arg_u32(1).arg_u32(4).arg_u32(12).launch(gpu.default_stream())
    for operands in ((ptr.offset(2), ptr), (ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_v4_grouped_gemv(gpu, kernel, *operands, ptr, 1, 1, 1, 8, gpu.default_stream())


@pytest.mark.gpu_only("8.6 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("8.6 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_rows(gpu, rng)


@checks("::".join(NAMES) + "@far")
def check_far_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, groups, count = 1 << 16, 2, (1 << 15) + 2
    x, row = normal(rng, 1, groups, size), normal(rng, 1, size)
    outputs = groups * count
    weights = alloc_or_skip(gpu, 2 * size * outputs)
    gpu.memset(weights, 0, 2 * size * outputs)
    gpu.copy_h2d(row.reshape(-1).view(np.uint8), weights.offset(2 * size * (outputs - 1)))
    output = Output(gpu, (outputs,))
    ops.spark_v4_grouped_gemv(
        gpu, gpu.kernel(*NAMES), upload(gpu, x), weights, output.ptr, 1, groups, count, size, gpu.default_stream()
    )
    got = output.read()
    gpu.free(weights)
    assert (f64(got[:-1]) == 0.0).all()
    assert_same_bits(got[-1:], single(gpu, x[0, 1], row))
