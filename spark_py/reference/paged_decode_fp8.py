# SPDX-License-Identifier: AGPL-3.0-only
"""Module `paged_decode_fp8`: attention of one query row a sequence over a paged cache of E4M3, with one scale a side.

Formula: o = v_scale * sum over p of exp(s_p - max) v_p / sum over p of exp(s_p - max), s_p = (q . k_p) *
(inv_sqrt_d * k_scale), k_p and v_p the values of the bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array
from ._e4m3 import U8Array, from_e4m3
from .paged_decode import attend


def paged_decode_attn_fp8(
    query: Bf16Array,
    k_cache: U8Array,
    v_cache: U8Array,
    output: Bf16Array,
    block_tables: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    scale: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """output[s] = attention over the positions below seq_lens[s] of sequence s, for each s of length > 0.

    query, output: BF16 [S, nq, hd]; k_cache, v_cache: E4M3 bytes [blocks, block_size, nkv, hd], in strides of any size;
    block_tables: int32 [S, m]; seq_lens: int32 [S]. The factor of a score is scale * k_scale, rounded to FP32 once; the
    result is scaled once. Otherwise as `paged_decode_attn`, with no window.
    """
    block_size = k_cache.shape[1]
    factor = float(np.float32(scale) * np.float32(k_scale))
    for sequence, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        positions = np.arange(length)
        blocks, offsets = block_tables[sequence, positions // block_size], positions % block_size
        keys, values = from_e4m3(k_cache[blocks, offsets]), from_e4m3(v_cache[blocks, offsets])
        output[sequence] = attend(query[sequence], keys, values, factor, v_scale)
