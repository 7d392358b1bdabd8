# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `w4a16_gemv`: NVFP4 weights, blocks of 256 threads, four outputs a block or (_sw) eight."""

from __future__ import annotations

from collections.abc import Callable

from ..reference import w4a16_gemv as reference
from .spec import Call, Dim3, KernelSpec, ParamSpec, ceil_div, f32, pointer, u32

ACTIVATIONS_ALIGN = 16
CODES_ALIGN = 8
NARROW_CODES_ALIGN = 4
BLOCK_TEXT = "(256, 1, 1)"

TIERS = {4: 4288, 5: 5344, 6: 6400, 7: 7456, 8: 8512, 16: 16960, 32: 33856}
"""Most rows of the kernels that are told their number of rows -> static shared memory of the engine's kernel."""


def outputs_a_block(outputs: int, z: int = 1) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    """Geometry of a grid over N."""
    return lambda c: ((ceil_div(c.N, outputs), 1, z), (256, 1, 1), 0)


def whole_chunks(c: Call) -> None:
    """K % 16 == 0: a block scale covers 16 values."""
    if c.K % reference.CHUNK:
        raise ValueError(f"K is {c.K}: it must be a multiple of {reference.CHUNK}")


def codes(name: str, align: int = CODES_ALIGN) -> ParamSpec:
    """Packed E2M1 [N, K / 2]."""
    return pointer(name, "u8", "r", lambda c: (c.N, c.K // 2), align=align)


def scales(name: str) -> ParamSpec:
    """E4M3 [N, K / 16]."""
    return pointer(name, "u8", "r", lambda c: (c.N, c.K // reference.CHUNK))


def activations(rows: Callable[[Call], tuple[int, ...]]) -> ParamSpec:
    """BF16 rows of K."""
    return pointer("A", "bf16", "r", lambda c: (*rows(c), c.K), align=ACTIVATIONS_ALIGN)


def one(c: Call) -> tuple[int, ...]:
    """The rows of a kernel for one row: no axis."""
    return ()


def _params(rows: Callable[[Call], tuple[int, ...]], align: int = CODES_ALIGN, out: str = "bf16") -> list[ParamSpec]:
    return [
        activations(rows),
        codes("B_packed", align),
        scales("B_scale"),
        f32("scale2"),
        pointer("C", out, "w", lambda c: (*rows(c), c.N)),
    ]


def _w4a16_gemv(c: Call) -> None:
    c.C[...] = reference.w4a16_gemv(c.A, c.B_packed, c.B_scale, c.scale2)


def _w4a16_gemv_batch(c: Call) -> None:
    c.C[...] = reference.w4a16_gemv_batch(c.A, c.B_packed, c.B_scale, c.scale2)


def _w4a16_gemv_qg(c: Call) -> None:
    c.C[...] = reference.w4a16_gemv_qg(c.A, c.B_packed, c.B_scale, c.scale2, c.num_heads, c.head_dim)


def _w4a16_gemv_logits(c: Call) -> None:
    c.C[...] = reference.w4a16_gemv_logits(c.A, c.B_packed, c.B_scale, c.scale2)


def _whole_heads(c: Call) -> None:
    whole_chunks(c)
    rows = 2 * c.num_heads * c.head_dim
    if rows != c.N:
        raise ValueError(f"N is {c.N}: it must be 2 * num_heads * head_dim = {rows}")


def _fixed(rows: int, shared_bytes: int) -> KernelSpec:
    return KernelSpec(
        module="w4a16_gemv",
        function=f"w4a16_gemv_batch{rows}",
        params=(*_params(lambda c: (rows,)), u32("N"), u32("K")),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w4a16_gemv_batch,
        run=_w4a16_gemv_batch,
        shared_bytes=shared_bytes,
        optional=True,
        preconditions=whole_chunks,
    )


def _tier(most: int, shared_bytes: int, suffix: str = "") -> KernelSpec:
    def preconditions(c: Call) -> None:
        whole_chunks(c)
        if not 1 <= c.M <= most:
            raise ValueError(f"M is {c.M}: 1 to {most} rows are taken")

    return KernelSpec(
        module="w4a16_gemv",
        function=f"w4a16_gemv_batch{most}{suffix}",
        params=(*_params(lambda c: (c.M,)), u32("M"), u32("N"), u32("K")),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w4a16_gemv_batch,
        run=_w4a16_gemv_batch,
        shared_bytes=shared_bytes,
        optional=True,
        preconditions=preconditions,
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="w4a16_gemv",
        function="w4a16_gemv",
        params=(*_params(one), u32("N"), u32("K")),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w4a16_gemv,
        run=_w4a16_gemv,
        shared_bytes=32,
        preconditions=whole_chunks,
    ),
    KernelSpec(
        module="w4a16_gemv",
        function="w4a16_gemv_sw",
        params=(*_params(one), u32("N"), u32("K")),
        grid_text="(ceil(N / 8), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(8),
        reference=reference.w4a16_gemv,
        run=_w4a16_gemv,
        optional=True,
        preconditions=whole_chunks,
    ),
    KernelSpec(
        module="w4a16_gemv",
        function="w4a16_gemv_qg",
        params=(*_params(one, NARROW_CODES_ALIGN), u32("N"), u32("K"), u32("num_heads"), u32("head_dim")),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w4a16_gemv_qg,
        run=_w4a16_gemv_qg,
        shared_bytes=96,
        preconditions=_whole_heads,
    ),
    KernelSpec(
        module="w4a16_gemv",
        function="w4a16_gemv_logits",
        params=(*_params(one, NARROW_CODES_ALIGN, "f32"), u32("N"), u32("K")),
        grid_text="(ceil(N / 4), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=outputs_a_block(4),
        reference=reference.w4a16_gemv_logits,
        run=_w4a16_gemv_logits,
        shared_bytes=96,
        optional=True,
        preconditions=whole_chunks,
    ),
    _fixed(2, 2176),
    _fixed(3, 3232),
    *(_tier(most, shared_bytes) for most, shared_bytes in TIERS.items()),
    _tier(8, 16960, "_rt2"),
)
