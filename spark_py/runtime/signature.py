# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel parameter lists: the types, and reading them from PTX and from CUDA source.

PTX is the authority on count, order and width of parameters; the source text adds names and pointee types where it
can be read (entries that macros make have none).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ImageError, SignatureMismatchError
from .source_text import KernelText, read_source

if TYPE_CHECKING:
    from spark_py.catalog.spec import KernelSpec

__all__ = [
    "Kind",
    "Param",
    "Signature",
    "compare",
    "kernel_spec_signature",
    "parse_ptx",
    "parse_source",
    "reconcile",
]


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


# ---------------------------------------------------------------- PTX

_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PTX_ENTRY = re.compile(r"\.entry\s+([\w$%]+)\s*(?:\(([^)]*)\))?")
_PTX_PARAM = re.compile(
    r"""\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[busf]\d+)
        (?P<ptr>\s+\.ptr(?:\s*\.(?:global|shared|const|local|param))?(?:\s*\.align\s+(?P<ptr_align>\d+))?)?
        \s+(?P<name>[\w$%]+)\s*(?P<array>\[\s*(?P<count>\d+)\s*\])?""",
    re.VERBOSE,
)
_WORDS = {8: Kind.W8, 16: Kind.W16, 32: Kind.W32, 64: Kind.W64}
_FLOATS = {32: Kind.F32, 64: Kind.F64}


def parse_ptx(text: str, path: Path | str = "PTX") -> dict[str, Signature]:
    """The parameter list of every `.entry`, by name, in file order.

    PTX tells count, order and width; a `.ptr` annotation tells a pointer, `.f32` and `.f64` a float, an array a
    struct passed by value. ImageError (naming `path`) for a list that cannot be read.
    """
    found: dict[str, Signature] = {}
    for entry in _PTX_ENTRY.finditer(_PTX_COMMENT.sub(" ", text)):
        name, body = entry.group(1), (entry.group(2) or "").strip()
        declarations = [part.strip() for part in body.split(",")] if body else []
        found[name] = Signature(
            name, tuple(_ptx_param(name, number, part, path) for number, part in enumerate(declarations))
        )
    return found


def _ptx_param(function: str, number: int, declaration: str, path: Path | str) -> Param:
    match = _PTX_PARAM.fullmatch(declaration)
    if match is None:
        raise ImageError(path, "PTX", f"{function}: cannot read parameter {number}: {declaration!r}")
    letter, bits = match["type"][0], int(match["type"][1:])
    name = match["name"].removeprefix(f"{function}_")
    if match["array"]:
        return Param(name, Kind.BYTES, bits // 8 * int(match["count"]), align=int(match["align"] or 0))
    if match["ptr"]:
        return Param(name, Kind.PTR, bits // 8, align=int(match["ptr_align"] or 0))
    kind = (_FLOATS if letter == "f" else _WORDS).get(bits)
    if kind is None:
        raise ImageError(path, "PTX", f"{function}: parameter {number} has type .{match['type']}, which has no kind")
    return Param(name, kind, bits // 8)


# ---------------------------------------------------------------- CUDA source

_INTEGERS = {
    "u8": ("unsigned char", "uint8_t", "uchar"),
    "i8": ("signed char", "int8_t"),
    "u16": ("unsigned short", "uint16_t", "ushort"),
    "i16": ("short", "int16_t"),
    "u32": ("unsigned int", "unsigned", "uint32_t", "uint"),
    "i32": ("int", "int32_t", "signed"),
    "u64": ("unsigned long", "unsigned long long", "uint64_t", "size_t", "uintptr_t", "ulong"),
    "i64": ("long", "long long", "int64_t", "ptrdiff_t", "ssize_t", "intptr_t"),
}
_SHORT: Mapping[str, str] = {
    **{spelling: short for short, spellings in _INTEGERS.items() for spelling in spellings},
    "char": "i8",
    "bool": "bool",
    "float": "f32",
    "double": "f64",
    "__nv_bfloat16": "bf16",
    "nv_bfloat16": "bf16",
    "__half": "f16",
    "half": "f16",
    # The engine's ABI counts FP8, E8M0 and packed FP4 as bytes.
    "__nv_fp8_e4m3": "u8",
    "__nv_fp8_e5m2": "u8",
    "__nv_fp8_storage_t": "u8",
    "__nv_fp8_e8m0": "u8",
    "__nv_fp4x2_e2m1": "u8",
    "__nv_fp4x2_storage_t": "u8",
    "CUtensorMap": "tensormap",
}
# Types that can be passed by value: kind, bytes, alignment of the parameter (0 where the kind says it).
_BY_VALUE: Mapping[str, tuple[Kind, int, int]] = {
    "u8": (Kind.U8, 1, 0),
    "i8": (Kind.I8, 1, 0),
    "bool": (Kind.U8, 1, 0),
    "u16": (Kind.U16, 2, 0),
    "i16": (Kind.I16, 2, 0),
    "u32": (Kind.U32, 4, 0),
    "i32": (Kind.I32, 4, 0),
    "u64": (Kind.U64, 8, 0),
    "i64": (Kind.I64, 8, 0),
    "f32": (Kind.F32, 4, 0),
    "f64": (Kind.F64, 8, 0),
    "bf16": (Kind.BYTES, 2, 2),
    "f16": (Kind.BYTES, 2, 2),
    "tensormap": (Kind.BYTES, 128, 64),
}
_STRUCT_BYTES = frozenset({"__nv_fp8_e4m3", "__nv_fp8_e5m2", "__nv_fp8_e8m0", "__nv_fp4x2_e2m1"})
_BUILTIN_WORDS = frozenset({"unsigned", "signed", "int", "long", "short", "char", "float", "double", "bool"})
_DROPPED = frozenset(
    {"__restrict__", "__restrict", "restrict", "volatile", "__grid_constant__", "struct", "class", "register"}
)


def parse_source(text: str) -> dict[str, Signature]:
    """Signatures of the `extern "C" __global__` functions whose parameter lists can be read, by name.

    Pointee types come in the short spelling ("const bf16*"; FP8 and FP4 are u8, unknown pointees keep their name).
    Functions that a macro makes, that take an unknown type by value, or whose list depends on a condition are left out.
    """
    source = read_source(text)
    found: dict[str, Signature] = {}
    for kernel in source.kernels.values():
        params = _source_params(kernel, source.aliases)
        if params is not None:
            found[kernel.function] = Signature(kernel.function, params)
    return found


def _source_params(kernel: KernelText, aliases: Mapping[str, str]) -> tuple[Param, ...] | None:
    params: list[Param] = []
    for number, tokens in enumerate(kernel.params):
        param = _source_param(number, tokens, aliases)
        if param is None:
            return None
        params.append(param)
    return tuple(params)


def _spelling(words: list[str], aliases: Mapping[str, str]) -> str:
    """A type's words in one canonical order, aliases of the file followed."""
    name = " ".join(words)
    for _ in range(len(aliases)):
        if name in _SHORT or not aliases.get(name):
            break
        words = [word for word in aliases[name].split() if word != "const"]
        name = " ".join(words)
    if not set(words) <= _BUILTIN_WORDS:
        return name
    rest = [word for word in words if word not in ("int", "signed")]
    if "signed" in words and "char" in words:
        return "signed char"
    # "long unsigned int", "unsigned long" and the like are one type; a lone int keeps its word.
    return " ".join(sorted(rest, key=lambda word: word != "unsigned")) or "int"


def _source_param(number: int, tokens: tuple[str, ...], aliases: Mapping[str, str]) -> Param | None:
    words: list[str] = []
    skip = 0
    for index, token in enumerate(tokens):  # drop annotations with their parentheses
        if skip:
            skip += (token == "(") - (token == ")")
            skip -= skip == 1
            continue
        if token in ("__attribute__", "alignas") and tokens[index + 1 : index + 2] == ("(",):
            skip = 1
        elif token not in _DROPPED:
            words.append(token)
    return None if skip else _declared(number, words, aliases)


def _declared(number: int, words: list[str], aliases: Mapping[str, str]) -> Param | None:
    at = 0
    const = False
    base: list[str] = []
    while at < len(words):
        word = words[at]
        builtin = word in _BUILTIN_WORDS and (not base or base[0] in _BUILTIN_WORDS)
        names_type = word == "::" or (re.fullmatch(r"[A-Za-z_]\w*", word) and (not base or base[-1] == "::"))
        if word == "const":
            const = True
        elif builtin or names_type:
            base.append(word)
        else:
            break
        at += 1
    stars = 0
    while at < len(words) and words[at] in ("*", "const"):
        stars += words[at] == "*"
        at += 1
    rest = words[at:]
    name = f"param_{number}"
    if rest and re.fullmatch(r"[A-Za-z_]\w*", rest[0]):
        name, rest = rest[0], rest[1:]
    if rest[:1] == ["["] and rest[-1] == "]":  # an array parameter is a pointer
        stars += 1
        rest = []
    if rest or not base:
        return None
    qualified = "".join(base) if "::" in base else ""
    spelled = qualified.rpartition("::")[2] if qualified else _spelling(base, aliases)
    short = _SHORT.get(spelled, spelled)
    if stars:
        return Param(name, Kind.PTR, 8, f"{'const ' if const else ''}{short}{'*' * stars}")
    if spelled in _STRUCT_BYTES:
        return Param(name, Kind.BYTES, 1, short, 1)
    value = _BY_VALUE.get(short)
    return None if value is None else Param(name, value[0], value[1], short, value[2])


# ---------------------------------------------------------------- holding lists against each other

_WORD_OF: Mapping[Kind, tuple[Kind, ...]] = {
    Kind.W8: (Kind.U8, Kind.I8),
    Kind.W16: (Kind.U16, Kind.I16),
    Kind.W32: (Kind.U32, Kind.I32),
    Kind.W64: (Kind.U64, Kind.I64, Kind.PTR),
}


def _kinds_agree(a: Param, b: Param) -> bool:
    if a.kind is b.kind:
        return a.size == b.size
    return b.kind in _WORD_OF.get(a.kind, ()) or a.kind in _WORD_OF.get(b.kind, ())


def _text(param: Param) -> str:
    size = f" of {param.size}" if param.kind is Kind.BYTES else ""
    return f"{param.ctype or param.kind.value + size} {param.name}"


def reconcile(source: Signature, ptx: Signature) -> Signature:
    """One signature from the source's names and types and the PTX's count and widths.

    SignatureMismatchError, naming function, position and both sides, where they disagree: the text that was read is
    then not what was compiled.
    """
    if len(source.params) != len(ptx.params):
        raise SignatureMismatchError(
            f"{ptx.function}: the source has {len(source.params)} parameters, the PTX {len(ptx.params)}: "
            f"{source} against {ptx}"
        )
    params: list[Param] = []
    for number, (ours, theirs) in enumerate(zip(source.params, ptx.params, strict=True)):
        if not _kinds_agree(ours, theirs):
            raise SignatureMismatchError(
                f"{ptx.function}: parameter {number} is '{_text(ours)}' ({ours.size} bytes) in the source and "
                f"'{_text(theirs)}' ({theirs.size} bytes) in the PTX"
            )
        params.append(Param(ours.name, ours.kind, theirs.size, ours.ctype, max(ours.align, theirs.align)))
    return Signature(ptx.function, tuple(params))


def kernel_spec_signature(spec: KernelSpec) -> Signature:
    """The parameter list that a catalogue row declares."""
    params: list[Param] = []
    for param in spec.params:
        if param.is_pointer:
            params.append(Param(param.name, Kind.PTR, 8, param.ctype, param.align))
            continue
        value = _BY_VALUE.get(param.ctype)
        if value is None:
            raise SignatureMismatchError(
                f"{spec.module}::{spec.function}: catalogue type {param.ctype!r} of '{param.name}' has no kind; "
                f"known: {', '.join(_BY_VALUE)}"
            )
        params.append(Param(param.name, value[0], value[1], param.ctype, value[2]))
    return Signature(spec.function, tuple(params))


def _pointee(param: Param) -> str:
    pointee = param.ctype.removeprefix("const ")
    return "u64*" if pointee.endswith("**") else pointee  # a table of pointers is a table of addresses


def compare(a: Signature, b: Signature) -> str | None:
    """How two parameter lists differ in what a caller passes, or None.

    Compared are count, kinds, widths and pointee types (where both are known; void* fits all; const does not change a
    call). Names may differ, but a name that both lists have must stand at one place: two swapped u32 are a difference.
    """
    differences: list[str] = []
    if len(a.params) != len(b.params):
        differences.append(f"{len(a.params)} parameters against {len(b.params)}")
    place = {param.name: number for number, param in enumerate(b.params)}
    for number, (left, right) in enumerate(zip(a.params, b.params, strict=False)):
        agree = _kinds_agree(left, right)
        if agree and left.kind is right.kind is Kind.PTR and left.ctype and right.ctype:
            pointees = (_pointee(left), _pointee(right))
            agree = pointees[0] == pointees[1] or "void*" in pointees
        if not agree:
            differences.append(f"parameter {number} is '{_text(left)}' against '{_text(right)}'")
        elif left.name != right.name and place.get(left.name, number) != number:
            differences.append(f"parameter {number} '{left.name}' stands at {place[left.name]} in the other")
    longer = a if len(a.params) > len(b.params) else b
    for number in range(min(len(a.params), len(b.params)), len(longer.params)):
        side = "first" if longer is a else "second"
        differences.append(f"parameter {number} '{_text(longer.params[number])}' is in the {side} only")
    return f"{a.function}: " + "; ".join(differences) if differences else None
