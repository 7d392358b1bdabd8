# SPDX-License-Identifier: AGPL-3.0-only
"""Module reshape_and_cache: rows reach their slots, bit for bit or as the nearest E4M3, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import reshape_and_cache as ops
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import (
    BF16,
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

from .support import checks

# (rows, nkv, head_dim, block_size, blocks)
SHAPES = [
    (1, 1, 32, 16, 2),
    (5, 2, 64, 16, 3),
    (3, 8, 128, 16, 2),
    (2, 4, 256, 32, 1),
    (7, 1, 96, 1, 9),
    (4, 3, 7, 5, 3),
    (6, 1, 1, 4, 4),
    (2, 1, 576, 16, 2),
]
# (bytes past a 256-byte boundary of sources and caches, elements between rows)
LAYOUTS = [(0, 0, 0), (8, 8, 4), (0, 8, 8), (2, 0, 1), (4, 2, 3)]


def run(
    gpu: GpuBackend,
    rows: tuple[Array, Array],
    caches: tuple[Array, Array],
    slots: Array,
    shape: tuple[int, int, int],
    layout: tuple[int, int, int] = (0, 0, 0),
) -> tuple[Array, Array]:
    """The caches afterwards. Rows lie apart by different strides for keys and values, NaN in between."""
    kv_heads, size, block_size = shape
    source_shift, cache_shift, gap = layout
    strides = kv_heads * size + gap, kv_heads * size + 2 * gap
    sources = []
    for array, stride in zip(rows, strides, strict=True):
        apart = np.full((len(array), stride), np.nan, BF16)
        apart[:, : kv_heads * size] = array
        # The last row ends where the allocation ends.
        flat = apart.reshape(-1)[: (len(array) - 1) * stride + kv_heads * size]
        sources.append(upload(gpu, flat, source_shift))
    outputs = [Output(gpu, cache.shape, content=cache, shift=cache_shift) for cache in caches]
    ops.reshape_and_cache(
        gpu, gpu.kernel("reshape_and_cache", "reshape_and_cache_flash"), *sources, outputs[0].ptr, outputs[1].ptr,
        upload(gpu, slots), len(slots), kv_heads, size, block_size, *strides, gpu.default_stream(),
    )  # fmt: skip
    return outputs[0].read(), outputs[1].read()


@checks("reshape_and_cache::reshape_and_cache_flash")
def check_reshape_and_cache(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("reshape_and_cache", "reshape_and_cache_flash")
    assert spec is not None
    for count, kv_heads, size, block_size, blocks in SHAPES:
        for layout in LAYOUTS:
            row, capacity = kv_heads * size, blocks * block_size
            slots = rng.permutation(capacity)[:count].astype(np.int64)
            if count > 1:
                slots[rng.integers(count)] = rng.choice([-1, -16, -(2**40)])
            rows = any_bits(rng, count, row), any_bits(rng, count, row)
            caches = any_bits(rng, capacity, row), any_bits(rng, capacity, row)
            got = run(gpu, rows, caches, slots, (kv_heads, size, block_size), layout)
            for name, result, array, before in zip(("K", "V"), got, rows, caches, strict=True):
                expected = before.copy()
                for t, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        expected[slot] = array[t]
                assert_same_bits(result, expected, f"{name} {(count, kv_heads, size)} layout={layout} slots={slots}")
                spec.reference(array, before, slots)
                assert_same_bits(before, expected, f"reference {name}")


def test_reshape_and_cache(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_reshape_and_cache(gpu, rng)


def test_negative_slots_alone_write_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rows, caches = (any_bits(rng, 3, 64), any_bits(rng, 3, 64)), (any_bits(rng, 4, 64), any_bits(rng, 4, 64))
    got = run(gpu, rows, caches, np.array([-1, -2, -(2**62)], np.int64), (1, 64, 4))
    assert_same_bits(got[0], caches[0])
    assert_same_bits(got[1], caches[1])


@pytest.mark.host_only("CUDA cannot see slots on the device before the kernel writes")
def test_a_slot_past_the_cache_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rows = any_bits(rng, 1, 64), any_bits(rng, 1, 64)
    cache = upload(gpu, any_bits(rng, 4, 64))
    sources = [upload(gpu, array) for array in rows]
    kernel = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
    with pytest.raises(ArgumentPointerError) as error:
        ops.reshape_and_cache(
            gpu, kernel, *sources, cache, cache, upload(gpu, np.array([4], np.int64)), 1, 1, 64, 4, 64, 64,
            gpu.default_stream(),
        )  # fmt: skip
    assert error.value.parameter == "k_cache"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"head_dim": 0}, "head_dim"),
        ({"block_size": 0}, "block_size"),
        ({"key_stride": 63}, "key_stride"),
        ({"value_stride": 63}, "value_stride"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
    numbers = {"num_tokens": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, "key_stride": 64}
    numbers |= {"value_stride": 64} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.reshape_and_cache(gpu, kernel, ptr, ptr, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.gpu_only("a cache of 8.6 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("8.6 GB of shadow memory")
def test_a_slot_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_slots(gpu, rng)


@checks("reshape_and_cache::reshape_and_cache_flash@far")
def check_far_slots(gpu: GpuBackend, rng: np.random.Generator) -> None:
    row, slots = 1024, np.array([0, 1 << 22], np.int64)
    array = any_bits(rng, 2, row)
    cache, source = alloc_or_skip(gpu, 2 * row * ((1 << 22) + 1)), upload(gpu, array)
    kernel = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
    # Keys and values are the same rows in the same cache: one such allocation is enough.
    ops.reshape_and_cache(
        gpu, kernel, source, source, cache, cache, upload(gpu, slots), 2, 4, 256, 16, row, row, gpu.default_stream()
    )
    got = [download(gpu, cache.offset(2 * row * slot), (row,), BF16) for slot in slots.tolist()]
    gpu.free(cache)
    assert_same_bits(np.stack(got), array)


FP8 = "reshape_and_cache_flash_fp8"
# (bytes past a 256-byte boundary of sources and of caches, elements between rows, elements between blocks)
FP8_LAYOUTS = [(0, 0, 0, 0), (0, 0, 8, 64), (16, 8, 0, 13), (2, 0, 1, 8), (0, 3, 3, 1)]
SCALES = [(1.0, 1.0), (0.003, 2.5), (448.0, 7.0), (1e30, 2.0**-127)]
_EXPONENT, _MANTISSA = np.divmod(np.arange(127), 8)
_MAGNITUDES = np.where(_EXPONENT == 0, _MANTISSA * 2.0**-9, (8.0 + _MANTISSA) * 2.0 ** (_EXPONENT - 10.0))
HALVES = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2
"""Half way between neighbours among E4M3's magnitudes. Times 448 or 7 each is a BF16."""


def e4m3(rows: Array, scale: float) -> Array:
    """E4M3 bytes by definition: the magnitude nearest to the FP32 product x * (1 / scale), the even code of two."""
    with np.errstate(all="ignore"):
        exact = np.abs(f64(rows.astype(np.float32) * (np.float32(1) / np.float32(scale))))
    below = np.searchsorted(HALVES, exact)
    tied = exact == np.append(HALVES, np.inf)[below]
    sign = (rows.view(np.uint16) >> 15).astype(np.uint8) << 7
    codes = (below + (tied & (below % 2 == 1))).astype(np.uint8) | sign
    return np.where(np.isnan(exact), np.uint8(0x7F), codes)


def run_fp8(
    gpu: GpuBackend,
    rows: tuple[Array, Array],
    caches: tuple[Array, Array],
    slots: Array,
    shape: tuple[int, int, int],
    scales: tuple[float, float] = (1.0, 1.0),
    layout: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> tuple[Array, Array]:
    """The caches [blocks, block stride] afterwards; otherwise as `run`."""
    kv_heads, size, block_size = shape
    source_shift, cache_shift, gap, _ = layout
    strides = kv_heads * size + gap, kv_heads * size + 2 * gap
    sources = []
    for array, stride in zip(rows, strides, strict=True):
        apart = np.full((len(array), stride), np.nan, BF16)
        apart[:, : kv_heads * size] = array
        flat = apart.reshape(-1)[: (len(array) - 1) * stride + kv_heads * size]
        sources.append(upload(gpu, flat, source_shift))
    outputs = [Output(gpu, cache.shape, cache.dtype, content=cache, shift=cache_shift) for cache in caches]
    ops.reshape_and_cache_fp8(
        gpu, gpu.kernel("reshape_and_cache", FP8), *sources, outputs[0].ptr, outputs[1].ptr, upload(gpu, slots),
        len(slots), kv_heads, size, block_size, *scales, *strides, caches[0].shape[1], gpu.default_stream(),
    )  # fmt: skip
    return outputs[0].read(), outputs[1].read()


@checks(f"reshape_and_cache::{FP8}")
def check_reshape_and_cache_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for number, (count, kv_heads, size, block_size, blocks) in enumerate(SHAPES):
        for turn, layout in enumerate(FP8_LAYOUTS):
            row, scales = kv_heads * size, SCALES[(number + turn) % len(SCALES)]
            slots = rng.permutation(blocks * block_size)[:count].astype(np.int64)
            if count > 1:
                slots[rng.integers(count)] = rng.choice([-1, -16, -(2**40)])
            if number % 3 == 0:
                rows = any_bits(rng, count, row), any_bits(rng, count, row)
            elif number % 3 == 1:
                rows = normal(rng, count, row, scale=200 * scales[0]), normal(rng, count, row, scale=0.1 * scales[1])
            else:
                ties = [rng.choice(HALVES, (count, row)) * scale for scale in scales]
                rows = ties[0].astype(BF16), (-ties[1]).astype(BF16)
            stride = block_size * row + layout[3]
            before = [rng.integers(0, 256, (blocks, stride), np.uint8) for _ in rows]
            got = run_fp8(gpu, rows, (before[0], before[1]), slots, (kv_heads, size, block_size), scales, layout)
            for name, result, array, cache, scale in zip(("K", "V"), got, rows, before, scales, strict=True):
                codes = e4m3(array, scale)
                for t, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        start = slot % block_size * row
                        cache[slot // block_size, start : start + row] = codes[t]
                what = f"{name} {(count, kv_heads, size)} layout={layout} scale={scale} slots={slots}"
                assert_same_bits(result, cache, what)


def test_reshape_and_cache_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_reshape_and_cache_fp8(gpu, rng)


@pytest.mark.parametrize("scales", [(1.0, 0.75), (0.003, 0.03)])
def test_every_bf16_becomes_the_nearest_e4m3(
    gpu: GpuBackend, rng: np.random.Generator, scales: tuple[float, float]
) -> None:
    every = rng.permutation(1 << 16).astype(np.uint16).view(BF16).reshape(16, 4096)
    caches = np.zeros((1, 1 << 16), np.uint8), np.zeros((1, 1 << 16), np.uint8)
    got = run_fp8(gpu, (every, every), caches, np.arange(16), (8, 512, 16), scales)
    for result, scale in zip(got, scales, strict=True):
        assert_same_bits(result.reshape(every.shape), e4m3(every, scale))


def test_edges_of_e4m3(gpu: GpuBackend) -> None:
    """464 lies half way between the largest number and the next that there would be; NaN is 0x7f on every path."""
    values = [448, 464, 466, 1000, -1000, np.inf, -np.inf, np.nan, -np.nan, 1e-9, 0.0, -0.0, 2.0**-10, -(2.0**-10)]
    codes = [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F, 0, 0, 0x80, 0, 0x80]
    values += [1.5 * 2.0**-10, 2.0**-9, 1.5 * 2.0**-9, 17.0, 19.0, 2.0**-6, 240.0]
    codes += [1, 1, 2, 0x58, 0x5A, 0x08, 0x77]
    row = np.array([values], np.float32).astype(BF16)
    cache = np.zeros((1, len(values)), np.uint8)
    for result in run_fp8(gpu, (row, row), (cache, cache), np.zeros(1, np.int64), (1, len(values), 1)):
        assert result[0].tolist() == codes


@pytest.mark.host_only("CUDA cannot see slots on the device before the kernel writes")
def test_an_fp8_slot_past_the_cache_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    row = upload(gpu, normal(rng, 1, 64))
    k_cache, v_cache = (upload(gpu, np.zeros(2 * 300 - 44, np.uint8)) for _ in range(2))
    kernel = gpu.kernel("reshape_and_cache", FP8)

    def launch(slot: int) -> None:
        ops.reshape_and_cache_fp8(
            gpu, kernel, row, row, k_cache, v_cache, upload(gpu, np.array([slot], np.int64)), 1, 1, 64, 4, 1.0, 1.0,
            64, 64, 300, gpu.default_stream(),
        )  # fmt: skip

    launch(7)
    with pytest.raises(ArgumentPointerError) as error:
        launch(8)
    assert error.value.parameter == "k_cache"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"head_dim": 0}, "head_dim"),
        ({"block_size": 0}, "block_size"),
        ({"key_stride": 63}, "key_stride"),
        ({"value_stride": 63}, "value_stride"),
        ({"cache_stride": 1023}, "cache_stride"),
        ({"cache_stride": 1 << 64}, "cache_stride"),
        ({"cache_stride": 1024.0}, "cache_stride"),
        *(
            ({name: bad}, name)
            for name in ("k_scale", "v_scale")
            for bad in (0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e39, True)
        ),
    ],
)
def test_impossible_fp8_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("reshape_and_cache", FP8)
    numbers: dict[str, Any] = {"num_tokens": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 16, "key_stride": 64}
    numbers |= {"value_stride": 64, "cache_stride": 1024, "k_scale": 1.0, "v_scale": 1.0} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.reshape_and_cache_fp8(gpu, kernel, ptr, ptr, ptr, ptr, ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


@pytest.mark.gpu_only("a cache of 4.3 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("4.3 GB of shadow memory")
def test_an_fp8_slot_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_fp8_slots(gpu, rng)


@checks(f"reshape_and_cache::{FP8}@far")
def check_far_fp8_slots(gpu: GpuBackend, rng: np.random.Generator) -> None:
    row, stride, slots = 1024, 1 << 20, np.array([0, 16 << 12], np.int64)
    array = any_bits(rng, 2, row)
    cache, source = alloc_or_skip(gpu, (stride << 12) + row), upload(gpu, array)
    # Keys and values are the same rows in the same cache: one such allocation is enough.
    ops.reshape_and_cache_fp8(
        gpu, gpu.kernel("reshape_and_cache", FP8), source, source, cache, cache, upload(gpu, slots), 2, 4, 256, 16,
        1.0, 1.0, row, row, stride, gpu.default_stream(),
    )  # fmt: skip
    got = [download(gpu, cache.offset(slot // 16 * stride), (row,), np.dtype(np.uint8)) for slot in slots.tolist()]
    gpu.free(cache)
    assert_same_bits(np.stack(got), e4m3(array, 1.0))
