# SPDX-License-Identifier: AGPL-3.0-only
"""Module moe_topk: indices against a sort written out, weights against FP64, one token and many alike."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spark_py.ops import moe_topk as ops
from spark_py.runtime.errors import ArgumentRangeError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.launch import KernelLaunch
from spark_py.testing import BF16, F32, U32, Array, Output, assert_rounds, assert_same_bits, f64, upload
from spark_py.testing.cases.moe_topk import SIZES, WEIGHT_BOUND, WEIGHT_FLOOR, distinct, holes, infinite, low, ties

from .support import checks

ROWS = 5


def run(gpu: GpuBackend, logits: Array, k: int, normalize: bool) -> tuple[Array, Array]:
    """The kernel of one token."""
    indices, weights = Output(gpu, (k,), U32), Output(gpu, (k,), F32)
    kernel, stream = gpu.kernel("moe_topk", "moe_topk_softmax"), gpu.default_stream()
    ops.moe_topk_softmax(gpu, kernel, upload(gpu, logits), indices.ptr, weights.ptr, logits.size, k, normalize, stream)
    return indices.read(), weights.read()


def run_batched(gpu: GpuBackend, logits: Array, k: int, normalize: bool) -> tuple[Array, Array]:
    (rows, experts), kernel = logits.shape, gpu.kernel("moe_topk", "moe_topk_softmax_batched")
    indices, weights = Output(gpu, (rows, k), U32), Output(gpu, (rows, k), F32)
    ops.moe_topk_softmax_batched(
        gpu,
        kernel,
        upload(gpu, logits),
        indices.ptr,
        weights.ptr,
        rows,
        experts,
        k,
        normalize,
        gpu.default_stream(),
    )
    return indices.read(), weights.read()


def one_by_one(logits: Array, k: int, normalize: bool) -> tuple[Array, Array]:
    """Indices (u32) and weights (FP64) of one row: k times the first of the largest that are left, numbers first."""
    values = [float(v) for v in f64(logits)]
    left, chosen = list(range(len(values))), []
    for _ in range(k):
        best = left[0]
        for expert in left[1:]:
            number, other = values[expert], values[best]
            if not math.isnan(number) and (math.isnan(other) or number > other):
                best = expert
        chosen.append(best)
        left.remove(best)
    with np.errstate(all="ignore"):
        terms = np.exp(f64(logits) - values[chosen[0]])
        weights = terms[chosen] / terms.sum()
        if normalize:
            weights = weights / weights.sum()
    return np.array(chosen, np.uint32), weights


def check_routing(gpu: GpuBackend, rng: np.random.Generator, batched: bool) -> None:
    for experts, k in SIZES:
        for draw in (distinct, ties, holes, low, infinite):
            normalize = bool(rng.integers(2))
            logits = draw(rng, ROWS, experts)
            singly = [run(gpu, row, k, normalize) for row in logits]
            got = run_batched(gpu, logits, k, normalize) if batched else tuple(map(np.stack, zip(*singly, strict=True)))
            for row, content in enumerate(logits):
                what = f"{draw.__name__}, E={experts} k={k} normalize={normalize} row {row}"
                indices, weights = one_by_one(content, k, normalize)
                assert_same_bits(got[0][row], indices, what)
                assert_rounds(got[1][row], weights, WEIGHT_BOUND, WEIGHT_FLOOR, what)
                assert_same_bits(got[0][row], singly[row][0], what)
                assert_same_bits(got[1][row], singly[row][1], what)


@checks("moe_topk::moe_topk_softmax")
def check_moe_topk_softmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_routing(gpu, rng, batched=False)


@checks("moe_topk::moe_topk_softmax_batched")
def check_moe_topk_softmax_batched(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_routing(gpu, rng, batched=True)


def test_moe_topk_softmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_topk_softmax(gpu, rng)


def test_moe_topk_softmax_batched(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_moe_topk_softmax_batched(gpu, rng)


@pytest.mark.parametrize("pair", [(0, 5), (31, 32), (3, 35), (255, 256), (0, 511)])
def test_the_lower_of_two_equal_experts_is_first(
    gpu: GpuBackend, rng: np.random.Generator, pair: tuple[int, int]
) -> None:
    logits = (distinct(rng, 2, 512).astype(np.float32) - 20).astype(BF16)
    logits[:, list(pair)] = BF16.type(3.0)
    for indices in (run(gpu, logits[0], 3, True)[0], run_batched(gpu, logits, 3, True)[0][1]):
        assert tuple(indices[:2]) == pair


def test_every_nan_pattern_is_last(gpu: GpuBackend, rng: np.random.Generator) -> None:
    patterns = np.array([0x7F81, 0xFF81, 0x7FC0, 0xFFC0, 0x7FFF, 0xFFFF, 0xFF80, 0xFF7F], np.uint16)
    order = rng.permutation(8)
    indices, weights = run(gpu, patterns[order].view(BF16), 8, False)
    numbers = [int(np.flatnonzero(order == 7)[0]), int(np.flatnonzero(order == 6)[0])]
    assert indices.tolist() == numbers + sorted(set(range(8)) - set(numbers))
    assert np.isnan(weights).all()


@pytest.mark.parametrize(
    ("experts", "k", "tokens", "name"),
    [
        (513, 8, 1, "num_experts"),
        (0, 1, 1, "num_experts"),
        (64, 33, 1, "top_k"),
        (4, 5, 1, "top_k"),
        (4, 0, 1, "top_k"),
        (4, True, 1, "top_k"),
        (8, 2, 0, "num_tokens"),
    ],
)
def test_impossible_numbers_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, experts: int, k: int, tokens: int, name: str
) -> None:
    ptr, stream = upload(gpu, distinct(rng, 1, 1024)), gpu.default_stream()
    single, batched = (gpu.kernel("moe_topk", f"moe_topk_softmax{form}") for form in ("", "_batched"))
    with pytest.raises(InvalidArgumentError) as error:
        ops.moe_topk_softmax_batched(gpu, batched, ptr, ptr, ptr, tokens, experts, k, True, stream)
    assert error.value.name == name
    if tokens:
        with pytest.raises(InvalidArgumentError):
            ops.moe_topk_softmax(gpu, single, ptr, ptr, ptr, experts, k, True, stream)


@pytest.mark.host_only("the catalogue's rules are applied where arguments are bound to a reference")
@pytest.mark.parametrize(("experts", "k", "match"), [(513, 8, "num_experts is 513"), (4, 5, "top_k is 5")])
def test_a_launch_beyond_the_limits_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, experts: int, k: int, match: str
) -> None:
    ptr, kernel = upload(gpu, distinct(rng, 1, 1024)), gpu.kernel("moe_topk", "moe_topk_softmax")
    launch = KernelLaunch(gpu, kernel).grid((1, 1, 1)).block((256, 1, 1)).arg_ptr(ptr).arg_ptr(ptr).arg_ptr(ptr)
    with pytest.raises(ArgumentRangeError, match=match):
        launch.arg_u32(experts).arg_u32(k).arg_u32(1).launch(gpu.default_stream())
