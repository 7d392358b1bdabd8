# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_hc_norm`: chains of kernels around hyper-connections, in one launch each."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, to_bf16, to_f32
from .hyper_connection import hc_head_finish, hc_pre_finish
from .rms_norm_vanilla import rms_norm_vanilla


def spark_hc_expand_sum(own: Bf16Array, common: Bf16Array, hc: int) -> F32Array:
    """bf16(own + common) as FP32 [T, hc, H]: own BF16 [T, hc, H], or [T, 1, H] for all streams; common BF16 [T, H]."""
    with np.errstate(all="ignore"):
        sums = to_f32(to_bf16(to_f32(own) + to_f32(common)[:, None]))
    return np.ascontiguousarray(np.broadcast_to(sums, (len(own), hc, own.shape[2])))


def spark_hc_pre_norm(
    streams: F32Array,
    shares: F32Array,
    scale: F32Array,
    base: F32Array,
    weight: Bf16Array,
    iters: int,
    norm_eps: float,
    hc_eps: float,
    eps: float,
) -> tuple[Bf16Array, F32Array, F32Array]:
    """(`rms_norm_vanilla` of y, post, comb) with those of `hc_pre_finish`."""
    y, post, comb = hc_pre_finish(streams, shares, scale, base, iters, norm_eps, hc_eps)
    return rms_norm_vanilla(y, weight, eps), post, comb


def spark_hc_head_norm(
    streams: F32Array,
    shares: F32Array,
    scale: F32Array,
    base: F32Array,
    weight: Bf16Array,
    norm_eps: float,
    hc_eps: float,
    eps: float,
) -> tuple[Bf16Array, Bf16Array]:
    """y of `hc_head_finish`, and `rms_norm_vanilla` of it."""
    y = hc_head_finish(streams, shares, scale, base, norm_eps, hc_eps)
    return y, rms_norm_vanilla(y, weight, eps)
