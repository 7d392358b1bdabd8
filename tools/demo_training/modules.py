# SPDX-License-Identifier: AGPL-3.0-only
"""Drafting with one module a draft, as the engine does it with one sequence, by the policies of `drafter.POLICIES`.

`refeed`: no module lacks a row. Row q of module i is made of token q and of module i - 1's row q - 1, whether its token
is text or a draft; rows of verified tokens stay, and what accepted drafts left out is written before the next draft.
`verified` and `seed`: a propose writes one row a module, for its draft alone; the row stays where its token was
accepted (`seed`: where the draft that it made was). So rows are missing from then on, and no module sees the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from demo_training.drafter import POLICIES

if TYPE_CHECKING:
    from demo_training.minimax_m2 import Model

__all__ = ["ModuleDrafter"]


class ModuleDrafter:
    """The modules with a cache each. `position` below is the number of tokens that the trunk has processed."""

    def __init__(self, model: Model, drafts: int, capacity: int, policy: str) -> None:
        count = model.settings.modules
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is none of {', '.join(POLICIES)}")
        if drafts > count:
            raise ValueError(f"{drafts} drafts are asked of {count} modules")
        self.model, self.drafts, self.policy = model, drafts, policy
        self.caches = [model.cache(1, 1, capacity, torch.float32) for _ in range(count)]
        # With refeed: the token of each position, and what row q of module i reads: before[i, q]. Module i begins at
        # position i + 1, so its row q is in slot q - 1 - i.
        self.tokens = [0]
        self.before = torch.full((count + 1, capacity + count, model.settings.hidden), torch.nan)

    def append(self, tokens: list[int], hidden: Tensor, position: int) -> None:
        """Takes in pairs (token, the trunk's hidden before it) from a position on, hidden [n, hidden]."""
        if self.policy == "refeed":
            self.tokens[position:] = tokens
            self.before[0, position : len(self.tokens)] = hidden

    def propose(self, token: int, hidden: Tensor, position: int) -> list[int]:
        """Drafts after `token` (sampled, not yet processed), from the trunk's hidden [1, hidden] before it."""
        self.append([token], hidden, position)
        drafts: list[int] = []
        for i in range(self.drafts):
            if self.policy == "refeed":
                first = self.caches[i].length + 1 + i
                tokens = [*self.tokens, *drafts][first:]
                end = first + len(tokens)
                state, normed = self._rows(i, tokens, self.before[i, first:end], first)
                self.before[i + 1, first + 1 : end + 1] = state
            else:
                hidden, normed = self._rows(i, [token, *drafts][-1:], hidden, position + i)
            drafts.append(int(self.model.draft_logits(normed)[-1].argmax()))
        return drafts

    def after_verify(self, drafts: list[int], accepted: int, hidden: Tensor, position: int) -> None:
        """`hidden` is the trunk's for the verified rows, of which row 0 stands at `position`."""
        if self.policy == "refeed":
            self.append(drafts[:accepted], hidden[:accepted], position + 1)
            for i, cache in enumerate(self.caches):
                cache.length = min(cache.length, max(0, position + accepted - i))
        else:
            kept = accepted + 1 if self.policy == "verified" else accepted
            for cache in self.caches[kept : len(drafts)]:
                cache.length -= 1

    def _rows(self, i: int, tokens: list[int], hidden: Tensor, position: int) -> tuple[Tensor, Tensor]:
        cache = self.caches[i]
        ids = torch.tensor([tokens])
        state, normed = self.model.module_hidden(i, ids, hidden[None], position, cache.attend(0))
        cache.length += len(tokens)
        return state[0], normed[0]
