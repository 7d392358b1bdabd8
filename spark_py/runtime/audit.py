# SPDX-License-Identifier: AGPL-3.0-only
"""KernelAudit: which kernels of a set were looked up, which lookups failed, which were never asked for.

Twin of the engine's kernel audit: rows are deduplicated, and a kernel counts as loaded if any lookup of it succeeded.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from .gpu import KernelAuditRow

__all__ = ["KernelAudit"]


class _Listed(Protocol):
    @property
    def functions(self) -> tuple[str, ...]: ...


class _Set(Protocol):
    @property
    def modules(self) -> Mapping[str, _Listed]: ...


@dataclass(slots=True)
class _Lookups:
    loaded: bool = False
    sites: dict[str, None] = field(default_factory=dict)  # in order of first use


class KernelAudit:
    """The lookups of one backend. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], _Lookups] = {}

    def record(self, module: str, function: str, loaded: bool, site: str) -> None:
        """Note one lookup, made at `site` ("file:line")."""
        with self._lock:
            entry = self._seen.setdefault((module, function), _Lookups())
            entry.loaded = entry.loaded or loaded
            entry.sites[site] = None

    def rows(self, kernel_set: _Set) -> list[KernelAuditRow]:
        """One row a kernel, sorted by module and function: "used", "missing", or "unused" for what `kernel_set` lists
        and nobody asked for."""
        with self._lock:
            rows = [
                KernelAuditRow(module, function, "used" if entry.loaded else "missing", tuple(entry.sites))
                for (module, function), entry in self._seen.items()
            ]
            rows += [
                KernelAuditRow(name, function, "unused")
                for name, module in kernel_set.modules.items()
                for function in module.functions
                if (name, function) not in self._seen
            ]
        return sorted(rows, key=lambda row: (row.module, row.function))
