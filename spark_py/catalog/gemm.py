# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `gemm`: a scalar kernel, tiles of 16 x 16, and one on tensor cores, tiles of 128 x 128."""

from __future__ import annotations

from collections.abc import Callable

from ..reference import gemm as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, ceil_div, pointer, u32

_PARAMS: tuple[ParamSpec, ...] = (
    pointer("A", "bf16", "r", lambda c: (c.M, c.K)),
    pointer("B", "bf16", "r", lambda c: (c.N, c.K)),
    pointer("C", "bf16", "w", lambda c: (c.M, c.N)),
    u32("M"),
    u32("N"),
    u32("K"),
)


def _tiles(tile: int, block: Dim3) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    return lambda c: ((ceil_div(c.N, tile), ceil_div(c.M, tile), 1), block, 0)


def _dense_gemm_bf16(c: Call) -> None:
    c.C[...] = reference.dense_gemm_bf16(c.A, c.B)


def _dense_gemm_bf16_pipelined(c: Call) -> None:
    c.C[...] = reference.dense_gemm_bf16_pipelined(c.A, c.B)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="gemm",
        function="dense_gemm_bf16",
        params=_PARAMS,
        grid_text="(ceil(N / 16), ceil(M / 16), 1)",
        block_text="(16, 16, 1)",
        geometry=_tiles(16, (16, 16, 1)),
        reference=reference.dense_gemm_bf16,
        run=_dense_gemm_bf16,
        shared_bytes=1024,
        optional=True,
    ),
    KernelSpec(
        module="gemm",
        function="dense_gemm_bf16_pipelined",
        params=_PARAMS,
        grid_text="(ceil(N / 128), ceil(M / 128), 1)",
        block_text="(256, 1, 1)",
        geometry=_tiles(128, (256, 1, 1)),
        reference=reference.dense_gemm_bf16_pipelined,
        run=_dense_gemm_bf16_pipelined,
        shared_bytes=40960,
        optional=True,
        gpu_only=True,
    ),
)
