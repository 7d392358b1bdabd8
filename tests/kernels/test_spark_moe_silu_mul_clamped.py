# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_silu_mul_clamped: silu(min(gate, limit)) * clamp(up) against FP64 and the reference."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import spark_moe_silu_mul_clamped as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, assert_rounds, assert_same_bits, assert_ulps, f64, normal, upload
from spark_py.testing.cases.moe_silu_mul import SILU_BOUND, SILU_FLOOR
from spark_py.testing.cases.spark_moe_silu_mul_clamped import SIZES, exact

from .support import checks

NAME = ("spark_moe_silu_mul_clamped", "spark_moe_silu_mul_clamped")


def run(gpu: GpuBackend, gate: Array, up: Array, limit: float, in_place: bool = False, shift: int = 0) -> Array:
    output = Output(gpu, gate.shape, content=gate if in_place else None, shift=shift)
    source = output.ptr if in_place else upload(gpu, gate, shift)
    kernel, stream = gpu.kernel(*NAME), gpu.default_stream()
    ops.silu_mul_clamped(gpu, kernel, source, upload(gpu, up, shift), output.ptr, gate.size, limit, stream)
    return output.read()


@checks("spark_moe_silu_mul_clamped::spark_moe_silu_mul_clamped")
def check_silu_mul_clamped(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG[NAME]
    for n in SIZES:
        for limit in (10.0, 0.5):
            for in_place in (False, True):
                gate, up = normal(rng, n, scale=1.5 * limit), normal(rng, n, scale=1.5 * limit)
                gate[0], up[-1] = 3 * limit, -4 * limit
                got = run(gpu, gate, up, limit, in_place)
                what = f"n={n} limit={limit} in_place={in_place}"
                assert_rounds(got, exact(gate, up, limit), SILU_BOUND, SILU_FLOOR * limit, what)
                assert_ulps(got, spec.reference(gate, up, limit), 1, 2.0**-10, what)
                assert_same_bits(run(gpu, gate, up, limit, shift=2), got, f"{what}, 2 bytes off")


def test_silu_mul_clamped(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_silu_mul_clamped(gpu, rng)


def test_the_gate_is_bounded_from_above_alone(gpu: GpuBackend) -> None:
    gate = np.array([-50, -12, 50, 50, 1, 1, np.nan, 1, -np.inf, np.inf]).astype(BF16)
    up = np.array([2, 1, 50, -50, 50, -50, 1, np.nan, 2, 2]).astype(BF16)
    got = run(gpu, gate, up, 10.0)
    with np.errstate(all="ignore"):
        silu = f64(gate) / (1 + np.exp(-f64(gate)))
    silu10, one = 10 / (1 + np.exp(-10.0)), float(silu[4])
    expected = [
        2 * silu[0],
        silu[1],
        10 * silu10,
        -10 * silu10,
        10 * one,
        -10 * one,
        np.nan,
        np.nan,
        np.nan,
        2 * silu10,
    ]
    assert_rounds(got, np.array(expected), SILU_BOUND)


def test_below_the_limit_it_is_the_plain_kernel(gpu: GpuBackend, rng: np.random.Generator) -> None:
    gate, up = normal(rng, 3001), normal(rng, 3001)
    plain = Output(gpu, gate.shape)
    from spark_py.ops.moe_silu_mul import silu_mul

    kernel = gpu.kernel("moe_silu_mul", "moe_silu_mul")
    silu_mul(gpu, kernel, upload(gpu, gate), upload(gpu, up), plain.ptr, gate.size, gpu.default_stream())
    assert_same_bits(run(gpu, gate, up, 10.0), plain.read())


@pytest.mark.parametrize(
    ("n", "limit", "name"),
    [(0, 10.0, "n"), (8, 0.0, "limit"), (8, -1.0, "limit"), (8, float("nan"), "limit"), (8, float("inf"), "limit")],
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, n: int, limit: float, name: str) -> None:
    ptr = gpu.alloc(64)
    with pytest.raises(InvalidArgumentError) as error:
        ops.silu_mul_clamped(gpu, gpu.kernel(*NAME), ptr, ptr, ptr, n, limit, gpu.default_stream())
    assert error.value.name == name
