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

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.base import EPS, THETA, Attend, DemoModel, Experts, KvCache, balance, causal, difference
from demo_training.card import Description, experts_of
from demo_training.settings import Settings

__all__ = ["Model", "compare", "config", "describe", "rotate", "rotation_table"]


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


def rotation_table(s: Settings) -> Tensor:
    """[2, positions, r/2]: cosines and sines, angles in FP64. A few positions more, for drafts past the window."""
    rotary = int(s.rotary_factor * s.head_dim)
    frequency = THETA ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = torch.arange(s.window + 8, dtype=torch.float64)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin())).float()


class Ffn(nn.Module):
    def __init__(self, s: Settings, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, width, bias=False)
        self.up_proj = nn.Linear(s.hidden, width, bias=False)
        self.down_proj = nn.Linear(width, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """The router and the experts. `balance` collects the load-balancing loss of each call in training."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.top = s.experts_per_token
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.experts = Experts(s.experts, s.hidden, s.expert_ffn)
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


class Model(DemoModel):
    """Hidden is the raw residual stream [B, T, hidden]."""

    rotations: Tensor

    def __init__(self, s: Settings) -> None:
        super().__init__(s)
        self.model = Trunk(s)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        self.mtp = Mtp(s)
        self.drop = nn.Dropout(s.dropout)
        self.register_buffer("rotations", rotation_table(s), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights, 0.02 wide; narrower where a projection writes to the residual stream."""
        depth = 2 * (self.settings.layers + 1)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                narrow = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(parameter, 0.0, 0.02 / depth**0.5 if narrow else 0.02, generator=generator)

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


def config(s: Settings) -> dict[str, Any]:
    """config.json. No layer has linear attention, and without experts none has those: such fields are zero, or the
    least that loaders take."""
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.q_heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.window,
        "initializer_range": 0.02,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "partial_rotary_factor": s.rotary_factor,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": ["full_attention"] * s.layers,
        "mlp_only_layers": [] if s.experts else list(range(s.layers)),
        "decoder_sparse_step": 1,
        "num_experts": s.experts,
        "num_experts_per_tok": s.experts_per_token,
        "moe_intermediate_size": s.expert_ffn,
        "shared_expert_intermediate_size": s.shared_ffn,
        "norm_topk_prob": True,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": s.kv_heads,
        "linear_num_value_heads": s.q_heads,
        "linear_key_head_dim": s.head_dim,
        "linear_value_head_dim": s.head_dim,
        "num_mtp_modules": 1,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


@torch.no_grad()
def compare(folder: Path, model: Model, prompt: list[int]) -> dict[str, Any]:
    """transformers has no MTP layer, so the draft layer runs as its one-layer model: inputs are fc's output, positions
    start at 1, the final norm is `mtp.norm`."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    ids = torch.tensor([prompt])
    target = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    hidden = model.hidden(ids)
    ours, theirs = model.logits(hidden), target(ids, use_cache=False).logits
    result: dict[str, Any] = {"logits": difference(ours, theirs)}

    one = Qwen3NextConfig.from_pretrained(
        folder, num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=target.config.mlp_only_layers[:1]
    )
    one._attn_implementation = "eager"
    draft = Qwen3NextForCausalLM(one).float().eval()
    state = model.state_dict()
    names = {
        name: name.replace("model.", "mtp.", 1)
        for name in draft.state_dict()
        if name.startswith(("model.layers", "model.norm"))
    }
    draft.load_state_dict({name: state[ours_name] for name, ours_name in names.items()}, strict=False)
    draft.lm_head.load_state_dict({"weight": state["lm_head.weight"]})
    embedding = target.model.embed_tokens(ids[:, 1:])
    parts = []
    for norm_name, x in (("pre_fc_norm_embedding", embedding), ("pre_fc_norm_hidden", hidden[:, :-1])):
        norm = type(target.model.norm)(x.shape[-1], eps=one.rms_norm_eps)
        norm.load_state_dict({"weight": state[f"mtp.{norm_name}.weight"]})
        parts.append(norm(x))
    inputs = torch.nn.functional.linear(torch.cat(parts, -1), state["mtp.fc.weight"])
    positions = torch.arange(1, len(prompt))[None]
    theirs = draft(inputs_embeds=inputs, position_ids=positions, use_cache=False).logits
    ours = model.draft_logits(model.first_drafts(ids, hidden))
    result["draft_logits"] = difference(ours, theirs)
    return result


def describe(s: dict[str, Any]) -> Description:
    ffns, ffn = ("a mixture of experts", experts_of(s)) if s["experts"] else ("a dense FFN", f"FFN {s['ffn']}")
    return Description(
        model=f"Qwen3-Next model with full attention and {ffns} in every layer",
        drafter="the multi-token-prediction (MTP) layer",
        short="MTP layer",
        shape=f"{s['layers']} layers and the MTP layer; hidden {s['hidden']}; {s['q_heads']} query and {s['kv_heads']} "
        f"KV heads of {s['head_dim']}; {ffn}",
        architecture="Qwen3NextForCausalLM",
    )
