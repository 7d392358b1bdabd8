# SPDX-License-Identifier: AGPL-3.0-only
"""Module w4a16_gemv_fused: both projections have the bits of the GEMV alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from spark_py.ops import w4a16_gemv as single_ops
from spark_py.ops import w4a16_gemv_fused as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases.w4a16_gemv import SCALE2, cancelling

from .nvfp4 import Weight, by_chunk, on_device
from .support import checks


def check_dual(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    launch: Callable[..., None] = getattr(ops, function)
    kernel, single = gpu.kernel("w4a16_gemv_fused", function), gpu.kernel("w4a16_gemv", "w4a16_gemv")
    stream = gpu.default_stream()
    for count, size in ((1, 32), (5, 96), (9, 1056), (18, 2080), (127, 64)):
        x, packed, scales = cancelling(rng, (), 2 * count, size)
        # The last row of each does not cancel.
        packed[[count - 1, -1]] = rng.integers(0, 256, (2, size // 2))
        scales[[count - 1, -1]] = rng.integers(0, 0x7F, (2, size // 16))
        parts = [(packed[:count], scales[:count], SCALE2), (packed[count:], scales[count:], 3 * SCALE2)]
        first, second = (on_device(gpu, *part) for part in parts)
        activations, outputs = upload(gpu, x), [Output(gpu, (count,)), Output(gpu, (count,))]
        launch(gpu, kernel, activations, first, outputs[0].ptr, second, outputs[1].ptr, count, size, stream)
        for number, (weight, part, output) in enumerate(zip((first, second), parts, outputs, strict=True)):
            got, what = output.read(), f"projection {number}, N={count} K={size}"
            alone = Output(gpu, (count,))
            single_ops.w4a16_gemv(gpu, single, activations, weight, alone.ptr, count, size, stream)
            assert_same_bits(got, alone.read(), what)
            exact: Array = np.array([by_chunk(x, part[0][n], part[1][n], part[2]) for n in (0, count - 1)])
            assert_same_bits(got[[0, -1]], exact.astype(BF16), what)


@checks("w4a16_gemv_fused::w4a16_gemv_dual")
def check_w4a16_gemv_dual(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dual(gpu, rng, "w4a16_gemv_dual")


@checks("w4a16_gemv_fused::w4a16_gemv_dual_sw")
def check_w4a16_gemv_dual_sw(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_dual(gpu, rng, "w4a16_gemv_dual_sw")


def test_w4a16_gemv_dual(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_dual(gpu, rng)


def test_w4a16_gemv_dual_sw(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_w4a16_gemv_dual_sw(gpu, rng)


@pytest.mark.parametrize(("n", "k", "name"), [(0, 16, "n"), (4, 0, "k"), (4, 24, "k")])
def test_impossible_numbers_are_refused(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int, name: str) -> None:
    ptr = upload(gpu, normal(rng, 64))
    weight = Weight(ptr, ptr, 1.0)
    for function in ("w4a16_gemv_dual", "w4a16_gemv_dual_sw"):
        launch: Callable[..., None] = getattr(ops, function)
        kernel = gpu.kernel("w4a16_gemv_fused", function)
        with pytest.raises(InvalidArgumentError) as error:
            launch(gpu, kernel, ptr, weight, ptr, weight, ptr, n, k, gpu.default_stream())
        assert error.value.name == name


def test_the_kernel_of_another_grid_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr = upload(gpu, normal(rng, 64))
    weight, kernel = Weight(ptr, ptr, 1.0), gpu.kernel("w4a16_gemv_fused", "w4a16_gemv_dual")
    with pytest.raises(InvalidArgumentError, match="w4a16_gemv_dual'"):
        ops.w4a16_gemv_dual_sw(gpu, kernel, ptr, weight, ptr, weight, ptr, 1, 16, gpu.default_stream())
