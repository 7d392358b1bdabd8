# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `residual_add`: one element a thread, 256 threads a block."""

from __future__ import annotations

from collections.abc import Callable

from ..reference import residual_add as reference
from .spec import Call, Dim3, KernelSpec, ceil_div, pointer, u32

BLOCK = 256
BLOCK_TEXT = "(256, 1, 1)"


def elementwise(count: str) -> Callable[[Call], tuple[Dim3, Dim3, int]]:
    """The geometry of a kernel with one thread for each of the elements that the parameter `count` gives."""
    return lambda c: ((ceil_div(getattr(c, count), BLOCK), 1, 1), (BLOCK, 1, 1), 0)


def _n(c: Call) -> tuple[int, ...]:
    return (c.n,)


def _half(c: Call) -> tuple[int, ...]:
    return (c.N,)


def _both_halves(c: Call) -> tuple[int, ...]:
    return (2 * c.N,)


def _bf16_residual_add(c: Call) -> None:
    c.residual[...] = reference.bf16_residual_add(c.residual, c.src)


def _sigmoid_gate_mul(c: Call) -> None:
    c.output[...] = reference.sigmoid_gate_mul(c.input, c.gate)


def _bf16_concat(c: Call) -> None:
    c.out[...] = reference.bf16_concat(c.a, c.b)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        module="residual_add",
        function="bf16_residual_add",
        params=(pointer("residual", "bf16", "rw", _n), pointer("src", "bf16", "r", _n), u32("n")),
        grid_text="(ceil(n / 256), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=elementwise("n"),
        reference=reference.bf16_residual_add,
        run=_bf16_residual_add,
    ),
    KernelSpec(
        module="residual_add",
        function="sigmoid_gate_mul",
        params=(
            pointer("input", "bf16", "r", _n),
            pointer("gate", "bf16", "r", _n),
            pointer("output", "bf16", "w", _n),
            u32("n"),
        ),
        grid_text="(ceil(n / 256), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=elementwise("n"),
        reference=reference.sigmoid_gate_mul,
        run=_sigmoid_gate_mul,
    ),
    KernelSpec(
        module="residual_add",
        function="bf16_concat",
        params=(
            pointer("a", "bf16", "r", _half),
            pointer("b", "bf16", "r", _half),
            pointer("out", "bf16", "w", _both_halves),
            u32("N"),
        ),
        grid_text="(ceil(N / 256), 1, 1)",
        block_text=BLOCK_TEXT,
        geometry=elementwise("N"),
        reference=reference.bf16_concat,
        run=_bf16_concat,
    ),
)
