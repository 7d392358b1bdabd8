# SPDX-License-Identifier: AGPL-3.0-only
"""The short way of a launch: it takes what is plain and known, and leaves everything else to the long way."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend, KernelArg, Kind, quick
from spark_py.runtime.checked.launches import LaunchOps

from .support import Concat

KINDS = (Kind.PTR, Kind.U32, Kind.PTR, Kind.F32, Kind.I64)
PACKED = struct.Struct("=2QIfq")
GOOD = (DevicePtr(0x1000), 7, DevicePtr(0x2000), 0.5, -3)
SEEN = {(0x1000, 0x2000)}


class Device:
    """Stands for a driver: one place, and what was packed there at each call."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault, self.calls = fault, []  # type: ignore[var-annotated]
        self.places: list[tuple[bytearray, tuple[str]]] = [(bytearray(PACKED.size), ("here",))]

    def call(self, where: str) -> None:
        self.calls.append((where, PACKED.unpack(self.places_taken)))
        if self.fault is not None:
            raise self.fault

    def pack(self, buffer: bytearray, *values: Any) -> None:
        PACKED.pack_into(buffer, *values)
        self.places_taken = bytes(buffer)

    @property
    def parts(self) -> Any:
        return self.places.pop, self.places.append, self.pack, self.call


def made(device: Device | None) -> quick.Quick:
    make = quick.quick_maker(KINDS, device is not None)
    assert make is not None
    return make(SEEN, device.parts if device else None, DevicePtr)


def test_a_plain_call_is_packed_pointers_first() -> None:
    device = Device()
    assert made(device)(GOOD) is True
    assert device.calls == [("here", (0x1000, 0x2000, 7, 0.5, -3))]
    assert made(None)(list(GOOD)) == ((0x1000, 0x2000), (7, 0.5, -3))


class Alike:
    """Has an address, and is no pointer of a device."""

    address = 0x1000


OTHERS: dict[str, tuple[int, Any]] = {
    "truth for a number": (1, True),
    "NumPy's number": (1, np.uint32(7)),
    "a pointer for a number": (1, DevicePtr(7)),
    "an integer for a float": (3, 1),
    "NumPy's float": (3, np.float32(1)),
    "a number for a pointer": (0, 0x1000),
    "NULL": (0, DevicePtr(0)),
    "something like a pointer": (0, Alike()),
    "a typed argument": (1, KernelArg(Kind.U32, 7)),
    "an address that nobody has seen": (2, DevicePtr(0x2008)),
    "a negative u32": (1, -1),
    "a u32 too large": (1, 1 << 32),
    "a float too large": (3, 1e39),
    "an i64 too large": (4, 1 << 63),
}


def left_alone(device: Device | None, args: Any) -> bool:
    """Whether the call was left to the long way, with the place free again."""
    try:
        found = made(device)(args)
    except (TypeError, ValueError, AttributeError, struct.error, OverflowError):
        found = False
    if device is None:
        return found is False or struct_refuses(*found)
    return found is False and not device.calls and len(device.places) == 1


def struct_refuses(addresses: tuple[int, ...], scalars: tuple[Any, ...]) -> bool:
    try:
        PACKED.pack(*addresses, *scalars)
    except (struct.error, OverflowError):
        return True
    return False


@pytest.mark.parametrize("launches", [True, False], ids=["launches", "gives back"])
@pytest.mark.parametrize("what", OTHERS)
def test_anything_else_is_left_to_the_long_way(what: str, launches: bool) -> None:
    at, value = OTHERS[what]
    args = [*GOOD]
    args[at] = value
    assert left_alone(Device() if launches else None, args)


@pytest.mark.parametrize("args", [(), GOOD[:-1], (*GOOD, 1), None, 5], ids=["none", "few", "many", "None", "a number"])
def test_calls_of_another_length_are_left_to_the_long_way(args: Any) -> None:
    assert left_alone(Device(), args)
    assert left_alone(None, args)


def test_a_place_that_is_taken_is_left_alone() -> None:
    device = Device()
    run = made(device)
    device.places.clear()
    with pytest.raises(IndexError):
        run(GOOD)
    assert not device.calls


def test_a_call_that_fails_is_not_called_done() -> None:
    device = Device(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        made(device)(GOOD)
    assert len(device.places) == 1


@pytest.mark.parametrize("kind", [Kind.W64, Kind.BYTES])
def test_words_that_may_be_pointers_and_bytes_have_no_short_way(kind: Kind) -> None:
    assert quick.quick_maker((Kind.PTR, kind), True) is None


def test_kernels_without_parameters() -> None:
    make = quick.quick_maker((), False)
    assert make is not None
    assert make({()}, None, DevicePtr)(()) == ((), ())


MUTANTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "seen not asked": ("_TAKEN", lambda text: text.replace("({key}) in seen", "True")),
    "types not asked": ("_TAKEN", lambda text: text.replace("{plain}", "")),
    "place kept after a fault": ("_TAKEN", lambda text: text.replace("finally:", "except ZeroDivisionError:")),
    "seen not asked, given back": ("_GIVEN", lambda text: text.replace("({key})) in seen", "({key}))")),
    "types not asked, given back": ("_GIVEN", lambda text: text.replace("{plain}", "")),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, change = MUTANTS[name]
    text = getattr(quick, which)
    assert change(text) != text
    monkeypatch.setattr(quick, which, change(text))
    quick.quick_maker.cache_clear()
    launches = which == "_TAKEN"
    try:
        wrong = [what for what, (at, value) in OTHERS.items()
                 if not left_alone(Device() if launches else None, [*GOOD[:at], value, *GOOD[at + 1 :]])]  # fmt: skip
        assert wrong
    finally:
        quick.quick_maker.cache_clear()


def test_a_backend_takes_the_short_way_until_memory_is_freed(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HostBackend takes the long way, which records launches; the short one is the same on every backend."""
    work = Concat(gpu, rng)
    long_ways: list[bool] = []
    launch = gpu._launch  # type: ignore[attr-defined]

    def counted(*args: Any) -> None:
        long_ways[-1] = True
        launch(*args)

    monkeypatch.setattr(gpu, "_launch", counted)

    def once() -> None:
        work.reset()
        long_ways.append(False)
        args = (work.kernel, work.grid, work.BLOCK, 0, gpu.default_stream(), work.args)
        LaunchOps.launch_typed(gpu, *args)  # type: ignore[arg-type]
        assert work.result == work.expected

    for _ in range(4):  # the first finds the pointers alive, the second finds all plain
        once()
    gpu.free(gpu.alloc(64))
    for _ in range(3):
        once()
    assert long_ways == [True, True, False, False, True, True, False]


class LaunchFailedError(Exception):
    """Stands for the driver's."""


def test_a_launch_that_fails_on_the_short_way_takes_the_long_one(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, tried = Concat(gpu, rng), []

    def fail(*_: Any) -> None:
        tried.append(True)
        raise LaunchFailedError

    device = gpu._device  # type: ignore[attr-defined]
    places: list[Any] = [(bytearray(64), ())]
    parts = (places.pop, places.append, lambda *_: None, fail)
    monkeypatch.setattr(device, "quick_parts", lambda *_: parts)
    monkeypatch.setattr(gpu, "_not_so", (*gpu._not_so, LaunchFailedError))  # type: ignore[attr-defined]
    for _ in range(4):
        work.reset()
        LaunchOps.launch_typed(
            gpu, work.kernel, work.grid, work.BLOCK, 0, gpu.default_stream(), work.args  # type: ignore[arg-type]
        )  # fmt: skip
        assert work.result == work.expected
    assert tried == [True, True]
    assert len(places) == 1
