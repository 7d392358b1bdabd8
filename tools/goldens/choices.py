# SPDX-License-Identifier: AGPL-3.0-only
"""How clear the choices of experts and groups are in a call of transformers' models: a discrete choice that is nearly
even BF16 may make otherwise, and be right."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE, Glm4MoeTopkRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock

__all__ = ["Choices", "gaps", "last_gaps"]


class Choices:
    """How clear the choices of the routers among `blocks` are in a call, kept by hooks: the distance of the score of
    the last expert that is taken to that of the first one that is not, and the same of groups."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.found: list[Tensor] = []
        self.exact: list[Any] | None = None
        for block in blocks:
            mlp = block.mlp
            if isinstance(mlp, Glm4MoeMoE):
                mlp.gate.register_forward_hook(partial(self._seen, None))
            elif isinstance(mlp, MiniMaxM2SparseMoeBlock):
                mlp.gate.register_forward_hook(partial(self._seen, mlp.e_score_correction_bias))

    def _seen(self, bias: Tensor | None, gate: Any, _args: Any, out: Any) -> None:
        groups, kept = (gate.num_group, gate.topk_group) if isinstance(gate, Glm4MoeTopkRouter) else (1, 1)
        shift = gate.e_score_correction_bias if bias is None else bias
        self.found.append((out[0].double().sigmoid() + shift, groups, kept, gate.top_k))

    def take(self, like: Tensor) -> list[Any]:
        """Of each router's call since the last time, scores [copies, rows, E] with what the choice depends on."""
        found = [(scores.unflatten(0, (len(like), -1)), *rest) for scores, *rest in self.found]
        self.found.clear()
        return found


def gaps(calls: list[Any], exact: list[Any]) -> Tensor:
    """[copies, rows, choices of all calls]: a call chooses experts, unless it takes all, and groups, unless it takes
    all. Which ones are last and first say the scores `exact`, of the same calls."""
    parts = [x for (scores, *how), (true, *_) in zip(calls, exact, strict=True) for x in _gaps(scores, true, *how)]
    like = calls[0][0]
    return torch.stack(parts, -1) if parts else like.new_zeros(*like.shape[:-1], 0)


def _gaps(scores: Tensor, true: Tensor, groups: int, kept: int, top: int) -> Iterator[Tensor]:
    def distance(values: Tensor, order: Tensor, count: int) -> Tensor:
        places = order.topk(count + 1, dim=-1).indices[..., -2:].expand(*values.shape[:-1], 2)
        pair = values.gather(-1, places)
        return pair[..., 0] - pair[..., 1]

    def of_groups(values: Tensor) -> Tensor:
        return values.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)

    size = true.shape[-1] // groups
    order = true
    if kept < groups:
        best = of_groups(true)
        yield distance(of_groups(scores), best, kept)
        within = torch.zeros_like(best).scatter(-1, best.topk(kept, dim=-1).indices, 1.0) > 0
        order = true.masked_fill(~within.repeat_interleave(size, -1), -torch.inf)
    if top < kept * size:
        yield distance(scores, order, top)


def last_gaps(calls: list[Any], exact: list[Any]) -> Tensor:
    """[copies, n, choices]: of the last row of each module's call."""
    rows = [gaps([call], [true])[:, -1] for call, true in zip(calls, exact, strict=True)]
    return torch.stack(rows, 1)
