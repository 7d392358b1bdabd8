# SPDX-License-Identifier: AGPL-3.0-only
"""Module w8a16_gemv: block-scaled FP8 weights against the order of their sum and FP64, partial blocks included."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import w8a16_gemv as ops
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, F32, POISON, Array, Output, alloc_or_skip, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.gemv_fp8w import cancelling, codes, spread, subnormal
from spark_py.testing.cases.w8a16_gemv import block_scales, even_scales

from .fp8_support import dot_step_by_step
from .support import checks

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SHAPES = [(n, 1040) for n in range(1, 10)]
SHAPES += [(5, 16), (130, 272), (257, 144), (128, 1152), (6, 2064), (3, 4112), (131, 2176), (129, 128)]


def run(gpu: GpuBackend, x: Array, weights: Array, scales: Array) -> Array:
    n, k = weights.shape
    output, kernel = Output(gpu, (n,)), gpu.kernel("w8a16_gemv", "w8a16_gemv")
    ops.w8a16_gemv(
        gpu, kernel, upload(gpu, x), upload(gpu, weights), upload(gpu, scales), output.ptr, n, k, gpu.default_stream()
    )
    return output.read()


def run_rows(gpu: GpuBackend, x: Array, weights: Array, scales: Array, gap: int = 0) -> Array:
    """The outputs; AssertionError where the `gap` elements between two rows of output were written."""
    m, (n, k) = len(x), weights.shape
    output = Output(gpu, (m * (n + gap),))
    kernel, stream = gpu.kernel("w8a16_gemv", "spark_w8a16_gemv_batchm"), gpu.default_stream()
    operands = upload(gpu, x), upload(gpu, weights), upload(gpu, scales)
    ops.w8a16_gemv_batchm(gpu, kernel, *operands, output.ptr, m, n, k, n + gap, stream)
    got = output.read().reshape(m, n + gap)
    assert (got[:, n:].view(np.uint8) == POISON).all(), "between two rows of output"
    return got[:, :n].copy()


def values_of(weights: Array, scales: Array) -> Array:
    """FP32(value * scale of its block), block by block."""
    values = weights.view(E4M3).astype(np.float32)
    with np.errstate(all="ignore"):
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                values[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scales[i, j]
    return values


def numbers(
    rng: np.random.Generator, rows: tuple[int, ...], n: int, k: int, *, cancel: bool
) -> tuple[Array, Array, Array]:
    """Activations, codes and scales: each block with a scale of its own, or sums that cancel to what was rounded."""
    if cancel:
        return *cancelling(rng, rows, n, k), even_scales(rng, n, k)
    return spread(rng, *rows, k), codes(rng, n, k), block_scales(rng, n, k)


@checks("w8a16_gemv::w8a16_gemv")
def check_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("w8a16_gemv", "w8a16_gemv")
    assert spec is not None
    for cancel, (n, k) in product((False, True), SHAPES):
        x, weights, scales = numbers(rng, (), n, k, cancel=cancel)
        got, what = run(gpu, x, weights, scales), f"N={n} K={k} {cancel=}"
        values = values_of(weights, scales)
        assert_same_bits(got, dot_step_by_step(x, values), what)
        assert_same_bits(got, spec.reference(x, weights, scales), what)
        exact_values = f64(weights.view(E4M3)) * f64(scales).repeat(128, 0)[:n].repeat(128, 1)[:, :k]
        exact, terms = exact_values @ f64(x), np.abs(exact_values) @ np.abs(f64(x))
        # A rounded weight, a rounded product, K / 64 additions of a lane, six of the tree, and BF16 at the end.
        assert (np.abs(f64(got) - exact) <= (k / 64 + 10) * 2.0**-23 * terms + 2.0**-8 * np.abs(exact)).all(), what
    weights = np.zeros((6, 16), np.uint8)
    weights[1, 15], weights[4, 0] = 0x7F, 0xFF
    nan = np.isnan(f64(run(gpu, np.ones(16, BF16), weights, np.ones((1, 1), F32))))
    assert nan.tolist() == [False, True, False, False, True, False]


def test_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv(gpu, rng)


@checks("w8a16_gemv::spark_w8a16_gemv_batchm")
def check_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("w8a16_gemv", "spark_w8a16_gemv_batchm")
    assert spec is not None
    for number, (cancel, (n, k)) in enumerate(product((False, True), SHAPES)):
        x, weights, scales = numbers(rng, (8,), n, k, cancel=cancel)
        alone = np.stack([run(gpu, row, weights, scales) for row in x])
        stepped = dot_step_by_step(x[-1], values_of(weights, scales))
        assert_same_bits(alone[-1], stepped, f"alone, N={n} K={k} {cancel=}")
        assert_same_bits(spec.reference(x, weights, scales), alone, f"reference, N={n} K={k} {cancel=}")
        for m in {1 + number % 8, 8}:
            got = run_rows(gpu, x[:m], weights, scales, number % 3)
            assert_same_bits(got, alone[:m], f"M={m} N={n} K={k} {cancel=}")


def test_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv_rows(gpu, rng)


@pytest.mark.parametrize("rows", range(1, 9))
def test_each_row_is_the_gemv_of_that_row(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    (x, weights), scales = cancelling(rng, (rows,), 139, 1552), even_scales(rng, 139, 1552)
    got, values = run_rows(gpu, x, weights, scales, rows % 4), values_of(weights, scales)
    for row in range(rows):
        assert_same_bits(got[row], dot_step_by_step(x[row], values), f"row {row} of {rows}")


def test_subnormal_codes_and_large_magnitudes(gpu: GpuBackend, rng: np.random.Generator) -> None:
    n, k = 137, 272
    few, scales = subnormal(rng, n, k), block_scales(rng, n, k)
    huge = (rng.choice([-1.0, 1.0], (3, k)) * 10.0 ** rng.uniform(30, 35, (3, k))).astype(BF16)
    tiny = (rng.standard_normal((3, k)) * 2.0**-120).astype(BF16)
    for x, weights in ((huge, codes(rng, n, k)), (huge, few), (tiny, few), (tiny, codes(rng, n, k))):
        got = run_rows(gpu, x, weights, scales)
        for row in range(len(x)):
            expected = dot_step_by_step(x[row], values_of(weights, scales))
            nan = np.isnan(f64(expected))  # infinity - infinity: any NaN will do
            assert not nan.all()
            assert np.array_equal(np.isnan(f64(got[row])), nan)
            assert_same_bits(got[row][~nan], expected[~nan])
            alone = run(gpu, x[row], weights, scales)
            assert_same_bits(alone[~nan], expected[~nan])
            assert np.isnan(f64(alone[nan])).all()


def test_every_byte_decodes_as_ml_dtypes_has_it(gpu: GpuBackend) -> None:
    weights, x = np.zeros((256, 16), np.uint8), np.zeros(16, BF16)
    weights[:, 5], x[5] = np.arange(256), 1.0
    scales = np.array([[1.0], [0.5]], F32)
    expected = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    expected[128:] *= np.float32(0.5)
    for got in (run(gpu, x, weights, scales), run_rows(gpu, x[None], weights, scales)[0]):
        assert np.array_equal(got.astype(np.float32), expected, equal_nan=True)


def test_groups_by_offset_pointers_are_the_rows_of_one_weight(gpu: GpuBackend, rng: np.random.Generator) -> None:
    # Groups of 128 rows, each with an input of its own, in one weight and one table of scales.
    groups, rows, size = 3, 128, 256
    x, weights = normal(rng, groups, size), codes(rng, groups * rows, size)
    scales = block_scales(rng, groups * rows, size)
    device = upload(gpu, x), upload(gpu, weights), upload(gpu, scales)
    output, kernel = Output(gpu, (groups, rows)), gpu.kernel("w8a16_gemv", "w8a16_gemv")
    for g in range(groups):
        ops.w8a16_gemv(
            gpu, kernel, device[0].offset(2 * g * size), device[1].offset(g * rows * size),
            device[2].offset(4 * g * (size // 128)), output.ptr.offset(2 * g * rows), rows, size, gpu.default_stream(),
        )  # fmt: skip
    got = output.read()
    for g in range(groups):
        whole = run(gpu, x[g], weights, scales)
        assert_same_bits(got[g], whole[g * rows : (g + 1) * rows], f"group {g}")


@pytest.mark.parametrize(("n", "k", "name"), [(0, 16, "n"), (4, 0, "k"), (4, 24, "k"), (4, -16, "k"), (True, 16, "n")])
def test_impossible_numbers_are_refused(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int, name: str) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("w8a16_gemv", "w8a16_gemv")
    with pytest.raises(InvalidArgumentError) as error:
        ops.w8a16_gemv(gpu, kernel, ptr, ptr, ptr, ptr, n, k, gpu.default_stream())
    assert error.value.name == name


@pytest.mark.parametrize(
    ("change", "name"),
    [({"m": 9}, "m"), ({"m": 0}, "m"), ({"n": 0}, "n"), ({"k": 24}, "k"), ({"out_stride": 3}, "out_stride")],
)
def test_impossible_rows_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("w8a16_gemv", "spark_w8a16_gemv_batchm")
    numbers = {"m": 2, "n": 4, "k": 16, "out_stride": 4} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.w8a16_gemv_batchm(gpu, kernel, ptr, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_another_kernels_handle_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    row_scaled, one = gpu.kernel("gemv_fp8w", "dense_gemv_fp8w"), gpu.kernel("w8a16_gemv", "w8a16_gemv")
    with pytest.raises(InvalidArgumentError, match="w8a16_gemv::w8a16_gemv is launched here"):
        ops.w8a16_gemv(gpu, row_scaled, ptr, ptr, ptr, ptr, 1, 16, stream)
    with pytest.raises(InvalidArgumentError, match="w8a16_gemv_batchm is launched here"):
        ops.w8a16_gemv_batchm(gpu, one, ptr, ptr, ptr, ptr, 1, 1, 16, 1, stream)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_launches_that_would_go_wrong_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 256)), gpu.default_stream()
    one, batch = gpu.kernel("w8a16_gemv", "w8a16_gemv"), gpu.kernel("w8a16_gemv", "spark_w8a16_gemv_batchm")
    for kernel, numbers, message in (
        (one, (1, 24), "K is 24"),
        (batch, (9, 4, 16, 4), "M is 9"),
        (batch, (2, 4, 16, 3), "out_stride is 3"),
        (batch, (2, 4, 24, 4), "K is 24"),
    ):
        launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1))
        launch.arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
        for number in numbers:
            launch.arg_u32(number)
        with pytest.raises(ArgumentRangeError, match=message):
            launch.launch(stream)
    with pytest.raises(ArgumentPointerError, match="16"):
        ops.w8a16_gemv(gpu, one, ptr, ptr.offset(8), ptr, ptr, 1, 16, stream)
    x, weights, short = upload(gpu, normal(rng, 144)), upload(gpu, codes(rng, 1, 144)), upload(gpu, np.ones(1, F32))
    with pytest.raises(ArgumentPointerError) as error:
        ops.w8a16_gemv(gpu, one, x, weights, short, ptr, 1, 144, stream)
    assert error.value.parameter == "block_scale"


@pytest.mark.gpu_only("4.3 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("4.3 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, n = 1 << 16, (1 << 16) + 5
    x, row, scales = normal(rng, 2, k), codes(rng, 1, k), block_scales(rng, n, k)
    weights = alloc_or_skip(gpu, n * k)
    gpu.memset(weights, 0, n * k)
    gpu.copy_h2d(row.reshape(-1), weights.offset(k * (n - 1)))
    device, factors, stream = upload(gpu, x), upload(gpu, scales), gpu.default_stream()
    output, rows = Output(gpu, (n,)), Output(gpu, (2, n))
    one, batch = gpu.kernel("w8a16_gemv", "w8a16_gemv"), gpu.kernel("w8a16_gemv", "spark_w8a16_gemv_batchm")
    ops.w8a16_gemv(gpu, one, device, weights, factors, output.ptr, n, k, stream)
    ops.w8a16_gemv_batchm(gpu, batch, device, weights, factors, rows.ptr, 2, n, k, n, stream)
    alone, together = output.read(), rows.read()
    gpu.free(weights)
    assert (f64(together[:, :-1]) == 0.0).all()
    expected = np.array([dot_step_by_step(each, values_of(row, scales[-1:]))[0] for each in x])
    assert_same_bits(together[:, -1].copy(), expected)
    assert_same_bits(alone, together[0])
