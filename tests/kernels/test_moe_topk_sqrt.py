# SPDX-License-Identifier: AGPL-3.0-only
"""Modules moe_topk_sqrt and moe_hash_route: the router of DeepSeek-V4 against a sort written out and FP64 weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spark_py.ops import moe_hash_route as hash_ops
from spark_py.ops import moe_topk_sqrt as ops
from spark_py.runtime.errors import InvalidArgumentError, KernelFaultError, SparkError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, F32, U32, Array, Output, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.moe_topk_sqrt import (
    SIZES,
    VOCABULARY,
    WEIGHT_BOUND,
    WEIGHT_FLOOR,
    apart,
    hash_row,
    holes,
    large,
    rising,
    score,
    small,
    ties,
    weights,
)

from .support import checks

ROWS = 5
SCALING = 1.5


def run(gpu: GpuBackend, logits: Array, bias: Array, k: int, normalize: bool) -> tuple[Array, Array]:
    """The kernel of one token."""
    indices, found = Output(gpu, (k,), U32), Output(gpu, (k,), F32)
    kernel, stream = gpu.kernel("moe_topk_sqrt", "moe_topk_sqrtsoftplus"), gpu.default_stream()
    pointers = (upload(gpu, logits), upload(gpu, bias), indices.ptr, found.ptr)
    ops.moe_topk_sqrtsoftplus(gpu, kernel, *pointers, logits.size, k, normalize, SCALING, stream)
    return indices.read(), found.read()


def run_batched(gpu: GpuBackend, logits: Array, bias: Array, k: int, normalize: bool) -> tuple[Array, Array]:
    rows, experts = logits.shape
    indices, found = Output(gpu, (rows, k), U32), Output(gpu, (rows, k), F32)
    kernel, stream = gpu.kernel("moe_topk_sqrt", "moe_topk_sqrtsoftplus_batched"), gpu.default_stream()
    pointers = (upload(gpu, logits), upload(gpu, bias), indices.ptr, found.ptr)
    ops.moe_topk_sqrtsoftplus_batched(gpu, kernel, *pointers, rows, experts, k, normalize, SCALING, stream)
    return indices.read(), found.read()


def run_hash(gpu: GpuBackend, logits: Array, table: Array, token: int, normalize: bool) -> tuple[Array, Array]:
    k = table.shape[1]
    indices, found = Output(gpu, (k,), U32), Output(gpu, (k,), F32)
    kernel, stream = gpu.kernel("moe_hash_route", "moe_hash_route"), gpu.default_stream()
    pointers = (upload(gpu, logits), upload(gpu, table), upload(gpu, np.array([token], U32)), indices.ptr, found.ptr)
    hash_ops.moe_hash_route(gpu, kernel, *pointers, logits.size, k, normalize, SCALING, stream)
    return indices.read(), found.read()


def one_by_one(logits: Array, bias: Array, k: int) -> Array:
    """k times the first of the largest sums that are left, numbers first."""
    with np.errstate(all="ignore"):
        values = [float(v) for v in score(logits) + f64(bias)]
    left, chosen = list(range(len(values))), []
    for _ in range(k):
        best = left[0]
        for expert in left[1:]:
            number, other = values[expert], values[best]
            if not math.isnan(number) and (math.isnan(other) or number > other):
                best = expert
        chosen.append(best)
        left.remove(best)
    return np.array(chosen, np.uint32)


def check_routing(gpu: GpuBackend, rng: np.random.Generator, batched: bool) -> None:
    for experts, k in SIZES:
        for draw in (apart, rising, ties, holes, large, small):
            for normalize in (False, True):
                logits, bias = draw(rng, ROWS, experts)
                singly = [run(gpu, row, bias, k, normalize) for row in logits]
                stacked = tuple(map(np.stack, zip(*singly, strict=True)))
                got = run_batched(gpu, logits, bias, k, normalize) if batched else stacked
                what = f"{draw.__name__}, E={experts} k={k} normalize={normalize}"
                chosen = np.stack([one_by_one(row, bias, k) for row in logits])
                assert_same_bits(got[0], chosen, what)
                expected = weights(logits, chosen, normalize, SCALING)
                assert_rounds(got[1], expected, WEIGHT_BOUND, WEIGHT_FLOOR, what)
                assert_same_bits(got[1], stacked[1], what)


@checks("moe_topk_sqrt::moe_topk_sqrtsoftplus")
def check_moe_topk_sqrtsoftplus(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_routing(gpu, rng, batched=False)


@checks("moe_topk_sqrt::moe_topk_sqrtsoftplus_batched")
def check_moe_topk_sqrtsoftplus_batched(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_routing(gpu, rng, batched=True)


@checks("moe_hash_route::moe_hash_route")
def check_moe_hash_route(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for experts, k in ((1, 1), (8, 2), (33, 32), (256, 6), (700, 7)):
        for scale in (4.0, 300.0):
            for token in (0, 41, VOCABULARY - 1):
                normalize = bool(rng.integers(2))
                logits, table = normal(rng, experts, scale=scale), hash_row(rng, VOCABULARY, experts, k)
                indices, found = run_hash(gpu, logits, table, token, normalize)
                what = f"E={experts} k={k} id={token} x{scale} normalize={normalize}"
                assert_same_bits(indices, table[token].astype(U32), what)
                expected = weights(logits[None], indices[None], normalize, SCALING)[0]
                assert_rounds(found, expected, WEIGHT_BOUND, WEIGHT_FLOOR, what)
    for wrong in (64, -1, 2**32 + 3, -(2**63)):
        for normalize in (False, True):
            logits, table, slot = normal(rng, 64), hash_row(rng, 9, 64, 6), int(rng.integers(6))
            table[5, slot] = wrong
            indices, found = run_hash(gpu, logits, table, 5, normalize)
            assert indices[slot] == 0
            assert_same_bits(np.delete(indices, slot), np.delete(table[5], slot).astype(U32), f"entry {wrong}")
            assert np.isnan(found).sum() == (6 if normalize else 1), f"entry {wrong}"
            assert np.isnan(found[slot])


def test_moe_topk_sqrtsoftplus(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_topk_sqrtsoftplus(gpu, rng)


def test_moe_topk_sqrtsoftplus_batched(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_topk_sqrtsoftplus_batched(gpu, rng)


def test_moe_hash_route(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_hash_route(gpu, rng)


def test_known_scores(gpu: GpuBackend) -> None:
    """sqrt(softplus(l)) of a few logits, from FP64."""
    logits = np.array([20, 5, 1, 0, -1, -5]).astype(BF16)
    known = [4.47213596, 2.23756907, 1.14597630, 0.83255461, 0.55969785, 0.08194723]
    indices, found = run(gpu, logits, np.zeros(6, F32), 6, False)
    assert indices.tolist() == list(range(6))
    np.testing.assert_allclose(found / SCALING, known, rtol=1e-6, atol=0)


def test_weights_add_up_to_the_factor(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for draw in (apart, rising, large):
        logits, bias = draw(rng, 1, 256)
        total = f64(run(gpu, logits[0], bias, 6, True)[1]).sum()
        assert total == pytest.approx(SCALING, rel=2.0**-21)


def test_the_bias_changes_the_choice_and_not_the_weights(gpu: GpuBackend, rng: np.random.Generator) -> None:
    logits = rng.permutation(64).astype(BF16)
    low = np.argsort(f64(logits))[:6]
    bias = np.zeros(64, F32)
    bias[low] = 100.0
    indices, found = run(gpu, logits, bias, 6, True)
    assert sorted(indices) == sorted(low)
    expected = weights(logits[None], indices[None], True, SCALING)[0]
    assert_rounds(found, expected, WEIGHT_BOUND, WEIGHT_FLOOR)


def test_a_logit_of_100_stays_finite(gpu: GpuBackend) -> None:
    logits = np.array([100.0, 3e38, -100.0, -3e38, 0.0]).astype(BF16)
    indices, found = run(gpu, logits, np.zeros(5, F32), 5, False)
    assert indices.tolist() == [1, 0, 4, 2, 3]
    assert_rounds(found, SCALING * score(logits)[indices], WEIGHT_BOUND, WEIGHT_FLOOR)


def test_scores_that_vanish_are_not_divided(gpu: GpuBackend) -> None:
    indices, found = run(gpu, np.full(8, -np.inf).astype(BF16), np.zeros(8, F32), 3, True)
    assert indices.tolist() == [0, 1, 2]
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("pair", [(0, 5), (31, 32), (3, 35), (255, 256), (0, 511)])
def test_the_lower_of_two_equal_experts_is_first(
    gpu: GpuBackend, rng: np.random.Generator, pair: tuple[int, int]
) -> None:
    logits, bias = rising(rng, 2, 512)
    logits[:, list(pair)] = BF16.type(400.0)
    for indices in (run(gpu, logits[0], bias, 3, True)[0], run_batched(gpu, logits, bias, 3, True)[0][1]):
        assert tuple(indices[:2]) == pair


@pytest.mark.parametrize(
    ("experts", "k", "scaling", "name"),
    [
        (513, 8, 1.0, "num_experts"),
        (0, 1, 1.0, "num_experts"),
        (64, 33, 1.0, "top_k"),
        (4, 5, 1.0, "top_k"),
        (4, 0, 1.0, "top_k"),
        (8, 2, math.nan, "scaling_factor"),
        (8, 2, math.inf, "scaling_factor"),
    ],
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, experts: int, k: int, scaling: float, name: str) -> None:
    ptr, stream = gpu.alloc(8192), gpu.default_stream()
    single, batched = (gpu.kernel("moe_topk_sqrt", f"moe_topk_sqrtsoftplus{form}") for form in ("", "_batched"))
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_topk_sqrtsoftplus(gpu, single, ptr, ptr, ptr, ptr, experts, k, True, scaling, stream)
    assert error.value.name == name
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_topk_sqrtsoftplus_batched(gpu, batched, ptr, ptr, ptr, ptr, 2, experts, k, True, scaling, stream)
    assert error.value.name == name


def test_a_table_with_an_expert_that_is_none_is_refused(rng: np.random.Generator) -> None:
    table = hash_row(rng, 20, 8, 3)
    hash_ops.check_hash_table(table, 8)
    for wrong in (8, -1):
        bad = table.copy()
        bad[13, 1] = wrong
        with pytest.raises(InvalidArgumentError, match=rf"tid2eid\[13, 1\] is {wrong}.*8 experts"):
            hash_ops.check_hash_table(bad, 8)
    with pytest.raises(InvalidArgumentError, match="int64 of two axes"):
        hash_ops.check_hash_table(table.astype(np.int32), 8)


def test_a_token_beyond_the_table_is_refused_where_memory_is_checked(
    gpu: GpuBackend, rng: np.random.Generator, backend_name: str
) -> None:
    if backend_name not in ("host", "emulated-checked"):
        pytest.skip("needs --backend host or emulated-checked: the others read what lies behind the table")
    logits, table = normal(rng, 8), hash_row(rng, VOCABULARY, 8, 2)
    with pytest.raises((SparkError, KernelFaultError)):
        run_hash(gpu, logits, table, VOCABULARY, True)


def test_more_experts_a_token_than_lanes_are_refused(gpu: GpuBackend) -> None:
    ptr, kernel = gpu.alloc(8192), gpu.kernel("moe_hash_route", "moe_hash_route")
    for experts, k, name in ((64, 33, "top_k"), (64, 0, "top_k"), (0, 2, "num_experts")):
        with pytest.raises(InvalidArgumentError) as error:
            hash_ops.moe_hash_route(
                gpu, kernel, ptr, ptr, ptr, ptr, ptr, experts, k, True, SCALING, gpu.default_stream()
            )
        assert error.value.name == name
