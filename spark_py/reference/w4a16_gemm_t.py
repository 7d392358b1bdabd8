# SPDX-License-Identifier: AGPL-3.0-only
"""Module `w4a16`, the tile GEMM: C = A W^T with transposed NVFP4 weights and BF16 activations.

Weights are `packed_t` uint8 [K / 2, ldb] (byte (i, n) = W[n, 2 i] in the low nibble, W[n, 2 i + 1] in the high one) and
`scales_t` uint8 [K / 16, ldb] in E4M3, ldb >= N; columns from N on mean nothing.
"""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array, F32Array, to_bf16, to_f32
from .quantize_nvfp4 import E2M1_VALUES, GROUP, U8Array, decode_e4m3

_TILE_ELEMENTS = 1 << 16


def weights(packed_t: U8Array, scales_t: U8Array) -> F32Array:
    """code * scale as FP32 [K, columns]: 6 significant bits between 2^-10 and 2688, so exact in BF16 too."""
    nibbles = np.stack([packed_t & 15, packed_t >> 4], axis=1).reshape(-1, packed_t.shape[1])
    values: F32Array = E2M1_VALUES[nibbles] * decode_e4m3(scales_t).repeat(GROUP, axis=0)
    return values


def w4a16_gemm_t(a: Bf16Array, packed_t: U8Array, scales_t: U8Array, scale2: float, n: int) -> Bf16Array:
    """bf16(scale2 * (a[m] . (code * scale)[n])): BF16 [M, K] gives BF16 [M, n].

    Products are exact in FP32. They are added in ascending k to one FP32 sum, which scale2 multiplies at the end.
    Tensor cores add in an order of their own, so the kernel has other last bits. An output depends on its row and its
    column alone.
    """
    rows, depth = a.shape
    result = np.empty((rows, n), a.dtype)
    width = max(1, _TILE_ELEMENTS // rows)
    by_k = np.ascontiguousarray(to_f32(a).T)[:, :, None]
    with np.errstate(all="ignore"):
        for start in range(0, n, width):
            tile = slice(start, min(start + width, n))
            factors = weights(packed_t[:, tile], scales_t[:, tile])[:, None, :]
            sums = np.zeros((rows, factors.shape[2]), np.float32)
            for k in range(depth):
                sums += by_k[k] * factors[k]
            result[:, tile] = to_bf16(sums * np.float32(scale2))
    return result
