# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_expert_mxfp4`: MXFP4 experts that a router chose for a row. Weights as in `spark_mxfp4_gemv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ._bf16 import Bf16Array, F32Array, to_bf16, to_f32
from .quantize_nvfp4 import U8Array
from .spark_moe_expert_silu_down_clamped import gated_within
from .spark_mxfp4_gemv import mxfp4_products

Mxfp4: TypeAlias = "tuple[U8Array, U8Array]"
"""(packed uint8 [N, K / 2], E8M0 scales uint8 [N, K / 32])."""


def _slots(rows: Sequence[F32Array], experts: Sequence[Mxfp4 | None], outputs: int) -> Bf16Array:
    """`mxfp4_products` of each row with its expert: BF16 [slots, outputs]; zeros for an expert that is not there."""
    result = np.zeros((len(experts), outputs), np.float32)
    with np.errstate(all="ignore"):
        for slot, (x, expert) in enumerate(zip(rows, experts, strict=True)):
            if expert is not None:
                result[slot] = mxfp4_products(x[None], *expert)[0]
        return to_bf16(result)


def spark_moe_expert_gate_up_mxfp4(
    x: Bf16Array, gate: Sequence[Mxfp4 | None], up: Sequence[Mxfp4 | None], outputs: int
) -> tuple[Bf16Array, Bf16Array]:
    """Gate and up projections of BF16 [K]: BF16 [slots, N] each, with the bits of `spark_mxfp4_gemv`."""
    rows = [to_f32(x)] * len(gate)
    return _slots(rows, gate, outputs), _slots(rows, up, outputs)


def spark_moe_expert_silu_down_clamped_mxfp4(
    gate: Bf16Array, up: Bf16Array, down: Sequence[Mxfp4 | None], outputs: int, limit: float
) -> Bf16Array:
    """bf16(`gated_within`(gate, up)[slot] . down[slot]): BF16 [slots, K] each give BF16 [slots, N]. The activation
    stays FP32; a product of it with a code is not rounded before it is added."""
    with np.errstate(all="ignore"):
        rows = list(gated_within(gate, up, limit))
    return _slots(rows, down, outputs)
