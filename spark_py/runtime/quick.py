# SPDX-License-Identifier: AGPL-3.0-only
"""The short way of a launch, written out in Python for the kinds of a kernel's parameters.

A loop over ten parameters costs more than their checks. So each signature gets a function of its own, without one: it
takes the arguments of a call apart, holds each against the one class that is plain for it, looks the addresses up among
those that were found right, and packs. It never says what is wrong: what is not plain and known goes the long way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .gpu import DevicePtr
from .signature import Kind

__all__ = ["Quick", "quick_maker"]

Quick = Callable[[Sequence[Any]], Any]
"""Of a call's arguments: True where they were launched; (addresses, scalars) where the device's launcher is to do that;
False, or any exception that taking apart, packing and launching can raise, for the long way."""

PLAIN: dict[Kind, type] = dict.fromkeys((Kind.U8, Kind.U16, Kind.U32, Kind.U64), int)
"""The class of a plain argument that `struct` packs and range-checks by itself. A 64-bit word may be a pointer, and
bytes would be cut or padded in silence: those take the long way."""
PLAIN |= dict.fromkeys((Kind.I8, Kind.I16, Kind.I32, Kind.I64, Kind.W8, Kind.W16, Kind.W32), int)
PLAIN |= {Kind.PTR: DevicePtr, Kind.F32: float, Kind.F64: float}

_TAKEN = """\
def make(seen, parts, DevicePtr):
    take, give, pack, call = parts
    def quick(args):
        {unpack}args
        if {plain}({key}) in seen:
            place = take()
            try:
                pack(place[0], 0, {addresses}{scalars})
                call(*place[1])
                return True
            finally:
                give(place)
        return False
    return quick
"""
_GIVEN = """\
def make(seen, parts, DevicePtr):
    def quick(args):
        {unpack}args
        if {plain}(addresses := ({key})) in seen:
            return addresses, ({scalars})
        return False
    return quick
"""


def _plain(kinds: Sequence[Kind]) -> Iterator[str]:
    """Conditions that arguments a0, a1, ... are of the classes that are plain for them."""
    for kind_class, name in ((DevicePtr, "DevicePtr"), (int, "int"), (float, "float")):
        same = [f"type(a{i})" for i, kind in enumerate(kinds) if PLAIN[kind] is kind_class]
        if same:
            yield " is ".join([*same, name])


@functools.lru_cache(maxsize=1024)
def quick_maker(kinds: tuple[Kind, ...], taken: bool) -> Callable[[set[tuple[int, ...]], Any, type], Quick] | None:
    """What makes a Quick of (addresses that were found right, parts of the device, DevicePtr); None where a parameter
    has no plain class. `taken`: it launches by itself, by the device's parts (`RawDevice.quick_parts`)."""
    if any(kind not in PLAIN for kind in kinds):
        return None
    pointers = [i for i, kind in enumerate(kinds) if kind is Kind.PTR]
    scalars = [i for i, kind in enumerate(kinds) if kind is not Kind.PTR]
    text = (_TAKEN if taken else _GIVEN).format(
        unpack="".join(f"a{i}, " for i in range(len(kinds))) + "= " if kinds else "() = ",
        plain="".join(f"{condition} and " for condition in _plain(kinds)),
        key="".join(f"a{i}.address, " for i in pointers),
        addresses="".join(f"a{i}.address, " for i in pointers),
        scalars="".join(f"a{i}, " for i in scalars),
    )
    space: dict[str, Any] = {}
    exec(compile(text, f"<launch of {', '.join(kind.value for kind in kinds)}>", "exec"), space)
    made: Callable[[set[tuple[int, ...]], Any, type], Quick] = space["make"]
    return made
