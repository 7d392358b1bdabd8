# SPDX-License-Identifier: AGPL-3.0-only
"""One capture on several streams, and captures beside other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from spark_py.runtime import GpuBackend, GraphHandle
from spark_py.runtime.errors import (
    CaptureStateError,
    FreedPointerError,
    IllegalDuringCaptureError,
    SparkError,
)

from .support import Concat, capture, in_thread, is_poison, poisoned, read, refused, second_backend

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
    graph = capture(gpu, a, lambda: fork.fill(1, a))
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

    def record(index: int) -> None:
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

    threads = [threading.Thread(target=record, args=(index,)) for index in range(2)]
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
    graph = capture(other, other.default_stream(), work.launch)
    other.launch_graph(graph, other.default_stream())
    other.begin_capture(other.default_stream())
    other.close()
    assert other.closed
