# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_mxfp4_gemv: the MXFP4 GEMVs bit for bit in their order of arithmetic; what becomes of MXFP4 in NVFP4."""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_mxfp4_gemv as ops
from spark_py.reference.spark_mxfp4_gemv import decode_e8m0
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError, NullHandleError
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, POISON, Array, Output, alloc_or_skip, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.spark_mxfp4_gemv import cancelling, mxfp4, weights

from . import nvfp4
from .mxfp4 import Weight, exactly, on_device
from .support import checks

MODULE = "spark_mxfp4_gemv"
# Rows at the edges of blocks; chunks at the edges of a lane's turn, of 64 and of 256.
RANDOM = [(n, 96) for n in range(1, 10)] + [(1, 32), (127, 64), (129, 32), (17, 2080), (5, 4160), (3, 8224)]
CANCELLING = [(5, 32), (33, 96), (6, 1056), (8, 2080), (65, 4128), (4, 8256)]
EXACT = 2
"""As many outputs of each cancelling shape are computed in exact arithmetic."""


def run(gpu: GpuBackend, x: Array, packed: Array, scales: Array) -> Array:
    output, kernel = Output(gpu, (len(packed),)), gpu.kernel(MODULE, "spark_mxfp4_gemv")
    weight = on_device(gpu, packed, scales)
    ops.mxfp4_gemv(gpu, kernel, upload(gpu, x), weight, output.ptr, len(packed), x.size, gpu.default_stream())
    return output.read()


def run_rows(gpu: GpuBackend, x: Array, packed: Array, scales: Array, gap: int = 0) -> Array:
    """The outputs; AssertionError where the `gap` elements between two rows of output were written."""
    (m, k), n = x.shape, len(packed)
    output, kernel = Output(gpu, (m * (n + gap),)), gpu.kernel(MODULE, "spark_mxfp4_gemv_batchm")
    weight, stream = on_device(gpu, packed, scales), gpu.default_stream()
    ops.mxfp4_gemv_batchm(gpu, kernel, upload(gpu, x), weight, output.ptr, m, n, k, n + gap, stream)
    got = output.read().reshape(m, n + gap)
    assert (got[:, n:].view(np.uint8) == POISON).all(), "between two rows of output"
    return got[:, :n].copy()


def random(rng: np.random.Generator, rows: tuple[int, ...], n: int, k: int) -> tuple[Array, Array, Array]:
    """Activations of many magnitudes; scales whose products stay finite, 2^-127 among them."""
    x = (rng.standard_normal((*rows, k)) * 2.0 ** rng.integers(-6, 6, (*rows, k))).astype(BF16)
    packed, scales = mxfp4(rng, n, k)
    few = rng.random(scales.shape) < 0.2
    scales[few] = rng.integers(0, 200, int(few.sum()))
    return x, packed, scales


def near_the_exact_sum(got: Array, x: Array, packed: Array, scales: Array) -> bool:
    """Within what any order of FP32 sums may lose, and half an ulp of BF16."""
    matrix = weights(packed, scales)
    exact, terms = matrix @ f64(x), np.abs(matrix) @ np.abs(f64(x))
    bound = (x.size / 16 + 24) * 2.0**-24 * terms + 2.0**-8 * np.abs(exact) + 2.0**-133
    return bool((np.abs(f64(got) - exact) <= bound).all())


@checks("spark_mxfp4_gemv::spark_mxfp4_gemv")
def check_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[MODULE, "spark_mxfp4_gemv"]
    for n, k in RANDOM:
        drawn = random(rng, (), n, k)
        got, what = run(gpu, *drawn), f"N={n} K={k}"
        assert near_the_exact_sum(got, *drawn), what
        assert_same_bits(got, spec.reference(*drawn), what)
    for n, k in CANCELLING:
        x, packed, scales = cancelling(rng, (), n, k)
        got, what = run(gpu, x, packed, scales), f"sums that cancel, N={n} K={k}"
        assert_same_bits(got, spec.reference(x, packed, scales), what)
        singly = [exactly(x, packed[at], scales[at]) for at in range(EXACT)]
        assert_same_bits(got[:EXACT], np.array(singly, np.float32).astype(BF16), what)
    x, (packed, scales) = normal(rng, 96, scale=64.0), mxfp4(rng, 7, 96, 0, 3)
    got = run(gpu, x, packed, scales)
    assert near_the_exact_sum(got, x, packed, scales), "the least scales"
    assert_same_bits(got, spec.reference(x, packed, scales), "the least scales")
    x, (packed, scales) = normal(rng, 96), mxfp4(rng, 6, 96)
    scales[2, 1] = scales[4, 0] = 0xFF
    assert np.isnan(f64(run(gpu, x, packed, scales))).tolist() == [False, False, True, False, True, False]


@checks("spark_mxfp4_gemv::spark_mxfp4_gemv_batchm")
def check_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """Each row has the bits that the GEMV gives it alone."""
    spec = catalog.CATALOG[MODULE, "spark_mxfp4_gemv_batchm"]
    shapes = [(1, 32), (9, 96), (7, 64), (17, 1056), (6, 2080), (5, 4128)]
    for number, ((n, k), draw) in enumerate(product(shapes, (random, cancelling))):
        x, packed, scales = draw(rng, (8,), n, k)
        alone = np.stack([run(gpu, row, packed, scales) for row in x])
        assert_same_bits(spec.reference(x, packed, scales), alone, f"reference, N={n} K={k}")
        for m in {1 + number % 8, 8}:
            got = run_rows(gpu, x[:m], packed, scales, number % 3)
            assert_same_bits(got, alone[:m], f"M={m} N={n} K={k} {draw.__name__}")


def test_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gemv(gpu, rng)


def test_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rows(gpu, rng)


@pytest.mark.parametrize("rows", range(1, 9))
def test_each_row_is_the_gemv_of_that_row(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    x, packed, scales = cancelling(rng, (rows,), 19, 1056)
    got = run_rows(gpu, x, packed, scales, rows % 3)
    for row in range(rows):
        assert_same_bits(got[row], run(gpu, x[row], packed, scales), f"row {row} of {rows}")


def test_every_number_of_outputs_is_covered(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, packed, scales = random(rng, (3,), 40, 96)
    together = run_rows(gpu, x, packed, scales)
    for n in range(1, 40):
        assert_same_bits(run(gpu, x[0], packed[:n], scales[:n]), together[0, :n], f"N={n}")
        assert_same_bits(run_rows(gpu, x, packed[:n], scales[:n]), together[:, :n].copy(), f"three rows, N={n}")


def test_every_code_and_every_scale_decodes(gpu: GpuBackend) -> None:
    # One weight at a time: 16 codes at an odd place under each of 256 scales, against the definition of the formats.
    x = np.zeros(32, BF16)
    x[7] = 1.0
    packed = np.zeros((256 * 16, 16), np.uint8)
    packed[:, 3] = np.tile(np.arange(16), 256) << 4
    scales = np.repeat(np.arange(256), 16).astype(np.uint8)[:, None]
    values = np.tile(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2) * np.repeat([1.0, -1.0], 8), 256)
    factor = scales.view(ml_dtypes.float8_e8m0fnu)[:, 0].astype(np.float64)
    with np.errstate(all="ignore"):
        expected = (values * factor).astype(np.float32).astype(BF16)
    for got in (run(gpu, x, packed, scales), run_rows(gpu, x[None], packed, scales)[0]):
        np.testing.assert_array_equal(f64(got), f64(expected))


def test_infinity_and_nan_stay_in_their_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, (packed, scales) = normal(rng, 5, 64), mxfp4(rng, 6, 64)
    packed |= 0x11  # no zeros, which would make a NaN of infinity
    x[1, 17], x[3, 40] = np.inf, np.nan
    got = f64(run_rows(gpu, x, packed, scales))
    assert np.isinf(got[1]).all()
    assert np.isnan(got[3]).all()
    assert np.isfinite(got[[0, 2, 4]]).all()


def transcoded(scales: Array) -> tuple[Array, float]:
    """E8M0 as E4M3 of every 16 values and a factor, where the scales span the 18 powers of two that E4M3 has."""
    low, high = int(scales.min()), int(scales.max())
    assert high - low <= 17
    exponents = scales.astype(np.float64) - low - 9
    e4m3 = (2.0**exponents).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.repeat(e4m3, 2, axis=1), 2.0 ** (low + 9 - 127)


def test_weights_that_nvfp4_holds_too_have_the_bits_of_w4a16_gemv(gpu: GpuBackend, rng: np.random.Generator) -> None:
    from spark_py.ops.w4a16_gemv import w4a16_gemv

    for n, k in ((9, 96), (33, 2080), (5, 4128)):
        x, packed, scales = cancelling(rng, (), n, k)
        scales = rng.integers(112, 130, scales.shape).astype(np.uint8)
        e4m3, factor = transcoded(scales)
        output, kernel = Output(gpu, (n,)), gpu.kernel("w4a16_gemv", "w4a16_gemv")
        weight = nvfp4.on_device(gpu, packed, e4m3, factor)
        w4a16_gemv(gpu, kernel, upload(gpu, x), weight, output.ptr, n, k, gpu.default_stream())
        assert_same_bits(run(gpu, x, packed, scales), output.read(), f"N={n} K={k}")


@pytest.mark.host_only("about the two formats, not about kernels")
def test_what_nvfp4_makes_of_mxfp4_weights(rng: np.random.Generator) -> None:
    """The measurement that `Mxfp4Weight` tells of."""
    from spark_py.reference.quantize_nvfp4 import dequantize_nvfp4, quantize_bf16_to_nvfp4

    packed, scales = gaussian_expert(rng, 256, 4096)
    exact = weights(packed, scales)
    e4m3, factor = transcoded(scales)
    assert np.array_equal(f64(dequantize_nvfp4(packed, e4m3, factor)), exact), "with its codes kept, nothing is lost"
    bf16 = exact.astype(BF16)
    assert np.array_equal(f64(bf16), exact), "BF16 holds every MXFP4 value"
    scale2 = float(np.float32(np.abs(exact).max() / (6 * 448)))
    again = f64(dequantize_nvfp4(*quantize_bf16_to_nvfp4(bf16, scale2), scale2))
    error = np.linalg.norm(again - exact) / np.linalg.norm(exact)
    changed = float((again != exact)[exact != 0].mean())
    # 0.054 and 0.64; the spread over seeds is below 1 %.
    assert 0.05 < error < 0.06, error
    assert 0.60 < changed < 0.68, changed


def gaussian_expert(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array]:
    """MXFP4 of normal weights: a block's scale is the power of two under its maximum, less E2M1's two."""
    values = (rng.standard_normal((n, k)) * 0.02).reshape(n, -1, 32)
    exponents = np.floor(np.log2(np.abs(values).max(axis=-1))) - 2
    magnitudes = np.abs(values) / 2.0 ** exponents[..., None]
    nibbles = np.abs(magnitudes[..., None] - np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])).argmin(axis=-1)
    nibbles = np.where(values < 0, nibbles + 8, nibbles).reshape(n, k).astype(np.uint8)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), (exponents + 127).astype(np.uint8)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"n": 0}, "n"), ({"k": 0}, "k"), ({"k": 16}, "k"), ({"k": 48}, "k"), ({"n": True}, "n")],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, numbers = upload(gpu, normal(rng, 64)), {"n": 4, "k": 32} | change
    weight, stream = Weight(ptr, ptr), gpu.default_stream()
    with pytest.raises(InvalidArgumentError) as error:
        ops.mxfp4_gemv(gpu, gpu.kernel(MODULE, "spark_mxfp4_gemv"), ptr, weight, ptr, **numbers, stream=stream)
    assert error.value.name == name
    kernel = gpu.kernel(MODULE, "spark_mxfp4_gemv_batchm")
    with pytest.raises(InvalidArgumentError) as error:
        ops.mxfp4_gemv_batchm(gpu, kernel, ptr, weight, ptr, m=1, out_stride=4, **numbers, stream=stream)
    assert error.value.name == name


@pytest.mark.parametrize(("change", "name"), [({"m": 9}, "m"), ({"m": 0}, "m"), ({"out_stride": 3}, "out_stride")])
def test_impossible_rows_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(MODULE, "spark_mxfp4_gemv_batchm")
    numbers = {"m": 2, "n": 4, "k": 32, "out_stride": 4} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.mxfp4_gemv_batchm(gpu, kernel, ptr, Weight(ptr, ptr), ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_another_kernels_handle_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    one, several = (gpu.kernel(MODULE, name) for name in ("spark_mxfp4_gemv", "spark_mxfp4_gemv_batchm"))
    with pytest.raises(InvalidArgumentError, match="spark_mxfp4_gemv is launched here"):
        ops.mxfp4_gemv(gpu, several, ptr, Weight(ptr, ptr), ptr, 1, 32, stream)
    with pytest.raises(InvalidArgumentError, match="batchm is launched here"):
        ops.mxfp4_gemv_batchm(gpu, one, ptr, Weight(ptr, ptr), ptr, 1, 1, 32, 1, stream)
    with pytest.raises(NullHandleError):
        ops.mxfp4_gemv(gpu, KernelHandle(0), ptr, Weight(ptr, ptr), ptr, 1, 32, stream)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_launches_that_would_go_wrong_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 256)), gpu.default_stream()
    one, several = (gpu.kernel(MODULE, name) for name in ("spark_mxfp4_gemv", "spark_mxfp4_gemv_batchm"))
    for kernel, numbers, message in (
        (one, (1, 48), "K is 48"),
        (several, (9, 4, 32, 4), "M is 9"),
        (several, (2, 4, 32, 3), "out_stride is 3"),
        (several, (2, 4, 16, 4), "K is 16"),
    ):
        launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1))
        launch.arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
        for number in numbers:
            launch.arg_u32(number)
        with pytest.raises(ArgumentRangeError, match=message):
            launch.launch(stream)
    for x, codes in ((ptr.offset(8), ptr), (ptr, ptr.offset(8))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.mxfp4_gemv(gpu, one, x, Weight(codes, ptr), ptr, 1, 32, stream)


@pytest.mark.host_only("what the reference rests on does not depend on the backend")
def test_scales_are_those_of_ml_dtypes() -> None:
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode_e8m0(every), every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


@pytest.mark.gpu_only("4.3 GB of weights: too much to read on a CPU in a test")
@pytest.mark.no_sanitizer("4.3 GB of checked loads take minutes")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, n = 1 << 17, (1 << 16) + 5
    x, (row, scale) = normal(rng, 2, k), mxfp4(rng, 1, k)
    packed, scales = alloc_or_skip(gpu, n * k // 2), alloc_or_skip(gpu, n * k // 32)
    gpu.memset(packed, 0, n * k // 2)
    gpu.memset(scales, 0, n * k // 32)
    gpu.copy_h2d(row.reshape(-1), packed.offset((n - 1) * k // 2))
    gpu.copy_h2d(scale.reshape(-1), scales.offset((n - 1) * k // 32))
    device, stream, weight = upload(gpu, x), gpu.default_stream(), Weight(packed, scales)
    output, rows = Output(gpu, (n,)), Output(gpu, (2, n))
    one, several = (gpu.kernel(MODULE, name) for name in ("spark_mxfp4_gemv", "spark_mxfp4_gemv_batchm"))
    ops.mxfp4_gemv(gpu, one, device, weight, output.ptr, n, k, stream)
    ops.mxfp4_gemv_batchm(gpu, several, device, weight, rows.ptr, 2, n, k, n, stream)
    alone, together = output.read(), rows.read()
    gpu.free(packed)
    gpu.free(scales)
    assert (f64(together[:, :-1]) == 0.0).all()
    expected = np.array([exactly(each, row[0], scale[0]) for each in x], np.float32).astype(BF16)
    assert_same_bits(together[:, -1].copy(), expected)
    assert_same_bits(alone, together[0])
