# SPDX-License-Identifier: AGPL-3.0-only
"""Module quantize_nvfp4: both kernels bit for bit against the rounding rules, written out number by number."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from spark_py import catalog
from spark_py.model.weight_map import DenseWeight
from spark_py.ops import quantize_nvfp4 as ops
from spark_py.reference import quantize_nvfp4 as reference
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, F32, Array, Output, any_bits, assert_same_bits, download, f64, normal, upload
from spark_py.testing.cases.quantize_nvfp4 import SENSITIVE, edges, specials

from .support import checks

U8 = np.dtype(np.uint8)
THRESHOLDS = [(0.25, 0), (0.75, 1), (1.25, 2), (1.75, 3), (2.5, 4), (3.5, 5), (5.0, 6)]


def absmax(gpu: GpuBackend, x: Array, before: float = 0.0, shift: int = 0) -> Array:
    output = Output(gpu, (1,), F32, np.array([before], F32))
    kernel = gpu.kernel("quantize_nvfp4", "nvfp4_global_absmax")
    ops.nvfp4_global_absmax(gpu, kernel, upload(gpu, x, shift), output.ptr, x.size, gpu.default_stream())
    return output.read()


def quantize(
    gpu: GpuBackend, x: Array, scale2: float, shift: int = 0, to: int = 0, scales_to: int = 0
) -> tuple[Array, Array]:
    n, k = x.shape
    packed = Output(gpu, (n, k // 2), U8, shift=to)
    scales = Output(gpu, (n, k // 16), U8, shift=scales_to)
    kernel = gpu.kernel("quantize_nvfp4", "quantize_bf16_to_nvfp4")
    ops.quantize_bf16_to_nvfp4(
        gpu, kernel, upload(gpu, x, shift), packed.ptr, scales.ptr, scale2, n, k, gpu.default_stream()
    )
    return packed.read(), scales.read()


def e4m3_code(a: np.float32) -> int:
    """The engine's encoder by its rules: a clamp, then half up of 3 bits, or of steps of 2^-9 that never reach 2^-6."""
    if not a <= 448:
        return 0x7E
    if a < 2.0**-9:
        return 0
    if a < 2.0**-6:
        return min(7, math.floor(float(a) * 512 + 0.5))
    fraction, exponent = math.frexp(float(a))  # 0.5 <= fraction < 1
    steps = math.floor(fraction * 16 + 0.5)  # 8 to 16
    return ((exponent - 1 + 7) << 3) + steps - 8


def e2m1_code(y: np.float32) -> int:
    sign = 8 if y < 0 else 0
    for limit, code in THRESHOLDS:
        if abs(y) <= limit:
            return sign | code
    return sign | 7


def step_by_step(x: Array, scale2: float) -> tuple[Array, Array]:
    """The contract, one FP32 operation at a time."""
    rows, size = x.shape
    packed, scales = np.zeros((rows, size // 2), np.uint8), np.zeros((rows, size // 16), np.uint8)
    factor = np.float32(scale2)
    with np.errstate(all="ignore"):
        for n in range(rows):
            for g in range(size // 16):
                group = x[n, 16 * g : 16 * g + 16].astype(np.float32)
                most = np.float32(0)
                for value in group:
                    most = np.abs(value) if np.abs(value) > most else most
                code = e4m3_code(most * (np.float32(1) / factor) / np.float32(6)) if most > 0 else 0
                scales[n, g] = code
                step = np.uint8(code).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor
                per_step = np.float32(1) / step if step > 0 else np.float32(0)
                for i, value in enumerate(group):
                    packed[n, 8 * g + i // 2] |= e2m1_code(value * per_step) << (4 * (i % 2))
    return packed, scales


@checks("quantize_nvfp4::nvfp4_global_absmax")
def check_absmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("quantize_nvfp4", "nvfp4_global_absmax")
    assert spec is not None
    for count in (1, 2, 8, 31, 255, 256, 257, 511, 777, 2048, 5003):
        for shift in (0, 2, 8):
            x = (rng.standard_normal(count) * 2.0 ** rng.integers(-9, 9, count)).astype(BF16)
            place = count - 1 if shift else int(rng.integers(count))
            x[place] = -np.abs(f64(x)).max() * 2
            expected = np.array([np.abs(f64(x)).max()], F32)
            what = f"{count} elements, {shift} bytes on, largest at {place}"
            assert_same_bits(absmax(gpu, x, shift=shift), expected, what)
            assert_same_bits(np.array([spec.reference(x)]), expected, what)
            assert_same_bits(absmax(gpu, x, float(expected[0]) * 2), expected * 2, f"{what}: a larger one stands")
            if count > 1:
                x[rng.permutation(np.delete(np.arange(count), place))[: count // 2]] = np.nan
                x[place + 1 if place + 1 < count else 0] = np.nan
                assert_same_bits(absmax(gpu, x, shift=shift), expected, f"{what}: NaN")
    tiny = any_bits(rng, 600).view(np.uint16) & np.uint16(0x807F)
    assert_same_bits(absmax(gpu, tiny.view(BF16)), np.array([np.abs(f64(tiny.view(BF16))).max()], F32), "subnormals")


def test_absmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_absmax(gpu, rng)


def test_absmax_of_more_elements_than_threads(gpu: GpuBackend, rng: np.random.Generator) -> None:
    count = 2 * 1024 * 256 * 8 + 777
    x = normal(rng, count)
    for place in (0, count // 2 + 3, count - 780, count - 1):
        x[place] = 100.0
        assert absmax(gpu, x)[0] == 100.0, place
        x[place] = 0.0


def test_absmax_of_nothing_but_nan_is_zero_and_infinity_wins(gpu: GpuBackend) -> None:
    x = np.full(300, np.nan, BF16)
    assert_same_bits(absmax(gpu, x), np.zeros(1, F32))
    x[299] = -np.inf
    assert_same_bits(absmax(gpu, x), np.array([np.inf], F32))


@checks("quantize_nvfp4::quantize_bf16_to_nvfp4")
def check_quantize(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("quantize_nvfp4", "quantize_bf16_to_nvfp4")
    assert spec is not None
    inputs: list[tuple[Array, float]] = []
    for n, k in ((1, 16), (1, 48), (127, 16), (3, 80), (2, 4112)):
        x = normal(rng, n, k)
        inputs.append((x, float(np.float32(np.abs(f64(x)).max()) / np.float32(2688))))
    for scale2 in (1.0, 2.0**-12, 3.0, float(np.float32(rng.uniform(1e-4, 1e-2))), *SENSITIVE):
        inputs.append((edges(rng, 7, 19, scale2), scale2))
    for scale2 in (1.0, 0.002, math.inf, 2.0**-140):
        inputs.append((specials(rng, 4, 15), scale2))
    for x, scale2 in inputs:
        expected = step_by_step(x, scale2)
        for layout in ((0, 0, 0), (2, 8, 3), (16, 4, 1), (8, 1, 0)):
            got = quantize(gpu, x, scale2, *layout)
            what = f"{x.shape} scale2={scale2} {layout}"
            assert_same_bits(got[1], expected[1], f"scales {what}")
            assert_same_bits(got[0], expected[0], f"codes {what}")
        packed, scales = spec.reference(x, scale2)
        assert_same_bits(scales, expected[1], f"reference, scales {scale2}")
        assert_same_bits(packed, expected[0], f"reference, codes {scale2}")


def test_quantize(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_quantize(gpu, rng)


def test_every_byte_decodes_as_ml_dtypes_has_it() -> None:
    codes = np.arange(256, dtype=np.uint8)
    got, expected = reference.decode_e4m3(codes), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (np.isnan(got) == np.isnan(expected)).all()
    assert_same_bits(got[~np.isnan(got)], expected[~np.isnan(expected)])
    assert np.isnan(got).sum() == 2


def test_the_encoder_is_the_engines_and_not_the_hardwares() -> None:
    values = np.array([1.0625, 0.0015, 0.0155, 448, 449, 465, np.inf, np.nan, 1e-9, 0], np.float32)
    codes = reference.encode_e4m3(values)
    expected = [1.125, 0, 7 / 512, 448, 448, 448, 448, 448, 0, 0]
    assert reference.decode_e4m3(codes).tolist() == expected
    hardware = values[:3].astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert hardware.tolist() == [1.0, 2.0**-9, 2.0**-6]


def test_every_e4m3_number_encodes_to_itself() -> None:
    codes = np.arange(0x7F, dtype=np.uint8)
    assert_same_bits(reference.encode_e4m3(reference.decode_e4m3(codes)), codes)


def to_nvfp4(gpu: GpuBackend, weight: DenseWeight | DevicePtr, n: int, k: int) -> ops.Nvfp4Weight:
    kernels = [gpu.kernel("quantize_nvfp4", f) for f in ("nvfp4_global_absmax", "quantize_bf16_to_nvfp4")]
    return ops.quantize_to_nvfp4(gpu, kernels[0], kernels[1], weight, n, k, gpu.default_stream())


@pytest.mark.parametrize("n", [1, 127, 129])
@pytest.mark.parametrize("k", [16, 48, 80])
def test_a_weight_comes_back_within_half_a_step(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int) -> None:
    x = normal(rng, n, k, scale=0.02)
    made = to_nvfp4(gpu, DenseWeight(upload(gpu, x)), n, k)
    largest = np.float32(np.abs(f64(x)).max())
    assert made.weight_scale_2 == float(largest / np.float32(2688))
    assert made.input_scale.is_null
    packed = download(gpu, made.weight, (n, k // 2), U8)
    scales = download(gpu, made.weight_scale, (n, k // 16), U8)
    expected = step_by_step(x, made.weight_scale_2)
    assert_same_bits(packed, expected[0])
    assert_same_bits(scales, expected[1])
    back = f64(reference.dequantize_nvfp4(packed, scales, made.weight_scale_2))
    # Half of E2M1's widest gap, 4 to 6, in units of a step of m / 6; a rounded scale shrinks 6 steps by up to 1/16, and
    # never below 2^-9 * scale2 with the maxima of a normal distribution.
    most = np.abs(f64(x)).reshape(n, -1, 16).max(-1).repeat(16, 1)
    assert (np.abs(back - f64(x)) <= most * (1 / 6 + 1 / 16)).all()
    live = gpu.live_bytes()
    made.free(gpu)
    assert gpu.live_bytes() == live - n * k // 2 - n * k // 16


def test_codes_that_nvfp4_holds_exactly_come_back_exactly(gpu: GpuBackend, rng: np.random.Generator) -> None:
    n, k = 33, 80
    codes = rng.integers(0, 8, (n, k)) | np.where(rng.random((n, k)) < 0.5, 8, 0)
    codes[:, ::16] = rng.choice([7, 15], (n, k // 16))
    scales = 2.0 ** rng.integers(-5, 9, (n, k // 16))
    scales[0, 0] = 256.0
    x = (reference.E2M1_VALUES[codes] * scales.repeat(16, 1)).astype(BF16)
    x[0, 0] = 6 * 448.0  # makes the factor 1
    made = to_nvfp4(gpu, upload(gpu, x), n, k)
    assert made.weight_scale_2 == 1.0
    packed = download(gpu, made.weight, (n, k // 2), U8)
    back = reference.dequantize_nvfp4(packed, download(gpu, made.weight_scale, (n, k // 16), U8), 1.0)
    assert (back[1:] == x[1:].astype(np.float32)).all()
    assert back[0, 0] == 2688.0


def test_a_weight_of_zeros(gpu: GpuBackend) -> None:
    made = to_nvfp4(gpu, upload(gpu, np.zeros((3, 32), BF16)), 3, 32)
    assert made.weight_scale_2 == 1.0
    assert not download(gpu, made.weight, (3, 16), U8).any()
    assert not download(gpu, made.weight_scale, (3, 2), U8).any()


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e-36])
def test_a_maximum_that_gives_no_factor_is_refused_and_leaves_nothing(gpu: GpuBackend, value: float) -> None:
    x = np.zeros((2, 16), BF16)
    x[1, 3] = value
    source = upload(gpu, x)
    live = gpu.live_bytes()
    with pytest.raises(InvalidArgumentError, match="largest magnitude"):
        to_nvfp4(gpu, source, 2, 16)
    assert gpu.live_bytes() == live


@pytest.mark.parametrize(
    ("n", "k", "name"), [(0, 16, "n"), (2, 0, "k"), (2, 24, "k"), (2, -16, "k"), (1 << 28, 16, "n * k")]
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int, name: str) -> None:
    ptr = upload(gpu, normal(rng, 64))
    with pytest.raises(InvalidArgumentError) as error:
        to_nvfp4(gpu, ptr, n, k)
    assert error.value.name == name


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_a_row_with_a_tail_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("quantize_nvfp4", "quantize_bf16_to_nvfp4")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="K is 24"):
        launch.arg_f32(1.0).arg_u32(1).arg_u32(24).launch(gpu.default_stream())
