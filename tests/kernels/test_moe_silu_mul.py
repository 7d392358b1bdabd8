# SPDX-License-Identifier: AGPL-3.0-only
"""Module moe_silu_mul: silu(gate) * up against FP64 and the reference, without a clamp."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import moe_silu_mul as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, assert_rounds, assert_ulps, f64, normal, upload

from .support import checks

SIZES = [1, 2, 31, 33, 255, 256, 257, 5120, 70001]

# __expf is off by 2 + 1.173 |g| ulp; |g| is below 89 where it does not overflow. Three more roundings.
SILU_BOUND = 2.0**-17 + 2.0**-21
# Where expf(-g) overflows, |g| sigmoid(g) is below 89 exp(-88.7).
SILU_FLOOR = 3e-37


def run(gpu: GpuBackend, gate: Array, up: Array, in_place: bool = False) -> Array:
    output = Output(gpu, gate.shape, content=gate if in_place else None)
    source = output.ptr if in_place else upload(gpu, gate)
    kernel = gpu.kernel("moe_silu_mul", "moe_silu_mul")
    ops.silu_mul(gpu, kernel, source, upload(gpu, up), output.ptr, gate.size, gpu.default_stream())
    return output.read()


@checks("moe_silu_mul::moe_silu_mul")
def check_moe_silu_mul(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.find("moe_silu_mul", "moe_silu_mul")
    assert spec is not None
    for n in SIZES:
        for in_place in (False, True):
            # Both operands go far beyond 10, where other variants of this kernel clamp.
            gate, up = normal(rng, n, scale=12.0), normal(rng, n, scale=12.0)
            gate[0], up[-1] = 30.0, -40.0
            got = run(gpu, gate, up, in_place)
            exact = f64(gate) / (1.0 + np.exp(-f64(gate))) * f64(up)
            what = f"n={n} in_place={in_place}"
            assert_rounds(got, exact, SILU_BOUND, SILU_FLOOR * np.abs(f64(up)), what)
            assert_ulps(got, spec.reference(gate, up), 1, 2.0**-10, what)


def test_moe_silu_mul(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_silu_mul(gpu, rng)


def test_extreme_gates(gpu: GpuBackend) -> None:
    gate = np.array([-np.inf, np.inf, np.nan, -300.0, 300.0, 0.0]).astype(BF16)
    got = f64(run(gpu, gate, np.full(6, 2.0).astype(BF16)))
    assert np.isnan(got[0])
    assert got[1] == np.inf
    assert np.isnan(got[2])
    assert got[3] == 0.0
    assert got[4] == 600.0
    assert got[5] == 0.0


def test_no_elements_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 8)), gpu.kernel("moe_silu_mul", "moe_silu_mul")
    with pytest.raises(InvalidArgumentError, match="n is 0"):
        ops.silu_mul(gpu, kernel, ptr, ptr, ptr, 0, gpu.default_stream())
