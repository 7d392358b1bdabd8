# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel parameter lists: the types, and reading them from PTX and from CUDA source.

PTX is the authority on count, order and width of parameters; the source text adds names and pointee types where it
can be read (entries that macros make have none).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a parameter is packed. The W kinds are what PTX alone tells: a width, but not the type behind it."""

    PTR = "pointer"
    U8 = "u8"
    I8 = "i8"
    U16 = "u16"
    I16 = "i16"
    U32 = "u32"
    I32 = "i32"
    U64 = "u64"
    I64 = "i64"
    F32 = "f32"
    F64 = "f64"
    BYTES = "bytes"
    W8 = "8-bit word"
    W16 = "16-bit word"
    W32 = "32-bit word"
    W64 = "64-bit word or pointer"


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. `ctype` is the short spelling ("const bf16*", "u32", "f32"), "" where only PTX was read.
    `size` and `align` are bytes."""

    name: str
    kind: Kind
    size: int
    ctype: str = ""
    align: int = 0


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameter list of one kernel."""

    function: str
    params: tuple[Param, ...]

    def __str__(self) -> str:
        return f"{self.function}({', '.join(f'{p.ctype or p.kind.value} {p.name}' for p in self.params)})"
