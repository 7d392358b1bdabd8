# SPDX-License-Identifier: AGPL-3.0-only
"""Module gemv_fp8w: the quantiser bit for bit against ml_dtypes' rounding, the GEMVs against their order and FP64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py import catalog
from spark_py.model.weight_map import DenseWeight
from spark_py.ops import gemv_fp8w as ops
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend, KernelHandle
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import (
    BF16,
    F32,
    POISON,
    Array,
    Output,
    alloc_or_skip,
    any_bits,
    assert_same_bits,
    download,
    f64,
    normal,
    upload,
)
from spark_py.testing.cases.gemv_fp8w import (
    NAN_CODES,
    cancelling,
    codes,
    row_scales,
    special_rows,
    spread,
    subnormal,
    tied_rows,
)

from .fp8_support import dot_step_by_step
from .support import checks

U8 = np.dtype(np.uint8)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SHAPES = [(n, 1040) for n in range(1, 10)]
SHAPES += [(5, 16), (3, 48), (7, 1024), (6, 2064), (4, 4112), (67, 5120)]


def quantizer(gpu: GpuBackend) -> KernelHandle:
    return gpu.kernel("gemv_fp8w", "quantize_bf16_to_fp8")


def quantize(gpu: GpuBackend, x: Array, shift: int = 0, to: int = 0) -> tuple[Array, Array]:
    output, scales = Output(gpu, x.shape, U8, shift=to), Output(gpu, (len(x),), F32)
    source, stream = upload(gpu, x, shift), gpu.default_stream()
    ops.quantize_bf16_to_fp8(gpu, quantizer(gpu), source, output.ptr, scales.ptr, *x.shape, stream)
    return output.read(), scales.read()


def quantized(x: Array) -> tuple[Array, Array]:
    """The contract row by row: ml_dtypes rounds to nearest even, and is never asked for more than 448."""
    rows, scales = [], []
    with np.errstate(all="ignore"):
        for row in x.astype(np.float32):
            most = max((np.abs(v) for v in row if not np.isnan(v)), default=np.float32(0))
            scale = np.float32(most) / np.float32(448) if most > 0 else np.float32(1)
            y = row * (np.float32(1) / scale)
            y = np.where(y > 448, np.float32(448), np.where(y < -448, np.float32(-448), y))
            rows.append(np.where(np.isnan(y), np.uint8(0x7F), y.astype(E4M3).view(np.uint8)))
            scales.append(scale)
    return np.stack(rows), np.array(scales, F32)


@checks("gemv_fp8w::quantize_bf16_to_fp8")
def check_quantize(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("gemv_fp8w", "quantize_bf16_to_fp8")
    assert spec is not None
    inputs = [normal(rng, n, k) for n, k in ((1, 1), (5, 16), (3, 263), (2, 2056), (129, 48))]
    inputs += [tied_rows(rng, 40, 256), tied_rows(rng, 7, 1027), special_rows(rng, 264), np.zeros((2, 24), BF16)]
    inputs += [any_bits(rng, 9, 311), (rng.standard_normal((4, 272)) * 1e38).clip(-3e38, 3e38).astype(BF16)]
    for x in inputs:
        expected = quantized(x)
        for shift, to in ((0, 0), (16, 8), (2, 0), (0, 1)):
            got, what = quantize(gpu, x, shift, to), f"{x.shape}, input {shift} and output {to} bytes on"
            assert_same_bits(got[1], expected[1], f"scales, {what}")
            assert_same_bits(got[0], expected[0], f"bytes, {what}")
        reference = spec.reference(x)
        assert_same_bits(reference[1], expected[1], f"reference, scales, {x.shape}")
        assert_same_bits(reference[0], expected[0], f"reference, bytes, {x.shape}")


def test_quantize(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_quantize(gpu, rng)


def test_edges_of_e4m3(gpu: GpuBackend) -> None:
    # A maximum of 448 makes the scale 1, so that values are encoded as they are.
    x = np.array([[448, 432, 440, 424, -448, 1.0625, 2.0**-10, 1e-9, -0.0, -1e-9, np.nan, 0, 0, 0, 0, 0]], BF16)
    got, scales = quantize(gpu, x)
    assert scales.tolist() == [1.0]
    assert got[0, :12].tolist() == [0x7E, 0x7E, 0x7E, 0x7D, 0xFE, 0x38, 0, 0, 0x80, 0x80, 0x7F, 0]


def run(gpu: GpuBackend, x: Array, weights: Array, scales: Array) -> Array:
    n, k = weights.shape
    output, kernel = Output(gpu, (n,)), gpu.kernel("gemv_fp8w", "dense_gemv_fp8w")
    weight = ops.Fp8RowWeight(upload(gpu, weights), upload(gpu, scales), n, k)
    ops.dense_gemv_fp8w(gpu, kernel, upload(gpu, x), weight, output.ptr, n, k, gpu.default_stream())
    return output.read()


def run_rows(gpu: GpuBackend, x: Array, weights: Array, scales: Array, gap: int = 0) -> Array:
    """The outputs; AssertionError where the `gap` elements between two rows of output were written."""
    m, (n, k) = len(x), weights.shape
    output = Output(gpu, (m * (n + gap),))
    kernel = gpu.kernel("gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
    weight = ops.Fp8RowWeight(upload(gpu, weights), upload(gpu, scales), n, k)
    ops.dense_gemv_fp8w_batchm(
        gpu, kernel, upload(gpu, x), weight, output.ptr, m, n, k, n + gap, gpu.default_stream()
    )  # fmt: skip
    got = output.read().reshape(m, n + gap)
    assert (got[:, n:].view(np.uint8) == POISON).all(), "between two rows of output"
    return got[:, :n].copy()


@checks("gemv_fp8w::dense_gemv_fp8w")
def check_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("gemv_fp8w", "dense_gemv_fp8w")
    assert spec is not None
    for n, k in SHAPES:
        x, weights = cancelling(rng, (), n, k)
        scales = row_scales(rng, n)
        got, what = run(gpu, x, weights, scales), f"N={n} K={k}"
        values = weights.view(E4M3).astype(np.float32)
        assert_same_bits(got, dot_step_by_step(x, values, scales), what)
        assert_same_bits(got, spec.reference(x, weights, scales), what)
        exact = f64(values) @ f64(x) * f64(scales)
        terms = np.abs(f64(values)) @ np.abs(f64(x)) * f64(scales)
        # K / 64 additions of a lane, a scale, six of the tree, and BF16 at the end.
        assert (np.abs(f64(got) - exact) <= (k / 64 + 9) * 2.0**-23 * terms + 2.0**-8 * np.abs(exact)).all(), what


def test_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv(gpu, rng)


@checks("gemv_fp8w::spark_dense_gemv_fp8w_batchm")
def check_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
    assert spec is not None
    for number, (n, k) in enumerate([*SHAPES, (17, 272), (16, 528)]):
        x, weights = cancelling(rng, (8,), n, k)
        scales = row_scales(rng, n)
        alone = np.stack([run(gpu, row, weights, scales) for row in x])
        stepped = dot_step_by_step(x[-1], weights.view(E4M3).astype(np.float32), scales)
        assert_same_bits(alone[-1], stepped, f"alone, N={n} K={k}")
        assert_same_bits(spec.reference(x, weights, scales), alone, f"reference, N={n} K={k}")
        for m in {1 + number % 8, 8}:
            got = run_rows(gpu, x[:m], weights, scales, number % 3)
            assert_same_bits(got, alone[:m], f"M={m} N={n} K={k}")


def test_gemv_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv_rows(gpu, rng)


@pytest.mark.parametrize("rows", range(1, 9))
def test_each_row_is_the_gemv_of_that_row(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    (x, weights), scales = cancelling(rng, (rows,), 71, 1552), row_scales(rng, 71)
    got = run_rows(gpu, x, weights, scales, rows % 4)
    values = weights.view(E4M3).astype(np.float32)
    for row in range(rows):
        assert_same_bits(got[row], dot_step_by_step(x[row], values, scales), f"row {row} of {rows}")


def test_subnormal_codes_and_large_magnitudes(gpu: GpuBackend, rng: np.random.Generator) -> None:
    n, k = 9, 1040
    few, scales = subnormal(rng, n, k), row_scales(rng, n)
    huge = (rng.choice([-1.0, 1.0], (4, k)) * 10.0 ** rng.uniform(30, 35, (4, k))).astype(BF16)
    tiny = (rng.standard_normal((4, k)) * 2.0**-120).astype(BF16)
    for x, weights in ((huge, codes(rng, n, k)), (huge, few), (tiny, few), (tiny, codes(rng, n, k))):
        got = run_rows(gpu, x, weights, scales)
        for row in range(len(x)):
            expected = dot_step_by_step(x[row], weights.view(E4M3).astype(np.float32), scales)
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
    expected = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    assert np.isnan(expected).sum() == 2
    for got in (run(gpu, x, weights, np.ones(256, F32)), run_rows(gpu, x[None], weights, np.ones(256, F32))[0]):
        assert np.array_equal(got.astype(np.float32), expected, equal_nan=True)


def test_nan_stays_in_its_row_and_its_output(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weights = normal(rng, 5, 64), codes(rng, 10, 64)
    x[3, 17], weights[6, 63], weights[1, 0] = np.nan, *NAN_CODES
    got = np.isnan(f64(run_rows(gpu, x, weights, np.ones(10, F32))))
    expected = np.zeros((5, 10), bool)
    expected[3], expected[:, [1, 6]] = True, True
    assert np.array_equal(got, expected)


def test_an_output_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, weights, scales = spread(rng, 3, 1552), codes(rng, 70, 1552), row_scales(rng, 70)
    together, rows = run(gpu, x[0], weights, scales), run_rows(gpu, x, weights, scales)
    for first, last in ((0, 1), (1, 6), (17, 70), (69, 70)):
        what, part = f"outputs {first}..{last}", slice(first, last)
        assert_same_bits(run(gpu, x[0], weights[part], scales[part]), together[part], what)
        assert_same_bits(run_rows(gpu, x, weights[part], scales[part]), rows[:, part].copy(), what)


def test_a_weight_through_all_kernels(gpu: GpuBackend, rng: np.random.Generator) -> None:
    n, k = 37, 528
    x, w = normal(rng, 2, k), normal(rng, n, k, scale=0.02)
    w[11] = 0.0
    source, stream = DenseWeight(upload(gpu, w)), gpu.default_stream()
    live = gpu.live_bytes()
    made = ops.quantize_to_fp8(gpu, quantizer(gpu), source, n, k, stream)
    assert gpu.live_bytes() - live >= n * k + 4 * n
    assert (made.n, made.k) == (n, k)
    weights, scales = download(gpu, made.weight, (n, k), U8), download(gpu, made.row_scale, (n,), F32)
    expected = quantized(w)
    assert_same_bits(weights, expected[0])
    assert_same_bits(scales, expected[1])
    assert scales[11] == 1.0
    # Half a step: 2^-4 of a normal number, half of 2^-9 of a subnormal one.
    back = f64(weights.view(E4M3)) * f64(scales)[:, None]
    half = np.maximum(np.abs(f64(w)) * 2.0**-4, 2.0**-10 * f64(scales)[:, None]) * (1 + 2.0**-20)
    assert (np.abs(back - f64(w)) <= half).all()
    output, kernel = Output(gpu, (n,)), gpu.kernel("gemv_fp8w", "dense_gemv_fp8w")
    rows, batch = Output(gpu, (2, n)), gpu.kernel("gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
    device = upload(gpu, x)
    ops.dense_gemv_fp8w(gpu, kernel, device, made, output.ptr, n, k, stream)
    ops.dense_gemv_fp8w_batchm(gpu, batch, device, made, rows.ptr, 2, n, k, n, stream)
    values = weights.view(E4M3).astype(np.float32)
    assert_same_bits(output.read(), dot_step_by_step(x[0], values, scales))
    assert_same_bits(rows.read(), np.stack([dot_step_by_step(row, values, scales) for row in x]))
    before = gpu.live_bytes()
    made.free(gpu)
    assert before - gpu.live_bytes() >= n * k + 4 * n


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e-37])
def test_a_row_without_a_usable_scale_is_refused(gpu: GpuBackend, rng: np.random.Generator, value: float) -> None:
    w = normal(rng, 5, 32)
    w[3] = 0.0
    w[3, 7] = value
    source, stream = upload(gpu, w), gpu.default_stream()
    live = gpu.live_bytes()
    with pytest.raises(InvalidArgumentError, match="scale of row 3"):
        ops.quantize_to_fp8(gpu, quantizer(gpu), source, 5, 32, stream)
    assert gpu.live_bytes() == live


def test_nan_in_a_weight_stays_visible(gpu: GpuBackend, rng: np.random.Generator) -> None:
    w, stream = normal(rng, 5, 32), gpu.default_stream()
    w[2, 30] = np.nan
    made = ops.quantize_to_fp8(gpu, quantizer(gpu), upload(gpu, w), 5, 32, stream)
    output, kernel = Output(gpu, (5,)), gpu.kernel("gemv_fp8w", "dense_gemv_fp8w")
    ops.dense_gemv_fp8w(gpu, kernel, upload(gpu, normal(rng, 32)), made, output.ptr, 5, 32, stream)
    assert np.isnan(f64(output.read())).tolist() == [False, False, True, False, False]
    made.free(gpu)


@pytest.mark.parametrize(("n", "k", "name"), [(0, 16, "n"), (4, 0, "k"), (4, 24, "k"), (4, -16, "k"), (True, 16, "n")])
def test_impossible_numbers_are_refused(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int, name: str) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    kernel, weight = gpu.kernel("gemv_fp8w", "dense_gemv_fp8w"), ops.Fp8RowWeight(ptr, ptr, 4, 16)
    live = gpu.live_bytes()
    with pytest.raises(InvalidArgumentError) as error:
        ops.quantize_to_fp8(gpu, quantizer(gpu), ptr, n, k, stream)
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.dense_gemv_fp8w(gpu, kernel, ptr, weight, ptr, n, k, stream)
    assert error.value.name == name
    assert gpu.live_bytes() == live


@pytest.mark.parametrize(
    ("change", "name"),
    [({"m": 9}, "m"), ({"m": 0}, "m"), ({"n": 0}, "n"), ({"k": 24}, "k"), ({"out_stride": 3}, "out_stride")],
)
def test_impossible_rows_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
    numbers = {"m": 2, "n": 4, "k": 16, "out_stride": 4} | change
    weight = ops.Fp8RowWeight(ptr, ptr, 4, 16)
    with pytest.raises(InvalidArgumentError) as error:
        ops.dense_gemv_fp8w_batchm(gpu, kernel, ptr, weight, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_another_kernels_handle_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    weight = ops.Fp8RowWeight(ptr, ptr, 1, 16)
    block_scaled, one = gpu.kernel("w8a16_gemv", "w8a16_gemv"), gpu.kernel("gemv_fp8w", "dense_gemv_fp8w")
    with pytest.raises(InvalidArgumentError, match="gemv_fp8w::dense_gemv_fp8w is launched here"):
        ops.dense_gemv_fp8w(gpu, block_scaled, ptr, weight, ptr, 1, 16, stream)
    with pytest.raises(InvalidArgumentError, match="batchm is launched here"):
        ops.dense_gemv_fp8w_batchm(gpu, one, ptr, weight, ptr, 1, 1, 16, 1, stream)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_launches_that_would_go_wrong_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 256)), gpu.default_stream()
    one, batch = gpu.kernel("gemv_fp8w", "dense_gemv_fp8w"), gpu.kernel("gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
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
    weight = ops.Fp8RowWeight(ptr.offset(8), ptr, 1, 16)
    with pytest.raises(ArgumentPointerError, match="16"):
        ops.dense_gemv_fp8w(gpu, one, ptr, weight, ptr, 1, 16, stream)


@pytest.mark.gpu_only("4.3 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("4.3 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, n = 1 << 16, (1 << 16) + 5
    x, row = normal(rng, 2, k), normal(rng, 1, k)
    last_codes, last_scale = quantized(row)
    weights = alloc_or_skip(gpu, n * k)
    gpu.memset(weights, 0, n * k)
    gpu.copy_h2d(last_codes.reshape(-1), weights.offset(k * (n - 1)))
    scales = np.ones(n, F32)
    scales[-1] = last_scale[0]
    weight, stream = ops.Fp8RowWeight(weights, upload(gpu, scales), n, k), gpu.default_stream()
    device = upload(gpu, x)
    output, rows = Output(gpu, (n,)), Output(gpu, (2, n))
    one, batch = gpu.kernel("gemv_fp8w", "dense_gemv_fp8w"), gpu.kernel("gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
    ops.dense_gemv_fp8w(gpu, one, device, weight, output.ptr, n, k, stream)
    ops.dense_gemv_fp8w_batchm(gpu, batch, device, weight, rows.ptr, 2, n, k, n, stream)
    alone, together = output.read(), rows.read()
    gpu.free(weights)
    expected = np.array([dot_step_by_step(each, last_codes.view(E4M3).astype(np.float32), last_scale)[0] for each in x])
    assert (f64(together[:, :-1]) == 0.0).all()
    assert_same_bits(together[:, -1].copy(), expected)
    assert_same_bits(alone, together[0])


def test_no_pointer_is_read_for_a_null_weight(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("gemv_fp8w", "dense_gemv_fp8w")
    with pytest.raises(ArgumentPointerError):
        ops.dense_gemv_fp8w(
            gpu, kernel, ptr, ops.Fp8RowWeight(DevicePtr.NULL, ptr, 1, 16), ptr, 1, 16, gpu.default_stream()
        )
