# SPDX-License-Identifier: AGPL-3.0-only
"""Checked launches: each mistake is refused by name, and nothing is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_py.runtime import (
    DevicePtr,
    GpuBackend,
    KernelArg,
    KernelHandle,
    Kind,
)
from spark_py.runtime.errors import (
    ArgumentPointerError,
    ArgumentRangeError,
    ArgumentTypeError,
    ArityError,
    ForeignHandleError,
    InvalidArgumentError,
    NullHandleError,
)

from .support import BF16, Concat, is_poison, poisoned, read, refused, second_backend, upload

CONCAT = "residual_add::bf16_concat"
NORM = "norm::rms_norm"


@pytest.fixture
def work(gpu: GpuBackend, rng: np.random.Generator) -> Concat:
    return Concat(gpu, rng)


class Norm:
    """`norm::rms_norm(input, weight, output, hidden_size u32, eps f32)` on one row."""

    def __init__(self, gpu: GpuBackend, rng: np.random.Generator) -> None:
        self.gpu, self.kernel = gpu, gpu.kernel("norm", "rms_norm")
        self.input, self.weight = (upload(gpu, rng.standard_normal(64).astype(BF16)) for _ in range(2))
        self.output = poisoned(gpu, 128)

    def launch(self, hidden_size: Any = 64, eps: Any = 1e-6) -> None:
        args = [self.input, self.weight, self.output, hidden_size, eps]
        self.gpu.launch_typed(self.kernel, (1, 1, 1), (64, 1, 1), 0, self.gpu.default_stream(), args)

    @property
    def untouched(self) -> bool:
        return is_poison(self.gpu, self.output, 128)


def test_a_right_launch(work: Concat) -> None:
    work.launch()
    assert work.result == work.expected


# ---------------------------------------------------------------- arity


def test_too_few(work: Concat) -> None:
    with refused(ArityError, CONCAT, "3", "4", "'N'"):
        work.launch(args=work.args[:-1])
    with refused(ArityError, CONCAT, "0 arguments", "'a'"):
        work.launch(args=[])
    assert work.untouched


def test_too_many(work: Concat) -> None:
    with refused(ArityError, CONCAT, "5", "4", "1 too many"):
        work.launch(args=[*work.args, 0])
    assert work.untouched


@pytest.mark.parametrize("args", [None, 4, {1: 2}, iter(())], ids=lambda a: type(a).__name__)
def test_arguments_that_are_no_list(work: Concat, args: Any) -> None:
    with refused(InvalidArgumentError, "args", CONCAT):
        work.gpu.launch_typed(work.kernel, work.grid, work.BLOCK, 0, work.gpu.default_stream(), args)
    assert work.untouched


# ---------------------------------------------------------------- types and ranges


@pytest.mark.parametrize("value", [300.0, np.float32(300), True, np.True_, None, "300", b"300\0", [300], 1j], ids=repr)
def test_what_is_no_u32(work: Concat, value: Any) -> None:
    for given_ in (value, KernelArg(Kind.U32, value)):
        with refused(ArgumentTypeError, CONCAT, "'N'", "u32") as caught:
            work.launch(args=[*work.args[:3], given_])
        assert (caught.value.kernel, caught.value.parameter) == (CONCAT, "N")
    assert work.untouched


def test_a_pointer_is_no_number(work: Concat) -> None:
    with refused(ArgumentTypeError, CONCAT, "'N'", "u32"):
        work.launch(args=[work.a, work.b, work.out, work.a])
    assert work.untouched


@pytest.mark.parametrize("value", [-1, 2**32, 2**64, np.int64(-1), np.uint64(2**32)], ids=repr)
def test_out_of_range(work: Concat, value: Any) -> None:
    for again in range(2):  # the plan exists the second time
        with refused(ArgumentRangeError, CONCAT, "'N'", str(int(value)), "4294967295"):
            work.launch(args=[*work.args[:3], value])
        assert work.untouched, again


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.uint64, np.int64, int])
def test_numpy_integers(gpu: GpuBackend, rng: np.random.Generator, kind: Any) -> None:
    work = Concat(gpu, rng, 100)
    work.launch(args=[work.a, work.b, work.out, kind(100)])
    assert work.result == work.expected


@pytest.mark.parametrize("value", [0, 4096, None, True, 1.0, b"12345678", np.zeros(8), "a"], ids=repr)
@pytest.mark.parametrize("index", [0, 2])
def test_what_is_no_pointer(work: Concat, index: int, value: Any) -> None:
    args = work.args
    args[index] = value
    with refused(ArgumentTypeError, CONCAT, "'ab?o"[1 + index] if index == 0 else "'out'", "pointer"):
        work.launch(args=args)
    assert work.untouched


@pytest.mark.parametrize("value", ["1e-6", None, True, np.True_, b"\0\0\0\0", [1.0], DevicePtr(64)], ids=repr)
def test_what_is_no_f32(gpu: GpuBackend, rng: np.random.Generator, value: Any) -> None:
    norm = Norm(gpu, rng)
    for given_ in (value, KernelArg(Kind.F32, value)):
        with refused(ArgumentTypeError, NORM, "'eps'", "f32"):
            norm.launch(eps=given_)
    assert norm.untouched


@pytest.mark.parametrize("value", [1e39, -1e39, 10**400, np.float64(3.5e38)], ids=lambda v: str(v)[:8])
def test_beyond_f32(gpu: GpuBackend, rng: np.random.Generator, value: Any) -> None:
    norm = Norm(gpu, rng)
    with refused(ArgumentRangeError, NORM, "'eps'", "f32"):
        norm.launch(eps=value)
    assert norm.untouched


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1, 0x3F800000),
        (np.int32(2), 0x40000000),
        (np.float32(0.5), 0x3F000000),
        (np.float16(0.5), 0x3F000000),
        (np.float64(0.1), 0x3DCCCCCD),
        (0.1, 0x3DCCCCCD),
        (float("inf"), 0x7F800000),
        (float("nan"), 0x7FC00000),
        (3.4028234663852886e38, 0x7F7FFFFF),
    ],
    ids=repr,
)
def test_numbers_for_f32(gpu: GpuBackend, rng: np.random.Generator, value: Any, bits: int) -> None:
    norm = Norm(gpu, rng)
    with gpu.trace() as trace:
        norm.launch(eps=value)
    assert dict(trace.steps[0][0].words)["eps"] == bits
    assert not norm.untouched


@pytest.mark.parametrize("kind", [k for k in Kind if k is not Kind.U32], ids=lambda k: k.name)
def test_a_typed_argument_must_have_the_parameter_s_type(work: Concat, kind: Kind) -> None:
    """Rust's builder states types too; a u32 where an i32 belongs is the mistake that this catches."""
    for again in range(2):
        with refused(ArgumentTypeError, CONCAT, "'N'", "u32", kind.value):
            work.launch(args=[*work.args[:3], KernelArg(kind, 300)])
        assert work.untouched, again


# ---------------------------------------------------------------- handles


def test_handle_zero(gpu: GpuBackend, work: Concat) -> None:
    missing = gpu.try_kernel("residual_add", "no_such_kernel")
    for handle in (missing, KernelHandle(0)):
        with refused(NullHandleError, "0", "optional"):
            work.launch(func=handle)
    with refused(NullHandleError, "residual_add::no_such_kernel"):
        work.launch(func=missing)
    assert work.untouched


def test_a_handle_of_another_backend(gpu: GpuBackend, work: Concat) -> None:
    work.launch()  # so that a plan for the number exists
    work.reset()
    with second_backend(gpu) as other:
        theirs = other.kernel("residual_add", "bf16_concat")
        with refused(ForeignHandleError, CONCAT, "another backend"):
            work.launch(func=theirs)
        with refused(ForeignHandleError, CONCAT):
            work.launch(func=KernelHandle(work.kernel.value, theirs.owner, theirs.name))
    assert work.untouched


@pytest.mark.parametrize("handle", [None, 1, "bf16_concat", object()], ids=lambda h: type(h).__name__)
def test_what_is_no_handle(work: Concat, handle: Any) -> None:
    with refused(InvalidArgumentError, "KernelHandle"):
        work.launch(func=handle)
    assert work.untouched


# ---------------------------------------------------------------- pointers


@pytest.mark.parametrize("index", [0, 1, 2])
def test_null_pointers(work: Concat, index: int) -> None:
    args = work.args
    args[index] = DevicePtr.NULL
    with refused(ArgumentPointerError, CONCAT, f"'{('a', 'b', 'out')[index]}'", "NULL"):
        work.launch(args=args)
    assert work.untouched


@pytest.mark.parametrize("index", [0, 1, 2])
def test_pointers_to_nothing(gpu: GpuBackend, work: Concat, index: int) -> None:
    name = ("a", "b", "out")[index]
    host = np.zeros(1024, np.uint8)
    with second_backend(gpu) as other:
        theirs = other.alloc(4096)
        past = work.args[index].offset((2, 2, 4)[index] * work.n)
        for bad in (DevicePtr(2**63 + 16), DevicePtr(2), DevicePtr(host.ctypes.data & ~1), theirs, past):
            args = work.args
            args[index] = bad
            with refused(ArgumentPointerError, CONCAT, f"'{name}'", f"{bad.address:#x}"):
                work.launch(args=args)
        other.free(theirs)
    assert work.untouched


def test_a_used_plan_refuses_freed_memory(gpu: GpuBackend, work: Concat) -> None:
    for _ in range(3):
        work.launch()
    gpu.free(work.a)
    work.reset()
    for _ in range(2):
        with refused(ArgumentPointerError, CONCAT, "'a'", "freed", f"{work.a.address:#x}"):
            work.launch()
    assert work.untouched


def test_freed_memory_is_refused_when_a_launch_is_recorded(gpu: GpuBackend, work: Concat) -> None:
    """By the check of the call itself, on backends that would find it when the kernel runs too."""
    stream = gpu.default_stream()
    for _ in range(2):
        work.launch()
    gpu.free(work.b)
    gpu.begin_capture(stream)
    with refused(ArgumentPointerError, CONCAT, "'b'", "freed"):
        work.launch()
    assert not gpu.stream_is_capturing(stream)


def test_interior_pointers_of_freed_memory(gpu: GpuBackend, rng: np.random.Generator) -> None:
    work = Concat(gpu, rng, 64)
    pool = upload(gpu, bytes(1024), "pool")
    args = [pool.offset(512), work.b, work.out, 64]
    work.launch(args=args)
    gpu.free(pool)
    work.reset()
    with refused(ArgumentPointerError, "'a'", "freed", "'pool'"):
        work.launch(args=args)
    assert work.untouched


def test_memory_handed_out_again_is_good_again(gpu: GpuBackend, work: Concat) -> None:
    work.launch()
    size, held = 2 * work.n, []
    gpu.free(work.a)
    with pytest.raises(ArgumentPointerError):
        work.launch()
    for _ in range(64):  # until the address comes back; an allocator may not give it back at all
        held.append(gpu.alloc(size))
        if held[-1] == work.a:
            break
    fresh = held[-1]
    gpu.copy_h2d(work.left, fresh)
    work.reset()
    work.launch(args=[fresh, work.b, work.out, work.n])
    assert work.result == work.expected


@pytest.mark.parametrize(("index", "step"), [(0, 1), (1, 1), (2, 1)])
def test_misaligned_elements(gpu: GpuBackend, rng: np.random.Generator, index: int, step: int) -> None:
    work = Concat(gpu, rng, 64)
    room = [upload(gpu, bytes(512)), upload(gpu, bytes(512)), poisoned(gpu, 512)]
    work.launch(args=[*room, 64])
    gpu.memset(room[2], 0xA5, 512)
    bad = room[index].offset(step)
    args = [*room[:index], bad, *room[index + 1 :], 64]
    for _ in range(2):  # remembered addresses are checked too
        with refused(ArgumentPointerError, CONCAT, f"{bad.address:#x}", "multiple of 2"):
            work.launch(args=args)
    assert is_poison(gpu, room[2], 512)


@pytest.mark.parametrize("step", [2, 4, 8])
@pytest.mark.parametrize("index", [0, 1])
def test_misaligned_wide_loads(gpu: GpuBackend, rng: np.random.Generator, index: int, step: int) -> None:
    """`gemv::dense_gemv_bf16` reads A and B by 16 bytes; at an 8-byte address the GPU would fault."""
    kernel = gpu.kernel("gemv", "dense_gemv_bf16")
    room = [upload(gpu, bytes(4096)), upload(gpu, bytes(4096))]
    out = poisoned(gpu, 64)

    def launch() -> None:
        gpu.launch_typed(kernel, (8, 1, 1), (256, 1, 1), 0, gpu.default_stream(), [*room, out, 32, 16])

    launch()
    gpu.memset(out, 0xA5, 64)
    bad = room[index] = room[index].offset(step)
    for _ in range(2):
        with refused(ArgumentPointerError, "gemv::dense_gemv_bf16", "'AB'"[1 + index], f"{bad.address:#x}", "16"):
            launch()
    assert is_poison(gpu, out, 64)
    room[index] = bad.offset(16 - step)
    launch()
    assert read(gpu, out, 64) == bytes(64)


# ---------------------------------------------------------------- ids read on the device (launcher half)


@pytest.mark.host_only("only a backend that runs kernels itself can hold ids in device memory against the table")
@pytest.mark.parametrize("token", [-1, 32, 2**32 - 1, np.int32(-1)], ids=repr)
@pytest.mark.parametrize("function", ["embed_from_argmax", "batched_embed"])
def test_ids_beyond_the_table(gpu: GpuBackend, rng: np.random.Generator, token: Any, function: str) -> None:
    kernel = gpu.kernel("embed_from_argmax", function)
    table = upload(gpu, rng.standard_normal((32, 64)).astype(BF16), "table")
    ids = upload(gpu, np.array([3, int(token) % 2**32], np.uint32))
    out, id_out = poisoned(gpu, 256), poisoned(gpu, 4)

    def launch(at: DevicePtr, rows: int) -> None:
        args = [at, table, out, 64] if function == "batched_embed" else [at, table, out, id_out, 64]
        gpu.launch_typed(kernel, (rows, 1, 1), (256, 1, 1), 0, gpu.default_stream(), args)

    with refused(ArgumentPointerError, function, "'embed_table'", "'table'" if token == 32 else ""):
        launch(ids.offset(4), 1)
    if function == "batched_embed":
        with refused(ArgumentPointerError, function, "'embed_table'"):
            launch(ids, 2)
    assert is_poison(gpu, out, 256)
    assert is_poison(gpu, id_out, 4)
    launch(ids, 1)
    assert not is_poison(gpu, out, 128)


@pytest.mark.host_only("only a backend that runs kernels itself knows what a launch touches")
@pytest.mark.parametrize(("index", "name"), [(0, "a"), (1, "b"), (2, "out")])
def test_ranges_of_a_launch(gpu: GpuBackend, work: Concat, index: int, name: str) -> None:
    args = work.args
    args[index] = args[index].offset(2)
    with refused(ArgumentPointerError, CONCAT, f"'{name}'", "2 past the end", "write" if name == "out" else "read"):
        work.launch(args=args)
    assert work.untouched
