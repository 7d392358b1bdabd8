# SPDX-License-Identifier: AGPL-3.0-only
"""Module residual_add: addition, sigmoid gate and concatenation, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import residual_add as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Output, any_bits, assert_rounds, assert_same_bits, assert_ulps, f64, normal, upload

from .support import checks

SIZES = [1, 2, 31, 33, 255, 256, 257, 5120, 70001]

# expf within 2 ulp, an addition, a division and a product in FP32.
SIGMOID_BOUND = 2.0**-20
# expf(-g) overflows above 88.72: a sigmoid below 2**-127 is 0.
SIGMOID_FLOOR = 3e-39


def reference(name: str) -> Any:
    spec = catalog.find("residual_add", name)
    assert spec is not None
    return spec.reference


@checks("residual_add::bf16_residual_add")
def check_residual_add(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("residual_add", "bf16_residual_add")
    for n in SIZES:
        a, b = normal(rng, n), (rng.standard_normal(n) * 2.0 ** rng.integers(-12, 3, n)).astype(BF16)
        # 1 + 2**-8 is half way to the next BF16: to even, down at 1, up at 1 + 2**-7.
        a[0], b[0] = (1.0, 2.0**-8) if n % 2 else (1.0 + 2.0**-7, 2.0**-8)
        total = Output(gpu, (n,), content=a)
        # Ones behind the operand, so that an element too many changes the guard behind the sum.
        more = upload(gpu, np.concatenate([b, np.ones(8, BF16)]))
        ops.residual_add(gpu, kernel, total.ptr, more, n, gpu.default_stream())
        # BF16 sums with exponents this close are exact in FP32, so the one rounding is that of the exact sum.
        assert_same_bits(total.read(), (f64(a) + f64(b)).astype(np.float32).astype(BF16), f"n={n}")
        assert_same_bits(total.read(), reference("bf16_residual_add")(a, b), f"n={n}")


@checks("residual_add::sigmoid_gate_mul")
def check_sigmoid_gate_mul(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("residual_add", "sigmoid_gate_mul")
    for n in SIZES:
        for in_place in (False, True):
            x, gate = normal(rng, n), normal(rng, n, scale=6.0)
            output = Output(gpu, (n,), content=x if in_place else None)
            source = output.ptr if in_place else upload(gpu, x)
            ops.sigmoid_gate_mul(gpu, kernel, source, upload(gpu, gate), output.ptr, n, gpu.default_stream())
            exact = f64(x) / (1.0 + np.exp(-f64(gate)))
            what = f"n={n} in_place={in_place}"
            assert_rounds(output.read(), exact, SIGMOID_BOUND, SIGMOID_FLOOR * np.abs(f64(x)), what)
            assert_ulps(output.read(), reference("sigmoid_gate_mul")(x, gate), 1, 2.0**-10, what)


@checks("residual_add::bf16_concat")
def check_bf16_concat(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("residual_add", "bf16_concat")
    for n in SIZES:
        a, b = any_bits(rng, n), any_bits(rng, n)
        out = Output(gpu, (2 * n,))
        ops.bf16_concat(gpu, kernel, upload(gpu, a), upload(gpu, b), out.ptr, n, gpu.default_stream())
        assert_same_bits(out.read()[:n], a, f"first half, N={n}")
        assert_same_bits(out.read()[n:], b, f"second half, N={n}")


def test_residual_add(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_residual_add(gpu, rng)


def test_sigmoid_gate_mul(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_sigmoid_gate_mul(gpu, rng)


def test_bf16_concat(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_bf16_concat(gpu, rng)


def test_sum_with_infinity_nan_and_overflow(gpu: GpuBackend) -> None:
    top = 3.38953139e38
    a = np.array([np.inf, np.inf, np.nan, top, -0.0, 1.0]).astype(BF16)
    b = np.array([1.0, -np.inf, 1.0, top, -0.0, -1.0]).astype(BF16)
    total = Output(gpu, (6,), content=a)
    kernel = gpu.kernel("residual_add", "bf16_residual_add")
    ops.residual_add(gpu, kernel, total.ptr, upload(gpu, b), 6, gpu.default_stream())
    got = f64(total.read())
    assert got[0] == np.inf
    assert np.isnan(got[1:3]).all()
    assert got[3] == np.inf
    assert np.signbit(got[4])
    assert got[5] == 0.0
    assert not np.signbit(got[5])


def test_extreme_gates(gpu: GpuBackend) -> None:
    gate = np.array([-np.inf, np.inf, np.nan, -100.0, 100.0, 0.0, -0.0]).astype(BF16)
    x = np.full(7, -3.0).astype(BF16)
    output = Output(gpu, (7,))
    kernel = gpu.kernel("residual_add", "sigmoid_gate_mul")
    ops.sigmoid_gate_mul(gpu, kernel, upload(gpu, x), upload(gpu, gate), output.ptr, 7, gpu.default_stream())
    got = f64(output.read())
    assert got[0] == 0.0
    assert got[1] == -3.0
    assert np.isnan(got[2])
    assert got[3] == 0.0
    assert got[4] == -3.0
    assert (got[5:] == -1.5).all()


@pytest.mark.parametrize("function", ["residual_add", "sigmoid_gate_mul", "bf16_concat"])
def test_no_elements_are_refused(gpu: GpuBackend, rng: np.random.Generator, function: str) -> None:
    name = "bf16_residual_add" if function == "residual_add" else function
    pointers = [upload(gpu, normal(rng, 8)) for _ in range(2 if function == "residual_add" else 3)]
    launch: Callable[..., None] = getattr(ops, function)
    with pytest.raises(InvalidArgumentError, match="n is 0"):
        launch(gpu, gpu.kernel("residual_add", name), *pointers, 0, gpu.default_stream())
