# SPDX-License-Identifier: AGPL-3.0-only
"""What the launchers of `spark_gemv_rows.cuh` share: up to eight rows through up to three matrices of a format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, dynamic_shared, multiple_of

MAX_ROWS, MAX_MATRICES = 8, 3
TILE = 16
"""Outputs that a block makes at a time."""

_SHARED_OF_SYSTEM, _SHARED_UNIT = 1024, 128
"""Bytes of shared memory that a block has beside its own (CUDA C++ Programming Guide, compute capability 8.x to 12.x),
and in which it is given out."""

ARGMAX_ROOM_BYTES = 8 * MAX_ROWS + 4

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class ProjectionOf(Generic[W]):
    """One matrix of a launch, [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    weight: W
    output: DevicePtr
    n: int
    stride: int


def blocks_for(tiles: int, resident: int) -> int:
    """As many blocks as give each the same number of tiles, all of them running at once."""
    return div_ceil(tiles, div_ceil(tiles, resident))


def all_blocks(tiles: int, resident: int) -> int:
    """As many blocks as run at once: some have a tile more than the others."""
    return min(tiles, resident)


def apart(gpu: GpuBackend, kernel: KernelHandle, blocks: int) -> int:
    """Bytes of dynamic shared memory, which nobody uses, for a launch of more than two and at most three blocks a
    multiprocessor: as many as keep a fourth block from it, with the kernel's limit raised. 0 where three fit at most.

    Blocks of a dependent launch begin wherever there is a place. Where the launch before them leaves a fourth one free
    on some multiprocessors, these end up with four blocks and others with one, and a block keeps its tiles.
    """
    if kernel.is_null or not 2 < blocks / gpu.sm_count() <= 3:
        return 0
    whole = gpu.limits.max_shared_optin + _SHARED_OF_SYSTEM  # of a multiprocessor
    block = gpu.function_attributes(kernel).shared_static + _SHARED_OF_SYSTEM
    if whole // block < 4:
        return 0
    return dynamic_shared(gpu, kernel, whole // 4 - block + _SHARED_UNIT)


@dataclass(frozen=True, slots=True)
class RowsFormat(Generic[W]):
    """A format of weights: k is a multiple of `step`, for the reason `why`; `resident` blocks of `threads` run at the
    same time on the GPU that the kernel was tuned on, and share tiles as `blocks` says, with dynamic shared memory as
    `shared` says; a matrix has these `pointers` and, before head_dim, this `factor`."""

    step: int
    why: str
    resident: int
    pointers: tuple[Callable[[W], DevicePtr], ...]
    factor: Callable[[W], float] | None = None
    threads: int = 256
    blocks: Callable[[int, int], int] = blocks_for
    shared: Callable[[GpuBackend, KernelHandle, int], int] | None = None


def launch_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    projections: Sequence[ProjectionOf[W]],
    m: int,
    k: int,
    stream: StreamLike,
    head_dim: int,
    form: RowsFormat[W],
) -> None:
    """Launch `kernel` on weights of format `form`; InvalidArgumentError for numbers that it does not take."""
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, form.step, form.why)
    if not 1 <= len(projections) <= MAX_MATRICES:
        raise InvalidArgumentError("projections", len(projections), f"1 to {MAX_MATRICES} are taken")
    for each in projections:
        if count("stride", each.stride) < count("n", each.n):
            raise InvalidArgumentError("stride", each.stride, f"at least n = {each.n} is needed")
    if head_dim and projections[0].n % (2 * count("head_dim", head_dim)):
        raise InvalidArgumentError("n", projections[0].n, f"a multiple of 2 * head_dim = {2 * head_dim} is needed")
    tiles = sum(div_ceil(each.n, TILE) for each in projections)
    missing = MAX_MATRICES - len(projections)
    blocks = form.blocks(tiles, form.resident)
    launch = KernelLaunch(gpu, kernel).grid((blocks, 1, 1)).block((form.threads, 1, 1)).arg_ptr(input)
    if form.shared is not None:
        launch.shared_mem(form.shared(gpu, kernel, blocks))
    null = [DevicePtr.NULL] * missing
    operands = [[pointer(each.weight) for each in projections] for pointer in form.pointers]
    for pointers in (*operands, [each.output for each in projections]):
        for ptr in pointers + null:
            launch.arg_ptr(ptr)
    launch.arg_u32(m)
    for n in [each.n for each in projections] + [0] * missing:
        launch.arg_u32(n)
    launch.arg_u32(k)
    for stride in [each.stride for each in projections] + [0] * missing:
        launch.arg_u32(stride)
    if form.factor is not None:
        for factor in [form.factor(each.weight) for each in projections] + [0.0] * missing:
            launch.arg_f32(factor)
    launch.arg_u32(head_dim).launch(stream)


@dataclass(frozen=True, slots=True)
class ArgmaxRoom:
    """Memory that blocks of a launch meet in: u64 `best` [8] and u32 `done`, zero before the first launch and after
    each; one launch at a time."""

    best: DevicePtr
    done: DevicePtr

    @staticmethod
    def at(base: DevicePtr) -> ArgmaxRoom:
        """In ARGMAX_ROOM_BYTES from `base` on."""
        return ArgmaxRoom(base, base.offset(8 * MAX_ROWS))


def launch_argmax(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: W,
    ids: DevicePtr,
    table: DevicePtr,
    embed: DevicePtr,
    room: ArgmaxRoom,
    m: int,
    n: int,
    k: int,
    stream: StreamLike,
    form: RowsFormat[W],
) -> None:
    """Launch `kernel`, the argmax of a format's products; InvalidArgumentError for numbers that it does not take."""
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, form.step, form.why)
    blocks = form.blocks(div_ceil(count("n", n), TILE), form.resident)
    launch = KernelLaunch(gpu, kernel).grid((blocks, 1, 1)).block((form.threads, 1, 1)).arg_ptr(input)
    for pointer in form.pointers:
        launch.arg_ptr(pointer(weight))
    for ptr in (ids, table, embed, room.best, room.done):
        launch.arg_ptr(ptr)
    launch.arg_u32(m).arg_u32(n).arg_u32(k)
    if form.factor is not None:
        launch.arg_f32(form.factor(weight))
    launch.launch(stream)
