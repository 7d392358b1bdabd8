# SPDX-License-Identifier: AGPL-3.0-only
"""Module w4a16_gemv, joint projections of two and three rows: each row bit for bit in the order of w4a16_gemv_qg."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import w4a16_gemv_joint_batch as ops
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases.w4a16_gemv import SCALE2, cancelling, nvfp4

from .nvfp4 import Weight, by_weight, on_device
from .support import checks
from .test_w4a16_gemv import run_qg

# Rows and chunks at the edges of blocks, and of turns of 64 half chunks.
HEADS = [(1, 1, 32), (3, 5, 96), (2, 16, 1056), (7, 3, 2080)]
OUTPUTS = [(1, 32), (5, 64), (127, 32), (9, 1056), (6, 2080)]


def qg(gpu: GpuBackend, x: Array, packed: Array, scales: Array, heads: int) -> Array:
    (rows, k), n = x.shape, len(packed)
    output, kernel = Output(gpu, (rows, n)), gpu.kernel("w4a16_gemv", f"w4a16_gemv_qg_batch{rows}")
    weight, stream = on_device(gpu, packed, scales, SCALE2), gpu.default_stream()
    ops.w4a16_gemv_qg_batch(gpu, kernel, upload(gpu, x), weight, output.ptr, n, k, heads, n // 2 // heads, stream)
    return output.read()


def dual(gpu: GpuBackend, x: Array, weights: list[tuple[Array, Array, float]]) -> list[Array]:
    (rows, k), n = x.shape, len(weights[0][0])
    kernel = gpu.kernel("w4a16_gemv", f"w4a16_gemv_dual_batch{rows}")
    outputs = [Output(gpu, (rows, n)) for _ in weights]
    first, second = (on_device(gpu, *weight) for weight in weights)
    ops.w4a16_gemv_dual_batch(
        gpu, kernel, upload(gpu, x), first, outputs[0].ptr, second, outputs[1].ptr, n, k, gpu.default_stream()
    )
    return [output.read() for output in outputs]


def check_qg(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    spec = catalog.CATALOG["w4a16_gemv", f"w4a16_gemv_qg_batch{rows}"]
    for heads, size, k in HEADS:
        x, packed, scales = cancelling(rng, (rows,), 2 * heads * size, k)
        got, what = qg(gpu, x, packed, scales, heads), f"{rows} rows, {heads} heads of {size}, K={k}"
        assert_same_bits(got, np.stack([run_qg(gpu, row, packed, scales, heads) for row in x]), what)
        assert_same_bits(spec.reference(x, packed, scales, SCALE2, heads, size), got, f"reference {what}")
        places = np.arange(2 * heads * size).reshape(heads, 2, size).transpose(1, 0, 2).reshape(-1)
        for row, at in ((rows - 1, len(places) - 1), (0, int(rng.integers(len(places))))):
            alone = by_weight(x[row], packed[places[at]], scales[places[at]], SCALE2)
            assert_same_bits(got[row, at : at + 1], np.array([alone], np.float32).astype(BF16), f"{what}, output {at}")


def check_dual(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    spec = catalog.CATALOG["w4a16_gemv", f"w4a16_gemv_dual_batch{rows}"]
    for n, k in OUTPUTS:
        x, packed, scales = cancelling(rng, (rows,), 2 * n, k)
        weights = [(packed[:n], scales[:n], SCALE2), (packed[n:], scales[n:], 5 * SCALE2)]
        got, what = dual(gpu, x, weights), f"{rows} rows, N={n} K={k}"
        expected = spec.reference(x, *weights[0], *weights[1])
        for number, (codes, factors, scale2) in enumerate(weights):
            assert_same_bits(got[number], expected[number], f"{what}, weight {number}")
            for row, at in ((rows - 1, n - 1), (0, int(rng.integers(n)))):
                alone = by_weight(x[row], codes[at], factors[at], scale2)
                one = np.array([alone], np.float32).astype(BF16)
                assert_same_bits(got[number][row, at : at + 1], one, f"{what}, weight {number}, output {at}")


@checks("w4a16_gemv::w4a16_gemv_qg_batch2")
def check_qg_batch2(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_qg(gpu, rng, 2)


@checks("w4a16_gemv::w4a16_gemv_qg_batch3")
def check_qg_batch3(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_qg(gpu, rng, 3)


@checks("w4a16_gemv::w4a16_gemv_dual_batch2")
def check_dual_batch2(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dual(gpu, rng, 2)


@checks("w4a16_gemv::w4a16_gemv_dual_batch3")
def check_dual_batch3(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dual(gpu, rng, 3)


@pytest.mark.parametrize("rows", [2, 3])
def test_queries_and_gates(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    check_qg(gpu, rng, rows)


@pytest.mark.parametrize("rows", [2, 3])
def test_two_weights(gpu: GpuBackend, rng: np.random.Generator, rows: int) -> None:
    check_dual(gpu, rng, rows)


def test_nan_and_infinity_stay_in_their_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    x, (packed, scales) = normal(rng, 3, 64), nvfp4(rng, 10, 64)
    packed |= 0x11  # no zeros, which would make a NaN of infinity
    x[0, 17], x[2, 40] = np.inf, np.nan
    for got in dual(gpu, x, [(packed[:5], scales[:5], SCALE2), (packed[5:], scales[5:], SCALE2)]):
        values = got.astype(np.float64)
        assert np.isinf(values[0]).all()
        assert np.isfinite(values[1]).all()
        assert np.isnan(values[2]).all()


@pytest.mark.parametrize(
    ("change", "name"),
    [({"n": 0}, "n"), ({"n": 6}, "n"), ({"k": 0}, "k"), ({"k": 24}, "k"), ({"num_heads": 0}, "num_heads")],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, Any], name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("w4a16_gemv", "w4a16_gemv_qg_batch2")
    numbers: dict[str, Any] = {"n": 8, "k": 16, "num_heads": 2, "head_dim": 2} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.w4a16_gemv_qg_batch(gpu, kernel, ptr, Weight(ptr, ptr, 1.0), ptr, **numbers, stream=gpu.default_stream())
    assert error.value.name == name


def test_the_kernel_for_one_row_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, stream = upload(gpu, normal(rng, 64)), gpu.default_stream()
    weight = Weight(ptr, ptr, 1.0)
    kernel = gpu.kernel("w4a16_gemv", "w4a16_gemv_qg")
    with pytest.raises(InvalidArgumentError, match="w4a16_gemv_qg"):
        ops.w4a16_gemv_qg_batch(gpu, kernel, ptr, weight, ptr, 4, 16, 1, 2, stream)
    kernel = gpu.kernel("w4a16_gemv_fused", "w4a16_gemv_dual")
    with pytest.raises(InvalidArgumentError, match="w4a16_gemv_dual"):
        ops.w4a16_gemv_dual_batch(gpu, kernel, ptr, weight, ptr, weight, ptr, 4, 16, stream)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_a_bare_launch_that_would_lose_chunks_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 256)), gpu.kernel("w4a16_gemv", "w4a16_gemv_dual_batch2")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 2)).block((256, 1, 1)).arg_ptr(ptr)
    for _ in range(2):
        launch.arg_ptr(ptr).arg_ptr(ptr).arg_f32(1.0).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match="K_in is 24"):
        launch.arg_u32(2).arg_u32(24).launch(gpu.default_stream())
