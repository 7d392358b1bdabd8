# SPDX-License-Identifier: AGPL-3.0-only
"""Streams, events, capture and graphs."""

from __future__ import annotations

from collections.abc import Callable

from ..capture import Capture, Event, Graph
from ..errors import (
    CaptureStateError,
    ForeignHandleError,
    FreedPointerError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    NullHandleError,
    ReleasedHandleError,
    SparkError,
)
from ..gpu import GraphHandle, StreamLike
from .core import guarded, queued
from .interop import InteropOps

_AFTER = "do this after end_capture"


class StreamOps(InteropOps):
    """Everything of the trait's stream, event and graph groups."""

    # ------------------------------------------------------------ streams

    @guarded
    def default_stream(self) -> int:
        return self._default_stream

    @guarded
    def create_stream(self) -> int:
        stream = self._device.create_stream()
        with self._lock:
            self._streams.add(stream)
            self._dead_streams.discard(stream)
        return stream

    @guarded
    def destroy_stream(self, stream: int) -> None:
        raw = self._own_stream(stream)
        if raw == self._default_stream:
            raise InvalidArgumentError("stream", hex(raw), "the default stream lives as long as the backend")
        if raw in self._captures:
            raise IllegalDuringCaptureError("destroy_stream", "end or abort the stream's capture first")
        self._refuse_in_capture("destroy_stream", _AFTER)
        with self._wait_lock:
            with self._lock:
                if raw not in self._streams:
                    raise ReleasedHandleError(f"stream {raw:#x} was destroyed")
                self._dead_streams.add(raw)  # first: whoever looks without the lock finds it in one of the two
                self._streams.discard(raw)
                self._ended_captures.pop(raw, None)
            self._wait(raw)
            self._device.destroy_stream(raw)

    @guarded
    def synchronize(self, stream: StreamLike) -> None:
        raw = self._stream(stream)
        self._refuse_in_capture("synchronize", _AFTER)
        self._refuse_capturing(raw, "synchronize")
        self._wait(raw)

    # ------------------------------------------------------------ events

    @guarded
    def create_event(self, timing: bool = False) -> int:
        event = self._device.create_event(bool(timing))
        with self._lock:
            self._events[event] = Event(bool(timing))
            self._dead_events.discard(event)
        return event

    def _event(self, event: int) -> Event:
        if isinstance(event, bool) or not isinstance(event, int):
            raise InvalidArgumentError("event", event, "an int from create_event")
        found = self._events.get(event)
        if found is not None:
            return found
        if event == 0:
            raise NullHandleError("event is 0: create_event gives one")
        if event in self._dead_events:
            raise ReleasedHandleError(f"event {event:#x} was destroyed")
        raise ForeignHandleError(f"event {event:#x} is not an event of this backend ({self.name}:{self.ordinal})")

    def _host_event(self, event: int, operation: str) -> Event:
        """An event that the host may ask about: the driver refuses those whose last record was inside a capture."""
        found = self._event(event)
        self._refuse_in_capture(operation, _AFTER)
        if found.capture is not None:
            raise CaptureStateError(
                f"{operation} on event {event:#x}, which was last recorded inside a capture and so marks no point in "
                "time: record it outside"
            )
        return found

    @queued
    def record_event(self, event: int, stream: StreamLike) -> None:
        found, raw = self._event(event), self._stream(stream)
        self._device.record_event(event, raw)
        with self._lock:
            found.recorded, found.capture = True, self._captures.get(raw)
            if found.capture is not None:
                found.capture.record(event, raw)

    @guarded
    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        raw, found = self._stream(stream), self._event(event)
        with self._lock:
            here, source = self._captures.get(raw), found.capture
            over = source is not None and self._captures.get(source.origin) is not source
        if here is not None and source is not here:
            raise IllegalDuringCaptureError(
                "stream_wait_event on an event recorded outside the capture", "wait before begin_capture"
            )
        if over:
            raise CaptureStateError(
                f"stream_wait_event on event {event:#x}, which was last recorded inside a capture that is over: "
                "record it again"
            )
        if source is None:
            self._device.wait_event(raw, event)
            return
        with self._wait_lock:  # the stream may begin to capture here
            self._device.wait_event(raw, event)
            with self._lock:
                source.wait(raw, event)
                self._captures[raw] = source

    @guarded
    def event_synchronize(self, event: int) -> None:
        self._host_event(event, "event_synchronize")
        self._device.sync_event(event)

    @guarded
    def event_query(self, event: int) -> bool:
        self._host_event(event, "event_query")
        return self._device.query_event(event)

    @guarded
    def event_elapsed_ms(self, start: int, end: int) -> float:
        for event in (start, end):
            found = self._host_event(event, "event_elapsed_ms")
            if not found.timing:
                raise InvalidArgumentError("event", hex(event), "was created without timing=True")
            if not found.recorded:
                raise InvalidArgumentError("event", hex(event), "was never recorded")
            self._device.sync_event(event)
        return self._device.elapsed_ms(start, end)

    @guarded
    def destroy_event(self, event: int) -> None:
        if event == 0:
            return
        self._event(event)
        with self._lock:
            self._dead_events.add(event)  # first, as for streams
            if self._events.pop(event, None) is None:
                raise ReleasedHandleError(f"event {event:#x} was destroyed")
        self._device.destroy_event(event)

    @guarded
    def bind_to_thread(self) -> None:
        self._device.activate()

    # ------------------------------------------------------------ capture

    @guarded
    def begin_capture(self, stream: int) -> None:
        raw = self._own_stream(stream)
        with self._wait_lock:
            with self._lock:
                if raw in self._captures:
                    raise CaptureStateError(f"begin_capture on stream {raw:#x}, which is capturing already")
                if self._thread_capture() is not None:
                    raise CaptureStateError("begin_capture while this thread captures: end that capture first")
                self._ended_captures.pop(raw, None)
                capture = self._captures[raw] = Capture(raw)
            try:
                self._device.begin_capture(raw)
            except SparkError:
                self._forget_capture(capture)
                raise

    @guarded
    def end_capture(self, stream: int) -> GraphHandle:
        raw = self._own_stream(stream)
        with self._lock:
            failed = self._ended_captures.pop(raw, None)
            capture = self._captures.get(raw)
        if failed is not None and failed.error is not None:
            raise CaptureStateError(f"the capture ended at its first error: {failed.error}") from failed.error
        if capture is None:
            raise CaptureStateError(f"end_capture on stream {raw:#x} without begin_capture")
        if capture.origin != raw:
            raise CaptureStateError(f"end_capture on stream {raw:#x}, which joined the capture of {capture.origin:#x}")
        with self._wait_lock:
            if not self._forget_capture(capture):
                raise CaptureStateError(f"end_capture on stream {raw:#x}, whose capture another thread ended")
            unjoined = capture.unjoined()
            if unjoined:
                self._device.abort_capture(raw)
                left = ", ".join(map(hex, unjoined))
                raise CaptureStateError(
                    f"streams {left} joined the capture, and the origin does not wait for all of their work: record an "
                    "event there and let the origin wait for it"
                )
            graph = Graph(self._device.end_capture(raw), frozenset(capture.memory))
        with self._lock:
            number = next(self._handle_numbers)
            self._graphs[number] = graph
        return GraphHandle(number, self._id)

    @guarded
    def abort_capture_if_active(self, stream: int) -> None:
        raw = self._own_stream(stream)
        with self._lock:
            self._ended_captures.pop(raw, None)
            capture = self._captures.get(raw)
        with self._wait_lock:
            if capture is not None and self._forget_capture(capture):
                self._device.abort_capture(capture.origin)

    @guarded
    def stream_is_capturing(self, stream: int) -> bool:
        return self._own_stream(stream) in self._captures

    # ------------------------------------------------------------ graphs

    def _graph(self, graph: GraphHandle) -> Graph:
        if not isinstance(graph, GraphHandle):
            raise InvalidArgumentError("graph", graph, "a GraphHandle")
        if graph.value == 0:
            raise NullHandleError("graph handle is 0: no graph was captured")
        if graph.owner != self._id:
            raise ForeignHandleError(f"graph {graph.value} belongs to another backend than {self.name}:{self.ordinal}")
        found = self._graphs.get(graph.value)
        if found is None:
            raise ReleasedHandleError(f"graph {graph.value} was destroyed")
        return found

    @guarded
    def launch_graph(self, graph: GraphHandle, stream: StreamLike) -> None:
        found, raw = self._graph(graph), self._stream(stream)
        if raw in self._captures:
            raise IllegalDuringCaptureError("launch_graph", "launch graphs outside captures")
        removals = self._memory.removals + self._pinned.removals
        if found.checked_at != removals:
            with self._lock:
                gone = [a for a in found.memory if not (self._memory.is_live(a) or self._pinned.is_live(a))]
            if gone:
                raise FreedPointerError(
                    f"graph {graph.value} uses memory that was freed: {'; '.join(map(str, gone))}", gone[0].base
                )
            found.checked_at = removals
        self._device.launch_graph(found.raw, raw)
        self._queued(raw)
        self._record("launch_graph", graph=graph.value)

    @guarded
    def destroy_graph(self, graph: GraphHandle) -> None:
        if isinstance(graph, GraphHandle) and graph.value == 0:
            return
        found = self._graph(graph)
        self._drain()
        with self._lock:
            if self._graphs.pop(graph.value, None) is None:
                raise ReleasedHandleError(f"graph {graph.value} was destroyed")
        self._device.destroy_graph(found.raw)

    def _handles(self) -> list[tuple[Callable[[int], None], int]]:
        """Graphs, events and streams, each with what destroys it; the tables are empty afterwards."""
        events = [*self._events, *self._foreign_streams.values()]
        handles: list[tuple[Callable[[int], None], int]] = [
            *((self._device.destroy_graph, graph.raw) for graph in self._graphs.values()),
            *((self._device.destroy_event, event) for event in events),
            *((self._device.destroy_stream, stream) for stream in (*self._streams, self._copy_stream)),
        ]
        for table in (self._graphs, self._events, self._foreign_streams, self._streams):
            table.clear()
        return handles
