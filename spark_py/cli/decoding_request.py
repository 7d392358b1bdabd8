# SPDX-License-Identifier: AGPL-3.0-only
"""What `spark-py demo` and `spark-py generate` can be asked for: their options, and the runs that these mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import click

from spark_py.model.checkpoint import FAMILIES
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.sizes import count

__all__ = ["Request", "decoding_options"]

TABLE_DRAFTS = (0, 1, 2, 3)
"""The rows of the table, where --num-drafts does not ask for one run."""
POLICIES = ((RowPolicy.SEED, False), (RowPolicy.VERIFIED, False), (RowPolicy.VERIFIED, True))
"""(row policy, refeed) of --row-policy all. The first is what is run unless something else is asked for."""
_ALL = "all"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

    `concurrency`: how many sequences run at once, in each run of the table. `quantization`: of the draft head.
    `num_drafts` None: all of TABLE_DRAFTS. `row_policy` "all": each of POLICIES; None: the first of them, and with
    `every_policy`, if neither drafts nor refeed are chosen, one run more of each other policy at the most drafts.
    """

    family: str
    backend: Literal["auto", "host", "emulated", "cuda"]
    prompt: str | None
    max_new_tokens: int
    num_drafts: int | None
    row_policy: str | None
    refeed: bool
    drafter_prefill: bool
    every_policy: bool = False
    quantization: MtpQuantization = MtpQuantization.BF16
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
        return self.num_drafts is not None and self.row_policy != _ALL and len(self.concurrency) == 1

    @property
    def wanted(self) -> tuple[int, ...]:
        """Drafts a step of each run."""
        return TABLE_DRAFTS if self.num_drafts is None else (self.num_drafts,)

    def plan(self) -> list[tuple[ModelLevers, tuple[int, ...]]]:
        """The draft heads' switches, and the runs' drafts with each of them."""
        first, *others = POLICIES
        if self.row_policy == _ALL:
            # Without drafts there are no rows that could differ.
            drafts = tuple(n for n in self.wanted if n)
            pairs = [(first, self.wanted), *((policy, drafts) for policy in others if drafts)]
        elif self.every_policy and self.row_policy is None and self.num_drafts is None and not self.refeed:
            pairs = [(first, self.wanted), *((policy, self.wanted[-1:]) for policy in others)]
        else:
            chosen = first[0] if self.row_policy is None else RowPolicy(self.row_policy)
            pairs = [((chosen, self.refeed), self.wanted)]
        most = max(self.concurrency)
        return [
            (ModelLevers(self.drafter_prefill, row_policy=policy, refeed=refeed, mtp_max_seqs=most), drafts)
            for (policy, refeed), drafts in pairs
        ]


def decoding_options(command: Command, every_policy: bool = False) -> Command:
    """The options of both commands; they arrive as one Request in `request`. `every_policy` as there."""

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
        mtp_quantization: str,
        concurrency: tuple[int, ...],
        **kwargs: Any,
    ) -> Any:
        request = Request(
            family, backend, prompt, max_new_tokens, num_drafts, row_policy, refeed, not no_drafter_prefill,
            every_policy, MtpQuantization.parse(mtp_quantization), concurrency,
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
            f"By default seed{', and the others with 3 drafts' if every_policy else ''}.",
        ),
        click.option("--refeed", is_flag=True, help="Give the drafter's rows the target's hidden once it is known."),
        click.option("--no-drafter-prefill", is_flag=True, help="The drafter does not see the prompt."),
        click.option(
            "--mtp-quantization",
            type=click.Choice([quant.value for quant in reversed(MtpQuantization)], case_sensitive=False),
            default=MtpQuantization.BF16.value,
            show_default=True,
            help="How the draft head stores its weights.",
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
