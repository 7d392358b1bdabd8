# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_expert_gemv`, function `moe_weighted_sum_blend`: the experts of a token and the shared expert, added."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, halving_sum, padded, sigmoid, to_bf16, to_f32

CHUNK = 8
THREADS = 256


def gate_logit(x: Bf16Array, gate_weight: Bf16Array) -> F32Array:
    """x . gate_weight in FP32: BF16 [K] each, K % 8 == 0.

    Thread t of 256 adds the 8-element chunks t, t + 256, ... in ascending k; then the block adds up as a tree.
    """
    stripe = THREADS * CHUNK
    products = padded(to_f32(x) * to_f32(gate_weight), -(-x.size // stripe) * stripe)
    steps = products.reshape(-1, THREADS, CHUNK).transpose(0, 2, 1).reshape(-1, THREADS)
    threads = np.zeros(THREADS, np.float32)
    for step in steps:
        threads = threads + step
    warps = halving_sum(threads.reshape(-1, 32))
    return halving_sum(padded(warps, 32))


def moe_weighted_sum_blend(
    expert_out: Bf16Array, weights: F32Array, shared_out: Bf16Array, x: Bf16Array, gate_weight: Bf16Array | None
) -> Bf16Array:
    """bf16(sum over e of w[e] * x[e] + g * shared): BF16 [k, H], FP32 [k] and BF16 [H] give BF16 [H].

    The sum is FP32, in slot order from 0. g = sigmoid(x . gate_weight), or 1 without a gate; x and gate BF16 [K].
    """
    with np.errstate(all="ignore"):
        total = np.zeros(shared_out.shape, np.float32)
        for row, weight in zip(expert_out, weights, strict=True):
            total = total + weight * to_f32(row)
        gate = np.float32(1.0) if gate_weight is None else sigmoid(gate_logit(x, gate_weight))
        return to_bf16(total + gate * to_f32(shared_out))
