# SPDX-License-Identifier: AGPL-3.0-only
"""The kernels of spark_gemv_argmax.cuh: the id that argmax_bf16 finds in what the format's other kernel writes, in all
cases, and the row of the table that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from spark_py.ops import argmax, spark_fp8_gemv_rows, spark_gemv_rows, spark_w4a16_gemv_rows
from spark_py.ops._gemv_rows import ARGMAX_ROOM_BYTES, ArgmaxRoom
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import U32, Array, Output, any_bits, assert_same_bits, normal, upload
from spark_py.testing.cases import spark_fp8_gemv_rows as fp8_cases
from spark_py.testing.cases import spark_gemv_rows as bf16_cases
from spark_py.testing.cases import spark_w4a16_gemv_rows as w4_cases
from spark_py.testing.cases._gemv_argmax import INFINITE, PLANTED, dense, inputs

from . import test_spark_fp8_gemv_rows, test_spark_gemv_rows, test_spark_w4a16_gemv_rows
from .gemv_rows import Rows
from .support import check_cases, checks


@dataclass(frozen=True)
class Form:
    """A format: what its other kernel's tests know of it, its launcher, and how whole numbers are encoded."""

    rows: Rows
    launch: Callable[..., None]
    whole: Callable[[Array], Any]
    k: int

    def encoded(self, weights: Array) -> tuple[Array, ...]:
        return tuple(value for value in self.whole(weights).values() if isinstance(value, np.ndarray))


BF16_FORM = Form(test_spark_gemv_rows.ROWS, spark_gemv_rows.spark_gemv_rows_argmax, bf16_cases.whole_numbers, 136)
FP8_FORM = Form(
    test_spark_fp8_gemv_rows.ROWS, spark_fp8_gemv_rows.spark_fp8_gemv_rows_argmax, fp8_cases.whole_numbers, 144
)
W4_FORM = Form(
    test_spark_w4a16_gemv_rows.ROWS, spark_w4a16_gemv_rows.spark_w4a16_gemv_rows_argmax, w4_cases.whole_numbers, 256
)
FORMS = (BF16_FORM, FP8_FORM, W4_FORM)


class Room:
    """Memory in which blocks meet, which every launch leaves zero."""

    def __init__(self, gpu: GpuBackend) -> None:
        nothing = np.zeros(ARGMAX_ROOM_BYTES, np.uint8)
        self.gpu, self.memory = gpu, Output(gpu, nothing.shape, nothing.dtype, nothing)

    def run(self, form: Form, x: Array, matrix: tuple[Array, ...], table: Array | None, **weight: float) -> list[int]:
        """The winners; embeddings are compared with the table's rows."""
        gpu, name, m, n, k = self.gpu, form.rows.name, len(x), len(matrix[0]), x.shape[1]
        ids, embed = Output(gpu, (m,), U32), None if table is None else Output(gpu, (m, k))
        form.launch(
            gpu, gpu.kernel(name, f"{name}_argmax"), upload(gpu, x),
            form.rows.weight(*(upload(gpu, part) for part in matrix), **weight), ids.ptr,
            DevicePtr.NULL if table is None else upload(gpu, table), DevicePtr.NULL if embed is None else embed.ptr,
            ArgmaxRoom.at(self.memory.ptr), m, n, k, gpu.default_stream(),
        )  # fmt: skip
        found: list[int] = ids.read().tolist()
        if table is not None and embed is not None:
            assert_same_bits(embed.read(), table[found], "embeddings")
        assert not self.memory.read().any()
        return found


def check(gpu: GpuBackend, rng: np.random.Generator, form: Form) -> None:
    name = form.rows.name
    check_cases(gpu, rng, f"{name}::{name}_argmax")
    room, scale = Room(gpu), {"weight_scale_2": 1.0} if form is W4_FORM else {}
    for planted in (*PLANTED, *(INFINITE if form is BF16_FORM else ())):
        if planted.values or planted.n == 1:
            x, weights = inputs(rng, planted.rows, form.k), form.encoded(dense(rng, planted, form.k))
            table = any_bits(rng, planted.n, form.k)
            assert room.run(form, x, weights, table, **scale) == [planted.winner] * planted.rows, str(planted)
    # Numbers as they come, with ties where outputs come twice; in as many blocks as there are tiles.
    for rows, n in ((1, 100), (8, 333), (3, 16)):
        x, matrix = normal(rng, rows, form.k), form.rows.drawn(rng, n, form.k)
        matrix = tuple(np.concatenate([part, part]) for part in matrix)
        outputs, stream = upload(gpu, form.rows.run(gpu, x, [matrix])[0]), gpu.default_stream()
        wanted = Output(gpu, (rows,), U32)
        kernel = gpu.kernel("argmax", "argmax_bf16_batch")
        argmax.argmax_bf16_batch(gpu, kernel, outputs, wanted.ptr, rows, 2 * n, 2 * n, stream)
        assert room.run(form, x, matrix, None) == wanted.read().tolist()


@checks("spark_gemv_rows::spark_gemv_rows_argmax")
def check_bf16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, BF16_FORM)


@checks("spark_fp8_gemv_rows::spark_fp8_gemv_rows_argmax")
def check_fp8(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, FP8_FORM)


@checks("spark_w4a16_gemv_rows::spark_w4a16_gemv_rows_argmax")
def check_w4a16(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check(gpu, rng, W4_FORM)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.rows.name)
def test_winners(gpu: GpuBackend, rng: np.random.Generator, form: Form) -> None:
    check(gpu, rng, form)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.rows.name)
@pytest.mark.parametrize(("m", "n", "step", "name"), [(0, 4, 1, "m"), (9, 4, 1, "m"), (1, 0, 1, "n"), (1, 4, 0, "k")])
def test_numbers_that_make_no_launch(
    gpu: GpuBackend, rng: np.random.Generator, form: Form, m: int, n: int, step: int, name: str
) -> None:
    ptr, kernel = upload(gpu, normal(rng, 64)), gpu.kernel(form.rows.name, f"{form.rows.name}_argmax")
    weight = form.rows.weight(*[ptr] * len(form.rows.drawn(rng, 1, form.rows.step)))
    k = form.rows.step if step else form.rows.off_step
    with pytest.raises(InvalidArgumentError) as error:
        form.launch(gpu, kernel, ptr, weight, ptr, ptr, ptr, ArgmaxRoom.at(ptr), m, n, k, gpu.default_stream())
    assert error.value.name == name
