# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4 with sliding-window attention in every layer, and its MTP module, in plain torch.

Parameter names are the published checkpoint's. The semantics are those of Hugging Face's `DeepseekV4ForCausalLM`
(`compare` holds the two together), and for the MTP module, which it lacks, those of DeepSeek's `inference/model.py`:

- A token has `streams` FP32 residual streams. Each sublayer reads a weighted sum of them and is added back to all, and
  a doubly stochastic matrix mixes them; all these weights depend on the streams ("hyper-connections").
- Attention: low-rank queries; one latent row a token is the key and the value of all heads; the last rotary_factor of
  a head is rotated by neighbours, and back behind attention; each head has a sink, which takes weight and has no value.
- Experts: sqrt(softplus) scores; a bias that has a part in the choice alone, kept by the rule of DeepSeek-V3 (section
  2.1.2 of its report); in the first layers the token itself names its experts.
- The MTP module reads e_proj(norm(embedding)) + h_proj(norm(stream)) for each stream, before the head that collapses
  them: the trunk's streams for a first draft, its own for each later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.base import EPS, THETA, DemoModel, Experts, KvCache, balance
from demo_training.card import Description, experts_of
from demo_training.deepseek_v4_hf import ITERATIONS, LIMIT, SCALING, compare, config
from demo_training.latent_attention import Attend, LatentCache, chained, windowed
from demo_training.settings import Settings

__all__ = ["GOALS", "Model", "compare", "config", "describe"]

GOALS = {
    "first-draft acceptance": 0.6,
    "mean accepted length": 2.2,
    "teacher-forced first-draft agreement": 0.55,
}

BIAS_STEP = 1e-3
"""How far an expert's bias moves in a step of training."""


class Norm(nn.Module):
    """RMSNorm over the last dimension, in FP32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), EPS).to(x.dtype)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding, in FP32, of neighbours in the last 2 r elements; rotation complex [..., r]."""
    plain, tail = x.split((x.shape[-1] - 2 * rotation.shape[-1], 2 * rotation.shape[-1]), dim=-1)
    pairs = torch.view_as_complex(tail.float().unflatten(-1, (-1, 2)))
    return torch.cat((plain, torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)), dim=-1)


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.head_dim, self.groups = s.head_dim, s.out_groups
        self.wq_a = nn.Linear(s.hidden, s.q_rank, bias=False)
        self.q_norm = Norm(s.q_rank)
        self.wq_b = nn.Linear(s.q_rank, s.q_heads * s.head_dim, bias=False)
        self.wkv = nn.Linear(s.hidden, s.head_dim, bias=False)
        self.kv_norm = Norm(s.head_dim)
        self.wo_a = nn.Linear(s.q_heads * s.head_dim // s.out_groups, s.out_groups * s.out_rank, bias=False)
        self.wo_b = nn.Linear(s.out_groups * s.out_rank, s.hidden, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(s.q_heads))

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (-1, self.head_dim))
        q = functional.rms_norm(q.float(), q.shape[-1:], None, EPS).to(q.dtype)
        of_heads = rotation[:, None]
        out = attend(rotate(q, of_heads), rotate(self.kv_norm(self.wkv(x)), rotation), self.attn_sink)
        grouped = rotate(out, of_heads.conj()).flatten(-2).unflatten(-1, (self.groups, -1))
        blocks = self.wo_a.weight.view(self.groups, -1, grouped.shape[-1])
        return self.wo_b(torch.einsum("btgi,goi->btgo", grouped, blocks).flatten(-2))


def mixing(streams: Tensor, fn: Tensor) -> Tensor:
    """fn times the flattened streams [..., S, H] over their RMS, in FP32."""
    flat = streams.flatten(-2)
    mean = torch.linalg.vector_norm(flat, dim=-1, keepdim=True).square() / flat.shape[-1]
    return functional.linear(flat, fn) * torch.rsqrt(mean + EPS)


def weighted(weights: Tensor, streams: Tensor) -> Tensor:
    """The sum of the streams [..., S, H], weighted by [..., S]."""
    return (weights.unsqueeze(-2) @ streams).squeeze(-2)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """The doubly stochastic matrix of logits [..., S, S]: softmax of the rows, then columns and rows in turns made to
    sum to 1, columns last. In logarithms, where a step is one launch each way, and without the epsilon under each sum,
    which is worth 1e-6."""
    mix = (logits.softmax(-1) + EPS).log().log_softmax(-2)
    for _ in range(iterations - 1):
        mix = mix.log_softmax(-1).log_softmax(-2)
    return mix.exp()


class Shared(nn.Module):
    """The expert of all tokens."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.w1 = nn.Linear(s.hidden, s.shared_ffn, bias=False)
        self.w3 = nn.Linear(s.hidden, s.shared_ffn, bias=False)
        self.w2 = nn.Linear(s.shared_ffn, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x).clamp(max=LIMIT)) * self.w3(x).clamp(-LIMIT, LIMIT))


class Router(nn.Module):
    """Chooses by scores and bias, or with `hashed` by the token. `load` counts choices since the last balancing."""

    bias: Tensor
    load: Tensor
    tid2eid: Tensor

    def __init__(self, s: Settings, hashed: bool) -> None:
        super().__init__()
        self.top, self.hashed = s.experts_per_token, hashed
        self.weight = nn.Parameter(torch.zeros(s.experts, s.hidden))
        if hashed:
            self.register_buffer("tid2eid", torch.zeros(s.vocab, self.top, dtype=torch.int64))
        else:
            self.register_buffer("bias", torch.zeros(s.experts))
            self.register_buffer("load", torch.zeros(s.experts), persistent=False)

    def forward(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores [..., experts] of x [..., hidden], in FP32, since the choice is discrete, and a mask of the chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.softplus(functional.linear(x.float(), self.weight.float())).sqrt()
        if self.hashed:
            assert ids is not None
            chosen = self.tid2eid[ids]
        else:
            chosen = (scores.detach() + self.bias).topk(self.top, dim=-1).indices
        mask = (chosen[..., None] == torch.arange(scores.shape[-1], device=x.device)).any(-2)
        if self.training and not self.hashed:
            self.load += mask.flatten(0, -2).sum(0)
        return scores, mask

    @torch.no_grad()
    def rebalance(self) -> None:
        self.bias += BIAS_STEP * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Ffn(nn.Module):
    """`balance` collects the load-balancing loss of each call in training, which the bias leaves little to do."""

    def __init__(self, s: Settings, hashed: bool) -> None:
        super().__init__()
        self.gate = Router(s, hashed)
        self.experts = Experts(s.experts, s.hidden, s.expert_ffn, LIMIT)
        self.shared_experts = Shared(s)
        self.balance: list[Tensor] = []

    def forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        scores, mask = self.gate(x, ids)
        if self.training and not self.gate.hashed:
            self.balance.append(balance(scores / scores.sum(-1, keepdim=True), mask))
        weights = scores * mask
        weights = weights * (SCALING / weights.sum(-1, keepdim=True))
        return self.experts(x, weights) + self.shared_experts(x)


class Layer(nn.Module):
    """One decoder layer; the checkpoint has the parameters of its hyper-connections beside the sublayers."""

    def __init__(self, s: Settings, hashed: bool) -> None:
        super().__init__()
        self.train_iterations = s.train_iterations
        self.sizes = (s.streams, s.streams, s.streams**2)
        self.attn_norm = Norm(s.hidden)
        self.attn = Attention(s)
        self.ffn_norm = Norm(s.hidden)
        self.ffn = Ffn(s, hashed)
        for site in ("attn", "ffn"):
            self.register_parameter(f"hc_{site}_fn", nn.Parameter(torch.zeros(sum(self.sizes), s.streams * s.hidden)))
            self.register_parameter(f"hc_{site}_base", nn.Parameter(torch.zeros(sum(self.sizes))))
            self.register_parameter(f"hc_{site}_scale", nn.Parameter(torch.ones(3)))
        self.drop = nn.Dropout(s.dropout)

    def forward(self, streams: Tensor, ids: Tensor | None, rotation: Tensor, attend: Attend) -> Tensor:
        streams = self._around("attn", streams, lambda y: self.attn(self.attn_norm(y), rotation, attend))
        return self._around("ffn", streams, lambda y: self.ffn(self.ffn_norm(y), ids))

    def _around(self, site: str, streams: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """The streams FP32 [B, T, S, H] after a sublayer."""
        fn, base, scale = (getattr(self, f"hc_{site}_{part}") for part in ("fn", "base", "scale"))
        with torch.autocast(streams.device.type, enabled=False):
            scales = torch.cat([one.expand(size) for one, size in zip(scale, self.sizes, strict=True)])
            pre, post, mix = (mixing(streams, fn) * scales + base).split(self.sizes, dim=-1)
            mix = sinkhorn(
                mix.unflatten(-1, streams.shape[-2:-1] * 2), self.train_iterations if self.training else ITERATIONS
            )
            y = weighted(pre.sigmoid() + EPS, streams)
        out = self.drop(sublayer(y)).float()
        with torch.autocast(streams.device.type, enabled=False):
            return torch.addcmul(mix.mT @ streams, (2 * post.sigmoid()).unsqueeze(-1), out.unsqueeze(-2))


def add_head(module: nn.Module, s: Settings) -> None:
    """The parameters of `collapse`."""
    module.register_parameter("hc_head_fn", nn.Parameter(torch.zeros(s.streams, s.streams * s.hidden)))
    module.register_parameter("hc_head_base", nn.Parameter(torch.zeros(s.streams)))
    module.register_parameter("hc_head_scale", nn.Parameter(torch.ones(1)))


def collapse(module: nn.Module, streams: Tensor) -> Tensor:
    """One row [..., H] of the streams [..., S, H]."""
    with torch.autocast(streams.device.type, enabled=False):
        mix = mixing(streams, module.hc_head_fn) * module.hc_head_scale + module.hc_head_base
        return weighted(mix.sigmoid() + EPS, streams)


class Mtp(Layer):
    """A layer that never asks the token for its experts, and what stands around it."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s, hashed=False)
        self.enorm = Norm(s.hidden)
        self.hnorm = Norm(s.hidden)
        self.e_proj = nn.Linear(s.hidden, s.hidden, bias=False)
        self.h_proj = nn.Linear(s.hidden, s.hidden, bias=False)
        self.norm = Norm(s.hidden)
        add_head(self, s)

    def combine(self, embedding: Tensor, streams: Tensor) -> Tensor:
        """The streams that the layer reads, of embeddings [B, T, H] and streams [B, T, S, H]."""
        return (self.e_proj(self.enorm(embedding)).unsqueeze(-2) + self.h_proj(self.hnorm(streams))).float()


class Model(DemoModel):
    """Hidden is the streams [B, T, streams, hidden] behind the last layer."""

    stacks = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}  # noqa: RUF012
    rotations: Tensor

    def __init__(self, s: Settings) -> None:
        super().__init__(s)
        self.embed = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, index < s.hash_layers) for index in range(s.layers))
        self.norm = Norm(s.hidden)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        add_head(self, s)
        self.mtp = nn.ModuleList([Mtp(s)])
        self.drop = nn.Dropout(s.dropout)
        rotary = int(s.rotary_factor * s.head_dim)
        frequency = THETA ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
        # A few positions more than the window, for drafts past it.
        angle = torch.arange(s.window + 8, dtype=torch.float64)[:, None] * frequency
        self.register_buffer("rotations", torch.polar(torch.ones_like(angle), angle).cfloat(), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights, 0.02 wide; narrower where a projection writes to the streams. Each stream keeps most of
        itself, and sublayers favour streams at random, so that these part. Token ids name experts at random."""
        s = self.settings
        depth = 2 * (s.layers + 1)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                narrow = name.endswith(("wo_b.weight", "w2.weight", "down_proj"))
                nn.init.normal_(parameter, 0.0, 0.02 / depth**0.5 if narrow else 0.02, generator=generator)
            elif name.endswith("_base"):
                nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
                if len(parameter) > s.streams:
                    parameter.data[2 * s.streams :: s.streams + 1] += 2.0
            elif name.endswith("_scale"):
                nn.init.constant_(parameter, 0.25)
        for name, buffer in self.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(s.vocab, s.experts, generator=generator).topk(s.experts_per_token).indices)

    def causal(self) -> Attend:
        return windowed(self.settings.attention_window)

    def chained(self, bases: slice | None = None) -> Attend:
        return chained(self.settings.attention_window, bases)

    def cache(self, layers: int, rows: int, capacity: int, dtype: torch.dtype) -> LatentCache:
        s = self.settings
        return LatentCache((layers, rows, capacity, s.head_dim), dtype, self.device, s.attention_window)

    def dtype_of(self, name: str) -> torch.dtype:
        if name.endswith("tid2eid"):
            return torch.int64
        wide = name.endswith(("attn_sink", "gate.bias")) or name.rpartition(".")[2].startswith("hc_")
        return torch.float32 if wide else torch.bfloat16

    def tracked(self, drafts: bool) -> dict[str, Tensor]:
        return {
            name: buffer
            for name, buffer in self.named_buffers()
            if name.endswith("gate.bias") and (self.is_draft(name) or not drafts)
        }

    def before_step(self) -> None:
        for module in self.modules():
            if isinstance(module, Router) and not module.hashed:
                module.rebalance()

    def rotation(self, start: int, stop: int, step: int | None = None, first: int = 0) -> Tensor:
        if stop > len(self.rotations):
            raise ValueError(f"positions up to {stop - 1} are asked for, {len(self.rotations)} are known")
        return self.rotations[start:stop][first::step]

    def hidden(self, ids: Tensor, cache: KvCache | None = None) -> Tensor:
        start = cache.length if cache else 0
        rotation = self.rotation(start, start + ids.shape[1])
        attend = self.causal()
        x = self.drop(self.embed(ids)).float().unsqueeze(-2).expand(-1, -1, self.settings.streams, -1)
        for index, layer in enumerate(self.layers):
            x = layer(x, ids, rotation, cache.attend(index) if cache else attend)
        if cache:
            cache.length += ids.shape[1]
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(collapse(self, hidden))).float()

    def draft_hidden(
        self, ids: Tensor, hidden: Tensor, position: int, attend: Attend, bases: slice | None = None
    ) -> Tensor:
        mtp = self.mtp[0]
        if bases is None:
            rotation = self.rotation(position, position + ids.shape[1])
        else:
            rotation = self.rotation(position, position + bases.stop, bases.step, bases.start)
        return mtp(mtp.combine(self.drop(self.embed(ids)), hidden), None, rotation, attend)

    def draft_logits(self, draft_hidden: Tensor) -> Tensor:
        mtp = self.mtp[0]
        return self.head(mtp.norm(collapse(mtp, draft_hidden))).float()


def describe(s: dict[str, Any]) -> Description:
    return Description(
        model=f"DeepSeek-V4 model with attention over {s['attention_window']} tokens, {s['streams']} residual streams\n"
        "and a mixture of experts in every layer",
        drafter="the multi-token-prediction (MTP) module",
        short="MTP module",
        shape=f"{s['layers']} layers and the MTP module; hidden {s['hidden']}; {s['q_heads']} query heads of "
        f"{s['head_dim']} over latent rows of as many; queries of rank {s['q_rank']}; output in {s['out_groups']} "
        f"groups of rank {s['out_rank']}; {experts_of(s)}, by token in the first {s['hash_layers']}",
        architecture="DeepseekV4ForCausalLM",
        wider=" (hyper-connections, sinks and selection biases in FP32)",
    )
