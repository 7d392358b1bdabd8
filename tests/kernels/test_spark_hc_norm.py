# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_hc_norm: close to FP64, and the bits of the chains of kernels that it takes the place of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.ops import hyper_connection as ops
from spark_py.ops.residual_add import residual_add
from spark_py.ops.rms_norm_vanilla import rms_norm
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import F32, Array, Output, assert_same_bits, normal, upload
from spark_py.testing.cases.hyper_connection import streams_of, weights_of

from .support import check_cases, checks

MODULE = "spark_hc_norm"
SHAPES = ((1, 64, 4), (3, 192, 3), (2, 2112, 4), (1, 4096, 4), (2, 128, 1))
ITERS, NORM_EPS, HC_EPS, EPS = 5, 1e-6, 1e-4, 1e-5


def expanded(gpu: GpuBackend, own: Array, common: Array, hc: int, apart: bool, fused: bool) -> Array:
    """Streams [T, hc, H] of own [T, hc or 1, H] and common [T, H]."""
    tokens, _, size = own.shape
    kernels, stream = ops.HyperConnectionKernels.of(gpu), gpu.default_stream()
    streams, first = Output(gpu, (tokens, hc, size), F32), upload(gpu, own)
    if fused:
        second = upload(gpu, common)
        ops.hc_expand_sum(gpu, kernels, first, second, streams.ptr, tokens, size, hc, apart, stream)
        return streams.read()
    second = upload(gpu, np.ascontiguousarray(np.repeat(common[:, None], own.shape[1], axis=1)))
    residual_add(gpu, gpu.kernel("residual_add", "bf16_residual_add"), first, second, own.size, stream)
    rows, copies = (tokens * hc, 1) if apart else (tokens, hc)
    ops.hc_expand(gpu, kernels, first, streams.ptr, rows, size, copies, stream)
    return streams.read()


def pre(gpu: GpuBackend, streams: Array, arrays: list[Array], weight: Array, fused: bool) -> list[Array]:
    """(normed y, post, comb)."""
    tokens, hc, size = streams.shape
    kernels, stream = ops.HyperConnectionKernels.of(gpu), gpu.default_stream()
    shapes = ((tokens, size), (tokens, hc), (tokens, hc, hc))
    outputs = [Output(gpu, shape, *([F32] if i else [])) for i, shape in enumerate(shapes)]
    shares, w = Output(gpu, (tokens, ops.mix_rows(hc) + 1, 8), F32), upload(gpu, weight)
    pointers = [upload(gpu, each) for each in (streams, *arrays)]
    y, post, comb = (each.ptr for each in outputs)
    if fused:
        ops.hc_pre_norm(
            gpu, kernels, *pointers, w, y, post, comb, tokens, size, hc, ITERS, NORM_EPS, HC_EPS, EPS, stream,
            shares=shares.ptr,
        )  # fmt: skip
    else:
        ops.hc_pre(
            gpu, kernels, *pointers, y, post, comb, tokens, size, hc, ITERS, NORM_EPS, HC_EPS, stream, shares=shares.ptr
        )
        rms_norm(gpu, gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla"), y, w, y, tokens, size, EPS, stream)
    return [each.read() for each in outputs]


def head(gpu: GpuBackend, streams: Array, arrays: list[Array], weight: Array, fused: bool) -> list[Array]:
    """(y, normed y)."""
    tokens, hc, size = streams.shape
    kernels, stream = ops.HyperConnectionKernels.of(gpu), gpu.default_stream()
    y, normed, shares = Output(gpu, (tokens, size)), Output(gpu, (tokens, size)), Output(gpu, (tokens, hc + 1, 8), F32)
    pointers, w = [upload(gpu, each) for each in (streams, *arrays)], upload(gpu, weight)
    if fused:
        ops.hc_head_norm(
            gpu, kernels, *pointers, w, y.ptr, normed.ptr, tokens, size, hc, NORM_EPS, HC_EPS, EPS, stream,
            shares=shares.ptr,
        )  # fmt: skip
    else:
        ops.hc_head(gpu, kernels, *pointers, y.ptr, tokens, size, hc, NORM_EPS, HC_EPS, stream, shares=shares.ptr)
        kernel = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
        rms_norm(gpu, kernel, y.ptr, w, normed.ptr, tokens, size, EPS, stream)
    return [y.read(), normed.read()]


def arrays_of(rng: np.random.Generator, rows: int, hc: int, size: int, scales: int) -> list[Array]:
    scale, base = rng.uniform(-2, 2, scales).astype(F32), rng.standard_normal(rows).astype(F32)
    return [weights_of(rng, rows, hc * size), scale, base]


@checks(f"{MODULE}::spark_hc_expand_sum")
def check_expand_sum(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::spark_hc_expand_sum")
    for tokens, size, hc in SHAPES:
        for apart in (False, True):
            own, common = normal(rng, tokens, hc if apart else 1, size), normal(rng, tokens, size, scale=8.0)
            fused, chain = (expanded(gpu, own, common, hc, apart, way) for way in (True, False))
            assert_same_bits(fused, chain, f"T={tokens} H={size} hc={hc} {apart=}")


@checks(f"{MODULE}::spark_hc_pre_norm")
def check_pre_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::spark_hc_pre_norm")
    for tokens, size, hc in SHAPES:
        streams, weight = streams_of(rng, tokens, hc, size), normal(rng, size)
        arrays = arrays_of(rng, ops.mix_rows(hc), hc, size, 3)
        fused, chain = (pre(gpu, streams, arrays, weight, way) for way in (True, False))
        for part, got, wanted in zip(("y", "post", "comb"), fused, chain, strict=True):
            assert_same_bits(got, wanted, f"{part}, T={tokens} H={size} hc={hc}")


@checks(f"{MODULE}::spark_hc_head_norm")
def check_head_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, f"{MODULE}::spark_hc_head_norm")
    for tokens, size, hc in SHAPES:
        streams, weight, arrays = streams_of(rng, tokens, hc, size), normal(rng, size), arrays_of(rng, hc, hc, size, 1)
        fused, chain = (head(gpu, streams, arrays, weight, way) for way in (True, False))
        for part, got, wanted in zip(("y", "normed"), fused, chain, strict=True):
            assert_same_bits(got, wanted, f"{part}, T={tokens} H={size} hc={hc}")


def test_expand_sum(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_expand_sum(gpu, rng)


def test_pre_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_pre_norm(gpu, rng)


def test_head_norm(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_head_norm(gpu, rng)


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"num_tokens": 0}, {"hc_mult": 5}])
def test_impossible_numbers_are_refused(gpu: GpuBackend, change: dict[str, Any]) -> None:
    ptr, kernels = gpu.alloc(4096), ops.HyperConnectionKernels.of(gpu)
    numbers = {"num_tokens": 1, "hidden_size": 64, "hc_mult": 4} | change
    with pytest.raises(InvalidArgumentError) as error:
        ops.hc_expand_sum(gpu, kernels, ptr, ptr, ptr, **numbers, apart=False, stream=gpu.default_stream())
    assert [error.value.name] == list(change)
