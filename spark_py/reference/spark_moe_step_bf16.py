# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_moe_step_bf16`: a mixture of BF16 experts in two launches, with the bits of the engine's four."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ._bf16 import BF16, Bf16Array, F32Array, U32Array, to_bf16, to_f32
from .gemv import dense_gemv_bf16
from .moe_shared_expert_fused_bf16 import Weights, dot_fp32, gated
from .moe_topk import largest_first, softmax_weights
from .moe_weighted_sum_blend import moe_weighted_sum_blend


def _activation(x: Bf16Array, gate: Weights, up: Weights, n: int) -> F32Array:
    if gate is None or up is None:
        return np.zeros(n, np.float32)
    return gated(dense_gemv_bf16(x, gate), dense_gemv_bf16(x, up))


def spark_moe_route_gate_up_bf16(
    x: Bf16Array,
    logits: Bf16Array,
    gate: Callable[[int], Weights],
    up: Callable[[int], Weights],
    sh_gate: Weights,
    sh_up: Weights,
    n: int,
    top_k: int,
) -> tuple[U32Array, F32Array]:
    """(indices [T, k], activation FP32 [T, k + 1, N]) of x [T, K] and router logits [T, E].

    Indices are those of `moe_topk_softmax`. Activation = silu(g) * u in FP32 of g and u as BF16, which
    `dense_gemv_bf16` gives; the shared expert's comes last. `gate(e)` and `up(e)` are the weights of expert e; where
    there are none, zeros.
    """
    indices = largest_first(to_f32(logits), top_k)
    with np.errstate(all="ignore"):
        activation = np.stack(
            [
                [*(_activation(row, gate(int(e)), up(int(e)), n) for e in experts), _activation(row, sh_gate, sh_up, n)]
                for row, experts in zip(x, indices, strict=True)
            ]
        )
    return indices, activation


def _down(activation: F32Array, weights: Weights, n: int) -> Bf16Array:
    return np.zeros(n, BF16) if weights is None else to_bf16(dot_fp32(activation, weights))


def spark_moe_down_blend_bf16(
    activation: F32Array,
    down: Sequence[Sequence[Weights]],
    logits: Bf16Array,
    indices: U32Array,
    sh_down: Weights,
    x: Bf16Array,
    gate_weight: Bf16Array | None,
    n: int,
    normalize: bool,
) -> Bf16Array:
    """BF16 [T, N] of activation FP32 [T, k + 1, K]: `moe_weighted_sum_blend` of bf16(activation . w) of each slot's
    `down` weights [N, K], with the softmax weights that router logits [T, E] give the experts `indices` [T, k],
    x [T, N] and gate_weight [N], which may be None."""
    with np.errstate(all="ignore"):
        weights, rows = softmax_weights(to_f32(logits), indices, normalize), []
        for acts, experts, shares, one in zip(activation, down, weights, x, strict=True):
            routed = np.stack([_down(act, expert, n) for act, expert in zip(acts[:-1], experts, strict=True)])
            rows.append(moe_weighted_sum_blend(routed, shares, _down(acts[-1], sh_down, n), one, gate_weight))
        return np.stack(rows)
