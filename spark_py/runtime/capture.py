# SPDX-License-Identifier: AGPL-3.0-only
"""What is known about a stream capture in progress, and about the graph that comes of it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from .allocations import Allocation


@dataclass(slots=True, eq=False)
class Capture:
    """A capture from begin to end. `streams` holds the origin and every stream that joined it through an event."""

    origin: int
    thread: int = field(default_factory=threading.get_ident)
    streams: set[int] = field(default_factory=set)
    unjoined: set[int] = field(default_factory=set)
    """Joined streams with work that the origin does not wait for yet."""
    events: dict[int, set[int]] = field(default_factory=dict)
    """Event -> streams whose work it covers, for events recorded inside the capture."""
    memory: set[Allocation] = field(default_factory=set)
    error: BaseException | None = None
    """The first error inside; the capture is over from then on, and end_capture raises it again."""


@dataclass(slots=True, eq=False)
class Graph:
    """An instantiated graph: the device's handle and the memory it uses."""

    raw: int
    memory: frozenset[Allocation]
    checked_at: int = -1
    """Count of removals at which all its memory was last seen alive."""
