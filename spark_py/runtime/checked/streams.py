# SPDX-License-Identifier: AGPL-3.0-only
"""Streams, events, capture and graphs."""

from __future__ import annotations

from ..capture import Capture, Graph
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
from .core import guarded
from .memory import MemoryOps

_AFTER = "do this after end_capture"


class StreamOps(MemoryOps):
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
        self._device.sync_stream(raw)
        with self._lock:
            self._streams.discard(raw)
            self._dead_streams.add(raw)
            self._keep_alive.pop(raw, None)
        self._device.destroy_stream(raw)

    @guarded
    def synchronize(self, stream: StreamLike) -> None:
        raw = self._stream(stream)
        self._refuse_in_capture("synchronize", _AFTER)
        self._refuse_capturing(raw, "synchronize")
        self._device.sync_stream(raw)
        with self._lock:
            self._keep_alive.pop(raw, None)

    # ------------------------------------------------------------ events

    @guarded
    def create_event(self, timing: bool = False) -> int:
        event = self._device.create_event(bool(timing))
        with self._lock:
            self._events[event] = bool(timing)
        return event

    def _event(self, event: int) -> int:
        if event in self._events:
            return event
        if event == 0:
            raise NullHandleError("event is 0: create_event gives one")
        raise ReleasedHandleError(f"event {event!r} is not an event of this backend, or was destroyed")

    @guarded
    def record_event(self, event: int, stream: StreamLike) -> None:
        self._event(event)
        raw = self._stream(stream)
        self._device.record_event(event, raw)
        with self._lock:
            for capture in set(self._captures.values()):
                capture.events.pop(event, None)
            inside = self._captures.get(raw)
            if inside is not None:
                inside.events[event] = {raw}

    @guarded
    def stream_wait_event(self, stream: StreamLike, event: int) -> None:
        raw = self._stream(stream)
        self._event(event)
        with self._lock:
            source = next((c for c in set(self._captures.values()) if event in c.events), None)
            here = self._captures.get(raw)
        if here is not None and source is not here:
            raise IllegalDuringCaptureError(
                "stream_wait_event on an event recorded outside the capture", "wait before begin_capture"
            )
        self._device.wait_event(raw, event)
        if source is None:
            return
        with self._lock:
            if here is None:
                source.streams.add(raw)
                source.unjoined.add(raw)
                self._captures[raw] = source
            if raw == source.origin:
                source.unjoined -= source.events[event]

    @guarded
    def event_synchronize(self, event: int) -> None:
        self._event(event)
        self._refuse_in_capture("event_synchronize", _AFTER)
        self._device.sync_event(event)

    @guarded
    def event_query(self, event: int) -> bool:
        self._event(event)
        self._refuse_in_capture("event_query", _AFTER)
        return self._device.query_event(event)

    @guarded
    def event_elapsed_ms(self, start: int, end: int) -> float:
        for event in (self._event(start), self._event(end)):
            if not self._events[event]:
                raise InvalidArgumentError("event", hex(event), "was created without timing=True")
        self._refuse_in_capture("event_elapsed_ms", _AFTER)
        return self._device.elapsed_ms(start, end)

    @guarded
    def destroy_event(self, event: int) -> None:
        if event == 0:
            return
        self._event(event)
        with self._lock:
            del self._events[event]
        self._device.destroy_event(event)

    @guarded
    def bind_to_thread(self) -> None:
        self._device.activate()

    # ------------------------------------------------------------ capture

    @guarded
    def begin_capture(self, stream: int) -> None:
        raw = self._own_stream(stream)
        if raw in self._captures:
            raise CaptureStateError(f"begin_capture on stream {raw:#x}, which is capturing already")
        if self._thread_capture() is not None:
            raise CaptureStateError("begin_capture while this thread captures another stream: end that one first")
        self._device.begin_capture(raw)
        with self._lock:
            self._ended_captures.pop(raw, None)
            self._captures[raw] = Capture(raw, streams={raw})

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
        with self._lock:
            for each in capture.streams:
                self._captures.pop(each, None)
        if capture.unjoined:
            self._device.abort_capture(raw)
            left = ", ".join(hex(s) for s in sorted(capture.unjoined))
            raise CaptureStateError(f"streams {left} joined the capture and the origin does not wait for them")
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
            if capture is None:
                return
            for each in capture.streams:
                self._captures.pop(each, None)
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
        self._record("launch_graph", graph=graph.value)

    @guarded
    def destroy_graph(self, graph: GraphHandle) -> None:
        if isinstance(graph, GraphHandle) and graph.value == 0:
            return
        found = self._graph(graph)
        self._drain()
        with self._lock:
            del self._graphs[graph.value]
        self._device.destroy_graph(found.raw)

    def _drop_everything(self) -> list[SparkError]:
        """Destroy graphs, events and streams at teardown; what went wrong comes back."""
        errors: list[SparkError] = []
        for capture in {c.origin for c in self._captures.values()}:
            try:
                self._device.abort_capture(capture)
            except SparkError as error:
                errors.append(error)
        self._captures.clear()
        for destroy, handles in (
            (self._device.destroy_graph, [g.raw for g in self._graphs.values()]),
            (self._device.destroy_event, list(self._events)),
            (self._device.destroy_stream, [*self._streams, self._copy_stream]),
        ):
            for handle in handles:
                try:
                    destroy(handle)
                except SparkError as error:
                    errors.append(error)
        self._graphs.clear()
        self._events.clear()
        self._streams.clear()
        return errors
