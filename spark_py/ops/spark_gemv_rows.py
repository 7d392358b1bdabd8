# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_gemv_rows`: up to eight rows through up to three BF16 matrices in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr

MAX_ROWS, MAX_MATRICES = 8, 3
TILE = 16
"""Outputs that a block makes at a time."""
RESIDENT = 528
"""Blocks that run at the same time on the GPU that this was tuned on, four on each of 132 multiprocessors. Bits do not
depend on it."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix of a launch, BF16 [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    weight: Weight
    output: DevicePtr
    n: int
    stride: int


def blocks_for(tiles: int) -> int:
    """As many blocks as give each the same number of tiles, all of them running at once."""
    return div_ceil(tiles, div_ceil(tiles, RESIDENT))


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
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, 8, "each row starts on a 16-byte address")
    if not 1 <= len(projections) <= MAX_MATRICES:
        raise InvalidArgumentError("projections", len(projections), f"1 to {MAX_MATRICES} are taken")
    for each in projections:
        if count("stride", each.stride) < count("n", each.n):
            raise InvalidArgumentError("stride", each.stride, f"at least n = {each.n} is needed")
    if head_dim and projections[0].n % (2 * count("head_dim", head_dim)):
        raise InvalidArgumentError("n", projections[0].n, f"a multiple of 2 * head_dim = {2 * head_dim} is needed")
    tiles = sum(div_ceil(each.n, TILE) for each in projections)
    missing = MAX_MATRICES - len(projections)
    launch = KernelLaunch(gpu, kernel).grid((blocks_for(tiles), 1, 1)).block((256, 1, 1)).arg_ptr(input)
    for ptr in (*(weight_ptr(each.weight) for each in projections), *[DevicePtr.NULL] * missing):
        launch.arg_ptr(ptr)
    for ptr in (*(each.output for each in projections), *[DevicePtr.NULL] * missing):
        launch.arg_ptr(ptr)
    launch.arg_u32(m)
    for n in (*(each.n for each in projections), *[0] * missing):
        launch.arg_u32(n)
    launch.arg_u32(k)
    for stride in (*(each.stride for each in projections), *[0] * missing):
        launch.arg_u32(stride)
    launch.arg_u32(head_dim).launch(stream)
