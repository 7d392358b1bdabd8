# SPDX-License-Identifier: AGPL-3.0-only
"""What `spark-py demo` and `spark-py generate` can be asked for: their options, and the runs that these mean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import click

from spark_py.model.checkpoint import FAMILIES
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.sizes import count

__all__ = ["HeadRuns", "Request", "decoding_options"]

TABLE_DRAFTS = (0, 1, 2, 3)
"""The rows of the table, where --num-drafts does not ask for one run."""
POLICIES = ((RowPolicy.SEED, False), (RowPolicy.VERIFIED, False), (RowPolicy.VERIFIED, True))
"""(row policy, refeed) of --row-policy all. The first is what is run unless something else is asked for."""
_ALL = "all"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class HeadRuns:
    """A draft head, and the drafts a step of each run with it."""

    quantization: MtpQuantization
    levers: ModelLevers
    drafts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    `concurrency`: how many sequences run at once, in each run of the table. `quantizations`: of the draft head, each a
    set of runs; none: BF16. `num_drafts` None: all of TABLE_DRAFTS. `row_policy` "all": each of POLICIES; None: the
    first of them. With `compare`, if neither drafts nor row policy nor refeed are chosen, one run more at the most
    drafts for each other policy; if no quantisation is chosen either, for each other one that the checkpoint offers,
    and, since only a BF16 head sees the prompt, for a BF16 head that does not.
    """

    family: str
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
        several = self.row_policy == _ALL or len(self.concurrency) > 1 or len(self.quantizations) > 1
        return self.num_drafts is not None and not several

    @property
    def wanted(self) -> tuple[int, ...]:
        """Drafts a step of each run."""
        return TABLE_DRAFTS if self.num_drafts is None else (self.num_drafts,)

    def plan(self, offered: Sequence[MtpQuantization]) -> list[HeadRuns]:
        """The draft heads, and the runs with each of them; the first has the run without drafts, if one is wanted.
        `offered`: quantisations that the checkpoint's head may have, BF16 first."""
        first, *others = POLICIES
        most = self.wanted[-1:]
        free = self.compare and self.row_policy is None and self.num_drafts is None and not self.refeed
        if self.row_policy == _ALL:
            pairs = [(policy, self.wanted) for policy in POLICIES]
        elif free:
            pairs = [(first, self.wanted), *((policy, most) for policy in others)]
        else:
            pairs = [((RowPolicy(self.row_policy or first[0]), self.refeed), self.wanted)]
        chosen = self.quantizations or (MtpQuantization.BF16,)
        heads = [self._head(quant, *policy, drafts) for quant in chosen for policy, drafts in pairs]
        others_offered = [quant for quant in offered if quant is not MtpQuantization.BF16]
        if free and not self.quantizations and others_offered:
            if self.drafter_prefill:
                unfed = self._head(MtpQuantization.BF16, *first, most)
                heads.append(replace(unfed, levers=replace(unfed.levers, drafter_prefill=False)))
            heads += [self._head(quant, *first, most) for quant in others_offered]
        # Without drafts there is nothing that could differ.
        rest = [replace(head, drafts=tuple(n for n in head.drafts if n)) for head in heads[1:]]
        return list(dict.fromkeys([heads[0], *(head for head in rest if head.drafts)]))

    def _head(self, quant: MtpQuantization, policy: RowPolicy, refeed: bool, drafts: tuple[int, ...]) -> HeadRuns:
        prefill = self.drafter_prefill and quant.supports_drafter_prefill()
        levers = ModelLevers(prefill, row_policy=policy, refeed=refeed, mtp_max_seqs=max(self.concurrency))
        return HeadRuns(quant, levers, drafts)


def decoding_options(command: Command, compare: bool = False) -> Command:
    """The options of both commands; they arrive as one Request in `request`. `compare` as there."""

    @functools.wraps(command)
    def with_request(
        *args: Any,
        family: str,
        backend: Literal["auto", "host", "emulated", "cuda"],
        prompt: str | None,
        max_new_tokens: int,
        num_drafts: int | None,
        row_policy: str | None,
        refeed: bool,
        no_drafter_prefill: bool,
        mtp_quantization: tuple[str, ...],
        concurrency: tuple[int, ...],
        **kwargs: Any,
    ) -> Any:
        request = Request(
            family, backend, prompt, max_new_tokens, num_drafts, row_policy, refeed, not no_drafter_prefill,
            compare, tuple(dict.fromkeys(map(MtpQuantization.parse, mtp_quantization))), concurrency,
        )  # fmt: skip
        return command(*args, request=request, **kwargs)

    options = (
        click.option("--family", type=click.Choice(list(FAMILIES)), default="qwen3_next", show_default=True),
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
            f"By default seed{', and the others with 3 drafts' if compare else ''}.",
        ),
        click.option("--refeed", is_flag=True, help="Give the drafter's rows the target's hidden once it is known."),
        click.option("--no-drafter-prefill", is_flag=True, help="The drafter does not see the prompt."),
        click.option(
            "--mtp-quantization",
            type=click.Choice([quant.value for quant in reversed(MtpQuantization)], case_sensitive=False),
            multiple=True,
            help="How the draft head stores its weights; given several times, a run of each. By default bf16"
            f"{', and the others with 3 drafts' if compare else ''}.",
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
