# SPDX-License-Identifier: AGPL-3.0-only
"""Streams and events, ours and those of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.runtime import GpuBackend
from spark_py.runtime.errors import (
    ForeignHandleError,
    HandleError,
    InvalidArgumentError,
    NullHandleError,
    ReleasedHandleError,
)

from .support import Concat, busy, poisoned, read, refused, second_backend


class WithProtocol:
    """A stream as cuda.core, Numba or CuPy show theirs."""

    def __init__(self, raw: int) -> None:
        self.raw = raw

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.raw


class WithPtr:
    """A stream as CuPy and Torch (through a wrapper) show theirs."""

    def __init__(self, raw: int) -> None:
        self.ptr = raw


# ---------------------------------------------------------------- streams


def test_streams_are_distinct(gpu: GpuBackend) -> None:
    streams = [gpu.create_stream() for _ in range(4)]
    assert len({*streams, gpu.default_stream()}) == 5
    assert 0 not in streams
    assert gpu.default_stream() == gpu.default_stream() != 0
    for stream in streams:
        gpu.destroy_stream(stream)


def test_destroy_waits(gpu: GpuBackend) -> None:
    stream, ptr = gpu.create_stream(), poisoned(gpu, 64)
    busy(gpu, stream)
    gpu.memset_async(ptr, 5, 64, stream)
    gpu.destroy_stream(stream)
    assert read(gpu, ptr, 64) == b"\5" * 64


def test_destroyed_streams_are_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work, ptr, event, stream = Concat(gpu, rng), poisoned(gpu, 64), gpu.create_event(), gpu.create_stream()
    gpu.destroy_stream(stream)
    for call in (
        lambda: gpu.synchronize(stream),
        lambda: gpu.memset_async(ptr, 0, 64, stream),
        lambda: gpu.copy_h2d_async(b"12345678", ptr, stream),
        lambda: work.launch(stream),
        lambda: gpu.record_event(event, stream),
        lambda: gpu.stream_wait_event(stream, event),
        lambda: gpu.begin_capture(stream),
        lambda: gpu.destroy_stream(stream),
    ):
        with refused(ReleasedHandleError, "destroyed"):
            call()
    assert work.untouched
    gpu.destroy_event(event)


def test_the_default_stream_stays(gpu: GpuBackend) -> None:
    with refused(InvalidArgumentError, "default stream"):
        gpu.destroy_stream(gpu.default_stream())
    gpu.synchronize(gpu.default_stream())


@pytest.mark.parametrize("stream", [None, "0", 1.0, True, object()], ids=lambda s: type(s).__name__)
def test_what_is_no_stream(gpu: GpuBackend, rng: np.random.Generator, stream: Any) -> None:
    work = Concat(gpu, rng)
    for call in (
        lambda: gpu.synchronize(stream),
        lambda: gpu.memset_async(work.out, 0, 8, stream),
        lambda: gpu.launch_typed(work.kernel, work.grid, work.BLOCK, 0, stream, work.args),
        lambda: gpu.begin_capture(stream),
    ):
        with refused(InvalidArgumentError, "stream"):
            call()
    assert work.untouched


def test_the_legacy_stream_as_a_number(gpu: GpuBackend) -> None:
    ptr = poisoned(gpu, 8)
    for call in (gpu.synchronize, gpu.begin_capture, lambda s: gpu.memset_async(ptr, 0, 8, s)):
        with refused(NullHandleError, "legacy", "create_stream"):
            call(0)


def test_streams_of_another_backend(gpu: GpuBackend) -> None:
    with second_backend(gpu) as other:
        theirs = other.create_stream()
        for call in (gpu.synchronize, gpu.begin_capture, gpu.destroy_stream):
            with pytest.raises((ForeignHandleError, ReleasedHandleError)):  # as for events below
                call(theirs)
        other.synchronize(theirs)
        with refused(ForeignHandleError, "not a stream of this backend"):
            gpu.synchronize(2**60)  # no address of anything


@pytest.mark.parametrize("wrapper", [WithProtocol, WithPtr])
def test_stream_objects(gpu: GpuBackend, rng: np.random.Generator, wrapper: Any) -> None:
    """An object over a stream of ours is that stream; over one of another backend it is a foreign stream."""
    work, event = Concat(gpu, rng), gpu.create_event()
    with second_backend(gpu) as other:
        for owner in (gpu, other):
            work.reset()
            raw = owner.create_stream()
            stream = wrapper(raw)
            busy(owner, raw)
            work.launch(stream)
            gpu.record_event(event, stream)
            gpu.stream_wait_event(gpu.default_stream(), event)
            # A synchronous copy waits for work of ours on a foreign stream too.
            assert work.result == work.expected
            gpu.memset_async(work.out, 1, 4 * work.n, stream)
            gpu.synchronize(stream)
            assert work.result == b"\1" * 4 * work.n
        # Only streams of the backend itself can capture.
        with pytest.raises((InvalidArgumentError, HandleError)):
            gpu.begin_capture(wrapper(raw))
    gpu.destroy_event(event)


def test_a_foreign_stream_may_die_before_we_wait(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng)
    other = second_backend(gpu)
    work.launch(WithPtr(other.create_stream()))
    other.close()
    assert work.result == work.expected


@pytest.mark.parametrize("value", ["x", None, 1.5])
def test_stream_objects_without_a_handle(gpu: GpuBackend, value: Any) -> None:
    for wrapper in (WithProtocol, WithPtr):
        with refused(InvalidArgumentError, "stream"):
            gpu.synchronize(wrapper(value))


# ---------------------------------------------------------------- events


def test_events_order_streams(gpu: GpuBackend) -> None:
    first, second, ptr = gpu.create_stream(), gpu.create_stream(), poisoned(gpu, 64)
    event = gpu.create_event()
    busy(gpu, first)
    gpu.memset_async(ptr, 1, 64, first)
    gpu.record_event(event, first)
    gpu.stream_wait_event(second, event)
    gpu.memset_async(ptr, 2, 64, second)
    gpu.synchronize(second)
    assert gpu.event_query(event)
    assert read(gpu, ptr, 64) == b"\2" * 64
    gpu.destroy_event(event)
    gpu.destroy_stream(first)
    gpu.destroy_stream(second)


def test_event_synchronize_and_query(gpu: GpuBackend) -> None:
    stream, event, ptr = gpu.create_stream(), gpu.create_event(), poisoned(gpu, 64)
    assert gpu.event_query(event)  # nothing comes before an event that was never recorded
    gpu.event_synchronize(event)
    out = np.zeros(64, np.uint8)
    answers = set()
    for _ in range(20):
        busy(gpu, stream)
        gpu.memset_async(ptr, 1, 64, stream)
        gpu.record_event(event, stream)
        answers.add(gpu.event_query(event))
        if gpu.name == "host" or False in answers:
            break
    # The CPU's streams are eager. A GPU's work takes tens of milliseconds; twenty late questions are no chance.
    assert (False in answers) == (gpu.name == "cuda")
    gpu.copy_d2h_async(ptr, out, stream)
    gpu.record_event(event, stream)
    gpu.event_synchronize(event)
    assert gpu.event_query(event)
    assert out.tobytes() == b"\1" * 64
    gpu.destroy_event(event)
    gpu.destroy_stream(stream)


def test_elapsed(gpu: GpuBackend) -> None:
    start, end, plain = gpu.create_event(timing=True), gpu.create_event(timing=True), gpu.create_event()
    stream = gpu.default_stream()
    with refused(InvalidArgumentError, "never recorded"):
        gpu.event_elapsed_ms(start, end)
    gpu.record_event(start, stream)
    with refused(InvalidArgumentError, "never recorded"):
        gpu.event_elapsed_ms(start, end)
    busy(gpu, stream)
    gpu.record_event(end, stream)
    elapsed = gpu.event_elapsed_ms(start, end)  # waits by itself
    assert elapsed > 0
    assert gpu.event_elapsed_ms(end, start) <= 0
    gpu.record_event(plain, stream)
    with refused(InvalidArgumentError, "timing"):
        gpu.event_elapsed_ms(start, plain)
    for event in (start, end, plain):
        gpu.destroy_event(event)


def test_events_that_cannot_be_used(gpu: GpuBackend) -> None:
    stream, dead = gpu.default_stream(), gpu.create_event()
    gpu.destroy_event(dead)
    gpu.destroy_event(0)

    def calls(event: Any) -> list[Any]:
        return [
            lambda: gpu.record_event(event, stream),
            lambda: gpu.stream_wait_event(stream, event),
            lambda: gpu.event_synchronize(event),
            lambda: gpu.event_query(event),
            lambda: gpu.event_elapsed_ms(event, event),
        ]

    for call in [*calls(dead), lambda: gpu.destroy_event(dead)]:
        with refused(ReleasedHandleError, "destroyed"):
            call()
    for call in calls(0):
        with refused(NullHandleError, "create_event"):
            call()
    for event in (None, True, "e", 1.0, [1]):
        for call in calls(event):
            with refused(InvalidArgumentError, "event"):
                call()
    with second_backend(gpu) as other:
        theirs = other.create_event()
        # The driver may give a number again that an event of ours had: then it is known as destroyed.
        for call in [*calls(theirs), lambda: gpu.destroy_event(theirs)]:
            with pytest.raises((ForeignHandleError, ReleasedHandleError)):
                call()


def test_bind_to_thread(gpu: GpuBackend) -> None:
    gpu.bind_to_thread()
