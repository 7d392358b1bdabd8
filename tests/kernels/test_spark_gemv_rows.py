# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_gemv_rows: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_gemv_rows as ops
from spark_py.ops._gemv_rows import TILE, apart, blocks_for
from spark_py.ops.spark_gemv_rows import RESIDENT, Projection
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import Array, Output, alloc_or_skip, assert_same_bits, f64, normal, upload

from .gemv_rows import IMPOSSIBLE, Rows
from .support import checks

NAMES = ("spark_gemv_rows", "spark_gemv_rows")


def _drawn(rng: np.random.Generator, n: int, k: int) -> tuple[Array, ...]:
    return (normal(rng, n, k),)


ROWS = Rows(NAMES[0], ops.spark_gemv_rows, Projection, lambda ptr: ptr, _drawn, step=8, off_step=12)


@checks("::".join(NAMES))
def check_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_cases(gpu, rng)


def test_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv_rows(gpu, rng)


def test_a_row_and_a_matrix_do_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_alone_and_together(gpu, rng, 1096)


def test_queries_and_gates_are_taken_apart(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ROWS.check_queries_and_gates(gpu, rng, 136)


def test_nan_stays_in_its_row_and_output(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, matrix = normal(rng, 3, 264), normal(rng, 20, 264)
    x[1, 263], matrix[17, 5] = np.nan, np.nan
    nan = np.isnan(f64(ROWS.run(gpu, x, [(matrix,)])[0]))
    assert nan[1].all()
    assert nan[:, 17].all()
    assert nan.sum() == 20 + 2


@pytest.mark.host_only("about the number of blocks, not about kernels")
def test_blocks_run_at_once_and_have_the_same_to_do() -> None:
    for tiles in (1, 320, 528, 529, 1088, 6250, 1 << 20):
        blocks = blocks_for(tiles, RESIDENT)
        assert blocks <= RESIDENT
        assert -(-tiles // blocks) == -(-tiles // RESIDENT)


H200_SM_COUNT = 132


def test_a_launch_that_is_kept_apart_has_the_same_bits(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, matrix = normal(rng, 2, 72), normal(rng, 280 * TILE, 72)
    monkeypatch.setattr(gpu, "sm_count", lambda: H200_SM_COUNT)
    whole = ROWS.run(gpu, x, [(matrix,)])[0]
    parts = [ROWS.run(gpu, x, [(part,)])[0] for part in np.split(matrix, 2)]
    assert_same_bits(whole, np.concatenate(parts, axis=1))


@pytest.mark.host_only("about what a launch asks for, not about kernels")
def test_no_fourth_block_beside_two_or_three(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gpu.kernel(*NAMES)
    monkeypatch.setattr(gpu, "sm_count", lambda: H200_SM_COUNT)
    whole, static = gpu.limits.max_shared_optin + 1024, gpu.function_attributes(kernel).shared_static
    for blocks, most in ((1, 5), (264, 5), (265, 3), (363, 3), (396, 3), (397, 5), (528, 5)):
        shared = apart(gpu, kernel, blocks)
        assert shared % 128 == 0
        assert whole // (static + 1024 + shared) == most
        assert shared <= gpu.function_attributes(kernel).shared_dynamic_max


@pytest.mark.host_only("about what a launch asks for, not about kernels")
def test_nothing_is_asked_for_where_three_blocks_fit_at_most(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, limits = gpu.kernel(*NAMES), gpu.limits
    monkeypatch.setattr(gpu, "sm_count", lambda: H200_SM_COUNT)
    monkeypatch.setattr(gpu._device, "limits", replace(limits, max_shared_optin=99 * 1024))  # type: ignore[attr-defined]
    assert [apart(gpu, kernel, blocks) for blocks in (265, 363, 396)] == [0, 0, 0]


@IMPOSSIBLE
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ROWS.check_refused(gpu, rng, change, name)


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
    assert_same_bits(got[-1:], ROWS.run(gpu, x, [(row,)])[0][0])
