# SPDX-License-Identifier: AGPL-3.0-only
"""Launches as the catalogue's references see them: arrays for pointers, once their ranges are known to be right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..catalog.spec import DTYPES, Call, KernelSpec, ParamSpec
from .allocations import AllocationMap
from .device import Dim3
from .errors import ArgumentPointerError, ArgumentRangeError, GeometryError, PointerError
from .host_memory import array_at

__all__ = ["HostCalls"]

_MOST_KEPT = 512
_VERBS = {"r": "read", "w": "write", "rw": "read and write"}


class HostCalls:
    """The launches of one kernel with one geometry.

    What was found right is kept and given again for the same arguments, until memory is freed: a decoding loop and a
    graph's replay launch the same again and again. A launch whose geometry, preconditions or shapes depend on what
    arrays hold is looked at each time.
    """

    def __init__(self, ledger: AllocationMap, spec: KernelSpec, name: str, geometry: tuple[Dim3, Dim3, int]) -> None:
        self.spec = spec
        self._ledger, self._name, self._geometry = ledger, name, geometry
        self._params = [(param, param.is_pointer, param.ctype == "f32") for param in spec.params]
        self._kept: dict[bytes, Call] = {}
        self._removals = ledger.removals

    def find(self, packed: bytes, values: tuple[Any, ...]) -> Call:
        """The call with these arguments, one a parameter; `packed` is the same in bytes.

        ArgumentRangeError, GeometryError, ArgumentPointerError for arguments that the kernel may not get.
        """
        if self._removals != self._ledger.removals:
            self._kept.clear()
            self._removals = self._ledger.removals
        call = self._kept.get(packed)
        if call is None:
            call, lasting = self._check(values)
            if lasting:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[packed] = call
        return call

    def _check(self, values: tuple[Any, ...]) -> tuple[Call, bool]:
        """The call, and whether it stays right while its memory lives, since nothing asked for an array."""
        pointers: dict[str, tuple[ParamSpec, int]] = {}
        lasting = True

        def bind(call: Call, parameter: str) -> np.ndarray[Any, Any] | None:
            nonlocal lasting
            if parameter not in pointers:
                raise AttributeError(f"{self._name} has no parameter '{parameter}'")
            lasting = False
            return self._bind(call, *pointers[parameter])

        def follow(call: Call, parameter: str, index: int) -> np.ndarray[Any, Any] | None:
            if parameter not in pointers or pointers[parameter][0].pointee is None:
                raise AttributeError(f"{self._name} has no table of addresses '{parameter}'")
            return self._follow(call, pointers[parameter][0], index)

        call = Call(*self._geometry, bind, follow)
        given = call.__dict__
        for (param, is_pointer, is_f32), value in zip(self._params, values, strict=True):
            if is_pointer:
                pointers[param.name] = param, value
            else:
                given[param.name] = float(np.float32(value)) if is_f32 else value
        try:
            expected = self.spec.geometry(call)
            if self.spec.preconditions is not None:
                self.spec.preconditions(call)
        except ValueError as error:
            raise ArgumentRangeError(self._name, str(error)) from None
        for what, got, want in zip(("grid", "block", "dynamic shared memory"), self._geometry, expected, strict=True):
            if got != want:
                raise GeometryError(
                    self._name,
                    f"{what} is {got}, the kernel needs {want} (grid {self.spec.grid_text}, "
                    f"block {self.spec.block_text})",
                )
        # Every range is known to be right before anything runs. No array is an attribute yet: a shape that needs one
        # has to ask for it.
        arrays = {name: self._bind(call, *pointer) for name, pointer in pointers.items()}
        given.update(arrays)
        return call, lasting

    def _bind(self, call: Call, param: ParamSpec, address: int) -> np.ndarray[Any, Any] | None:
        """The array that a pointer parameter stands for, once its whole range is known to be right."""
        if address == 0:
            return None
        assert param.shape is not None
        shape = tuple(int(n) for n in param.shape(call))
        dtype = param.dtype
        first = address + (int(param.offset(call)) if param.offset else 0) * dtype.itemsize
        return self._array(param, first, shape, dtype, f"kernel would {_VERBS[param.access]}")

    def _follow(self, call: Call, param: ParamSpec, index: int) -> np.ndarray[Any, Any] | None:
        """The array behind an entry of a table of addresses, held to the rules of an argument."""
        pointee = param.pointee
        assert pointee is not None
        address = int(getattr(call, param.name)[index])
        if address == 0:
            return None
        if address % pointee.align:
            message = f"entry {index} is {address:#x}: a multiple of {pointee.align} is needed"
            raise ArgumentPointerError(self._name, message, param.name)
        shape = tuple(int(n) for n in pointee.shape(call))
        what = f"through entry {index} the kernel would read"
        return self._array(param, address, shape, DTYPES[pointee.dtype], what)

    def _array(
        self, param: ParamSpec, first: int, shape: tuple[int, ...], dtype: np.dtype[Any], what: str
    ) -> np.ndarray[Any, Any]:
        """An array over the memory from `first`, read-only where the kernel only reads."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        try:
            self._ledger.check_range(first, nbytes, what)
        except PointerError as error:
            raise ArgumentPointerError(self._name, str(error), param.name) from None
        array = array_at(first, shape, dtype)
        array.flags.writeable = param.access != "r"
        return array
