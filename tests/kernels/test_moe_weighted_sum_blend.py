# SPDX-License-Identifier: AGPL-3.0-only
"""moe_expert_gemv::moe_weighted_sum_blend against FP64, and bit for bit where no exponential is in it."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import moe_weighted_sum_blend as ops
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import BF16, Array, Output, assert_rounds, assert_same_bits, assert_ulps, f64, normal, upload
from spark_py.testing.cases.moe_weighted_sum_blend import SHAPES, cancelling, exact, inputs

from .support import checks


def run(gpu: GpuBackend, drawn: dict[str, Array], gated: bool = True) -> Array:
    k, hidden = drawn["expert_out"].shape
    output, stream = Output(gpu, (hidden,)), gpu.default_stream()
    experts, weights, shared, x, gate = (upload(gpu, drawn[name]) for name in drawn)
    kernel, size = gpu.kernel("moe_expert_gemv", "moe_weighted_sum_blend"), drawn["input"].size
    ops.moe_weighted_sum_blend(
        gpu,
        kernel,
        output.ptr,
        experts,
        weights,
        shared,
        x,
        gate if gated else DevicePtr.NULL,
        hidden,
        k,
        size,
        stream,
    )
    return output.read()


def in_slot_order(drawn: dict[str, Array]) -> Array:
    """The sum without a gate, one FP32 operation at a time."""
    total = np.zeros(drawn["shared_out"].shape, np.float32)
    for weight, row in zip(drawn["expert_weights"], drawn["expert_out"], strict=True):
        product = np.float32(weight) * row.astype(np.float32)
        total = total + product
    return (total + drawn["shared_out"].astype(np.float32)).astype(BF16)


@checks("moe_expert_gemv::moe_weighted_sum_blend")
def check_blend(gpu: GpuBackend, rng: np.random.Generator) -> None:
    spec = catalog.CATALOG["moe_expert_gemv", "moe_weighted_sum_blend"]
    for hidden, k, size in SHAPES:
        drawn, what = inputs(rng, (), hidden, k, size), f"H={hidden} k={k} K={size}"
        got = run(gpu, drawn)
        values, slack = exact(*drawn.values())
        assert_rounds(got, values, 0.0, slack, what)
        assert_ulps(got, spec.reference(*drawn.values()), 1, 2.0**-9, what)
        assert_same_bits(run(gpu, drawn, gated=False), in_slot_order(drawn), f"{what}, no gate")
    for hidden, k in ((300, 8), (65, 32), (1, 2)):
        drawn = cancelling(rng, (), hidden, k)
        assert_same_bits(run(gpu, drawn, gated=False), in_slot_order(drawn), f"sums that cancel, H={hidden} k={k}")


def test_blend(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_blend(gpu, rng)


@pytest.mark.parametrize(("logit", "gate"), [(-300.0, 0.0), (300.0, 1.0), (0.0, 0.5)])
def test_gates_at_the_ends(gpu: GpuBackend, rng: np.random.Generator, logit: float, gate: float) -> None:
    drawn = inputs(rng, (), 300, 2, 64)
    drawn["expert_out"][...] = 0
    drawn["input"][...], drawn["gate_weight"][...] = 0, 1
    drawn["input"][37] = logit
    assert_same_bits(run(gpu, drawn), (gate * f64(drawn["shared_out"]) + 0.0).astype(BF16))


def test_a_nan_stays_with_its_element(gpu: GpuBackend, rng: np.random.Generator) -> None:
    drawn = inputs(rng, (), 300, 4, 64)
    drawn["expert_out"][2, 17], drawn["shared_out"][280] = np.nan, np.inf
    got = f64(run(gpu, drawn))
    assert np.flatnonzero(np.isnan(got)).tolist() == [17]
    assert np.flatnonzero(np.isinf(got)).tolist() == [280]
    drawn["input"][3] = np.nan
    assert np.isnan(f64(run(gpu, drawn))).all()


@pytest.mark.parametrize(
    ("hidden", "top_k", "k", "name"), [(0, 2, 8, "hidden"), (8, 0, 8, "top_k"), (8, 2, 12, "k"), (8, 2, 0, "k")]
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, hidden: int, top_k: int, k: int, name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("moe_expert_gemv", "moe_weighted_sum_blend")
    stream = gpu.default_stream()
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_weighted_sum_blend(gpu, kernel, ptr, ptr, ptr, ptr, ptr, ptr, hidden, top_k, k, stream)
    assert error.value.name == name


def test_a_gate_off_16_bytes_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel("moe_expert_gemv", "moe_weighted_sum_blend")
    stream = gpu.default_stream()
    for pair in ((ptr.offset(8), ptr), (ptr, ptr.offset(2))):
        with pytest.raises(ArgumentPointerError, match="16"):
            ops.moe_weighted_sum_blend(gpu, kernel, ptr, ptr, ptr, ptr, *pair, 8, 2, 8, stream)
