# SPDX-License-Identifier: AGPL-3.0-only
"""Module `w8a16_gemv`: y = x W^T with E4M3 weights under one FP32 factor for 128 x 128 of them."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, to_bf16, to_f32
from ._e4m3 import U8Array, from_e4m3
from .gemv_fp8w import lane_shares, sum_of_lanes, tiles

BLOCK = 128


def dequantized(weights: U8Array, block_scale: F32Array, first: int = 0) -> F32Array:
    """FP32(w * factor of its block): u8 [n, K] and FP32 [ceil(N / 128), ceil(K / 128)] give FP32 [n, K].

    `first` is the row of the whole tensor that weights begin with. Bytes 0x7F and 0xFF are NaN.
    """
    rows, columns = (first + np.arange(weights.shape[0])) // BLOCK, np.arange(weights.shape[1]) // BLOCK
    values: F32Array = to_f32(from_e4m3(weights)) * block_scale[np.ix_(rows, columns)]
    return values


def w8a16_gemv_batchm(x: Bf16Array, weights: U8Array, block_scale: F32Array) -> Bf16Array:
    """bf16(x[m] . w[n]) with w as `dequantized`: BF16 [M, K], u8 [N, K] and FP32 [ceil(N / 128), ceil(K / 128)] give
    BF16 [M, N]. K % 16 == 0.

    Order of the FP32 sum as `gemv_fp8w.lane_shares` and `sum_of_lanes`. The bits of an element depend on x[m] and w[n]
    alone.
    """
    rows = to_f32(x)
    result = np.empty((len(x), len(weights)), x.dtype)
    with np.errstate(all="ignore"):
        for tile in tiles(weights):
            values = dequantized(weights[tile], block_scale, tile.start)
            for m, row in enumerate(rows):
                result[m, tile] = to_bf16(sum_of_lanes(lane_shares(row, values)))
    return result


def w8a16_gemv(x: Bf16Array, weights: U8Array, block_scale: F32Array) -> Bf16Array:
    """`w8a16_gemv_batchm` of one row: BF16 [K] and the same weights give BF16 [N]."""
    row: Bf16Array = w8a16_gemv_batchm(x[None], weights, block_scale)[0]
    return row
