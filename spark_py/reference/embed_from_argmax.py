# SPDX-License-Identifier: AGPL-3.0-only
"""Module `embed_from_argmax`: rows of an embedding table, chosen by token ids in device memory."""

from __future__ import annotations

from ._bf16 import Bf16Array, U32Array


def embed_from_argmax(row: Bf16Array, argmax_result: U32Array) -> tuple[Bf16Array, U32Array]:
    """(the embedding row, the id): bit copies of `row` BF16 [H], which is row argmax_result[0], and of the id u32 [1].

    The row is passed instead of the table [V, H], which can be larger than memory that is in use.
    """
    return row.copy(), argmax_result.copy()


def batched_embed(token_ids: U32Array, table: Bf16Array) -> Bf16Array:
    """table[token_ids]: u32 [T] and BF16 [V, H] give BF16 [T, H], bit for bit. Ids must be below V (IndexError)."""
    return table[token_ids]
