# SPDX-License-Identifier: AGPL-3.0-only
"""Catalogue rows of module `spark_moe_expert_silu_down_clamped`: parameters and geometry of
`moe_expert_silu_down_shared`, and the limit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..reference import spark_moe_expert_silu_down_clamped as reference
from . import moe_shared_expert_fused as shared
from .spec import Call, KernelSpec, f32

_complete = shared.complete("sh_down_packed", "sh_down_scale")


def needs_a_limit(c: Call) -> None:
    """limit > 0."""
    if not c.limit > 0:
        raise ValueError(f"limit is {c.limit}: it must be above 0")


def _preconditions(c: Call) -> None:
    _complete(c)
    needs_a_limit(c)


def _run(rows: shared.Rows) -> Callable[[Call], None]:
    def run(c: Call) -> None:
        names = ("gate_out", "up_out", "expert_indices", "sh_gate_in", "sh_up_in", "C", "sh_down_out")
        for gate, up, ids, sh_gate, sh_up, out, sh_out in shared.each_row(c, rows, *names):
            down = shared.and_shared(c, "", "sh_down", "sh_down", ids)
            gates, ups = np.concatenate([gate, sh_gate[None]]), np.concatenate([up, sh_up[None]])
            result = reference.spark_moe_expert_silu_down_clamped(gates, ups, down, c.N, c.limit)
            out[...], sh_out[...] = result[:-1], result[-1]

    return run


def _spec(function: str, rows: shared.Rows) -> KernelSpec:
    return KernelSpec(
        module="spark_moe_expert_silu_down_clamped",
        function=function,
        params=(*shared.silu_down_params(rows), f32("limit")),
        grid_text="(ceil(N / 8), top_k + 1, 1)" if rows is shared.one else "(ceil(N / 8), rows, top_k + 1)",
        block_text=shared.BLOCK_TEXT,
        geometry=shared.geometry(rows, 1, shared.ACTIVATION_BYTES),
        reference=reference.spark_moe_expert_silu_down_clamped,
        run=_run(rows),
        optional=True,
        preconditions=_preconditions,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _spec("spark_moe_expert_silu_down_clamped", shared.one),
    _spec("spark_moe_expert_silu_down_clamped_rows", shared.several),
)
