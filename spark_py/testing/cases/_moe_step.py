# SPDX-License-Identifier: AGPL-3.0-only
"""What the cases of a mixture in two launches share, whatever format its experts have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...catalog.spec import Call
from ..compare import f64
from ..inputs import Array
from .moe_silu_mul import SILU_BOUND, SILU_FLOOR
from .moe_topk import WEIGHT_BOUND, softmax
from .moe_weighted_sum_blend import exact


def activation(c: Call, slots: Callable[[str, Array], Array], rounding: float, lost: float) -> tuple[Array, Array]:
    """silu(g) * u in FP64, and how far roundings of g and u, relative, and sums in FP32 may take it. `slots`: of "gate"
    or "up" and indices [T, k] the weights of each row's slots, [T, k + 1, N, K]; `lost`: what a sum may lose, of the
    sum of sizes."""
    order = np.argsort(-f64(c.gate_logits), axis=1, kind="stable")[:, : c.top_k]
    x = f64(c.A)[:, None, :, None]
    sums, errors = [], []
    for name in ("gate", "up"):
        weights = slots(name, order)
        sums.append((weights @ x)[..., 0])
        errors.append(rounding * np.abs(sums[-1]) + lost * (np.abs(weights) @ np.abs(x))[..., 0])
    (g, u), (dg, du) = sums, errors
    with np.errstate(over="ignore"):
        silu = g / (1.0 + np.exp(-g))
    # The slope of silu is below 1.1.
    slack = 1.1 * dg * (np.abs(u) + du) + np.abs(silu) * du + SILU_BOUND * np.abs(silu * u) + SILU_FLOOR * np.abs(u)
    return silu * u, slack


def output(c: Call, down: Array, rounding: float, lost: float) -> tuple[Array, Array]:
    """The weighted sum in FP64, and how far it may be off. `down`: the weights of each row's slots, [T, k + 1, N, K];
    `rounding`: of a slot's product, relative; `lost`: what its sum may lose, of the sum of sizes."""
    act = f64(c.activation)[..., None]
    parts, sizes = (down @ act)[..., 0], (np.abs(down) @ np.abs(act))[..., 0]
    weights = softmax(c)
    result, slack = exact(parts[:, :-1], weights, parts[:, -1], c.input, c.gate_weight)
    # A slot's share, or the shared expert's, is 1 at most.
    shares = np.concatenate([weights, np.ones((len(parts), 1))], axis=1)[..., None]
    off = WEIGHT_BOUND * np.abs(shares * parts) + (1.0 + 2.0**-8) * shares * (rounding * np.abs(parts) + lost * sizes)
    return result, slack + off.sum(axis=1)
