# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_shared_expert_fused_bf16`: a token through its experts and the shared expert, BF16 weights.

Weights are [N, K] an expert, K % 8 == 0; None stands for an expert that lives elsewhere and gives zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from ._bf16 import BF16, WARP, Bf16Array, F32Array, halving_sum, padded, sigmoid, to_bf16, to_f32
from .gemv import CHUNK, LANES, dense_gemv_bf16

Weights: TypeAlias = "Bf16Array | None"


def gated(gate: Bf16Array, up: Bf16Array) -> F32Array:
    """(g * (1 / (1 + exp(-g)))) * u in FP32, without a clamp and without a rounding to BF16."""
    g = to_f32(gate)
    return g * sigmoid(g) * to_f32(up)


def dot_fp32(x: F32Array, weights: Bf16Array) -> F32Array:
    """x . w of each row w, in the order of `gemv.dot_matrix`: FP32 [K] and BF16 [N, K] give FP32 [N].

    Each product rounds to FP32.
    """
    stripe = LANES * CHUNK
    products = padded(x * to_f32(weights), -(-x.size // stripe) * stripe)
    steps = products.reshape(len(weights), -1, LANES, CHUNK).transpose(1, 3, 0, 2).reshape(-1, len(weights), LANES)
    lanes = np.zeros((len(weights), LANES), np.float32)
    for step in steps:
        lanes = lanes + step
    return halving_sum(lanes[:, :WARP]) + halving_sum(lanes[:, WARP:])


def _project(x: Bf16Array, weights: Weights, n: int) -> Bf16Array:
    return np.zeros(n, BF16) if weights is None else dense_gemv_bf16(x, weights)


def _down(gate: Bf16Array, up: Bf16Array, weights: Weights, n: int) -> Bf16Array:
    return np.zeros(n, BF16) if weights is None else to_bf16(dot_fp32(gated(gate, up), weights))


def moe_expert_gate_up_shared_bf16(
    x: Bf16Array, gate: Sequence[Weights], up: Sequence[Weights], sh_gate: Weights, sh_up: Weights, n: int
) -> tuple[Bf16Array, Bf16Array, Bf16Array, Bf16Array]:
    """(gate_out [k, N], up_out [k, N], sh_gate_out [N], sh_up_out [N]) of x [K]; `gate` and `up` hold the weights of
    the k chosen experts in slot order. Each output is that of `dense_gemv_bf16`, bit for bit.
    """
    gate_out = np.stack([_project(x, weights, n) for weights in gate])
    up_out = np.stack([_project(x, weights, n) for weights in up])
    return gate_out, up_out, _project(x, sh_gate, n), _project(x, sh_up, n)


def moe_expert_silu_down_shared_bf16(
    gate: Bf16Array,
    up: Bf16Array,
    weights: Sequence[Weights],
    sh_gate: Bf16Array,
    sh_up: Bf16Array,
    sh_weights: Weights,
    n: int,
) -> tuple[Bf16Array, Bf16Array]:
    """(C [k, N], sh_down_out [N]) of gate and up [k, K] and the shared expert's [K]; `weights` in slot order.

    Output = bf16((silu(gate) * up) . w), the activation in FP32: `moe_silu_mul` and `dense_gemv_bf16` round it to BF16,
    so theirs may differ by 2**-9 of the sum of |activation * w| and a rounding of the result.
    """
    with np.errstate(all="ignore"):
        routed = np.stack([_down(*row, n) for row in zip(gate, up, weights, strict=True)])
        return routed, _down(sh_gate, sh_up, sh_weights, n)
