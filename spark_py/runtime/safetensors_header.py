# SPDX-License-Identifier: AGPL-3.0-only
"""What a safetensors file holds and where, without reading a tensor.

The safetensors library judges the header. It lets only files through whose tensors lie one after another without a
gap from the end of the header to the end of the file; so the order it gives, and the sizes, are the offsets, which it
does not tell. Where it refuses a file, `_explain` finds the values at fault, which it does not tell either.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import WeightFileError
from .weight_types import WeightInfo

__all__ = ["FileStamp", "Header", "read_header"]

# Every dtype that the library lets through, also those that WeightDtype lacks: they take room in the file.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
_PREFIX = 8
_MAX_HEADER = 100_000_000  # the library's limit
_MAX_EXPLAINED = 16 << 20  # Python objects take many times the text; larger headers get the library's words alone
_U64 = 2**64


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size (bytes) and time of change of a file: offsets read from its header hold while both stay."""

    size: int
    mtime_ns: int

    @staticmethod
    def of(status: os.stat_result) -> FileStamp:
        """The stamp in a `stat` result."""
        return FileStamp(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Header:
    """One file: its stamp and its tensors, in file order."""

    path: Path
    stamp: FileStamp
    tensors: tuple[WeightInfo, ...]


def read_header(path: Path) -> Header:
    """The tensors of a safetensors file. Reads the header only; accepts exactly what the library accepts, which
    includes that of two equal keys the last one counts. WeightFileError otherwise."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise WeightFileError(path, "is no regular file")
        with path.open("rb", buffering=0) as file:
            prefix = file.read(_PREFIX)
        with safe_open(path, framework="np") as archive:
            slices = [(name, archive.get_slice(name)) for name in archive.offset_keys()]
            listed = [(name, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices]
    except SafetensorError as error:
        tensor, reason = _explain(path, str(error))
        raise WeightFileError(path, reason, tensor) from error
    except (OSError, ValueError) as error:
        raise WeightFileError(path, f"cannot be read: {error}") from error

    end = _PREFIX + int.from_bytes(prefix, "little")
    tensors = []
    for name, shape, dtype in listed:
        if dtype not in _BITS:
            raise WeightFileError(path, f"dtype {dtype} has an unknown size", name)
        nbytes = math.prod(shape) * _BITS[dtype] // 8
        tensors.append(WeightInfo(name, shape, dtype, path, end, nbytes))
        end += nbytes
    if end != status.st_size:
        raise WeightFileError(path, f"changed while it was read: tensors end at {end}, the file at {status.st_size}")
    return Header(path, FileStamp.of(status), tuple(tensors))


def _explain(path: Path, refusal: str) -> tuple[str, str]:
    """(tensor or "", reason with the values at fault) for a file that the library refused with `refusal`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_PREFIX)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < _PREFIX:
                return "", f"is {size} bytes long; the length field of the header alone takes {_PREFIX}"
            if length > size - _PREFIX:
                return (
                    "",
                    f"header length is {length}, but {size - _PREFIX} bytes follow it: cut off, or no safetensors",
                )
            if length > _MAX_HEADER:
                return "", f"header length is {length}: limit {_MAX_HEADER}"
            header: Any = json.loads(file.read(length)) if length <= _MAX_EXPLAINED else None
    except (OSError, ValueError, RecursionError):
        return "", refusal
    return next(_faults(header, size - _PREFIX - length), ("", refusal)) if isinstance(header, dict) else ("", refusal)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _U64


def _faults(header: dict[str, Any], available: int) -> Iterator[tuple[str, str]]:
    """Each (tensor, reason) that makes the header invalid for `available` bytes of data."""
    ranges = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):
            yield name, f"entry is {_short(entry)}, not an object"
            continue
        dtype, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _BITS:
            yield name, f"dtype is {_short(dtype)}; known: {', '.join(_BITS)}"
        elif not isinstance(shape, list) or not all(map(_is_size, shape)):
            yield name, f"shape is {_short(shape)}: a list of integers 0 .. 2**64-1 is needed"
        elif not isinstance(span, list) or len(span) != 2 or not all(map(_is_size, span)):
            yield name, f"data_offsets is {_short(span)}: two integers 0 .. 2**64-1 are needed"
        else:
            ranges.append((span[0], span[1], name, dtype, shape))
    expected = 0
    for begin, end, name, dtype, shape in sorted(ranges):
        bits = _bits(shape, dtype)
        if end > available:
            yield name, f"ends at byte {end} of the data, the file holds {available}: cut off"
        if end < begin:
            yield name, f"data_offsets [{begin}, {end}] run backwards"
        if begin != expected:
            word = "overlaps the tensor before it" if begin < expected else "leaves a gap"
            yield name, f"begins at byte {begin} of the data, expected {expected}: {word}"
        if bits is None:
            yield name, f"{dtype} {_short(shape)} overflows 64 bits, its offsets span {end - begin} bytes"
        elif bits != 8 * (end - begin):
            yield name, f"{dtype} {_short(shape)} takes {bits / 8:.15g} bytes, its offsets span {end - begin}"
        expected = end
    if expected != available:
        yield "", f"tensors take {expected} bytes, the file holds {available}"


def _bits(shape: list[int], dtype: str) -> int | None:
    """Bits of a tensor; None where the product leaves 64 bits on the way, whatever comes after."""
    bits = 1
    for factor in (*shape, _BITS[dtype]):
        bits *= factor
        if bits >= _U64:
            return None
    return bits


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
