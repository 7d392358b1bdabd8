# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue row of `moe_expert_gemv::moe_expert_gemv`: one NVFP4 projection, a warp an output, a slot in grid y."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import moe_expert_gemv as reference
from .moe_shared_expert_fused import ACTIVATIONS_ALIGN, BLOCK_TEXT, indices, one, routed, slots, tables, whole_chunks
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32

STRIDE_STEP = 8


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, 4), c.top_k, 1), (128, 1, 1), 0


def _preconditions(c: Call) -> None:
    whole_chunks(c)
    if c.input_stride % STRIDE_STEP:
        raise ValueError(f"input_stride is {c.input_stride}: rows of A need 16-byte addresses, {STRIDE_STEP} elements")


def _touched(c: Call) -> tuple[int, ...]:
    """What the rows touch, seen flat."""
    return ((c.top_k - 1) * c.input_stride + c.K,)


def _rows(c: Call) -> np.ndarray[Any, Any]:
    step = c.A.itemsize
    strides = (c.input_stride * step, step)
    return np.ascontiguousarray(np.lib.stride_tricks.as_strided(c.A, (c.top_k, c.K), strides, writeable=False))


def _moe_expert_gemv(c: Call) -> None:
    c.C[...] = reference.moe_expert_gemv(_rows(c), routed(c, "", c.expert_indices), c.N)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="moe_expert_gemv",
        function="moe_expert_gemv",
        params=(
            pointer("A", "bf16", "r", _touched, align=ACTIVATIONS_ALIGN),
            *tables(""),
            slots("C", "w", one, "N"),
            indices(one),
            u32("N"),
            u32("K"),
            u32("top_k"),
            u32("input_stride"),
        ),
        grid_text="(ceil(N / 4), top_k, 1)",
        block_text=BLOCK_TEXT,
        geometry=_geometry,
        reference=reference.moe_expert_gemv,
        run=_moe_expert_gemv,
        shared_bytes=64,
        optional=True,
        preconditions=_preconditions,
    ),
)
