# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_step_nvfp4`: a mixture of NVFP4 experts in two launches; rows in grid y."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..reference import spark_moe_step_nvfp4 as reference
from ..reference.moe_shared_expert_fused import Nvfp4
from ._moe_step import down_kernel, gate_up_kernel
from .gemv import WIDE_LOAD
from .moe_topk import needs_experts
from .spec import Call, Dim3, KernelSpec, ParamSpec, Pointee, ceil_div, f32, pointer, table

CHUNK, PAIR, SLICE = 16, 2, 128
GATE_UP_THREADS, TILE, TILES = 256, 8, 16
"""Threads of a block of the gate and up projection, outputs of a tile, and tiles of a block at most."""
DOWN_THREADS, OUTPUTS = 512, 16
"""Of a block of the down projection."""


def _complete(*names: str) -> Any:
    def rule(c: Call) -> None:
        needs_experts(c)
        if c.K % (2 * CHUNK) or c.K == 0:
            raise ValueError(f"K is {c.K}: it must be a multiple of {2 * CHUNK}")
        there = {getattr(c, name) is not None for name in names}
        if len(there) > 1:
            raise ValueError(f"some of {', '.join(names)} are NULL: a shared expert needs all of them")

    return rule


def _needs_gate_up(c: Call) -> None:
    _complete("sh_gate_packed", "sh_gate_scale", "sh_up_packed", "sh_up_scale")(c)
    tiles = (c.top_k + 1) * ceil_div(c.N, TILE)
    if tiles > TILES * c.grid[0]:
        raise ValueError(
            f"grid x is {c.grid[0]}: {ceil_div(tiles, TILES)} blocks at least are needed for {tiles} tiles"
        )


def _entries(c: Call) -> tuple[int, ...]:
    return (c.num_experts,)


def _tables(prefix: str) -> tuple[ParamSpec, ...]:
    return (
        replace(
            table(f"{prefix}packed_ptrs", _entries, Pointee("u8", lambda c: (c.N, c.K // 2), WIDE_LOAD)), early=True
        ),
        replace(table(f"{prefix}scale_ptrs", _entries, Pointee("u8", lambda c: (c.N, c.K // CHUNK), PAIR)), early=True),
        pointer(f"{prefix}scale2_vals", "f32", "r", _entries),
    )


def _shared(prefix: str) -> tuple[ParamSpec, ...]:
    codes, scales = (lambda c: (c.N, c.K // 2)), (lambda c: (c.N, c.K // CHUNK))
    return (
        pointer(f"{prefix}_packed", "u8", "r", codes, align=WIDE_LOAD, optional=True, early=True),
        pointer(f"{prefix}_scale", "u8", "r", scales, align=PAIR, optional=True, early=True),
        f32(f"{prefix}_s2"),
    )


def _gate_up_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (c.grid[0], c.grid[1], 1), (GATE_UP_THREADS, 1, 1), 2 * c.K


def _down_geometry(c: Call) -> tuple[Dim3, Dim3, int]:
    return (ceil_div(c.N, OUTPUTS), c.grid[1], 1), (DOWN_THREADS, 1, 1), 512 * (c.top_k + 1) * ceil_div(c.K, SLICE)


def _expert(c: Call, prefix: str, expert: int) -> Nvfp4 | None:
    packed = c.behind(f"{prefix}packed_ptrs", expert)
    if packed is None:
        return None
    return packed, c.behind(f"{prefix}scale_ptrs", expert), float(getattr(c, f"{prefix}scale2_vals")[expert])


def _alone(c: Call, prefix: str) -> Nvfp4 | None:
    packed, scale, s2 = (getattr(c, f"{prefix}_{name}") for name in ("packed", "scale", "s2"))
    return None if packed is None else (packed, scale, s2)


def _gate_up(c: Call) -> None:
    c.expert_indices[...], c.activation[...] = reference.spark_moe_route_gate_up_nvfp4(
        c.A, c.gate_logits, lambda e: _expert(c, "gate_", e), lambda e: _expert(c, "up_", e), _alone(c, "sh_gate"),
        _alone(c, "sh_up"), c.N, c.top_k,
    )  # fmt: skip


def _down(c: Call) -> None:
    down = [[_expert(c, "", int(e)) for e in row] for row in c.expert_indices]
    c.output[...] = reference.spark_moe_down_blend_nvfp4(
        c.activation,
        down,
        c.gate_logits,
        c.expert_indices,
        _alone(c, "sh_down"),
        c.input,
        c.gate_weight,
        c.N,
        bool(c.normalize),
    )


KERNELS: tuple[KernelSpec, ...] = (
    gate_up_kernel(
        "spark_moe_step_nvfp4",
        "spark_moe_route_gate_up_nvfp4",
        [*_tables("gate_"), *_tables("up_")],
        [*_shared("sh_gate"), *_shared("sh_up")],
        GATE_UP_THREADS,
        "(any for 16 tiles of 8 outputs each, rows, 1)",
        _gate_up_geometry,
        reference.spark_moe_route_gate_up_nvfp4,
        _gate_up,
        shared_bytes=25728,
        needs=_needs_gate_up,
    ),
    down_kernel(
        "spark_moe_step_nvfp4",
        "spark_moe_down_blend_nvfp4",
        _tables(""),
        _shared("sh_down"),
        DOWN_THREADS,
        OUTPUTS,
        _down_geometry,
        reference.spark_moe_down_blend_nvfp4,
        _down,
        shared_bytes=12320,
        needs=_complete("sh_down_packed", "sh_down_scale"),
    ),
)
