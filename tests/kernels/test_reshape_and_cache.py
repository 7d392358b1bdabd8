# SPDX-License-Identifier: AGPL-3.0-only
"""Module reshape_and_cache: rows reach their slots bit for bit, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import reshape_and_cache as ops
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, alloc_or_skip, any_bits, assert_same_bits, download, normal, upload

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
