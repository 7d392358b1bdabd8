# SPDX-License-Identifier: AGPL-3.0-only
"""What a checkpoint is worth: greedy speculative decoding on held-out prompts, and agreement under teacher forcing.

All in FP32 on the BF16 weights as saved; the decoding loops run on the CPU. `speculate` is the engine's loop with one
sequence: the drafter's cache is filled from the prompt (pair (token i + 1, hidden i) at RoPE position i + 1), drafts
chain on the draft layer's own residual stream (before its final norm), and the longest prefix that equals the trunk's
greedy choices is accepted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from demo_training.base import CHAIN, DemoModel, Experts

__all__ = ["Tally", "agreement", "distinct_four_grams", "expert_shares", "greedy", "speculate"]


@dataclass
class Tally:
    """One prompt's run. `accepted[j]` counts the verify steps that accepted draft j; each step makes all drafts, the
    last one too, where tokens past the limit are dropped. `tokens` are the new ones, an end token included."""

    tokens: list[int]
    steps: int
    accepted: list[int] = field(default_factory=list)


@torch.no_grad()
def speculate(model: DemoModel, prompt: list[int], limit: int, drafts: int, end: int, policy: str = "refeed") -> Tally:
    """Greedy decoding of `limit` tokens (fewer after `end`) with `drafts` drafts a step."""
    capacity = len(prompt) + limit + 2 * drafts + 2
    cache = model.cache(model.settings.layers, 1, capacity, torch.float32)
    drafter = model.drafter(drafts, capacity, policy)
    hidden = model.hidden(torch.tensor([prompt]), cache)[0]
    drafter.append(prompt[1:], hidden[:-1], 1)
    token = int(model.logits(hidden[-1]).argmax())
    tally = Tally([token], 0, [0] * drafts)
    last = hidden[-1:]
    while len(tally.tokens) < limit and end not in tally.tokens:
        position = cache.length
        guesses = drafter.propose(token, last, position)
        hidden = model.hidden(torch.tensor([[token, *guesses]]), cache)[0]
        picks = model.logits(hidden).argmax(-1).tolist()
        accepted = next((j for j, guess in enumerate(guesses) if guess != picks[j]), drafts)
        cache.length -= drafts - accepted
        drafter.after_verify(guesses, accepted, hidden, position)
        for j in range(accepted):
            tally.accepted[j] += 1
        tally.steps += 1
        tally.tokens += picks[: accepted + 1]
        token, last = picks[accepted], hidden[accepted : accepted + 1]
    del tally.tokens[limit:]
    if end in tally.tokens:
        del tally.tokens[tally.tokens.index(end) + 1 :]
    return tally


@torch.no_grad()
def greedy(model: DemoModel, prompt: list[int], limit: int, end: int) -> list[int]:
    """The new tokens of greedy decoding without drafts."""
    cache = model.cache(model.settings.layers, 1, len(prompt) + limit, torch.float32)
    tokens: list[int] = []
    ids = prompt
    while len(tokens) < limit and end not in tokens:
        ids = [int(model.logits(model.hidden(torch.tensor([ids]), cache)[0, -1]).argmax())]
        tokens += ids
    return tokens


@torch.no_grad()
def agreement(model: DemoModel, stream: list[int], rows: int) -> dict[str, float | list[float]]:
    """Under teacher forcing, on the first windows of a stream (`rows` at most): cross-entropy of the trunk in nats a
    token, its top-1 accuracy, and the share of positions where draft j has the trunk's argmax, j = 1, 2, 3."""
    window = model.settings.window
    count = min(rows, len(stream) // window)
    loss, correct, hits, bases = 0.0, 0, torch.zeros(CHAIN), 0
    device = model.device
    for ids in torch.tensor(stream[: count * window], device=device).view(count, window).split(8):
        hidden = model.hidden(ids)
        logits = model.logits(hidden)
        choice = logits.argmax(-1)
        loss += functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        correct += int((choice[:, :-1] == ids[:, 1:]).sum())
        for j, state in enumerate(model.draft_outputs(ids, hidden), 1):
            hit = model.draft_logits(state).argmax(-1) == choice[:, j : j + state.shape[1]]
            hits[j - 1] += hit.sum().cpu()
        bases += ids.shape[0] * (window - CHAIN)
    predicted = count * (window - 1)
    return {
        "tokens": float(count * window),
        "trunk_loss": loss / predicted,
        "trunk_top1": correct / predicted,
        "agreement": (hits / bases).tolist(),
    }


@torch.no_grad()
def expert_shares(model: DemoModel, stream: list[int], rows: int) -> dict[str, list[float]]:
    """Of each layer with experts, the share of (row, choice) pairs that each expert has, on the first windows of a
    stream (`rows` at most); of the draft layer, for first drafts."""
    window = model.settings.window
    count = min(rows, len(stream) // window)
    sums: dict[str, Tensor] = {}

    def seen(name: str, weights: Tensor) -> None:
        sums[name] = sums.get(name, 0) + (weights > 0).flatten(0, -2).double().sum(0)

    hooks = [
        module.register_forward_hook(lambda _module, args, _out, name=name: seen(name, args[1]))
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    ]
    device = model.device
    for ids in torch.tensor(stream[: count * window], device=device).view(count, window).split(8):
        hidden = model.hidden(ids)
        model.first_drafts(ids, hidden)
    for hook in hooks:
        hook.remove()
    return {name.rsplit(".", 2)[0]: (total / total.sum()).tolist() for name, total in sums.items()}


def distinct_four_grams(outputs: list[list[int]]) -> float:
    """Distinct 4-grams of the outputs over all their 4-grams."""
    counts = Counter(tuple(out[i : i + 4]) for out in outputs for i in range(len(out) - 3))
    return len(counts) / max(1, counts.total())
