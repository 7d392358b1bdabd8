# SPDX-License-Identifier: AGPL-3.0-only
"""What `spark-py demo` and `spark-py generate` share: options, runs of the decoding loop, and how they are shown."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spark_py.model.checkpoint import FAMILIES, Checkpoint, open_checkpoint
from spark_py.model.config import ModelConfig
from spark_py.model.layer import DraftProposer
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import Generation, SpeculativeDecoder
from spark_py.runtime import open_backend
from spark_py.runtime.errors import ConfigError, InvalidArgumentError
from spark_py.runtime.sizes import count

__all__ = ["Request", "Run", "decode", "decoding_options", "default_prompt", "report"]

TABLE_DRAFTS = (0, 1, 2, 3)
"""The rows of the table, where --num-drafts does not ask for one run."""
POLICIES = ((RowPolicy.SEED, False), (RowPolicy.VERIFIED, False), (RowPolicy.VERIFIED, True))
"""(row policy, refeed) of --row-policy all. The first is what is run unless something else is asked for."""
_ALL = "all"
_MIN_WIDTH, _ROOMY = 120, 100

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for.

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

    def __post_init__(self) -> None:
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
        return self.num_drafts is not None and self.row_policy != _ALL

    @property
    def wanted(self) -> tuple[int, ...]:
        """Drafts a step of each run."""
        return TABLE_DRAFTS if self.num_drafts is None else (self.num_drafts,)

    def plan(self) -> list[tuple[ModelLevers, tuple[int, ...]]]:
        """The draft heads' switches, and the runs' drafts with each of them. One sequence drafts at a time."""
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
        return [
            (ModelLevers(self.drafter_prefill, row_policy=policy, refeed=refeed, mtp_max_seqs=1), drafts)
            for (policy, refeed), drafts in pairs
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the loop, under the names of the JSON output. `seconds` is the whole run, prefill included;
    `per_position[j]` counts the verify steps that accepted draft j."""

    backend: str
    device: str
    family: str
    quantization: str
    num_drafts: int
    row_policy: str
    refeed: bool
    drafter_prefill: bool
    prompt: str
    text: str
    token_ids: list[int]
    new_tokens: int
    finish: str
    verify_steps: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_accepted_length: float | None
    per_position: list[int]
    drafted_per_position: list[int]
    identical_to_greedy: bool
    seconds: float
    prefill_seconds: float
    tokens_per_second: float

    def as_dict(self) -> dict[str, Any]:
        """The keys of the JSON output."""
        return {name: getattr(self, name) for name in self.__slots__}


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
        **kwargs: Any,
    ) -> Any:
        request = Request(
            family, backend, prompt, max_new_tokens, num_drafts, row_policy, refeed, not no_drafter_prefill,
            every_policy,
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
        click.option("--json", "as_json", is_flag=True, help="The runs as one JSON object on stdout."),
    )
    for option in reversed(options):
        with_request = option(with_request)
    return with_request  # type: ignore[return-value]


def default_prompt(folder: Path) -> str:
    """The first text of the folder's prompts.json; InvalidArgumentError where it has none."""
    try:
        return str(json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["prompts"][0]["text"])
    except FileNotFoundError:
        raise InvalidArgumentError("--prompt", None, f"a text is needed, since {folder} has no prompts.json") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(folder / "prompts.json", f"has no first prompt with a text: {error}") from error


def decode(folder: Path, request: Request) -> list[Run]:
    """The runs that a request asks for, each compared with the plain run, which is made in any case."""
    from tokenizers import Tokenizer

    config = ModelConfig.from_file(folder)
    prompt = default_prompt(folder) if request.prompt is None else request.prompt
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError("--prompt", prompt, "text in Unicode is needed, and these bytes are none") from None
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(path, f"cannot be read: {error}") from error
    ids = list(tokenizer.encode(prompt).ids)
    if not ids:
        raise InvalidArgumentError("--prompt", prompt, "the tokenizer makes no token of it")
    length = len(ids) + request.max_new_tokens
    limit = config.max_position_embeddings
    if limit and length > limit:
        what = f"{len(ids)} of the prompt and --max-new-tokens {request.max_new_tokens}"
        raise InvalidArgumentError("tokens of the sequence", length, f"{what}; the model takes {limit}")
    # Room for the drafts of the last steps too, where the model has it.
    max_seq_len = length + max(request.wanted)
    max_seq_len = min(max_seq_len, limit) if limit else max_seq_len

    with (
        open_backend(request.backend) as gpu,
        open_checkpoint(folder, gpu, max_seq_len, request.family) as checkpoint,
    ):
        heads = [
            (levers, drafts, checkpoint.proposer(levers) if max(drafts) else None) for levers, drafts in request.plan()
        ]
        plain = _generate(checkpoint, None, 0, heads[0][0], ids, request)
        runs = []
        for levers, drafts, proposer in heads:
            for num_drafts in drafts:
                result = _generate(checkpoint, proposer, num_drafts, levers, ids, request) if num_drafts else plain
                runs.append(_run(request, checkpoint, levers, prompt, tokenizer, num_drafts, result, plain))
    return runs


def _generate(
    checkpoint: Checkpoint,
    proposer: DraftProposer | None,
    num_drafts: int,
    levers: ModelLevers,
    ids: list[int],
    request: Request,
) -> Generation:
    gpu = checkpoint.target.gpu
    what = f"{num_drafts} draft{'' if num_drafts == 1 else 's'}"
    if num_drafts:
        what += f" ({_rows(levers.row_policy.value, levers.refeed)})"
    click.echo(f"{what} on {gpu.name}, {gpu.device_name()} ...", err=True)
    decoder = SpeculativeDecoder(checkpoint.target, proposer, num_drafts, checkpoint.config.eos_token_ids, levers)
    return decoder.generate(ids, request.max_new_tokens)


def _rows(row_policy: str, refeed: bool) -> str:
    return row_policy + ("+refeed" if refeed else "")


def _run(
    request: Request,
    checkpoint: Checkpoint,
    levers: ModelLevers,
    prompt: str,
    tokenizer: Any,
    num_drafts: int,
    result: Generation,
    plain: Generation,
) -> Run:
    stats = result.stats
    return Run(
        backend=checkpoint.target.gpu.name,
        device=checkpoint.target.gpu.device_name(),
        family=request.family,
        quantization=checkpoint.quantization,
        num_drafts=num_drafts,
        row_policy=levers.row_policy.value,
        refeed=levers.refeed,
        drafter_prefill=levers.drafter_prefill,
        prompt=prompt,
        text=tokenizer.decode(result.tokens),
        token_ids=result.tokens,
        new_tokens=len(result.tokens),
        finish=result.finish,
        verify_steps=stats.verify_steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        acceptance_rate=stats.acceptance_rate,
        mean_accepted_length=stats.mean_accepted_length,
        per_position=stats.accepted_at,
        drafted_per_position=stats.drafted_at,
        identical_to_greedy=result.tokens == plain.tokens,
        seconds=result.seconds,
        prefill_seconds=result.prefill_seconds,
        tokens_per_second=len(result.tokens) / result.seconds,
    )


def report(runs: Sequence[Run], as_json: bool, single: bool) -> None:
    """The runs on stdout: JSON, or the text and a table. `single`: one JSON object instead of {"runs": [...]}. Ends the
    command with exit code 1 where drafts changed the tokens."""
    _show(runs, as_json, single)
    if not all(run.identical_to_greedy for run in runs):
        click.echo("error: drafts changed the tokens", err=True)
        click.get_current_context().exit(1)


def _show(runs: Sequence[Run], as_json: bool, single: bool) -> None:
    if as_json:
        rows = [run.as_dict() for run in runs]
        click.echo(json.dumps(rows[0] if single else {"runs": rows}, indent=2, ensure_ascii=False))
        return
    console = Console()
    if console.width < _MIN_WIDTH and not console.is_terminal:
        console = Console(width=_MIN_WIDTH)
    # soft_wrap: the terminal may break long lines, the text itself stays as it is.
    console.print(runs[0].prompt, style="dim", markup=False, highlight=False, soft_wrap=True, end="")
    console.print(runs[0].text, markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(_table(runs, console.width))


def _table(runs: Sequence[Run], width: int) -> Table:
    """A row a run. Fits a terminal of 80 columns with up to 3 drafts; the shares of more of them wrap."""
    first = runs[0]
    title = f"{first.family} in {first.quantization} on {first.backend}, {first.device}, {first.new_tokens} new tokens"
    table = Table(
        title=title + ("" if first.drafter_prefill else "; the drafter does not see the prompt"),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1) if width >= _ROOMY else 0,
    )
    headers = (
        "drafts", "drafter rows", "accepted", "per position", "mean\naccepted\nlength", "verify\nsteps",
        "tokens\nper\nsecond", "identical",
    )  # fmt: skip
    for header in headers:
        table.add_column(header, justify="right", vertical="bottom", no_wrap=header != "per position")
    for run in runs:
        shares = [
            f"{accepted / drafted:.0%}" if drafted else "-"
            for accepted, drafted in zip(run.per_position, run.drafted_per_position, strict=True)
        ]
        table.add_row(
            str(run.num_drafts),
            _rows(run.row_policy, run.refeed) if run.num_drafts else "-",
            "-" if run.acceptance_rate is None else f"{run.acceptance_rate:.0%}",
            " ".join(shares) or "-",
            "-" if run.mean_accepted_length is None else f"{run.mean_accepted_length:.2f}",
            str(run.verify_steps),
            f"{run.tokens_per_second:.1f}",
            "yes" if run.identical_to_greedy else "NO",
        )
    return table
