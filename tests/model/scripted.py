# SPDX-License-Identifier: AGPL-3.0-only
"""Proposers that say what a test wants them to say, a checkpoint whose own head is often right, and greedy decoding
without the loop under test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spark_py.model.layer import DraftProposer, ForwardContext, ProposerState
from spark_py.model.target import DecoderTarget
from spark_py.runtime.gpu import DevicePtr, GpuBackend, StreamLike
from tests.model.tiny import BF16, Tiny, write_tiny

VOCAB, MAX_SEQ_LEN = 300, 96


class ScriptState:
    """What a scripted proposer was told: (position, last token) of each propose, and accepted counts."""

    def __init__(self) -> None:
        self.block_table: list[int] = []
        self.proposed: list[tuple[int, int]] = []
        self.asked: list[int] = []
        self.accepted: list[int] = []
        self.prompt: list[int] = []
        self.freed = False


class Scripted(DraftProposer):
    """Drafts `guess(position, num_drafts)`: what follows the token at `position`."""

    supports_drafter_prefill = True

    def __init__(self, guess: Callable[[int, int], list[int]]) -> None:
        self.guess = guess
        self.states: list[ScriptState] = []
        self.hiddens: list[tuple[int, np.ndarray[Any, Any]]] = []

    def alloc_state(self, gpu: GpuBackend) -> ScriptState:
        self.states.append(ScriptState())
        return self.states[-1]

    def free_state(self, gpu: GpuBackend, state: ProposerState) -> None:
        assert isinstance(state, ScriptState)
        state.freed = True

    def prefill_drafter(
        self,
        prompt_tokens: Sequence[int],
        hiddens: DevicePtr,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        hidden_stacks: DevicePtr | None = None,
    ) -> int:
        assert isinstance(state, ScriptState)
        state.prompt = list(prompt_tokens)
        return len(prompt_tokens) - 1

    def propose(
        self,
        last_token: int,
        target_hidden: DevicePtr,
        position: int,
        num_drafts: int,
        state: ProposerState,
        ctx: ForwardContext,
        stream: StreamLike,
        draft_embed_target: DevicePtr | None = None,
        grammar_bitmask: Any = None,
        target_hidden_stack: DevicePtr | None = None,
    ) -> list[int]:
        assert isinstance(state, ScriptState)
        assert len(state.accepted) == sum(1 for n in state.asked if n)
        row = np.empty(ctx.config.hidden_size, np.uint16)
        ctx.gpu.copy_d2h_on_stream(target_hidden, row.view(np.uint8), stream)
        self.hiddens.append((position, row))
        # As every drafter does.
        for ptr, size in ((ctx.buffers.hidden_states(), 2 * 64), (ctx.buffers.logits(), 2 * VOCAB)):
            ctx.gpu.memset_async(ptr, 0xFF, size, stream)
        drafts = self.guess(position, num_drafts)
        state.proposed.append((position, last_token))
        state.asked.append(len(drafts))
        return drafts

    def after_verify(self, num_accepted: int, state: ProposerState, stream: StreamLike) -> None:
        assert isinstance(state, ScriptState)
        state.accepted.append(num_accepted)


def plain(target: DecoderTarget, prompt: Sequence[int], count: int, eos: Sequence[int] = ()) -> list[int]:
    """Greedy decoding, token by token, without the loop under test."""
    state, stream = target.alloc_state(), target.gpu.default_stream()
    tokens = [target.prefill(prompt, state, stream).picks[-1]]
    while len(tokens) < count and tokens[-1] not in eos:
        tokens += target.decode(tokens[-1], state, stream).picks
    target.free_state(state)
    return tokens


def right(prompt: Sequence[int], tokens: Sequence[int]) -> Scripted:
    """Always right about `tokens`, which follow `prompt`; wrong past their end."""
    whole = [*prompt, *tokens]

    def guess(position: int, count: int) -> list[int]:
        return [whole[i] if i < len(whole) else 0 for i in range(position + 1, position + 1 + count)]

    return Scripted(guess)


def wrong(prompt: Sequence[int], tokens: Sequence[int]) -> Scripted:
    """Never right."""
    whole = [*prompt, *tokens]

    def guess(position: int, count: int) -> list[int]:
        return [(whole[i] + 1) % VOCAB if i < len(whole) else 0 for i in range(position + 1, position + 1 + count)]

    return Scripted(guess)


def noisy(prompt: Sequence[int], tokens: Sequence[int], rng: np.random.Generator, share: float) -> Scripted:
    """Right with probability `share`, else any id; sometimes fewer drafts than asked for, or none."""
    whole = [*prompt, *tokens]

    def guess(position: int, count: int) -> list[int]:
        found = []
        for i in range(position + 1, position + 1 + int(rng.integers(0, count + 1))):
            known = i < len(whole) and rng.random() < share
            found.append(whole[i] if known else int(rng.integers(0, VOCAB)))
        return found

    return Scripted(guess)


def write_drafting_tiny(folder: Path, rng: np.random.Generator, **overrides: Any) -> Tiny:
    """A checkpoint whose head is right about as often as it is wrong.

    Layers add little to the stream, so that the next token follows mostly from the last one, and the head's fc passes
    the embedding on: both then pick alike.
    """
    found = write_tiny(folder, rng, **overrides)
    h = found.raw["hidden_size"]
    for name, value in found.weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            found.weights[name] = (value.astype(np.float32) * 0.35).astype(BF16)
    found.weights["mtp.fc.weight"][:, :h] = np.eye(h)
    found.weights["mtp.fc.weight"][:, h:] *= BF16.type(0.1)
    found.weights["mtp.pre_fc_norm_embedding.weight"] *= BF16.type(0.1)
    found.weights["mtp.norm.weight"] = found.weights["model.norm.weight"]
    found.save()
    return found
