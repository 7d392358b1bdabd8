# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_rows`: a mixture of experts for T rows, each with its own experts and the bits of one row alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from . import moe_shared_expert_fused_bf16 as single
from ._bf16 import Bf16Array, F32Array
from .moe_shared_expert_fused_bf16 import Weights
from .moe_weighted_sum_blend import moe_weighted_sum_blend


def spark_moe_expert_gate_up_shared_bf16_rows(
    x: Bf16Array,
    gate: Sequence[Sequence[Weights]],
    up: Sequence[Sequence[Weights]],
    sh_gate: Weights,
    sh_up: Weights,
    n: int,
) -> tuple[Bf16Array, Bf16Array, Bf16Array, Bf16Array]:
    """(gate_out [T, k, N], up_out [T, k, N], sh_gate_out [T, N], sh_up_out [T, N]) of x [T, K]; `gate` and `up` hold
    the weights of each row's experts."""
    rows = [single.moe_expert_gate_up_shared_bf16(*row, sh_gate, sh_up, n) for row in zip(x, gate, up, strict=True)]
    gate_out, up_out, sh_gate_out, sh_up_out = (np.stack(part) for part in zip(*rows, strict=True))
    return gate_out, up_out, sh_gate_out, sh_up_out


def spark_moe_expert_silu_down_shared_bf16_rows(
    gate: Bf16Array,
    up: Bf16Array,
    weights: Sequence[Sequence[Weights]],
    sh_gate: Bf16Array,
    sh_up: Bf16Array,
    sh_weights: Weights,
    n: int,
) -> tuple[Bf16Array, Bf16Array]:
    """(C [T, k, N], sh_down_out [T, N]) of gate and up [T, k, K] and the shared expert's [T, K]."""
    rows = [
        single.moe_expert_silu_down_shared_bf16(*row, sh_weights, n)
        for row in zip(gate, up, weights, sh_gate, sh_up, strict=True)
    ]
    routed, shared = (np.stack(part) for part in zip(*rows, strict=True))
    return routed, shared


def spark_moe_weighted_sum_blend_rows(
    expert_out: Bf16Array, weights: F32Array, shared_out: Bf16Array, x: Bf16Array, gate_weight: Bf16Array | None
) -> Bf16Array:
    """`moe_weighted_sum_blend` of each row: [T, k, H], FP32 [T, k], [T, H] and [T, K] give [T, H]."""
    rows = zip(expert_out, weights, shared_out, x, strict=True)
    return np.stack([moe_weighted_sum_blend(*row, gate_weight) for row in rows])
