# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_fp8_gemv_rows`: up to eight rows through up to three E4M3 matrices in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ._gemv_rows import ArgmaxRoom, ProjectionOf, RowsFormat, launch_argmax, launch_rows
from .gemv_fp8w import HasFp8Rows

CHUNK = 16
"""What the length of a row must be a multiple of."""
RESIDENT = 396
"""Blocks that run at the same time on the GPU that this was tuned on, three on each of 132 multiprocessors. Bits do not
depend on it."""


class Fp8Projection(ProjectionOf[HasFp8Rows]):
    """One E4M3 matrix of a launch, [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    __slots__ = ()


_FORMAT: RowsFormat[HasFp8Rows] = RowsFormat(
    step=CHUNK,
    why="rows are read 16 bytes at a time",
    resident=RESIDENT,
    pointers=(lambda weight: weight.weight, lambda weight: weight.row_scale),
)


def spark_fp8_gemv_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    projections: Sequence[Fp8Projection],
    m: int,
    k: int,
    stream: StreamLike,
    *,
    head_dim: int = 0,
) -> None:
    """Each projection's output [m, n] = input [m, k] . weight [n, k] transposed, BF16. A row's bits do not depend on
    the other rows and projections; they are not those of `gemv_fp8w.dense_gemv_fp8w`.

    `kernel` is `spark_fp8_gemv_rows::spark_fp8_gemv_rows`. m is at most 8, projections at most 3, k a multiple of
    16; input and codes lie on 16-byte addresses. head_dim as for `spark_gemv_rows`.
    """
    launch_rows(gpu, kernel, input, projections, m, k, stream, head_dim, _FORMAT)


def spark_fp8_gemv_rows_argmax(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasFp8Rows,
    ids: DevicePtr,
    embed_table: DevicePtr,
    embed: DevicePtr,
    room: ArgmaxRoom,
    m: int,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """ids u32 [m]: the largest of each row that `spark_fp8_gemv_rows` would write for `weight` [n, k], as
    `argmax_bf16` finds it. embed BF16 [m, k]: rows ids of embed_table BF16 [n or more, k]; or both are NULL.

    `kernel` is `spark_fp8_gemv_rows::spark_fp8_gemv_rows_argmax`, with the limits of the other; embed and
    embed_table lie on 16-byte addresses too. Blocks meet in `room`.
    """
    launch_argmax(gpu, kernel, input, weight, ids, embed_table, embed, room, m, n, k, stream, _FORMAT)
