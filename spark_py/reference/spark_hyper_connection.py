# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_hyper_connection`: the parts of `hc_pre`, `hc_post` and `hc_head` that its kernels compute."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array
from .hyper_connection import hc_head_finish, hc_post, hc_pre_finish, shares_of


def spark_hc_mix(streams: F32Array, fn: F32Array) -> F32Array:
    """`hyper_connection.shares_of`: streams [T, hc, H] and fn [rows, hc H] give FP32 [T, rows + 1, 8]."""
    with np.errstate(all="ignore"):
        return shares_of(streams, fn)


def spark_hc_pre_finish(
    streams: F32Array,
    shares: F32Array,
    scale: F32Array,
    base: F32Array,
    iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Bf16Array, F32Array, F32Array]:
    """`hyper_connection.hc_pre_finish`: (y, post, comb) from the shares."""
    return hc_pre_finish(streams, shares, scale, base, iters, norm_eps, hc_eps)


def spark_hc_head_finish(
    streams: F32Array, shares: F32Array, scale: F32Array, base: F32Array, norm_eps: float, hc_eps: float
) -> Bf16Array:
    """`hyper_connection.hc_head_finish`: y from the shares."""
    return hc_head_finish(streams, shares, scale, base, norm_eps, hc_eps)


def spark_hc_post(block_out: Bf16Array, residual: F32Array, post: F32Array, comb: F32Array) -> F32Array:
    """`hyper_connection.hc_post`."""
    return hc_post(block_out, residual, post, comb)
