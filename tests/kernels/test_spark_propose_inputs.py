# SPDX-License-Identifier: AGPL-3.0-only
"""Module spark_propose_inputs: copies bit for bit, out of page-locked memory too, and no more than is used."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py.ops import spark_propose_inputs as ops
from spark_py.runtime.errors import ArgumentPointerError, InvalidArgumentError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import Output, any_bits, assert_same_bits, upload

from .support import check_cases, checks

U8 = np.dtype(np.uint8)
NAME = ("spark_propose_inputs", "spark_propose_inputs")


@checks("::".join(NAME))
def check_inputs(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_cases(gpu, rng, "::".join(NAME))
    n, h, vocabulary = 3, 24, 7
    table, rows, tokens = any_bits(rng, vocabulary, h), any_bits(rng, n, h), np.array([6, 0, 3], np.uint32)
    sources = np.array([upload(gpu, row).address for row in rows], np.uint64)
    hidden, embed, slab = Output(gpu, (n, h)), Output(gpu, (n, h)), Output(gpu, (32,), U8)
    content = rng.integers(0, 256, 32, np.uint8)
    given = ops.Given(*(upload(gpu, each) for each in (content, np.array([2], np.uint32), sources, tokens)))
    ops.spark_propose_inputs(
        gpu, gpu.kernel(*NAME), given, upload(gpu, table), slab.ptr, hidden.ptr, embed.ptr, n, 2 * h, h,
        gpu.default_stream(),
    )  # fmt: skip
    assert_same_bits(slab.read(), content)
    assert_same_bits(hidden.read(), rows)
    assert_same_bits(embed.read(), np.stack([table[6], table[0], table[3]]))


def test_cases(gpu: GpuBackend, rng: np.random.Generator) -> None:
    check_inputs(gpu, rng)


def test_a_replay_reads_what_the_host_wrote_last(gpu: GpuBackend, rng: np.random.Generator) -> None:
    """From page-locked memory: pieces, address and token differ each time, the graph is one."""
    h, vocabulary, most = 40, 11, 4
    pinned = gpu.alloc_host_pinned(16 + 16 * most)
    at, view = gpu.host_ptr_to_device(pinned), gpu.pinned_view(pinned, 16 + 16 * most)
    given = ops.Given(at.offset(16), at.offset(12), at, at.offset(8))
    table, rows = any_bits(rng, vocabulary, h), [any_bits(rng, h) for _ in range(4)]
    on_device, sources = upload(gpu, table), [upload(gpu, row) for row in rows]
    slab, hidden, embed = Output(gpu, (16 * most,), U8), Output(gpu, (h,)), Output(gpu, (h,))
    kernel, stream = gpu.kernel(*NAME), gpu.create_stream()

    def launch() -> None:
        ops.spark_propose_inputs(
            gpu, kernel, given, on_device, slab.ptr, hidden.ptr, embed.ptr, 1, 2 * h, h, stream
        )  # fmt: skip

    def write(pieces: int, source: DevicePtr, token: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        view[:8] = np.array([source.address], "<u8").view(np.uint8)
        view[8:16] = np.array([token, pieces], "<u4").view(np.uint8)
        view[16:] = rng.integers(0, 256, 16 * most, np.uint8)
        return view[16:].copy()

    write(0, sources[0], 0)
    launch()
    gpu.synchronize(stream)
    gpu.begin_capture(stream)
    launch()
    graph = gpu.end_capture(stream)
    kept = slab.read()
    for pieces, row, token in ((2, 1, 10), (most, 2, 0), (1, 3, 5)):
        written = write(pieces, sources[row], token)
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        kept[: 16 * pieces] = written[: 16 * pieces]
        assert_same_bits(slab.read(), kept, f"{pieces} pieces")
        assert_same_bits(hidden.read(), rows[row])
        assert_same_bits(embed.read(), table[token])
    gpu.destroy_graph(graph)
    gpu.destroy_stream(stream)
    gpu.free_host_pinned(pinned, 16 + 16 * most)


@pytest.mark.host_only("only a backend that runs references looks behind addresses in memory before the rows are read")
def test_addresses_and_tokens_beyond_memory_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    h, stream, kernel = 8, gpu.default_stream(), gpu.kernel(*NAME)
    table, row = upload(gpu, any_bits(rng, 5, h)), upload(gpu, any_bits(rng, h))
    out = [Output(gpu, (16,), U8), Output(gpu, (h,)), Output(gpu, (h,))]
    for source, token, parameter in ((row, 5, "embed_table"), (row.offset(2), 4, "sources"), (row, 4, "")):
        given = ops.Given(
            upload(gpu, np.zeros(16, np.uint8)), upload(gpu, np.ones(1, np.uint32)),
            upload(gpu, np.array([source.address], np.uint64)), upload(gpu, np.array([token], np.uint32)),
        )  # fmt: skip

        def launch(given: ops.Given = given) -> None:
            ops.spark_propose_inputs(gpu, kernel, given, table, *(o.ptr for o in out), 1, 2 * h, h, stream)

        if parameter:
            with pytest.raises(ArgumentPointerError, match=parameter):
                launch()
        else:
            launch()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "h", "name"), [(0, 8, 4, "rows"), (1, 7, 4, "row_bytes"), (1, 8, 0, "h")]
)
def test_numbers_that_make_no_launch(gpu: GpuBackend, rows: int, row_bytes: int, h: int, name: str) -> None:
    ptr = upload(gpu, np.zeros(64, np.uint8))
    given, kernel = ops.Given(ptr, ptr, ptr, ptr), gpu.kernel(*NAME)
    with pytest.raises(InvalidArgumentError, match=name):
        ops.spark_propose_inputs(gpu, kernel, given, ptr, ptr, ptr, ptr, rows, row_bytes, h, gpu.default_stream())
