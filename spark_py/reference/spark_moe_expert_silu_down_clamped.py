# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_expert_silu_down_clamped`: NVFP4 down projections behind DeepSeek-V4's limited activation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._bf16 import Bf16Array, F32Array, sigmoid, to_f32
from .moe_shared_expert_fused import Nvfp4, nvfp4_slots


def gated_within(gate: Bf16Array, up: Bf16Array, limit: float) -> F32Array:
    """(g * (1 / (1 + exp(-g)))) * u in FP32, g = min(gate, limit), u = min(max(up, -limit), limit).

    BF16 of one shape; the result is not rounded to BF16. The gate is bounded from above alone. NaN stays NaN.
    """
    most = np.float32(limit)
    g = np.minimum(to_f32(gate), most)
    u = np.clip(to_f32(up), -most, most)
    activation: F32Array = g * sigmoid(g) * u
    return activation


def spark_moe_expert_silu_down_clamped(
    gate: Bf16Array, up: Bf16Array, down: Sequence[Nvfp4 | None], outputs: int, limit: float
) -> Bf16Array:
    """bf16(`gated_within`(gate, up)[slot] . down[slot]): BF16 [slots, K] each give BF16 [slots, N], the shared expert
    last. Order of sums as `moe_expert_silu_down_shared`."""
    with np.errstate(all="ignore"):
        return nvfp4_slots(list(gated_within(gate, up, limit)), down, outputs)
