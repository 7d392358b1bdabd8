# SPDX-License-Identifier: AGPL-3.0-only
"""KernelAudit: which kernels of a set were looked up, which lookups failed, which were never asked for.

Twin of the engine's kernel audit: rows are deduplicated, and a kernel counts as loaded if any lookup of it succeeded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from .gpu import KernelAuditRow

__all__ = ["KernelAudit"]


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

    def rows(self, known: Iterable[tuple[str, str]]) -> list[KernelAuditRow]:
        """One row a kernel, sorted by module and function: "used", "missing", or "unused" for a (module, function) of
        `known`, what the kernel set declares, that nobody asked for."""
        with self._lock:
            rows = [
                KernelAuditRow(module, function, "used" if entry.loaded else "missing", tuple(entry.sites))
                for (module, function), entry in self._seen.items()
            ]
            rows += [KernelAuditRow(*key, "unused") for key in dict.fromkeys(known) if key not in self._seen]
        return sorted(rows, key=lambda row: (row.module, row.function))
