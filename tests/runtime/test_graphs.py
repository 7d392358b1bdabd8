# SPDX-License-Identifier: AGPL-3.0-only
"""Graphs: what a replay looks at again, and how long a graph lives."""

from __future__ import annotations

import numpy as np
import pytest

from spark_py.runtime import GpuBackend, GraphHandle, HostPtr
from spark_py.runtime.errors import (
    ForeignHandleError,
    FreedPointerError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    NullHandleError,
    ReleasedHandleError,
)

from .support import Concat, busy, capture, is_poison, poisoned, read, refused, second_backend

# ---------------------------------------------------------------- graphs and their memory


def test_replay_after_free(gpu: GpuBackend, work: Concat, stream: int) -> None:
    graph = capture(gpu, stream, lambda: work.launch(stream))
    gpu.launch_graph(graph, stream)
    gpu.free(gpu.alloc(64))  # of no concern to the graph
    gpu.launch_graph(graph, stream)
    gpu.free(work.b)
    work.reset()
    with refused(FreedPointerError, "'b'", "freed") as caught:
        gpu.launch_graph(graph, stream)
    assert caught.value.address == work.b.address
    assert work.untouched
    # Another allocation at that address does not mend it: it is somebody else's.
    again = [gpu.alloc(2 * work.n) for _ in range(8)]
    with refused(FreedPointerError, "'b'"):
        gpu.launch_graph(graph, stream)
    assert work.untouched
    assert again
    gpu.destroy_graph(graph)


@pytest.mark.parametrize("which", ["src", "dst"])
@pytest.mark.parametrize("how", ["memset", "d2d", "2d"])
def test_copies_and_fills_of_freed_memory(gpu: GpuBackend, stream: int, how: str, which: str) -> None:
    src, dst = poisoned(gpu, 64), poisoned(gpu, 64)
    used = {"src": src, "dst": dst}[which]
    graph = capture(
        gpu,
        stream,
        {
            "memset": lambda: gpu.memset_async(used, 0, 8, stream),
            "d2d": lambda: gpu.copy_d2d_async(src, dst, 64, stream),
            "2d": lambda: gpu.copy_d2d_2d_async(src, 8, dst, 8, 4, 4, stream),
        }[how],
    )
    gpu.free(used)
    with pytest.raises(FreedPointerError):
        gpu.launch_graph(graph, stream)
    gpu.destroy_graph(graph)


def test_pinned_memory_is_read_again_at_each_replay(gpu: GpuBackend, stream: int) -> None:
    ptr, host = poisoned(gpu, 64), gpu.alloc_host_pinned(192)
    source, target = gpu.pinned_view(HostPtr(host + 64), 64), gpu.pinned_view(HostPtr(host + 128), 64)

    def body() -> None:
        gpu.copy_h2d_async_retained(source, ptr, stream)
        gpu.copy_d2h_async(ptr, target, stream)

    graph = capture(gpu, stream, body)
    assert is_poison(gpu, ptr, 64)
    for value in (1, 2, 3):
        source[:] = value
        gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        assert read(gpu, ptr, 64) == target.tobytes() == bytes([value]) * 64
    gpu.free_host_pinned(host, 192)
    with refused(FreedPointerError, "freed"):
        gpu.launch_graph(graph, stream)
    gpu.destroy_graph(graph)


def test_host_memory_past_its_pinned_allocation(gpu: GpuBackend, stream: int) -> None:
    ptr, host = poisoned(gpu, 64), gpu.alloc_host_pinned(32)
    whole = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 33).from_address(host))
    gpu.begin_capture(stream)
    with refused(IllegalDuringCaptureError, "alloc_host_pinned"):
        gpu.copy_h2d_async_retained(whole, ptr, stream)
    gpu.free_host_pinned(host, 32)


def test_destroyed_graphs(gpu: GpuBackend, work: Concat, stream: int) -> None:
    graph = capture(gpu, stream, lambda: work.launch(stream))
    busy(gpu, stream)
    gpu.launch_graph(graph, stream)
    gpu.destroy_graph(graph)  # waits for the replay
    assert work.result == work.expected
    for call in (lambda: gpu.destroy_graph(graph), lambda: gpu.launch_graph(graph, stream)):
        with refused(ReleasedHandleError, "destroyed"):
            call()
    gpu.destroy_graph(GraphHandle(0))
    with refused(NullHandleError, "0"):
        gpu.launch_graph(GraphHandle(0), stream)
    for wrong in (None, 7, work.kernel):
        with refused(InvalidArgumentError, "GraphHandle"):
            gpu.launch_graph(wrong, stream)  # type: ignore[arg-type]


def test_graphs_of_another_backend(gpu: GpuBackend, rng: np.random.Generator, stream: int) -> None:
    with second_backend(gpu) as other:
        theirs = Concat(other, rng)
        graph = capture(other, other.default_stream(), theirs.launch)
        for call in (lambda: gpu.launch_graph(graph, stream), lambda: gpu.destroy_graph(graph)):
            with refused(ForeignHandleError, "another backend"):
                call()
        other.launch_graph(graph, other.default_stream())
        assert theirs.result == theirs.expected
        other.destroy_graph(graph)


def test_a_graph_keeps_its_values(gpu: GpuBackend, work: Concat, stream: int) -> None:
    """Arguments are taken when the launch is recorded; later launches of the same plan do not reach into the graph."""
    graph = capture(gpu, stream, lambda: work.launch(stream))
    elsewhere = poisoned(gpu, 4 * work.n)
    work.launch(stream, args=[work.b, work.a, elsewhere, work.n])
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    assert read(gpu, elsewhere, 4 * work.n) == work.right.tobytes() + work.left.tobytes()
    gpu.destroy_graph(graph)
