# SPDX-License-Identifier: AGPL-3.0-only
"""What `spark-py demo` and `spark-py generate` can be asked for: their options, and the runs that these mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

import click

from spark_py.model.checkpoint import FAMILIES, Family
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.sizes import count

__all__ = ["HeadRuns", "Request", "decoding_options"]

TABLE_DRAFTS = (0, 1, 2, 3)
"""The rows of the table, where --num-drafts does not ask for one run."""
POLICIES = ((RowPolicy.SEED, False), (RowPolicy.VERIFIED, False), (RowPolicy.VERIFIED, True))
"""(row policy, refeed) of --row-policy all; that of the family comes first."""
_ALL = "all"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class HeadRuns:
    """A draft head, and the drafts a step of each run with it. `quantization` and `hidden_mode` are None in families
    whose heads have no such choice."""

    quantization: MtpQuantization | None
    hidden_mode: HiddenMode | None
    levers: ModelLevers
    drafts: tuple[int, ...]

    @property
    def name(self) -> str:
        """What was chosen, in a word or two; "" where there was no choice."""
        return ", ".join(choice.value for choice in (self.quantization, self.hidden_mode) if choice is not None)


Form: TypeAlias = "tuple[MtpQuantization | None, HiddenMode | None]"


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    `family` None: the one that the checkpoint's config.json says. `concurrency`: how many sequences run at once, in
    each run of the table. `quantizations` and `hidden_modes`: of the draft head, each a set of runs; none: what the
    family has by default. `num_drafts` None: all of TABLE_DRAFTS. `row_policy` "all": each of POLICIES; None: the
    family's.

    With `compare`, if neither drafts nor row policy nor refeed are chosen, more runs at the most drafts: one for each
    other policy; if no quantisation is chosen either, one for each other one that the checkpoint offers, and, since
    only a BF16 head sees the prompt, one for a BF16 head that does not; if no hidden mode is chosen, with each mode one
    for each policy, and one for a head that does not see the prompt. Of several modules, whose policies differ in more
    than a row, each policy has a run for every number of drafts.
    """

    family: str | None
    backend: Literal["auto", "host", "emulated", "cuda"]
    prompt: str | None
    max_new_tokens: int
    num_drafts: int | None
    row_policy: str | None
    refeed: bool
    drafter_prefill: bool
    compare: bool = False
    quantizations: tuple[MtpQuantization, ...] = ()
    concurrency: tuple[int, ...] = (1,)
    hidden_modes: tuple[HiddenMode, ...] = ()

    def __post_init__(self) -> None:
        for n in self.concurrency:
            count("--concurrency", n)
        count("--max-new-tokens", self.max_new_tokens)
        if self.num_drafts is not None:
            count("--num-drafts", self.num_drafts, 0)
        if self.prompt == "":
            raise InvalidArgumentError("--prompt", "", "a text is needed")
        if self.refeed and self.row_policy == _ALL:
            raise InvalidArgumentError("--refeed", True, "--row-policy all has runs with it and without")

    @property
    def single(self) -> bool:
        """Whether one run is asked for."""
        several = any(len(each) > 1 for each in (self.concurrency, self.quantizations, self.hidden_modes))
        return self.num_drafts is not None and self.row_policy != _ALL and not several

    @property
    def wanted(self) -> tuple[int, ...]:
        """Drafts a step of each run."""
        return TABLE_DRAFTS if self.num_drafts is None else (self.num_drafts,)

    def check_choices(self, name: str, family: Family) -> None:
        """InvalidArgumentError for an option that heads of the family called `name` do not have."""
        for option, chosen, has in (
            ("--mtp-quantization", self.quantizations, family.quantizes),
            ("--hidden-mode", self.hidden_modes, family.hidden_modes),
        ):
            if chosen and not has:
                words = ", ".join(choice.value for choice in chosen)
                raise InvalidArgumentError(option, words, f"draft heads of {name} do not have this choice")

    def plan(
        self, family: Family, offered: Sequence[MtpQuantization] = (), modes: Sequence[HiddenMode] = ()
    ) -> list[HeadRuns]:
        """The draft heads, and the runs with each of them; the first has the run without drafts, if one is wanted.
        `offered`: quantisations that the checkpoint's head may have, BF16 first. `modes`: what it may read."""
        first, *others = sorted(POLICIES, key=lambda policy: policy != (family.row_policy, False))
        most = self.wanted[-1:]
        free = self.compare and self.row_policy is None and self.num_drafts is None and not self.refeed
        if self.row_policy == _ALL or (free and family.several_modules):
            pairs = [(policy, self.wanted) for policy in POLICIES]
        elif free:
            pairs = [(first, self.wanted), *((policy, most) for policy in others)]
        else:
            pairs = [((RowPolicy(self.row_policy or first[0]), self.refeed), self.wanted)]
        quants = self.quantizations or ((MtpQuantization.BF16,) if family.quantizes else (None,))
        read = self.hidden_modes or ((HiddenMode.REFERENCE,) if family.hidden_modes else (None,))
        forms = [(quant, mode) for quant in quants for mode in read]
        heads = [self._head(form, *policy, drafts) for form in forms for policy, drafts in pairs]
        if free:
            rest = [(quant, read[0]) for quant in offered if quant is not MtpQuantization.BF16]
            if rest and not self.quantizations:
                if not family.several_modules:
                    heads += self._unfed((MtpQuantization.BF16, read[0]), first, most)
                heads += [self._head(form, *first, most) for form in rest]
            for mode in () if self.hidden_modes else modes:
                if (quants[0], mode) not in forms:
                    heads += [self._head((quants[0], mode), *policy, most) for policy in (first, *others)]
                heads += self._unfed((quants[0], mode), first, most)
        # Without drafts there is nothing that could differ.
        drafting = [replace(head, drafts=tuple(n for n in head.drafts if n)) for head in heads[1:]]
        found = [heads[0], *(head for head in drafting if head.drafts)]
        if family.several_modules:
            found = [head if head.levers.refeed else _without_prompt(head) for head in found]
        return list(dict.fromkeys(found))

    def _head(self, form: Form, policy: RowPolicy, refeed: bool, drafts: tuple[int, ...]) -> HeadRuns:
        quant, mode = form
        prefill = self.drafter_prefill and (quant is None or quant.supports_drafter_prefill())
        levers = ModelLevers(prefill, row_policy=policy, refeed=refeed, mtp_max_seqs=max(self.concurrency))
        return HeadRuns(quant, mode, levers, drafts)

    def _unfed(self, form: Form, policy: tuple[RowPolicy, bool], drafts: tuple[int, ...]) -> list[HeadRuns]:
        """A head that does not see the prompt, where the others do."""
        if not self.drafter_prefill:
            return []
        return [_without_prompt(self._head(form, *policy, drafts))]


def _without_prompt(head: HeadRuns) -> HeadRuns:
    return replace(head, levers=replace(head.levers, drafter_prefill=False))


def decoding_options(command: Command, compare: bool = False, family: str | None = None) -> Command:
    """The options of both commands; they arrive as one Request in `request`. `compare` as there; `family` is the
    default of --family, None: what the checkpoint says."""

    @functools.wraps(command)
    def with_request(
        *args: Any,
        family: str | None,
        backend: Literal["auto", "host", "emulated", "cuda"],
        prompt: str | None,
        max_new_tokens: int,
        num_drafts: int | None,
        row_policy: str | None,
        refeed: bool,
        no_drafter_prefill: bool,
        mtp_quantization: tuple[str, ...],
        hidden_mode: tuple[str, ...],
        concurrency: tuple[int, ...],
        **kwargs: Any,
    ) -> Any:
        request = Request(
            family, backend, prompt, max_new_tokens, num_drafts, row_policy, refeed, not no_drafter_prefill,
            compare, tuple(dict.fromkeys(map(MtpQuantization.parse, mtp_quantization))), concurrency,
            tuple(dict.fromkeys(map(HiddenMode.parse, hidden_mode))),
        )  # fmt: skip
        return command(*args, request=request, **kwargs)

    options = (
        click.option(
            "--family",
            type=click.Choice(list(FAMILIES)),
            default=family,
            show_default=family or "that of config.json",
            help="Which checkpoint, and which code runs it.",
        ),
        click.option(
            "--backend",
            type=click.Choice(["auto", "host", "emulated", "cuda"]),
            default="auto",
            show_default=True,
            help="auto: the GPU where one answers, else the CPU.",
        ),
        click.option("--prompt", help="Text to go on from. By default one that comes with the checkpoint."),
        click.option("--max-new-tokens", type=int, default=64, show_default=True),
        click.option("--num-drafts", type=int, help="One run with so many drafts a step; by default 0, 1, 2 and 3."),
        click.option(
            "--row-policy",
            type=click.Choice([*(policy.value for policy in RowPolicy), _ALL]),
            help="Which of its rows the drafter keeps after a verify; all: each, and verified with --refeed. "
            f"By default {_default_policies()}{'; and the others with 3 drafts' if compare else ''}.",
        ),
        click.option("--refeed", is_flag=True, help="Give the drafter's rows the target's hidden once it is known."),
        click.option("--no-drafter-prefill", is_flag=True, help="The drafter does not see the prompt."),
        click.option(
            "--mtp-quantization",
            type=click.Choice([quant.value for quant in reversed(MtpQuantization)], case_sensitive=False),
            multiple=True,
            help="How the draft head stores its weights; given several times, a run of each. By default bf16"
            f"{', and the others with 3 drafts' if compare else ''}; for {_having('quantizes')}.",
        ),
        click.option(
            "--hidden-mode",
            type=click.Choice([mode.value for mode in HiddenMode], case_sensitive=False),
            multiple=True,
            help="What a head with hyper-connections reads of the target: its residual streams or the row that they "
            "collapse to; given several times, a run of each. By default reference"
            f"{', and the other with 3 drafts' if compare else ''}; for {_having('hidden_modes')}.",
        ),
        click.option(
            "--concurrency",
            type=int,
            multiple=True,
            default=(1,),
            show_default=True,
            help="Sequences at once, each with a prompt of its own unless --prompt is given; more than 4 have fewer "
            "drafts. Given several times: a run of each.",
        ),
        click.option("--json", "as_json", is_flag=True, help="The runs as one JSON object on stdout."),
    )
    for option in reversed(options):
        with_request = option(with_request)
    return with_request  # type: ignore[return-value]


def _having(choice: str) -> str:
    return ", ".join(name for name, family in FAMILIES.items() if getattr(family, choice))


def _default_policies() -> str:
    """ "seed for a, b; verified for c"."""
    by_policy = {
        policy: [name for name, family in FAMILIES.items() if family.row_policy is policy] for policy in RowPolicy
    }
    return "; ".join(f"{policy.value} for {', '.join(names)}" for policy, names in by_policy.items() if names)
