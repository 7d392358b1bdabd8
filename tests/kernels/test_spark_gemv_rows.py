# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_gemv_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_gemv_rows as ops
from spark_py.ops.spark_gemv_rows import RESIDENT, Projection, blocks_for
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import Array, Output, alloc_or_skip, assert_same_bits, f64, normal, run_case, upload
from spark_py.testing.cases import cases_of

from .support import checks

NAMES = ("spark_gemv_rows", "spark_gemv_rows")


def run(gpu: GpuBackend, x: Array, matrices: Sequence[Array], head_dim: int = 0) -> list[Array]:
    """The outputs [M, N] of x [M, K] and matrices [N, K]."""
    outputs = [Output(gpu, (len(x), len(matrix))) for matrix in matrices]
    projections = [
        Projection(upload(gpu, matrix), output.ptr, len(matrix), len(matrix))
        for matrix, output in zip(matrices, outputs, strict=True)
    ]
    kernel, stream = gpu.kernel(*NAMES), gpu.default_stream()
    ops.spark_gemv_rows(gpu, kernel, upload(gpu, x), projections, len(x), x.shape[1], stream, head_dim=head_dim)
    return [output.read() for output in outputs]


@checks("::".join(NAMES))
def check_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[NAMES]
    for case in cases_of(spec):
        wrong = run_case(gpu, spec, case, rng)
        assert not wrong, f"{case.name}: {'; '.join(map(str, wrong))}"


def test_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv_rows(gpu, rng)


def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrices = normal(rng, 8, 1096), [normal(rng, n, 1096) for n in (32, 19, 5)]
    together = run(gpu, x, matrices)
    for rows in ([0], [5], [7, 2, 3]):
        for matrix, whole in zip(matrices, together, strict=True):
            assert_same_bits(run(gpu, x[rows], [matrix])[0], whole[rows], f"rows {rows}")
    for whole, part in zip(together, run(gpu, x, [matrix[3:] for matrix in matrices]), strict=True):
        assert_same_bits(part, whole[:, 3:], "other tiles")


def test_queries_and_gates_are_taken_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrix, other = normal(rng, 2, 136), normal(rng, 3 * 2 * 24, 136), normal(rng, 48, 136)
    plain, split = run(gpu, x, [matrix, other]), run(gpu, x, [matrix, other], 24)
    assert_same_bits(split[0], plain[0].reshape(2, 3, 2, 24).swapaxes(1, 2).reshape(2, -1))
    assert_same_bits(split[1], plain[1])


def test_nan_stays_in_its_row_and_output(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrix = normal(rng, 3, 264), normal(rng, 20, 264)
    x[1, 263], matrix[17, 5] = np.nan, np.nan
    nan = np.isnan(f64(run(gpu, x, [matrix])[0]))
    assert nan[1].all()
    assert nan[:, 17].all()
    assert nan.sum() == 20 + 2


@pytest.mark.host_only("about the number of blocks, not about kernels")
def test_blocks_run_at_once_and_have_the_same_to_do() -> None:
    for tiles in (1, 320, 528, 529, 1088, 6250, 1 << 20):
        blocks = blocks_for(tiles)
        assert blocks <= RESIDENT
        assert -(-tiles // blocks) == -(-tiles // RESIDENT)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"m": 9}, "m"),
        ({"k": 12}, "k"),
        ({"n": 0}, "n"),
        ({"stride": 3}, "stride"),
        ({"parts": 0}, "projections"),
        ({"parts": 4}, "projections"),
        ({"head_dim": 3}, "n"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES)
    numbers: dict[str, int] = {"m": 1, "k": 8, "n": 4, "stride": 4, "parts": 1, "head_dim": 0} | change
    parts = [Projection(ptr, ptr, numbers["n"], numbers["stride"])] * numbers["parts"]
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_gemv_rows(
            gpu, kernel, ptr, parts, numbers["m"], numbers["k"], gpu.default_stream(), head_dim=numbers["head_dim"]
        )
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_rows_that_would_lie_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel, stream = upload(gpu, normal(rng, 64)), gpu.kernel(*NAMES), gpu.default_stream()
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1))
    for each in (ptr, ptr, DevicePtr.NULL, DevicePtr.NULL, ptr, DevicePtr.NULL, DevicePtr.NULL):
        launch.arg_ptr(each)
    for number in (1, 4, 0, 0, 12, 4, 0, 0, 0):
        launch.arg_u32(number)
    with pytest.raises(ArgumentRangeError, match="K is 12"):
        launch.launch(stream)
    for x, weight in ((ptr.offset(2), ptr), (ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.spark_gemv_rows(gpu, kernel, x, [Projection(weight, ptr, 1, 1)], 1, 8, stream)


@pytest.mark.gpu_only("8.6 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("8.6 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_rows(gpu, rng)


@checks("::".join(NAMES) + "@far")
def check_far_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, count = 1 << 16, (1 << 16) + 2
    x, row = normal(rng, 1, size), normal(rng, 1, size)
    weights = alloc_or_skip(gpu, 2 * size * count)
    gpu.memset(weights, 0, 2 * size * count)
    gpu.copy_h2d(row.reshape(-1).view(np.uint8), weights.offset(2 * size * (count - 1)))
    output = Output(gpu, (count,))
    ops.spark_gemv_rows(
        gpu, gpu.kernel(*NAMES), upload(gpu, x), [Projection(weights, output.ptr, count, count)], 1, size,
        gpu.default_stream(),
    )  # fmt: skip
    got = output.read()
    gpu.free(weights)
    assert (f64(got[:-1]) == 0.0).all()
    assert_same_bits(got[-1:], run(gpu, x, [row])[0][0])
