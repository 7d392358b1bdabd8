# SPDX-License-Identifier: AGPL-3.0-only
"""Captures and graphs: what may be recorded, what ends a recording, and what a replay looks at again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from spark_py.runtime import GpuBackend, GraphHandle, HostPtr, KernelLaunch
from spark_py.runtime.errors import (
    ArityError,
    CaptureStateError,
    ForeignHandleError,
    FreedPointerError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    NullHandleError,
    OutOfBoundsError,
    ReleasedHandleError,
    SparkError,
)

from .support import BF16, Concat, busy, is_poison, poisoned, read, refused, second_backend


@pytest.fixture
def work(gpu: GpuBackend, rng: np.random.Generator) -> Concat:
    return Concat(gpu, rng)


@pytest.fixture
def stream(gpu: GpuBackend) -> Iterator[int]:
    made = gpu.create_stream()
    yield made
    if not gpu.closed:
        gpu.abort_capture_if_active(made)
        gpu.destroy_stream(made)


def _graph(gpu: GpuBackend, stream: int, body: Callable[[], object]) -> GraphHandle:
    gpu.begin_capture(stream)
    body()
    return gpu.end_capture(stream)


def in_thread(body: Callable[[], object]) -> BaseException | None:
    """Run `body` on a thread of its own; what it raised, if anything."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# ---------------------------------------------------------------- recording and replaying


def test_a_capture_runs_nothing_and_a_replay_does(gpu: GpuBackend, work: Concat, stream: int) -> None:
    graph = _graph(gpu, stream, lambda: work.launch(stream))
    assert graph
    assert not graph.is_null
    assert work.untouched
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    gpu.destroy_graph(graph)


def test_a_replay_reads_memory_anew(gpu: GpuBackend, work: Concat, stream: int, rng: np.random.Generator) -> None:
    graph = _graph(gpu, stream, lambda: work.launch(stream))
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

    graph = _graph(gpu, stream, body)
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
    graph = _graph(gpu, stream, lambda: gpu.memset_async(ptr, 2, 64, stream))
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
    graph = _graph(gpu, gpu.default_stream(), work.launch)
    assert work.untouched
    gpu.launch_graph(graph, gpu.default_stream())
    assert work.result == work.expected
    gpu.destroy_graph(graph)


def test_an_empty_capture(gpu: GpuBackend, stream: int) -> None:
    graph = _graph(gpu, stream, lambda: None)
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
    graph = _graph(gpu, stream, lambda: work.launch(stream))
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
    _EMPTY["graph"] = _graph(gpu, stream, lambda: None)
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
    graph = _graph(gpu, stream, lambda: work.launch(stream))
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
        _graph(gpu, stream, lambda: 1 // 0)
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


# ---------------------------------------------------------------- graphs and their memory


def test_replay_after_free(gpu: GpuBackend, work: Concat, stream: int) -> None:
    graph = _graph(gpu, stream, lambda: work.launch(stream))
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
    graph = _graph(
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

    graph = _graph(gpu, stream, body)
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
    graph = _graph(gpu, stream, lambda: work.launch(stream))
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
        graph = _graph(other, other.default_stream(), theirs.launch)
        for call in (lambda: gpu.launch_graph(graph, stream), lambda: gpu.destroy_graph(graph)):
            with refused(ForeignHandleError, "another backend"):
                call()
        other.launch_graph(graph, other.default_stream())
        assert theirs.result == theirs.expected
        other.destroy_graph(graph)


def test_a_graph_keeps_its_values(gpu: GpuBackend, work: Concat, stream: int) -> None:
    """Arguments are taken when the launch is recorded; later launches of the same plan do not reach into the graph."""
    graph = _graph(gpu, stream, lambda: work.launch(stream))
    elsewhere = poisoned(gpu, 4 * work.n)
    work.launch(stream, args=[work.b, work.a, elsewhere, work.n])
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    assert read(gpu, elsewhere, 4 * work.n) == work.right.tobytes() + work.left.tobytes()
    gpu.destroy_graph(graph)


# ---------------------------------------------------------------- several streams in one capture


class Fork:
    """Streams and events of a test, returned at its end."""

    def __init__(self, gpu: GpuBackend) -> None:
        self.gpu = gpu
        self.streams = [gpu.create_stream() for _ in range(3)]
        self.events = [gpu.create_event() for _ in range(6)]
        self.ptr = poisoned(gpu, 256)

    def fill(self, value: int, stream: int) -> None:
        self.gpu.memset_async(self.ptr.offset(64 * (value - 1)), value, 64, stream)

    def link(self, event: int, source: int, target: int) -> None:
        self.gpu.record_event(event, source)
        self.gpu.stream_wait_event(target, event)


@pytest.fixture
def fork(gpu: GpuBackend) -> Iterator[Fork]:
    made = Fork(gpu)
    yield made
    for stream in made.streams:
        gpu.abort_capture_if_active(stream)
        gpu.destroy_stream(stream)
    for event in made.events:
        gpu.destroy_event(event)


def test_fork_and_join(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    fork.fill(1, a)
    fork.link(fork.events[0], a, b)
    assert gpu.stream_is_capturing(b)
    fork.fill(2, b)
    fork.fill(3, a)
    fork.link(fork.events[1], b, a)
    fork.fill(4, a)
    graph = gpu.end_capture(a)
    assert not gpu.stream_is_capturing(b)
    gpu.synchronize(b)
    assert is_poison(gpu, fork.ptr, 256)
    gpu.launch_graph(graph, a)
    assert read(gpu, fork.ptr, 256) == b"".join(bytes([v]) * 64 for v in (1, 2, 3, 4))
    gpu.destroy_graph(graph)


def test_join_through_a_third_stream(gpu: GpuBackend, fork: Fork) -> None:
    a, b, c = fork.streams
    gpu.begin_capture(a)
    fork.link(fork.events[0], a, b)
    fork.link(fork.events[1], b, c)
    fork.fill(1, b)
    fork.fill(2, c)
    fork.link(fork.events[2], c, b)
    fork.link(fork.events[3], b, a)  # covers c too, through b
    graph = gpu.end_capture(a)
    gpu.launch_graph(graph, a)
    assert read(gpu, fork.ptr, 128) == b"\1" * 64 + b"\2" * 64
    gpu.destroy_graph(graph)


def _unjoined(gpu: GpuBackend, fork: Fork, stream: int) -> None:
    a = fork.streams[0]
    with refused(CaptureStateError, hex(stream), "does not wait"):
        gpu.end_capture(a)
    for each in fork.streams:
        assert not gpu.stream_is_capturing(each)
        gpu.synchronize(each)
    assert is_poison(gpu, fork.ptr, 256)
    graph = _graph(gpu, a, lambda: fork.fill(1, a))
    gpu.destroy_graph(graph)


def test_unjoined_fork(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    fork.link(fork.events[0], a, b)
    fork.fill(1, b)
    _unjoined(gpu, fork, b)


def test_work_after_the_join_is_unjoined(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    fork.link(fork.events[0], a, b)
    fork.fill(1, b)
    fork.link(fork.events[1], b, a)
    fork.fill(2, b)
    _unjoined(gpu, fork, b)


def test_an_event_covers_what_came_before_it(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    fork.link(fork.events[0], a, b)
    fork.fill(1, b)
    gpu.record_event(fork.events[1], b)
    fork.fill(2, b)
    gpu.stream_wait_event(a, fork.events[1])
    _unjoined(gpu, fork, b)


def test_only_the_origin_ends(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    fork.link(fork.events[0], a, b)
    with refused(CaptureStateError, "joined the capture"):
        gpu.end_capture(b)
    assert not gpu.stream_is_capturing(a)
    gpu.synchronize(b)


def test_an_error_frees_the_joined_streams_too(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    fork.link(fork.events[0], a, b)
    with pytest.raises(IllegalDuringCaptureError):
        gpu.alloc(8)
    for each in (a, b):
        gpu.synchronize(each)
        fork.fill(1, each)
    assert read(gpu, fork.ptr, 64) == b"\1" * 64


def test_events_of_a_capture_mark_no_time(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    event = fork.events[0]
    gpu.begin_capture(a)
    gpu.record_event(event, a)
    assert isinstance(in_thread(lambda: gpu.event_query(event)), CaptureStateError)
    assert gpu.stream_is_capturing(a)  # a question from elsewhere is no error inside the capture
    gpu.destroy_graph(gpu.end_capture(a))
    for call in (
        lambda: gpu.event_query(event),
        lambda: gpu.event_synchronize(event),
        lambda: gpu.stream_wait_event(b, event),
    ):
        with refused(CaptureStateError, "inside a capture"):
            call()
    gpu.record_event(event, a)
    gpu.event_synchronize(event)
    gpu.stream_wait_event(b, event)


def test_an_event_recorded_again_outside_does_not_join(gpu: GpuBackend, fork: Fork) -> None:
    a, b, c = fork.streams
    event = fork.events[0]
    gpu.begin_capture(a)
    gpu.record_event(event, a)
    gpu.record_event(event, c)
    gpu.stream_wait_event(b, event)
    assert not gpu.stream_is_capturing(b)
    gpu.destroy_graph(gpu.end_capture(a))


def test_an_event_destroyed_in_a_capture(gpu: GpuBackend, fork: Fork) -> None:
    a, b, _ = fork.streams
    gpu.begin_capture(a)
    event = gpu.create_event()
    gpu.record_event(event, a)
    gpu.destroy_event(event)
    fresh = gpu.create_event()  # may have the same number
    gpu.stream_wait_event(b, fresh)
    assert not gpu.stream_is_capturing(b)
    gpu.destroy_graph(gpu.end_capture(a))
    gpu.destroy_event(fresh)


# ---------------------------------------------------------------- threads


def test_begin_here_end_there(gpu: GpuBackend, work: Concat, stream: int) -> None:
    graphs: list[GraphHandle] = []
    gpu.begin_capture(stream)
    assert in_thread(lambda: work.launch(stream)) is None
    assert in_thread(lambda: graphs.append(gpu.end_capture(stream))) is None
    gpu.free(gpu.alloc(8))  # this thread is no longer bound by the rules
    gpu.launch_graph(graphs[0], stream)
    assert work.result == work.expected
    gpu.destroy_graph(graphs[0])


def test_a_thread_that_ends_leaves_its_rules_to_nobody(gpu: GpuBackend, stream: int) -> None:
    """The system hands thread identifiers out again; a new thread is not bound by a dead one's capture."""
    assert in_thread(lambda: gpu.begin_capture(stream)) is None
    for _ in range(20):
        assert in_thread(lambda: gpu.free(gpu.alloc(8))) is None
    assert gpu.stream_is_capturing(stream)
    gpu.abort_capture_if_active(stream)


def test_others_are_free_while_one_captures(gpu: GpuBackend, work: Concat, stream: int) -> None:
    """Allocation, free, synchronous copies and waits of other threads work and do not disturb the capture."""
    gpu.begin_capture(stream)
    work.launch(stream)

    def others() -> None:
        ptr = gpu.alloc(64)
        gpu.copy_h2d(bytes(range(64)), ptr)
        assert read(gpu, ptr, 64) == bytes(range(64))
        gpu.synchronize(gpu.default_stream())
        gpu.free(ptr)
        gpu.kernel("norm", "rms_norm")

    error = in_thread(others)
    assert error is None, repr(error)
    with refused(IllegalDuringCaptureError, "synchronize"):
        raise in_thread(lambda: gpu.synchronize(stream)) or AssertionError
    assert gpu.stream_is_capturing(stream)
    graph = gpu.end_capture(stream)
    assert work.untouched
    gpu.launch_graph(graph, stream)
    assert work.result == work.expected
    gpu.destroy_graph(graph)


def test_memory_freed_by_another_thread_during_the_capture(gpu: GpuBackend, work: Concat, stream: int) -> None:
    gpu.begin_capture(stream)
    work.launch(stream)
    assert in_thread(lambda: gpu.free(work.a)) is None
    graph = gpu.end_capture(stream)
    with refused(FreedPointerError, "'a'"):
        gpu.launch_graph(graph, stream)
    assert work.untouched
    gpu.destroy_graph(graph)


def test_wrong_work_from_another_thread_ends_the_capture(gpu: GpuBackend, work: Concat, stream: int) -> None:
    """The graph would lack it."""
    for wrong in (
        lambda: work.launch(stream, args=work.args[:-1]),
        lambda: gpu.memset_async(work.out, 0, 1 << 20, stream),
        lambda: gpu.copy_h2d_async(b"12345678", work.a, stream),
    ):
        gpu.begin_capture(stream)
        error = in_thread(wrong)
        assert isinstance(error, SparkError)
        with pytest.raises(CaptureStateError) as ended:
            gpu.end_capture(stream)
        assert ended.value.__cause__ is error


def test_two_threads_capture_at_once(gpu: GpuBackend, rng: np.random.Generator) -> None:
    both = threading.Barrier(2, timeout=60)
    works = [Concat(gpu, rng), Concat(gpu, rng)]
    streams = [gpu.create_stream(), gpu.create_stream()]
    graphs: list[GraphHandle | None] = [None, None]
    errors: list[BaseException] = []

    def capture(index: int) -> None:
        try:
            gpu.begin_capture(streams[index])
            both.wait()
            for _ in range(50):
                works[index].launch(streams[index])
            both.wait()
            if index == 0:
                with pytest.raises(IllegalDuringCaptureError):
                    gpu.alloc(8)
                with pytest.raises(CaptureStateError):
                    gpu.end_capture(streams[0])
                gpu.begin_capture(streams[0])
                works[0].launch(streams[0])
            both.wait()
            graphs[index] = gpu.end_capture(streams[index])
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=capture, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for work, graph, stream in zip(works, graphs, streams, strict=True):
        assert work.untouched
        assert graph is not None
        gpu.launch_graph(graph, stream)
        assert work.result == work.expected
        gpu.destroy_graph(graph)
        gpu.destroy_stream(stream)


def test_close_ends_captures(gpu: GpuBackend, rng: np.random.Generator) -> None:
    other = second_backend(gpu)
    work = Concat(other, rng)
    graph = _graph(other, other.default_stream(), work.launch)
    other.launch_graph(graph, other.default_stream())
    other.begin_capture(other.default_stream())
    other.close()
    assert other.closed
