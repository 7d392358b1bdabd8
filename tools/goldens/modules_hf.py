# SPDX-License-Identifier: AGPL-3.0-only
"""Targets and MTP modules in transformers' code, on BF16 weights and in FP64, and how much BF16 stores would disturb
them, as in `huggingface` for one head.

GLM-4.5's modules are transformers' own `MtpModel`. MiniMax-M2 has none there: its modules are `MiniMaxM2DecoderLayer`
between [enorm(embedding) | hnorm(hidden)] and the module's norm.
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
from transformers import Glm4MoeForCausalLM, MiniMaxM2ForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.minimax_m2.modeling_minimax_m2 import (
    MiniMaxM2DecoderLayer,
    MiniMaxM2RMSNorm,
    MiniMaxM2SparseMoeBlock,
)

from .choices import Choices, gaps, last_gaps
from .modules_cases import FIRST, ModulesCase
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

__all__ = ["arrays_of", "load", "written"]

Array = np.ndarray[Any, Any]

CLEAR = 0.05
"""Least distance of scores, of experts and of groups, at the rows of tokens that are chosen: above what BF16 stores do
to it, which arrays_of makes sure of."""


class MiniMaxModule(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = MiniMaxM2RMSNorm(h, eps=eps), MiniMaxM2RMSNorm(h, eps=eps)
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.mtp_block = MiniMaxM2DecoderLayer(config, 0)
        self.post_norm = MiniMaxM2RMSNorm(h, eps=eps)


class Modules:
    """`layers`: each with enorm, hnorm, eh_proj, mtp_block and post_norm."""

    def __init__(self, folder: Path, target: Any) -> None:
        self.target, self.after_norm = target, isinstance(target, Glm4MoeForCausalLM)
        config = target.config
        if self.after_norm:
            self.mtp: MtpModel | None = MtpModel.from_pretrained(target).double().eval()
            self.layers = self.mtp.layers
            return
        self.mtp = None
        stored = load_file(folder / "model.safetensors")
        count = config.num_mtp_modules
        self.layers = nn.ModuleList([MiniMaxModule(config) for _ in range(count)])
        for i, module in enumerate(self.layers):
            prefix = f"model.layers.{config.num_hidden_layers + i}."
            own = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
            module.load_state_dict(_minimax_names(own, config.num_local_experts))
        self.layers.double().eval()

    def run(self, i: int, ids: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(logits of the last row [copies, V], what the next module reads [copies, rows, h]) of module i over ids
        [copies, rows] and hidden [copies, rows, h] at positions [1, rows]."""
        if self.mtp is not None:
            out = self.mtp.forward_layer(i, hidden, positions, None, input_ids=ids)
            return self.target.lm_head(out[:, -1]), out
        module, model = self.layers[i], self.target.model
        x = torch.cat((module.enorm(model.embed_tokens(ids)), module.hnorm(hidden)), dim=-1)
        x = module.eh_proj(x)
        rows = ids.shape[1]
        mask = torch.full((rows, rows), -torch.inf, dtype=x.dtype).triu(1)
        out = module.mtp_block(x, position_embeddings=model.rotary_emb(x, positions), attention_mask=mask[None, None])
        return self.target.lm_head(module.post_norm(out)[:, -1]), out

    def chain(
        self, tokens: list[int], hidden: Tensor, ids: list[int] | None = None
    ) -> tuple[Tensor, Tensor, list[int]]:
        """The drafts after all of `tokens`, every module over all its rows: (logits [copies, n, V], outputs of the last
        rows [copies, n, h], ids [n]). hidden [copies, >= rows, h] is the target's. `ids`, where given, are drafted
        instead of the best."""
        rows = len(tokens) - 1
        state, positions = hidden[:, :rows], torch.arange(1, rows + 1)[None]
        known, logits, outs = list(tokens), [], []
        for i in range(len(self.layers)):
            taken = torch.tensor([known[i + 1 :]]).expand(len(hidden), -1)
            found, state = self.run(i, taken, state, positions + i)
            logits.append(found)
            outs.append(state[:, -1])
            known.append(int(found[0].argmax()) if ids is None else ids[i])
        return torch.stack(logits, 1), torch.stack(outs, 1), known[len(tokens) :]


def _minimax_names(own: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """A module's tensors as the decoder layer has them: experts in two stacks."""
    prefix = "block_sparse_moe.experts."
    outside = ("enorm.", "hnorm.", "eh_proj.")
    found = {}
    for name, value in own.items():
        if name.startswith("norm."):
            found[f"post_{name}"] = value
        elif name.startswith(outside):
            found[name] = value
        elif not name.startswith(prefix):
            found["mtp_block." + name.replace("block_sparse_moe.", "mlp.")] = value
    parts = [[own[f"{prefix}{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(experts)]
    found["mtp_block.mlp.experts.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in parts])
    found["mtp_block.mlp.experts.down_proj"] = torch.stack([down for _, _, down in parts])
    return found


def load(folder: Path) -> tuple[Any, Modules]:
    """A checkpoint's target and modules. RuntimeError where a tensor was not taken as it is."""
    glm = '"glm4_moe"' in (folder / "config.json").read_text(encoding="utf-8")
    target, info = (Glm4MoeForCausalLM if glm else MiniMaxM2ForCausalLM).from_pretrained(
        folder,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    layers = target.config.num_hidden_layers
    foreign = [name for name in info.pop("unexpected_keys") if int(name.split(".")[2]) < layers]
    if wrong := foreign or {key: value for key, value in info.items() if value}:
        raise RuntimeError(f"{folder} is not loaded as it is: {wrong}")
    # transformers knows the modules of a published checkpoint by the number of its layers.
    count = target.config.num_nextn_predict_layers if glm else 0
    target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + i}\." for i in range(count)]
    target.eval()
    return target, Modules(folder, target)


def written(target: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[int], list[list[int]], Tensor]:
    """What `generate(use_mtp=True)` writes after a prompt, that included, and what its MTPCandidateGenerator, which
    keeps every module's cache full, drafted: (tokens, lengths of what was before each draft, drafts, logits)."""
    at: list[int] = []
    drafts: list[list[int]] = []
    logits: list[Tensor] = []
    plain = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, input_ids, *args, **kwargs)
        if found[1] is not None:
            at.append(input_ids.shape[1])
            drafts.append(found[0][0, input_ids.shape[1] :].tolist())
            logits.append(found[1][0].double())
        return found

    MTPCandidateGenerator.get_candidates = recorded
    try:
        out = target.generate(torch.tensor([prompt]), use_mtp=True, max_new_tokens=new_tokens, do_sample=False)
    finally:
        MTPCandidateGenerator.get_candidates = plain
    return out[0].tolist(), at, drafts, torch.stack(logits)


@contextmanager
def disturbed(blocks: list[nn.Module], others: list[nn.Module], generator: torch.Generator) -> Iterator[None]:
    """As `huggingface.disturbed`, of layers without a gate on the attention's output, which is stored once."""
    wrong = wrong_by(generator)

    def after(module: nn.Module, stores: int = 1) -> Any:
        return module.register_forward_hook(lambda _module, _args, out: wrong(out, stores))

    def before(module: nn.Module, stores: int = 1) -> Any:
        return module.register_forward_pre_hook(lambda _module, args: (wrong(args[0], stores), *args[1:]))

    def turned(_module: nn.Module, _args: Any, out: Tensor) -> Tensor:
        return wrong(out, 2)  # projection and rotation, where no norm lies between

    hooks = [after(module) for module in others]
    patched: list[nn.Module] = []
    for block in blocks:
        attention, mlp = block.self_attn, block.mlp
        once = [block.input_layernorm, attention.v_proj, attention.o_proj, block.post_attention_layernorm]
        if hasattr(attention, "q_norm"):
            once += [attention.q_proj, attention.k_proj]
            hooks += [after(attention.q_norm, 2), after(attention.k_norm, 2)]
        else:
            hooks += [module.register_forward_hook(turned) for module in (attention.q_proj, attention.k_proj)]
        hooks.append(before(attention.o_proj))
        if isinstance(mlp, (Glm4MoeMoE, MiniMaxM2SparseMoeBlock)):
            mlp.gate.forward = partial(_router_forward, mlp.gate, wrong)
            mlp.experts.forward = partial(experts_forward, mlp.experts, wrong)
            patched += [mlp.gate, mlp.experts]
            once.append(mlp)
            mlp = getattr(mlp, "shared_experts", None)
        if mlp is not None:
            once += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
            hooks.append(before(mlp.down_proj))
        hooks += [after(module) for module in once]
        hooks.append(after(block, 2))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in patched:
            del module.forward


def _router_forward(gate: Any, wrong: Wrong, x: Tensor, *bias: Tensor) -> Any:
    """The router's own forward with its logits stored: on the logits, with an identity in place of its weights."""
    logits = wrong(nn.functional.linear(x.reshape(-1, x.shape[-1]), gate.weight.to(x.dtype)), 1)
    weight, width = gate.weight, gate.hidden_dim
    gate.weight = nn.Parameter(torch.eye(len(weight), dtype=x.dtype))
    gate.hidden_dim = len(weight)
    try:
        return type(gate).forward(gate, logits, *bias)
    finally:
        gate.weight, gate.hidden_dim = weight, width


@torch.no_grad()
def arrays_of(folder: Path, case: ModulesCase, spreads: bool = True) -> dict[str, Array]:
    """The arrays of a fixture, named as those of `huggingface.arrays_of`. Without `spreads` those are zero.

    RuntimeError where a router's choice at a row that all rest on is not clear, or transformers' own loop drafts
    otherwise than its modules over all rows.
    """
    batches = COPIES // AT_ONCE if spreads else 0
    target, modules = load(folder)
    blocks, drafters = list(target.model.layers), [layer.mtp_block for layer in modules.layers]
    outside = [m for layer in modules.layers for m in (layer.enorm, layer.hnorm, layer.eh_proj, layer.post_norm)]
    choices, generator = Choices([*blocks, *drafters]), torch.Generator().manual_seed(0)
    streams: list[Tensor] = []
    target.model.norm.register_forward_hook(
        lambda _module, args, out: streams.append(out if modules.after_norm else args[0])
    )

    def target_run(tokens: list[int], copies: int) -> tuple[Tensor, Tensor, list[Any]]:
        """(logits, hidden for the modules, routers' calls)"""
        logits = target(torch.tensor([tokens]).expand(copies, -1), use_cache=False).logits
        return logits, streams.pop(), choices.take(logits)

    sequences, loops = case.sequences, []
    if case.new_tokens:
        loops = [written(target, prompt, case.new_tokens) for prompt in sequences]
        sequences = [found[0] for found in loops]
        streams.clear()
        choices.found.clear()
    elif case.clear:
        ready = partial(_clear, target_run, modules, choices)
        sequences = [clear_tokens(ready, tokens, case.clear) for tokens in sequences]

    parts, inputs = [], []
    for tokens in sequences:
        logits, hidden, calls = target_run(tokens, 1)
        inputs.append(hidden[0].to(torch.bfloat16))

        def run_target(tokens: list[int] = tokens, exact: list[Any] = calls) -> tuple[Tensor, ...]:
            logits, _, calls = target_run(tokens, AT_ONCE)
            return logits, gaps(calls, exact)

        exact = logits[0], gaps(calls, calls)[0]
        with disturbed(blocks, [target.model.norm], generator):
            parts.append((exact, spread_of(run_target, exact, batches)))
    (logits, gap), (wide, gap_wide) = joined(parts)
    if not bool((gap > SIGMAS * gap_wide).all()):
        raise RuntimeError("a router's choice is not clear in spite of the margin")
    found = {
        "target_tokens": np.concatenate(sequences).astype(np.int32),
        "target_lengths": np.array([len(tokens) for tokens in sequences], np.int32),
        "target_decided": np.array([len(prompt) if loops else 0 for prompt in case.sequences], np.int32),
        **summary_of("target", logits, wide, case.target_step),
        **routing_of("target", gap, gap_wide),
    }

    parts, ids = [], []
    for at, tokens in enumerate(sequences):
        given = inputs[at][None].double()
        for base in range(FIRST, len(tokens)):
            logits, out, picked = modules.chain(tokens[: base + 1], given)
            calls = choices.take(logits)
            _check_against_mtp_model(modules, tokens[: base + 1], given, logits)
            choices.found.clear()

            def run_head(
                tokens: list[int] = tokens[: base + 1],
                given: Tensor = given,
                ids: list[int] = picked,
                exact: list[Any] = calls,
            ) -> tuple[Tensor, ...]:
                logits, out, _ = modules.chain(tokens, given.expand(AT_ONCE, -1, -1), ids)
                return logits, out, last_gaps(choices.take(logits), exact)

            exact = logits[0], out[0], last_gaps(calls, calls)[0]
            with disturbed(drafters, outside, generator):
                parts.append((exact, spread_of(run_head, exact, batches)))
            ids.append(picked)
    (logits, out, gap), (wide, out_wide, gap_wide) = joined(parts)
    rows = summary_of("head", logits, wide, case.head_step)
    found |= {
        "head_first": np.array([FIRST] * len(sequences), np.int32),
        "head_hidden_in": torch.cat(inputs).view(torch.int16).numpy().view(np.uint16),
        "head_ids": np.array(ids, np.int32).reshape(-1),
        "head_hidden": out[torch.from_numpy(rows["head_full_rows"]).long()].float().numpy(),
        "head_hidden_spread_rms": out_wide.square().mean(-1).sqrt().float().numpy(),
        **rows,
        **routing_of("head", gap, gap_wide),
    }
    if loops:
        _check_loops(target, modules, loops)
        found["loop_steps"] = np.array([len(at) for _, at, _, _ in loops], np.int32)
        found["loop_positions"] = np.concatenate([at for _, at, _, _ in loops]).astype(np.int32) - 1
        found["loop_drafts"] = np.concatenate([drafts for _, _, drafts, _ in loops]).astype(np.int32).reshape(-1)
    return found


def _check_against_mtp_model(modules: Modules, tokens: list[int], hidden: Tensor, logits: Tensor) -> None:
    """The drafting loop here is that of `MtpModel.forward`."""
    if modules.mtp is None:
        return
    rows = len(tokens) - 1
    _, found, _ = modules.mtp(
        input_ids=torch.tensor([tokens[1:]]),
        last_hidden_states=hidden[:, :rows],
        attention_mask=None,
        position_ids=torch.arange(1, rows + 1)[None],
        mtp_cache=None,
    )
    if not torch.equal(found, logits):
        raise RuntimeError("the modules' logits are not those of MtpModel.forward")


def _check_loops(target: Any, modules: Modules, loops: list[Any]) -> None:
    """transformers' generate, with its caches, drafts what the modules draft over all rows."""
    for tokens, at, drafts, logits in loops:
        hidden = target(torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states[-1]
        for length, ids, row in zip(at, drafts, logits, strict=True):
            wanted, _, picked = modules.chain(tokens[:length], hidden)
            if picked != ids or not torch.allclose(wanted[0], row, rtol=0, atol=1e-5):
                raise RuntimeError(f"after {length} tokens generate(use_mtp=True) drafts {ids}, the modules {picked}")


def _clear(run: Any, modules: Modules, choices: Choices, tokens: list[int]) -> bool:
    """Whether every choice is clear that later rows rest on: the target's at the last of the tokens, and the modules'
    at rows of these tokens."""
    _, hidden, calls = run(tokens, 1)
    clear = bool((gaps(calls, calls)[0, -1] > CLEAR).all())
    state = hidden.to(torch.bfloat16).double()
    for i in range(min(len(modules.layers), len(tokens) - 1) if clear else 0):
        ids = torch.tensor([tokens[i + 1 :]])
        _, state = modules.run(i, ids, state[:, : ids.shape[1]], torch.arange(i + 1, len(tokens))[None])
        calls = choices.take(state)
        clear = clear and bool((gaps(calls, calls)[0, -1] > CLEAR).all())
    return clear
