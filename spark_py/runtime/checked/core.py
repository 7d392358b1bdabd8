# SPDX-License-Identifier: AGPL-3.0-only
"""State that all parts of a checked backend share, and the guards they call first."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, SupportsIndex, TypeGuard, TypeVar

from ..allocations import Allocation, AllocationMap
from ..capture import Capture, Event, Graph
from ..errors import (
    BackendClosedError,
    ForeignHandleError,
    IllegalDuringCaptureError,
    InvalidArgumentError,
    NullHandleError,
    ReleasedHandleError,
    SparkError,
)
from ..gpu import DeviceLimits, DevicePtr, GpuBackend, StreamLike
from ..op_cache import OpCache

if TYPE_CHECKING:
    from ..audit import KernelAudit
    from ..device import LoadedKernel, RawDevice
    from ..trace import LaunchTrace

P = ParamSpec("P")
R = TypeVar("R")
_backend_ids = itertools.count(1)


def is_integer(value: object) -> TypeGuard[SupportsIndex]:
    """Whether `value` counts something: an int or a NumPy integer, and neither a bool nor an address."""
    return hasattr(value, "__index__") and not isinstance(value, (bool, DevicePtr))


def _operation(
    method: Callable[Concatenate[Any, P], R], stream_of: Callable[[tuple[Any, ...], dict[str, Any]], object]
) -> Callable[Concatenate[Any, P], R]:
    name = method.__name__

    @functools.wraps(method)
    def wrapper(self: Core, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._closed:
            raise BackendClosedError(f"{name} on a backend that was closed")
        self._device.activate()
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._capture_failed(error, stream_of(args, kwargs))
            raise

    return wrapper


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A public operation: refused on a closed backend, and an error in it ends the calling thread's capture."""
    return _operation(method, lambda args, kwargs: None)


def queued(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """As `guarded`, for work on a stream, the last argument: an error ends that stream's capture too, whichever thread
    began it, since its graph would lack the work."""
    return _operation(method, lambda args, kwargs: kwargs.get("stream", args[-1] if args else None))


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
        self._closed = self._closing = False
        self._memory = AllocationMap()
        self._pinned = AllocationMap()
        self._wrapped: dict[int, object] = {}
        self._kernels: dict[int, LoadedKernel] = {}
        self._graphs: dict[int, Graph] = {}
        self._events: dict[int, Event] = {}
        self._dead_events: set[int] = set()
        # Streams of other libraries, each with the event behind the last work queued there: the stream itself may be
        # gone by the time somebody waits.
        self._foreign_streams: dict[int, int] = {}
        self._captures: dict[int, Capture] = {}
        self._ended_captures: dict[int, Capture] = {}
        self._handle_numbers = itertools.count(1)
        self._trace: LaunchTrace | None = None
        # Whether launches have a follower: a trace, debugging, or streams of other libraries.
        self._watching = debug_sync_kernels
        self._op_cache = OpCache()
        self._keep_alive: dict[int, dict[int, object]] = {}
        # No capture begins or ends and no stream dies while a thread waits for a list of streams.
        self._wait_lock = threading.RLock()
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

    def _follow(self, trace: LaunchTrace | None) -> None:
        """Set or clear the trace that operations are told to."""
        self._trace = trace
        self._watching = trace is not None or self._debug_sync or bool(self._foreign_streams)

    # ------------------------------------------------------------ guards

    def _stream(self, stream: StreamLike) -> int:
        """The raw stream behind an argument; unknown, foreign and destroyed ones raise."""
        if stream.__class__ is int and stream in self._streams:
            return stream
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is None and not hasattr(stream, "ptr"):
            return self._own_stream(stream)
        try:
            raw = operator.index(getattr(stream, "ptr") if protocol is None else protocol()[1])  # noqa: B009
        except (TypeError, LookupError):
            raise InvalidArgumentError("stream", stream, "__cuda_stream__ or .ptr gives no stream handle") from None
        if raw not in self._streams and raw not in self._foreign_streams:
            event = self._device.create_event(False)
            with self._lock:
                self._foreign_streams[raw] = event
                self._watching = True
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
        me = threading.current_thread()
        with self._lock:
            return next((c for c in self._captures.values() if c.thread is me), None)

    def _refuse_in_capture(self, operation: str, way_out: str) -> None:
        if self._captures and self._thread_capture() is not None:
            raise IllegalDuringCaptureError(operation, way_out)

    def _capture_failed(self, error: BaseException, stream: object) -> None:
        """An error ends the calling thread's capture and that of `stream`, and is kept for end_capture."""
        if not self._captures:
            return
        with self._lock:
            raw = getattr(stream, "ptr", stream)
            failed = {self._thread_capture(), self._captures.get(raw) if type(raw) is int else None} - {None}
        for capture in failed:
            with self._wait_lock:
                if capture is not None and self._forget_capture(capture):
                    capture.error = error
                    self._ended_captures[capture.origin] = capture
                    with contextlib.suppress(SparkError):
                        self._device.abort_capture(capture.origin)

    def _forget_capture(self, capture: Capture) -> bool:
        """Take a capture off the tables; False where another thread was quicker. The caller holds `_wait_lock` until
        the device has ended it too: nobody may wait for the streams before that."""
        with self._lock:
            active = self._captures.get(capture.origin) is capture
            for stream in [s for s, c in self._captures.items() if c is capture]:
                del self._captures[stream]
            return active

    def _queued(self, stream: int, *allocations: Allocation) -> None:
        """After work was queued: remember what memory a capture uses, and how far another library's stream got."""
        if stream in self._foreign_streams:
            if not self._device.is_capturing(stream):
                self._device.record_event(self._foreign_streams[stream], stream)
            return
        capture = self._captures.get(stream)
        if capture is not None:
            capture.memory.update(allocations)
            capture.work(stream)

    def _written(self, stream: int, written: Allocation, *others: Allocation) -> None:
        """As `_queued`, of an operation that writes the first of the allocations."""
        self._queued(stream, written, *others)
        if stream in self._captures:
            self._captures[stream].written.add(written)

    def _drain(self) -> None:
        """Wait for everything queued on streams that do not capture, those of other libraries included."""
        with self._wait_lock:
            with self._lock:
                streams = [s for s in self._streams if s not in self._captures]
                foreign = list(self._foreign_streams.items())
            for stream in streams:
                self._wait(stream)
            for stream, event in foreign:
                held = self._let_go(stream)
                self._device.sync_event(event)
                del held
            self._device.sync_stream(self._copy_stream)

    def _wait(self, stream: int) -> None:
        """Wait for a stream, then let go of the host memory of its copies."""
        held = self._let_go(stream)
        self._device.sync_stream(stream)
        del held

    def _let_go(self, stream: int) -> object:
        """The host memory of copies queued so far. Taken before a wait and dropped after it: a copy that another
        thread queues meanwhile keeps its memory."""
        with self._lock:
            return self._keep_alive.pop(stream, None)

    def _size(self, name: str, value: object) -> int:
        """A byte count: a non-negative integer below 2**63."""
        if not is_integer(value):
            raise InvalidArgumentError(name, value, "a non-negative integer number of bytes")
        number = int(value)
        if not 0 <= number < 2**63:
            raise InvalidArgumentError(name, number, "0 .. 2**63-1 bytes")
        return number
