# SPDX-License-Identifier: AGPL-3.0-only
"""The catch-up ring: the target's last hidden rows, kept for pair keys that a drafter lacks before its next propose.

Twin of the catch-up feed in `speculative.rs`. The ring labels a hidden row with the token that follows it: label n is
the hidden of token n - 1, so that pair key k, which pairs it with token k + 1, reads label k + 1. Elsewhere row i is
the hidden of token i; the two must not be mixed.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...runtime.sizes import count

__all__ = ["MTP_CATCHUP_RING_ROWS", "CatchupRing", "FeedSegment", "RingLabels", "fnv1a", "plan_catchup"]

MTP_CATCHUP_RING_ROWS = 512
"""Rows of a ring: a chunk of the row writer. This port's own number; a drafter that lacks more is fed the last ones."""
_FNV_START, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


@dataclass(frozen=True, slots=True)
class FeedSegment:
    """Keys `first` .. `first + rows - 1`, whose hidden rows lie one after another from ring row `slot` on. Their tokens
    are first .. first + rows, their RoPE positions first + 1 on."""

    first: int
    rows: int
    slot: int


@dataclass(slots=True)
class RingLabels:
    """Which labels a ring of `size` rows holds: `start` .. `start + count - 1`, label n in row n % size."""

    size: int
    start: int = 0
    count: int = 0

    def save(self, label: int, rows: int) -> list[tuple[int, int, int]]:
        """Take in labels `label` .. `label + rows - 1`; gives the copies (source row, ring row, rows) to make, two at
        most. Rows that do not go on where the range ends begin a new one; of more than fit, the last are kept."""
        first, n = count("label", label), count("rows", rows)
        if first != self.start + self.count:
            self.start, self.count = first, 0
        end, skip = first + n, max(n - self.size, 0)
        self.count = min(self.count + n, self.size)
        self.start = end - self.count
        copies = []
        source = skip
        while source < n:
            slot = (first + source) % self.size
            length = min(n - source, self.size - slot)
            copies.append((source, slot, length))
            source += length
        return copies

    def clear(self) -> None:
        """Hold nothing."""
        self.start = self.count = 0


def plan_catchup(
    last_pair_key: int | None, drafter_rows: int, position: int, labels: RingLabels, shift: int = 0
) -> list[FeedSegment]:
    """What to feed before a propose at `position`, in order; the caller stops at a segment that is not taken whole.

    From the key behind the drafter's last one, or from the first that the ring has where that is later, up to the key
    before the propose's own (position - 1). A drafter without rows is not fed. `shift` reads labels so many further on.
    """
    if last_pair_key is None or drafter_rows <= 0 or labels.count <= 0:
        return []
    key = max(last_pair_key + 1, labels.start - 1 - shift)
    last = min(position - 2, labels.start + labels.count - 2 - shift)
    segments = []
    while key <= last:
        slot = (key + 1 + shift) % labels.size
        end = min(last, key + (labels.size - slot) - 1)
        segments.append(FeedSegment(key, end - key + 1, slot))
        key = end + 1
    return segments


class CatchupRing:
    """`size` rows of `row_bytes` on the device, and what they hold. `release` frees it, any number of times."""

    def __init__(self, gpu: GpuBackend, row_bytes: int, size: int = MTP_CATCHUP_RING_ROWS) -> None:
        self.labels = RingLabels(count("size", size))
        self._gpu, self._row_bytes = gpu, count("row_bytes", row_bytes)
        self._ptr = gpu.alloc(size * self._row_bytes, "mtp_catchup_ring")

    def save(self, position: int, hidden: DevicePtr, rows: int, stream: StreamLike) -> None:
        """Keep the hidden rows of tokens `position` .. `position + rows - 1`, which lie one after another at
        `hidden`."""
        for source, slot, length in self.labels.save(position + 1, rows):
            at = hidden.offset(source * self._row_bytes)
            self._gpu.copy_d2d_async(at, self.row(slot), length * self._row_bytes, stream)

    def row(self, slot: int) -> DevicePtr:
        """Address of ring row `slot`."""
        return self._ptr.offset(slot * self._row_bytes)

    def release(self) -> None:
        """Free the rows."""
        if not self._ptr.is_null and not self._gpu.closed:
            self._gpu.free(self._ptr)
        self._ptr = DevicePtr.NULL
        self.labels.clear()


def fnv1a(data: bytes) -> int:
    """The 64-bit FNV-1a hash, by which two logs of fed hidden rows can be compared."""
    value = _FNV_START
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return value
