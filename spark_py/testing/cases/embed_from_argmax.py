# SPDX-License-Identifier: AGPL-3.0-only
"""Cases of module embed_from_argmax: rows of a table, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..case import Alias, Argument, Case, Draw
from ..inputs import U32, Array, any_bits, normal

VOCABULARY = 300
SIZES = [1, 31, 256, 257, 1000]


def _table(rng: np.random.Generator, size: int, whole: bool) -> Array:
    return any_bits(rng, VOCABULARY, size) if whole else normal(rng, VOCABULARY, size)


def _one(size: int, token: int, aliased: bool = False, whole: bool = False) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        made: dict[str, Argument] = {"argmax_result": np.array([token], U32), "embed_table": _table(rng, size, whole)}
        return made | {"hidden_size": size} | ({"token_id_out": Alias("argmax_result")} if aliased else {})

    return draw


def _several(size: int, whole: bool = False) -> Draw:
    def draw(rng: np.random.Generator) -> Mapping[str, Argument]:
        tokens = np.array([0, VOCABULARY - 1, 3, 3, *rng.integers(VOCABULARY, size=3)], U32)
        return {"token_ids": tokens, "embed_table": _table(rng, size, whole), "hidden_size": size}

    return draw


CASES: Mapping[str, tuple[Case, ...]] = {
    "embed_from_argmax": (
        *(Case(f"H={size} id={token}", _one(size, token)) for size in SIZES for token in (0, 201, VOCABULARY - 1)),
        Case("the id is its own copy", _one(257, 123, aliased=True), tag="abi"),
        Case("every bit pattern", _one(1000, 77, whole=True), tag="decision", subject="NaN payloads"),
    ),
    "batched_embed": (
        *(Case(f"H={size}", _several(size), grid=(7, 1, 1)) for size in SIZES),
        Case("every bit pattern", _several(1000, True), {}, (7, 1, 1), "decision", "NaN payloads"),
    ),
}
