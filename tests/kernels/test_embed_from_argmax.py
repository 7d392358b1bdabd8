# SPDX-License-Identifier: AGPL-3.0-only
"""Module embed_from_argmax: rows of a table, bit for bit, wherever in the table they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py import catalog
from spark_py.ops import embed_from_argmax as ops
from spark_py.runtime import open_backend
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import BF16, U32, Array, Output, alloc_or_skip, any_bits, assert_same_bits, upload

from .support import checks

SIZES = [1, 2, 7, 8, 31, 255, 256, 257, 2056, 5120]
VOCABULARY = 50


def reference(name: str) -> Any:
    spec = catalog.find("embed_from_argmax", name)
    assert spec is not None
    return spec.reference


def ids(*values: int) -> Array:
    return np.array(values, np.uint32)


@checks("embed_from_argmax::embed_from_argmax")
def check_embed_from_argmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("embed_from_argmax", "embed_from_argmax")
    for size in SIZES:
        table = any_bits(rng, VOCABULARY, size)
        on_device = upload(gpu, table)
        for token in (0, VOCABULARY - 1, int(rng.integers(VOCABULARY))):
            for aliased in (False, True):
                row, copy = Output(gpu, (size,)), Output(gpu, (1,), U32, content=ids(token) if aliased else None)
                source = copy.ptr if aliased else upload(gpu, ids(token))
                ops.embed_from_argmax(gpu, kernel, source, on_device, row.ptr, copy.ptr, size, gpu.default_stream())
                assert_same_bits(row.read(), table[token], f"H={size} id={token}")
                assert copy.read().tolist() == [token]
                assert_same_bits(row.read(), reference("embed_from_argmax")(table[token], ids(token))[0])


@checks("embed_from_argmax::batched_embed")
def check_batched_embed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    kernel = gpu.kernel("embed_from_argmax", "batched_embed")
    for size in SIZES:
        for shift in (0, 2):
            table = any_bits(rng, VOCABULARY, size)
            tokens = ids(0, VOCABULARY - 1, 3, 3, *rng.integers(VOCABULARY, size=3))
            rows = Output(gpu, (tokens.size, size), shift=shift)
            ops.batched_embed(
                gpu, kernel, upload(gpu, tokens), upload(gpu, table, shift), rows.ptr, tokens.size, size,
                gpu.default_stream(),
            )  # fmt: skip
            assert_same_bits(rows.read(), np.stack([table[int(t)] for t in tokens]), f"H={size} shift={shift}")
            assert_same_bits(rows.read(), reference("batched_embed")(tokens, table))


def test_embed_from_argmax(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_embed_from_argmax(gpu, rng)


def test_batched_embed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_batched_embed(gpu, rng)


# 262147 * 16384 elements end past 2**32; the rows at 2**31 and 2**32 elements are those that 32-bit arithmetic confuses
# with row 0.
FAR_SIZE, FAR_VOCABULARY = 16384, 262147
FAR_IDS = (0, 1 << 17, 248319, 1 << 18, FAR_VOCABULARY - 1)


def far_rows(gpu: GpuBackend, rng: np.random.Generator, batched: bool) -> None:
    """A table beyond 2**32 elements of which five rows are written and read."""
    table = alloc_or_skip(gpu, 2 * FAR_SIZE * FAR_VOCABULARY)
    rows = any_bits(rng, len(FAR_IDS), FAR_SIZE)
    for token, row in zip(FAR_IDS, rows, strict=True):
        gpu.copy_h2d(row.view(np.uint8), table.offset(2 * FAR_SIZE * token))
    tokens, out, copy = upload(gpu, ids(*FAR_IDS)), Output(gpu, rows.shape), Output(gpu, (1,), U32)
    stream = gpu.default_stream()
    if batched:
        kernel = gpu.kernel("embed_from_argmax", "batched_embed")
        ops.batched_embed(gpu, kernel, tokens, table, out.ptr, len(FAR_IDS), FAR_SIZE, stream)
    else:
        kernel = gpu.kernel("embed_from_argmax", "embed_from_argmax")
        for i in range(len(FAR_IDS)):
            target = out.ptr.offset(2 * FAR_SIZE * i)
            ops.embed_from_argmax(gpu, kernel, tokens.offset(4 * i), table, target, copy.ptr, FAR_SIZE, stream)
    assert_same_bits(out.read(), rows, "rows far into the table")
    gpu.free(table)


def on_sparse_memory(gpu: GpuBackend, rng: np.random.Generator, batched: bool) -> None:
    if gpu.name == "host":
        # Untouched memory stays unmapped when fresh memory is not poisoned.
        with open_backend("host", poison=False) as sparse:
            far_rows(sparse, rng, batched)
    else:
        far_rows(gpu, rng, batched)


@checks("embed_from_argmax::embed_from_argmax@far")
def check_far_row(gpu: GpuBackend, rng: np.random.Generator) -> None:
    on_sparse_memory(gpu, rng, batched=False)


@checks("embed_from_argmax::batched_embed@far")
def check_far_batch(gpu: GpuBackend, rng: np.random.Generator) -> None:
    on_sparse_memory(gpu, rng, batched=True)


def test_a_row_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_row(gpu, rng)


def test_batched_rows_past_2_to_the_32(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_far_batch(gpu, rng)


@pytest.mark.host_only("only a backend that runs references can look at ids in device memory before the rows are read")
@pytest.mark.parametrize("token", [VOCABULARY, 2**31, 2**32 - 1])
def test_an_id_beyond_the_table_is_refused(gpu: GpuBackend, rng: np.random.Generator, token: int) -> None:
    size, stream = 8, gpu.default_stream()
    table, out = upload(gpu, any_bits(rng, VOCABULARY, size)), Output(gpu, (2, size))
    copy, tokens = Output(gpu, (1,), U32), upload(gpu, ids(token, 1))
    kernel = gpu.kernel("embed_from_argmax", "embed_from_argmax")
    with pytest.raises(ArgumentPointerError) as error:
        ops.embed_from_argmax(gpu, kernel, tokens, table, out.ptr, copy.ptr, size, stream)
    assert error.value.parameter == "embed_table"
    kernel = gpu.kernel("embed_from_argmax", "batched_embed")
    with pytest.raises(ArgumentPointerError) as error:
        ops.batched_embed(gpu, kernel, tokens, table, out.ptr, 2, size, stream)
    assert error.value.parameter == "embed_table"
    assert (out.read().view(np.uint8) == 0xA5).all()


def test_no_rows_are_refused(gpu: GpuBackend) -> None:
    ptr, stream = upload(gpu, np.zeros(8).astype(BF16)), gpu.default_stream()
    kernel = gpu.kernel("embed_from_argmax", "batched_embed")
    with pytest.raises(InvalidArgumentError, match="num_tokens is 0"):
        ops.batched_embed(gpu, kernel, ptr, ptr, ptr, 0, 8, stream)
    kernel = gpu.kernel("embed_from_argmax", "embed_from_argmax")
    with pytest.raises(InvalidArgumentError, match="hidden_size is 0"):
        ops.embed_from_argmax(gpu, kernel, ptr, ptr, ptr, ptr, 0, stream)
