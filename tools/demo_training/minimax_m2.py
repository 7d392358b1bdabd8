# SPDX-License-Identifier: AGPL-3.0-only
"""MiniMax-M2 with several MTP modules, in plain torch.

The trunk's semantics are those of Hugging Face's `MiniMaxM2ForCausalLM` (`compare` holds the two together):
RMSNorm with weight w; q and k normed over their whole vectors, before the heads are told apart; rotation of the first
`rotary_factor` of each head; no gate on the attention's output; experts chosen by sigmoid(router) + bias, weighted by
sigmoid(router) made to sum to 1; no shared expert; an untied head. Parameter names are the checkpoint's, but for the
experts' stacks (`DemoModel.tensors` takes them apart).

Module i, counted from 0, is layer `layers + i` of the checkpoint: a layer of the trunk's shape that reads
eh_proj([enorm(embedding) | hnorm(hidden)]), and a norm before the shared head. Its row at position q is made of token q
and of the raw residual stream, before any final norm, after token q - 1: module i - 1's, the trunk's for module 0. It
guesses token q + 1, so that drafts 1, 2, ... of one step come from modules 0, 1, ... This is the multi-token prediction
of the DeepSeek-V3 report (arXiv 2412.19437, section 2.2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo_training.base import EPS, THETA, Attend, DemoModel, Experts, KvCache, causal, difference
from demo_training.card import Description, experts_of
from demo_training.modules import ModuleDrafter
from demo_training.qwen3_next import rotate, rotation_table
from demo_training.settings import Settings

__all__ = ["Model", "compare", "config", "describe"]


class Norm(nn.Module):
    """RMSNorm over the last dimension with weight w, in FP32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), EPS).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.head_dim = s.head_dim
        queries, keys = s.q_heads * s.head_dim, s.kv_heads * s.head_dim
        self.q_proj = nn.Linear(s.hidden, queries, bias=False)
        self.k_proj = nn.Linear(s.hidden, keys, bias=False)
        self.v_proj = nn.Linear(s.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, s.hidden, bias=False)
        self.q_norm = Norm(queries)
        self.k_norm = Norm(keys)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q = rotate(heads(self.q_norm(self.q_proj(x))), rotation)
        k = rotate(heads(self.k_norm(self.k_proj(x))), rotation)
        return self.o_proj(attend(q, k, heads(self.v_proj(x))).transpose(1, 2).flatten(-2))


class MixtureOfExperts(nn.Module):
    """The router, its bias and the experts. The bias takes part in the choice alone, so that no loss has a gradient for
    it; `balance` collects, of each call in training, a term that has one: bias times how far each expert's share of the
    choices is above its part. What an optimiser makes of it lowers the bias of experts that are chosen too often."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.top = s.experts_per_token
        self.gate = nn.Linear(s.hidden, s.experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.zeros(s.experts))
        self.experts = Experts(s.experts, s.hidden, s.expert_ffn)
        self.balance: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            # In FP32, since the choice is discrete.
            scores = functional.linear(x.float(), self.gate.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias.detach()
        chosen = choice.topk(self.top, dim=-1).indices
        mask = (chosen[..., None] == torch.arange(scores.shape[-1], device=x.device)).any(-2)
        weights = scores * mask
        weights = weights / weights.sum(-1, keepdim=True)
        if self.training:
            share = mask.float().flatten(0, -2).mean(0) / self.top
            self.balance.append((self.e_score_correction_bias * (share - 1 / len(share))).sum())
        return self.experts(x, weights)


class Layer(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.input_layernorm = Norm(s.hidden)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = Norm(s.hidden)
        self.block_sparse_moe = MixtureOfExperts(s)
        self.drop = nn.Dropout(s.dropout)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        x = x + self.drop(self.self_attn(self.input_layernorm(x), rotation, attend))
        return x + self.drop(self.block_sparse_moe(self.post_attention_layernorm(x)))


class Module(Layer):
    """An MTP module: a layer with what stands before and behind it."""

    def __init__(self, s: Settings) -> None:
        super().__init__(s)
        self.enorm = Norm(s.hidden)
        self.hnorm = Norm(s.hidden)
        self.eh_proj = nn.Linear(2 * s.hidden, s.hidden, bias=False)
        self.norm = Norm(s.hidden)

    def draft(self, embedding: Tensor, hidden: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        x = self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1))
        return self(x, rotation, attend)


class Trunk(nn.Module):
    """Layers from `layers` on are the modules: so they are named in the checkpoint."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        own = [Layer(s) for _ in range(s.layers)]
        self.layers = nn.ModuleList([*own, *(Module(s) for _ in range(s.modules))])
        self.norm = Norm(s.hidden)


class Model(DemoModel):
    """Hidden is the raw residual stream [B, T, hidden]; a draft's hidden is a module's, behind its own norm."""

    stacks: ClassVar = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    rotations: Tensor

    def __init__(self, s: Settings) -> None:
        super().__init__(s)
        self.model = Trunk(s)
        self.lm_head = nn.Linear(s.hidden, s.vocab, bias=False)
        self.drop = nn.Dropout(s.dropout)
        self.register_buffer("rotations", rotation_table(s), persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights, 0.02 wide; narrower where a projection writes to the residual stream."""
        depth = 2 * (self.settings.layers + 1)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                narrow = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(parameter, 0.0, 0.02 / depth**0.5 if narrow else 0.02, generator=generator)

    def is_draft(self, name: str) -> bool:
        return name.startswith("model.layers.") and int(name.split(".")[2]) >= self.settings.layers

    def dtype_of(self, name: str) -> torch.dtype:
        """The routers' biases are FP32, as published ones are."""
        return torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16

    def rotation(self, start: int, count: int) -> Tensor:
        if start + count > self.rotations.shape[1]:
            raise ValueError(f"positions up to {start + count - 1} are asked for, {self.rotations.shape[1]} are known")
        return self.rotations[:, start : start + count]

    def hidden(self, ids: Tensor, cache: KvCache | None = None) -> Tensor:
        rotation = self.rotation(cache.length if cache else 0, ids.shape[1])
        x = self.drop(self.model.embed_tokens(ids))
        for index, layer in enumerate(self.model.layers[: self.settings.layers]):
            x = layer(x, rotation, cache.attend(index) if cache else causal)
        if cache:
            cache.length += ids.shape[1]
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.model.norm(hidden)).float()

    def module_hidden(
        self, i: int, ids: Tensor, hidden: Tensor, position: int, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """What module i makes of pairs (token, hidden) at positions `position`, +1, ...: its raw residual stream, which
        the next module reads, and the same behind the module's norm, for `draft_logits`."""
        module = self.model.layers[self.settings.layers + i]
        embedding = self.drop(self.model.embed_tokens(ids))
        state = module.draft(embedding, hidden, self.rotation(position, ids.shape[1]), attend)
        return state, module.norm(state)

    def draft_outputs(self, ids: Tensor, hidden: Tensor, bases: slice | None = None) -> list[Tensor]:
        """As in DemoModel: row i of draft j, from 1, stands at position i + j, module j - 1 makes it. A module's cache
        holds its own rows alone, so that with the text's tokens whole chains are all rows at once (`bases` is None)."""
        assert bases is None, "every row is cheap here: chain_step is 1"
        rows = ids.shape[1] - self.settings.modules
        state, outputs = hidden[:, :rows], []
        for i in range(self.settings.modules):
            state, normed = self.module_hidden(i, ids[:, i + 1 : i + 1 + rows], state, i + 1, causal)
            outputs.append(normed)
        return outputs

    def first_drafts(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Module 0's, [B, T - modules, hidden]. The other modules run too, so that what counts calls counts theirs."""
        return self.draft_outputs(ids, hidden)[0]

    def draft_logits(self, draft_hidden: Tensor) -> Tensor:
        return self.lm_head(draft_hidden).float()

    def drafter(self, drafts: int, capacity: int, policy: str) -> ModuleDrafter:
        return ModuleDrafter(self, drafts, capacity, policy)


def config(s: Settings) -> dict[str, Any]:
    """config.json, with the fields that published ones have."""
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.expert_ffn,
        "shared_intermediate_size": 0,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.q_heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.window,
        "initializer_range": 0.02,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rotary_dim": int(s.rotary_factor * s.head_dim),
        "partial_rotary_factor": s.rotary_factor,  # the same; transformers before 5.24 does not read rotary_dim
        "attention_dropout": 0.0,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "num_local_experts": s.experts,
        "num_experts_per_tok": s.experts_per_token,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "router_jitter_noise": 0.0,
        "use_mtp": True,
        "num_mtp_modules": s.modules,
        "mtp_transformer_layers": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


@torch.no_grad()
def compare(folder: Path, model: Model, prompt: list[int]) -> dict[str, Any]:
    """transformers has no MTP modules of this family, so each runs as a model of one layer: inputs are eh_proj's
    output, positions start at i + 1, the final norm is the module's. `draft_logits` is the worst of them."""
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    ids = torch.tensor([prompt])
    target = MiniMaxM2ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    hidden = model.hidden(ids)
    result: dict[str, Any] = {"logits": difference(model.logits(hidden), target(ids, use_cache=False).logits)}

    one = MiniMaxM2Config.from_pretrained(folder, num_hidden_layers=1)
    one._attn_implementation = "eager"
    state, rows = model.state_dict(), len(prompt) - model.settings.modules
    before, worst = hidden[:, :rows], 0.0
    for i in range(model.settings.modules):
        prefix = f"model.layers.{model.settings.layers + i}."
        draft = MiniMaxM2ForCausalLM(one).float().eval()
        draft.model.embed_tokens = target.model.embed_tokens
        own = {"model.norm.weight": prefix + "norm.weight", "lm_head.weight": "lm_head.weight"} | {
            name: name.replace("model.layers.0.", prefix).replace(".mlp.", ".block_sparse_moe.")
            for name in draft.state_dict()
            if name.startswith("model.layers.")
        }
        draft.load_state_dict({name: state[ours] for name, ours in own.items()}, strict=False)
        tokens = ids[:, i + 1 : i + 1 + rows]
        parts = []
        for name, x in (("enorm", target.model.embed_tokens(tokens)), ("hnorm", before)):
            norm = type(target.model.norm)(x.shape[-1], eps=one.rms_norm_eps)
            norm.load_state_dict({"weight": state[f"{prefix}{name}.weight"]})
            parts.append(norm(x))
        inputs = functional.linear(torch.cat(parts, -1), state[prefix + "eh_proj.weight"])
        positions = torch.arange(i + 1, i + 1 + rows)[None]
        theirs = draft(inputs_embeds=inputs, position_ids=positions, use_cache=False).logits
        before, normed = model.module_hidden(i, tokens, before, i + 1, causal)
        worst = max(worst, difference(model.draft_logits(normed), theirs))
    return result | {"draft_logits": worst}


def describe(s: dict[str, Any]) -> Description:
    return Description(
        model="MiniMax-M2 model with full attention and a mixture of experts in every layer",
        drafter=f"the {s['modules']} multi-token-prediction (MTP) modules",
        short="MTP modules",
        shape=f"{s['layers']} layers and {s['modules']} MTP modules; hidden {s['hidden']}; {s['q_heads']} query and "
        f"{s['kv_heads']} KV heads of {s['head_dim']}; {experts_of(s)}",
        architecture="MiniMaxM2ForCausalLM",
        wider=" (the routers' biases in FP32)",
        drafts="draft",
        balance="The routers' biases follow how often each expert is chosen; the term that steps them has the weight "
        "{weight}.",
        rows="`refeed` keeps the rows of\nverified tokens and writes those that accepted drafts left out, so that no "
        "module lacks a row; `verified` keeps one row a\nmodule where its token was accepted, `seed` where its draft "
        "was. With these two, rows are missing from then on, and\nno module sees the prompt.",
    )
