# SPDX-License-Identifier: AGPL-3.0-only
"""Module `ssm_preprocess`: splits the rows of a joint query and gate projection."""

from __future__ import annotations

from ._bf16 import Bf16Array


def deinterleave_qg(rows: Bf16Array, num_heads: int, head_dim: int) -> Bf16Array:
    """[Q0 G0 Q1 G1 ...] to [Q0 Q1 ... | G0 G1 ...] in each row of BF16 [T, 2 * num_heads * head_dim], as a copy."""
    pairs = rows.reshape(-1, num_heads, 2, head_dim)
    return pairs.swapaxes(1, 2).copy().reshape(rows.shape)
