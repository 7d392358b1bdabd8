# SPDX-License-Identifier: AGPL-3.0-only
"""State that all parts of a checked backend share, and the guards they call first."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from ..allocations import Allocation, AllocationMap
from ..capture import Capture, Graph
from ..errors import (
    BackendClosedError,
    ForeignHandleError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    NullHandleError,
    ReleasedHandleError,
    SparkError,
)
from ..gpu import DeviceLimits, GpuBackend, StreamLike

if TYPE_CHECKING:
    from ..audit import KernelAudit
    from ..device import LoadedKernel, RawDevice
    from ..trace import LaunchTrace

P = ParamSpec("P")
R = TypeVar("R")
_backend_ids = itertools.count(1)


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A public operation: refused on a closed backend, and an error in it ends the calling thread's capture."""

    @functools.wraps(method)
    def wrapper(self: Core, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise BackendClosedError(f"{method.__name__} on a backend that was closed")
        self._device.activate()
        try:
            return method(self, *args, **kwargs)
        except SparkError as error:
            self._capture_failed(error)
            raise

    return wrapper


class Core(GpuBackend):
    """Handles, streams and capture state. The lock guards every table here; device calls run outside it where they
    may block."""

    def __init__(self, device: RawDevice, audit: KernelAudit, on_leak: str, debug_sync_kernels: bool) -> None:
        if on_leak not in ("warn", "raise"):
            raise InvalidArgumentError("on_leak", on_leak, 'one of "warn", "raise"')
        self._device = device
        self._audit = audit
        self._on_leak = on_leak
        self._debug_sync = debug_sync_kernels
        self._id = next(_backend_ids)
        self._lock = threading.RLock()
        self._closed = False
        self._memory = AllocationMap()
        self._pinned = AllocationMap()
        self._wrapped: dict[int, object] = {}
        self._kernels: dict[int, LoadedKernel] = {}
        self._graphs: dict[int, Graph] = {}
        self._events: dict[int, bool] = {}
        self._foreign_streams: set[int] = set()
        self._captures: dict[int, Capture] = {}
        self._ended_captures: dict[int, Capture] = {}
        self._handle_numbers = itertools.count(1)
        self._trace: LaunchTrace | None = None
        self._keep_alive: dict[int, list[object]] = {}
        device.activate()
        device.ledger = self._memory
        self._default_stream = device.create_stream()
        # Synchronous copies have a stream of their own, so that a capture on the default stream never meets them.
        self._copy_stream = device.create_stream()
        self._streams: set[int] = {self._default_stream}
        self._dead_streams: set[int] = set()

    # ------------------------------------------------------------ identity

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def ordinal(self) -> int:
        return self._device.ordinal

    @property
    def limits(self) -> DeviceLimits:
        return self._device.limits

    @property
    def closed(self) -> bool:
        return self._closed

    # ------------------------------------------------------------ guards

    def _stream(self, stream: StreamLike) -> int:
        """The raw stream behind an argument; unknown, foreign and destroyed ones raise."""
        if stream.__class__ is int and stream in self._streams:
            return stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            raw = int(protocol()[1])
        elif hasattr(stream, "ptr"):
            raw = int(stream.ptr)
        else:
            return self._own_stream(stream)
        if raw not in self._streams:
            with self._lock:
                self._foreign_streams.add(raw)
        return raw

    def _own_stream(self, stream: object) -> int:
        """As `_stream`, for operations that need a stream of this backend."""
        if isinstance(stream, bool) or not isinstance(stream, int):
            raise InvalidArgumentError("stream", stream, "an int from create_stream, or an object with __cuda_stream__")
        if stream in self._streams:
            return stream
        if stream == 0:
            raise NullHandleError("stream is 0, the legacy stream: use default_stream() or create_stream()")
        if stream in self._dead_streams:
            raise ReleasedHandleError(f"stream {stream:#x} was destroyed")
        raise ForeignHandleError(f"stream {stream:#x} is not a stream of this backend ({self.name}:{self.ordinal})")

    def _thread_capture(self) -> Capture | None:
        """The capture that the calling thread began and that still records."""
        if not self._captures:
            return None
        me = threading.get_ident()
        with self._lock:
            return next((c for c in self._captures.values() if c.thread == me), None)

    def _refuse_in_capture(self, operation: str, way_out: str) -> None:
        if self._captures and self._thread_capture() is not None:
            raise IllegalDuringCaptureError(operation, way_out)

    def _capture_failed(self, error: BaseException) -> None:
        """An error inside a capture ends it and is kept for end_capture; outside one nothing happens."""
        capture = self._thread_capture()
        if capture is None:
            return
        with self._lock:
            capture.error = error
            for stream in capture.streams:
                self._captures.pop(stream, None)
            self._ended_captures[capture.origin] = capture
        with contextlib.suppress(SparkError):
            self._device.abort_capture(capture.origin)

    def _note_capture(self, stream: int, *allocations: Allocation) -> None:
        """Remember, for staleness checks at replay, what memory a captured operation uses."""
        if not self._captures:
            return
        capture = self._captures.get(stream)
        if capture is not None:
            capture.memory.update(allocations)
            if stream != capture.origin:
                capture.unjoined.add(stream)

    def _drain(self) -> None:
        """Wait for every stream of the backend that does not capture, the ones of other libraries included."""
        with self._lock:
            streams = [s for s in (*self._streams, *self._foreign_streams) if s not in self._captures]
        for stream in streams:
            self._device.sync_stream(stream)
            self._keep_alive.pop(stream, None)
        self._device.sync_stream(self._copy_stream)

    def _size(self, name: str, value: object) -> int:
        """A byte count: a non-negative integer below 2**63."""
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidArgumentError(name, value, "a non-negative integer number of bytes")
        number = int(value)
        if not 0 <= number < 2**63:
            raise InvalidArgumentError(name, number, "0 .. 2**63-1 bytes")
        return number
