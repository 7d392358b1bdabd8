# SPDX-License-Identifier: AGPL-3.0-only
"""KernelLaunch, the packing of arguments, and div_ceil."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_py.runtime import (
    DevicePtr,
    GpuBackend,
    KernelArg,
    KernelHandle,
    KernelLaunch,
    Kind,
    div_ceil,
    pack_kernel_args,
)
from spark_py.runtime.errors import (
    ArgumentRangeError,
    ArgumentTypeError,
    ArityError,
    GeometryError,
    InvalidArgumentError,
    LaunchError,
    NullHandleError,
)

from .support import Concat, refused

CONCAT = "residual_add::bf16_concat"
NORM = "norm::rms_norm"


@pytest.fixture
def work(gpu: GpuBackend, rng: np.random.Generator) -> Concat:
    return Concat(gpu, rng)


# ---------------------------------------------------------------- the builder


def test_the_builder_is_launch_typed(gpu: GpuBackend, work: Concat) -> None:
    builder = KernelLaunch(gpu, work.kernel).grid(work.grid).block(work.BLOCK).shared_mem(0)
    builder.arg_ptr(work.a).arg_ptr(work.b).arg_ptr(work.out).arg_u32(work.n)
    with gpu.trace() as trace:
        builder.launch(gpu.default_stream())
        trace.step()
        work.launch()
    assert not trace.diff()
    assert work.result == work.expected
    work.reset()
    builder.launch(gpu.default_stream())  # again, with the same arguments
    assert work.result == work.expected


def test_the_builder_s_defaults(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng, 1)
    builder = KernelLaunch(gpu, work.kernel).arg_ptr(work.a).arg_ptr(work.b).arg_ptr(work.out).arg_u32(1)
    with gpu.trace() as trace:
        builder.block(work.BLOCK).launch(gpu.default_stream())
    entry = trace.steps[0][0]
    assert (entry.grid, entry.block, entry.shared_mem) == ((1, 1, 1), (256, 1, 1), 0)
    assert work.result == work.expected


def test_the_builder_is_checked(gpu: GpuBackend, work: Concat) -> None:
    def builder() -> KernelLaunch:
        return KernelLaunch(gpu, work.kernel).grid(work.grid).block(work.BLOCK).arg_ptr(work.a).arg_ptr(work.b)

    stream = gpu.default_stream()
    with refused(ArityError, CONCAT, "'N'"):
        builder().arg_ptr(work.out).launch(stream)
    with refused(ArgumentTypeError, CONCAT, "'N'", "i32", "u32"):
        builder().arg_ptr(work.out).arg_i32(300).launch(stream)
    with refused(ArgumentTypeError, CONCAT, "'N'", "u64", "u32"):
        builder().arg_ptr(work.out).arg_u64(300).launch(stream)
    with refused(ArgumentTypeError, CONCAT, "'out'"):
        builder().arg_u64(work.out.address).arg_u32(300).launch(stream)
    with refused(ArgumentTypeError, CONCAT, "'out'"):
        builder().arg_ptr(work.out.address).arg_u32(300).launch(stream)  # type: ignore[arg-type]
    with refused(ArgumentRangeError, CONCAT, "'N'", "-300"):
        builder().arg_ptr(work.out).arg_u32(-300).launch(stream)
    with refused(NullHandleError, "0"):
        KernelLaunch(gpu, KernelHandle(0)).launch(stream)
    assert work.untouched
    builder().arg_ptr(work.out).arg_u32(np.int64(300)).launch(stream)
    assert work.result == work.expected


def test_cooperative(gpu: GpuBackend, work: Concat) -> None:
    builder = KernelLaunch(gpu, work.kernel).grid(work.grid).block(work.BLOCK).cooperative()
    builder.arg_ptr(work.a).arg_ptr(work.b).arg_ptr(work.out).arg_u32(work.n).launch(gpu.default_stream())
    assert work.result == work.expected
    work.reset()
    with refused(GeometryError, CONCAT, "cooperative", "1000000 blocks", "fit"):
        gpu.launch_cooperative(work.kernel, (1_000_000, 1, 1), work.BLOCK, 0, gpu.default_stream(), work.args)
    assert work.untouched
    gpu.launch_cooperative_typed(work.kernel, work.grid, work.BLOCK, 0, gpu.default_stream(), work.args)
    assert work.result == work.expected


# ---------------------------------------------------------------- packing


def test_packing_of_the_worked_example() -> None:
    """A pointer, a 128-byte struct and a u32: the engine's own example."""
    blob = bytes(range(128))
    args = [KernelArg(Kind.PTR, DevicePtr(2**63 + 16)), KernelArg(Kind.BYTES, blob), KernelArg(Kind.U32, 7)]
    slots, starts = pack_kernel_args(args)
    assert starts == [0, 1, 17]
    assert len(slots) == 18
    assert slots[0] == 2**63 + 16
    assert struct.pack("<16Q", *slots[1:17]) == blob
    assert slots[17] == 7


@pytest.mark.parametrize(
    ("arg", "slots"),
    [
        (KernelArg(Kind.I32, -1), [0xFFFFFFFF]),
        (KernelArg(Kind.F32, 1.0), [0x3F800000]),
        (KernelArg(Kind.U64, 2**64 - 1), [2**64 - 1]),
        (KernelArg(Kind.I8, -2), [0xFE]),
        (KernelArg(Kind.BYTES, b""), [0]),
        (KernelArg(Kind.BYTES, b"\1"), [1]),
        (KernelArg(Kind.BYTES, bytes(8) + b"\2"), [0, 2]),
    ],
)
def test_packing_of_one(arg: KernelArg, slots: list[int]) -> None:
    assert pack_kernel_args([arg]) == (slots, [0])


@given(st.lists(st.binary(min_size=0, max_size=40), max_size=6))
def test_packing_keeps_every_byte(blobs: list[bytes]) -> None:
    slots, starts = pack_kernel_args([KernelArg(Kind.BYTES, blob) for blob in blobs])
    words = struct.pack(f"<{len(slots)}Q", *slots)
    for blob, start in zip(blobs, starts, strict=True):
        assert words[8 * start : 8 * start + len(blob)] == blob
    assert len(slots) == sum(max(1, -(-len(blob) // 8)) for blob in blobs)


@pytest.mark.parametrize(
    "arg",
    [
        KernelArg(Kind.U32, -1),
        KernelArg(Kind.PTR, 16),
        KernelArg(Kind.BYTES, 7),
        KernelArg(Kind.U32, True),
        KernelArg(Kind.W32, 1),
    ],
    ids=repr,
)
def test_packing_refuses(arg: KernelArg) -> None:
    with refused(LaunchError, "argument 0"):
        pack_kernel_args([arg])


@pytest.mark.parametrize(("a", "b", "want"), [(0, 256, 0), (1, 256, 1), (256, 256, 1), (257, 256, 2), (2**70, 3, None)])
def test_div_ceil(a: int, b: int, want: int | None) -> None:
    assert div_ceil(a, b) == (-(-a // b) if want is None else want)
    for bad in ((-1, 2), (1, 0), (1, -1)):
        with refused(InvalidArgumentError, "div_ceil"):
            div_ceil(*bad)
