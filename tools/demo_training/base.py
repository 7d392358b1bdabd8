# SPDX-License-Identifier: AGPL-3.0-only
"""What the models of all families share: the interface that training and evaluation use, and parts to build from.

A family is a module of this package, named by `Settings.architecture`. It has

    Model        a DemoModel; parameter names are the checkpoint's, but for experts' stacks (`DemoModel.tensors`)
    config       (settings) -> config.json
    compare      (folder, model, prompt) -> {"logits": ..., "draft_logits": ...}, differences from transformers
    describe     (settings as a dict) -> card.Description
    GOALS        optional: goals that differ from card.GOALS
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.drafter import POLICIES, Drafter
from demo_training.settings import Settings

__all__ = [
    "CHAIN",
    "EPS",
    "THETA",
    "Attend",
    "DemoModel",
    "Experts",
    "KvCache",
    "balance",
    "build",
    "causal",
    "chained",
    "difference",
    "family",
]

EPS = 1e-6
THETA = 10_000.0
CHAIN = 3
"""Drafts in a chain of training."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q [B, q_heads, T, head_dim] with this call's k and v [B, kv_heads, T, head_dim]."""


def family(s: Settings) -> ModuleType:
    """The module of a family."""
    return importlib.import_module(f"demo_training.{s.architecture}")


def build(s: Settings) -> DemoModel:
    """The untrained model of some settings."""
    model: DemoModel = family(s).Model(s)
    return model


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest one, relative to the largest element of `theirs`."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


class DemoModel(nn.Module):
    """The target model (`hidden`, `logits`) and what drafts for it (`draft_hidden`, `draft_logits`).

    "Hidden" is what the target hands to the drafter for each token, [B, T, ...]; the dimensions behind T are the
    family's own affair.
    """

    stacks: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "gate_up_proj": ("gate_proj", "up_proj"),
        "down_proj": ("down_proj",),
    }
    """Parameters that hold all experts, and the checkpoint's names of the parts of each expert, in order of rows."""
    policies: ClassVar[tuple[str, ...]] = POLICIES

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.settings = s

    # What a family gives.

    def hidden(self, ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """The hidden of ids [B, T], which follow what the cache holds."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [..., vocab] of hidden."""
        raise NotImplementedError

    def draft_hidden(
        self, ids: Tensor, hidden: Tensor, position: int, attend: Attend, bases: slice | None = None
    ) -> Tensor:
        """The draft layer's hidden for pairs (token, hidden) at RoPE positions `position`, +1, ...; with `bases`, the
        pairs are those of that slice of the positions."""
        raise NotImplementedError

    def draft_logits(self, draft_hidden: Tensor) -> Tensor:
        """FP32 logits [..., vocab] of the draft layer's hidden."""
        raise NotImplementedError

    def initialise(self, generator: torch.Generator) -> None:
        """The weights that training begins with."""
        raise NotImplementedError

    # What a family may replace.

    def causal(self) -> Attend:
        """Attention within one call."""
        return causal

    def chained(self, bases: slice | None = None) -> Attend:
        """Attention of all chains of a window, for `draft_outputs`."""
        return chained(bases)

    def cache(self, layers: int, rows: int, capacity: int, dtype: torch.dtype) -> KvCache:
        s = self.settings
        return KvCache((layers, 2, rows, s.kv_heads, capacity, s.head_dim), dtype, self.device)

    def drafter(self, drafts: int, capacity: int, policy: str) -> Drafter:
        return Drafter(self, drafts, capacity, policy)

    def draft_outputs(self, ids: Tensor, hidden: Tensor, bases: slice | None = None) -> list[Tensor]:
        """The draft layer's hidden [B, T - 3, ...] of drafts 1, 2, 3 of ids [B, T] and the trunk's hidden.

        Row i of draft j (from 1) reads token i + j and guesses token i + j + 1. With `bases`, drafts 2 and 3 are made
        for the rows of that slice alone.
        """
        rows = ids.shape[1] - CHAIN
        attend = self.chained(bases)
        state = hidden[:, :rows]
        states = []
        for j in range(1, CHAIN + 1):
            tokens = ids[:, j : j + rows]
            if bases is None or j == 1:
                state = self.draft_hidden(tokens, state, j, attend)
            else:
                at = slice(bases.start, rows, bases.step)
                state = self.draft_hidden(tokens[:, at], state[:, at] if j == 2 else state, j, attend, at)
            states.append(state)
        return states

    def first_drafts(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The draft layer's hidden [B, T - 1, ...] of the first draft at each token."""
        return self.draft_hidden(ids[:, 1:], hidden[:, :-1], 1, self.causal())

    def is_draft(self, name: str) -> bool:
        """Whether a parameter is the draft layer's own, which the second phase trains."""
        return name.startswith("mtp.")

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a tensor in the checkpoint; `name` as `tensors` has it."""
        return torch.bfloat16

    def tracked(self, drafts: bool) -> dict[str, Tensor]:
        """What training changes otherwise than by gradients, by its name in state_dict: of the draft layer with
        `drafts`, else of everything. Averages are kept of it as of parameters."""
        return {}

    def before_step(self) -> None:
        """Called before each step of training; for what is not learned by gradients."""

    # Common to all.

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def set_dropout(self, p: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    def take_balance(self) -> Tensor:
        """The mean load-balancing loss of the routers' calls since the last time; 0 without experts."""
        losses: list[Tensor] = []
        for module in self.modules():
            if isinstance(found := getattr(module, "balance", None), list):
                losses += found
                module.balance = []
        return torch.stack(losses).mean() if losses else torch.zeros((), device=self.device)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters under the checkpoint's names: the experts' stacks are taken apart."""
        found: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            prefix, _, last = name.rpartition(".")
            if last in self.stacks:
                parts = self.stacks[last]
                for expert, joint in enumerate(value):
                    for part, rows in zip(parts, joint.chunk(len(parts)), strict=True):
                        found[f"{prefix}.{expert}.{part}.weight"] = rows
            else:
                found[name] = value
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The reverse of `tensors`; every parameter must be there, and nothing else."""
        state = dict(tensors)
        for name in self.state_dict():
            prefix, _, last = name.rpartition(".")
            if last in self.stacks:
                state[name] = torch.stack(
                    [
                        torch.cat([state.pop(f"{prefix}.{expert}.{part}.weight") for part in self.stacks[last]])
                        for expert in range(self.settings.experts)
                    ]
                )
        self.load_state_dict(state)

    def checkpoint_bytes(self) -> int:
        """Bytes of the tensors in the checkpoint."""
        return sum(value.numel() * self.dtype_of(name).itemsize for name, value in self.tensors().items())


class Experts(nn.Module):
    """All experts' SwiGLU as one of their summed width: at the few experts of a demo, skipping the unchosen would save
    nothing. Gate rows stand before up rows. With a `limit`, gates are at most that and ups within it on both sides."""

    def __init__(self, experts: int, hidden: int, width: int, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.zeros(experts, hidden, width))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of the experts' outputs of x [..., hidden], weighted by weights [..., experts]."""
        joint = functional.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (len(self.gate_up_proj), -1))
        gate, up = joint.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = functional.silu(gate) * up * weights[..., None].to(up.dtype)
        return functional.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


def balance(odds: Tensor, mask: Tensor) -> Tensor:
    """The load-balancing loss of one router: experts * sum over experts of (share of the tokens that choose it) times
    (its mean probability), as in the Switch Transformer (arXiv 2101.03961, equations 4 to 6) and Hugging Face's
    `load_balancing_loss_func` for one layer. It is the number of experts a token chooses where all are used alike."""
    share = mask.float().flatten(0, -2).mean(0)
    return odds.shape[-1] * (share * odds.flatten(0, -2).mean(0)).sum()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within the call."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class chained:  # noqa: N801 - used as a function with memory
    """Attention of a whole window's draft chains at once, as the engine's cache would have it.

    The first call (draft 1 of each position) is causal and becomes the shared cache. In a later call (draft j), the
    query of position i sees the cache's rows up to i, and of the rows of drafts 2 .. j only those of its own chain.
    Later calls are for the positions of the slice `bases` (None: all).
    """

    def __init__(self, bases: slice | None = None) -> None:
        self.bases = slice(None) if bases is None else bases
        self.base: tuple[Tensor, Tensor] | None = None
        self.own: list[tuple[Tensor, Tensor]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        if self.base is None:
            self.base = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            return causal(q, k, v)
        self.own.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        base_k, base_v = self.base
        length = base_k.shape[2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)[self.bases]
        shared = (q @ base_k.transpose(-1, -2)).masked_fill(future, -torch.inf)
        chain = torch.stack([(q * own_k).sum(-1) for own_k, _ in self.own], dim=-1)
        weights = torch.cat((shared, chain), -1).float().mul(q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
        out = weights[..., :length] @ base_v
        for j, (_, own_v) in enumerate(self.own):
            out = out + weights[..., length + j, None] * own_v
        return out


class KvCache:
    """A pool of the given shape, of which the last dimension but one counts rows of the cache: of K and V of some
    layers, [layers, 2, B, kv_heads, capacity, head_dim]. `length` rows are valid; a smaller `length` drops rows."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.pool = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    def span(self, count: int) -> tuple[int, int]:
        """The first row of `count` new ones and the one after the last."""
        first, last = self.length, self.length + count
        if last > self.pool.shape[-2]:
            raise ValueError(f"{last} rows are asked of a cache of {self.pool.shape[-2]}")
        return first, last

    def attend(self, layer: int) -> Attend:
        """Writes the call's rows behind the valid ones (`length` stays) and attends to all of them, causally."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            first, last = self.span(k.shape[2])
            self.pool[layer, 0, :, :, first:last] = k
            self.pool[layer, 1, :, :, first:last] = v
            if first == 0:
                return causal(q, k, v)
            keys, values = self.pool[layer, :, :, :, :last]
            mask = None
            if last - first > 1:
                mask = torch.ones(last - first, last, dtype=torch.bool, device=q.device).tril(first)
            return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        return attention
