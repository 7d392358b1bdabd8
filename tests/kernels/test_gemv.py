# SPDX-License-Identifier: AGPL-3.0-only
"""Module gemv: the BF16 GEMV bit for bit against its summation order, and against FP64 within the order's bound."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import gemv as ops
from spark_py.reference.gemv import dot_matrix
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, Array, Output, alloc_or_skip, assert_same_bits, f64, normal, upload

from .support import checks

SHAPES = [(n, 520) for n in range(1, 10)]
SHAPES += [(1, 8), (5, 8), (3, 16), (4, 504), (6, 512), (7, 1032), (2, 2048), (5, 2056), (9, 4616), (67, 5120)]


def run(gpu: GpuBackend, x: Array, weights: Array) -> Array:
    count, size = weights.shape
    output = Output(gpu, (count,))
    kernel = gpu.kernel("gemv", "dense_gemv_bf16")
    ops.dense_gemv(gpu, kernel, upload(gpu, x), upload(gpu, weights), output.ptr, count, size, gpu.default_stream())
    return output.read()


def step_by_step(x: Array, weights: Array) -> Array:
    """The contract, one FP32 operation at a time: 64 lanes, chunks of 8, ascending k, two trees, one addition."""
    a, b = x.astype(np.float32), weights.astype(np.float32)
    lanes = [np.zeros(len(b), np.float32) for _ in range(64)]
    for k in range(a.size):
        lane = (k // 8) % 64
        lanes[lane] = lanes[lane] + a[k] * b[:, k]
    halves = []
    for start in (0, 32):
        values = lanes[start : start + 32]
        for step in (16, 8, 4, 2, 1):
            values = [values[i] + values[i + step] for i in range(step)]
        halves.append(values[0])
    return (halves[0] + halves[1]).astype(BF16)


@checks("gemv::dense_gemv_bf16")
def check_dense_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("gemv", "dense_gemv_bf16")
    assert spec is not None
    for count, size in SHAPES:
        # Magnitudes over 2**12, so that the order of additions shows in the last bits.
        x = (rng.standard_normal(size) * 2.0 ** rng.integers(-6, 6, size)).astype(BF16)
        weights = normal(rng, count, size)
        if size >= 1024:
            # A sum that cancels: the rounding of every step stays in the result.
            x[size // 2 :] = x[: size - size // 2]
            weights[:, size // 2 :] = -weights[:, : size - size // 2]
            weights[:, -1] += BF16.type(0.01)
        got, what = run(gpu, x, weights), f"N={count} K={size}"
        assert_same_bits(got, step_by_step(x, weights), what)
        assert_same_bits(got, spec.reference(x, weights), what)
        exact = f64(weights) @ f64(x)
        terms = np.abs(f64(weights)) @ np.abs(f64(x))
        bound = (size / 64 + 8) * 2.0**-23 * terms + 2.0**-8 * np.abs(exact)
        assert (np.abs(f64(got) - exact) <= bound).all(), what


def test_dense_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dense_gemv(gpu, rng)


def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weights = normal(rng, 1544), normal(rng, 300, 1544)
    together = run(gpu, x, weights)
    for first, last in ((0, 1), (1, 6), (17, 300), (299, 300)):
        assert_same_bits(run(gpu, x, weights[first:last]), together[first:last], f"rows {first}..{last}")


def test_nan_and_infinity_stay_in_their_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weights = np.abs(normal(rng, 64)) + BF16.type(0.5), np.abs(normal(rng, 6, 64)) + BF16.type(0.5)
    weights[1, 63] = np.nan
    weights[3, 0] = np.inf
    weights[4, 8], weights[4, 9] = np.inf, -np.inf
    got = f64(run(gpu, x, weights))
    assert np.isnan(got[[1, 4]]).all()
    assert got[3] == np.inf
    assert np.isfinite(got[[0, 2, 5]]).all()


@pytest.mark.parametrize(("n", "k", "name"), [(0, 8, "n"), (4, 0, "k"), (4, 12, "k"), (4, -8, "k"), (True, 8, "n")])
def test_impossible_numbers_are_refused(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int, name: str) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("gemv", "dense_gemv_bf16")
    with pytest.raises(InvalidArgumentError) as error:
        ops.dense_gemv(gpu, kernel, ptr, ptr, ptr, n, k, gpu.default_stream())
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_rows_that_would_lie_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("gemv", "dense_gemv_bf16")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="K is 12"):
        launch.arg_u32(4).arg_u32(12).launch(gpu.default_stream())
    for operands in ((ptr.offset(2), ptr), (ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.dense_gemv(gpu, kernel, *operands, ptr, 1, 8, gpu.default_stream())


@pytest.mark.gpu_only("8.6 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("8.6 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_rows(gpu, rng)


@checks("gemv::dense_gemv_bf16@far")
def check_far_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, count = 1 << 16, (1 << 16) + 3
    x, row = normal(rng, size), normal(rng, 1, size)
    weights = alloc_or_skip(gpu, 2 * size * count)
    gpu.memset(weights, 0, 2 * size * count)
    gpu.copy_h2d(row.reshape(-1).view(np.uint8), weights.offset(2 * size * (count - 1)))
    output, kernel = Output(gpu, (count,)), gpu.kernel("gemv", "dense_gemv_bf16")
    ops.dense_gemv(gpu, kernel, upload(gpu, x), weights, output.ptr, count, size, gpu.default_stream())
    got = output.read()
    gpu.free(weights)
    assert (f64(got[:-1]) == 0.0).all()
    assert_same_bits(got[-1:], step_by_step(x, row))


@pytest.mark.host_only("references run on the host alone")
def test_one_output_of_one_chunk_sums_in_order(rng: np.random.Generator) -> None:
    """NumPy adds up a single column in pairs where it can, which is another order."""
    for _ in range(50):
        x, weights = (rng.standard_normal(shape).astype(BF16) for shape in ((1, 8), (1, 8)))
        total = np.float32(0)
        for a, b in zip(x[0].astype(np.float32), weights[0].astype(np.float32), strict=True):
            total = total + a * b
        assert dot_matrix(x, weights)[0, 0] == total
