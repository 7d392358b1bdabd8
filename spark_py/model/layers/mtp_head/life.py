# SPDX-License-Identifier: AGPL-3.0-only
"""MtpHeadLife: what a draft head with one module holds from its constructor to its release, whatever the module
computes."""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, TypeVar

from ....runtime.buffers import BufferArena
from ....runtime.errors import CapacityError
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...levers import ModelLevers
from .types import MtpProposerState

__all__ = ["MtpHeadLife", "alloc_for"]

_Self = TypeVar("_Self", bound="MtpHeadLife")


def alloc_for(stack: ExitStack, gpu: GpuBackend, nbytes: int, name: str) -> DevicePtr:
    """`nbytes` of device memory, which go when `stack` closes."""
    ptr = gpu.alloc(nbytes, name)
    stack.callback(_free, gpu, ptr)
    return ptr


def _free(gpu: GpuBackend, ptr: DevicePtr) -> None:
    # A backend that was closed before has freed everything itself.
    if not gpu.closed:
        gpu.free(ptr)


class MtpHeadLife:
    """Bookkeeping and the head's own memory, and the end of both. `_stack` has what `release` undoes."""

    owner: ClassVar[str] = "mtp_head"
    """Under what name the head has device memory and blocks of its pool."""
    title: ClassVar[str] = "MTP head"

    gpu: GpuBackend
    levers: ModelLevers

    def _begin(self) -> None:
        """The fields of a head that has nothing yet and has drafted nothing."""
        self.last_conf = 1.0
        self._deferred = False
        self._states: weakref.WeakSet[MtpProposerState] = weakref.WeakSet()
        self._warned_masks = self._warned_prefill = False
        self._checked: weakref.ref[BufferArena] | None = None
        self._released = False
        self._kv_lock = threading.RLock()
        self._stack = ExitStack()

    def _alloc(self, name: str, nbytes: int) -> DevicePtr:
        return alloc_for(self._stack, self.gpu, nbytes, f"{self.owner}.{name}")

    @abstractmethod
    def row_bytes(self) -> dict[str, int]:
        """Bytes that one row of this head writes to each buffer of the arena."""

    def check_buffers(self, buffers: BufferArena) -> None:
        """CapacityError where a buffer of the arena is too small for one row of this head. An arena is checked once."""
        if self._checked is not None and self._checked() is buffers:
            return
        for name, nbytes in self.row_bytes().items():
            if nbytes > (have := getattr(buffers.sizes(), name)):
                raise CapacityError(f"bytes that the {self.title} writes to {name}", nbytes, have, "the arena's buffer")
        self._checked = weakref.ref(buffers)

    def _clock(self, stream: StreamLike) -> float:
        """Seconds, once the stream has done what it was given; 0 where nobody wants to know."""
        if not self.levers.prefill_profile:
            return 0.0
        self.gpu.synchronize(stream)
        return time.perf_counter()

    def release(self) -> None:
        """Free the KV pool, what was quantised and the head's own buffers; a second call does nothing. Weights that the
        caller passed stay. All are tried, then an error is raised."""
        if not self._released:
            self._released = True
            self._stack.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
