# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `gemv`: four outputs a block of 256 threads, 16-byte loads."""

from __future__ import annotations

from ..reference import gemv as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32

WIDE_LOAD = 16


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, 4), 1, 1), (256, 1, 1), 0


def whole_chunks(c: Call) -> None:
    """K % 8 == 0: a row of another length would put the next one off its 16-byte address."""
    if c.K % reference.CHUNK:
        raise ValueError(f"K is {c.K}: it must be a multiple of {reference.CHUNK}")


def _dense_gemv_bf16(c: Call) -> None:
    c.C[...] = reference.dense_gemv_bf16(c.A, c.B)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="gemv",
        function="dense_gemv_bf16",
        params=(
            pointer("A", "bf16", "r", lambda c: (c.K,), align=WIDE_LOAD),
            pointer("B", "bf16", "r", lambda c: (c.N, c.K), align=WIDE_LOAD, early=True),
            pointer("C", "bf16", "w", lambda c: (c.N,)),
            u32("N"),
            u32("K"),
        ),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.dense_gemv_bf16,
        run=_dense_gemv_bf16,
        shared_bytes=32,
        preconditions=whole_chunks,
    ),
)
