# SPDX-License-Identifier: AGPL-3.0-only
"""Qwen3-Next with full attention in every layer, dense FFNs or mixtures of experts, and its MTP layer, in plain torch.

Parameter names are the checkpoint's. The semantics are those of Hugging Face's `Qwen3NextForCausalLM` (`files.verify`
compares the two): RMSNorm with weight 1 + w; q_proj gives [query | gate] per head; norms over each head of q and k;
rotation of the first `rotary_factor` of each head; the attention output times sigmoid(gate); SwiGLU. A mixture of
experts sums the best experts' outputs with softmax weights made to sum to 1, and sigmoid(gate) times a shared expert's.

The MTP layer reads fc([norm(embedding) | norm(hidden)]). Its hidden input is the raw residual stream, before any final
norm: the trunk's for a first draft, its own for each later draft.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.settings import Settings

__all__ = ["EPS", "THETA", "Attend", "DemoModel", "Experts", "KvCache", "causal", "chained"]

EPS = 1e-6
THETA = 10_000.0

_STACKED = ("gate_up_proj", "down_proj")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q [B, q_heads, T, head_dim] with this call's k and v [B, kv_heads, T, head_dim]."""


class Norm(nn.Module):
    """RMSNorm over the last dimension with weight 1 + w, in FP32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], 1 + self.weight.float(), EPS).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.head_dim = s.head_dim
        self.q_proj = nn.Linear(s.hidden, 2 * s.q_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.q_heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = Norm(s.head_dim)
        self.k_norm = Norm(s.head_dim)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2, self.head_dim)).unbind(-2)
        q = rotate(self.q_norm(q).transpose(1, 2), rotation)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), rotation)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = attend(q, k, v).transpose(1, 2) * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding, in FP32, of pairs (i, i + r/2) of each head's first r elements; `rotation` is [2, T, r/2]."""
    half = rotation.shape[-1]
    cos, sin = rotation
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


class Ffn(nn.Module):
    def __init__(self, s: Settings, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, width, bias=False)
        self.up_proj = nn.Linear(s.hidden, width, bias=False)
        self.down_proj = nn.Linear(width, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """All experts' SwiGLU as one of their summed width: at the few experts of a demo, skipping the unchosen would save
    nothing. Gate rows stand before up rows. The checkpoint has one tensor an expert (`DemoModel.tensors`)."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(s.experts, 2 * s.expert_ffn, s.hidden))
        self.down_proj = nn.Parameter(torch.zeros(s.experts, s.hidden, s.expert_ffn))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of the experts' outputs of x [..., hidden], weighted by weights [..., experts]."""
        joint = functional.linear(x, self.gate_up_proj.flatten(0, 1)).unflatten(-1, (len(self.gate_up_proj), -1))
        gate, up = joint.chunk(2, dim=-1)
        inner = functional.silu(gate) * up * weights[..., None].to(up.dtype)
        return functional.linear(inner.flatten(-2), self.down_proj.transpose(0, 1).flatten(1))


class MixtureOfExperts(nn.Module):
    """The router and the experts. `balance` collects the load-balancing loss of each call in training."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.top = s.experts_per_token
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.experts = Experts(s)
        self.shared_expert = Ffn(s, s.shared_ffn)
        self.shared_expert_gate = nn.Linear(s.hidden, 1, bias=False)
        self.balance: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            # In FP32, since the choice is discrete.
            odds = functional.linear(x.float(), self.gate.weight.float()).softmax(-1)
        chosen = odds.detach().topk(self.top, dim=-1).indices
        mask = (chosen[..., None] == torch.arange(odds.shape[-1], device=x.device)).any(-2)
        weights = odds * mask
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            self.balance.append(balance(odds, mask))
        return self.experts(x, weights) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


def balance(odds: Tensor, mask: Tensor) -> Tensor:
    """The load-balancing loss of one router: experts * sum over experts of (share of the tokens that choose it) times
    (its mean probability), as in the Switch Transformer (arXiv 2101.03961, equations 4 to 6) and Hugging Face's
    `load_balancing_loss_func` for one layer. It is the number of experts a token chooses where all are used alike."""
    share = mask.float().flatten(0, -2).mean(0)
    return odds.shape[-1] * (share * odds.flatten(0, -2).mean(0)).sum()


class Layer(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden)
        self.mlp = MixtureOfExperts(s) if s.experts else Ffn(s, s.ffn)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), rotation, attend))
        return x + self.drop(self.mlp(self.post_attention_layernorm(x)))


class Trunk(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden)


class Mtp(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(s.hidden)
        self.pre_fc_norm_hidden = Norm(s.hidden)
        self.fc = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(s)])
        self.norm = Norm(s.hidden)


class DemoModel(nn.Module):
    """The target model (`hidden`, `logits`) and the draft layer (`draft_hidden`, `draft_logits`)."""

    rotations: Tensor

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.settings = s
        self.model = Trunk(s)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        self.mtp = Mtp(s)
        self.drop = nn.Dropout(s.dropout)
        self.register_buffer("rotations", self._rotation_table(s), persistent=False)

    @staticmethod
    def _rotation_table(s: Settings) -> Tensor:
        """[2, positions, r/2]: cosines and sines, angles in FP64. A few positions more, for drafts past the window."""
        rotary = int(s.rotary_factor * s.head_dim)
        frequency = THETA ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
        angle = torch.arange(s.window + 8, dtype=torch.float64)[:, None] * frequency
        return torch.stack((angle.cos(), angle.sin())).float()

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights, 0.02 wide; narrower where a projection writes to the residual stream."""
        depth = 2 * (self.settings.layers + 1)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                narrow = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(parameter, 0.0, 0.02 / depth**0.5 if narrow else 0.02, generator=generator)

    def set_dropout(self, p: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = p

    def take_balance(self) -> Tensor:
        """The mean load-balancing loss of the routers' calls since the last time; 0 without experts."""
        losses: list[Tensor] = []
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                losses += module.balance
                module.balance = []
        return torch.stack(losses).mean() if losses else self.lm_head.weight.new_zeros(())

    def tensors(self) -> dict[str, Tensor]:
        """The parameters under the checkpoint's names: the experts' stacks are taken apart."""
        found: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            prefix, _, last = name.rpartition(".")
            if last == "gate_up_proj":
                for expert, joint in enumerate(value):
                    gate, up = joint.chunk(2)
                    found |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
            elif last == "down_proj":
                found |= {f"{prefix}.{expert}.down_proj.weight": down for expert, down in enumerate(value)}
            else:
                found[name] = value
        return found

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The reverse of `tensors`; every parameter must be there, and nothing else."""
        state = dict(tensors)
        for name in self.state_dict():
            prefix, _, last = name.rpartition(".")
            if last in _STACKED:
                parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
                state[name] = torch.stack(
                    [
                        torch.cat([state.pop(f"{prefix}.{expert}.{part}.weight") for part in parts])
                        for expert in range(self.settings.experts)
                    ]
                )
        self.load_state_dict(state)

    def rotation(self, start: int, count: int) -> Tensor:
        if start + count > self.rotations.shape[1]:
            raise ValueError(f"positions up to {start + count - 1} are asked for, {self.rotations.shape[1]} are known")
        return self.rotations[:, start : start + count]

    def hidden(self, ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """The raw residual stream [B, T, hidden] of ids [B, T], which follow what the cache holds."""
        rotation = self.rotation(cache.length if cache else 0, ids.shape[1])
        x = self.drop(self.model.embed_tokens(ids))
        for index, layer in enumerate(self.model.layers):
            x = layer(x, rotation, cache.attend(index) if cache else causal)
        if cache:
            cache.length += ids.shape[1]
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(hidden)).float()

    def draft_hidden(
        self, ids: Tensor, hidden: Tensor, position: int, attend: Attend, bases: slice | None = None
    ) -> Tensor:
        """The draft layer's raw residual stream for pairs (token, hidden) at RoPE positions `position`, +1, ...; with
        `bases`, the pairs are those of that slice of the positions."""
        mtp = self.mtp
        embedding = self.drop(self.model.embed_tokens(ids))
        x = torch.cat((mtp.pre_fc_norm_embedding(embedding), mtp.pre_fc_norm_hidden(hidden)), dim=-1)
        if bases is None:
            rotation = self.rotation(position, ids.shape[1])
        else:
            rotation = self.rotation(position, bases.stop)[:, bases]
        return mtp.layers[0](mtp.fc(x), rotation, attend)

    def draft_logits(self, draft_hidden: Tensor) -> Tensor:
        return self.lm_head(self.mtp.norm(draft_hidden)).float()


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
    """K and V of `layers` layers for up to `capacity` rows. `length` rows are valid; a smaller `length` drops rows."""

    def __init__(self, model: DemoModel, layers: int, rows: int, capacity: int, dtype: torch.dtype) -> None:
        s = model.settings
        shape = (layers, 2, rows, s.kv_heads, capacity, s.head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=model.lm_head.weight.device)
        self.length = 0

    def attend(self, layer: int) -> Attend:
        """Writes the call's rows behind the valid ones (`length` stays) and attends to all of them, causally."""

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            first, last = self.length, self.length + k.shape[2]
            if last > self.pool.shape[4]:
                raise ValueError(f"{last} rows are asked of a cache of {self.pool.shape[4]}")
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
