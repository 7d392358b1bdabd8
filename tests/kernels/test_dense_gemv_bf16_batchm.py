# SPDX-License-Identifier: AGPL-3.0-only
"""Module dense_gemv_bf16_batchm: every row has the bits of the GEMV of that row alone, for 1 to 16 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import dense_gemv_bf16_batchm as ops
from spark_py.ops import gemv
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, POISON, Array, Output, alloc_or_skip, assert_same_bits, f64, normal, upload

from .support import checks

SHAPES = [(n, 520) for n in range(1, 10)]
SHAPES += [(5, 8), (3, 504), (6, 512), (2, 2056), (9, 4616)]


def run(gpu: GpuBackend, x: Array, weights: Array, padding: int = 0) -> Array:
    """The outputs; AssertionError where the `padding` elements between two rows of output were written."""
    (rows, size), count = x.shape, weights.shape[0]
    stride = count + padding
    output = Output(gpu, (rows * stride,))
    kernel = gpu.kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
    ops.dense_gemv_batchm(
        gpu, kernel, upload(gpu, x), upload(gpu, weights), output.ptr, rows, count, size, stride, gpu.default_stream()
    )
    got = output.read().reshape(rows, stride)
    assert (got[:, count:].view(np.uint8) == POISON).all(), "between two rows of output"
    return got[:, :count]


def single(gpu: GpuBackend, x: Array, weights: Array) -> Array:
    """The GEMV of one row."""
    count, size = weights.shape
    output = Output(gpu, (count,))
    kernel = gpu.kernel("gemv", "dense_gemv_bf16")
    gemv.dense_gemv(gpu, kernel, upload(gpu, x), upload(gpu, weights), output.ptr, count, size, gpu.default_stream())
    return output.read()


def wide_range(rng: np.random.Generator, *shape: int) -> Array:
    """Magnitudes over 2**12, so that the order of additions shows in the last bits."""
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)).astype(BF16)


@checks("dense_gemv_bf16_batchm::dense_gemv_bf16_batchm")
def check_dense_gemv_batchm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for number, (count, size) in enumerate(SHAPES):
        x, weights = wide_range(rng, 16, size), normal(rng, count, size)
        # A sum that cancels: the rounding of every step stays in the result.
        half = size // 2
        x[:, half:] = x[:, : size - half]
        weights[:, half:] = -weights[:, : size - half]
        weights[:, -1] += BF16.type(0.01)
        alone = np.stack([single(gpu, row, weights) for row in x])
        for rows in {1 + number % 16, 2 + number % 7, 16}:
            got = run(gpu, x[:rows], weights, padding=number % 3)
            assert_same_bits(got, alone[:rows], f"M={rows} N={count} K={size}")


def test_dense_gemv_batchm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dense_gemv_batchm(gpu, rng)


@pytest.mark.parametrize("rows", range(1, 17))
def test_each_row_is_the_gemv_of_that_row(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    x, weights = wide_range(rng, rows, 1544), normal(rng, 71, 1544)
    got = run(gpu, x, weights, padding=rows % 4)
    spec = catalog.find("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
    assert spec is not None
    assert_same_bits(got, spec.reference(x, weights))
    for row in range(rows):
        assert_same_bits(got[row], single(gpu, x[row], weights), f"row {row} of {rows}")
    exact, terms = f64(x) @ f64(weights).T, np.abs(f64(x)) @ np.abs(f64(weights)).T
    bound = (1544 / 64 + 8) * 2.0**-23 * terms + 2.0**-8 * np.abs(exact)
    assert (np.abs(f64(got) - exact) <= bound).all()


def test_nan_stays_in_its_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weights = normal(rng, 5, 64), normal(rng, 6, 64)
    x[3, 17] = np.nan
    got = f64(run(gpu, x, weights))
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 17}, "m"),
        ({"m": 0}, "m"),
        ({"n": 0}, "n"),
        ({"k": 12}, "k"),
        ({"out_stride": 3}, "out_stride"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
    numbers = {"m": 2, "n": 4, "k": 8, "out_stride": 4} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.dense_gemv_batchm(gpu, kernel, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_a_launch_that_would_lose_rows_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 256)), gpu.kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
    for numbers, message in (((17, 4, 8, 4), "M is 17"), ((2, 4, 8, 3), "out_stride is 3"), ((2, 4, 4, 4), "K is 4")):
        launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
        for number in numbers:
            launch.arg_u32(number)
        with pytest.raises(ArgumentRangeError, match=message):
            launch.launch(gpu.default_stream())
    with pytest.raises(ArgumentPointerError, match="16"):
        ops.dense_gemv_batchm(gpu, kernel, ptr.offset(2), ptr, ptr, 1, 1, 8, 1, gpu.default_stream())


@pytest.mark.gpu_only("8.6 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("8.6 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, count = 1 << 16, (1 << 16) + 3
    x, row = normal(rng, 2, size), normal(rng, 1, size)
    weights = alloc_or_skip(gpu, 2 * size * count)
    gpu.memset(weights, 0, 2 * size * count)
    gpu.copy_h2d(row.reshape(-1).view(np.uint8), weights.offset(2 * size * (count - 1)))
    output, kernel = Output(gpu, (2, count)), gpu.kernel("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
    ops.dense_gemv_batchm(
        gpu, kernel, upload(gpu, x), weights, output.ptr, 2, count, size, count, gpu.default_stream()
    )  # fmt: skip
    got = output.read()
    gpu.free(weights)
    assert (f64(got[:, :-1]) == 0.0).all()
    assert_same_bits(got[:, -1].copy(), np.concatenate([single(gpu, each, row) for each in x]))
