# SPDX-License-Identifier: AGPL-3.0-only
"""Module w4a16, the tile GEMM: within the bound of its sums, exact where sums are, and each row alone.

The .cu file runs on a CPU too: layouts, edges and roundings are checked there. What a GPU alone can show are the
tensor cores' own sums and that copies are waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import w4a16_gemm_t as ops
from spark_py.ops.quantize_nvfp4 import quantize_to_nvfp4
from spark_py.reference import w4a16_gemm_t as reference
from spark_py.reference.quantize_nvfp4 import E2M1_VALUES, dequantize_nvfp4
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import (
    BF16,
    Array,
    Output,
    alloc_or_skip,
    assert_rounds,
    assert_same_bits,
    download,
    f64,
    normal,
    upload,
)
from spark_py.testing.cases.w4a16_gemm_t import lost, terms, twin

from .nvfp4 import Weight, on_device
from .support import checks

U8 = np.dtype(np.uint8)
SCALE2 = 0.0123

# (M, N, K, ldb). M at the edges of tiles of 8, 16 and 32 rows, of passes of 32 and of blocks of 64; N and ldb at those
# of 128 outputs and of 16; K of every remainder of 64, with chunks for one warp, for some and for all, several each.
SHAPES = [
    (1, 1, 16, 16),
    (3, 17, 32, 32),
    (5, 130, 48, 256),
    (8, 127, 64, 128),
    (9, 128, 80, 144),
    (16, 129, 256, 272),
    (17, 33, 272, 128),
    (24, 16, 304, 128),
    (32, 100, 320, 112),
    (33, 48, 96, 128),
    (40, 20, 1072, 32),
    (64, 31, 176, 32),
    (65, 70, 112, 128),
    (131, 5, 64, 16),
]


def run(gpu: GpuBackend, a: Array, packed: Array, scales: Array, n: int, scale2: float = SCALE2) -> Array:
    """C [M, n] of A [M, K] and a twin [K / 2, ldb], [K / 16, ldb]; every input ends where its allocation ends."""
    (rows, depth), output = a.shape, Output(gpu, (len(a), n))
    kernel, weight = gpu.kernel("w4a16", "w4a16_gemm_t"), on_device(gpu, packed, scales, scale2)
    ops.w4a16_gemm_n128_ldb(
        gpu, kernel, upload(gpu, a), weight, output.ptr, rows, n, depth, packed.shape[1], gpu.default_stream()
    )
    return output.read()


def activations(rng: np.random.Generator, rows: int, depth: int) -> Array:
    """Numbers of many magnitudes, far beyond what E4M3 holds."""
    return (rng.standard_normal((rows, depth)) * 2.0 ** rng.integers(-12, 13, (rows, depth))).astype(BF16)


def by_element(packed: Array, scales: Array) -> Array:
    """The weights [K, ldb] in FP64 as the layout says, byte by byte."""
    half, columns = packed.shape
    values = np.zeros((2 * half, columns))
    numbers = f64(scales.view("float8_e4m3fn"))
    for i in range(half):
        for n in range(columns):
            byte = int(packed[i, n])
            values[2 * i, n] = float(E2M1_VALUES[byte & 15]) * numbers[i // 8, n]
            values[2 * i + 1, n] = float(E2M1_VALUES[byte >> 4]) * numbers[i // 8, n]
    return values


@checks("w4a16::w4a16_gemm_t")
def check_w4a16_gemm_t(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG["w4a16", "w4a16_gemm_t"]
    for m, n, k, ldb in SHAPES:
        what = f"M={m} N={n} K={k} ldb={ldb}"
        a, (packed, scales) = activations(rng, m, k), twin(rng, ldb, k, 0, 0x7F)
        exact, size = terms(a, packed, scales, SCALE2, n)
        assert_rounds(run(gpu, a, packed, scales, n), exact, 0.0, lost(k) * size, what)
        assert_rounds(
            spec.reference(a, packed, scales, SCALE2, n), exact, 0.0, k * 2.0**-24 * size, f"reference {what}"
        )
        a, (packed, scales), scale2 = whole(rng, m, k, ldb)
        expected = (f64(a) @ by_element(packed, scales)[:, :n] * scale2).astype(BF16)
        assert_same_bits(run(gpu, a, packed, scales, n, scale2), expected, f"exact sums, {what}")
        assert_same_bits(spec.reference(a, packed, scales, scale2, n), expected, f"exact sums, reference {what}")
    a, (packed, scales) = np.ones((2, 96), BF16), twin(rng, 144, 96)
    at = rng.permutation(144)[:20]
    scales[rng.integers(0, 6, at.size), at] = rng.choice(np.array([0x7F, 0xFF], np.uint8), at.size)
    assert sorted(np.flatnonzero(np.isnan(f64(run(gpu, a, packed, scales, 144)))[1])) == sorted(at), "NaN scales"


def whole(rng: np.random.Generator, m: int, k: int, ldb: int) -> tuple[Array, tuple[Array, Array], float]:
    """Small integers, and scales that are powers of two: every partial sum is exact in FP32, in any order."""
    a = rng.integers(-4, 5, (m, k)).astype(BF16)
    packed, scales = twin(rng, ldb, k)
    scales = (scales & 0x80) | rng.integers(5, 9, scales.shape, dtype=np.uint8) << 3
    return a, (packed, scales), float(2.0 ** rng.integers(-9, 4))


def test_w4a16_gemm_t(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemm_t(gpu, rng)


def test_every_weight_is_exact_in_bf16() -> None:
    """The claim on which the kernel's arithmetic rests: 16 codes times 254 scales, each twice over."""
    codes, scales = np.meshgrid(np.arange(16), np.delete(np.arange(256), [0x7F, 0xFF]))
    packed = np.repeat((codes.reshape(1, -1) * 17).astype(np.uint8), 8, axis=0)
    values = reference.weights(packed, scales.reshape(1, -1).astype(np.uint8))
    assert (values.astype(BF16).astype(np.float32) == values).all()
    assert (f64(values) == by_element(packed, scales.reshape(1, -1).astype(np.uint8))).all()


def test_every_code_under_every_scale(gpu: GpuBackend) -> None:
    """One weight an output, alone among zeros: the decoding, exhaustively."""
    codes, scales = (each.reshape(-1).astype(np.uint8) for each in np.meshgrid(np.arange(16), np.arange(256)))
    packed, factors = np.zeros((8, codes.size), np.uint8), np.repeat(scales[None], 1, axis=0)
    for k in (0, 7, 15):
        packed[:] = 0
        packed[k // 2] = codes << 4 if k % 2 else codes
        a = np.zeros((1, 16), BF16)
        a[0, k] = 1.0
        got = run(gpu, a, packed, factors, codes.size, 1.0)[0]
        expected = (E2M1_VALUES[codes] * f64(scales.view("float8_e4m3fn"))).astype(BF16)
        nan = np.isin(scales, [0x7F, 0xFF])
        assert np.isnan(f64(got[nan])).all()
        # Sums of zeros are +0.
        assert_same_bits(got[~nan], np.where(expected[~nan] == 0, BF16.type(0), expected[~nan]), f"k={k}")


def test_a_row_has_the_same_bits_whatever_the_number_of_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    a, (packed, scales) = activations(rng, 70, 336), twin(rng, 128, 336)
    together = run(gpu, a, packed, scales, 90)
    for first, last in ((0, 1), (0, 5), (3, 12), (10, 27), (31, 34), (32, 70), (69, 70)):
        got = run(gpu, a[first:last], packed, scales, 90)
        assert_same_bits(got, together[first:last], f"rows {first}..{last}")


def test_an_output_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    a, (packed, scales) = activations(rng, 6, 208), twin(rng, 288, 208)
    together = run(gpu, a, packed, scales, 280)
    for first, last in ((0, 16), (16, 160), (128, 280)):
        part = [
            np.ascontiguousarray(each[:, first : first + (last - first + 15) // 16 * 16]) for each in (packed, scales)
        ]
        assert_same_bits(run(gpu, a, *part, last - first), together[:, first:last], f"outputs {first}..{last}")


def test_nan_and_infinity_stay_in_their_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    a, (packed, scales) = np.abs(normal(rng, 20, 80)) + BF16.type(0.5), twin(rng, 48, 80)
    packed, scales = packed & 0x77 | 0x11, scales & 0x7F  # above 0
    a[3, 79], a[17, 0] = np.nan, np.inf
    got = f64(run(gpu, a, packed, scales, 40))
    assert np.isnan(got[3]).all()
    assert (got[17] == np.inf).all()
    assert np.isfinite(np.delete(got, [3, 17], axis=0)).all()


def test_the_factor_multiplies_before_the_rounding(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """A power of two as the factor gives the same bits, scaled; another one does not round twice."""
    a, (packed, scales) = normal(rng, 5, 160), twin(rng, 64, 160)
    plain, scaled = run(gpu, a, packed, scales, 64, 1.0), run(gpu, a, packed, scales, 64, 2.0**-5)
    assert_same_bits(scaled, (plain.astype(np.float32) * np.float32(2.0**-5)).astype(BF16))
    twice = (plain.astype(np.float32) * np.float32(SCALE2)).astype(BF16)
    assert (run(gpu, a, packed, scales, 64) != twice).any()


@pytest.mark.parametrize(("n", "k"), [(1, 16), (127, 80), (128, 64), (129, 48), (300, 336)])
def test_the_twin_of_a_weight(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int) -> None:
    """Quantise, transpose, multiply: the layouts of three kernels, and what is allocated."""
    x, a = normal(rng, n, k, scale=0.05), normal(rng, 6, k)
    kernels = [gpu.kernel("quantize_nvfp4", f) for f in ("nvfp4_global_absmax", "quantize_bf16_to_nvfp4")]
    plain = quantize_to_nvfp4(gpu, kernels[0], kernels[1], upload(gpu, x), n, k, gpu.default_stream())
    live = gpu.live_bytes()
    made, ldb = ops.transpose_nvfp4(gpu, plain, n, k)
    assert ldb % 128 == 0
    assert 0 <= ldb - n < 128
    assert gpu.live_bytes() == live + k // 2 * ldb + k // 16 * ldb
    assert made.weight_scale_2 == plain.weight_scale_2
    rows = download(gpu, plain.weight, (n, k // 2), U8), download(gpu, plain.weight_scale, (n, k // 16), U8)
    columns = download(gpu, made.weight, (k // 2, ldb), U8), download(gpu, made.weight_scale, (k // 16, ldb), U8)
    for row, column in zip(rows, columns, strict=True):
        assert_same_bits(np.ascontiguousarray(column[:, :n].T), row)
        assert not column[:, n:].any()
    output = Output(gpu, (6, n))
    kernel = ops.tgemm_kernel(gpu)
    ops.w4a16_gemm_n128_ldb(gpu, kernel, upload(gpu, a), made, output.ptr, 6, n, k, ldb, gpu.default_stream())
    matrix = f64(dequantize_nvfp4(*rows, 1.0)).T * plain.weight_scale_2
    exact, size = f64(a) @ matrix, np.abs(f64(a)) @ np.abs(matrix)
    assert_rounds(output.read(), exact, 0.0, lost(k) * size)
    live = gpu.live_bytes()
    made.free(gpu)
    assert gpu.live_bytes() == live - k // 2 * ldb - k // 16 * ldb


def test_the_resolver_takes_the_parent_where_there_is_no_other(gpu: GpuBackend) -> None:
    for three_stages in (True, False):
        assert ops.tgemm_kernel(gpu, three_stages).name == "w4a16::w4a16_gemm_t"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"m": 0}, "m"),
        ({"n": 0}, "n"),
        ({"k": 0}, "k"),
        ({"k": 24}, "k"),
        ({"ldb": 24}, "ldb"),
        ({"ldb": 16}, "ldb"),
        ({"ldb": 0}, "ldb"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("w4a16", "w4a16_gemm_t")
    numbers: dict[str, Any] = {"m": 1, "n": 20, "k": 16, "ldb": 32} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.w4a16_gemm_n128_ldb(gpu, kernel, ptr, Weight(ptr, ptr, 1.0), ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.parametrize("name", ["input", "weight", "weight_scale"])
def test_an_input_off_16_bytes_is_refused(gpu: GpuBackend, name: str) -> None:
    ptr = upload(gpu, np.zeros(1024, np.uint8))
    at: dict[str, DevicePtr] = {"input": ptr, "weight": ptr, "weight_scale": ptr} | {name: ptr.offset(8)}
    weight, kernel = Weight(at["weight"], at["weight_scale"], 1.0), gpu.kernel("w4a16", "w4a16_gemm_t")
    with pytest.raises(InvalidArgumentError) as error:
        ops.w4a16_gemm_n128_ldb(gpu, kernel, at["input"], weight, ptr, 1, 4, 16, 16, gpu.default_stream())
    assert error.value.name == name


def test_the_handle_of_another_kernel_is_refused(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.zeros(1024, np.uint8))
    kernel = gpu.kernel("w4a16_gemv", "w4a16_gemv")
    with pytest.raises(InvalidArgumentError, match="w4a16_gemm_t"):
        ops.w4a16_gemm_n128_ldb(gpu, kernel, ptr, Weight(ptr, ptr, 1.0), ptr, 1, 4, 16, 16, gpu.default_stream())


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_a_short_ldb_in_a_bare_launch_is_refused(gpu: GpuBackend) -> None:
    ptr, kernel = upload(gpu, np.zeros(1024, np.uint8)), gpu.kernel("w4a16", "w4a16_gemm_t")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((128, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
    launch.arg_f32(1.0).arg_ptr(ptr).arg_u32(1).arg_u32(20).arg_u32(16).arg_u32(16)
    with pytest.raises(ArgumentRangeError, match="ldb is 16"):
        launch.launch(gpu.default_stream())


@pytest.mark.gpu_only("tensor cores and asynchronous copies at the size of an LM head: too much for a CPU test")
@pytest.mark.parametrize(("m", "n", "k"), [(5, 16077, 5120), (16, 9000, 2048), (32, 5000, 4096), (64, 3000, 2064)])
def test_an_lm_head(gpu: GpuBackend, rng: np.random.Generator, m: int, n: int, k: int) -> None:
    ldb = -(-n // 128) * 128
    a, (packed, scales), scale2 = whole(rng, m, k, ldb)
    expected = (f64(a) @ f64(reference.weights(packed, scales))[:, :n] * scale2).astype(BF16)
    for turn in range(3):
        assert_same_bits(run(gpu, a, packed, scales, n, scale2), expected, f"turn {turn}")
    a = activations(rng, m, k)
    exact, size = terms(a, packed, scales, scale2, n)
    assert_rounds(run(gpu, a, packed, scales, n, scale2), exact, 0.0, lost(k) * size)


@pytest.mark.gpu_only("5.9 GB of weights: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("5.9 GB of shadow memory")
def test_weights_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far(gpu, rng)


@checks("w4a16::w4a16_gemm_t@far")
def check_far(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The last rows of the codes lie past 2^32 bytes: few outputs, and rows as far apart as u32 allows them to be."""
    n, k, ldb = 100, 80, 1 << 27
    a, (packed, scales) = activations(rng, 5, k), twin(rng, 128, k)
    codes, factors = alloc_or_skip(gpu, k // 2 * ldb), alloc_or_skip(gpu, k // 16 * ldb)
    for matrix, ptr in ((packed, codes), (scales, factors)):
        for i, row in enumerate(matrix):
            gpu.copy_h2d(np.ascontiguousarray(row), ptr.offset(i * ldb))
    output, kernel = Output(gpu, (5, n)), gpu.kernel("w4a16", "w4a16_gemm_t")
    weight = Weight(codes, factors, SCALE2)
    ops.w4a16_gemm_n128_ldb(gpu, kernel, upload(gpu, a), weight, output.ptr, 5, n, k, ldb, gpu.default_stream())
    assert_same_bits(output.read(), run(gpu, a, packed, scales, n))
    gpu.free(codes)
    gpu.free(factors)
