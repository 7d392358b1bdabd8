# SPDX-License-Identifier: AGPL-3.0-only
"""Captures: what may be recorded, and what ends a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py.runtime import GpuBackend, GraphHandle, KernelLaunch
from spark_py.runtime.errors import (
    ArityError,
    CaptureStateError,
    IllegalDuringCaptureError,
    NullHandleError,
    OutOfBoundsError,
    SparkError,
)

from .support import BF16, Concat, busy, capture, is_poison, poisoned, read, refused, second_backend

# ---------------------------------------------------------------- recording and replaying


def test_a_capture_runs_nothing_and_a_replay_does(gpu: GpuBackend, work: Concat, stream: int) -> None:
    graph = capture(gpu, stream, lambda: work.launch(stream))
    assert graph
    assert not graph.is_null
    assert work.untouched
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    gpu.destroy_graph(graph)


def test_a_replay_reads_memory_anew(gpu: GpuBackend, work: Concat, stream: int, rng: np.random.Generator) -> None:
    graph = capture(gpu, stream, lambda: work.launch(stream))
    for _ in range(3):
        fresh = rng.standard_normal(work.n).astype(BF16)
        gpu.copy_h2d(fresh, work.a)
        work.reset()
        gpu.launch_graph(graph, stream)
        assert work.result == fresh.tobytes() + work.right.tobytes()
    gpu.destroy_graph(graph)


def test_every_device_operation_can_be_recorded(gpu: GpuBackend, work: Concat, stream: int) -> None:
    n = 4 * work.n
    copy, rows, event = poisoned(gpu, n), poisoned(gpu, 40), gpu.create_event()

    def body() -> None:
        KernelLaunch(gpu, work.kernel).grid(work.grid).block(work.BLOCK).arg_ptr(work.a).arg_ptr(work.b).arg_ptr(
            work.out
        ).arg_u32(work.n).launch(stream)
        gpu.copy_d2d_async(work.out, copy, n, stream)
        gpu.copy_d2d_2d_async(work.out, 20, rows, 10, 10, 4, stream)
        gpu.memset_async(copy, 3, 8, stream)
        gpu.record_event(event, stream)
        gpu.stream_wait_event(stream, event)

    graph = capture(gpu, stream, body)
    assert work.untouched
    assert is_poison(gpu, copy, n)
    gpu.launch_graph(graph, stream)
    assert read(gpu, copy, n) == b"\3" * 8 + work.expected[8:]
    want = work.expected
    assert read(gpu, rows, 40) == b"".join(want[20 * row : 20 * row + 10] for row in range(4))
    gpu.destroy_graph(graph)
    gpu.destroy_event(event)


def test_replay_on_another_stream_and_in_order(gpu: GpuBackend, stream: int) -> None:
    ptr, other = poisoned(gpu, 64), gpu.create_stream()
    graph = capture(gpu, stream, lambda: gpu.memset_async(ptr, 2, 64, stream))
    busy(gpu, other)
    gpu.memset_async(ptr, 1, 64, other)
    gpu.launch_graph(graph, other)
    gpu.copy_d2d_async(ptr, ptr.offset(32), 16, other)
    assert read(gpu, ptr, 64) == b"\2" * 64
    gpu.launch_graph(graph, gpu.default_stream())
    gpu.synchronize(gpu.default_stream())
    gpu.destroy_graph(graph)
    gpu.destroy_stream(other)


def test_the_default_stream_can_capture(gpu: GpuBackend, work: Concat) -> None:
    graph = capture(gpu, gpu.default_stream(), work.launch)
    assert work.untouched
    gpu.launch_graph(graph, gpu.default_stream())
    assert work.result == work.expected
    gpu.destroy_graph(graph)


def test_an_empty_capture(gpu: GpuBackend, stream: int) -> None:
    graph = capture(gpu, stream, lambda: None)
    gpu.launch_graph(graph, stream)
    gpu.synchronize(stream)
    gpu.destroy_graph(graph)


def test_what_captures(gpu: GpuBackend, stream: int) -> None:
    assert not gpu.stream_is_capturing(stream)
    gpu.begin_capture(stream)
    assert gpu.stream_is_capturing(stream)
    assert not gpu.stream_is_capturing(gpu.default_stream())
    gpu.abort_capture_if_active(stream)
    assert not gpu.stream_is_capturing(stream)
    gpu.abort_capture_if_active(stream)
    gpu.synchronize(stream)


def test_an_aborted_capture_leaves_nothing(gpu: GpuBackend, work: Concat, stream: int) -> None:
    gpu.begin_capture(stream)
    work.launch(stream)
    gpu.abort_capture_if_active(stream)
    gpu.synchronize(stream)
    assert work.untouched
    with refused(CaptureStateError, "without begin_capture"):
        gpu.end_capture(stream)
    graph = capture(gpu, stream, lambda: work.launch(stream))
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    gpu.destroy_graph(graph)


# ---------------------------------------------------------------- what a capture refuses

Illegal = Callable[[GpuBackend, Concat, int, int], object]
"""(gpu, work, capturing stream, event)"""
ILLEGAL: dict[str, tuple[Illegal, str]] = {
    "alloc": (lambda gpu, work, s, e: gpu.alloc(64), "before begin_capture"),
    "alloc_managed": (lambda gpu, work, s, e: gpu.alloc_managed(64), "before begin_capture"),
    "alloc_host_pinned": (lambda gpu, work, s, e: gpu.alloc_host_pinned(64), "before begin_capture"),
    "free": (lambda gpu, work, s, e: gpu.free(work.a), "after end_capture"),
    "sweep_unreleased": (lambda gpu, work, s, e: gpu.sweep_unreleased(), "after end_capture"),
    "copy_h2d": (lambda gpu, work, s, e: gpu.copy_h2d(b"12345678", work.a), "async"),
    "copy_d2h": (lambda gpu, work, s, e: gpu.copy_d2h(work.a, bytearray(8)), "async"),
    "copy_d2h_on_stream": (lambda gpu, work, s, e: gpu.copy_d2h_on_stream(work.a, bytearray(8), s), "async"),
    "copy_d2d": (lambda gpu, work, s, e: gpu.copy_d2d(work.a, work.b, 8), "async"),
    "memset": (lambda gpu, work, s, e: gpu.memset(work.out, 0, 8), "memset_async"),
    "copy_h2d_async": (lambda gpu, work, s, e: gpu.copy_h2d_async(b"12345678", work.a, s), "before begin_capture"),
    "copy_h2d_async_retained": (
        lambda gpu, work, s, e: gpu.copy_h2d_async_retained(b"12345678", work.a, s),
        "alloc_host_pinned",
    ),
    "copy_d2h_async": (lambda gpu, work, s, e: gpu.copy_d2h_async(work.a, bytearray(8), s), "alloc_host_pinned"),
    "synchronize": (lambda gpu, work, s, e: gpu.synchronize(s), "after end_capture"),
    "event_synchronize": (lambda gpu, work, s, e: gpu.event_synchronize(e), "after end_capture"),
    "event_query": (lambda gpu, work, s, e: gpu.event_query(e), "after end_capture"),
    "event_elapsed_ms": (lambda gpu, work, s, e: gpu.event_elapsed_ms(e, e), "after end_capture"),
    "stream_wait_event": (lambda gpu, work, s, e: gpu.stream_wait_event(s, e), "before begin_capture"),
    "destroy_stream": (lambda gpu, work, s, e: gpu.destroy_stream(s), "capture first"),
    "launch_graph": (lambda gpu, work, s, e: gpu.launch_graph(_EMPTY["graph"], s), "outside captures"),
}
_EMPTY: dict[str, GraphHandle] = {}


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_operations(gpu: GpuBackend, work: Concat, stream: int, name: str) -> None:
    event = gpu.create_event(timing=True)
    gpu.record_event(event, gpu.default_stream())
    gpu.synchronize(gpu.default_stream())
    _EMPTY["graph"] = capture(gpu, stream, lambda: None)
    before = gpu.live_bytes()
    operation, way_out = ILLEGAL[name]
    gpu.begin_capture(stream)
    work.launch(stream)
    with refused(IllegalDuringCaptureError, name, way_out) as caught:
        operation(gpu, work, stream, event)
    assert caught.value.operation.startswith(name)
    # The capture is over, and nothing of it ran.
    assert not gpu.stream_is_capturing(stream)
    assert gpu.live_bytes() == before
    # The next call works.
    gpu.synchronize(stream)
    assert work.untouched
    # The first error is kept for end_capture, once.
    with refused(CaptureStateError, name) as ended:
        gpu.end_capture(stream)
    assert ended.value.__cause__ is caught.value
    with refused(CaptureStateError, "without begin_capture"):
        gpu.end_capture(stream)
    # And the stream captures again.
    graph = capture(gpu, stream, lambda: work.launch(stream))
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    for each in (graph, _EMPTY.pop("graph")):
        gpu.destroy_graph(each)
    gpu.destroy_event(event)


def test_work_on_another_stream_is_not_recorded(gpu: GpuBackend, stream: int) -> None:
    ptr, other = poisoned(gpu, 64), gpu.create_stream()
    gpu.begin_capture(stream)
    gpu.memset_async(ptr, 1, 64, other)
    with refused(IllegalDuringCaptureError, "synchronize"):
        gpu.synchronize(other)
    assert read(gpu, ptr, 64) == b"\1" * 64
    gpu.destroy_stream(other)


def test_the_first_error_is_the_one_that_is_kept(gpu: GpuBackend, work: Concat, stream: int) -> None:
    gpu.begin_capture(stream)
    with pytest.raises(ArityError) as first:
        work.launch(stream, args=work.args[:-1])
    with pytest.raises(OutOfBoundsError):
        gpu.memset_async(work.out, 0, 1 << 20, stream)
    with pytest.raises(CaptureStateError) as ended:
        gpu.end_capture(stream)
    assert ended.value.__cause__ is first.value


@pytest.mark.parametrize(
    "wrong",
    [
        lambda gpu, work, s: work.launch(s, args=work.args[:-1]),
        lambda gpu, work, s: work.launch(s, grid=(0, 1, 1)),
        lambda gpu, work, s: gpu.memset_async(work.out, 0, 1 << 20, s),
        lambda gpu, work, s: gpu.memset_async(work.out, 256, 1, s),
        lambda gpu, work, s: gpu.kernel("residual_add", "no_such_kernel"),
    ],
)
def test_any_error_ends_the_capture(gpu: GpuBackend, work: Concat, stream: int, wrong: Any) -> None:
    gpu.begin_capture(stream)
    with pytest.raises(SparkError):
        wrong(gpu, work, stream)
    assert not gpu.stream_is_capturing(stream)
    gpu.synchronize(stream)
    gpu.abort_capture_if_active(stream)
    with refused(CaptureStateError, "without begin_capture"):
        gpu.end_capture(stream)


def test_an_error_of_the_caller_leaves_the_capture(gpu: GpuBackend, work: Concat, stream: int) -> None:
    """An exception that is not ours ends nothing: the caller aborts, as the engine's rule is."""
    with pytest.raises(ZeroDivisionError):
        capture(gpu, stream, lambda: 1 // 0)
    assert gpu.stream_is_capturing(stream)
    gpu.abort_capture_if_active(stream)
    gpu.free(gpu.alloc(8))


# ---------------------------------------------------------------- lookups


def test_a_lookup_that_has_to_load(gpu: GpuBackend) -> None:
    with second_backend(gpu) as fresh:
        stream = fresh.default_stream()
        fresh.begin_capture(stream)
        with refused(IllegalDuringCaptureError, "residual_add::bf16_concat", "before begin_capture"):
            fresh.kernel("residual_add", "bf16_concat")
        with refused(CaptureStateError, "residual_add"):
            fresh.end_capture(stream)
        kernel = fresh.kernel("residual_add", "bf16_concat")
        fresh.begin_capture(stream)
        assert fresh.kernel("residual_add", "bf16_concat") == kernel
        assert fresh.kernel("residual_add", "bf16_residual_add")  # its module is there
        fresh.destroy_graph(fresh.end_capture(stream))


def test_an_optional_kernel_that_is_missing(gpu: GpuBackend, work: Concat, stream: int) -> None:
    gpu.begin_capture(stream)
    assert gpu.try_kernel("no_such_module", "x").is_null
    assert gpu.try_kernel("residual_add", "no_such_kernel").is_null
    assert gpu.try_kernel("residual_add", "bf16_concat")
    assert gpu.stream_is_capturing(stream)
    gpu.destroy_graph(gpu.end_capture(stream))


# ---------------------------------------------------------------- begin and end


def test_begin_twice(gpu: GpuBackend, stream: int) -> None:
    gpu.begin_capture(stream)
    with refused(CaptureStateError, "capturing already") as caught:
        gpu.begin_capture(stream)
    with pytest.raises(CaptureStateError) as ended:
        gpu.end_capture(stream)
    assert ended.value.__cause__ is caught.value
    gpu.synchronize(stream)


def test_a_second_capture_on_one_thread(gpu: GpuBackend, stream: int) -> None:
    gpu.begin_capture(gpu.default_stream())
    with refused(CaptureStateError, "end that capture first"):
        gpu.begin_capture(stream)
    assert not gpu.stream_is_capturing(stream)
    with pytest.raises(CaptureStateError):
        gpu.end_capture(gpu.default_stream())


def test_end_without_begin(gpu: GpuBackend, stream: int) -> None:
    with refused(CaptureStateError, "without begin_capture"):
        gpu.end_capture(stream)
    gpu.synchronize(stream)


@pytest.mark.parametrize("name", ["begin_capture", "end_capture", "abort_capture_if_active", "stream_is_capturing"])
def test_stream_zero(gpu: GpuBackend, name: str) -> None:
    with refused(NullHandleError, "legacy"):
        getattr(gpu, name)(0)
