# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_mxfp4_experts`: MXFP4 experts that a router chose for a row, by a tensor core's sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._bf16 import BF16, Bf16Array, F32Array, to_bf16, to_f32
from .gemv import dot_matrix
from .spark_moe_expert_mxfp4 import Mxfp4
from .spark_moe_expert_silu_down_clamped import gated_within
from .spark_mxfp4_gemv import mxfp4_values


def _product(x: F32Array, expert: Mxfp4) -> F32Array:
    """x [K] . weights: FP32 [N]. A weight is a BF16 number, infinite from 2^128 on; x is the sum of three."""
    weights = mxfp4_values(*expert).astype(BF16)
    parts, left = [], x
    for _ in range(3):
        part = left.astype(BF16)
        parts.append(part)
        left = np.where(np.isfinite(to_f32(part)), left - to_f32(part), np.float32(0))
    sums: F32Array = dot_matrix(np.stack(parts), weights)
    total: F32Array = (sums[0] + sums[1]) + sums[2]
    return total


def _slots(rows: Sequence[F32Array], experts: Sequence[Mxfp4 | None], outputs: int) -> Bf16Array:
    """`_product` of each row with its expert: BF16 [slots, outputs]; zeros for an expert that is not there."""
    result = np.zeros((len(experts), outputs), np.float32)
    with np.errstate(all="ignore"):
        for slot, (x, expert) in enumerate(zip(rows, experts, strict=True)):
            if expert is not None:
                result[slot] = _product(x, expert)
        return to_bf16(result)


def spark_mxfp4_experts_gate_up(
    x: Bf16Array, gate: Sequence[Mxfp4 | None], up: Sequence[Mxfp4 | None], outputs: int
) -> tuple[Bf16Array, Bf16Array]:
    """Gate and up projections of BF16 [K]: BF16 [slots, N] each. A tensor core's sums are others, as near."""
    rows = [to_f32(x)] * len(gate)
    return _slots(rows, gate, outputs), _slots(rows, up, outputs)


def spark_mxfp4_experts_silu_down(
    gate: Bf16Array, up: Bf16Array, down: Sequence[Mxfp4 | None], outputs: int, limit: float
) -> Bf16Array:
    """bf16(`gated_within`(gate, up)[slot] . down[slot]): BF16 [slots, K] each give BF16 [slots, N]. The activation
    stays FP32."""
    with np.errstate(all="ignore"):
        rows = list(gated_within(gate, up, limit))
    return _slots(rows, down, outputs)
