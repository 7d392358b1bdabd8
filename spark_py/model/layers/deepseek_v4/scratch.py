# SPDX-License-Identifier: AGPL-3.0-only
"""OwnedBuffers: the scratch that a part of a layer allocates once and frees with `release`."""

from __future__ import annotations

from collections.abc import Mapping

from ....runtime.errors import CapacityError, ReleasedError, SparkError
from ....runtime.gpu import DevicePtr, GpuBackend
from ....runtime.sizes import count

__all__ = ["OwnedBuffers"]


class OwnedBuffers:
    """Named buffers for `max_rows` rows each; `row_bytes` says how many bytes a row of each has.

    Allocations are labelled "owner.name". OutOfDeviceMemoryError leaves nothing allocated.
    """

    def __init__(self, gpu: GpuBackend, owner: str, max_rows: int, row_bytes: Mapping[str, int]) -> None:
        self._gpu, self._owner, self._max_rows = gpu, owner, count("max_rows", max_rows)
        self._buffers: dict[str, DevicePtr] = {}
        self._released = False
        try:
            for name, size in row_bytes.items():
                self._buffers[name] = gpu.alloc(max_rows * size, f"{owner}.{name}")
        except BaseException:
            self.release()
            raise

    def __getitem__(self, name: str) -> DevicePtr:
        if self._released:
            raise ReleasedError(f"{self._owner} was released")
        return self._buffers[name]

    def check_rows(self, rows: int) -> int:
        """`rows` if there is room for them; ReleasedError, InvalidArgumentError or CapacityError otherwise."""
        if self._released:
            raise ReleasedError(f"{self._owner} was released")
        if count("rows", rows) > self._max_rows:
            raise CapacityError("rows", rows, self._max_rows, f"for which {self._owner} has scratch")
        return rows

    def release(self) -> None:
        """Free the buffers; a second call does nothing. All are tried, then the first error is raised."""
        self._released = True
        buffers, self._buffers = self._buffers, {}
        first: SparkError | None = None
        # A backend that was closed before has freed everything itself.
        for ptr in () if self._gpu.closed else buffers.values():
            try:
                self._gpu.free(ptr)
            except SparkError as error:
                first = first or error
        if first is not None:
            raise first
