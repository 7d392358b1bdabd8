# SPDX-License-Identifier: AGPL-3.0-only
"""The draft layer in speculative decoding: one layer with a cache of its own, run again for each later draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from demo_training.base import DemoModel

__all__ = ["POLICIES", "Drafter"]

POLICIES = ("refeed", "verified", "seed")
"""Which drafter rows stay after a verify step that accepted `a` of `n` drafts: seed min(n, a), verified min(n, a + 1),
refeed 1 and the rows of the accepted drafts made again from the trunk's hidden."""


class Drafter:
    """The draft layer with its cache. `position` below is the number of tokens that the trunk has processed."""

    def __init__(self, model: DemoModel, drafts: int, capacity: int, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is none of {', '.join(POLICIES)}")
        self.model, self.drafts, self.policy = model, drafts, policy
        self.cache = model.cache(1, 1, capacity, torch.float32)

    def append(self, tokens: list[int], hidden: Tensor, position: int) -> Tensor:
        """Rows of the pairs (token, hidden), hidden [n, hidden]; returns their residual stream [n, hidden]."""
        ids = torch.tensor([tokens])
        out = self.model.draft_hidden(ids, hidden[None], position, self.cache.attend(0))[0]
        self.cache.length += len(tokens)
        return out

    def propose(self, token: int, hidden: Tensor, position: int) -> list[int]:
        """Drafts after `token` (sampled, not yet processed), from the trunk's hidden [1, hidden] before it."""
        drafts: list[int] = []
        for j in range(self.drafts):
            hidden = self.append([token], hidden, position + j)
            token = int(self.model.draft_logits(hidden)[0].argmax())
            drafts.append(token)
        return drafts

    def after_verify(self, drafts: list[int], accepted: int, hidden: Tensor, position: int) -> None:
        """`hidden` is the trunk's for the verified rows, of which row 0 stands at `position`."""
        kept = {"seed": min(len(drafts), accepted), "verified": min(len(drafts), accepted + 1), "refeed": 1}
        self.cache.length -= len(drafts) - kept[self.policy]
        if self.policy == "refeed" and accepted:
            self.append(drafts[:accepted], hidden[:accepted], position + 1)
