# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `fused_k_norm_rope_cache`: one block a head of a new key row, a thread an element.

As in `reshape_and_cache`, the cache's range is declared from the slots in device memory.
"""

from __future__ import annotations

import numpy as np

from ..reference import fused_k_norm_rope_cache as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, f32, pointer, u32

LARGEST_HEAD = 256


def _geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], c.num_kv_heads, 1), (c.head_dim, 1, 1), 0


def _preconditions(c: Call) -> None:
    if not 1 <= c.head_dim <= LARGEST_HEAD:
        raise ValueError(f"head_dim is {c.head_dim}: 1 to {LARGEST_HEAD} is taken")
    if c.rotary_dim % 2 or not 2 <= c.rotary_dim <= c.head_dim:
        raise ValueError(f"rotary_dim is {c.rotary_dim}: an even number from 2 to head_dim = {c.head_dim} is needed")
    if c.block_size == 0:
        raise ValueError("block_size is 0: it must be at least 1")
    if not 0.0 < c.theta < float("inf"):
        raise ValueError(f"theta is {c.theta}: a finite number above 0 is needed")


def _to_the_largest_slot(c: Call) -> tuple[int, ...]:
    """[largest slot + 1, row]: a view, so the slots that no row names cost nothing."""
    return int(c.slot_mapping.max(initial=-1)) + 1, c.num_kv_heads * c.head_dim


_INPUTS: tuple[ParamSpec, ...] = (
    pointer("k_in", "bf16", "r", lambda c: (c.grid[0], c.num_kv_heads, c.head_dim)),
    pointer("k_norm_weight", "bf16", "r", lambda c: (c.head_dim,)),
)
_NUMBERS: tuple[ParamSpec, ...] = (
    pointer("slot_mapping", "i64", "r", lambda c: (c.grid[0],)),
    u32("num_kv_heads"),
    u32("head_dim"),
    u32("rotary_dim"),
    u32("block_size"),
    f32("rms_eps"),
    f32("theta"),
)


def _positions(name: str) -> ParamSpec:
    return pointer(name, "u32", "r", lambda c: (c.grid[0],))


def _write_bf16(c: Call) -> None:
    reference.fused_k_norm_rope_cache_write_bf16(
        c.k_in, c.k_norm_weight, c.positions, c.k_cache, c.slot_mapping, c.rotary_dim, c.rms_eps, c.theta
    )


def _write_mrope(c: Call) -> None:
    positions = np.stack([c.pos_t, c.pos_h, c.pos_w])
    reference.fused_k_norm_rope_mrope_cache_write_bf16(
        c.k_in, c.k_norm_weight, positions, c.k_cache, c.slot_mapping, c.rotary_dim, c.rms_eps, c.theta
    )


def _write_fp8(c: Call) -> None:
    reference.fused_k_norm_rope_cache_write_fp8(
        c.k_in, c.k_norm_weight, c.positions, c.k_cache_fp8, c.slot_mapping, c.rotary_dim, c.rms_eps, c.theta,
        c.inv_scale,
    )  # fmt: skip


KERNELS: tuple[KernelSpec, ...] = tuple(
    KernelSpec(
        module="fused_k_norm_rope_cache",
        function=function.__name__,
        params=params,
        grid_text="(rows, num_kv_heads, 1)",
        block_text="(head_dim, 1, 1)",
        geometry=_geometry,
        reference=function,
        run=run,
        shared_bytes=1056,
        optional=True,
        preconditions=_preconditions,
    )
    for function, run, params in (
        (
            reference.fused_k_norm_rope_cache_write_bf16,
            _write_bf16,
            (*_INPUTS, _positions("positions"), pointer("k_cache", "bf16", "w", _to_the_largest_slot), *_NUMBERS),
        ),
        (
            reference.fused_k_norm_rope_mrope_cache_write_bf16,
            _write_mrope,
            (
                *_INPUTS,
                *map(_positions, ("pos_t", "pos_h", "pos_w")),
                pointer("k_cache", "bf16", "w", _to_the_largest_slot),
                *_NUMBERS,
            ),
        ),
        (
            reference.fused_k_norm_rope_cache_write_fp8,
            _write_fp8,
            (
                *_INPUTS,
                _positions("positions"),
                pointer("k_cache_fp8", "u8", "w", _to_the_largest_slot),
                *_NUMBERS,
                f32("inv_scale"),
            ),
        ),
    )
)
