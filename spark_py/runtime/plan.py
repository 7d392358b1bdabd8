# SPDX-License-Identifier: AGPL-3.0-only
"""Plan: a launch with everything settled but its stream and arguments.

Arguments are packed by one `struct` call, all pointers before all scalars: the parameter table of a launch may point
anywhere, so the buffer need not follow the parameters' order, and each group is taken from the arguments in one step.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

from .device import Dim3, Launcher, LoadedKernel
from .gpu import DevicePtr
from .signature import Kind, Param, Signature

__all__ = ["Layout", "Plan"]

_SLOT = {Kind.F32: "f4x", Kind.F64: "d", Kind.W64: "Q", Kind.U64: "Q", Kind.I64: "q"}
_SLOT |= {Kind.U32: "I4x", Kind.W32: "I4x", Kind.I32: "i4x"}
_SLOT |= {Kind.U16: "H6x", Kind.W16: "H6x", Kind.I16: "h6x", Kind.U8: "B7x", Kind.W8: "B7x", Kind.I8: "b7x"}


_MOST_SEEN = 4096


class _Unusual:
    """Stands for a parameter that plain values never fit without a closer look."""


# The class of a plain argument that `struct` packs and range-checks by itself. A 64-bit word may be a pointer, and
# bytes would be cut or padded in silence: those take the long way.
_PLAIN: dict[Kind, type] = dict.fromkeys(_SLOT, int) | {Kind.PTR: DevicePtr, Kind.F32: float, Kind.F64: float}
_PLAIN |= {Kind.BYTES: _Unusual, Kind.W64: _Unusual}


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the elements at `indices` out of a sequence."""
    if not indices:
        return lambda values: ()
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return operator.itemgetter(*indices)


class Layout:
    """Where the arguments of a signature stand in a launch's buffer: the pointers, then scalars and bytes."""

    __slots__ = ("_in_order", "packed", "pointer_at", "scalar_at", "scalars", "starts")

    def __init__(self, signature: Signature) -> None:
        params = signature.params
        self.pointer_at = [i for i, p in enumerate(params) if p.kind is Kind.PTR]
        self.scalar_at = [i for i, p in enumerate(params) if p.kind is not Kind.PTR]
        scalars = "".join(self._format(params[i]) for i in self.scalar_at)
        self.scalars = struct.Struct("=" + scalars)
        self.packed = struct.Struct(f"={len(self.pointer_at)}Q" + scalars)
        self.starts: list[tuple[bool, int]] = [(True, 0)] * len(params)
        """Per parameter: whether it stands among the pointers, and its byte offset in `packed`."""
        for n, i in enumerate(self.pointer_at):
            self.starts[i] = (True, 8 * n)
        at = 8 * len(self.pointer_at)
        for i in self.scalar_at:
            self.starts[i] = (False, at)
            at += struct.calcsize("=" + self._format(params[i]))
        packed_at = {i: n for n, i in enumerate((*self.pointer_at, *self.scalar_at))}
        self._in_order = _picker([packed_at[i] for i in range(len(params))])

    def merge(self, pointers: Sequence[int], scalars: Sequence[Any]) -> tuple[Any, ...]:
        """The values in parameter order."""
        return tuple(self._in_order((*pointers, *scalars)))

    @staticmethod
    def _format(param: Param) -> str:
        if param.kind is Kind.BYTES:
            return f"{param.size}s{-param.size % 8}x"
        return _SLOT[param.kind]


class Plan:
    """What is settled once for a (kernel, geometry).

    `classes` are the types of plain arguments; a call whose types are exactly these needs only its pointers looked up,
    and `struct` finds numbers out of range. `call_classes` are those of stream, shared memory, grid and block before
    them; `masks` are the address bits that each pointer must have clear. `run(stream, pointers, scalars)` packs and
    queues. `dependent` does so in a capture, from which the kernel may start there while the one before it runs; None
    until a capture asks for it.

    `seen` is a state of the ledger and the address tuples that were found alive and aligned in it; it is void after
    any free. The two change together, so that no thread adds to the tuples of a state that it did not look at.
    """

    __slots__ = (
        "block",
        "call_classes",
        "classes",
        "cooperative",
        "dependent",
        "grid",
        "kernel",
        "kinds",
        "layout",
        "masks",
        "pick_pointers",
        "pick_scalars",
        "run",
        "seen",
        "shared",
    )

    def __init__(
        self, kernel: LoadedKernel, grid: Dim3, block: Dim3, shared: int, cooperative: bool, run: Launcher
    ) -> None:
        self.kernel, self.grid, self.block, self.shared, self.cooperative = kernel, grid, block, shared, cooperative
        self.run = run
        self.dependent: Launcher | None = None
        params = kernel.signature.params
        self.kinds = tuple(p.kind for p in params)
        self.classes = tuple(_PLAIN[p.kind] for p in params)
        self.call_classes: list[type] = [*(int,) * 8, *self.classes]
        self.layout = Layout(kernel.signature)
        self.masks = tuple(kernel.alignments[i] - 1 for i in self.layout.pointer_at)
        self.pick_pointers = _picker(self.layout.pointer_at)
        self.pick_scalars = _picker(self.layout.scalar_at)
        self.seen: tuple[object, set[tuple[int, ...]]] = (None, set())

    def saw(self, addresses: tuple[int, ...], ledger: object) -> None:
        """Remember addresses that passed, with the state of the ledger that they passed in."""
        state, seen = self.seen
        if state is not ledger or len(seen) >= _MOST_SEEN:
            seen = set()
            self.seen = (ledger, seen)
        seen.add(addresses)
