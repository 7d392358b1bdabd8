# SPDX-License-Identifier: AGPL-3.0-only
"""The two phases of training.

1. Trunk and draft layer together on text: cross-entropy of the trunk, and for each of three chained drafts the mean of
   cross-entropy to the text and to the trunk's own distribution (detached).
2. The trunk frozen, the draft layer distilled from it, on text and on what the trunk writes after train prompts: the
   trunk's greedy choices are what drafts are held to.

A chain is trained as the engine runs it: draft j reads the draft layer's own hidden and sees the cache of first drafts
(DemoModel.draft_outputs). The weights kept are an exponential moving average, at the step that validation files liked
best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from demo_training.base import CHAIN, DemoModel

__all__ = ["PROMPT", "Trainer"]

Parameters = list[tuple[str, torch.nn.Parameter]]

JOINT_WEIGHTS = (0.4, 0.25, 0.15)
DISTILL_WEIGHTS = (1.0, 0.8, 0.6)
PROMPT = 96
"""Tokens of text at the start of each generated sequence."""
_SPAN = 64
"""Generated sequences change between sampled and greedy tokens after as many."""


class Trainer:
    """Both phases on one model. `log` keeps (phase, step, name, value) of every validation."""

    def __init__(self, model: DemoModel, train: Tensor, validation: Tensor, validation_prompts: Tensor) -> None:
        """Token streams [N] on the model's device; prompts [M, PROMPT]."""
        self.model, self.settings = model, model.settings
        self.device = train.device
        self.train = train
        window = self.settings.window
        count = min(self.settings.validation_rows // 4, (len(validation) - 1) // window)
        self.validation = validation[: count * window].view(count, window)
        self.validation_prompts = validation_prompts
        self.generator = torch.Generator().manual_seed(self.settings.seed)
        self.log: list[dict[str, float | str]] = []
        self.done: dict[str, int] = {}
        """Steps of each phase."""
        self.started = time.monotonic()

    def windows(self, stream: Tensor, rows: int, length: int) -> Tensor:
        """Random windows [rows, length] of a stream [N]."""
        starts = torch.randint(len(stream) - length + 1, (rows, 1), generator=self.generator)
        return stream[(starts + torch.arange(length)).to(stream.device)]

    def bases(self, step: int) -> slice | None:
        """The rows that whole chains are made for in a step of training."""
        every = self.settings.chain_step
        return None if every == 1 else slice(step % every, None, every)

    def autocast(self) -> torch.autocast:
        """BF16 products; on the CPU, where they are slow, FP32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    # Phase 1

    def joint(self) -> None:
        s = self.settings
        best: tuple[float, dict[str, Tensor]] | None = None
        parameters = list(self.model.named_parameters())
        for step, average in self._optimise("joint", parameters, s.steps, s.minutes, s.lr, self._joint_loss):
            loss = self._validate_joint(step, average)
            if best is None or loss < best[0]:
                best = loss, {name: value.clone() for name, value in average.items()}
        self._keep(best)

    def _joint_loss(self, step: int) -> Tensor:
        ids = self.windows(self.train, self.settings.batch, self.settings.window)
        losses = self._joint_losses(ids, self.bases(step))
        return torch.stack(losses).sum() + self.settings.balance * self.model.take_balance()

    def _joint_losses(self, ids: Tensor, bases: slice | None = None) -> list[Tensor]:
        """The trunk's cross-entropy, then the weighted loss of each draft; whole chains at `bases` (None: all)."""
        hidden = self.model.hidden(ids)
        logits = self.model.logits(hidden)
        losses = [functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())]
        teacher = logits.detach().softmax(-1)
        rows = ids.shape[1] - CHAIN
        for j, state in enumerate(self.model.draft_outputs(ids, hidden, bases), 1):
            draft = self.model.draft_logits(state).log_softmax(-1)
            at = slice(None) if bases is None or j == 1 else bases
            soft = -(teacher[:, j : j + rows][:, at] * draft).sum(-1).mean()
            text = ids[:, j + 1 : j + 1 + rows][:, at]  # one less where the last guess lies behind the window
            hard = functional.nll_loss(draft[:, : text.shape[1]].flatten(0, 1), text.flatten())
            losses.append(JOINT_WEIGHTS[j - 1] * (soft + hard) / 2)
        return losses

    @torch.no_grad()
    def _validate_joint(self, step: int, average: dict[str, Tensor]) -> float:
        with _Weights(self.model, average), self.autocast():
            total = torch.stack(
                [torch.stack(self._joint_losses(part)) for part in self.validation.split(self.settings.batch)]
            ).mean(0)
        self._say("joint", step, trunk_loss=total[0].item(), loss=total.sum().item())
        return total.sum().item()

    # Phase 2

    def distil(self) -> None:
        s = self.settings
        self.model.set_dropout(s.distill_dropout)
        self.generated = self._generate(self._train_prompts(s.generated), s.generated_length, sample=True)
        self.written = self._generate(self.validation_prompts, PROMPT + s.new_tokens + CHAIN, sample=False)
        self._say("generate", 0, tokens=float(self.generated.numel()))
        parameters = [(name, p) for name, p in self.model.named_parameters() if self.model.is_draft(name)]
        best: tuple[float, dict[str, Tensor]] | None = None
        phase = self._optimise(
            "distil", parameters, s.distill_steps, s.distill_minutes, s.distill_lr, self._distil_loss
        )
        for step, average in phase:
            length = self._validate_drafts(step, average)
            if best is None or length > best[0]:
                best = length, {name: value.clone() for name, value in average.items()}
        self._keep(best)

    def _train_prompts(self, count: int) -> Tensor:
        return self.windows(self.train, count, PROMPT)

    @torch.no_grad()
    def _generate(self, prompts: Tensor, length: int, sample: bool) -> Tensor:
        """Sequences [M, length] that continue the prompts [M, P], greedily; with `sample`, in turns with sampling at
        temperature 1, so that greedy spans also start behind text that is not in the corpus."""
        self.model.eval()
        generator = torch.Generator(self.device).manual_seed(self.settings.seed + 1)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        done = []
        with self.autocast():
            for start in prompts.split(4096):
                ids, tokens = start, [start]
                cache = self.model.cache(self.settings.layers, len(start), length, dtype)
                turn = torch.arange(len(start), device=self.device) % 2 * _SPAN
                for position in range(start.shape[1], length):
                    logits = self.model.logits(self.model.hidden(ids, cache)[:, -1:])[:, 0]
                    ids = logits.argmax(-1, keepdim=True)
                    if sample:
                        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
                        sampled = (position + turn) // _SPAN % 2 == 0
                        ids = torch.where(sampled[:, None], drawn, ids)
                    tokens.append(ids)
                done.append(torch.cat(tokens, 1))
        self.model.train()
        return torch.cat(done)

    def _distil_loss(self, step: int) -> Tensor:
        s = self.settings
        if step % 3 == 0:
            ids = self.windows(self.train, s.batch, s.window)
        else:
            rows = min(len(self.generated), s.batch * s.window // self.generated.shape[1])
            picks = torch.randint(len(self.generated), (rows,), generator=self.generator)
            ids = self.generated[picks.to(self.device)]
        with torch.no_grad():
            self.model.eval()
            hidden = self.model.hidden(ids)
            logits = self.model.logits(hidden)
            self.model.train()
        teacher, choice = logits.softmax(-1), logits.argmax(-1)
        loss = torch.zeros((), device=self.device)
        rows, bases = ids.shape[1] - CHAIN, self.bases(step)
        for j, state in enumerate(self.model.draft_outputs(ids, hidden, bases), 1):
            draft = self.model.draft_logits(state).log_softmax(-1)
            at = slice(None) if bases is None or j == 1 else bases
            soft = -(teacher[:, j : j + rows][:, at] * draft).sum(-1).mean()
            hard = functional.nll_loss(draft.flatten(0, 1), choice[:, j : j + rows][:, at].flatten())
            loss = loss + DISTILL_WEIGHTS[j - 1] * (soft + hard) / 2
        return loss + s.balance * self.model.take_balance()

    @torch.no_grad()
    def _validate_drafts(self, step: int, average: dict[str, Tensor]) -> float:
        """The mean accepted length on the trunk's greedy continuations of validation prompts, each position a base."""
        lengths = []
        with _Weights(self.model, average), self.autocast():
            for ids in self.written.split(256):
                hidden = self.model.hidden(ids)
                choice = self.model.logits(hidden).argmax(-1)
                alive, length = None, torch.ones(())
                for j, state in enumerate(self.model.draft_outputs(ids, hidden), 1):
                    rows = state.shape[1]
                    hit = self.model.draft_logits(state).argmax(-1) == choice[:, j : j + rows]
                    alive = hit if alive is None else alive & hit
                    length = length + alive[:, PROMPT:].float().mean().cpu()
                lengths.append(length)
        mean = torch.stack(lengths).mean().item()
        self._say("distil", step, accepted_length=mean)
        return mean

    # Both

    def _optimise(
        self,
        phase: str,
        parameters: Parameters,
        steps: int,
        minutes: float,
        peak: float,
        loss_of: Callable[[int], Tensor],
    ) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """AdamW with warm-up and cosine, for `steps` steps or, where not 0, `minutes`, whichever end first; yields
        (step, averaged weights) at each validation and at the end."""
        s = self.settings
        matrices = [p for _, p in parameters if p.ndim >= 2]
        vectors = [p for _, p in parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": s.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimiser = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=self.device.type == "cuda")
        tracked = {name: p.data for name, p in parameters} | self.model.tracked(phase == "distil")
        live = list(tracked.values())
        average = {name: value.clone() for name, value in tracked.items()}
        self.model.train()
        recent = torch.zeros((), device=self.device)
        started = time.monotonic()
        for step in range(steps):
            warm = min(1.0, (step + 1) / s.warmup)
            spent = (time.monotonic() - started) / (60 * minutes) if minutes else 0.0
            last = step + 1 == steps or spent >= 1
            rate = peak * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, max(step / steps, spent))))
            for group in optimiser.param_groups:
                group["lr"] = rate
            self.model.before_step()
            with self.autocast():
                loss = loss_of(step)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for _, p in parameters], 1.0)
            optimiser.step()
            # A young average forgets its start faster.
            decay = min(s.ema, (step + 1) / (step + 10))
            torch._foreach_lerp_(list(average.values()), live, 1 - decay)
            recent = recent.lerp(loss.detach(), 0.1 if step else 1.0)
            if (step + 1) % s.validate_every == 0 or last:
                if not torch.isfinite(recent):
                    raise SystemExit(f"the {phase} loss is {recent.item()} after step {step + 1}")
                self.done[phase] = step + 1
                self._say(phase, step + 1, train_loss=recent.item())
                yield step + 1, average
            if last:
                break

    def _keep(self, best: tuple[float, dict[str, Tensor]] | None) -> None:
        assert best is not None
        self.model.load_state_dict(best[1], strict=False)

    def _say(self, phase: str, step: int, **values: float) -> None:
        self.log.append({"phase": phase, "step": float(step), **values})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        print(f"{time.monotonic() - self.started:6.1f} s  {phase} {step:5d}  {shown}", flush=True)


class _Weights:
    """Within the block the model evaluates with other weights and without dropout; then it trains on with its own."""

    def __init__(self, model: DemoModel, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def __enter__(self) -> None:
        current = self.model.state_dict()
        self.saved = {name: current[name].detach().clone() for name in self.weights}
        self.model.load_state_dict(self.weights, strict=False)
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.load_state_dict(self.saved, strict=False)
        self.model.train()
