# SPDX-License-Identifier: AGPL-3.0-only
"""CheckedBackend: the contract of the runtime, written once for every backend.

It owns the ledger, the handles and the capture rules, and drives a `RawDevice` that checks nothing.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path

from ..errors import DeviceLostError, LeakError, SparkError
from ..gpu import GpuBackend
from ..trace import LaunchTrace
from .core import guarded
from .kernels import KernelOps

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


class CheckedBackend(KernelOps, GpuBackend):
    """The whole interface over a RawDevice."""

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

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
        self._device.activate()
        errors: list[SparkError] = []
        for capture in {c.origin for c in self._captures.values()}:
            self.abort_capture_if_active(capture)
        try:
            self._drain()
        except SparkError as error:
            errors.append(error)
        left = [a for a in self._memory.all() if a.origin in ("device", "managed")]
        pinned = self._pinned.all()
        report = self._memory.report(5, 0.0)
        errors += self._drop_everything()
        for allocation in left:
            self._memory.remove(allocation.base)
            try:
                self._release(allocation)
            except SparkError as error:
                errors.append(error)
        for allocation in pinned:
            self._pinned.remove(allocation.base)
            self._device.free_host(allocation.base)
        self._closed = True
        self._wrapped.clear()
        self._kernels.clear()
        self._plans.clear()
        self._device.close()
        if left or pinned:
            sites = "; ".join(str(a) for a in (left + pinned)[:5])
            message = f"{len(left)} device and {len(pinned)} pinned allocations were not freed: {sites}\n{report}"
            if self._on_leak == "raise":
                raise LeakError(message)
            log.warning("%s", message)
        if errors and isinstance(errors[0], DeviceLostError):
            # The fault itself was raised where it was found; teardown only meets it again.
            log.error("teardown after a device fault: %s", errors[0])
        elif errors:
            raise errors[0]
