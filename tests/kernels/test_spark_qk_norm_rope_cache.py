# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_qk_norm_rope_cache: the bits of norm, rope and cache write one after the other, on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.ops import reshape_and_cache, rope
from spark_py.ops import spark_qk_norm_rope_cache as ops
from spark_py.ops.norm import rms_norm
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases.spark_qk_norm_rope_cache import SHAPES, Shape

from .support import check_cases, checks

MODULE = "spark_qk_norm_rope_cache"
EPS, THETA = 1e-6, 1e4
SCALES = (0.03, 0.5)


class Rows:
    """Random rows of a shape, their slots and positions, and an empty cache of three blocks."""

    def __init__(self, rng: np.random.Generator, shape: Shape, norm: bool, one_plus: bool, fp8: bool) -> None:
        self.shape, self.one_plus, self.fp8 = shape, one_plus, fp8
        rows, heads, kv_heads, size, _, block_size, gap = shape
        self.query = normal(rng, rows, heads * size + gap, scale=3)
        self.keys, self.values = (normal(rng, rows, kv_heads * size, scale=3) for _ in range(2))
        self.weights = [normal(rng, size, scale=0.3) for _ in range(2)] if norm else None
        self.positions = rng.integers(0, 100_000, rows).astype(np.uint32)
        self.slots = rng.permutation(3 * block_size)[:rows].astype(np.int64)
        self.slots[1:2] = -1
        self.cache_stride = block_size * kv_heads * size + (8 * gap if fp8 else 0)

    def outputs(self, gpu: GpuBackend) -> list[Output]:
        """Queries, keys, K cache and V cache."""
        dtype = np.dtype(np.uint8) if self.fp8 else self.query.dtype
        zeros = np.zeros(3 * self.cache_stride, dtype)
        return [
            Output(gpu, self.query.shape, content=self.query),
            Output(gpu, self.keys.shape, content=self.keys),
            *(Output(gpu, zeros.shape, dtype, content=zeros) for _ in range(2)),
        ]

    def fused(self, gpu: GpuBackend) -> list[Array]:
        rows, heads, kv_heads, size, rotary, block_size, gap = self.shape
        query, keys, *caches = self.outputs(gpu)
        weights = [None, None] if self.weights is None else [upload(gpu, weight) for weight in self.weights]
        ops.spark_qk_norm_rope_cache(
            gpu, gpu.kernel(MODULE, f"{MODULE}_fp8" if self.fp8 else MODULE), query.ptr, keys.ptr,
            upload(gpu, self.values), *weights, *(cache.ptr for cache in caches), upload(gpu, self.positions),
            upload(gpu, self.slots), 1, 1, rows, heads, kv_heads, size, rotary, block_size, heads * size + gap,
            self.cache_stride, self.one_plus, EPS, THETA, gpu.default_stream(), fp8_scales=SCALES if self.fp8 else None,
        )  # fmt: skip
        return [each.read() for each in (query, keys, *caches)]

    def composed(self, gpu: GpuBackend) -> list[Array]:
        rows, heads, kv_heads, size, rotary, block_size, gap = self.shape
        query, keys, *caches = self.outputs(gpu)
        values = upload(gpu, self.values)
        stream, step = gpu.default_stream(), 2 * (heads * size + gap)
        norm = gpu.kernel("norm", "rms_norm") if self.one_plus else gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
        q_weight, k_weight = (None, None) if self.weights is None else (upload(gpu, w) for w in self.weights)
        positions = upload(gpu, self.positions)
        for row in range(rows):
            at, key = query.ptr.offset(row * step), keys.ptr.offset(2 * row * kv_heads * size)
            if q_weight is not None and k_weight is not None:
                rms_norm(gpu, norm, at, q_weight, at, heads, size, EPS, stream)
                rms_norm(gpu, norm, key, k_weight, key, kv_heads, size, EPS, stream)
            rope.rope(
                gpu, gpu.kernel("rope", "rope_forward"), at, key, positions.offset(4 * row), 1, heads, kv_heads, size,
                rotary, THETA, stream,
            )  # fmt: skip
        slots, pools = upload(gpu, self.slots), [cache.ptr for cache in caches]
        numbers = (slots, rows, kv_heads, size, block_size)
        if self.fp8:
            reshape_and_cache.reshape_and_cache_fp8(
                gpu, gpu.kernel("reshape_and_cache", "reshape_and_cache_flash_fp8"), keys.ptr, values, *pools, *numbers,
                *SCALES, kv_heads * size, kv_heads * size, self.cache_stride, stream,
            )  # fmt: skip
        else:
            reshape_and_cache.reshape_and_cache(
                gpu, gpu.kernel("reshape_and_cache", "reshape_and_cache_flash"), keys.ptr, values, *pools, *numbers,
                kv_heads * size, kv_heads * size, stream,
            )  # fmt: skip
        return [each.read() for each in (query, keys, *caches)]


def check(gpu: GpuBackend, rng: np.random.Generator, fp8: bool) -> None:
    check_cases(gpu, rng, f"{MODULE}::{MODULE}_fp8" if fp8 else f"{MODULE}::{MODULE}")
    for shape in SHAPES:
        made = Rows(rng, shape, True, shape[0] % 2 == 0, fp8)
        for name, got, wanted in zip(
            ("Q", "K", "K cache", "V cache"), made.fused(gpu), made.composed(gpu), strict=True
        ):
            assert_same_bits(got, wanted, f"{name} of {shape}")


@checks(f"{MODULE}::{MODULE}")
def check_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, False)


@checks(f"{MODULE}::{MODULE}_fp8")
def check_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, True)


def test_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_bf16(gpu, rng)


def test_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_fp8(gpu, rng)


def test_without_norms(gpu: GpuBackend, rng: np.random.Generator) -> None:
    made = Rows(rng, SHAPES[2], False, True, False)
    for got, wanted in zip(made.fused(gpu), made.composed(gpu), strict=True):
        assert_same_bits(got, wanted)


NUMBERS: dict[str, Any] = {"position_stride": 1, "slot_stride": 1, "rows": 1, "num_q_heads": 2, "num_kv_heads": 1}
NUMBERS |= {"head_dim": 64, "rotary_dim": 32, "block_size": 4, "q_stride": 128, "cache_stride": 256, "one_plus": True}
NUMBERS |= {"eps": 1e-6, "theta": 1e4}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"head_dim": 288, "q_stride": 576}, "head_dim"),
        ({"rotary_dim": 33}, "rotary_dim"),
        ({"rotary_dim": 66}, "rotary_dim"),
        ({"theta": 0.0}, "theta"),
        ({"eps": -1.0}, "eps"),
        ({"q_stride": 127}, "q_stride"),
        ({"cache_stride": 255}, "cache_stride"),
        ({"rows": 0}, "rows"),
        ({"slot_stride": 0}, "slot_stride"),
        ({"fp8_scales": (1.0, 0.0)}, "v_scale"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr = upload(gpu, normal(rng, 512))
    kernel = gpu.kernel(MODULE, f"{MODULE}_fp8" if "fp8_scales" in change else MODULE)
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_qk_norm_rope_cache(gpu, kernel, *[ptr] * 9, **NUMBERS | change, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.host_only("CUDA cannot see slots on the device before the kernel writes")
def test_slots_beyond_the_cache_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, cache = upload(gpu, normal(rng, 512)), upload(gpu, normal(rng, 512))
    kernel, positions = gpu.kernel(MODULE, MODULE), upload(gpu, np.zeros(1, np.uint32))

    def launch(slot: int) -> None:
        ops.spark_qk_norm_rope_cache(
            gpu, kernel, *[ptr] * 5, cache, cache, positions, upload(gpu, np.array([slot], np.int64)), **NUMBERS,
            stream=gpu.default_stream(),
        )  # fmt: skip

    launch(7)
    with pytest.raises(ArgumentPointerError) as error:
        launch(8)
    assert error.value.parameter == "k_cache"
