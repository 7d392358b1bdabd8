# SPDX-License-Identifier: AGPL-3.0-only
"""Modules hyper_connection and spark_hyper_connection: the official maths against FP64 and golden numbers, and the same
bits with one block a token and with many."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from spark_py.ops import hyper_connection as ops
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend, KernelHandle
from spark_py.testing import BF16, F32, Array, Output, any_bits, assert_rounds, assert_same_bits, f64, normal, upload
from spark_py.testing.cases.hyper_connection import (
    SETTINGS,
    SHAPES,
    head_oracle,
    post_oracle,
    pre_oracle,
    shares_oracle,
    streams_of,
    weights_of,
)

from .support import checks

NONE = KernelHandle(0)

# FP64 results of the official maths: logits, 20 iterations, eps 1e-6.
LOGITS = [[0.2, -1.0, 0.7, 0.1], [1.5, 0.3, -0.4, 0.0], [-0.6, 0.9, 0.05, 1.1], [0.4, -0.2, 0.8, -1.3]]
COMB = [
    [0.20688706, 0.10822124, 0.38269349, 0.30219721],
    [0.48754212, 0.25502874, 0.08181406, 0.17561408],
    [0.05058420, 0.39371403, 0.10871132, 0.44698946],
    [0.25498562, 0.24303500, 0.42678013, 0.07519825],
]
STREAMS, POST, OUT = [[1, 2], [3, -1], [0.5, 4], [-2, 0]], [1, 0.5, 1.5, 2], [10, -4]
NEXT = [
    [11.18483428, -3.87143122],
    [5.58409446, -0.46373015],
    [14.82893106, -4.88158180],
    [20.90213769, -5.78326183],
]


def kernels_of(gpu: GpuBackend, spread: bool) -> ops.HyperConnectionKernels:
    """The kernels, without this project's own where not `spread`."""
    found = ops.HyperConnectionKernels.of(gpu)
    hidden = dataclasses.replace(found, mix=NONE, pre_finish=NONE, head_finish=NONE, spread_post=NONE)
    return found if spread else hidden


def run_pre(
    gpu: GpuBackend,
    streams: Array,
    fn: Array,
    scale: Array,
    base: Array,
    iters: int,
    norm_eps: float,
    hc_eps: float,
    spread: bool,
) -> tuple[Array, Array, Array, Array]:
    """(y, post, comb, shares); the shares stay poisoned where one block does a token."""
    tokens, hc, size = streams.shape
    y, post, comb = Output(gpu, (tokens, size)), Output(gpu, (tokens, hc), F32), Output(gpu, (tokens, hc, hc), F32)
    shares = Output(gpu, (tokens, len(fn) + 1, 8), F32)
    assert ops.shares_bytes(tokens, hc) == tokens * (len(fn) + 1) * 32
    ops.hc_pre(
        gpu,
        kernels_of(gpu, spread),
        *(upload(gpu, array) for array in (streams, fn, scale, base)),
        y.ptr,
        post.ptr,
        comb.ptr,
        tokens,
        size,
        hc,
        iters,
        norm_eps,
        hc_eps,
        gpu.default_stream(),
        shares=shares.ptr,
    )
    return y.read(), post.read(), comb.read(), shares.read()


def run_head(
    gpu: GpuBackend, streams: Array, fn: Array, scale: Array, base: Array, norm_eps: float, hc_eps: float, spread: bool
) -> Array:
    tokens, hc, size = streams.shape
    y, shares = Output(gpu, (tokens, size)), Output(gpu, (tokens, hc + 1, 8), F32)
    pointers = [upload(gpu, array) for array in (streams, fn, scale, base)]
    kernels, stream = kernels_of(gpu, spread), gpu.default_stream()
    ops.hc_head(gpu, kernels, *pointers, y.ptr, tokens, size, hc, norm_eps, hc_eps, stream, shares=shares.ptr)
    return y.read()


def run_post(
    gpu: GpuBackend, block_out: Array, residual: Array, post: Array, comb: Array, in_place: bool, spread: bool
) -> Array:
    tokens, hc, size = residual.shape
    out = Output(gpu, residual.shape, F32, residual if in_place else None)
    source = out.ptr if in_place else upload(gpu, residual)
    others = [upload(gpu, array) for array in (block_out, post, comb)]
    kernels, stream = kernels_of(gpu, spread), gpu.default_stream()
    ops.hc_post(gpu, kernels, others[0], source, others[1], others[2], out.ptr, tokens, size, hc, stream)
    return out.read()


def run_expand(gpu: GpuBackend, hidden: Array, hc: int) -> Array:
    tokens, size = hidden.shape
    streams = Output(gpu, (tokens, hc, size), F32)
    kernels, stream = kernels_of(gpu, False), gpu.default_stream()
    ops.hc_expand(gpu, kernels, upload(gpu, hidden), streams.ptr, tokens, size, hc, stream)
    return streams.read()


def check_pre(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    shapes = [(shape, *SETTINGS[at % len(SETTINGS)]) for at, shape in enumerate(SHAPES)]
    for blind, runs in ((False, shapes), (True, [((2, 64, 4), *setting) for setting in SETTINGS])):
        for (tokens, size, hc), iters, times, eps in runs:
            rows = (2 + hc) * hc
            streams, fn = streams_of(rng, tokens, hc, size), weights_of(rng, rows, hc * size)
            if blind:
                fn[:] = 0.0
            scale = np.array([1.5, -0.75, times], F32)
            base = (rng.standard_normal(rows) * np.repeat([1, 1, times], [hc, hc, hc * hc])).astype(F32)
            got = run_pre(gpu, streams, fn, scale, base, iters, eps, eps, spread)
            expected = pre_oracle(streams, fn, scale, base, iters, eps, eps)
            what = f"T={tokens} H={size} hc={hc} iters={iters} x{times} eps={eps}"
            for part, (exact, slack) in enumerate(expected):
                assert_rounds(got[part], exact, 0.0, slack, f"{what}, {('y', 'post', 'comb')[part]}")
            if spread:
                exact, slack = shares_oracle(streams, fn)
                assert_rounds(got[3], exact, 0.0, slack, f"{what}, shares")


def check_head(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    for tokens, size, hc in SHAPES:
        for eps in (1e-6, 0.03):
            streams, fn = streams_of(rng, tokens, hc, size), weights_of(rng, hc, hc * size)
            scale, base = np.array([-1.75], F32), rng.standard_normal(hc).astype(F32)
            got = run_head(gpu, streams, fn, scale, base, eps, eps, spread)
            exact, slack = head_oracle(streams, fn, scale, base, eps, eps)
            assert_rounds(got, exact, 0.0, slack, f"T={tokens} H={size} hc={hc} eps={eps}")


def check_post(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    for tokens, size, hc in SHAPES:
        for in_place in (False, True):
            block_out, residual = normal(rng, tokens, size), streams_of(rng, tokens, hc, size)
            post = rng.uniform(0, 2, (tokens, hc)).astype(F32)
            comb = rng.uniform(0, 1, (tokens, hc, hc)).astype(F32)
            got = run_post(gpu, block_out, residual, post, comb, in_place, spread)
            exact, slack = post_oracle(block_out, residual, post, comb)
            assert_rounds(got, exact, 0.0, slack, f"T={tokens} H={size} hc={hc} in_place={in_place}")


@checks("hyper_connection::hc_expand")
def check_hc_expand(gpu: GpuBackend, rng: np.random.Generator) -> None:
    for tokens, size, hc in SHAPES:
        hidden = any_bits(rng, tokens, size)
        widened = (hidden.view(np.uint16).astype(np.uint32) << 16).view(F32)
        expected = np.repeat(widened[:, None], hc, axis=1)
        assert_same_bits(run_expand(gpu, hidden, hc), expected, f"T={tokens} H={size} hc={hc}")


@checks("hyper_connection::hc_pre")
def check_hc_pre(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_pre(gpu, rng, False)


@checks("hyper_connection::hc_post")
def check_hc_post(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_post(gpu, rng, False)


@checks("hyper_connection::hc_head")
def check_hc_head(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_head(gpu, rng, False)


@checks("spark_hyper_connection::spark_hc_mix")
@checks("spark_hyper_connection::spark_hc_pre_finish")
def check_spread_pre(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_pre(gpu, rng, True)


@checks("spark_hyper_connection::spark_hc_head_finish")
def check_spread_head(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_head(gpu, rng, True)


@checks("spark_hyper_connection::spark_hc_post")
def check_spread_post(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_post(gpu, rng, True)


def test_hc_expand(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_hc_expand(gpu, rng)


@pytest.mark.parametrize("spread", [False, True])
def test_hc_pre(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    check_pre(gpu, rng, spread)


@pytest.mark.parametrize("spread", [False, True])
def test_hc_post(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    check_post(gpu, rng, spread)


@pytest.mark.parametrize("spread", [False, True])
def test_hc_head(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    check_head(gpu, rng, spread)


@pytest.mark.parametrize(("tokens", "size", "hc"), SHAPES)
def test_many_blocks_give_the_bits_of_one(
    gpu: GpuBackend, rng: np.random.Generator, tokens: int, size: int, hc: int
) -> None:
    """And so does a token alone: its bits do not depend on how many there are."""
    rows = (2 + hc) * hc
    streams, fn = streams_of(rng, tokens, hc, size), weights_of(rng, rows, hc * size)
    scale, base = np.array([1.5, -0.75, 3.0], F32), rng.standard_normal(rows).astype(F32)
    pre = [run_pre(gpu, streams, fn, scale, base, 20, 1e-6, 1e-6, spread)[:3] for spread in (False, True)]
    alone = run_pre(gpu, streams[-1:], fn, scale, base, 20, 1e-6, 1e-6, True)[:3]
    head = [run_head(gpu, streams, fn[:hc], scale[:1], base[:hc], 1e-6, 1e-6, spread) for spread in (False, True)]
    out = [run_post(gpu, pre[0][0], streams, pre[0][1], pre[0][2], True, spread) for spread in (False, True)]
    for one, many, single in zip(*pre, alone, strict=True):
        assert_same_bits(many, one)
        assert_same_bits(many[-1:], single)
    assert_same_bits(head[1], head[0])
    assert_same_bits(out[1], out[0])


@pytest.mark.parametrize("spread", [False, True])
def test_golden_numbers(gpu: GpuBackend, rng: np.random.Generator, spread: bool) -> None:
    """Rows of zeros make the base the logits, exactly. FP32 has them within 40 roundings of numbers below 1."""
    streams = normal(rng, 1, 4, 8).astype(F32)
    base = np.array([0.0] * 8 + [x for row in LOGITS for x in row], F32)
    y, post, comb, _ = run_pre(gpu, streams, np.zeros((24, 32), F32), np.ones(3, F32), base, 20, 1e-6, 1e-6, spread)
    np.testing.assert_allclose(f64(comb[0]), COMB, rtol=0, atol=3e-6)
    np.testing.assert_allclose(comb[0].sum(axis=0), 0.999999, rtol=0, atol=5e-7)
    np.testing.assert_allclose(post[0], 1.0, rtol=0, atol=1e-7)
    assert_rounds(y, 0.500001 * f64(streams).sum(axis=1), 0.0, 1e-6 * np.abs(f64(streams)).sum(axis=1))
    out = run_post(
        gpu, np.array([OUT], BF16), np.array([STREAMS], F32), np.array([POST], F32), np.array([COMB], F32), True, spread
    )
    np.testing.assert_allclose(f64(out[0]), NEXT, rtol=0, atol=3e-6)


def test_equal_logits_mix_evenly(gpu: GpuBackend, rng: np.random.Generator) -> None:
    zeros = np.zeros(24, F32)
    streams = normal(rng, 2, 4, 6).astype(F32)
    comb = run_pre(gpu, streams, np.zeros((24, 24), F32), np.ones(3, F32), zeros, 20, 1e-6, 1e-6, False)[2]
    np.testing.assert_allclose(comb, 0.25, rtol=0, atol=1e-6)


def test_large_logits_keep_column_sums(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """The last step is a column step, so columns sum to 1 / (1 + eps); rows need not. No logit overflows."""
    streams = normal(rng, 3, 4, 16).astype(F32)
    for factor in (8.0, 1e4):
        base = (rng.standard_normal(24) * factor).astype(F32)
        comb = run_pre(gpu, streams, np.zeros((24, 64), F32), np.ones(3, F32), base, 20, 1e-6, 1e-6, True)[2]
        assert np.isfinite(comb).all()
        np.testing.assert_allclose(comb.sum(axis=1), 1.0, rtol=0, atol=3e-6)


def test_what_is_not_a_number_stays_in_its_token(gpu: GpuBackend, rng: np.random.Generator) -> None:
    streams, fn = streams_of(rng, 3, 4, 40), weights_of(rng, 24, 160)
    scale, base = np.ones(3, F32), rng.standard_normal(24).astype(F32)
    clean = run_pre(gpu, streams, fn, scale, base, 20, 1e-6, 1e-6, True)[:3]
    streams[1, 2, 7] = np.nan
    for part, before in zip(run_pre(gpu, streams, fn, scale, base, 20, 1e-6, 1e-6, True), clean, strict=False):
        assert np.isnan(f64(part[1])).all()
        assert_same_bits(part[::2], before[::2])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hc_mult": 5}, "hc_mult"),
        ({"hc_mult": 0}, "hc_mult"),
        ({"sinkhorn_iters": 0}, "sinkhorn_iters"),
        ({"norm_eps": float("nan")}, "eps"),
        ({"hc_eps": -1e-6}, "eps"),
    ],
)
def test_impossible_numbers_are_refused(gpu: GpuBackend, change: dict[str, float], name: str) -> None:
    numbers = {"num_tokens": 1, "hidden_size": 8, "hc_mult": 4, "sinkhorn_iters": 20, "norm_eps": 1e-6, "hc_eps": 1e-6}
    ptr = gpu.alloc(4096)
    with pytest.raises(InvalidArgumentError) as error:
        ops.hc_pre(
            gpu,
            kernels_of(gpu, False),
            *(7 * [ptr]),
            **(numbers | change),  # type: ignore[arg-type]
            stream=gpu.default_stream(),
            shares=DevicePtr.NULL,
        )
    assert error.value.name == name
