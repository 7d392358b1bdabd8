# SPDX-License-Identifier: AGPL-3.0-only
"""Module gemm: the scalar kernel bit for bit in ascending k, the tensor-core kernel within the bound of its sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import gemm as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, alloc_or_skip, assert_rounds, assert_same_bits, f64, normal, upload

from .support import checks

Launcher = Callable[..., None]
SCALAR: tuple[str, Launcher] = ("dense_gemm_bf16", ops.dense_gemm)
PIPELINED: tuple[str, Launcher] = ("dense_gemm_bf16_pipelined", ops.dense_gemm_pipelined)

# (M, N, K): edges of tiles of 16, and K of every remainder.
SCALAR_SHAPES = [(1, 1, 1), (5, 3, 7), (16, 16, 16), (17, 33, 100), (31, 15, 257), (2, 70, 1025), (40, 47, 64)]
# Edges of tiles of 128, one stage and many, K % 8 of 0 and not, K below a chunk and a stage.
PIPELINED_SHAPES = [
    (1, 1, 1),
    (5, 3, 7),
    (16, 130, 8),
    (128, 128, 128),
    (129, 130, 96),
    (33, 129, 36),
    (40, 257, 520),
    (200, 150, 1001),
    (130, 70, 72),
    (3, 260, 2048),
]


def run(gpu: GpuBackend, which: tuple[str, Launcher], a: Array, b: Array, shift: int = 0) -> Array:
    name, launch = which
    (rows, depth), columns = a.shape, b.shape[0]
    output = Output(gpu, (rows, columns), shift=shift)
    kernel = gpu.kernel("gemm", name)
    pointers = upload(gpu, a, shift), upload(gpu, b, shift), output.ptr
    launch(gpu, kernel, *pointers, rows, columns, depth, gpu.default_stream())
    return output.read()


def step_by_step(a: Array, b: Array) -> Array:
    """The contract, one FP32 operation at a time."""
    x, y = a.astype(np.float32), b.astype(np.float32)
    sums = np.zeros((len(a), len(b)), np.float32)
    for k in range(a.shape[1]):
        sums = sums + np.outer(x[:, k], y[:, k])
    return sums.astype(BF16)


def inputs(rng: np.random.Generator, rows: int, columns: int, depth: int) -> tuple[Array, Array]:
    """Sums that cancel to small remainders, so that the rounding of every step stays in the result."""
    a = (rng.standard_normal((rows, depth)) * 2.0 ** rng.integers(-6, 6, (rows, depth))).astype(BF16)
    b = normal(rng, columns, depth)
    half = depth // 2
    a[:, half : 2 * half] = a[:, :half]
    b[:, half : 2 * half] = -b[:, :half]
    b[:, -1] += BF16.type(0.01)
    return a, b


@checks("gemm::dense_gemm_bf16")
def check_dense_gemm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for number, (rows, columns, depth) in enumerate(SCALAR_SHAPES):
        a, b = inputs(rng, rows, columns, depth)
        got, what = run(gpu, SCALAR, a, b, shift=2 * (number % 2)), f"M={rows} N={columns} K={depth}"
        assert_same_bits(got, step_by_step(a, b), what)
        exact, terms = f64(a) @ f64(b).T, np.abs(f64(a)) @ np.abs(f64(b)).T
        assert_rounds(got, exact, 0.0, depth * 2.0**-24 * terms, what)


@checks("gemm::dense_gemm_bf16_pipelined")
def check_dense_gemm_pipelined(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows, columns, depth in PIPELINED_SHAPES:
        for shift in (0, 2):
            a, b = normal(rng, rows, depth), normal(rng, columns, depth)
            got, what = run(gpu, PIPELINED, a, b, shift), f"M={rows} N={columns} K={depth} shift={shift}"
            exact, terms = f64(a) @ f64(b).T, np.abs(f64(a)) @ np.abs(f64(b)).T
            # One step of a tensor core adds 16 products to a sum, and cuts off below 2^-23 of the largest of them.
            assert_rounds(got, exact, 0.0, (depth / 16 + 2) * 2.0**-22 * terms, what)


def test_dense_gemm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dense_gemm(gpu, rng)


def test_dense_gemm_pipelined(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dense_gemm_pipelined(gpu, rng)


def test_references_have_the_scalar_kernels_bits(rng: np.random.Generator) -> None:
    a, b = inputs(rng, 19, 70, 133)
    for name, _ in (SCALAR, PIPELINED):
        spec = catalog.find("gemm", name)
        assert spec is not None
        assert_same_bits(spec.reference(a, b), step_by_step(a, b), name)


def test_a_row_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    a, b = inputs(rng, 35, 50, 300)
    together = run(gpu, SCALAR, a, b)
    for first, last in ((0, 1), (1, 18), (34, 35)):
        assert_same_bits(run(gpu, SCALAR, a[first:last], b), together[first:last], f"rows {first}..{last}")
        assert_same_bits(run(gpu, SCALAR, a, b[first:last]), together[:, first:last], f"columns {first}..{last}")


def test_both_load_paths_give_the_same_bits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    a, b = normal(rng, 150, 264), normal(rng, 140, 264)
    assert_same_bits(run(gpu, PIPELINED, a, b, shift=2), run(gpu, PIPELINED, a, b))


@pytest.mark.parametrize("which", [SCALAR, PIPELINED], ids=lambda which: which[0])
def test_nan_and_infinity_stay_in_their_row(
    gpu: GpuBackend, rng: np.random.Generator, which: tuple[str, Launcher]
) -> None:
    a, b = np.abs(normal(rng, 20, 64)) + BF16.type(0.5), np.abs(normal(rng, 20, 64)) + BF16.type(0.5)
    a[3, 63], b[5, 0] = np.nan, np.inf
    got = f64(run(gpu, which, a, b))
    assert np.isnan(got[3]).all()
    assert (np.delete(got[:, 5], 3) == np.inf).all()
    assert np.isfinite(np.delete(np.delete(got, 3, axis=0), 5, axis=1)).all()


@pytest.mark.parametrize("which", [SCALAR, PIPELINED], ids=lambda which: which[0])
@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, which: tuple[str, Launcher], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("gemm", which[0])
    numbers: dict[str, Any] = {"m": 1, "n": 4, "k": 8} | {name: 0}
    with pytest.raises(InvalidArgumentError) as error:
        which[1](gpu, kernel, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.gpu_only("8.6 GB of operands: too much for a CPU test")
@pytest.mark.no_sanitizer("8.6 GB of shadow memory")
@pytest.mark.parametrize("which", [SCALAR, PIPELINED], ids=lambda which: which[0])
def test_operands_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator, which: tuple[str, Launcher]) -> None:
    check_far_rows(gpu, rng, which)


def check_far_rows(gpu: GpuBackend, rng: np.random.Generator, which: tuple[str, Launcher]) -> None:
    """A's last row lies past 2^32 elements; so does B's, which is the same memory."""
    depth, count = 1 << 17, (1 << 15) + 3
    row = normal(rng, 1, depth)
    operand = alloc_or_skip(gpu, 2 * depth * count)
    gpu.memset(operand, 0, 2 * depth * count)
    gpu.copy_h2d(row.reshape(-1).view(np.uint8), operand.offset(2 * depth * (count - 1)))
    first, kernel = upload(gpu, row), gpu.kernel("gemm", which[0])
    for a, b, shape in ((operand, first, (count, 1)), (first, operand, (1, count))):
        output = Output(gpu, shape)
        which[1](gpu, kernel, a, b, output.ptr, *shape, depth, gpu.default_stream())
        got = output.read().reshape(-1)
        assert (f64(got[:-1]) == 0.0).all()
        assert_same_bits(got[-1:], run(gpu, which, row, row).reshape(-1))
    gpu.free(operand)


@checks("gemm::dense_gemm_bf16@far")
def check_far_scalar(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_rows(gpu, rng, SCALAR)
