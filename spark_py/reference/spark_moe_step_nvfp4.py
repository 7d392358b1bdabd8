# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_step_nvfp4`: a mixture of NVFP4 experts in two launches, sums in FP32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ._bf16 import Bf16Array, F32Array, U32Array, sigmoid, to_bf16, to_f32
from .moe_shared_expert_fused import Nvfp4
from .moe_topk import largest_first, softmax_weights
from .moe_weighted_sum_blend import gate_logit
from .w4a16_gemv import CHUNK, E4M3, codes

SLICE = 128


def dot(x: F32Array, weights: Nvfp4) -> F32Array:
    """scale2 * (x . w) of FP32 [K] and an NVFP4 weight [N, K]: FP32 [N].

    Codes times x add up over each block of 16, sums times scales over each slice of 128; slices are added in ascending
    k. A tensor core's sums are others, as near.
    """
    packed, scales, scale2 = weights
    products = (codes(packed) * x).reshape(len(packed), -1, CHUNK).sum(axis=2, dtype=np.float32) * E4M3[scales]
    total = np.zeros(len(packed), np.float32)
    for first in range(0, products.shape[1], SLICE // CHUNK):
        total = total + products[:, first : first + SLICE // CHUNK].sum(axis=1, dtype=np.float32)
    return total * np.float32(scale2)


def _activation(x: F32Array, gate: Nvfp4 | None, up: Nvfp4 | None, n: int) -> F32Array:
    if gate is None or up is None:
        return np.zeros(n, np.float32)
    g = dot(x, gate)
    activation: F32Array = g * sigmoid(g) * dot(x, up)
    return activation


def spark_moe_route_gate_up_nvfp4(
    x: Bf16Array,
    logits: Bf16Array,
    gate: Callable[[int], Nvfp4 | None],
    up: Callable[[int], Nvfp4 | None],
    sh_gate: Nvfp4 | None,
    sh_up: Nvfp4 | None,
    n: int,
    top_k: int,
) -> tuple[U32Array, F32Array]:
    """(indices [T, k], activation FP32 [T, k + 1, N]) of x [T, K] and router logits [T, E].

    Indices are those of `moe_topk_softmax`. Activation = silu(g) * u of FP32 sums g and u; the shared
    expert's comes last. `gate(e)` and `up(e)` are the weights of expert e; where there are none, zeros. K % 32 == 0.
    """
    indices = largest_first(to_f32(logits), top_k)
    with np.errstate(all="ignore"):
        activation = np.stack(
            [
                [*(_activation(row, gate(int(e)), up(int(e)), n) for e in experts), _activation(row, sh_gate, sh_up, n)]
                for row, experts in zip(to_f32(x), indices, strict=True)
            ]
        )
    return indices, activation


def spark_moe_down_blend_nvfp4(
    activation: F32Array,
    down: Sequence[Sequence[Nvfp4 | None]],
    logits: Bf16Array,
    indices: U32Array,
    sh_down: Nvfp4 | None,
    x: Bf16Array,
    gate_weight: Bf16Array | None,
    n: int,
    normalize: bool,
) -> Bf16Array:
    """bf16(sum over e of w[e] * (activation[e] . down[e]) + s * (activation[k] . sh_down)) of activation FP32
    [T, k + 1, K]: BF16 [T, N]. w: the softmax weights that router logits [T, E] give the experts
    `indices` [T, k]. s = sigmoid(x . gate_weight), or 1 without a gate; x [T, N]."""
    with np.errstate(all="ignore"):
        weights, rows = softmax_weights(to_f32(logits), indices, normalize), []
        for acts, experts, shares, one in zip(activation, down, weights, x, strict=True):
            total = np.zeros(n, np.float32)
            for act, expert, share in zip(acts[:-1], experts, shares, strict=True):
                if expert is not None:
                    total = total + share * dot(act, expert)
            gate = np.float32(1.0) if gate_weight is None else sigmoid(gate_logit(one, gate_weight))
            rows.append(to_bf16(total if sh_down is None else total + gate * dot(acts[-1], sh_down)))
    return np.stack(rows)
