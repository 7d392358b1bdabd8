# SPDX-License-Identifier: AGPL-3.0-only
"""Module `moe_hash_route`: the experts of a token from a table, weighted by the learned router's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, F32Array, U32Array, to_f32
from .moe_topk_sqrt import sqrt_softplus, sqrt_weights


def moe_hash_route(
    logits: Bf16Array, entries: npt.NDArray[np.int64], normalize: bool, scaling_factor: float
) -> tuple[U32Array, F32Array]:
    """(indices u32 [k], weights FP32 [k]) of one token: logits BF16 [E], its row of the table i64 [k].

    Weights are `sqrt_weights` of sqrt(softplus(logit)) of the row's experts, in the row's order. An entry below 0 or
    beyond E gives index 0 and a score of NaN, so that with `normalize` every weight of the token is NaN.
    """
    with np.errstate(all="ignore"):
        known = (entries >= 0) & (entries < len(logits))
        indices = np.where(known, entries, 0).astype(np.uint32)
        scores = np.where(known, sqrt_softplus(to_f32(logits))[indices], np.float32(np.nan))
        return indices, sqrt_weights(scores[None], normalize, scaling_factor)[0]
