# SPDX-License-Identifier: AGPL-3.0-only
"""The headers that a CUDA source pulls in from its own side: everything that is not the toolkit's.

NVRTC does not report what it read, so names in `#include` and `__has_include` are followed by hand. Every file that a
name could mean is counted, whichever the compiler takes, so that a change to any of them is seen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .source_text import without_comments

__all__ = ["IncludeScan", "scan_includes"]

_INCLUDE = re.compile(r"""^[ \t]*\#[ \t]*include(?:_next)?\b[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>|(.*))""", re.M | re.X)
_HAS_INCLUDE = re.compile(r"""__has_include(?:_next)?\s*\(\s*["<]([^">\n]+)[">]\s*\)""")


@dataclass(frozen=True, slots=True)
class IncludeScan:
    """`files` are the headers found, `unresolved` the names that no own folder holds (the toolkit's, or missing),
    `texts` what the source and those files say. `computed` is true where a macro names a header, so that the list may
    be short."""

    files: tuple[Path, ...]
    unresolved: frozenset[str]
    texts: tuple[str, ...]
    computed: bool

    def digest(self) -> str:
        """SHA-256 over source and headers, names and contents."""
        state = hashlib.sha256()
        for name, text in zip(("", *map(str, self.files)), self.texts, strict=True):
            for part in (name.encode("utf-8", "surrogateescape"), text.encode("utf-8", "surrogateescape")):
                state.update(len(part).to_bytes(8, "little"))
                state.update(part)
        return state.hexdigest()

    def mentions(self, pattern: re.Pattern[str]) -> bool:
        """Whether the source or an own header holds `pattern`."""
        return any(pattern.search(text) for text in self.texts)


def scan_includes(path: Path, text: str, folders: Sequence[Path]) -> IncludeScan:
    """Follow the includes of `text` through the folder of each file, the working folder and `folders`."""
    found: dict[Path, str] = {}
    unresolved: set[str] = set()
    computed = False
    pending: list[tuple[Path, str]] = [(path.parent, text)]
    searched = [path.parent, Path.cwd(), *folders]
    while pending:
        folder, content = pending.pop()
        plain = without_comments(content)
        names = set(_HAS_INCLUDE.findall(plain))
        for quoted, angled, other in _INCLUDE.findall(plain):
            name = quoted or angled
            computed = computed or (not name and bool(other.strip()))
            if name:
                names.add(name)
        for name in sorted(names):
            candidates = dict.fromkeys(base / name for base in [folder, *searched])
            known = False
            for candidate in candidates:
                if candidate not in found:
                    try:
                        content = candidate.read_text(encoding="utf-8", errors="surrogateescape")
                    except (OSError, ValueError):  # not there, or nothing the compiler could read either
                        continue
                    found[candidate] = content
                    pending.append((candidate.parent, content))
                known = True
            if not known:
                unresolved.add(name)
    files = tuple(sorted(found))
    return IncludeScan(files, frozenset(unresolved), (text, *(found[file] for file in files)), computed)
