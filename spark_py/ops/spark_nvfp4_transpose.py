# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_nvfp4_transpose`: bytes of NVFP4 codes or scales in the layout of the tile GEMM."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of

TILE, BLOCK, WORD = 64, 256, 4


def spark_nvfp4_transpose(
    gpu: GpuBackend,
    kernel: KernelHandle,
    source: DevicePtr,
    target: DevicePtr,
    rows: int,
    columns: int,
    ldb: int,
    stream: StreamLike,
) -> None:
    """target u8 [columns, ldb] = source u8 [rows, columns] transposed, zeros from `rows` to ldb.

    ldb is a multiple of 4 of at least `rows`, and target lies on a 4-byte address. `kernel` is
    `spark_nvfp4_transpose::spark_nvfp4_transpose`.
    """
    if multiple_of("ldb", ldb, WORD, "rows of the target are written 4 bytes at a time") < count("rows", rows):
        raise InvalidArgumentError("ldb", ldb, f"at least rows = {rows} is needed")
    if int(target) % WORD:
        raise InvalidArgumentError("target", target, f"an address that is a multiple of {WORD} is needed")
    grid = div_ceil(ldb, TILE), div_ceil(count("columns", columns), TILE), 1
    launch = KernelLaunch(gpu, kernel).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(source).arg_ptr(target).arg_u32(rows).arg_u32(columns).arg_u32(ldb).launch(stream)
