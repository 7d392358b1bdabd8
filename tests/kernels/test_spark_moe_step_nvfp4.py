# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_step_nvfp4: right within a tensor core's sums, and a row's bits are its own in every launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.model.weight_map import QuantizedWeight
from spark_py.ops import spark_moe_step_nvfp4 as ops
from spark_py.ops.moe_shared_expert_fused import Nvfp4Tables
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import F32, U32, Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases import spark_moe_step_nvfp4 as cases

from .experts import on_device
from .support import check_cases, checks

MODULE = "spark_moe_step_nvfp4"
GATE_UP, DOWN = f"{MODULE}::spark_moe_route_gate_up_nvfp4", f"{MODULE}::spark_moe_down_blend_nvfp4"


def _tables(p: dict[str, Any], prefix: str) -> Nvfp4Tables:
    return Nvfp4Tables(*(p[f"{prefix}{each}"] for each in ("packed_ptrs", "scale_ptrs", "scale2_vals")))


def _shared(p: dict[str, Any], prefix: str) -> QuantizedWeight:
    return QuantizedWeight(*(p[f"{prefix}_{each}"] for each in ("packed", "scale", "s2")))


def run_gate_up(gpu: GpuBackend, d: dict[str, Any], rows: list[int]) -> tuple[Array, Array]:
    """Indices and activations of some rows."""
    d = d | {name: d[name][rows] for name in ("A", "gate_logits")}
    p, n, k, m = on_device(gpu, d), d["N"], d["top_k"], len(rows)
    out = Output(gpu, (m, k), U32), Output(gpu, (m, k + 1, n), F32)
    ops.spark_moe_route_gate_up_nvfp4(
        gpu, gpu.kernel(*GATE_UP.split("::")), p["A"], p["gate_logits"], _tables(p, "gate_"), _tables(p, "up_"),
        out[0].ptr, _shared(p, "sh_gate"), _shared(p, "sh_up"), out[1].ptr, m, n, d["K"], d["num_experts"],
        k, gpu.default_stream(),
    )  # fmt: skip
    return out[0].read(), out[1].read()


def run_down(gpu: GpuBackend, d: dict[str, Any], rows: list[int]) -> Array:
    """The output of some rows."""
    d = d | {name: d[name][rows] for name in ("activation", "gate_logits", "expert_indices", "input")}
    p, output = on_device(gpu, d), Output(gpu, (len(rows), d["N"]))
    ops.spark_moe_down_blend_nvfp4(
        gpu, gpu.kernel(*DOWN.split("::")), p["activation"], _tables(p, ""), p["gate_logits"], p["expert_indices"],
        _shared(p, "sh_down"), p["input"], p["gate_weight"], output.ptr, len(rows), d["N"], d["K"],
        d["num_experts"], d["top_k"], bool(d["normalize"]), gpu.default_stream(),
    )  # fmt: skip
    return output.read()


@checks(GATE_UP)
def check_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, GATE_UP)


@checks(DOWN)
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, DOWN)


def test_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gate_up(gpu, rng)


def test_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down(gpu, rng)


def test_rows_have_the_bits_that_they_have_alone(gpu: GpuBackend, rng: np.random.Generator) -> None:
    first, second = cases.gate_up(rng, 4, 40, 288, 3, 6), cases.down(rng, 4, 24, 288, 3, 6)
    together, output = run_gate_up(gpu, first, [0, 1, 2, 3]), run_down(gpu, second, [0, 1, 2, 3])
    for rows in ([2], [3, 0]):
        for part, whole in zip(run_gate_up(gpu, first, rows), together, strict=True):
            assert_same_bits(part, whole[rows], f"rows {rows}")
        assert_same_bits(run_down(gpu, second, rows), output[rows], f"rows {rows}")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rows": 0}, "rows"),
        ({"n": 0}, "n"),
        ({"k": 48}, "k"),
        ({"experts": 513}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 5}, "top_k"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, change: dict[str, int], name: str
) -> None:
    p, s = upload(gpu, normal(rng, 64)), gpu.default_stream()
    tables = Nvfp4Tables(p, p, p)
    rows, n, k, experts, top_k = ({"rows": 1, "n": 8, "k": 32, "experts": 4, "top_k": 2} | change).values()
    first, second = (gpu.kernel(*each.split("::")) for each in (GATE_UP, DOWN))
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_route_gate_up_nvfp4(
            gpu, first, p, p, tables, tables, p, None, None, p, rows, n, k, experts, top_k, s
        )
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.spark_moe_down_blend_nvfp4(
            gpu, second, p, tables, p, p, None, p, DevicePtr.NULL, p, rows, n, k, experts, top_k, True, s
        )
    assert error.value.name == name


def test_too_many_slices_and_odd_gates_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    p, s, kernel = upload(gpu, normal(rng, 64)), gpu.default_stream(), gpu.kernel(*DOWN.split("::"))
    tables = Nvfp4Tables(p, p, p)
    for n, k, name in ((8, 128 * 25, "k"), (12, 32, "n")):
        with pytest.raises(InvalidArgumentError) as error:
            ops.spark_moe_down_blend_nvfp4(gpu, kernel, p, tables, p, p, None, p, p, p, 1, n, k, 4, 2, True, s)
        assert error.value.name == name
    assert ops.fits(512, 2048, 10)
    assert ops.fits(1024, 32, 8)
    assert not ops.fits(1056, 32, 8)
    assert not ops.fits(48, 64, 1)
    assert not ops.fits(64, 12192, 1)
    assert not ops.fits(64, 48, 1)
