# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_expert_silu_down_clamped_bf16`: BF16 down projections behind DeepSeek-V4's limited activation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._bf16 import BF16, Bf16Array, to_bf16
from .moe_shared_expert_fused_bf16 import Weights, dot_fp32
from .spark_moe_expert_silu_down_clamped import gated_within


def spark_moe_expert_silu_down_clamped_bf16_rows(
    gate: Bf16Array,
    up: Bf16Array,
    weights: Sequence[Sequence[Weights]],
    sh_gate: Bf16Array,
    sh_up: Bf16Array,
    sh_weights: Weights,
    n: int,
    limit: float,
) -> tuple[Bf16Array, Bf16Array]:
    """(C [T, k, N], sh_down_out [T, N]) of gate and up [T, k, K] and the shared expert's [T, K]: bf16 of
    `gated_within`(gate, up) . w, the activation in FP32; `weights` hold those of each row's experts in slot order.

    Order of sums as `moe_expert_silu_down_shared_bf16`.
    """

    def down(g: Bf16Array, u: Bf16Array, w: Weights) -> Bf16Array:
        return np.zeros(n, BF16) if w is None else to_bf16(dot_fp32(gated_within(g, u, limit), w))

    with np.errstate(all="ignore"):
        slots = zip(gate, up, weights, strict=True)
        routed = np.stack([np.stack([down(*slot) for slot in zip(*row, strict=True)]) for row in slots])
        return routed, np.stack([down(g, u, sh_weights) for g, u in zip(sh_gate, sh_up, strict=True)])
