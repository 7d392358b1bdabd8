# SPDX-License-Identifier: AGPL-3.0-only
"""Dequantisation of arrays: every code, every kind of scale, edge blocks, rounding, and what is refused.

All comparisons are bit for bit: a result is one rounded FP32 product, so there is no tolerance to choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_py.model.weight_loader import dequant, dequant_codes, dequant_plan, ignore_modules
from spark_py.model.weight_loader.dequant_codes import widen_scale
from spark_py.runtime.errors import InvalidArgumentError
from tests.model.dequant_support import (
    BF16,
    CHECKS,
    E4M3,
    E8M0,
    Array,
    Package,
    assert_same,
    e2m1,
    e4m3,
    e8m0,
    oracle_bf16,
    oracle_fp4,
    oracle_fp8,
    random_e4m3,
    random_packed,
    random_scale,
)

REAL = Package(dequant_codes, dequant, ignore_modules, dequant_plan)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([127, 128, 129, 255, 256, 257]))
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Callable[[Package], None]) -> None:
    check(REAL)


def test_oracle_agrees_with_ml_dtypes() -> None:
    """The oracle's own decoding, which shares nothing with the package."""
    every = np.arange(256, dtype=np.uint8)
    for decode, dtype in ((e4m3, E4M3), (e8m0, E8M0)):
        assert_same(np.array([decode(c) for c in range(256)], np.float32), every.view(dtype).astype(np.float32))
    assert_same(np.array([e2m1(c) for c in range(16)], np.float32), every[:16].view(E2M1).astype(np.float32))


@given(n=SIZES, k=SIZES, seed=SEEDS, dtype=st.sampled_from([np.dtype(np.float32), BF16, E8M0]), kind=st.integers(0, 5))
@settings(max_examples=60)
def test_fp8(n: int, k: int, seed: int, dtype: Any, kind: int) -> None:
    """All bytes, NaN included, and scales over nearly all of FP32: overflow and subnormal products too."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (n, k), np.uint8).view(E4M3)
    shape = [(), (1,), (1, 1), (n,), (n, 1), (-(-n // 128), -(-k // 128))][kind]
    scale = random_scale(rng, dtype, *shape, spread=125)
    expected = oracle_fp8(weight, scale)
    assert_same(dequant.dequant_fp8(weight, scale), expected)
    assert_same(dequant.dequant_fp8(weight.view(np.uint8), scale), expected)


@given(n=st.integers(1, 40), groups=st.integers(1, 6), seed=SEEDS)
@settings(max_examples=60)
def test_nvfp4(n: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    packed, scale = random_packed(rng, n, 16 * groups), rng.integers(0, 256, (n, groups), np.uint8).view(E4M3)
    factor = random_scale(rng, np.float32, spread=125)
    expected = oracle_fp4(packed, scale, 16, float(factor))
    assert_same(dequant.dequant_nvfp4(packed, scale, factor[()]), expected)
    unpacked = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, -1).view(E2M1)
    assert_same(dequant.dequant_nvfp4(unpacked, scale.view(np.uint8), factor[()]), expected)


@given(n=st.integers(1, 40), groups=st.integers(1, 4), seed=SEEDS)
@settings(max_examples=60)
def test_mxfp4(n: int, groups: int, seed: int) -> None:
    """Every E8M0 byte: 0 is the subnormal 2^-127, 255 is NaN."""
    rng = np.random.default_rng(seed)
    packed, scale = random_packed(rng, n, 32 * groups), rng.integers(0, 256, (n, groups), np.uint8).view(E8M0)
    expected = oracle_fp4(packed, scale, 32)
    assert_same(dequant.dequant_mxfp4(packed.view(np.int8), scale), expected)
    assert_same(dequant.dequant_mxfp4(packed, scale.view(np.uint8)), expected)


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_bf16(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    got, finite = dequant_codes.round_to_bf16(values), np.isfinite(values)
    np.testing.assert_array_equal(got.view(np.uint16)[finite], oracle_bf16(values[finite]))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(values))
    infinite = np.isinf(values)
    np.testing.assert_array_equal(got[infinite].astype(np.float32), values[infinite])


def test_more_codes_than_one_chunk(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    weight, packed = random_e4m3(rng, 9, 13), random_packed(rng, 6, 32)
    scale, groups = random_scale(rng, np.float32, 9), random_scale(rng, E8M0, 6, 1)
    monkeypatch.setattr(dequant_codes, "_CHUNK", 7)
    assert_same(dequant.dequant_fp8(weight, scale), oracle_fp8(weight, scale))
    assert_same(dequant.dequant_mxfp4(packed, groups), oracle_fp4(packed, groups, 32))


def test_arrays_in_any_layout(rng: np.random.Generator) -> None:
    """Views with strides are read as they are, and no input is written to."""
    weight = np.asfortranarray(random_e4m3(rng, 130, 140).view(np.uint8)).view(np.uint8)[::-1, ::2]
    scale = random_scale(rng, np.float32, 4, 1)[::2]
    packed, groups = random_packed(rng, 8, 64)[:, ::2], random_scale(rng, E8M0, 8, 2)[:, ::2]
    before = [array.copy() for array in (weight, scale, packed, groups)]
    assert_same(dequant.dequant_fp8(weight, scale), oracle_fp8(weight.copy(), scale.copy()))
    assert_same(dequant.dequant_mxfp4(packed, groups), oracle_fp4(packed.copy(), groups.copy(), 32))
    for array, old in zip((weight, scale, packed, groups), before, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), old.view(np.uint8))


def test_result_of_an_fp32_scale_of_one_is_not_the_input() -> None:
    scale = np.ones((), np.float32)
    dequant.dequant_fp8(np.full((2, 2), 0x40, np.uint8), scale)
    assert scale == 1


@pytest.mark.parametrize("k", [2, 8, 24, 40])
def test_nvfp4_columns_must_fill_groups(k: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"multiple of 16, and is {k}"):
        dequant.dequant_nvfp4(np.zeros((4, k // 2), np.uint8), np.zeros((4, -(-k // 16)), np.uint8), 1.0)


@pytest.mark.parametrize("k", [16, 48, 80])
def test_mxfp4_columns_must_fill_groups(k: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"multiple of 32, and is {k}"):
        dequant.dequant_mxfp4(np.zeros((4, k // 2), np.uint8), np.zeros((4, -(-k // 32)), np.uint8))


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (5, 4), (2, 8), (16,), (4, 4, 1)])
def test_group_scales_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="scale") as caught:
        dequant.dequant_nvfp4(np.zeros((4, 32), np.uint8), np.zeros(shape, np.uint8), 1.0)
    assert caught.value.value == shape


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (32,), (1, 2, 16), ()])
def test_weights_that_are_no_matrix(shape: tuple[int, ...]) -> None:
    codes, one = np.zeros(shape, np.uint8), np.ones((1, 1), np.uint8)
    calls: tuple[Callable[[], Array], ...] = (
        lambda: dequant.dequant_fp8(codes, np.ones((), np.float32)),
        lambda: dequant.dequant_nvfp4(codes, one, 1.0),
        lambda: dequant.dequant_mxfp4(codes, one),
    )
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="matrix") as caught:
            call()
        assert caught.value.value == shape


def test_other_types_are_refused() -> None:
    codes, four = np.zeros((4, 32), np.uint8), np.ones((4, 4), np.uint8)
    calls: tuple[tuple[Callable[[], Array], str], ...] = (
        (lambda: dequant.dequant_fp8(codes.astype(ml_dtypes.float8_e5m2), np.ones((), np.float32)), "float8_e5m2"),
        (lambda: dequant.dequant_fp8(codes, np.ones((), np.float64)), "float64"),
        (lambda: dequant.dequant_fp8(codes, np.ones((), np.uint8)), "uint8"),  # a byte is no number here
        (lambda: dequant.dequant_fp8(codes, np.ones((4,), E4M3)), "float8_e4m3fn"),
        (lambda: dequant.dequant_nvfp4(codes.astype(np.int16), four, 1.0), "int16"),
        (lambda: dequant.dequant_nvfp4(codes, four.view(E8M0), 1.0), "float8_e8m0fnu"),
        (lambda: dequant.dequant_mxfp4(codes, np.ones((4, 2), E4M3)), "float8_e4m3fn"),
        (lambda: widen_scale(np.ones(2, np.float16)), "float16"),
        (lambda: widen_scale(np.ones(2, np.uint8)), "uint8"),
        (lambda: dequant_codes.decode_e2m1(np.array(3, np.uint8)), "at least one dimension"),
        (lambda: dequant_codes.decode_e2m1(np.array([3, 16], np.uint8).view(E2M1)), "0 .. 15"),
    )
    for call, told in calls:
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert told in str(caught.value)


@pytest.mark.parametrize("dtype", [BF16, E4M3, E8M0, np.dtype(np.float32)])
def test_widened_scales_are_exact(dtype: Any) -> None:
    scale = np.array([0.25, 1.0, 2.0, 64.0], np.float32).astype(dtype)
    assert_same(widen_scale(scale), np.array([0.25, 1.0, 2.0, 64.0], np.float32))
