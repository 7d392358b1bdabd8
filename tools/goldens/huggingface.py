# SPDX-License-Identifier: AGPL-3.0-only
"""Target and MTP head in Hugging Face's code, on BF16 weights and in FP64, and how much BF16 stores would disturb them.

Inside, that code takes norms, softmax and rotation angles in FP32, which is 1e-7: nothing beside a BF16 store's 2e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
)

from .cases import DRAFTS, Case

__all__ = ["Head", "arrays_of", "load_target"]

Array = np.ndarray[Any, Any]

STORE = 2.0**-8 * math.sqrt(3 / (8 * math.log(2)) / 3)
"""RMS relative error of a BF16 store, 1.7e-3: uniform within half an ulp (2**-8 of the power of two below the value),
and the value spread evenly in its logarithm, so that 1 / value**2 is 3 / (8 ln 2) of that power's on average."""
COPIES, AT_ONCE = 48, 8
"""Disturbed runs, and how many in a batch. The standard deviation over 48 is known to a tenth."""
TOP = 4
"""Best logits that are kept of every row."""


def load_target(folder: Path) -> Qwen3NextForCausalLM:
    """The checkpoint's target: BF16 values, FP64 arithmetic. RuntimeError where a tensor was not taken as it is."""
    model, info = Qwen3NextForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager", output_loading_info=True
    )
    if wrong := {key: value for key, value in info.items() if value}:
        raise RuntimeError(f"{folder} is not loaded as it is: {wrong}")
    return model.double().eval()


class Head(nn.Module):
    """The MTP head: one decoder layer of Hugging Face's between [norm(embedding) | norm(hidden)] and the LM head."""

    def __init__(self, folder: Path, target: Qwen3NextForCausalLM) -> None:
        super().__init__()
        config = Qwen3NextConfig.from_pretrained(
            folder, num_hidden_layers=1, layer_types=["full_attention"], mlp_only_layers=[0]
        )
        config._attn_implementation = "eager"
        h, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3NextRMSNorm(h, eps=eps)
        self.pre_fc_norm_hidden = Qwen3NextRMSNorm(h, eps=eps)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([Qwen3NextDecoderLayer(config, 0)])
        self.norm = Qwen3NextRMSNorm(h, eps=eps)
        stored = load_file(folder / "model.safetensors")
        self.load_state_dict({name[4:]: value for name, value in stored.items() if name.startswith("mtp.")})
        self.double().eval()
        self.rotary = Qwen3NextRotaryEmbedding(config)
        self.embed_tokens, self.lm_head = target.model.embed_tokens, target.lm_head

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, hidden out) of pairs (token, hidden); tokens, positions [rows], hidden [copies, rows, h]."""
        embedding = self.embed_tokens(tokens).expand_as(hidden)
        x = torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x = self.fc(x)
        x = self.layers[0](x, position_embeddings=self.rotary(x, positions[None]), attention_mask=mask)
        return self.lm_head(self.norm(x)), x

    def chains(self, tokens: list[int], hidden: Tensor, first: int, ids: Array | None) -> tuple[Tensor, Tensor, Array]:
        """Every chain of drafts at once: (logits [copies, bases, DRAFTS, V], hidden alike, ids [bases, DRAFTS]).

        hidden [copies, len(tokens), h] is the target's. The chain of base position p begins with the pair (token p,
        hidden p - 1) at position p; draft j follows with the last draft and the chain's own hidden at p + j, sees the
        first rows up to its base's and those of its own chain. `ids`, where given, are drafted instead of the best.
        """
        rows, bases = len(tokens) - 1, len(tokens) - first
        base_row = torch.arange(first - 1, rows)
        ids_in, hidden_in, positions = torch.tensor(tokens[1:]), hidden[:, :-1], torch.arange(1, rows + 1)
        owner = torch.full((rows,), -1)
        logits, outs, picks = [], [], []
        for j in range(DRAFTS):
            reach = torch.cat((torch.arange(rows), base_row.repeat(j)))
            seen = (reach[:, None] >= torch.arange(rows)[None]).double()
            own = (owner[:, None] == owner[None, rows:]) & torch.ones(len(owner), len(owner)).tril().bool()[:, rows:]
            mask = torch.where(torch.cat((seen, own.double()), dim=1) > 0, 0.0, -torch.inf).double()
            found, out = self(ids_in, hidden_in, positions, mask[None, None])
            last = base_row if j == 0 else slice(-bases, None)
            logits.append(found[:, last])
            outs.append(out[:, last])
            picked = found[0, last].argmax(-1) if ids is None else torch.tensor(ids[:, j].astype(np.int64))
            picks.append(picked)
            ids_in, hidden_in = torch.cat((ids_in, picked)), torch.cat((hidden_in, outs[-1]), dim=1)
            positions = torch.cat((positions, base_row + 2 + j))
            owner = torch.cat((owner, torch.arange(bases)))
        return torch.stack(logits, 2), torch.stack(outs, 2), torch.stack(picks, 1).numpy()


@contextmanager
def disturbed(layers: nn.ModuleList, others: list[nn.Module], generator: torch.Generator) -> Iterator[None]:
    """Within, each value that a BF16 engine stores is wrong by a random relative error of STORE, those of `others` too.

    Counted a layer: norms, projections and SwiGLU's product once; queries and keys twice more (head norm, rotation);
    attention twice (sums, gate); the residual stream twice (the first sum's error is drawn with the second's).
    """

    def wrong(x: Tensor, stores: int) -> Tensor:
        unit = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
        return x * (1 + STORE * math.sqrt(3 * stores) * unit)

    def after(module: nn.Module, stores: int = 1) -> Any:
        return module.register_forward_hook(lambda _module, _args, out: wrong(out, stores))

    def before(module: nn.Module, stores: int = 1) -> Any:
        return module.register_forward_pre_hook(lambda _module, args: (wrong(args[0], stores), *args[1:]))

    hooks = [after(module) for module in others]
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        once = (
            layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        )  # fmt: skip
        hooks += [after(module) for module in once]
        hooks += [after(attention.q_norm, 2), after(attention.k_norm, 2), before(attention.o_proj, 2)]
        hooks += [before(mlp.down_proj), after(layer, 2)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _spread(run: Callable[[], tuple[Tensor, ...]], exact: tuple[Tensor, ...], batches: int) -> tuple[Tensor, ...]:
    """Standard deviation of each output of `run`, which gives AT_ONCE copies, around the exact one."""
    total = [torch.zeros_like(x) for x in exact]
    for _ in range(batches):
        for part, found, true in zip(total, run(), exact, strict=True):
            part += ((found - true) ** 2).sum(0)
    return tuple((part / COPIES).sqrt() for part in total)


def _summary(prefix: str, logits: Tensor, spread: Tensor, step: int) -> dict[str, Array]:
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


@torch.no_grad()
def arrays_of(folder: Path, case: Case, spreads: bool = True) -> dict[str, Array]:
    """The arrays of a fixture. Without `spreads`, which take most of the time, those are zero."""
    batches = COPIES // AT_ONCE if spreads else 0
    target = load_target(folder)
    head = Head(folder, target)
    generator = torch.Generator().manual_seed(0)
    streams: list[Tensor] = []
    target.model.norm.register_forward_pre_hook(lambda _module, args: streams.append(args[0]))
    exact: list[Tensor] = []
    spread: list[Tensor] = []
    inputs: list[Tensor] = []
    for tokens in case.sequences:
        ids = torch.tensor([tokens])
        logits = target(ids, use_cache=False).logits[0]
        inputs.append(streams[-1][0].to(torch.bfloat16))
        copies = ids.expand(AT_ONCE, -1)
        with disturbed(target.model.layers, [target.model.norm], generator):
            spread += _spread(lambda copies=copies: (target(copies, use_cache=False).logits,), (logits,), batches)  # type: ignore[misc]
        exact.append(logits)
        streams.clear()
    found = {
        "target_tokens": np.concatenate(case.sequences).astype(np.int32),
        "target_lengths": np.array([len(tokens) for tokens in case.sequences], np.int32),
        "target_decided": np.array(case.decided, np.int32),
        **_summary("target", torch.cat(exact), torch.cat(spread), case.target_step),
    }

    exact, spread, outs, out_spread, ids = [], [], [], [], []
    others = [head.pre_fc_norm_embedding, head.pre_fc_norm_hidden, head.fc, head.norm]
    for tokens, hidden, first in zip(case.sequences, inputs[: case.head_sequences], case.head_first, strict=False):
        given = hidden[None].double()
        logits, out, picked = head.chains(tokens, given, first, None)

        def run(tokens: list[int] = tokens, given: Tensor = given, first: int = first, ids: Array = picked) -> Any:
            return head.chains(tokens, given.expand(AT_ONCE, -1, -1), first, ids)[:2]

        with disturbed(head.layers, others, generator):
            wide = _spread(run, (logits[0], out[0]), batches)
        exact.append(logits[0].flatten(0, 1))
        outs.append(out[0].flatten(0, 1))
        spread.append(wide[0].flatten(0, 1))
        out_spread.append(wide[1].flatten(0, 1))
        ids.append(picked)
    rows, used = _summary("head", torch.cat(exact), torch.cat(spread), case.head_step), case.head_sequences
    return found | {
        "head_first": np.array(case.head_first, np.int32),
        "head_hidden_in": torch.cat(inputs[:used]).view(torch.int16).numpy().view(np.uint16),
        "head_ids": np.concatenate(ids).astype(np.int32).reshape(-1),
        "head_hidden": torch.cat(outs)[torch.from_numpy(rows["head_full_rows"]).long()].float().numpy(),
        "head_hidden_spread_rms": torch.cat(out_spread).square().mean(-1).sqrt().float().numpy(),
        **rows,
    }
