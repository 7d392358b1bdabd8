# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_v4_qkv: queries and cache rows against FP64, rounded once; slots; rows that know nothing of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_v4_qkv as ops
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
    upload,
)
from spark_py.testing.cases.spark_v4_qkv import E4M3, NORM, SHAPES, draw_positions, draw_rows, draw_slots

from . import v4_oracle
from .support import check_cases, checks

MODULE = "spark_v4_qkv"
QUERY, ROW, ROW_FP8 = "spark_v4_q_norm_rope", "spark_v4_kv_assemble", "spark_v4_kv_assemble_fp8"
U8 = np.dtype(np.uint8)
EPS = 1e-6


def queries(gpu: GpuBackend, q: Array, positions: Array, rope_dim: int, theta: float = 1e4) -> Array:
    output = Output(gpu, q.shape, content=q)
    ops.spark_v4_q_norm_rope(
        gpu, gpu.kernel(MODULE, QUERY), output.ptr, upload(gpu, positions), *q.shape, rope_dim, EPS, theta,
        gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def assemble(
    gpu: GpuBackend,
    function: str,
    kv: Array,
    weight: Array,
    positions: Array,
    pool: Array,
    slots: Array,
    rope_dim: int,
    theta: float = 1e4,
) -> Array:
    """The pool [slots, head_dim] afterwards."""
    output = Output(gpu, pool.shape, pool.dtype, pool)
    launch: Callable[..., None] = getattr(ops, function)
    launch(
        gpu, gpu.kernel(MODULE, function), upload(gpu, kv), upload(gpu, weight), upload(gpu, positions), output.ptr,
        upload(gpu, slots), *kv.shape, rope_dim, EPS, theta, gpu.default_stream(),
    )  # fmt: skip
    return output.read()


def oracle(x: Array, weight: Array | None, positions: Array, rope_dim: int, theta: float) -> tuple[Array, Array]:
    """Heads in FP64 and the error that is allowed: roundings of the norm in each element of a pair, and the turn's."""
    normed = v4_oracle.rms(f64(x), EPS, None if weight is None else f64(weight))
    slack = np.abs(normed) * NORM
    slack[..., x.shape[-1] - rope_dim :] = 0.0
    turn = v4_oracle.rope_slack(normed, positions, theta, rope_dim)
    slack += turn * (1.0 + NORM * 2.0**22)  # a turn's slack is 2^-22 of the pair
    return v4_oracle.rope(normed, positions, theta, rope_dim), slack


@checks(f"{MODULE}::{QUERY}")
def check_queries(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[MODULE, QUERY]
    for number, (rows, heads, size, rope_dim) in enumerate(SHAPES):
        q, positions, theta = draw_rows(rng, rows, heads, size), draw_positions(rng, rows), (1e4, 1.6e5)[number % 2]
        exact, slack = oracle(q, None, positions, rope_dim, theta)
        what = f"{[rows, heads, size]} rope_dim={rope_dim} theta={theta}"
        assert_rounds(queries(gpu, q, positions, rope_dim, theta), exact, 0.0, slack, what)
        assert_rounds(spec.reference(q, positions, rope_dim, EPS, theta), exact, 0.0, slack, f"reference {what}")


def check_rows(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    spec, narrow = catalog.CATALOG[MODULE, function], function == ROW_FP8
    for number, (rows, spare, size, rope_dim) in enumerate(SHAPES):
        kv, positions, capacity = draw_rows(rng, rows, size), draw_positions(rng, rows), rows + spare
        weight, theta = normal(rng, size, scale=300.0 if narrow else 1.0), (1e4, 1.6e5)[number % 2]
        slots = draw_slots(rng, rows, capacity)
        before = any_bits(rng, capacity, size) if not narrow else rng.integers(0, 256, (capacity, size), np.uint8)
        reference = before.copy()
        spec.reference(kv, weight, positions, reference, slots, rope_dim, EPS, theta)
        exact, slack = oracle(kv, weight, positions, rope_dim, theta)
        exact, kept = (np.clip(exact, -448, 448) if narrow else exact), slots >= 0
        got = assemble(gpu, function, kv, weight, positions, before, slots, rope_dim, theta)
        for who, pool in (("kernel", got), ("reference", reference)):
            what = f"{who} {[rows, size]} rope_dim={rope_dim} theta={theta} slots={slots}"
            written = pool[slots[kept]]
            assert_rounds(written.view(E4M3) if narrow else written, exact[kept], 0.0, slack[kept], what)
            others = np.delete(np.arange(capacity), slots[kept])
            assert_same_bits(pool[others], before[others], f"other slots, {what}")


@checks(f"{MODULE}::{ROW}")
def check_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rows(gpu, rng, ROW)


@checks(f"{MODULE}::{ROW_FP8}")
def check_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_rows(gpu, rng, ROW_FP8)


def test_queries(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_queries(gpu, rng)


def test_bf16_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_bf16(gpu, rng)


def test_fp8_rows(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_fp8(gpu, rng)


def check_both(gpu: GpuBackend, rng: np.random.Generator, function: str, row_function: str) -> None:
    """Every case, and the bits of the two kernels that it stands for."""
    check_cases(gpu, rng, f"{MODULE}::{function}")
    narrow = row_function == ROW_FP8
    for rows, heads, size, rope_dim in SHAPES:
        q, kv, positions = draw_rows(rng, rows, heads, size), draw_rows(rng, rows, size), draw_positions(rng, rows)
        weight, slots, capacity = normal(rng, size), draw_slots(rng, rows, rows + 2), rows + 2
        before = rng.integers(0, 256, (capacity, size), np.uint8) if narrow else any_bits(rng, capacity, size)
        query, pool = Output(gpu, q.shape, content=q), Output(gpu, before.shape, before.dtype, before)
        ops.spark_v4_q_and_kv(
            gpu, gpu.kernel(MODULE, function), query.ptr, upload(gpu, kv), upload(gpu, weight), upload(gpu, positions),
            pool.ptr, upload(gpu, slots), rows, heads, size, rope_dim, EPS, 1e4, gpu.default_stream(),
        )  # fmt: skip
        assert_same_bits(query.read(), queries(gpu, q, positions, rope_dim), f"queries {q.shape}")
        expected = assemble(gpu, row_function, kv, weight, positions, before, slots, rope_dim)
        assert_same_bits(pool.read(), expected, f"pool {q.shape}")


@checks(f"{MODULE}::spark_v4_q_and_kv")
def check_both_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_both(gpu, rng, "spark_v4_q_and_kv", ROW)


@checks(f"{MODULE}::spark_v4_q_and_kv_fp8")
def check_both_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_both(gpu, rng, "spark_v4_q_and_kv_fp8", ROW_FP8)


def test_queries_and_a_row_in_one_launch(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_both_bf16(gpu, rng)
    check_both_fp8(gpu, rng)


def test_a_query_and_a_row_of_the_same_numbers_are_the_same(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, positions, pool = draw_rows(rng, 5, 512), draw_positions(rng, 5), normal(rng, 5, 512)
    rows = assemble(gpu, ROW, x, np.ones(512, BF16), positions, pool, np.arange(5), 64)
    assert_same_bits(rows, queries(gpu, x[:, None], positions, 64)[:, 0])


def test_a_head_does_not_depend_on_the_others(gpu: GpuBackend, rng: np.random.Generator) -> None:
    q, positions = draw_rows(rng, 4, 11, 96), draw_positions(rng, 4)
    together = queries(gpu, q, positions, 32)
    for row, first, last in ((0, 0, 1), (2, 3, 11), (3, 10, 11)):
        alone = queries(gpu, np.ascontiguousarray(q[row : row + 1, first:last]), positions[row : row + 1], 32)
        assert_same_bits(alone[0], together[row, first:last], f"row {row}, heads {first}..{last}")


def test_nan_fills_its_head_and_no_other(gpu: GpuBackend, rng: np.random.Generator) -> None:
    q = normal(rng, 2, 3, 64)
    q[1, 1, 63] = np.nan
    nan = np.isnan(f64(queries(gpu, q, draw_positions(rng, 2), 16)))
    assert nan[1, 1].all()
    assert nan.sum() == 64


def test_negative_slots_alone_write_nothing(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kv, weight, pool = normal(rng, 3, 64), normal(rng, 64), any_bits(rng, 4, 64)
    slots = np.array([-1, -2, -(2**62)], np.int64)
    assert_same_bits(assemble(gpu, ROW, kv, weight, draw_positions(rng, 3), pool, slots, 64), pool)


@pytest.mark.host_only("CUDA cannot see slots on the device before the kernel writes")
def test_a_slot_past_the_pool_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kv, pool = normal(rng, 1, 64), normal(rng, 4, 64)
    with pytest.raises(ArgumentPointerError) as error:
        assemble(gpu, ROW, kv, normal(rng, 64), draw_positions(rng, 1), pool, np.array([5], np.int64), 16)
    assert error.value.parameter == "pool"


@pytest.mark.parametrize("function", [QUERY, ROW, ROW_FP8])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rows": 0}, "rows"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 60}, "head_dim"),
        ({"head_dim": 520}, "head_dim"),
        ({"rope_dim": 0}, "rope_dim"),
        ({"rope_dim": 7}, "rope_dim"),
        ({"rope_dim": 66}, "rope_dim"),
        ({"eps": -1.0}, "eps"),
        ({"theta": 0.0}, "theta"),
        ({"theta": float("nan")}, "theta"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, function: str, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(MODULE, function)
    numbers: dict[str, Any] = {"rows": 1, "head_dim": 64, "rope_dim": 64, "eps": EPS, "theta": 1e4} | change
    pointers = [ptr, ptr] if function == QUERY else [ptr] * 5
    numbers |= {"heads": 1} if function == QUERY else {}
    with pytest.raises(InvalidArgumentError) as error:
        getattr(ops, function)(gpu, kernel, *pointers, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_rows_off_their_addresses_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    off = ptr.offset(8)
    with pytest.raises(InvalidArgumentError, match="16-byte"):
        ops.spark_v4_q_norm_rope(gpu, gpu.kernel(MODULE, QUERY), off, ptr, 1, 1, 32, 8, EPS, 1e4, stream)
    for pointers, name in (((off, ptr, ptr), "kv"), ((ptr, off, ptr), "norm_weight"), ((ptr, ptr, off), "pool")):
        kv, weight, pool = pointers
        with pytest.raises(InvalidArgumentError, match="16-byte") as error:
            ops.spark_v4_kv_assemble(
                gpu, gpu.kernel(MODULE, ROW), kv, weight, ptr, pool, ptr, 1, 32, 8, EPS, 1e4, stream
            )  # fmt: skip
        assert error.value.name == name


@pytest.mark.gpu_only("a pool of 4.3 GB: more than a CPU test should allocate")
@pytest.mark.no_sanitizer("4.3 GB of shadow memory")
def test_a_slot_past_2_to_the_32_elements(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_slots(gpu, rng)


@checks(f"{MODULE}::{ROW_FP8}@far")
def check_far_slots(gpu: GpuBackend, rng: np.random.Generator) -> None:
    size, far = 512, 1 << 23
    kv, weight, positions = normal(rng, 1, size), normal(rng, size), draw_positions(rng, 1)
    near = np.zeros((1, size), np.uint8)
    expected = assemble(gpu, ROW_FP8, kv, weight, positions, near, np.zeros(1, np.int64), 64)
    pool = alloc_or_skip(gpu, size * (far + 1))
    ops.spark_v4_kv_assemble_fp8(
        gpu, gpu.kernel(MODULE, ROW_FP8), upload(gpu, kv), upload(gpu, weight), upload(gpu, positions), pool,
        upload(gpu, np.array([far], np.int64)), 1, size, 64, EPS, 1e4, gpu.default_stream(),
    )  # fmt: skip
    got = download(gpu, pool.offset(size * far), (1, size), U8)
    gpu.free(pool)
    assert_same_bits(got, expected)
