# SPDX-License-Identifier: AGPL-3.0-only
"""Module fused_k_norm_rope_cache: keys rounded once, against FP64, and closer to it than the chain of three kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import fused_k_norm_rope_cache as ops
from spark_py.ops.norm import rms_norm
from spark_py.ops.reshape_and_cache import reshape_and_cache
from spark_py.ops.rope import rope
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import (
    BF16,
    Array,
    Output,
    alloc_or_skip,
    any_bits,
    assert_rounds,
    assert_same_bits,
    download,
    f64,
    normal,
    relative_l2,
    upload,
)  # fmt: skip
from spark_py.testing.cases.fused_k_norm_rope_cache import E4M3, LONG, SHAPES, keys

from .support import checks

MODULE = "fused_k_norm_rope_cache"
BF16_WRITE, MROPE_WRITE = "fused_k_norm_rope_cache_write_bf16", "fused_k_norm_rope_mrope_cache_write_bf16"
FP8_WRITE = "fused_k_norm_rope_cache_write_fp8"
U8 = np.dtype(np.uint8)
EPS = 1e-3


def run(
    gpu: GpuBackend,
    function: str,
    k: Array,
    weight: Array,
    positions: Array,
    cache: Array,
    slots: Array,
    rotary: int,
    theta: float,
    block_size: int = 4,
    inv_scale: float | None = None,
    shift: int = 0,
) -> Array:
    """The cache [S, heads * head_dim] afterwards; positions [T], or [3, T] for the kernel with three streams."""
    rows, heads, size = k.shape
    output = Output(gpu, cache.shape, cache.dtype, cache, shift)
    launch: Callable[..., None] = getattr(ops, function.removesuffix("_bf16"))
    streams = [upload(gpu, np.ascontiguousarray(stream)) for stream in np.atleast_2d(positions)]
    numbers: list[Any] = [rows, heads, size, rotary, block_size, EPS, theta]
    launch(
        gpu, gpu.kernel(MODULE, function), upload(gpu, k, shift), upload(gpu, weight, shift), *streams, output.ptr,
        upload(gpu, slots), *numbers, *([] if inv_scale is None else [inv_scale]), gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def draw(rng: np.random.Generator, rows: int, heads: int, size: int, capacity: int) -> tuple[Array, Array, Array]:
    """Keys whose heads differ in magnitude, weights, and slots of which one is negative where there are several."""
    spread = 2.0 ** rng.integers(-6, 7, (rows, heads, 1))
    k = (rng.standard_normal((rows, heads, size)) * spread).astype(BF16)
    slots = rng.permutation(capacity)[:rows].astype(np.int64)
    if rows > 2:
        slots[rng.integers(rows)] = rng.choice([-1, -16, -(2**40)])
    return k, normal(rng, size, scale=0.5), slots


def draw_positions(rng: np.random.Generator, *shape: int) -> Array:
    """Positions that do not ascend, the named ones among them."""
    return (rng.choice(LONG, shape) + rng.integers(0, 3, shape)).astype(np.uint32)


def check(gpu: GpuBackend, rng: np.random.Generator, function: str, factors: tuple[float, ...] = ()) -> None:
    spec = catalog.CATALOG[MODULE, function]
    streams = 3 if function == MROPE_WRITE else 1
    for number, (rows, heads, size, rotary, block_size, blocks) in enumerate(SHAPES):
        k, weight, slots = draw(rng, rows, heads, size, block_size * blocks)
        positions, theta = draw_positions(rng, streams, rows), float(rng.choice([10000.0, 1e6, 1e7]))
        factor = factors[number % len(factors)] if factors else None
        capacity, row = block_size * blocks, heads * size
        before = normal(rng, capacity, row) if factor is None else rng.integers(0, 127, (capacity, row), np.uint8)
        given = positions if streams == 3 else positions[0]
        got = run(
            gpu, function, k, weight, given, before, slots, rotary, theta, block_size, factor, 2 * (number % 2)
        )  # fmt: skip
        reference = before.copy()
        spec.reference(k, weight, given, reference, slots, rotary, EPS, theta, *([] if factor is None else [factor]))
        pairs = positions[np.arange(rotary // 2) % streams].T
        exact, slack = (each.reshape(rows, row) for each in keys(k, weight, pairs, rotary, EPS, theta))
        kept = slots >= 0
        for what, cache in (("kernel", got), ("reference", reference)):
            text = f"{what} {[rows, heads, size]} rotary_dim={rotary} theta={theta} slots={slots} factor={factor}"
            written = cache[slots[kept]]
            if factor is None:
                assert_rounds(written, exact[kept], 0.0, slack[kept], text)
            else:
                scaled = np.clip(exact * np.float32(factor), -448, 448)
                assert_rounds(written.view(E4M3), scaled[kept], 0.0, slack[kept] * factor, text)
            others = np.delete(np.arange(capacity), slots[kept])
            assert_same_bits(cache[others], before[others], f"other slots, {text}")


@checks(f"{MODULE}::{BF16_WRITE}")
def check_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, BF16_WRITE)


@checks(f"{MODULE}::{MROPE_WRITE}")
def check_mrope(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, MROPE_WRITE)


@checks(f"{MODULE}::{FP8_WRITE}")
def check_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, FP8_WRITE, (1.0, 40.0, 2000.0, 0.02))


def test_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_bf16(gpu, rng)


def test_mrope(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_mrope(gpu, rng)


def test_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_fp8(gpu, rng)


def test_one_rounding_is_closer_than_the_chain_of_three_kernels(gpu: GpuBackend, rng: np.random.Generator) -> None:
    rows, heads, size, rotary, theta = 40, 2, 128, 128, 1e6
    k, weight = normal(rng, rows, heads, size), normal(rng, size, scale=0.5)
    positions, slots = draw_positions(rng, rows), np.arange(rows, dtype=np.int64)
    cache = np.zeros((rows, heads * size), BF16)
    fused = run(gpu, BF16_WRITE, k, weight, positions, cache, slots, rotary, theta)
    stream, row, chain = gpu.default_stream(), heads * size, Output(gpu, cache.shape, content=cache)
    held, query = Output(gpu, k.shape, content=k), upload(gpu, normal(rng, rows, 1, size))
    rms_norm(gpu, gpu.kernel("norm", "rms_norm"), held.ptr, upload(gpu, weight), held.ptr, rows * heads, size, EPS,
             stream)  # fmt: skip
    rope(gpu, gpu.kernel("rope", "rope_forward"), query, held.ptr, upload(gpu, positions), rows, 1, heads, size, rotary,
         theta, stream)  # fmt: skip
    reshape_and_cache(
        gpu, gpu.kernel("reshape_and_cache", "reshape_and_cache_flash"), held.ptr, held.ptr, chain.ptr, chain.ptr,
        upload(gpu, slots), rows, heads, size, 4, row, row, stream,
    )  # fmt: skip
    pairs = np.repeat(positions[:, None], rotary // 2, 1)
    exact = keys(k, weight, pairs, rotary, EPS, theta)[0].reshape(rows, row)
    once, twice = relative_l2(fused, exact), relative_l2(chain.read(), exact)
    assert 1.2 < twice / once < 1.6  # two independent roundings: sqrt(2)
    nearest = exact.astype(BF16)
    assert (fused == nearest).mean() > 0.999
    assert (chain.read() == nearest).mean() < 0.8


@pytest.mark.parametrize("function", [BF16_WRITE, FP8_WRITE])
def test_a_head_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    k, weight, slots = draw(rng, 6, 3, 96, 9)
    slots = np.array([3, 1, 8, 0, 2, 5], np.int64)
    positions, factor = draw_positions(rng, 6), 3.0 if function == FP8_WRITE else None
    cache = np.zeros((9, 3 * 96), U8 if factor else BF16)
    together = run(gpu, function, k, weight, positions, cache, slots, 64, 1e6, 4, factor)
    for t, head in ((0, 0), (3, 2), (5, 1)):
        one = np.ascontiguousarray(k[t : t + 1, head : head + 1])
        alone = run(
            gpu, function, one, weight, positions[t : t + 1], cache[:, :96], slots[t : t + 1], 64, 1e6, 4, factor
        )
        assert_same_bits(alone[slots[t]], together[slots[t], 96 * head : 96 * (head + 1)], f"row {t}, head {head}")


def test_equal_streams_are_one_position(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, weight, slots = draw(rng, 5, 2, 64, 9)
    positions, cache = draw_positions(rng, 5), normal(rng, 9, 128)
    one = run(gpu, BF16_WRITE, k, weight, positions, cache, slots, 48, 1e6)
    assert_same_bits(run(gpu, MROPE_WRITE, k, weight, np.stack([positions] * 3), cache, slots, 48, 1e6), one)


@pytest.mark.parametrize("function", [BF16_WRITE, FP8_WRITE])
def test_nan_fills_its_head_and_no_other(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    k, weight, slots = normal(rng, 2, 2, 64), normal(rng, 64), np.array([1, 0], np.int64)
    k[0, 1, 63] = np.nan
    factor = 1.0 if function == FP8_WRITE else None
    cache = np.zeros((2, 128), U8 if factor else BF16)
    got = run(gpu, function, k, weight, draw_positions(rng, 2), cache, slots, 32, 1e4, 4, factor)
    values = f64(got.view(E4M3)) if factor else f64(got)
    assert np.isnan(values[1, 64:]).all()
    assert np.isfinite(values[0]).all()
    assert np.isfinite(values[1, :64]).all()
    if factor:
        assert (got[1, 64:] == 0x7F).all()


def test_negative_slots_alone_write_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, weight, cache = normal(rng, 3, 1, 64), normal(rng, 64), any_bits(rng, 4, 64)
    slots = np.array([-1, -2, -(2**62)], np.int64)
    assert_same_bits(run(gpu, BF16_WRITE, k, weight, draw_positions(rng, 3), cache, slots, 64, 1e4), cache)


@pytest.mark.host_only("CUDA cannot see slots on the device before the kernel writes")
def test_a_slot_past_the_cache_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    k, cache, slots = normal(rng, 1, 1, 64), normal(rng, 4, 64), np.array([4], np.int64)
    with pytest.raises(ArgumentPointerError) as error:
        run(gpu, BF16_WRITE, k, normal(rng, 64), draw_positions(rng, 1), cache, slots, 64, 1e4)
    assert error.value.parameter == "k_cache"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 257}, "head_dim"),
        ({"rotary_dim": 0}, "rotary_dim"),
        ({"rotary_dim": 7}, "rotary_dim"),
        ({"rotary_dim": 66}, "rotary_dim"),
        ({"block_size": 0}, "block_size"),
        ({"eps": -1.0}, "eps"),
        ({"theta": 0.0}, "theta"),
        ({"theta": float("nan")}, "theta"),
        ({"inv_scale": 0.0}, "inv_scale"),
        ({"inv_scale": float("inf")}, "inv_scale"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(MODULE, FP8_WRITE)
    numbers: dict[str, Any] = {"num_tokens": 1, "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 64, "block_size": 16}
    numbers |= {"eps": EPS, "theta": 1e4, "inv_scale": 1.0} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.fused_k_norm_rope_cache_write_fp8(
            gpu, kernel, ptr, ptr, ptr, ptr, ptr, **numbers, stream=gpu.default_stream()
        )
    assert error.value.name == name


@pytest.mark.gpu_only("a cache of 8.6 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("8.6 GB of shadow memory")
def test_a_slot_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_slots(gpu, rng)


@checks(f"{MODULE}::{BF16_WRITE}@far")
def check_far_slots(gpu: GpuBackend, rng: np.random.Generator) -> None:
    heads, size, far = 4, 256, 1 << 22
    k, weight, positions = normal(rng, 1, heads, size), normal(rng, size), draw_positions(rng, 1)
    near = np.zeros((1, heads * size), BF16)
    expected = run(gpu, BF16_WRITE, k, weight, positions, near, np.zeros(1, np.int64), 64, 1e6)
    cache = alloc_or_skip(gpu, 2 * heads * size * (far + 1))
    ops.fused_k_norm_rope_cache_write(
        gpu, gpu.kernel(MODULE, BF16_WRITE), upload(gpu, k), upload(gpu, weight), upload(gpu, positions), cache,
        upload(gpu, np.array([far], np.int64)), 1, heads, size, 64, 16, EPS, 1e6, gpu.default_stream(),
    )  # fmt: skip
    got = download(gpu, cache.offset(2 * heads * size * far), (1, heads * size), BF16)
    gpu.free(cache)
    assert_same_bits(got, expected)
