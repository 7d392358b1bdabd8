# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_fp8_gemv_rows`: up to eight rows through up to three E4M3 matrices in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of
from .gemv_fp8w import HasFp8Rows
from .spark_gemv_rows import MAX_MATRICES, MAX_ROWS, TILE

CHUNK = 16
"""What the length of a row must be a multiple of."""
RESIDENT = 396
"""Blocks that run at the same time on the GPU that this was tuned on, three on each of 132 multiprocessors. Bits do not
depend on it."""


@dataclass(frozen=True, slots=True)
class Fp8Projection:
    """One E4M3 matrix of a launch, [n, k], and where its outputs go: row m at `output` + m * `stride` elements."""

    weight: HasFp8Rows
    output: DevicePtr
    n: int
    stride: int


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
    if count("m", m) > MAX_ROWS:
        raise InvalidArgumentError("m", m, f"the kernel takes {MAX_ROWS} rows at most")
    multiple_of("k", k, CHUNK, "rows are read 16 bytes at a time")
    if not 1 <= len(projections) <= MAX_MATRICES:
        raise InvalidArgumentError("projections", len(projections), f"1 to {MAX_MATRICES} are taken")
    for each in projections:
        if count("stride", each.stride) < count("n", each.n):
            raise InvalidArgumentError("stride", each.stride, f"at least n = {each.n} is needed")
    if head_dim and projections[0].n % (2 * count("head_dim", head_dim)):
        raise InvalidArgumentError("n", projections[0].n, f"a multiple of 2 * head_dim = {2 * head_dim} is needed")
    tiles = sum(div_ceil(each.n, TILE) for each in projections)
    missing = MAX_MATRICES - len(projections)
    blocks = div_ceil(tiles, div_ceil(tiles, RESIDENT))
    launch = KernelLaunch(gpu, kernel).grid((blocks, 1, 1)).block((256, 1, 1)).arg_ptr(input)
    null = [DevicePtr.NULL] * missing
    for pointers in (
        [each.weight.weight for each in projections],
        [each.weight.row_scale for each in projections],
        [each.output for each in projections],
    ):
        for ptr in pointers + null:
            launch.arg_ptr(ptr)
    launch.arg_u32(m)
    for n in [each.n for each in projections] + [0] * missing:
        launch.arg_u32(n)
    launch.arg_u32(k)
    for stride in [each.stride for each in projections] + [0] * missing:
        launch.arg_u32(stride)
    launch.arg_u32(head_dim).launch(stream)
