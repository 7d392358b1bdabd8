# SPDX-License-Identifier: AGPL-3.0-only
"""V4Projection in BF16, block-scaled E4M3 and MXFP4: products, rows together and alone, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.deepseek_v4 import V4Projection
from spark_py.model.weight_map import DenseWeight, Fp8Weight
from spark_py.runtime.errors import InvalidArgumentError, KernelSetError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, Array, Output, assert_same_bits, f64, normal, relative_l2, upload
from tests.model.mtp_forms import hide
from tests.model.v4_ffn_support import Bf16, Fp8, Mxfp4

N, K = 136, 160  # a second, smaller block of 128 in both
ROWS = 19  # more than any product takes at once
KINDS = [Bf16, Fp8, Mxfp4]


def products(gpu: GpuBackend, weight: Any, x: Array, *, together: bool) -> Array:
    projection = V4Projection(weight, N, K, gpu, "w")
    out, at, stream = Output(gpu, (len(x), N)), upload(gpu, x), gpu.default_stream()
    for first in [0] if together else range(len(x)):
        rows = len(x) if together else 1
        projection.run(at.offset(first * K * 2), out.ptr.offset(first * N * 2), rows, stream)
    return out.read()


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_values_of_the_codes_alone_and_together(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    matrix, x = kind.draw(rng, N, K), normal(rng, ROWS, K)
    weight = matrix.to_device(gpu)
    together = products(gpu, weight, x, together=True)
    assert relative_l2(together, f64(x) @ matrix.values().T) < 2.0**-8  # one rounding to BF16
    assert_same_bits(together, products(gpu, weight, x, together=False))
    for function in ("w8a16_gemv::spark_w8a16_gemv_batchm", "spark_mxfp4_gemv::spark_mxfp4_gemv_batchm"):
        hide(monkeypatch, gpu, "dense_gemv_bf16_batchm", function=function)
    assert_same_bits(together, products(gpu, weight, x, together=True))


def test_e4m3_times_a_power_of_two_is_a_bf16_number(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """So a projection loses nothing as BF16, and its products differ by the order of sums alone."""
    matrix, x = Fp8.draw(rng, N, K), normal(rng, 1, K)
    dense = Bf16(matrix.values().astype(BF16))
    np.testing.assert_array_equal(dense.values(), matrix.values())
    narrow, wide = (products(gpu, each.to_device(gpu), x, together=True) for each in (matrix, dense))
    assert relative_l2(narrow, f64(wide)) < 2.0**-9


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    weight = kind.draw(rng, N, K).to_device(gpu)
    with pytest.raises(InvalidArgumentError, match=r"attn\.wq_a"):
        V4Projection(weight, N, K + 32, gpu, "attn.wq_a")
    modules = {Bf16: "gemv", Fp8: "w8a16_gemv", Mxfp4: "spark_mxfp4_gemv"}
    hide(monkeypatch, gpu, modules[kind])
    with pytest.raises(KernelSetError, match=modules[kind]):
        V4Projection(weight, N, K, gpu, "attn.wq_a")


def test_columns_that_a_format_does_not_take_are_refused(gpu: GpuBackend) -> None:
    ptr = upload(gpu, np.zeros(64, np.uint8))
    for weight, k in ((DenseWeight(ptr, (2, 12)), 12), (Fp8Weight(ptr, ptr, 2, 24), 24)):
        with pytest.raises(InvalidArgumentError, match=rf"columns of w is {k}"):
            V4Projection(weight, 2, k, gpu, "w")
