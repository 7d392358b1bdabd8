# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_shared_expert_fused`: the NVFP4 experts that a router chose for a row, and the shared expert.

A weight [N, K] is as in `w4a16_gemv`: packed codes, a scale for each chunk of 16 values, and one factor. K % 16 == 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, folded, sigmoid, to_bf16, to_f32
from .quantize_nvfp4 import U8Array
from .w4a16_gemv import CHUNK, codes, factors

Nvfp4: TypeAlias = "tuple[U8Array, U8Array, float]"
"""(packed uint8 [N, K / 2], E4M3 scales uint8 [N, K / 16], factor)."""
_TILE_ELEMENTS = 1 << 18


def gated(gate: Bf16Array, up: Bf16Array) -> F32Array:
    """(g * (1 / (1 + exp(-g)))) * u in FP32, which is not rounded to BF16 and not clamped. BF16 of one shape."""
    g = to_f32(gate)
    activation: F32Array = g * sigmoid(g) * to_f32(up)
    return activation


def over_lanes(terms: F32Array) -> F32Array:
    """FP32 [C, steps, n], what each chunk adds in each step, to [n].

    Lane l of 32 adds the steps of the chunks l, l + 32, ... one after the other; the lanes add up as the tree
    16, 8, 4, 2, 1.
    """
    chunks, steps, outputs = terms.shape
    lanes = np.zeros((WARP, outputs), np.float32)
    for first in range(0, chunks, WARP):
        turn = terms[first : first + WARP]
        for step in range(steps):
            lanes[: len(turn)] += turn[:, step]
    return folded(lanes)


def nvfp4_product(x: F32Array, weight: Nvfp4) -> Bf16Array:
    """bf16(x . w[n]): FP32 [K] gives BF16 [N].

    A weight code * factor rounds; the products of elements 2 i and 2 i + 1 are added to each other, then to the lane's
    sum: `over_lanes` with eight steps a chunk.
    """
    packed, scales, scale2 = weight
    result = np.empty(len(packed), np.float32)
    rows = max(1, _TILE_ELEMENTS // max(x.size, 1))
    for start in range(0, len(packed), rows):
        tile = slice(start, start + rows)
        weights = codes(packed[tile]) * np.repeat(factors(scales[tile], scale2), CHUNK, axis=1)
        products = (weights * x).reshape(len(weights), -1, CHUNK // 2, 2)
        pairs = products[..., 0] + products[..., 1]
        result[tile] = over_lanes(np.ascontiguousarray(pairs.transpose(1, 2, 0)))
    return to_bf16(result)


def nvfp4_slots(rows: Sequence[F32Array], experts: Sequence[Nvfp4 | None], outputs: int) -> Bf16Array:
    """`nvfp4_product` of each row with its expert: BF16 [slots, outputs]; zeros for an expert that is not there."""
    zeros = to_bf16(np.zeros(outputs, np.float32))
    products = [zeros if each is None else nvfp4_product(x, each) for x, each in zip(rows, experts, strict=True)]
    return np.stack(products)


def moe_expert_gate_up_shared(
    x: Bf16Array, gate: Sequence[Nvfp4 | None], up: Sequence[Nvfp4 | None], outputs: int
) -> tuple[Bf16Array, Bf16Array]:
    """Gate and up projections of BF16 [K]: BF16 [slots, N] each, a slot for every expert, the shared one last."""
    with np.errstate(all="ignore"):
        rows = [to_f32(x)] * len(gate)
        return nvfp4_slots(rows, gate, outputs), nvfp4_slots(rows, up, outputs)


def moe_expert_silu_down_shared(
    gate: Bf16Array, up: Bf16Array, down: Sequence[Nvfp4 | None], outputs: int
) -> Bf16Array:
    """bf16(`gated`(gate, up)[slot] . down[slot]): BF16 [slots, K] each give BF16 [slots, N]."""
    with np.errstate(all="ignore"):
        return nvfp4_slots(list(gated(gate, up)), down, outputs)
