# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_w8a16_rows`: up to eight rows through block-scaled E4M3 matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of
from .gemv_fp8w import HasFp8Rows

__all__ = ["MAX_MATRICES", "MAX_ROWS", "STEP", "TOGETHER", "W8Projection", "W8RowsKernels", "spark_w8a16_rows"]

MAX_ROWS, MAX_MATRICES = 8, 2
STEP = 8
"""What k must be a multiple of."""
TOGETHER = 4
"""What the outputs of a group must be a multiple of where there are several groups."""
_SHORT, _WARPS = 1024, 4


@dataclass(frozen=True, slots=True)
class W8Projection:
    """One matrix of a launch, codes [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    weight: HasFp8Rows
    output: DevicePtr
    n: int
    stride: int


@dataclass(frozen=True, slots=True)
class W8RowsKernels:
    """The kernel for a single row and that for several: the same bits."""

    one: KernelHandle
    rows: KernelHandle

    @classmethod
    def of(cls, gpu: GpuBackend) -> W8RowsKernels | None:
        """Those of the kernel set; None where it lacks one."""
        one, rows = (gpu.try_kernel("spark_w8a16_rows", f"spark_w8a16_{name}") for name in ("row", "rows"))
        return cls(one, rows) if one and rows else None


def spark_w8a16_rows(
    gpu: GpuBackend,
    kernels: W8RowsKernels,
    input: DevicePtr,  # noqa: A002 - the engine's name
    projections: Sequence[W8Projection],
    m: int,
    k: int,
    stream: StreamLike,
    *,
    groups: int = 1,
) -> None:
    """Each projection's output [m, n] = input [m, k] . weight [n, k] transposed, BF16. A row's bits do not depend on
    the other rows and projections; they are not those of `w8a16_gemv`.

    The weights' `row_scale` is FP32 [ceil(n / 128), ceil(k / 128)]. m is at most 8, projections at most 2, k a multiple
    of 8; input lies on a 16-byte address, codes on 8-byte ones. groups > 1: the one projection is that many matrices,
    [n / groups, k] each, n / groups a multiple of 4, and matrix g reads columns g * k on of input [m, groups * k].
    """
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, STEP, "elements are read eight at a time")
    if not 1 <= len(projections) <= (MAX_MATRICES if count("groups", groups) == 1 else 1):
        limit = f"1 to {MAX_MATRICES} are taken, and one of several groups"
        raise InvalidArgumentError("projections", len(projections), limit)
    for each in projections:
        if count("stride", each.stride) < count("n", each.n):
            raise InvalidArgumentError("stride", each.stride, f"at least n = {each.n} is needed")
    if groups > 1 and projections[0].n % (TOGETHER * groups):
        limit = f"a multiple of {TOGETHER} outputs for each of {groups} groups is needed"
        raise InvalidArgumentError("n", projections[0].n, limit)
    together = 2 if m == 1 and k > _SHORT else TOGETHER
    units = sum(div_ceil(each.n, together) for each in projections)
    missing = MAX_MATRICES - len(projections)
    null, zero = [DevicePtr.NULL] * missing, [0] * missing
    launch = KernelLaunch(gpu, kernels.one if m == 1 else kernels.rows)
    launch.grid((div_ceil(units, _WARPS), 1, 1)).block((128, 1, 1)).arg_ptr(input)
    for pointers in (
        [each.weight.weight for each in projections],
        [each.weight.row_scale for each in projections],
        [each.output for each in projections],
    ):
        for ptr in pointers + null:
            launch.arg_ptr(ptr)
    launch.arg_u32(m)
    for n in [each.n for each in projections] + zero:
        launch.arg_u32(n)
    launch.arg_u32(k)
    for stride in [each.stride for each in projections] + zero:
        launch.arg_u32(stride)
    launch.arg_u32(groups).launch(stream)
