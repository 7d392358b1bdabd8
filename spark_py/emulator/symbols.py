# SPDX-License-Identifier: AGPL-3.0-only
"""Names of a library's shared variables, from its ELF symbol table."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SharedVariable", "shared_variables"]

_SYMTAB, _TLS = 2, 6
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_LAST_NAME = re.compile(r"(\d+)([A-Za-z_]\w*)$")


@dataclass(frozen=True, slots=True)
class SharedVariable:
    """A `__shared__` variable: bytes from the start of the file's shared memory, size, and its name in the source."""

    offset: int
    size: int
    name: str


def _plain(symbol: str) -> str:
    """The last name in a mangled one: `_ZZ1fvE5sums_0` is `sums`."""
    symbol = re.sub(r"(?:\.\d+|_\d+)+$", "", symbol)
    if not symbol.startswith("_Z"):
        return symbol
    for match in re.finditer(r"E(\d+)([A-Za-z_]\w*)$", symbol):
        if int(match.group(1)) == len(match.group(2)):
            return match.group(2)
    found = _LAST_NAME.search(symbol)
    return found.group(2)[-int(found.group(1)) :] if found else symbol


def shared_variables(library: Path) -> list[SharedVariable]:
    """The thread-local objects of a 64-bit little-endian ELF file, by offset."""
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [_SECTION.unpack_from(data, start + size * number) for number in range(count)]
    found: list[SharedVariable] = []
    for _, kind, _, _, at, length, link, _, _, entry in sections:
        if kind != _SYMTAB:
            continue
        strings = sections[link][4]
        for place in range(at, at + length, entry):
            name, info, _, section, value, nbytes = _SYMBOL.unpack_from(data, place)
            if info & 15 == _TLS and section and nbytes:
                text = data[strings + name : data.index(b"\0", strings + name)].decode()
                found.append(SharedVariable(value, nbytes, _plain(text)))
    return sorted(found, key=lambda variable: variable.offset)
