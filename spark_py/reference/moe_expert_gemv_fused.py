# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_expert_gemv_fused`: the slots of `moe_shared_expert_fused`, without a shared expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ._bf16 import Bf16Array, to_f32
from .moe_shared_expert_fused import Nvfp4, gated, nvfp4_slots


def moe_expert_gemv_gate_up(
    x: Bf16Array, gate: Sequence[Nvfp4 | None], up: Sequence[Nvfp4 | None], outputs: int
) -> tuple[Bf16Array, Bf16Array]:
    """Gate and up projections of BF16 [K]: BF16 [slots, outputs] each."""
    with np.errstate(all="ignore"):
        rows = [to_f32(x)] * len(gate)
        return nvfp4_slots(rows, gate, outputs), nvfp4_slots(rows, up, outputs)


def moe_expert_gemv_silu_down(gate: Bf16Array, up: Bf16Array, down: Sequence[Nvfp4 | None], outputs: int) -> Bf16Array:
    """bf16(`gated`(gate, up)[slot] . down[slot]): BF16 [slots, K] each give BF16 [slots, outputs]."""
    with np.errstate(all="ignore"):
        return nvfp4_slots(list(gated(gate, up)), down, outputs)
