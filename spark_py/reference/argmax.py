# SPDX-License-Identifier: AGPL-3.0-only
"""Module `argmax`: the index of the largest logit of a row, and its log-probability."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, U32Array, to_f32


def argmax_rows(logits: Bf16Array) -> U32Array:
    """The index of the maximum of each row: BF16 [T, n] gives u32 [T].

    Equal maxima: the lowest index. NaN never wins; +0 and -0 are equal. A row of NaN and -Inf gives the lowest index
    that is not NaN; a row of NaN alone gives 0.
    """
    values = to_f32(logits)
    missing = np.isnan(values)
    winners = np.argmax(np.where(missing, np.float32(-np.inf), values), axis=1)
    # NaN was read as -Inf above: where -Inf is the maximum, the first entry that is not NaN is meant.
    lowest = values[np.arange(len(values)), winners]
    for row in np.flatnonzero(missing.any(axis=1) & ~(lowest > -np.inf)):
        winners[row] = np.argmin(missing[row])
    return np.asarray(winners, np.uint32)


def argmax_logprobs(logits: Bf16Array, winners: U32Array) -> F32Array:
    """ln softmax of each row's winner, -ln(sum exp(v - max)): BF16 [T, n], u32 [T] give FP32 [T].

    NaN where it is undefined (a NaN in the row, two or more +Inf, nothing above -Inf); 0 for a single +Inf, the limit.
    The sum is FP64, rounded once.
    """
    with np.errstate(all="ignore"):
        values = to_f32(logits).astype(np.float64)
        top = values[np.arange(len(values)), winners.astype(np.intp)][:, None]
        # exp(0) for every entry equal to the maximum, so that Inf - Inf does not arise.
        total = np.where(values == top, 1.0, np.exp(values - top)).sum(axis=1)
        result = 0.0 - np.log(total)
    infinite = np.isinf(top[:, 0])
    certain = (top[:, 0] > 0) & (total == 1.0)
    result[infinite] = np.where(certain[infinite], 0.0, np.nan)
    return np.asarray(result, np.float32)
