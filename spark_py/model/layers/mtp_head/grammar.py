# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the grammar half of `layers/mtp_head/forward.rs`: which tokens a mask allows, and the best of them."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ....runtime.errors import InvalidArgumentError
from ...layer import GrammarMask

__all__ = ["MaskWords", "allowed_tokens", "masked_argmax", "masks_per_draft"]

MaskWords: TypeAlias = npt.NDArray[np.int32]

_BITS = 32


def masks_per_draft(mask: GrammarMask | None, num_drafts: int, vocab: int) -> list[MaskWords | None]:
    """One entry a draft to be made: None without a mask, one entry for a single mask, num_drafts for one a position.

    A single mask holds for the next position alone, so no second draft can follow it. InvalidArgumentError for words
    that are not int32, for masks shorter than `vocab`, and for another number of masks than drafts.
    """
    if mask is None:
        return [None] * num_drafts
    if isinstance(mask, np.ndarray) and mask.ndim == 1:
        return [_words(mask, vocab)]
    try:
        rows: list[MaskWords | None] = [_words(row, vocab) for row in mask]
    except TypeError:
        raise InvalidArgumentError("grammar_bitmask", mask, "an int32 array, or one of them a draft") from None
    if len(rows) != num_drafts:
        raise InvalidArgumentError("rows of grammar_bitmask", len(rows), f"{num_drafts} drafts need as many masks")
    return rows


def _words(mask: Any, vocab: int) -> MaskWords:
    if not isinstance(mask, np.ndarray) or mask.ndim != 1 or mask.dtype != np.int32:
        found = f"{mask.dtype}{list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise InvalidArgumentError("grammar_bitmask", found, "int32 words [n] are needed")
    if mask.shape[0] * _BITS < vocab:
        raise InvalidArgumentError(
            "words of grammar_bitmask", mask.shape[0], f"the {vocab} draft tokens need {-(-vocab // _BITS)}"
        )
    return mask


def allowed_tokens(mask: MaskWords, vocab: int) -> npt.NDArray[np.intp]:
    """Ids below `vocab` whose bit is set, ascending: bit j % 32 of word j // 32."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little", count=vocab)
    return np.flatnonzero(bits)


def masked_argmax(logits: npt.NDArray[np.float32], mask: MaskWords) -> int | None:
    """The allowed id with the largest logit, the lowest among equals; None where none is allowed. NaN counts as
    -Inf."""
    ids = allowed_tokens(mask, logits.shape[0])
    if ids.size == 0:
        return None
    values = logits[ids]
    return int(ids[np.argmax(np.where(np.isnan(values), np.float32(-np.inf), values))])
