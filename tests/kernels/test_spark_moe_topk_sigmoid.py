# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_moe_topk_sigmoid: indices against a choice written out, weights against FP64, one token and many
alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spark_py.ops import spark_moe_topk_sigmoid as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import BF16, F32, U32, Array, Output, assert_rounds, assert_same_bits, f64, upload
from spark_py.testing.cases.spark_moe_topk_sigmoid import (
    SIZES,
    WEIGHT_BOUND,
    WEIGHT_FLOOR,
    apart,
    choose,
    extreme,
    holes,
    paired,
    rising,
    score,
    ties,
    unbiased,
    weights,
)

from .support import checks

ROWS, SCALING = 5, 2.5
MODULE = "spark_moe_topk_sigmoid"


def run(
    gpu: GpuBackend, logits: Array, bias: Array | None, k: int, n_group: int, topk_group: int, normalize: bool
) -> tuple[Array, Array]:
    """The kernel of one token."""
    indices, found, kernel = Output(gpu, (k,), U32), Output(gpu, (k,), F32), gpu.kernel(MODULE, MODULE)
    ops.spark_moe_topk_sigmoid(
        gpu, kernel, upload(gpu, logits), None if bias is None else upload(gpu, bias), indices.ptr, found.ptr,
        logits.size, k, n_group, topk_group, normalize, SCALING, gpu.default_stream(),
    )  # fmt: skip
    return indices.read(), found.read()


def run_batched(
    gpu: GpuBackend, logits: Array, bias: Array | None, k: int, n_group: int, topk_group: int, normalize: bool
) -> tuple[Array, Array]:
    (rows, experts), kernel = logits.shape, gpu.kernel(MODULE, f"{MODULE}_batched")
    indices, found = Output(gpu, (rows, k), U32), Output(gpu, (rows, k), F32)
    ops.spark_moe_topk_sigmoid_batched(
        gpu, kernel, upload(gpu, logits), None if bias is None else upload(gpu, bias), indices.ptr, found.ptr,
        rows, experts, k, n_group, topk_group, normalize, SCALING, gpu.default_stream(),
    )  # fmt: skip
    return indices.read(), found.read()


def check_routing(gpu: GpuBackend, rng: np.random.Generator, batched: bool) -> None:
    for experts, k, n_group, topk_group in SIZES:
        for draw in (unbiased, rising, paired, apart, ties, holes, extreme):
            for normalize in (False, True):
                logits, bias = draw(rng, ROWS, experts, n_group)
                shape = (k, n_group, topk_group)
                singly = [run(gpu, row, bias, *shape, normalize) for row in logits]
                stacked = tuple(map(np.stack, zip(*singly, strict=True)))
                got = run_batched(gpu, logits, bias, *shape, normalize) if batched else stacked
                what = f"{draw.__name__}, E={experts} k={k} groups {topk_group} of {n_group} normalize={normalize}"
                chosen = np.array([choose(row, bias, *shape) for row in logits], U32)
                assert_same_bits(got[0], chosen, what)
                expected = weights(logits, chosen, normalize, SCALING)
                assert_rounds(got[1], expected, WEIGHT_BOUND, WEIGHT_FLOOR, what)
                assert_same_bits(got[1], stacked[1], what)


@checks(f"{MODULE}::{MODULE}")
def check_spark_moe_topk_sigmoid(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_routing(gpu, rng, batched=False)


@checks(f"{MODULE}::{MODULE}_batched")
def check_spark_moe_topk_sigmoid_batched(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_routing(gpu, rng, batched=True)


def test_spark_moe_topk_sigmoid(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_spark_moe_topk_sigmoid(gpu, rng)


def test_spark_moe_topk_sigmoid_batched(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_spark_moe_topk_sigmoid_batched(gpu, rng)


def test_known_scores(gpu: GpuBackend) -> None:
    """sigmoid of a few logits, from FP64."""
    logits = np.array([20, 5, 1, 0, -1, -5]).astype(BF16)
    known = [0.99999999794, 0.99330714908, 0.73105857863, 0.5, 0.26894142137, 0.00669285092]
    indices, found = run(gpu, logits, None, 6, 1, 1, False)
    assert indices.tolist() == list(range(6))
    np.testing.assert_allclose(found / SCALING, known, rtol=1e-6, atol=0)


def test_the_bias_changes_the_choice_and_not_the_weights(gpu: GpuBackend, rng: np.random.Generator) -> None:
    logits = (rng.permutation(64) * 2.0**-4).astype(BF16)
    low = np.argsort(f64(logits))[:6]
    bias = np.zeros(64, F32)
    bias[low] = 4.0
    indices, found = run(gpu, logits, bias, 6, 1, 1, False)
    assert sorted(indices.tolist()) == sorted(low.tolist())
    assert_rounds(found, SCALING * score(logits)[indices], WEIGHT_BOUND, WEIGHT_FLOOR)


def test_a_group_is_worth_its_two_best_and_the_best_expert_may_stay_out(gpu: GpuBackend) -> None:
    """One very good expert among bad ones loses to two good ones; nothing of its group is chosen, though the others'
    scores are negative with their bias."""
    bias = np.full(12, -1.0, F32)
    logits = np.array([4, -8, -8, -8, 1, 1, 1, -8, -8, -8, -8, -8]).astype(BF16)
    assert run(gpu, logits, bias, 3, 3, 1, True)[0].tolist() == [4, 5, 6]
    assert run(gpu, logits, bias, 4, 3, 1, True)[0].tolist() == [4, 5, 6, 7]
    assert run(gpu, logits, bias, 4, 3, 2, True)[0].tolist() == [0, 4, 5, 6]
    assert run(gpu, logits, bias, 4, 1, 1, True)[0].tolist() == [0, 4, 5, 6]


def test_weights_add_up_to_the_factor(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for draw in (unbiased, rising, apart):
        logits, bias = draw(rng, 1, 256, 8)
        total = f64(run(gpu, logits[0], bias, 8, 8, 4, True)[1]).sum()
        assert total == pytest.approx(SCALING, rel=2.0**-21)


def test_scores_that_vanish_give_no_weight(gpu: GpuBackend) -> None:
    indices, found = run(gpu, np.full(8, -np.inf).astype(BF16), np.zeros(8, F32), 3, 1, 1, True)
    assert indices.tolist() == [0, 1, 2]
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("pair", [(0, 5), (31, 32), (3, 35), (255, 256), (0, 511)])
def test_the_lower_of_two_equal_experts_is_first(
    gpu: GpuBackend, rng: np.random.Generator, pair: tuple[int, int]
) -> None:
    logits, bias = rising(rng, 2, 512, 1)
    logits[:, list(pair)] = BF16.type(7.0)
    for indices in (run(gpu, logits[0], bias, 3, 1, 1, True)[0], run_batched(gpu, logits, bias, 3, 1, 1, True)[0][1]):
        assert tuple(indices[:2]) == pair


@pytest.mark.parametrize(
    ("experts", "k", "n_group", "topk_group", "scaling", "name"),
    [
        (513, 8, 1, 1, 1.0, "num_experts"),
        (0, 1, 1, 1, 1.0, "num_experts"),
        (64, 33, 1, 1, 1.0, "top_k"),
        (4, 5, 1, 1, 1.0, "top_k"),
        (64, 8, 0, 1, 1.0, "n_group"),
        (64, 8, 7, 1, 1.0, "n_group"),
        (128, 8, 64, 8, 1.0, "n_group"),
        (16, 2, 16, 4, 1.0, "n_group"),
        (64, 8, 4, 5, 1.0, "topk_group"),
        (64, 8, 4, 0, 1.0, "topk_group"),
        (64, 17, 4, 1, 1.0, "top_k"),
        (8, 2, 1, 1, math.nan, "scaling_factor"),
        (8, 2, 1, 1, math.inf, "scaling_factor"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, experts: int, k: int, n_group: int, topk_group: int, scaling: float, name: str
) -> None:
    ptr, stream = gpu.alloc(8192), gpu.default_stream()
    scalars = (experts, k, n_group, topk_group, True, scaling, stream)
    for bias in (ptr, DevicePtr.NULL, None):
        with pytest.raises(InvalidArgumentError) as error:
            ops.spark_moe_topk_sigmoid(gpu, gpu.kernel(MODULE, MODULE), ptr, bias, ptr, ptr, *scalars)
        assert error.value.name == name
        batched = gpu.kernel(MODULE, f"{MODULE}_batched")
        with pytest.raises(InvalidArgumentError) as error:
            ops.spark_moe_topk_sigmoid_batched(gpu, batched, ptr, bias, ptr, ptr, 2, *scalars)
        assert error.value.name == name
