# SPDX-License-Identifier: AGPL-3.0-only
"""OpCache: what launchers want to remember for as long as a backend lives.

Twin of `OpCache` of the Rust runtime. The backend owns it, so that nothing in it outlives the modules and the memory
that it names.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Hashable

from .errors import PointerError
from .gpu import DevicePtr, GpuBackend, KernelHandle
from .sizes import count

__all__ = ["OpCache"]


class OpCache:
    """Kernel handles, scratch memory and once-only marks of one backend. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kernels: dict[tuple[str, str], KernelHandle] = {}
        self._scratch: dict[str, tuple[DevicePtr, int]] = {}
        self._blocks: list[DevicePtr] = []
        self._seen: Counter[Hashable] = Counter()
        self._fell_back = False

    def kernel(self, gpu: GpuBackend, module: str, func_name: str) -> KernelHandle:
        """`gpu.kernel`, looked up once."""
        with self._lock:
            key = (module, func_name)
            if key not in self._kernels:
                self._kernels[key] = gpu.kernel(module, func_name)
            return self._kernels[key]

    def scratch(self, gpu: GpuBackend, tag: str, nbytes: int) -> DevicePtr:
        """Memory of at least `nbytes` under `tag`, not zeroed.

        It only grows. A block that became too small stays allocated until `release`, since queued work or a graph may
        still use it.
        """
        wanted = count("nbytes", nbytes)
        with self._lock:
            ptr, size = self._scratch.get(tag, (DevicePtr.NULL, 0))
            if size < wanted:
                ptr = gpu.alloc(wanted, f"scratch '{tag}'")
                self._scratch[tag] = ptr, wanted
                self._blocks.append(ptr)
            return ptr

    def release(self, gpu: GpuBackend) -> None:
        """Free all scratch memory, as the backend does when swept or closed. Blocks freed before are left out."""
        with self._lock:
            blocks, self._blocks = self._blocks, []
            self._scratch.clear()
        for ptr in blocks:
            with contextlib.suppress(PointerError):
                gpu.free(ptr)

    def note_alloc_fallback(self) -> None:
        """An allocation had to take a slower kind of memory."""
        self._fell_back = True

    def alloc_fell_back(self) -> bool:
        """Whether `note_alloc_fallback` was ever called."""
        return self._fell_back

    def first_n(self, key: Hashable, n: int) -> bool:
        """True the first `n` times that `key` is asked for."""
        limit = count("n", n, 0)
        with self._lock:
            self._seen[key] += 1
            return self._seen[key] <= limit

    def once(self, key: Hashable) -> bool:
        """True the first time that `key` is asked for."""
        return self.first_n(key, 1)

    def first_shape(self, name: str, m: int, n: int, k: int) -> bool:
        """True the first time that an operation meets a shape."""
        return self.once((name, m, n, k))
