# SPDX-License-Identifier: AGPL-3.0-only
"""How much BF16 stores disturb a model: runs in which every value that an engine would store is wrong by the random
error of such a store, and what is kept of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["AT_ONCE", "COPIES", "SIGMAS", "Wrong", "experts_forward", "joined", "routing_of", "spread_of", "summary_of",
           "wrong_by"]  # fmt: skip

Array = np.ndarray[Any, Any]
Wrong = Callable[[Tensor, int], Tensor]
"""Gives a tensor with the error of so many stores."""

STORE = 2.0**-8 * math.sqrt(3 / (8 * math.log(2)) / 3)
"""RMS relative error of a BF16 store, 1.7e-3: uniform within half an ulp (2**-8 of the power of two below the value),
and the value spread evenly in its logarithm, so that 1 / value**2 is 3 / (8 ln 2) of that power's on average."""
COPIES, AT_ONCE = 48, 8
"""Disturbed runs, and how many in a batch. The standard deviation over 48 is known to a tenth."""
SIGMAS = 6.0
"""A row's routing is clear where that distance is so many of its standard deviations."""
TOP = 4
"""Best logits that are kept of every row."""


def wrong_by(generator: torch.Generator) -> Wrong:
    """Errors that the generator draws."""

    def wrong(x: Tensor, stores: int) -> Tensor:
        unit = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
        return x * (1 + STORE * math.sqrt(3 * stores) * unit)

    return wrong


def experts_forward(experts: nn.Module, wrong: Wrong, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' forward; stored are both projections, their product and each expert's output."""
    total = torch.zeros_like(x)
    for expert, (joint, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        rows, slots = torch.where(chosen == expert)
        gate, up = wrong(nn.functional.linear(x[rows], joint), 1).chunk(2, dim=-1)
        out = wrong(nn.functional.linear(wrong(nn.functional.silu(gate) * up, 1), down), 1)
        total.index_add_(0, rows, out * weights[rows, slots, None])
    return total


def spread_of(run: Callable[[], tuple[Tensor, ...]], exact: tuple[Tensor, ...], batches: int) -> tuple[Tensor, ...]:
    """Standard deviation of each output of `run`, which gives AT_ONCE copies, around the exact one."""
    total = [torch.zeros_like(x) for x in exact]
    for _ in range(batches):
        for part, found, true in zip(total, run(), exact, strict=True):
            part += ((found - true) ** 2).sum(0)
    return tuple((part / COPIES).sqrt() for part in total)


def summary_of(prefix: str, logits: Tensor, spread: Tensor, step: int) -> dict[str, Array]:
    """Arrays of rows [rows, V]: the best ids with logits and spread, the row's spread, and all logits of some."""
    top = logits.topk(TOP, dim=-1)
    full = torch.arange(0, len(logits), step)
    parts = {
        "top_ids": top.indices.to(torch.int32),
        "top_logits": top.values.float(),
        "top_spread": spread.gather(-1, top.indices).float(),
        "spread_rms": spread.square().mean(-1).sqrt().float(),
        "spread_max": spread.amax(-1).float(),
        "full_rows": full.to(torch.int32),
        "logits": logits[full].float(),
    }
    return {f"{prefix}_{name}": value.numpy() for name, value in parts.items()}


def joined(parts: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]) -> Iterator[tuple[Tensor, ...]]:
    """(exact values, their spreads) of all sequences, from those of each."""
    return (tuple(map(torch.cat, zip(*side, strict=True))) for side in zip(*parts, strict=True))


def routing_of(prefix: str, gaps: Tensor, spread: Tensor) -> dict[str, Array]:
    """Arrays [rows, routers] of how clear each choice of experts is; none where there are no routers."""
    if not gaps.shape[-1]:
        return {}
    return {f"{prefix}_routing_gap": gaps.float().numpy(), f"{prefix}_routing_spread": spread.float().numpy()}


def clear_tokens(is_clear: Callable[[list[int]], bool], tokens: list[int], count: int) -> list[int]:
    """The first `count` of the tokens that can be appended one by one with `is_clear` of all until then.

    RuntimeError where there are not as many.
    """
    taken: list[int] = []
    for token in tokens:
        if len(taken) == count:
            return taken
        if is_clear([*taken, token]):
            taken.append(token)
    raise RuntimeError(f"of {len(tokens)} tokens, {len(taken)} have a clear routing, {count} are needed")
