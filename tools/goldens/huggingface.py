# SPDX-License-Identifier: AGPL-3.0-only
"""Target and MTP head in Hugging Face's code, on BF16 weights and in FP64, and how much BF16 stores would disturb them.

Inside, that code takes norms, softmax and rotation angles in FP32, which is 1e-7: nothing beside a BF16 store's 2e-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
    Qwen3NextSparseMoeBlock,
    Qwen3NextTopKRouter,
)

from .cases import DRAFTS, Case
from .spreads import (
    AT_ONCE,
    COPIES,
    SIGMAS,
    Wrong,
    clear_tokens,
    experts_forward,
    joined,
    routing_of,
    spread_of,
    summary_of,
    wrong_by,
)

__all__ = ["Head", "arrays_of", "load_target"]

Array = np.ndarray[Any, Any]

MARGIN = 0.3
"""Least distance of the last expert's router logit that is taken to the first that is not, in tokens that are chosen:
far above what BF16 stores do to it, which arrays_of makes sure of."""


def load_target(folder: Path) -> Qwen3NextForCausalLM:
    """The checkpoint's target: BF16 values, FP64 arithmetic. RuntimeError where a tensor was not taken as it is."""
    model, info = Qwen3NextForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if wrong := {key: value for key, value in info.items() if value}:
        raise RuntimeError(f"{folder} is not loaded as it is: {wrong}")
    return model.double().eval()


class Head(nn.Module):
    """The MTP head: one decoder layer of Hugging Face's between [norm(embedding) | norm(hidden)] and the LM head."""

    def __init__(self, folder: Path, target: Qwen3NextForCausalLM) -> None:
        super().__init__()
        stored = {name[4:]: x for name, x in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
        dense = [] if "layers.0.mlp.gate.weight" in stored else [0]
        config = Qwen3NextConfig.from_pretrained(
            folder, num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=dense
        )
        config._attn_implementation = config._experts_implementation = "eager"
        h, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(h, eps=eps)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(h, eps=eps)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, 0)])
        self.norm = Qwen3NextRMSNorm(h, eps=eps)
        self.load_state_dict(stored if dense else _stacked(stored, config.num_experts))
        self.double().eval()
        self.routers = Routers(self)
        self.rotary = Qwen3NextRotaryEmbedding(config)
        self.embed_tokens, self.lm_head = target.model.embed_tokens, target.lm_head

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, hidden out) of pairs (token, hidden); tokens, positions [rows], hidden [copies, rows, h]."""
        embedding = self.embed_tokens(tokens).expand_as(hidden)
        x = torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x = self.fc(x)
        x = self.layers[0](x, position_embeddings=self.rotary(x, positions[None]), attention_mask=mask)
        return self.lm_head(self.norm(x)), x

    def chains(
        self, tokens: list[int], hidden: Tensor, first: int, ids: Array | None
    ) -> tuple[Tensor, Tensor, Tensor, Array]:
        """Every chain of drafts at once: (logits [copies, bases, DRAFTS, V], hidden and router logits alike, ids
        [bases, DRAFTS]).

        hidden [copies, len(tokens), h] is the target's. The chain of base position p begins with the pair (token p,
        hidden p - 1) at position p; draft j follows with the last draft and the chain's own hidden at p + j, sees the
        first rows up to its base's and those of its own chain. `ids`, where given, are drafted instead of the best.
        """
        rows, bases = len(tokens) - 1, len(tokens) - first
        base_row = torch.arange(first - 1, rows)
        ids_in, hidden_in, positions = torch.tensor(tokens[1:]), hidden[:, :-1], torch.arange(1, rows + 1)
        owner = torch.full((rows,), -1)
        logits, outs, routed, picks = [], [], [], []
        for j in range(DRAFTS):
            reach = torch.cat((torch.arange(rows), base_row.repeat(j)))
            seen = (reach[:, None] >= torch.arange(rows)[None]).double()
            own = (owner[:, None] == owner[None, rows:]) & torch.ones(len(owner), len(owner)).tril().bool()[:, rows:]
            mask = torch.where(torch.cat((seen, own.double()), dim=1) > 0, 0.0, -torch.inf).double()
            found, out = self(ids_in, hidden_in, positions, mask[None, None])
            last = base_row if j == 0 else slice(-bases, None)
            logits.append(found[:, last])
            outs.append(out[:, last])
            routed.append(self.routers.take(out)[:, last])
            picked = found[0, last].argmax(-1) if ids is None else torch.tensor(ids[:, j].astype(np.int64))
            picks.append(picked)
            ids_in, hidden_in = torch.cat((ids_in, picked)), torch.cat((hidden_in, outs[-1]), dim=1)
            positions = torch.cat((positions, base_row + 2 + j))
            owner = torch.cat((owner, torch.arange(bases)))
        return torch.stack(logits, 2), torch.stack(outs, 2), torch.stack(routed, 2), torch.stack(picks, 1).numpy()


def _stacked(stored: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """A head's tensors with its experts' in two stacks, as Hugging Face's layer has them."""
    prefix = "layers.0.mlp.experts."
    found = {name: value for name, value in stored.items() if not name.startswith(prefix)}
    parts = [[stored[f"{prefix}{i}.{x}_proj.weight"] for x in ("gate", "up", "down")] for i in range(experts)]
    found[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
    found[f"{prefix}down_proj"] = torch.stack([down for _, _, down in parts])
    return found


class Routers:
    """What the routers of a model give in a call: their logits, kept by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[Tensor] = []
        self.top = 0
        for module in model.modules():
            if isinstance(module, Qwen3NextTopKRouter):
                self.top = module.top_k
                module.register_forward_hook(lambda _module, _args, out: self.found.append(out[0]))

    def take(self, out: Tensor) -> Tensor:
        """Logits [copies, rows, routers, experts] of the call that gave `out` [copies, rows, ...]."""
        found = [logits.unflatten(0, out.shape[:2]) for logits in self.found]
        self.found.clear()
        return torch.stack(found, 2) if found else out.new_zeros(*out.shape[:2], 0, 0)

    def gaps(self, logits: Tensor, exact: Tensor) -> Tensor:
        """Distance of the last expert that is taken to the first that is not, [..., routers], of logits
        [..., routers, experts]. Which experts these are say the logits `exact`."""
        if not self.top:
            return logits.new_zeros(logits.shape[:-1])
        places = exact.topk(self.top + 1, dim=-1).indices[..., -2:].expand(*logits.shape[:-1], 2)
        pair = logits.gather(-1, places)
        return pair[..., 0] - pair[..., 1]


@contextmanager
def disturbed(layers: nn.ModuleList, others: list[nn.Module], generator: torch.Generator) -> Iterator[None]:
    """Within, each value that a BF16 engine stores is wrong by a random relative error of STORE, those of `others` too.

    Counted a layer: norms, projections and SwiGLU's product once; queries and keys twice more (head norm, rotation);
    attention twice (sums, gate); the residual stream twice (the first sum's error is drawn with the second's). With
    experts also the router's logits, what is counted of an FFN for each, and their weighted sum, once.
    """

    wrong = wrong_by(generator)

    def after(module: nn.Module, stores: int = 1) -> Any:
        return module.register_forward_hook(lambda _module, _args, out: wrong(out, stores))

    def before(module: nn.Module, stores: int = 1) -> Any:
        return module.register_forward_pre_hook(lambda _module, args: (wrong(args[0], stores), *args[1:]))

    hooks = [after(module) for module in others]
    patched: list[nn.Module] = []
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        once = [
            layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            layer.post_attention_layernorm,
        ]  # fmt: skip
        if isinstance(mlp, Qwen3NextSparseMoeBlock):
            mlp.gate.forward = partial(_router, mlp.gate, wrong)
            mlp.experts.forward = partial(experts_forward, mlp.experts, wrong)
            patched += [mlp.gate, mlp.experts]
            once.append(mlp)
            mlp = mlp.shared_expert
        once += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        hooks += [after(module) for module in once]
        hooks += [after(attention.q_norm, 2), after(attention.k_norm, 2), before(attention.o_proj, 2)]
        hooks += [before(mlp.down_proj), after(layer, 2)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in patched:
            del module.forward


def _router(router: Qwen3NextTopKRouter, wrong: Wrong, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The router's forward, its logits stored."""
    logits = wrong(nn.functional.linear(x, router.weight), 1)
    best = logits.softmax(-1).topk(router.top_k, dim=-1)
    weights = best.values / best.values.sum(-1, keepdim=True) if router.norm_topk_prob else best.values
    return logits, weights, best.indices


def _clear(target: Qwen3NextForCausalLM, routers: Routers, tokens: list[int]) -> bool:
    """Whether every router's choice is clear at the last of the tokens."""
    routed = routers.take(target(torch.tensor([tokens]), use_cache=False).logits)
    return bool((routers.gaps(routed, routed)[0, -1] > MARGIN).all())


@torch.no_grad()
def arrays_of(folder: Path, case: Case, spreads: bool = True) -> dict[str, Array]:
    """The arrays of a fixture. Without `spreads`, which take most of the time, those are zero.

    RuntimeError where a router's choice in the target is not clear in spite of MARGIN.
    """
    batches = COPIES // AT_ONCE if spreads else 0
    target = load_target(folder)
    head = Head(folder, target)
    routers = Routers(target)
    sequences = case.sequences
    if case.clear:
        sequences = [clear_tokens(partial(_clear, target, routers), tokens, case.clear) for tokens in sequences]
    generator = torch.Generator().manual_seed(0)
    streams: list[Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _module, args: streams.append(args[0]))
    parts: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    inputs: list[Tensor] = []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits = target(ids, use_cache=False).logits
        inputs.append(streams[-1][0].to(torch.bfloat16))
        routed = routers.take(logits)

        def run_target(ids: Tensor = ids, routed: Tensor = routed) -> tuple[Tensor, ...]:
            found = target(ids.expand(AT_ONCE, -1), use_cache=False).logits
            return found, routers.gaps(routers.take(found), routed)

        exact = logits[0], routers.gaps(routed, routed)[0]
        with disturbed(target.model.layers, [target.model.norm], generator):
            parts.append((exact, spread_of(run_target, exact, batches)))
        streams.clear()
    (logits, gaps), (spread, gap_spread) = joined(parts)
    if not bool((gaps > SIGMAS * gap_spread).all()):
        raise RuntimeError("a router's choice is not clear in spite of the margin")
    found = {
        "target_tokens": np.concatenate(sequences).astype(np.int32),
        "target_lengths": np.array([len(tokens) for tokens in sequences], np.int32),
        "target_decided": np.array(case.decided, np.int32),
        **summary_of("target", logits, spread, case.target_step),
        **routing_of("target", gaps, gap_spread),
    }

    parts, ids = [], []
    others = [head.pre_fc_norm_embedding, head.pre_fc_norm_hidden, head.fc, head.norm]
    for tokens, hidden, first in zip(sequences, inputs[: case.head_sequences], case.head_first, strict=False):
        given = hidden[None].double()
        logits, out, routed, picked = head.chains(tokens, given, first, None)

        def run_head(
            tokens: list[int] = tokens,
            given: Tensor = given,
            first: int = first,
            ids: Array = picked,
            exact: Tensor = routed,
        ) -> tuple[Tensor, ...]:
            logits, out, routed, _ = head.chains(tokens, given.expand(AT_ONCE, -1, -1), first, ids)
            return logits, out, head.routers.gaps(routed, exact)

        exact = logits[0], out[0], head.routers.gaps(routed, routed)[0]
        with disturbed(head.layers, others, generator):
            wide = spread_of(run_head, exact, batches)
        parts.append((tuple(x.flatten(0, 1) for x in exact), tuple(x.flatten(0, 1) for x in wide)))
        ids.append(picked)
    (logits, out, gaps), (spread, out_spread, gap_spread) = joined(parts)
    rows, used = summary_of("head", logits, spread, case.head_step), case.head_sequences
    return found | {
        "head_first": np.array(case.head_first, np.int32),
        "head_hidden_in": torch.cat(inputs[:used]).view(torch.int16).numpy().view(np.uint16),
        "head_ids": np.concatenate(ids).astype(np.int32).reshape(-1),
        "head_hidden": out[torch.from_numpy(rows["head_full_rows"]).long()].float().numpy(),
        "head_hidden_spread_rms": out_spread.square().mean(-1).sqrt().float().numpy(),
        **rows,
        **routing_of("head", gaps, gap_spread),
    }
