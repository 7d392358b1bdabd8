# SPDX-License-Identifier: AGPL-3.0-only
"""KernelLaunch, typed arguments and their packing.

Twin of `crates/spark-runtime/src/kernel_args.rs`. The builder is Rust's, plus the integer and f64 types it lacks;
each launch is checked against the kernel's parameter list.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ArgumentRangeError, ArgumentTypeError, ArityError, InvalidArgumentError
from .gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from .signature import Kind, Param, Signature

if TYPE_CHECKING:
    from .tensormap import TensorMap

__all__ = ["KernelArg", "KernelLaunch", "check_argument", "div_ceil", "pack_kernel_args"]

_FORMAT = {
    Kind.PTR: "Q",
    Kind.U8: "B",
    Kind.I8: "b",
    Kind.U16: "H",
    Kind.I16: "h",
    Kind.U32: "I",
    Kind.I32: "i",
    Kind.U64: "Q",
    Kind.I64: "q",
    Kind.F32: "f",
    Kind.F64: "d",
}
_INT_RANGE = {
    Kind.U8: (0, 2**8 - 1),
    Kind.I8: (-(2**7), 2**7 - 1),
    Kind.U16: (0, 2**16 - 1),
    Kind.I16: (-(2**15), 2**15 - 1),
    Kind.U32: (0, 2**32 - 1),
    Kind.I32: (-(2**31), 2**31 - 1),
    Kind.U64: (0, 2**64 - 1),
    Kind.I64: (-(2**63), 2**63 - 1),
    # A word of unknown signedness takes both readings.
    Kind.W8: (-(2**7), 2**8 - 1),
    Kind.W16: (-(2**15), 2**16 - 1),
    Kind.W32: (-(2**31), 2**32 - 1),
    Kind.W64: (-(2**63), 2**64 - 1),
}
_ACCEPTS = {
    Kind.W8: (Kind.U8, Kind.I8),
    Kind.W16: (Kind.U16, Kind.I16),
    Kind.W32: (Kind.U32, Kind.I32),
    Kind.W64: (Kind.PTR, Kind.U64, Kind.I64),
}
_F32_MAX = float(np.finfo(np.float32).max)


def div_ceil(a: int, b: int) -> int:
    """a / b rounded up, for non-negative a and positive b."""
    if a < 0 or b <= 0:
        raise InvalidArgumentError("div_ceil", (a, b), "a >= 0 and b > 0 are needed")
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class KernelArg:
    """A launch argument with its type, as Rust's builder stores it. Plain Python values need none."""

    kind: Kind
    value: DevicePtr | int | float | bytes


def _is_bool(value: object) -> bool:
    return isinstance(value, (bool, np.bool_))


def _integer(kernel: str, param: Param, value: object) -> int:
    if _is_bool(value) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(
            kernel, f"{value!r} ({type(value).__name__}) is no integer; {param.kind.value} is needed", param.name
        )
    number = int(value)
    low, high = _INT_RANGE[param.kind]
    if not low <= number <= high:
        raise ArgumentRangeError(kernel, f"{number} does not fit {param.kind.value}: {low} .. {high}", param.name)
    return number


def check_argument(kernel: str, param: Param, value: object) -> int | float | bytes:
    """The value to pack for one argument, or a LaunchError naming kernel, parameter, value and limit.

    Pointers come back as their address; whether that lies in live memory is the backend's question.
    """
    if isinstance(value, KernelArg):
        wanted = param.kind
        if value.kind is not wanted and value.kind not in _ACCEPTS.get(wanted, ()):
            raise ArgumentTypeError(
                kernel, f"argument is {value.kind.value}, the parameter is {wanted.value}", param.name
            )
        value = value.value
    kind = param.kind
    if isinstance(value, DevicePtr):
        if kind is not Kind.PTR and kind is not Kind.W64:
            raise ArgumentTypeError(kernel, f"{value!r} is a pointer, the parameter is {kind.value}", param.name)
        return value.address
    if kind is Kind.PTR:
        raise ArgumentTypeError(
            kernel, f"{value!r} ({type(value).__name__}) is no DevicePtr; a pointer is needed", param.name
        )
    if kind in _INT_RANGE:
        return _integer(kernel, param, value)
    if kind in (Kind.F32, Kind.F64):
        if _is_bool(value) or not isinstance(value, (int, float, np.integer, np.floating)):
            raise ArgumentTypeError(
                kernel, f"{value!r} ({type(value).__name__}) is no number; {kind.value} is needed", param.name
            )
        try:
            number = float(value)
        except OverflowError:
            raise ArgumentRangeError(kernel, f"{value!r} does not fit {kind.value}", param.name) from None
        if kind is Kind.F32 and _F32_MAX < abs(number) < float("inf"):
            raise ArgumentRangeError(kernel, f"{number!r} does not fit f32: largest is {_F32_MAX!r}", param.name)
        return number
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise ArgumentTypeError(
            kernel, f"{value!r} ({type(value).__name__}) is no bytes; {param.size} bytes are needed", param.name
        )
    data = bytes(value)
    if len(data) != param.size:
        raise ArgumentTypeError(kernel, f"{len(data)} bytes given, the parameter has {param.size}", param.name)
    return data


def check_arity(kernel: str, signature: Signature, count: int) -> None:
    """ArityError unless `count` arguments are what the kernel takes; names the first one missing or in excess."""
    wanted = len(signature.params)
    if count == wanted:
        return
    if count < wanted:
        first = signature.params[count]
        raise ArityError(kernel, f"{count} arguments given, {wanted} needed; first missing is '{first.name}'")
    raise ArityError(kernel, f"{count} arguments given, {wanted} needed; {count - wanted} too many: {signature}")


def pack_kernel_args(args: Sequence[KernelArg]) -> tuple[list[int], list[int]]:
    """(slots, starts): 8-byte little-endian words, and the index of the first word of each argument.

    As the Rust function: a pointer takes one slot; L bytes take max(1, ceil(L/8)), the last zero-padded; one
    parameter entry an argument. A pointer, a 128-byte struct and a u32 start at 0, 1 and 17 and take 18 slots.
    """
    slots: list[int] = []
    starts: list[int] = []
    for number, arg in enumerate(args):
        starts.append(len(slots))
        if arg.kind is Kind.BYTES:
            if not isinstance(arg.value, bytes):
                raise ArgumentTypeError("pack_kernel_args", f"argument {number} is {arg.value!r}, not bytes")
            data = arg.value
        elif arg.kind not in _FORMAT:
            raise ArgumentTypeError("pack_kernel_args", f"argument {number} is a {arg.kind.value}: state its type")
        else:
            value = check_argument("pack_kernel_args", Param(f"argument {number}", arg.kind, 8), arg)
            data = struct.pack("<" + _FORMAT[arg.kind], value)
        data += bytes(max(8, -(-len(data) // 8) * 8) - len(data))
        slots.extend(struct.unpack(f"<{len(data) // 8}Q", data))
    return slots, starts


class KernelLaunch:
    """A launch under construction: geometry, then arguments in the kernel's order, then `launch(stream)`.

    Defaults are Rust's: grid and block [1,1,1], no dynamic shared memory, not cooperative. `launch` may be called
    again; the arguments stay.
    """

    __slots__ = ("_args", "_block", "_cooperative", "_gpu", "_grid", "_kernel", "_kinds", "_shared")

    def __init__(self, gpu: GpuBackend, kernel: KernelHandle) -> None:
        self._gpu, self._kernel = gpu, kernel
        self._grid: Sequence[int] = (1, 1, 1)
        self._block: Sequence[int] = (1, 1, 1)
        self._shared = 0
        self._cooperative = False
        self._args: list[Any] = []
        self._kinds: list[Kind] = []

    def grid(self, xyz: Sequence[int]) -> KernelLaunch:
        """Blocks in x, y, z."""
        self._grid = xyz
        return self

    def block(self, xyz: Sequence[int]) -> KernelLaunch:
        """Threads a block in x, y, z."""
        self._block = xyz
        return self

    def shared_mem(self, nbytes: int) -> KernelLaunch:
        """Dynamic shared memory in bytes."""
        self._shared = nbytes
        return self

    def cooperative(self) -> KernelLaunch:
        """Launch with all blocks resident together."""
        self._cooperative = True
        return self

    def arg_ptr(self, ptr: DevicePtr) -> KernelLaunch:
        """A device pointer."""
        self._args.append(ptr)
        self._kinds.append(Kind.PTR)
        return self

    def arg_u8(self, value: int) -> KernelLaunch:
        """An unsigned 8-bit integer. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.U8)
        return self

    def arg_i8(self, value: int) -> KernelLaunch:
        """A signed 8-bit integer. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.I8)
        return self

    def arg_u16(self, value: int) -> KernelLaunch:
        """An unsigned 16-bit integer. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.U16)
        return self

    def arg_i16(self, value: int) -> KernelLaunch:
        """A signed 16-bit integer. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.I16)
        return self

    def arg_u32(self, value: int) -> KernelLaunch:
        """An unsigned 32-bit integer."""
        self._args.append(value)
        self._kinds.append(Kind.U32)
        return self

    def arg_i32(self, value: int) -> KernelLaunch:
        """A signed 32-bit integer."""
        self._args.append(value)
        self._kinds.append(Kind.I32)
        return self

    def arg_u64(self, value: int) -> KernelLaunch:
        """An unsigned 64-bit integer."""
        self._args.append(value)
        self._kinds.append(Kind.U64)
        return self

    def arg_i64(self, value: int) -> KernelLaunch:
        """A signed 64-bit integer. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.I64)
        return self

    def arg_f32(self, value: float) -> KernelLaunch:
        """A 32-bit float; a Python float is rounded to nearest."""
        self._args.append(value)
        self._kinds.append(Kind.F32)
        return self

    def arg_f64(self, value: float) -> KernelLaunch:
        """A 64-bit float. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.F64)
        return self

    def arg_bytes(self, value: bytes) -> KernelLaunch:
        """A struct passed by value. (Not in Rust.)"""
        self._args.append(value)
        self._kinds.append(Kind.BYTES)
        return self

    def arg_tensormap(self, tensor_map: TensorMap) -> KernelLaunch:
        """A TMA descriptor: 128 bytes, passed by value as one parameter."""
        self._args.append(tensor_map.bytes())
        self._kinds.append(Kind.BYTES)
        return self

    def launch(self, stream: StreamLike) -> None:
        """Queue the launch."""
        call = self._gpu.launch_cooperative if self._cooperative else self._gpu.launch_typed
        call(self._kernel, self._grid, self._block, self._shared, stream, self._args, tuple(self._kinds))
