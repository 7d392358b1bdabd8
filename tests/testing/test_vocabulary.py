# SPDX-License-Identifier: AGPL-3.0-only
"""The vocabulary itself: what distributions draw, what bounds let pass, and what a failing comparison says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import (
    BF16,
    F32,
    POISON,
    U32,
    Alias,
    AnyBits,
    Array,
    Distribution,
    Integers,
    KernelCase,
    Large,
    Normal,
    Output,
    Subnormal,
    Table,
    Ties,
    WithNan,
    assert_rounds,
    assert_same_bits,
    assert_ulps,
    bits,
    f64,
    normal,
    relative_l2,
    rounds,
    ulps,
    within,
)
from spark_py.testing.plugin import drop_replaced_methods
from spark_py.testing.writer import writing_block

from ..emulator.support import emulate


@pytest.mark.parametrize("draw", [Normal(3.0, 5), Large(), Ties(), WithNan(), Subnormal(), AnyBits()], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_distribution_has_shape_type_and_seed(draw: Distribution, dtype: np.dtype[Any]) -> None:
    made = [draw(np.random.default_rng(seed), (40, 50), dtype) for seed in (1, 1, 2)]
    assert made[0].shape == (40, 50)
    assert made[0].dtype == dtype
    assert made[0].tobytes() == made[1].tobytes()
    assert made[0].tobytes() != made[2].tobytes()


def test_what_distributions_are_for(rng: np.random.Generator) -> None:
    large = f64(Large()(rng, (1000,), BF16))
    assert (np.abs(large) > 1e18).all()
    assert (large < 0).any()
    assert len(set(Ties(3)(rng, (100,), F32).tolist())) == 3
    assert np.isnan(WithNan(share=0.0)(rng, (100,), F32)).sum() == 1
    small = Subnormal()(rng, (1000,), F32)
    assert (np.abs(small) < np.finfo(np.float32).tiny).all()
    assert (small != 0).any()
    drawn = Integers(3, 9)(rng, (1000,), U32)
    assert set(drawn.tolist()) == set(range(3, 9))


def test_ulps_count_steps_across_zero() -> None:
    values = np.array([1.0, 1.0, 0.0, np.nan, np.nan, 2.0**-133]).astype(BF16)
    others = np.array([1.0 + 2.0**-7, -1.0, -0.0, np.nan, 1.0, -(2.0**-133)]).astype(BF16)
    assert ulps(values, others).tolist() == [1, 2 * 0x3F80, 0, 0, 1 << 16, 2]
    assert ulps(np.float32([1.0]), np.nextafter(np.float32([1.0]), np.float32(2.0))).tolist() == [1]


def test_a_nan_alone_is_no_small_distance() -> None:
    one, nan = np.ones(3), np.array([1.0, np.nan, 1.0])
    assert relative_l2(nan, one) == relative_l2(one, nan) == relative_l2(np.full(3, np.nan), one) == np.inf
    assert relative_l2(nan, nan) == 0
    assert relative_l2(np.array([1.0, np.inf]), np.array([2.0, np.inf])) == 0.5


def test_a_failure_shows_the_worst_element() -> None:
    expected = np.zeros((3, 4)).astype(BF16)
    expected[...] = 1.0
    got = expected.copy()
    got[1, 2], got[2, 3] = 1.0078125, 1.5
    with pytest.raises(AssertionError, match=r"worst at \[2, 3\]: got 1.5 \(0x3fc0\), expected 1.0 \(0x3f80\), 64 ulp"):
        assert_ulps(got, expected, 0, 1.0)
    assert_ulps(got, expected, 64, 1.0)
    with pytest.raises(AssertionError, match="relative L2"):
        assert_ulps(got, expected, 64, 1e-3)
    with pytest.raises(AssertionError, match="2 of 12 differ"):
        assert_same_bits(got, expected)
    with pytest.raises(AssertionError, match="expected"):
        assert_same_bits(np.array([0.0]).astype(BF16), np.array([-0.0]).astype(BF16))


def test_rounds_is_sharper_than_a_step() -> None:
    exact = np.array([1.0 + 2.0**-9])  # a quarter of a step above 1
    right, wrong = np.array([1.0]).astype(BF16), np.array([1.0 + 2.0**-7]).astype(BF16)
    assert_rounds(right, exact, 2.0**-20)
    with pytest.raises(AssertionError, match="no rounding"):
        assert_rounds(wrong, exact, 2.0**-20)
    assert_rounds(wrong, exact, 2.0**-8)
    nan = np.array([np.nan])
    assert_rounds(nan.astype(BF16), nan, 0.0)
    with pytest.raises(AssertionError):
        assert_rounds(right, nan, 0.0)
    with pytest.raises(AssertionError):
        assert_rounds(nan.astype(BF16), exact, 0.0)


def test_an_output_notices_writes_beside_it(gpu: GpuBackend) -> None:
    output = Output(gpu, (5,), F32, shift=8)
    assert (output.read().view(np.uint8) == POISON).all()
    gpu.memset(output.ptr.offset(20), 0, 1)
    with pytest.raises(AssertionError, match="byte 0 past the output"):
        output.read()
    other = Output(gpu, (5,), F32, shift=8)
    gpu.memset(other.ptr.offset(0), 0, 20)
    gpu.memset(other.base, 0, 8)
    with pytest.raises(AssertionError, match="before the output"):
        other.read()


def test_a_catalogued_kernel_in_one_call(kernel_case: KernelCase) -> None:
    args = {"input": Normal(), "weight": Normal(), "hidden_size": 100, "eps": 1e-6}
    made = kernel_case("norm", "rms_norm", grid=3, args=args, bounds={"output": within(1)})
    assert made["output"].shape == (3, 100)
    in_place = kernel_case(
        "norm", "rms_norm", grid=3, args=args | {"output": Alias("input")}, bounds={"output": within(1)}
    )
    assert set(in_place) == {"input", "weight"}


def test_a_wrong_reference_is_an_assertion(kernel_case: KernelCase, rng: np.random.Generator) -> None:
    def plus_two(residual: Any, src: Any, n: int) -> Any:
        return f64(residual) + f64(src) + 2.0

    args = {"residual": Normal(), "src": Normal(), "n": 65}
    with pytest.raises(InvalidArgumentError, match="shape"):
        kernel_case("residual_add", "bf16_residual_add", args=args, reference=plus_two, bounds={"residual": within(1)})
    args |= {"residual": np.zeros(65, BF16), "src": np.ones(65, BF16)}
    with pytest.raises(AssertionError, match=r"residual: 65 of 65 differ .* got 1.0 .* expected 3.0 "):
        kernel_case(
            "residual_add",
            "bf16_residual_add",
            args=args,
            reference=plus_two,
            block=256,
            bounds={"residual": within(1)},
        )
    kernel_case(
        "residual_add",
        "bf16_residual_add",
        args=args,
        reference=lambda residual, src, n: {"residual": f64(residual) + f64(src)},
        block=256,
        bounds={"residual": rounds(lambda c: f64(c.residual) + f64(c.src))},
    )


def test_a_table_of_addresses(kernel_case: KernelCase, rng: np.random.Generator) -> None:
    gate, up = (Table([None, normal(rng, 3, 16), normal(rng, 3, 16)]) for _ in range(2))
    args = {
        "A": Normal(),
        "gate_weight_ptrs": gate,
        "up_weight_ptrs": up,
        "expert_indices": np.array([2, 0], np.uint32),
        "sh_gate_weight": None,
        "sh_up_weight": Normal(),
        "N": 3,
        "K": 16,
        "top_k": 2,
    }
    name = "moe_shared_expert_fused_bf16", "moe_expert_gate_up_shared_bf16"
    made = kernel_case(*name, args=args, bounds={})
    assert f64(made["up_out"])[0].all()
    assert not f64(made["up_out"])[1].any()
    assert not f64(made["sh_gate_out"]).any()
    with pytest.raises(InvalidArgumentError, match="a Table") as error:
        kernel_case(*name, args=args | {"up_weight_ptrs": np.zeros(3, np.uint64)}, bounds={})
    assert error.value.name == "up_weight_ptrs"


THROUGH_A_TABLE = """
extern "C" __global__ void first(const unsigned long long* table, unsigned* out, unsigned entry, unsigned spoil) {
    unsigned* there = reinterpret_cast<unsigned*>(table[entry]);
    out[threadIdx.x] = there == nullptr ? 7u : there[threadIdx.x];
    if (spoil != 0u && threadIdx.x == 1u) there[1] = 0u;
}
"""


def test_what_a_table_points_at_must_not_change(tmp_path: Path, rng: np.random.Generator) -> None:
    def read(table: Any, out: Any, entry: int, spoil: int) -> Any:
        return np.full(4, 7) if table[entry] is None else table[entry]

    entries = [Integers(1, 99)(rng, (4,), U32), None]
    with emulate(tmp_path, THROUGH_A_TABLE, name="k") as gpu:
        case = KernelCase(gpu, rng)
        args = {"table": Table(entries), "out": np.zeros(4, U32), "entry": 0, "spoil": 0}
        for entry in (0, 1):
            case("k", "first", args=args | {"entry": entry}, reference=read, block=4, bounds={"out": bits()})
        with pytest.raises(AssertionError, match=r"table\[0\]: 1 of 4 differ"):
            case("k", "first", args=args | {"spoil": 1}, reference=read, block=4, bounds={"out": bits()})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"args": {"logits": Normal()}}, "args"),
        ({"args": {"logits": Normal(), "n": 4, "more": 1}}, "args"),
        ({"bounds": {"nobody": within(1)}}, "bounds"),
        ({"args": {"logits": np.zeros(4, np.float64), "n": 4}}, "logits"),
        ({"args": {"logits": Alias("nobody"), "n": 4}}, "logits"),
        ({"function": "argmax_of_nobody"}, "reference"),
    ],
)
def test_mistakes_in_a_test_are_named(kernel_case: KernelCase, change: dict[str, Any], name: str) -> None:
    call: dict[str, Any] = {"args": {"logits": Normal(), "n": 4}, "bounds": {}} | change
    with pytest.raises(InvalidArgumentError) as error:
        kernel_case("argmax", call.pop("function", "argmax_bf16"), **call)
    assert error.value.name == name


@pytest.mark.parametrize("block", [(0, 0, 0), (4, 0, 0), (2, 3, 0), (0, 3, 1), (4, 0, 1)], ids=str)
def test_the_block_that_wrote_an_element(block: tuple[int, int, int]) -> None:
    grid = (5, 4, 2)
    before = np.full((2, 4, 5), 0xA5A5, np.uint16)

    def run(size: tuple[int, int, int]) -> Array:
        made = before.copy()
        made[: size[2], : size[1], : size[0]] = 7
        return made

    at = int(np.ravel_multi_index(block[::-1], before.shape))
    assert writing_block(run, grid, before, run(grid), at) == block
    untouched = run(grid)
    untouched.reshape(-1)[at] = 0xA5A5
    assert writing_block(run, grid, before, untouched, at) is None


def test_a_kernel_that_shares_out_its_work_by_the_grid_has_no_such_block() -> None:
    before, after = np.zeros(8, np.uint16), np.arange(1, 9, dtype=np.uint16)
    assert writing_block(lambda size: after.copy(), (4, 1, 1), before, after, 5) is None


def test_replaced_methods_do_not_outlive_a_test(gpu: GpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA tests share one backend; with some versions of pytest an undone patch of an instance left the bound
    method on it, which would hide a later patch of the class."""
    vars(gpu)["free_memory"] = gpu.free_memory
    drop_replaced_methods(gpu)
    assert "free_memory" not in vars(gpu)
    monkeypatch.setattr(type(gpu), "free_memory", lambda self: 2)
    assert gpu.free_memory() == 2
