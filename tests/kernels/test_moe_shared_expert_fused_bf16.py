# SPDX-License-Identifier: AGPL-3.0-only
"""Module moe_shared_expert_fused_bf16: each slot has the bits of the GEMV, wherever it stands and whatever top_k is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from spark_py.ops import gemv as gemv_ops
from spark_py.ops import moe_shared_expert_fused_bf16 as ops
from spark_py.ops import moe_silu_mul as silu_ops
from spark_py.runtime.errors import ArgumentPointerError, ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, Array, Output, Table, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.case import Argument
from spark_py.testing.cases.moe_shared_expert_fused_bf16 import CANCELLING, SHAPES, down, gate_up
from spark_py.testing.cases.moe_silu_mul import SILU_BOUND, SILU_FLOOR

from .experts import on_device, table, weights
from .support import checks

MODULE = "moe_shared_expert_fused_bf16"
Drawn = Mapping[str, Argument]


def run_gate_up(gpu: GpuBackend, drawn: Drawn) -> tuple[Array, ...]:
    """(gate_out, up_out, sh_gate_out, sh_up_out)."""
    d, n, k = on_device(gpu, drawn), int(drawn["N"]), int(drawn["top_k"])  # type: ignore[arg-type]
    outputs = [Output(gpu, shape) for shape in ((k, n), (k, n), (n,), (n,))]
    gate, up, sh_gate, sh_up = (output.ptr for output in outputs)
    ops.moe_expert_gate_up_shared_bf16(
        gpu,
        gpu.kernel(MODULE, "moe_expert_gate_up_shared_bf16"),
        d["A"],
        d["gate_weight_ptrs"],
        gate,
        d["up_weight_ptrs"],
        up,
        d["expert_indices"],
        d["sh_gate_weight"],
        sh_gate,
        d["sh_up_weight"],
        sh_up,
        n,
        d["K"],
        k,
        gpu.default_stream(),
    )
    return tuple(output.read() for output in outputs)


def run_down(gpu: GpuBackend, drawn: Drawn) -> tuple[Array, Array]:
    """(C, sh_down_out)."""
    d, n, k = on_device(gpu, drawn), int(drawn["N"]), int(drawn["top_k"])  # type: ignore[arg-type]
    routed, shared = Output(gpu, (k, n)), Output(gpu, (n,))
    ops.moe_expert_silu_down_shared_bf16(
        gpu,
        gpu.kernel(MODULE, "moe_expert_silu_down_shared_bf16"),
        d["gate_out"],
        d["up_out"],
        d["weight_ptrs"],
        routed.ptr,
        d["expert_indices"],
        d["sh_gate_in"],
        d["sh_up_in"],
        d["sh_down_weight"],
        shared.ptr,
        n,
        d["K"],
        k,
        gpu.default_stream(),
    )
    return routed.read(), shared.read()


def run_gemv(gpu: GpuBackend, x: Array, matrix: Array) -> Array:
    output, kernel = Output(gpu, (len(matrix),)), gpu.kernel("gemv", "dense_gemv_bf16")
    operands = upload(gpu, x), upload(gpu, matrix)
    gemv_ops.dense_gemv(gpu, kernel, *operands, output.ptr, len(matrix), x.size, gpu.default_stream())
    return output.read()


def run_silu(gpu: GpuBackend, gate: Array, up: Array) -> Array:
    output, kernel = Output(gpu, gate.shape), gpu.kernel("moe_silu_mul", "moe_silu_mul")
    silu_ops.silu_mul(gpu, kernel, upload(gpu, gate), upload(gpu, up), output.ptr, gate.size, gpu.default_stream())
    return output.read()


def step_by_step(x: Array, matrix: Array) -> Array:
    """FP32 [K] and BF16 [N, K]: 64 lanes, chunks of 8, ascending k, two roundings a step, two trees, one addition."""
    b = matrix.astype(np.float32)
    lanes = [np.zeros(len(b), np.float32) for _ in range(64)]
    for k in range(x.size):
        product = x[k] * b[:, k]
        lanes[(k // 8) % 64] = lanes[(k // 8) % 64] + product
    halves = []
    for start in (0, 32):
        values = lanes[start : start + 32]
        for step in (16, 8, 4, 2, 1):
            values = [values[i] + values[i + step] for i in range(step)]
        halves.append(values[0])
    return (halves[0] + halves[1]).astype(BF16)


def indices(drawn: Drawn) -> list[int]:
    chosen = drawn["expert_indices"]
    assert isinstance(chosen, np.ndarray)
    return [int(expert) for expert in chosen.reshape(-1)]


def array(drawn: Drawn, name: str) -> Array:
    value = drawn[name]
    assert isinstance(value, np.ndarray)
    return value


@checks("moe_shared_expert_fused_bf16::moe_expert_gate_up_shared_bf16")
def check_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for cancel, shapes in ((False, SHAPES), (True, CANCELLING)):
        for shape in shapes:
            drawn = gate_up(rng, (), *shape, cancel=cancel)
            got, x, what = run_gate_up(gpu, drawn), array(drawn, "A"), f"N, K, k, E = {shape}, cancel={cancel}"
            for out, shared, pointers, matrix in (
                (got[0], got[2], "gate_weight_ptrs", "sh_gate_weight"),
                (got[1], got[3], "up_weight_ptrs", "sh_up_weight"),
            ):
                each = weights(drawn, pointers)
                for slot, expert in enumerate(indices(drawn)):
                    assert_same_bits(out[slot], run_gemv(gpu, x, each[expert]), f"{what}, {pointers}, slot {slot}")
                assert_same_bits(shared, run_gemv(gpu, x, array(drawn, matrix)), f"{what}, {matrix}")
                assert_same_bits(out[-1], step_by_step(x.astype(np.float32), each[indices(drawn)[-1]]), what)
    check_absent(gpu, rng)


def check_absent(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """An expert without weights, routed or shared, gives zeros in its slot alone."""
    drawn, zeros = gate_up(rng, (), 13, 72, 3, 3), np.zeros(13, BF16)
    drawn["expert_indices"] = np.array([0, 2, 1], np.uint32)
    before = run_gate_up(gpu, drawn)
    drawn |= {"gate_weight_ptrs": Table([*weights(drawn, "gate_weight_ptrs")[:2], None]), "sh_gate_weight": None}
    got = run_gate_up(gpu, drawn)
    assert_same_bits(got[0], np.stack([before[0][0], zeros, before[0][2]]))
    assert_same_bits(got[1], before[1])
    assert_same_bits(got[2], zeros)
    assert_same_bits(got[3], before[3])


def gated64(gate: Array, up: Array) -> Array:
    result: Array = f64(gate) / (1.0 + np.exp(-f64(gate))) * f64(up)
    return result


def down_slots(drawn: Drawn, got: tuple[Array, Array]) -> list[tuple[Array, Array, Array, Array]]:
    """(output, gate, up, weights) of each slot, the shared one last."""
    each = weights(drawn, "weight_ptrs")
    gates, ups = array(drawn, "gate_out"), array(drawn, "up_out")
    slots = [(got[0][s], gates[s], ups[s], each[expert]) for s, expert in enumerate(indices(drawn))]
    shared = array(drawn, "sh_gate_in"), array(drawn, "sh_up_in"), array(drawn, "sh_down_weight")
    return [*slots, (got[1], *shared)]


@checks("moe_shared_expert_fused_bf16::moe_expert_silu_down_shared_bf16")
def check_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for shape in SHAPES:
        for scale in (1.5, 12.0):  # also far beyond 10, where other variants of this kernel clamp
            drawn = down(rng, (), *shape, scale=scale)
            got, what = run_down(gpu, drawn), f"N, K, k, E = {shape}, scale {scale}"
            for number, (out, gate, up, matrix) in enumerate(down_slots(drawn, got)):
                exact, terms = f64(matrix) @ gated64(gate, up), np.abs(f64(matrix)) @ np.abs(gated64(gate, up))
                slack = (SILU_BOUND + (gate.size / 16 + 17) * 2.0**-24) * terms
                slack = slack + SILU_FLOOR * (np.abs(f64(matrix)) @ np.abs(f64(up)))
                assert_rounds(out, exact, 0.0, slack, f"{what}, slot {number}")
    for shape in CANCELLING:
        drawn = down(rng, (), *shape, cancel=True)
        for number, (out, gate, up, matrix) in enumerate(down_slots(drawn, run_down(gpu, drawn))):
            activation = gate.astype(np.float32) * up.astype(np.float32)
            assert_same_bits(out, step_by_step(activation, matrix), f"sums that cancel, {shape}, slot {number}")


def test_gate_up(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_gate_up(gpu, rng)


def test_down(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_down(gpu, rng)


@pytest.mark.parametrize("top_k", [1, 2, 7])
def test_a_slot_has_the_same_bits_wherever_it_stands(gpu: GpuBackend, rng: np.random.Generator, top_k: int) -> None:
    n, k = 21, 1032
    drawn = gate_up(rng, (), n, k, top_k, 5)
    expert = weights(drawn, "gate_weight_ptrs")[3]
    drawn |= {"expert_indices": np.full(top_k, 3, np.uint32), "sh_gate_weight": expert}
    gate, _, sh_gate, _ = run_gate_up(gpu, drawn)
    alone = run_gemv(gpu, array(drawn, "A"), expert)
    assert_same_bits(gate, np.stack([alone] * top_k))
    assert_same_bits(sh_gate, alone)

    drawn = down(rng, (), n, k, top_k, 5, scale=4.0)
    g, u = array(drawn, "sh_gate_in"), array(drawn, "sh_up_in")
    drawn |= {"expert_indices": np.full(top_k, 3, np.uint32), "sh_down_weight": weights(drawn, "weight_ptrs")[3]}
    drawn |= {"gate_out": np.stack([g] * top_k), "up_out": np.stack([u] * top_k)}
    routed, shared = run_down(gpu, drawn)
    assert_same_bits(routed, np.stack([shared] * top_k))


def test_fused_against_unfused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The fused down projection keeps the activation in FP32; the unfused path rounds it to BF16, 2**-9 of each term,
    and each path rounds its result. Where that rounding changes nothing the bits are equal."""
    drawn = down(rng, (), 64, 1544, 3, 4)
    for out, gate, up, matrix in down_slots(drawn, run_down(gpu, drawn)):
        activation = run_silu(gpu, gate, up)
        unfused = f64(run_gemv(gpu, activation, matrix))
        terms = np.abs(f64(matrix)) @ np.abs(gated64(gate, up))
        most = (2.0**-9 + 2.0 * SILU_BOUND + (gate.size / 8 + 34) * 2.0**-24) * terms
        most = most + 2.0**-9 * (np.abs(f64(out)) + np.abs(unfused))
        assert (np.abs(f64(out) - unfused) <= most).all()
        assert (f64(out) != unfused).any(), "the activation was rounded to BF16"
    drawn = down(rng, (), 24, 520, 2, 3)
    for name in ("gate_out", "sh_gate_in"):
        drawn[name] = np.full(array(drawn, name).shape, 32.0).astype(BF16)  # silu(32) = 32: the activation is a BF16
    for out, gate, up, matrix in down_slots(drawn, run_down(gpu, drawn)):
        assert_same_bits(out, run_gemv(gpu, run_silu(gpu, gate, up), matrix))


def test_no_expert_here_gives_zeros(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_absent(gpu, rng)
    zeros = np.zeros(13, BF16)
    drawn = down(rng, (), 13, 72, 2, 2)
    drawn |= {"expert_indices": np.array([1, 0], np.uint32), "weight_ptrs": Table([None, None]), "sh_down_weight": None}
    drawn["gate_out"] = np.full((2, 72), np.nan).astype(BF16)
    routed, shared = run_down(gpu, drawn)
    assert_same_bits(routed, np.stack([zeros, zeros]))
    assert_same_bits(shared, zeros)


def test_nan_stays_in_its_slot(gpu: GpuBackend, rng: np.random.Generator) -> None:
    drawn = down(rng, (), 9, 2056, 3, 2)
    array(drawn, "up_out")[1, 2055] = np.nan
    routed, shared = run_down(gpu, drawn)
    assert np.isnan(f64(routed)).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(f64(routed)[[0, 2]]).all()
    assert np.isfinite(f64(shared)).all()


@pytest.mark.parametrize(
    ("n", "k", "top_k", "name"),
    [(0, 8, 1, "n"), (4, 12, 1, "k"), (4, 0, 1, "k"), (4, 8, 0, "top_k"), (4, 8, -1, "top_k")],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, n: int, k: int, top_k: int, name: str
) -> None:
    p, s = upload(gpu, normal(rng, 64)), gpu.default_stream()
    first, second = (gpu.kernel(MODULE, f"moe_expert_{form}_shared_bf16") for form in ("gate_up", "silu_down"))
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_expert_gate_up_shared_bf16(gpu, first, p, p, p, p, p, p, p, p, p, p, n, k, top_k, s)
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_expert_silu_down_shared_bf16(gpu, second, p, p, p, p, p, p, p, p, p, n, k, top_k, s)
    assert error.value.name == name


@pytest.mark.host_only("the CPU checks what tables point at before it runs; a GPU cannot")
def test_a_table_that_points_nowhere_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    n, k = 8, 16
    x, matrix, out = upload(gpu, normal(rng, k)), upload(gpu, normal(rng, n, k)), Output(gpu, (n,)).ptr
    freed = upload(gpu, normal(rng, n, k))
    gpu.free(freed)
    kernel, index = gpu.kernel(MODULE, "moe_expert_gate_up_shared_bf16"), upload(gpu, np.array([1], np.uint32))
    good = table(gpu, [None, matrix])
    for entries, match in (
        ([matrix], "past the end"),
        ([None, matrix.offset(16)], "past the end"),
        ([None, matrix.offset(8)], "a multiple of 16"),
        ([None, DevicePtr(64)], "entry 1"),
        ([None, freed], "entry 1"),
    ):
        bad = table(gpu, entries)  # type: ignore[arg-type]
        for pair in ((bad, good), (good, bad)):
            launch = KernelLaunch(gpu, kernel).grid((1, 2, 2)).block((128, 1, 1)).arg_ptr(x)
            launch.arg_ptr(pair[0]).arg_ptr(out).arg_ptr(pair[1]).arg_ptr(out).arg_ptr(index)
            launch.arg_ptr(matrix).arg_ptr(out).arg_ptr(matrix).arg_ptr(out).arg_u32(n).arg_u32(k).arg_u32(1)
            with pytest.raises(ArgumentPointerError, match=match):
                launch.launch(gpu.default_stream())


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
def test_rows_that_would_lie_off_16_bytes_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    p, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(MODULE, "moe_expert_silu_down_shared_bf16")
    launch = KernelLaunch(gpu, kernel).grid((1, 2, 1)).block((128, 1, 1))
    for _ in range(9):
        launch.arg_ptr(p)
    with pytest.raises(ArgumentRangeError, match="K is 12"):
        launch.arg_u32(4).arg_u32(12).arg_u32(1).launch(gpu.default_stream())
