# SPDX-License-Identifier: AGPL-3.0-only
"""Pinned staging for uploads whose source may die at once.

Bytes are copied into a page-locked chunk at the call; the chunk is used again once the event behind its copy is done.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

CHUNK = 16 << 20
MOST_IN_FLIGHT = 8 * CHUNK
_SMALLEST = 4096


class _Device(Protocol):
    def alloc_host(self, nbytes: int) -> int: ...
    def free_host(self, address: int) -> None: ...
    def h2d(self, dst: int, src: int, nbytes: int, stream: int) -> None: ...
    def create_event(self, timing: bool) -> int: ...
    def destroy_event(self, event: int) -> None: ...
    def record_event(self, event: int, stream: int) -> None: ...
    def query_event(self, event: int) -> bool: ...
    def sync_event(self, event: int) -> None: ...


@dataclass(slots=True)
class _Slot:
    address: int
    size: int
    event: int


class StagingPool:
    """Page-locked chunks of powers of two, at most MOST_IN_FLIGHT bytes of them waiting for copies."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._idle: dict[int, list[_Slot]] = {}
        self._busy: deque[_Slot] = deque()
        self._in_flight = 0

    def upload(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Copy `nbytes` from host address `src` now, and queue their way to `dst`."""
        with self._lock:
            for at in range(0, nbytes, CHUNK):
                part = min(CHUNK, nbytes - at)
                slot = self._take(part)
                try:
                    ctypes.memmove(slot.address, src + at, part)
                    self._device.h2d(dst + at, slot.address, part, stream)
                finally:
                    self._device.record_event(slot.event, stream)
                    self._busy.append(slot)
                    self._in_flight += slot.size

    def _take(self, nbytes: int) -> _Slot:
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        while self._busy and self._device.query_event(self._busy[0].event):
            self._retire(self._busy.popleft())
        while self._busy and self._in_flight + size > MOST_IN_FLIGHT:
            oldest = self._busy.popleft()
            self._device.sync_event(oldest.event)
            self._retire(oldest)
        idle = self._idle.get(size)
        if idle:
            return idle.pop()
        return _Slot(self._device.alloc_host(size), size, self._device.create_event(False))

    def _retire(self, slot: _Slot) -> None:
        self._in_flight -= slot.size
        self._idle.setdefault(slot.size, []).append(slot)

    def close(self) -> None:
        """Wait for what is in flight and return the memory."""
        with self._lock:
            for slot in self._busy:
                self._device.sync_event(slot.event)
            for slot in (*self._busy, *(s for idle in self._idle.values() for s in idle)):
                self._device.destroy_event(slot.event)
                self._device.free_host(slot.address)
            self._busy.clear()
            self._idle.clear()
            self._in_flight = 0
