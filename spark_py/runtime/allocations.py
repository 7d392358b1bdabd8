# SPDX-License-Identifier: AGPL-3.0-only
"""The ledger of live allocations: an interval map with labels and call sites.

Twin of the ledger in `gpu_impl.rs`, which knows base addresses only; here interior addresses resolve too, so every
copy and every pointer argument can be checked.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Literal

from .errors import (
    DoubleFreeError,
    FreedPointerError,
    OutOfBoundsError,
    PointerError,
    UnknownPointerError,
)

Origin = Literal["device", "managed", "pinned", "wrapped"]
_REMEMBERED_FREES = 4096
_MOST_RESOLVED = 65536


@dataclass(frozen=True, slots=True, eq=False)
class Allocation:
    """One allocation: `base` address, `size` in bytes, `serial` (never reused), and who asked for it."""

    base: int
    size: int
    label: str
    site: str
    origin: Origin
    serial: int

    def __str__(self) -> str:
        name = f"'{self.label}' " if self.label else ""
        return f"{name}[{self.base:#x}, +{self.size} bytes] from {self.site}"


class AllocationMap:
    """Live allocations by address. One lookup or change is atomic; who needs several holds the backend's lock.

    `resolved` caches addresses known to be alive; every removal empties it, so a cached answer is never stale.
    """

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._live: dict[int, Allocation] = {}
        self._freed: OrderedDict[int, Allocation] = OrderedDict()
        self._serial = 0
        self._lock = threading.RLock()
        self.live_bytes = 0
        self.removals = 0
        self.resolved: dict[int, Allocation] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, base: int, size: int, label: str, site: str, origin: Origin) -> Allocation:
        """Record a new allocation."""
        with self._lock:
            self._serial += 1
            allocation = Allocation(base, size, label, site, origin, self._serial)
            self._live[base] = allocation
            bisect.insort(self._bases, base)
            self._freed.pop(base, None)
            if origin in ("device", "managed"):
                self.live_bytes += size
            return allocation

    def remove(self, base: int) -> Allocation:
        """Forget the allocation that starts at `base`; DoubleFreeError or UnknownPointerError where none does."""
        with self._lock:
            allocation = self._live.pop(base, None)
            if allocation is None:
                raise self._not_a_base(base)
            self._bases.pop(bisect.bisect_left(self._bases, base))
            self._freed[base] = allocation
            while len(self._freed) > _REMEMBERED_FREES:
                self._freed.popitem(last=False)
            if allocation.origin in ("device", "managed"):
                self.live_bytes -= allocation.size
            self.removals += 1
            self.resolved = {}
            return allocation

    def base_at(self, base: int) -> Allocation:
        """The allocation that starts at `base`, with `remove`'s errors."""
        allocation = self._live.get(base)
        if allocation is None:
            raise self._not_a_base(base)
        return allocation

    def find(self, address: int) -> Allocation | None:
        """The live allocation that holds `address`, if any."""
        with self._lock:
            index = bisect.bisect_right(self._bases, address) - 1
            if index < 0:
                return None
            allocation = self._live[self._bases[index]]
            return allocation if address < allocation.base + allocation.size else None

    def overlapping(self, address: int, nbytes: int) -> Allocation | None:
        """A live allocation that shares bytes with [address, address + nbytes), if any."""
        with self._lock:
            index = bisect.bisect_left(self._bases, address)
            if index < len(self._bases) and self._bases[index] < address + nbytes:
                return self._live[self._bases[index]]
            return self.find(address)

    def check_range(self, address: int, nbytes: int, what: str) -> Allocation:
        """The allocation that holds all of [address, address + nbytes); `what` begins the error's sentence."""
        with self._lock:
            allocation = self.find(address)
            if allocation is None:
                raise self._unknown(address, what, nbytes)
        end = allocation.base + allocation.size
        if address + nbytes > end:
            raise OutOfBoundsError(
                f"{what}: {nbytes} bytes at {address:#x} run {address + nbytes - end} past the end of {allocation}",
                address,
                nbytes,
                allocation.base,
                allocation.size,
            )
        return allocation

    def resolve(self, address: int) -> Allocation | None:
        """As `find`, remembered until something is freed."""
        with self._lock:
            allocation = self.find(address)
            if allocation is not None:
                if len(self.resolved) >= _MOST_RESOLVED:
                    self.resolved = {}
                self.resolved[address] = allocation
            return allocation

    def is_live(self, allocation: Allocation) -> bool:
        """Whether that very allocation (not a later one at its address) is alive."""
        return self._live.get(allocation.base) is allocation

    def all(self) -> list[Allocation]:
        """Live allocations in address order."""
        return [self._live[base] for base in self._bases]

    def explain(self, address: int) -> str:
        """In words, what `address` is, for an error about it."""
        freed = self._freed_at(address)
        if freed is not None:
            return f"{address:#x} lies in memory that was freed: {freed}"
        index = bisect.bisect_right(self._bases, address) - 1
        if index >= 0:
            near = self._live[self._bases[index]]
            past = address - near.base - near.size
            if past < 1 << 20:
                return f"{address:#x} is {past} bytes past the end of {near}"
        return f"{address:#x} lies in no live allocation of this backend"

    def was_freed(self, address: int) -> bool:
        """Whether `address` lies in an allocation freed lately."""
        return self._freed_at(address) is not None

    def report(self, top_n: int, min_mb: float) -> str:
        """Live memory by call site, largest first, then by file."""
        by_site: dict[str, list[int]] = defaultdict(list)
        for allocation in self._live.values():
            if allocation.origin in ("device", "managed"):
                by_site[allocation.site].append(allocation.size)
        rows = sorted(by_site.items(), key=lambda row: (-sum(row[1]), row[0]))
        lines = [f"{self.live_bytes / 1e9:.3f} GB live from {len(rows)} call sites"]
        shown = [row for row in rows[:top_n] if sum(row[1]) >= min_mb * 1e6]
        lines += [f"{sum(sizes) / 1e6:12.3f} MB  {len(sizes):6d} x  {site}" for site, sizes in shown]
        rest = rows[len(shown) :]
        if rest:
            total = sum(sum(sizes) for _, sizes in rest)
            lines.append(f"{total / 1e6:12.3f} MB  in {len(rest)} further sites")
        by_file: dict[str, int] = defaultdict(int)
        for site, sizes in rows:
            by_file[site.rpartition(":")[0]] += sum(sizes)
        lines.append("by file:")
        lines += [f"{size / 1e6:12.3f} MB  {file}" for file, size in sorted(by_file.items(), key=lambda r: -r[1])]
        return "\n".join(lines)

    def _freed_at(self, address: int) -> Allocation | None:
        for allocation in reversed(self._freed.values()):
            if allocation.base <= address < allocation.base + max(allocation.size, 1):
                return allocation
        return None

    def _unknown(self, address: int, what: str, nbytes: int) -> PointerError:
        kind = FreedPointerError if self.was_freed(address) else UnknownPointerError
        return kind(f"{what}: {nbytes} bytes at {address:#x}: {self.explain(address)}", address)

    def _not_a_base(self, address: int) -> PointerError:
        inside = self.find(address)
        if inside is not None:
            return DoubleFreeError(
                f"free of {address:#x}, which is {address - inside.base} bytes inside {inside}; free its base", address
            )
        freed = self._freed.get(address)
        if freed is not None:
            return DoubleFreeError(f"free of {address:#x} for the second time: {freed}", address)
        return UnknownPointerError(f"free of {address:#x}, which this backend never handed out", address)
