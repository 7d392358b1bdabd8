# SPDX-License-Identifier: AGPL-3.0-only
"""Attention over one latent row a token, the key and value of all heads, within a window and with a sink a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from demo_training.base import KvCache

__all__ = ["Attend", "LatentCache", "chained", "windowed"]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q [B, T, heads, head_dim] with this call's latent rows [B, T, head_dim] and the sinks [heads]."""


class windowed:  # noqa: N801 - used as a function with memory
    """Causal attention over `window` rows, the query's own included, within one call.

    The call is cut into blocks of `window` queries, each of which reads its own and the block before. The first row of
    the block before is out of every query's sight: its place is the sink's, a key and value of zeros.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.seen: dict[int, Tensor] = {}

    def _mask(self, blocks: int, device: torch.device) -> Tensor:
        """FP32 [blocks, window, 1, 2 window], 0 where the sink or a row is seen."""
        if blocks not in self.seen:
            width = self.window
            query, key = torch.arange(width, device=device)[:, None], torch.arange(2 * width, device=device)
            seen = ((key > query) & (key <= query + width)).repeat(blocks, 1, 1)
            seen[0] &= key >= width
            seen[:, :, 0] = True
            self.seen[blocks] = torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf).unsqueeze(2)
        return self.seen[blocks]

    def __call__(self, q: Tensor, kv: Tensor, sinks: Tensor) -> Tensor:
        (batch, rows, heads, size), width = q.shape, self.window
        blocks = -(-rows // width)
        tail = blocks * width - rows
        own = functional.pad(kv, (0, 0, 0, tail)).unflatten(1, (blocks, width))
        before = functional.pad(own, (0, 0, 0, 0, 1, 0))[:, :-1, 1:]
        keys = torch.cat((own.new_zeros(batch, blocks, 1, size), before, own), 2)
        queries = functional.pad(q, (0, 0, 0, 0, 0, tail)).reshape(batch, blocks, width * heads, size)
        scores = (queries @ keys.mT).unflatten(2, (width, heads))
        bias = self._mask(blocks, q.device) + functional.pad(sinks.float()[:, None], (0, 2 * width - 1))
        weights = torch.add(bias, scores, alpha=size**-0.5).softmax(-1).to(keys.dtype)
        out = weights.flatten(2, 3) @ keys
        return out.view(batch, blocks * width, heads, size)[:, :rows]


class chained(windowed):  # noqa: N801 - used as a function with memory
    """Attention of a whole window's draft chains at once, as the engine's cache would have it.

    The first call (draft 1 of each position) is causal and becomes the shared cache. In a later call (draft j), the
    query of position i stands at row i + j - 1: it sees the cache's rows up to i, and of the rows of drafts 2 .. j only
    those of its own chain. Later calls are for the positions of the slice `bases` (None: all).
    """

    def __init__(self, window: int, bases: slice | None = None) -> None:
        super().__init__(window)
        self.bases = slice(None) if bases is None else bases
        self.base: Tensor | None = None
        self.own: list[Tensor] = []

    def __call__(self, q: Tensor, kv: Tensor, sinks: Tensor) -> Tensor:
        if self.base is None:
            self.base = kv
            return super().__call__(q, kv, sinks)
        self.own.append(kv)
        scale, length = q.shape[-1] ** -0.5, self.base.shape[1]
        key = torch.arange(length, device=q.device)
        query = key[self.bases, None]
        hidden = (key > query) | (key <= query + len(self.own) - self.window)
        shared = (q.flatten(1, 2) @ self.base.mT).unflatten(1, q.shape[1:3]).float().mul(scale)
        shared = shared.masked_fill(hidden.unsqueeze(1), -torch.inf)
        chain = [(q * own.unsqueeze(2)).sum(-1, keepdim=True).float() * scale for own in self.own]
        sink = sinks.float()[:, None].expand(*q.shape[:2], -1, -1)
        weights = torch.cat((shared, *chain, sink), -1).softmax(-1).to(kv.dtype)
        out = (weights[..., :length].flatten(1, 2) @ self.base).view(q.shape)
        for j, own in enumerate(self.own):
            out = out + weights[..., length + j, None] * own.unsqueeze(2)
        return out


class LatentCache(KvCache):
    """Latent rows [layers, B, capacity, head_dim], of which a query sees the last `window`."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, window: int) -> None:
        super().__init__(shape, dtype, device)
        self.window = window

    def attend(self, layer: int) -> Attend:
        def attention(q: Tensor, kv: Tensor, sinks: Tensor) -> Tensor:
            first, last = self.span(kv.shape[1])
            self.pool[layer, :, first:last] = kv
            if first == 0 and last >= self.window:
                return windowed(self.window)(q, kv, sinks)
            start = max(0, first + 1 - self.window)
            keys = self.pool[layer, :, start:last]
            scores = (q.flatten(1, 2) @ keys.mT.to(q.dtype)).unflatten(1, q.shape[1:3]).float() * q.shape[-1] ** -0.5
            if last - first > 1:
                query = torch.arange(first, last, device=q.device)[:, None]
                key = torch.arange(start, last, device=q.device)
                hidden = (key > query) | (key <= query - self.window)
                scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
            sink = sinks.float()[:, None].expand(*q.shape[:2], -1, -1)
            weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1].to(q.dtype)
            return (weights.flatten(1, 2) @ keys.to(q.dtype)).view(q.shape)

        return attention
