# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of module `spark_v4_grouped_gemv`: four outputs of up to eight rows a block of 256 threads."""

from __future__ import annotations

from ..reference import spark_v4_grouped_gemv as reference
from .gemv import WIDE_LOAD, whole_chunks
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32

ROWS = 8


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.groups * c.N, 4), ceil_div(c.M, ROWS), 1), (256, 1, 1), 0


def _preconditions(c: Call) -> None:
    whole_chunks(c)
    if not 1 <= c.groups * c.N < 1 << 32:
        raise ValueError(f"groups * N is {c.groups} * {c.N}: from 1 to 2**32 - 1 outputs are taken")
    if c.M == 0:
        raise ValueError("M is 0: at least one row is needed")


def _spark_v4_grouped_gemv(c: Call) -> None:
    c.C[...] = reference.spark_v4_grouped_gemv(c.A, c.B)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="spark_v4_grouped_gemv",
        function="spark_v4_grouped_gemv",
        params=(
            pointer("A", "bf16", "r", lambda c: (c.M, c.groups, c.K), align=WIDE_LOAD),
            pointer("B", "bf16", "r", lambda c: (c.groups, c.N, c.K), align=WIDE_LOAD),
            pointer("C", "bf16", "w", lambda c: (c.M, c.groups, c.N)),
            u32("M"),
            u32("groups"),
            u32("N"),
            u32("K"),
        ),
        grid_text="(ceil(groups * N / 4), ceil(M / 8), 1)",
        block_text="(256, 1, 1)",
        geometry=_geometry,
        reference=reference.spark_v4_grouped_gemv,
        run=_spark_v4_grouped_gemv,
        shared_bytes=256,
        optional=True,
        preconditions=_preconditions,
    ),
)
