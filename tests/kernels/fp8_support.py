# SPDX-License-Identifier: AGPL-3.0-only
"""The order of an FP8 GEMV, one FP32 operation at a time."""

from __future__ import annotations

import numpy as np

from spark_py.testing import BF16, Array


def dot_step_by_step(x: Array, weights: Array, lane_scale: Array | None = None) -> Array:
    """BF16 [N] from BF16 x [K] and FP32 weights [N, K]: 64 lanes, chunks of 16, ascending k; two trees, one addition.

    `lane_scale` [N] multiplies what a lane has before the tree.
    """
    a = x.astype(np.float32)
    lanes = [np.zeros(len(weights), np.float32) for _ in range(64)]
    with np.errstate(all="ignore"):
        for k in range(a.size):
            lane = (k // 16) % 64
            lanes[lane] = lanes[lane] + a[k] * weights[:, k]
        if lane_scale is not None:
            lanes = [lane * lane_scale for lane in lanes]
        halves = []
        for start in (0, 32):
            values = lanes[start : start + 32]
            for step in (16, 8, 4, 2, 1):
                values = [values[i] + values[i + step] for i in range(step)]
            halves.append(values[0])
        return (halves[0] + halves[1]).astype(BF16)
