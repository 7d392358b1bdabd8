# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_shared_expert_fused_fp8`: `moe_shared_expert_fused` for E4M3 weights with an FP32 factor a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, folded, to_bf16, to_f32
from ._e4m3 import U8Array, from_e4m3
from .moe_shared_expert_fused import gated

CHUNK = 16
Fp8Rows: TypeAlias = "tuple[U8Array, F32Array]"
"""(E4M3 bytes uint8 [N, K], row factors FP32 [N])."""
_TILE_ELEMENTS = 1 << 18


def _fused(x: F32Array, weights: F32Array, sums: F32Array) -> F32Array:
    """x * w + sum, rounded once: FP64 holds the product of an FP32 and an E4M3, and rounding its sum with an FP32 to
    53 bits first does not show in 24."""
    total: F32Array = (x.astype(np.float64) * weights + sums).astype(np.float32)
    return total


def fp8_product(x: F32Array, weight: Fp8Rows) -> Bf16Array:
    """bf16(x . w[n] * scale[n]): FP32 [K] gives BF16 [N].

    Lane l of 32 adds the products of the chunks l, l + 32, ... of 16 elements in ascending k, each by a fused
    multiply-add; the row's factor multiplies what a lane has; the lanes add up as the tree 16, 8, 4, 2, 1.
    """
    bytes_, scale = weight
    result = np.empty(len(bytes_), np.float32)
    chunked = x.reshape(-1, CHUNK, 1)
    rows = max(1, _TILE_ELEMENTS // max(x.size, 1))
    for start in range(0, len(bytes_), rows):
        tile = slice(start, start + rows)
        values = np.ascontiguousarray(
            to_f32(from_e4m3(bytes_[tile])).reshape(-1, len(chunked), CHUNK).transpose(1, 2, 0)
        )
        lanes = np.zeros((WARP, values.shape[2]), np.float32)
        for first in range(0, len(values), WARP):
            turn, a = values[first : first + WARP], chunked[first : first + WARP]
            for step in range(CHUNK):
                lanes[: len(turn)] = _fused(a[:, step], turn[:, step], lanes[: len(turn)])
        result[tile] = folded(lanes * scale[tile])
    return to_bf16(result)


def fp8_slots(rows: Sequence[F32Array], experts: Sequence[Fp8Rows | None], outputs: int) -> Bf16Array:
    """`fp8_product` of each row with its expert: BF16 [slots, outputs]; zeros for an expert that is not there."""
    zeros = to_bf16(np.zeros(outputs, np.float32))
    products = [zeros if each is None else fp8_product(x, each) for x, each in zip(rows, experts, strict=True)]
    return np.stack(products)


def spark_moe_expert_gate_up_shared_fp8(
    x: Bf16Array, gate: Sequence[Fp8Rows | None], up: Sequence[Fp8Rows | None], outputs: int
) -> tuple[Bf16Array, Bf16Array]:
    """Gate and up projections of BF16 [K]: BF16 [slots, N] each, a slot for every expert, the shared one last."""
    with np.errstate(all="ignore"):
        rows = [to_f32(x)] * len(gate)
        return fp8_slots(rows, gate, outputs), fp8_slots(rows, up, outputs)


def spark_moe_expert_silu_down_shared_fp8(
    gate: Bf16Array, up: Bf16Array, down: Sequence[Fp8Rows | None], outputs: int
) -> Bf16Array:
    """bf16(`gated`(gate, up)[slot] . down[slot]): BF16 [slots, K] each give BF16 [slots, N]."""
    with np.errstate(all="ignore"):
        return fp8_slots(list(gated(gate, up)), down, outputs)
