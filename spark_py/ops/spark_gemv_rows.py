# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_gemv_rows`: up to eight rows through up to three BF16 matrices in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ._args import Weight, weight_ptr
from ._gemv_rows import MAX_ROWS, ArgmaxRoom, ProjectionOf, RowsFormat, apart, launch_argmax, launch_rows

__all__ = ["MAX_ROWS", "RESIDENT", "Projection", "spark_gemv_rows"]

RESIDENT = 528
"""Blocks that run at the same time on the GPU that this was tuned on, four on each of 132 multiprocessors. Bits do not
depend on it."""


class Projection(ProjectionOf[Weight]):
    """One BF16 matrix of a launch, [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    __slots__ = ()


_FORMAT: RowsFormat[Weight] = RowsFormat(
    step=8,
    why="each row starts on a 16-byte address",
    resident=RESIDENT,
    pointers=(weight_ptr,),
    shared=apart,
)


def spark_gemv_rows(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    projections: Sequence[Projection],
    m: int,
    k: int,
    stream: StreamLike,
    *,
    head_dim: int = 0,
) -> None:
    """Each projection's output [m, n] = input [m, k] . weight [n, k] transposed, BF16. A row's bits do not depend on
    the other rows and projections; they are not those of `gemv.dense_gemv`.

    `kernel` is `spark_gemv_rows::spark_gemv_rows`. m is at most 8, projections at most 3, k a multiple of 8; input and
    weights lie on 16-byte addresses. head_dim > 0: the first projection makes [query | gate] of a head after the other,
    and its rows are stored as the queries of all heads, then the gates of all.
    """
    launch_rows(gpu, kernel, input, projections, m, k, stream, head_dim, _FORMAT)


def spark_gemv_rows_argmax(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    ids: DevicePtr,
    embed_table: DevicePtr,
    embed: DevicePtr,
    room: ArgmaxRoom,
    m: int,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """ids u32 [m]: the largest of each row that `spark_gemv_rows` would write for `weight` [n, k], as
    `argmax_bf16` finds it. embed BF16 [m, k]: rows ids of embed_table BF16 [n or more, k]; or both are NULL.

    `kernel` is `spark_gemv_rows::spark_gemv_rows_argmax`, with the limits of the other; embed and
    embed_table lie on 16-byte addresses too. Blocks meet in `room`.
    """
    launch_argmax(gpu, kernel, input, weight, ids, embed_table, embed, room, m, n, k, stream, _FORMAT)
