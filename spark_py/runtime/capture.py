# SPDX-License-Identifier: AGPL-3.0-only
"""What is known about a stream capture in progress, and about the graph that comes of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .allocations import Allocation

Clock = dict[int, int]
"""Stream -> how many of its operations are known to come before a point."""


@dataclass(slots=True, eq=False)
class Capture:
    """A capture from begin to end, on its origin and on every stream that joined it through an event.

    Who waits for whom is kept as vector clocks: an event covers what its stream had seen when it was recorded, not
    what was queued there later.
    """

    origin: int
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """Who began it. The object, not its ident: the system hands idents out again."""
    clocks: dict[int, Clock] = field(default_factory=dict)
    """Stream -> what its next operation comes after; the keys are the streams of the capture."""
    events: dict[int, Clock] = field(default_factory=dict)
    """The same for events recorded inside the capture."""
    memory: set[Allocation] = field(default_factory=set)
    written: set[Allocation] = field(default_factory=set)
    """Those of them that an operation so far may write."""
    error: BaseException | None = None
    """The first error inside; the capture is over from then on, and end_capture tells it."""

    def __post_init__(self) -> None:
        self.clocks[self.origin] = {}

    def work(self, stream: int) -> None:
        """`stream` got one more operation."""
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1

    def record(self, event: int, stream: int) -> None:
        """`event` marks what `stream` has reached."""
        self.events[event] = dict(self.clocks[stream])

    def wait(self, stream: int, event: int) -> None:
        """`stream` waits for `event`, and joins the capture where it was not part of it."""
        joins = stream not in self.clocks
        clock = self.clocks.setdefault(stream, {})
        for other, count in self.events[event].items():
            clock[other] = max(count, clock.get(other, 0))
        if joins:
            self.work(stream)

    def unjoined(self) -> list[int]:
        """Streams with work that the origin does not wait for."""
        seen = self.clocks[self.origin]
        return sorted(stream for stream, clock in self.clocks.items() if clock.get(stream, 0) > seen.get(stream, 0))


@dataclass(slots=True)
class Event:
    """An event of the backend: whether it takes time, whether it was recorded, and in which capture if in one."""

    timing: bool
    recorded: bool = False
    capture: Capture | None = None


@dataclass(slots=True, eq=False)
class Graph:
    """An instantiated graph: the device's handle and the memory it uses."""

    raw: int
    memory: frozenset[Allocation]
    checked_at: int = -1
    """Count of removals at which all its memory was last seen alive."""
