# SPDX-License-Identifier: AGPL-3.0-only
"""DeepSeek-V4 in transformers' code, on BF16 weights and in FP64, and how much BF16 stores would disturb it, as in
`huggingface` for Qwen3-Next.

transformers has the layer and the head of hyper-connections, and no MTP module: that one is the six lines of `Mtp`, as
DeepSeek's `inference/model.py` has them, and as the engine has them that collapses the streams first. Within
transformers' code norms, mixes and rotation angles are FP32, which is 1e-7: nothing beside a BF16 store's 2e-3.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4RMSNorm,
    DeepseekV4TopKRouter,
)

from . import v4
from .cases import DRAFTS
from .spreads import (
    AT_ONCE,
    COPIES,
    SIGMAS,
    Wrong,
    clear_tokens,
    joined,
    routing_of,
    spread_of,
    summary_of,
    wrong_by,
)

__all__ = ["arrays_of"]

Array = np.ndarray[Any, Any]
CLEAR = 0.05
"""Least distance of selection scores at the rows of tokens that are chosen: above what BF16 stores do to it, which
arrays_of makes sure of."""
MODES = ("reference", "collapsed")


def load(folder: Path) -> DeepseekV4ForCausalLM:
    """A checkpoint as it is stored, in FP64. RuntimeError where a tensor was not taken as it is."""
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    if wrong := {key: value for key, value in info.items() if value and key != "unexpected_keys"}:
        raise RuntimeError(f"{folder} is not loaded as it is: {wrong}")
    if stray := [name for name in info["unexpected_keys"] if not name.startswith("mtp.")]:
        raise RuntimeError(f"{folder} has tensors that are not loaded: {stray}")
    return model.double().eval()


def visible(query: Tensor, key: Tensor) -> Tensor:
    """Whether a query at row `query` sees the row `key`."""
    return (key <= query) & (key > query - v4.WINDOW)


def run_layer(model: DeepseekV4ForCausalLM, layer: nn.Module, streams: Tensor, ids: Tensor, mask: Tensor,
              positions: Tensor) -> Tensor:  # fmt: skip
    """A decoder layer over streams [copies, rows, S, h]; ids and positions [rows], mask [rows, rows] of what is
    seen."""
    plain = streams[:, :, 0]
    turns = {kind: model.model.rotary_emb(plain, positions[None], layer_type=kind) for kind in ("main", "compress")}
    seen = torch.zeros(mask.shape, dtype=streams.dtype).masked_fill(~mask, -torch.inf)
    out: Tensor = layer(
        streams, position_embeddings=turns, position_ids=positions[None], attention_mask=seen[None, None],
        input_ids=ids.expand(len(streams), -1), cache=None,
    )  # fmt: skip
    return out


class Mtp(nn.Module):
    """The MTP module of a checkpoint, whose layer, head and norm transformers reads as a model of one layer."""

    def __init__(self, folder: Path, target: DeepseekV4ForCausalLM, collapsed: bool) -> None:
        super().__init__()
        stored = load_file(folder / "model.safetensors")
        own = {name.removeprefix("mtp.0."): value for name, value in stored.items() if name.startswith("mtp.0.")}
        outer = {name: own.pop(f"{name}.weight") for name in ("enorm", "hnorm", "e_proj", "h_proj")}
        top = ("norm.", "hc_head_")
        state = {name if name.startswith(top) else f"layers.0.{name}": value for name, value in own.items()}
        state |= {name: stored[name] for name in ("embed.weight", "head.weight")}
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            save_file(state, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
            self.body = load(Path(scratch))
        h, eps = target.config.hidden_size, target.config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV4RMSNorm(h, eps), DeepseekV4RMSNorm(h, eps)
        self.e_proj, self.h_proj = nn.Linear(h, h, bias=False), nn.Linear(h, h, bias=False)
        self.sum = nn.Identity()  # a place to disturb
        for name, value in outer.items():
            getattr(self, name).load_state_dict({"weight": value})
        self.double().eval()
        self.collapsed, self.streams = collapsed, target.config.hc_mult
        self.routers = Routers(self)

    def forward(self, tokens: Tensor, hidden: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what the next draft reads) of pairs (token, hidden): hidden [copies, rows, S, h], or one row of h
        for each where streams are collapsed."""
        rows = hidden.unsqueeze(2) if self.collapsed else hidden
        embedding = self.body.model.embed_tokens(tokens).expand(len(rows), -1, -1)
        x = self.sum(self.e_proj(self.enorm(embedding)).unsqueeze(2) + self.h_proj(self.hnorm(rows)))
        if self.collapsed:
            x = x.expand(-1, -1, self.streams, -1).contiguous()
        x = run_layer(self.body, self.body.model.layers[0], x, tokens, mask, positions)
        row = self.body.model.hc_head(x)
        return self.body.lm_head(self.body.model.norm(row)), row if self.collapsed else x

    def chains(self, tokens: list[int], hidden: Tensor, ids: Array | None) -> tuple[Tensor, Tensor, Tensor, Array]:
        """Every chain of drafts at once: (logits [copies, bases, DRAFTS, V], hidden and selection scores alike, ids
        [bases, DRAFTS]).

        hidden [copies, len(tokens), ...] is the target's. The chain of base position p begins with the pair (token p,
        hidden p - 1) in row p - 1; draft j follows with the last draft and the module's own output in row p - 1 + j,
        where it sees the rows up to its base's and those of its own chain, as far as the window reaches. `ids`, where
        given, are drafted instead of the best.
        """
        rows, bases = len(tokens) - 1, len(tokens) - v4.FIRST
        base_row = torch.arange(v4.FIRST - 1, rows)
        ids_in, hidden_in = torch.tensor(tokens[1:]), hidden[:, :-1]
        place, owner = torch.arange(rows), torch.full((rows,), -1)
        logits, outs, routed, picks = [], [], [], []
        for j in range(DRAFTS):
            mine = owner[:, None] == owner[None]
            mask = visible(place[:, None], place[None]) & (mine | (owner[None] < 0))
            # Of the common rows, a chain's rows see those up to their base's alone.
            base = torch.cat((place[:rows], base_row.repeat(j)))
            mask &= (owner[None] >= 0) | (place[None] <= base[:, None])
            found, out = self(ids_in, hidden_in, mask, place)
            last: Any = base_row if j == 0 else slice(-bases, None)
            logits.append(found[:, last])
            outs.append(out[:, last])
            routed.append(self.routers.take(found)[:, last])
            picked = found[0, last].argmax(-1) if ids is None else torch.tensor(ids[:, j].astype(np.int64))
            picks.append(picked)
            ids_in, hidden_in = torch.cat((ids_in, picked)), torch.cat((hidden_in, outs[-1]), dim=1)
            place, owner = torch.cat((place, base_row + 1 + j)), torch.cat((owner, torch.arange(bases)))
        return torch.stack(logits, 2), torch.stack(outs, 2), torch.stack(routed, 2), torch.stack(picks, 1).numpy()


class Routers:
    """Selection scores of a model's learned routers in a call, kept by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.found: list[Tensor] = []
        self.top = 0
        for module in model.modules():
            if isinstance(module, DeepseekV4TopKRouter):
                self.top = module.top_k
                module.register_forward_hook(self._keep)

    def _keep(self, router: nn.Module, _args: Any, out: tuple[Tensor, ...]) -> None:
        self.found.append(router.score_fn(out[0]) + router.e_score_correction_bias)

    def take(self, out: Tensor) -> Tensor:
        """Scores [copies, rows, routers, experts] of the call that gave `out` [copies, rows, ...]."""
        found = [scores.unflatten(0, out.shape[:2]) for scores in self.found]
        self.found.clear()
        return torch.stack(found, 2) if found else out.new_zeros(*out.shape[:2], 0, 0)

    def gaps(self, scores: Tensor, exact: Tensor) -> Tensor:
        """Distance of the last expert that is taken to the first that is not, [..., routers], of scores
        [..., routers, experts]. Which experts these are say the scores `exact`."""
        if not scores.shape[-2]:
            return scores.new_zeros(scores.shape[:-1])
        places = exact.topk(self.top + 1, dim=-1).indices[..., -2:].expand(*scores.shape[:-1], 2)
        pair = scores.gather(-1, places)
        return pair[..., 0] - pair[..., 1]


@contextmanager
def disturbed(layers: list[nn.Module], others: list[nn.Module], generator: torch.Generator) -> Iterator[None]:
    """Within, each value that a BF16 engine stores is wrong by a random relative error of a store, those of `others`
    too.

    Counted once each: a sublayer's input, norms, projections, queries and latent rows behind norm and rotation,
    attention's output behind its rotation, the groups' outputs; the router's logits; of each expert both projections,
    their product and its output, and the sum of the experts. Streams are FP32.
    """
    wrong = wrong_by(generator)

    def after(module: nn.Module) -> Any:
        return module.register_forward_hook(lambda _module, _args, out: wrong(out, 1))

    def before(module: nn.Module) -> Any:
        return module.register_forward_pre_hook(lambda _module, args: (wrong(args[0], 1), *args[1:]))

    def mixed(module: nn.Module) -> Any:
        return module.register_forward_hook(lambda _module, _args, out: (*out[:2], wrong(out[2], 1)))

    hooks = [after(module) for module in others]
    patched: list[nn.Module] = []
    for layer in layers:
        a, mlp = layer.self_attn, layer.mlp
        shared = mlp.shared_experts
        once = [
            layer.input_layernorm, a.q_a_proj, a.q_a_norm, a.q_b_proj, a.q_b_norm, a.kv_proj, a.kv_norm, a.o_a_proj,
            a.o_b_proj, layer.post_attention_layernorm, shared.gate_proj, shared.up_proj, shared.down_proj, mlp,
        ]  # fmt: skip
        hooks += [after(module) for module in once] + [before(a.o_a_proj), before(shared.down_proj)]
        hooks += [mixed(layer.attn_hc), mixed(layer.ffn_hc)]
        mlp.gate.forward = partial(_router, mlp.gate, wrong)
        mlp.experts.forward = partial(_experts, mlp.experts, wrong)
        patched += [mlp.gate, mlp.experts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in patched:
            del module.forward


def _router(router: nn.Module, wrong: Wrong, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The router's forward, its logits stored."""
    logits = wrong(nn.functional.linear(x.flatten(0, -2), router.weight), 1)
    scores = router.score_fn(logits)
    if ids is None:
        chosen = (scores + router.e_score_correction_bias).topk(router.top_k, dim=-1).indices
    else:
        chosen = router.tid2eid[ids.flatten()]
    weights = scores.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, chosen


def _experts(experts: nn.Module, wrong: Wrong, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' forward; stored are both projections, their product and each expert's output."""
    total = torch.zeros_like(x)
    for expert, (joint, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        rows, slots = torch.where(chosen == expert)
        inner = experts._apply_gate(wrong(nn.functional.linear(x[rows], joint), 1))
        out = wrong(nn.functional.linear(wrong(inner, 1), down), 1)
        total.index_add_(0, rows, out * weights[rows, slots, None])
    return total


def _clear(target: DeepseekV4ForCausalLM, routers: Routers, tokens: list[int]) -> bool:
    """Whether every router's choice is clear at the last of the tokens."""
    scores = routers.take(target(torch.tensor([tokens]), use_cache=False).logits)
    return bool((routers.gaps(scores, scores)[0, -1] > CLEAR).all())


@torch.no_grad()
def arrays_of(folder: Path, spreads: bool = True) -> dict[str, Array]:
    """The arrays of the fixture. Without `spreads`, which take most of the time, those are zero.

    RuntimeError where a router's choice in the target is not clear in spite of CLEAR.
    """
    batches = COPIES // AT_ONCE if spreads else 0
    target = load(folder)
    generator = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(target.config.num_hidden_layers):
        found |= _layer_arrays(target, layer, generator, batches)
    routers = Routers(target)
    case = v4.case()
    sequences = [clear_tokens(partial(_clear, target, routers), tokens, case.clear) for tokens in case.sequences]
    kept: list[Tensor] = []
    target.model.hc_head.register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
    parts, inputs = [], []
    for tokens in sequences:
        ids = torch.tensor([tokens])
        logits = target(ids, use_cache=False).logits
        inputs.append(kept[-1][0].float())
        scores = routers.take(logits)

        def run_target(ids: Tensor = ids, scores: Tensor = scores) -> tuple[Tensor, ...]:
            logits = target(ids.expand(AT_ONCE, -1), use_cache=False).logits
            return logits, routers.gaps(routers.take(logits), scores)

        exact = logits[0], routers.gaps(scores, scores)[0]
        with disturbed(list(target.model.layers), [target.model.hc_head, target.model.norm], generator):
            parts.append((exact, spread_of(run_target, exact, batches)))
    (logits, gaps), (spread, gap_spread) = joined(parts)
    if not bool((gaps > SIGMAS * gap_spread).all()):
        raise RuntimeError("a router's choice is not clear in spite of the margin")
    found |= {
        "target_tokens": np.concatenate(sequences).astype(np.int32),
        "target_lengths": np.array([len(tokens) for tokens in sequences], np.int32),
        "target_streams": torch.cat(inputs).numpy(),
        **summary_of("target", logits, spread, case.target_step),
        **routing_of("target", gaps, gap_spread),
    }
    for mode in MODES:
        mtp = Mtp(folder, target, mode == "collapsed")
        given = [x.double() for x in inputs]
        if mode == "collapsed":
            # As the engine keeps it: BF16.
            rows = [target.model.hc_head(x[None])[0].to(torch.bfloat16) for x in given]
            found["collapsed_hidden_in"] = torch.cat(rows).view(torch.int16).numpy().view(np.uint16)
            given = [x.double() for x in rows]
        found |= _head_arrays(mode, mtp, sequences, given, generator, batches, case.head_step)
    return found


def _layer_arrays(
    target: DeepseekV4ForCausalLM, layer: int, generator: torch.Generator, batches: int
) -> dict[str, Array]:
    """`layer{i}_`: its output streams with a spread for each row and stream, the routing, and the collapsed output."""
    rows = torch.arange(v4.LENGTHS[-1])
    given = torch.from_numpy(v4.streams(layer)).double()
    module, ids = target.model.layers[layer], rows % target.config.vocab_size
    assert isinstance(module, DeepseekV4DecoderLayer)
    routers = Routers(module)

    def run(copies: int) -> tuple[Tensor, Tensor]:
        streams = given.expand(copies, -1, -1, -1)
        out = run_layer(target, module, streams, ids, visible(rows[:, None], rows[None]), rows)
        return out, routers.take(out)

    out, scores = run(1)

    def run_disturbed() -> tuple[Tensor, ...]:
        found, wrong = run(AT_ONCE)
        return found, routers.gaps(wrong, scores)

    exact = out[0], routers.gaps(scores, scores)[0]
    with disturbed([module], [], generator):
        spread, gap_spread = spread_of(run_disturbed, exact, batches)
    return {
        f"layer{layer}_streams": exact[0].float().numpy(),
        f"layer{layer}_spread": spread.square().mean(-1).sqrt().float().numpy(),
        f"layer{layer}_collapsed": target.model.hc_head(given[None])[0].float().numpy(),
        **routing_of(f"layer{layer}", exact[1], gap_spread),
    }


def _head_arrays(
    mode: str,
    mtp: Mtp,
    sequences: list[list[int]],
    given: list[Tensor],
    generator: torch.Generator,
    batches: int,
    step: int,
) -> dict[str, Array]:
    """Arrays of the drafts, named after the mode."""
    parts, ids = [], []
    others = [mtp.enorm, mtp.hnorm, mtp.e_proj, mtp.h_proj, mtp.sum, mtp.body.model.hc_head, mtp.body.model.norm]
    for tokens, hidden in zip(sequences, given, strict=True):
        logits, out, scores, picked = mtp.chains(tokens, hidden[None], None)

        def run(
            tokens: list[int] = tokens, hidden: Tensor = hidden, ids: Array = picked, scores: Tensor = scores
        ) -> tuple[Tensor, ...]:
            logits, out, wrong, _ = mtp.chains(tokens, hidden.expand(AT_ONCE, *hidden.shape), ids)
            return logits, out, mtp.routers.gaps(wrong, scores)

        exact = logits[0], out[0], mtp.routers.gaps(scores, scores)[0]
        with disturbed(list(mtp.body.model.layers), others, generator):
            wide = spread_of(run, exact, batches)
        parts.append((tuple(x.flatten(0, 1) for x in exact), tuple(x.flatten(0, 1) for x in wide)))
        ids.append(picked)
    (logits, _, gaps), (spread, _, gap_spread) = joined(parts)
    return {
        f"{mode}_ids": np.concatenate(ids).astype(np.int32).reshape(-1),
        **summary_of(mode, logits, spread, step),
        **routing_of(mode, gaps, gap_spread),
    }
