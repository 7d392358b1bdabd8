# SPDX-License-Identifier: AGPL-3.0-only
"""CheckedBackend: the contract of the runtime, written once for every backend.

It owns the ledger, the handles and the capture rules, and drives a `RawDevice` that checks nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ..errors import DeviceLostError, LeakError, SparkError
from ..gpu import GpuBackend
from ..op_cache import OpCache
from ..trace import LaunchTrace
from .core import guarded
from .launches import LaunchOps

__all__ = ["CheckedBackend", "effective_free_bytes"]

log = logging.getLogger("spark_py.runtime")
_MEMINFO = Path("/proc/meminfo")


def effective_free_bytes(driver_free: int, mem_available: int | None, integrated: bool) -> int:
    """Free bytes as the engine counts them: MemAvailable may stand in for the driver's figure only on an integrated
    GPU, whose driver does not count reclaimable page cache as free."""
    if integrated and mem_available is not None:
        return max(driver_free, mem_available)
    return driver_free


def _mem_available() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


class CheckedBackend(LaunchOps, GpuBackend):
    """The whole interface over a RawDevice."""

    @guarded
    def op_cache(self) -> OpCache:
        return self._op_cache

    @guarded
    def debug_sync_kernels(self) -> bool:
        return self._debug_sync

    @guarded
    def total_memory(self) -> int:
        return self._device.memory_info()[1]

    @guarded
    def free_memory(self) -> int:
        integrated = self._device.integrated()
        return effective_free_bytes(self._device.memory_info()[0], _mem_available() if integrated else None, integrated)

    @guarded
    def sm_count(self) -> int:
        return self._device.sm_count()

    @guarded
    def compute_capability(self) -> tuple[int, int]:
        return self._device.compute_capability()

    @guarded
    def device_name(self) -> str:
        return self._device.device_name()

    @guarded
    def trace(self) -> LaunchTrace:
        return LaunchTrace(weakref.proxy(self))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._on_leak = "warn"  # what is left is the error's doing, and must not hide it
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._closed or self._closing:
                return
            self._closing = True
        errors: list[SparkError] = []

        def attempt(call: Callable[..., object], *args: object) -> None:
            try:
                call(*args)
            except SparkError as error:
                errors.append(error)

        attempt(self._device.activate)
        for origin in {c.origin for c in self._captures.values()}:
            attempt(self.abort_capture_if_active, origin)
        attempt(self._drain)
        attempt(self._op_cache.release, self)
        left = [a for a in self._memory.all() if a.origin in ("device", "managed")]
        pinned = self._pinned.all()
        report = self._memory.report(5, 0.0)
        for destroy, handle in self._handles():
            attempt(destroy, handle)
        for allocation in left:
            self._memory.remove(allocation.base)
            attempt(self._release, allocation)
        for allocation in pinned:
            self._pinned.remove(allocation.base)
            attempt(self._device.free_host, allocation.base)
        self._closed = True
        self._wrapped.clear()
        self._kernels.clear()
        self._plans.clear()
        self._kept.clear()
        attempt(self._device.close)
        if left or pinned:
            sites = "; ".join(str(a) for a in (left + pinned)[:5])
            message = f"{len(left)} device and {len(pinned)} pinned allocations were not freed: {sites}\n{report}"
            if self._on_leak == "raise":
                raise LeakError(message) from (errors[0] if errors else None)
            log.warning("%s", message)
        if errors and isinstance(errors[0], DeviceLostError):
            # The fault itself was raised where it was found; teardown only meets it again.
            log.error("teardown after a device fault: %s", errors[0])
        elif errors:
            raise errors[0]
