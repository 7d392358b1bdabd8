# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_w8a16_rows`: up to eight rows through block-scaled E4M3 matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of
from ._gemv_rows import TILE
from .gemv_fp8w import HasFp8Rows

__all__ = ["MAX_MATRICES", "MAX_ROWS", "STEP", "TILE", "W8Projection", "spark_w8a16_rows"]

MAX_ROWS, MAX_MATRICES = 8, 2
STEP = 16
"""What k must be a multiple of; and where there are several groups, the outputs of each."""
RESIDENT = 396
"""Blocks that run at the same time on the GPU that this was tuned on, three on each of 132 multiprocessors, sharing
the tiles: those that have one more lie on multiprocessors of their own. Bits do not depend on it."""


@dataclass(frozen=True, slots=True)
class W8Projection:
    """One matrix of a launch, codes [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    weight: HasFp8Rows
    output: DevicePtr
    n: int
    stride: int


def spark_w8a16_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    projections: Sequence[W8Projection],
    m: int,
    k: int,
    stream: StreamLike,
    *,
    groups: int = 1,
    other: tuple[DevicePtr, int] | None = None,
) -> None:
    """Each projection's output [m, n] = input [m, k] . weight [n, k] transposed, BF16. A row's bits do not depend on
    the other rows and projections; they are not those of `w8a16_gemv`. `other` is an input for the second projection
    alone, and how many rows that has.

    The weights' `row_scale` is FP32 [ceil(n / 128), ceil(k / 128)]. `kernel` is `spark_w8a16_rows::spark_w8a16_rows`.
    m is at most 8, projections at most 2, k a multiple of 16; input and codes lie on 16-byte addresses. groups > 1: the
    one projection is that many matrices, [n / groups, k] each, n / groups a multiple of 16, and matrix g reads columns
    g * k on of input [m, groups * k].
    """
    sources = [(input, m), other or (input, m)][: len(projections)]
    for _, rows in [(input, m), *sources[1:]]:
        if count("m", rows) > MAX_ROWS:
            raise InvalidArgumentError("m", rows, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, STEP, "rows are read 16 bytes at a time")
    if not 1 <= len(projections) <= (MAX_MATRICES if count("groups", groups) == 1 else 1):
        limit = f"1 to {MAX_MATRICES} are taken, and one of several groups"
        raise InvalidArgumentError("projections", len(projections), limit)
    for each in projections:
        if count("stride", each.stride) < count("n", each.n):
            raise InvalidArgumentError("stride", each.stride, f"at least n = {each.n} is needed")
    if groups > 1 and projections[0].n % (TILE * groups):
        limit = f"a multiple of {TILE} outputs for each of {groups} groups is needed"
        raise InvalidArgumentError("n", projections[0].n, limit)
    tiles = sum(div_ceil(each.n, TILE) for each in projections)
    missing = MAX_MATRICES - len(projections)
    null, zero = [DevicePtr.NULL] * missing, [0] * missing
    launch = KernelLaunch(gpu, kernel).grid((min(tiles, RESIDENT), 1, 1)).block((256, 1, 1))
    for pointers in (
        [source for source, _ in sources],
        [each.weight.weight for each in projections],
        [each.weight.row_scale for each in projections],
        [each.output for each in projections],
    ):
        for ptr in pointers + null:
            launch.arg_ptr(ptr)
    for rows in [rows for _, rows in sources] + zero:
        launch.arg_u32(rows)
    for n in [each.n for each in projections] + zero:
        launch.arg_u32(n)
    launch.arg_u32(k)
    for stride in [each.stride for each in projections] + zero:
        launch.arg_u32(stride)
    launch.arg_u32(groups).launch(stream)
