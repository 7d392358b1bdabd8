# SPDX-License-Identifier: AGPL-3.0-only
"""A slow oracle of dequantisation, element by element in Python, and the checks that tests and mutants share.

A product of a decoded code and scales has 32 significant bits at most, so a Python float holds it exactly, and one
rounding to FP32 is the result of FP32 arithmetic whose other steps are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from spark_py.runtime.errors import IgnoredModuleError, InvalidArgumentError, ScaleShapeError, ScaleValueError
from spark_py.runtime.weights import WeightDtype, WeightStore
from tests.runtime.weights_support import write

D = WeightDtype
Array = np.ndarray[Any, Any]
F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
E4M3, E8M0 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e8m0fnu)


class Package(NamedTuple):
    """The modules under test: the real ones, or a mutant and what is built on it."""

    codes: ModuleType
    dequant: ModuleType
    ignore: ModuleType
    plan: ModuleType


# What a code means, from sign, exponent and mantissa.


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 127 == 127:
        return math.nan
    return (-1.0 if code & 128 else 1.0) * (mantissa + (8 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 10)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def e2m1(code: int) -> float:
    exponent, mantissa = code >> 1 & 3, code & 1
    return (-1.0 if code & 8 else 1.0) * (mantissa + (2 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 2)


def scale_values(scale: Array) -> Any:
    """The scales of an FP32, BF16, E4M3 or E8M0 array from their bits, as floats in nested lists."""
    if scale.dtype == np.float32:
        return scale.tolist()
    if scale.dtype == BF16:
        return (scale.view(np.uint16).astype(np.uint32) << 16).view(np.float32).tolist()
    decode = e4m3 if scale.dtype == E4M3 else e8m0
    flat = [decode(int(code)) for code in scale.view(np.uint8).reshape(-1)]
    return np.array(flat, np.float64).reshape(scale.shape).tolist()


def f32(rows: list[list[float]]) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.array(rows, np.float64).astype(np.float32)


def oracle_fp8(weight: Array, scale: Array) -> Array:
    n, k = weight.shape
    codes, scales, values = weight.view(np.uint8).tolist(), scale_values(scale), [e4m3(code) for code in range(256)]
    while scale.size == 1 and isinstance(scales, list):
        scales = scales[0]

    def factor(row: int, column: int) -> float:
        if scale.size == 1:
            return scales
        if scale.ndim == 1:
            return scales[row]
        return scales[row][0] if scale.shape == (n, 1) else scales[row // 128][column // 128]

    return f32([[values[codes[i][j]] * factor(i, j) for j in range(k)] for i in range(n)])


def oracle_fp4(packed: Array, scale: Array, group: int, factor: float = 1.0) -> Array:
    """Even columns are in the low half of a byte."""
    n, k = packed.shape[0], 2 * packed.shape[1]
    stored, scales = packed.view(np.uint8).tolist(), scale_values(scale)

    def element(row: int, column: int) -> float:
        byte = stored[row][column // 2]
        return e2m1(byte // 16 if column % 2 else byte % 16) * scales[row][column // group] * factor

    return f32([[element(i, j) for j in range(k)] for i in range(n)])


def oracle_bf16(values: Array) -> Array:
    """BF16 bits of finite FP32 values: half of the last place is added, one less where it would go to odd."""
    bits = [int(b) for b in values.reshape(-1).view(np.uint32)]
    return np.array([(b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits], np.uint16).reshape(values.shape)


# Random stored tensors.


def random_e4m3(rng: np.random.Generator, *shape: int) -> Array:
    """Every finite code."""
    codes = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    return codes.view(E4M3)


def random_scale(rng: np.random.Generator, dtype: Any, *shape: int, spread: int = 20) -> Array:
    """Positive scales of a type, no two alike as a rule, over 2^-spread .. 2^spread."""
    if dtype == E4M3:
        return rng.integers(1, 127, shape, np.uint8).view(E4M3)
    if dtype == E8M0:
        return rng.integers(127 - spread, 128 + spread, shape).astype(np.uint8).view(E8M0)
    return (rng.uniform(1.0, 2.0, shape) * 2.0 ** rng.integers(-spread, spread, shape)).astype(np.float32).astype(dtype)


def random_packed(rng: np.random.Generator, n: int, k: int) -> Array:
    return rng.integers(0, 256, (n, k // 2), np.uint8)


def assert_same(got: Array, expected: Array) -> None:
    """The same FP32 bits, signs of zero included; NaN where NaN is due."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


# Checks: each of them holds for the package, and every mutant fails one.


def check_codes(package: Package) -> None:
    """All codes equal ml_dtypes, bit for bit; so NaN and signed zeros too."""
    every = np.arange(256, dtype=np.uint8)
    for decode, dtype in ((package.codes.decode_e4m3, E4M3), (package.codes.decode_e8m0, E8M0)):
        for codes in (every, every.view(dtype)):
            got, expected = decode(codes), every.view(dtype).astype(np.float32)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))
    fp4 = np.dtype(ml_dtypes.float4_e2m1fn)
    expected = every[:16].view(fp4).astype(np.float32)
    np.testing.assert_array_equal(
        package.codes.decode_e2m1(every[:16].view(fp4)).view(np.uint32), expected.view(np.uint32)
    )
    pairs = np.stack([expected[every % 16], expected[every // 16]], axis=1).reshape(512)
    for dtype in (np.uint8, np.int8):
        got = package.codes.decode_e2m1(every.view(dtype))
        np.testing.assert_array_equal(got.view(np.uint32), pairs.view(np.uint32))


def check_bf16(package: Package) -> None:
    rng = np.random.default_rng(11)
    bits = rng.integers(0, 0x7F7F0000, 4096, np.uint32) | rng.integers(0, 2, 4096, np.uint32) << 31
    bits[:2048] = bits[:2048] & 0xFFFF0000 | 0x8000  # ties
    values = bits.view(np.float32)
    np.testing.assert_array_equal(package.codes.round_to_bf16(values).view(np.uint16), oracle_bf16(values))


def check_fp8(package: Package) -> None:
    rng = np.random.default_rng(12)
    # A square grid first: transposing it changes no shape.
    for n, k in ((130, 131), (1, 257), (257, 1), (127, 256), (5, 7)):
        weight = random_e4m3(rng, n, k)
        grid = (math.ceil(n / 128), math.ceil(k / 128))
        kinds = [(grid, dtype) for dtype in (F32, BF16, E8M0)] + [((n,), F32), ((n, 1), BF16), ((), E8M0), ((1,), F32)]
        for shape, dtype in kinds:
            scale = random_scale(rng, dtype, *shape)
            assert_same(package.dequant.dequant_fp8(weight, scale), oracle_fp8(weight, scale))


def check_nvfp4(package: Package) -> None:
    rng = np.random.default_rng(13)
    for n, k in ((1, 16), (127, 48), (129, 80), (3, 32)):
        packed, scale = random_packed(rng, n, k), random_scale(rng, E4M3, n, k // 16)
        factor = np.float32(rng.uniform(1e-5, 1e-3))
        assert_same(package.dequant.dequant_nvfp4(packed, scale, factor), oracle_fp4(packed, scale, 16, float(factor)))


def check_mxfp4(package: Package) -> None:
    rng = np.random.default_rng(14)
    for n, k in ((1, 32), (127, 96), (3, 64)):
        packed, scale = random_packed(rng, n, k), random_scale(rng, E8M0, n, k // 32, spread=120)
        assert_same(package.dequant.dequant_mxfp4(packed, scale), oracle_fp4(packed, scale, 32))


def check_refusals(package: Package) -> None:
    weight = np.zeros((130, 300), np.uint8)
    for shape in ((3, 2), (1, 2), (2, 2), (300,), (1, 130), (130, 2), (2,), (2, 3, 1), (0,)):
        with pytest.raises(InvalidArgumentError, match="scale"):
            package.dequant.dequant_fp8(weight, np.ones(shape, np.float32))


def check_store(package: Package, folder: Path) -> None:
    """One weight in both NVFP4 conventions has the same values; a swapped convention and bad scales are refused."""
    rng = np.random.default_rng(15)
    n, k = 24, 64
    packed, scale = random_packed(rng, n, k), random_scale(rng, E4M3, n, k // 16)
    divisor = np.float32(3584.7)
    multiplier = np.float32(1) / divisor
    one = folder / "both.safetensors"
    fp8, blocks = random_e4m3(rng, 300, 130), random_scale(rng, BF16, 3, 2)
    bad = blocks.copy()
    bad[2, 1] = np.nan
    write(
        one,
        {
            "a.weight": (packed, D.U8),
            "a.weight_scale": (scale, D.F8_E4M3),
            "a.weight_scale_2": (np.array(multiplier), D.F32),
            "b.weight_packed": (packed, D.U8),
            "b.weight_scale": (scale, D.F8_E4M3),
            "b.weight_global_scale": (np.array([divisor]), D.F32),
            "swapped.weight": (packed, D.U8),
            "swapped.weight_scale": (scale, D.F8_E4M3),
            "swapped.weight_scale_2": (np.array(divisor), D.F32),
            "also.weight_packed": (packed, D.U8),
            "also.weight_scale": (scale, D.F8_E4M3),
            "also.weight_global_scale": (np.array(multiplier), D.F32),
            "f.weight": (fp8, D.F8_E4M3),
            "f.weight_scale_inv": (blocks, D.BF16),
            "turned.weight": (fp8, D.F8_E4M3),
            "turned.weight_scale_inv": (blocks.T.copy(), D.BF16),
            "nan.weight": (fp8, D.F8_E4M3),
            "nan.weight_scale_inv": (bad, D.BF16),
        },
    )
    read = package.plan.read_weight
    store = WeightStore.open(one)
    expected = oracle_fp4(packed, scale, 16, float(multiplier))
    assert_same(read(store, "a.weight").values, expected)
    assert_same(read(store, "b.weight").values, expected)
    assert_same(read(store, "f.weight", ["g", "f.weigh"]).values, oracle_fp8(fp8, blocks))
    for name in ("swapped.weight", "also.weight", "nan.weight"):
        with pytest.raises(ScaleValueError):
            read(store, name)
    with pytest.raises(ScaleShapeError):
        read(store, "turned.weight")
    with pytest.raises(IgnoredModuleError):
        read(store, "a.weight", ["a"])


CHECKS: tuple[Callable[[Package], None], ...] = (
    check_codes,
    check_bf16,
    check_fp8,
    check_nvfp4,
    check_mxfp4,
    check_refusals,
)
