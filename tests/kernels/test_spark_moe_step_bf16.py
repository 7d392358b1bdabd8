# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_step_bf16: right against FP64, and with the bits of the engine's four kernels in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.ops import spark_moe_step_bf16 as ops
from spark_py.ops.moe_shared_expert_fused_bf16 import (
    moe_expert_gate_up_shared_bf16,
    moe_expert_silu_down_shared_bf16,
)
from spark_py.ops.moe_topk import moe_topk_softmax
from spark_py.ops.moe_weighted_sum_blend import moe_weighted_sum_blend
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import F32, U32, Array, Output, Table, assert_same_bits, normal, upload
from spark_py.testing.cases import spark_moe_step_bf16 as cases
from spark_py.testing.cases.gemv import cancelling

from .experts import on_device, row
from .support import check_cases, checks

MODULE = "spark_moe_step_bf16"
GATE_UP, DOWN = f"{MODULE}::spark_moe_route_gate_up_bf16", f"{MODULE}::spark_moe_down_blend_bf16"
# Rows, width of an expert and of the model, experts of a row and in all.
SHAPES = ((1, 24, 72, 2, 3), (3, 40, 2056, 3, 40), (2, 520, 16, 4, 4))


def drawn(rng: np.random.Generator, rows: int, n: int, size: int, k: int, experts: int) -> dict[str, Any]:
    """Arguments of both kernels; the sums of the gate and up projections cancel to roundings, one expert of each table
    is elsewhere."""
    whole = cases.gate_up(rng, rows, n, size, k, experts)
    whole["A"], weights = cancelling(rng, (rows,), (2 * experts + 2) * n, size)
    each = [*weights.reshape(2 * experts + 2, n, size)]
    down = [normal(rng, size, n) for _ in range(experts + 1)]
    tables = {"gate_weight_ptrs": each[:experts], "up_weight_ptrs": each[experts:-2], "weight_ptrs": down[:-1]}
    return whole | {
        **{name: Table([None, *entries[1:]]) for name, entries in tables.items()},
        "sh_gate_weight": each[-2],
        "sh_up_weight": each[-1],
        "sh_down_weight": down[-1],
        "gate_weight": normal(rng, size, scale=2.0 * size**-0.5),
    }


def run_gate_up(gpu: GpuBackend, d: dict[str, Any], p: dict[str, Any], rows: int) -> tuple[Output, Output]:
    """Indices and activation of arguments d, which are at p."""
    n, k = d["N"], d["top_k"]
    out = Output(gpu, (rows, k), U32), Output(gpu, (rows, k + 1, n), F32)
    ops.spark_moe_route_gate_up_bf16(
        gpu, gpu.kernel(*GATE_UP.split("::")), p["A"], p["gate_logits"], p["gate_weight_ptrs"], p["up_weight_ptrs"],
        out[0].ptr, p["sh_gate_weight"], p["sh_up_weight"], out[1].ptr, rows, n, d["K"], d["num_experts"],
        k, gpu.default_stream(),
    )  # fmt: skip
    return out


def run_both(gpu: GpuBackend, d: dict[str, Any], rows: int) -> tuple[Array, Array]:
    """Indices and output of the two launches."""
    p = on_device(gpu, d)
    ids, activation = run_gate_up(gpu, d, p, rows)
    output = Output(gpu, (rows, d["K"]))
    ops.spark_moe_down_blend_bf16(
        gpu, gpu.kernel(*DOWN.split("::")), activation.ptr, p["weight_ptrs"], p["gate_logits"], ids.ptr,
        p["sh_down_weight"], p["A"], p["gate_weight"], output.ptr, rows, d["K"], d["N"], d["num_experts"], d["top_k"],
        bool(d["normalize"]), gpu.default_stream(),
    )  # fmt: skip
    return ids.read(), output.read()


def run_four(gpu: GpuBackend, d: dict[str, Any]) -> tuple[Array, Array]:
    """The same of one row by the engine's kernels."""
    p, s, n, size, k = on_device(gpu, d), gpu.default_stream(), d["N"], d["K"], d["top_k"]
    ids, shares = Output(gpu, (k,), U32), Output(gpu, (k,), F32)
    gate, up, sh_gate, sh_up = (Output(gpu, shape) for shape in ((k, n), (k, n), (n,), (n,)))
    routed, shared, output = Output(gpu, (k, size)), Output(gpu, (size,)), Output(gpu, (size,))
    fused = "moe_shared_expert_fused_bf16"
    moe_topk_softmax(
        gpu, gpu.kernel("moe_topk", "moe_topk_softmax"), p["gate_logits"], ids.ptr, shares.ptr, d["num_experts"], k,
        bool(d["normalize"]), s,
    )  # fmt: skip
    moe_expert_gate_up_shared_bf16(
        gpu, gpu.kernel(fused, "moe_expert_gate_up_shared_bf16"), p["A"], p["gate_weight_ptrs"], gate.ptr,
        p["up_weight_ptrs"], up.ptr, ids.ptr, p["sh_gate_weight"], sh_gate.ptr, p["sh_up_weight"], sh_up.ptr, n, size,
        k, s,
    )  # fmt: skip
    moe_expert_silu_down_shared_bf16(
        gpu, gpu.kernel(fused, "moe_expert_silu_down_shared_bf16"), gate.ptr, up.ptr, p["weight_ptrs"], routed.ptr,
        ids.ptr, sh_gate.ptr, sh_up.ptr, p["sh_down_weight"], shared.ptr, size, n, k, s,
    )  # fmt: skip
    moe_weighted_sum_blend(
        gpu, gpu.kernel("moe_expert_gemv", "moe_weighted_sum_blend"), output.ptr, routed.ptr, shares.ptr, shared.ptr,
        p["A"], p["gate_weight"], size, k, size, s,
    )  # fmt: skip
    return ids.read(), output.read()


def _check_bits(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for rows, *shape in SHAPES:
        d = drawn(rng, rows, *shape) | {"normalize": rows % 2}
        got = run_both(gpu, d, rows)
        for t in range(rows):
            alone = run_four(gpu, row(d, t, "A", "gate_logits"))
            for what, part, whole in zip(("indices", "output"), alone, got, strict=True):
                assert_same_bits(whole[t], part, f"{rows} rows, N, K, k, E = {shape}, row {t}, {what}")


@checks(GATE_UP)
def check_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, GATE_UP)
    _check_bits(gpu, rng)


@checks(DOWN)
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, DOWN)


def test_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, GATE_UP)


def test_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, DOWN)


def test_bits_of_the_engine_s_kernels(gpu: GpuBackend, rng: np.random.Generator) -> None:
    _check_bits(gpu, rng)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rows": 0}, "rows"),
        ({"n": 0}, "n"),
        ({"k": 12}, "k"),
        ({"k": 24576}, "k"),
        ({"experts": 513}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 5}, "top_k"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, int], name: str
) -> None:
    p, s = upload(gpu, normal(rng, 64)), gpu.default_stream()
    sizes = {"rows": 1, "n": 8, "k": 8, "experts": 4, "top_k": 2} | change
    rows, n, k, experts, top_k = sizes.values()
    first, second = (gpu.kernel(*each.split("::")) for each in (GATE_UP, DOWN))
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_route_gate_up_bf16(gpu, first, p, p, p, p, p, p, p, p, rows, n, k, experts, top_k, s)
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_down_blend_bf16(
            gpu, second, p, p, p, p, p, p, DevicePtr.NULL, p, rows, n, k, experts, top_k, True, s
        )
    assert error.value.name == name


def test_a_gate_of_odd_width_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    p, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(*DOWN.split("::"))
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_down_blend_bf16(gpu, kernel, p, p, p, p, p, p, p, p, 1, 12, 8, 4, 2, True, gpu.default_stream())
    assert error.value.name == "n"


@pytest.mark.host_only("about shapes, not about kernels")
def test_what_fits_into_shared_memory() -> None:
    assert ops.fits(512, 2048, 10)
    assert ops.fits(736, 13312, 9)
    assert not ops.fits(744, 2048, 9)
    assert not ops.fits(8, 13320, 1)
