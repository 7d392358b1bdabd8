# SPDX-License-Identifier: AGPL-3.0-only
"""What `spark-py demo` and `spark-py generate` share: options, runs of the decoding loop, and how they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from spark_py.model.batched_speculative import BatchedSpeculativeDecoder
from spark_py.model.checkpoint import FAMILIES, Checkpoint, check_family, family_of, open_checkpoint
from spark_py.model.config import ModelConfig
from spark_py.model.layer import DraftProposer
from spark_py.model.speculative import Generation, SpeculativeDecoder, SpeculativeStats
from spark_py.model.weight_loader import forced_quantization
from spark_py.runtime import open_backend
from spark_py.runtime.errors import ConfigError, InvalidArgumentError

from .decoding_notes import note_on_modes
from .decoding_request import HeadRuns, Request, decoding_options

__all__ = ["Request", "Run", "decode", "decoding_options", "default_prompts", "report"]

_MIN_WIDTH, _ROOMY = 120, 100


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the loop, under the names of the JSON output. `quantization` and `hidden_mode` are the draft head's,
    None in families whose heads have no such choice; `drafter_prefill` says whether it saw the prompt, which FP8 and
    NVFP4 heads never do. `seconds` is the whole run, prefill included;
    `per_position[j]` counts the verify steps that accepted draft j. Of several sequences at once, counts and new tokens
    are those of all, text and ids those of the first; `sequences` has each one's prompt, text, token_ids and finish."""

    backend: str
    device: str
    family: str
    quantization: str | None
    hidden_mode: str | None
    num_drafts: int
    concurrency: int
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
    sequences: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """The keys of the JSON output."""
        return {name: getattr(self, name) for name in self.__slots__}


def default_prompts(folder: Path, n: int) -> list[str]:
    """The first n texts of the folder's prompts.json, from the beginning again where it has fewer; InvalidArgumentError
    where it has none."""
    path = folder / "prompts.json"
    try:
        texts = [str(prompt["text"]) for prompt in json.loads(path.read_text(encoding="utf-8"))["prompts"]]
    except FileNotFoundError:
        raise InvalidArgumentError("--prompt", None, f"a text is needed, since {folder} has no prompts.json") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(path, f"has no prompts with a text: {error}") from error
    if not texts:
        raise ConfigError(path, "has no prompts with a text")
    return list(islice(cycle(texts), n))


def _tokenized(folder: Path, prompts: Sequence[str], max_new_tokens: int, limit: int) -> tuple[Any, list[list[int]]]:
    """The folder's tokenizer, and the prompts in its tokens; `limit` tokens are the model's most, 0 if it says none."""
    from tokenizers import Tokenizer

    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            text = "text in Unicode is needed, and these bytes are none"
            raise InvalidArgumentError("--prompt", prompt, text) from None
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(path, f"cannot be read: {error}") from error
    ids = [list(tokenizer.encode(prompt).ids) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise InvalidArgumentError("--prompt", prompt, "the tokenizer makes no token of it")
        length = len(tokens) + max_new_tokens
        if limit and length > limit:
            what = f"{len(tokens)} of the prompt and --max-new-tokens {max_new_tokens}"
            raise InvalidArgumentError("tokens of the sequence", length, f"{what}; the model takes {limit}")
    return tokenizer, ids


def decode(folder: Path, request: Request) -> list[Run]:
    """The runs that a request asks for, each sequence compared with its plain run, which is made in any case."""
    config = ModelConfig.from_file(folder)
    name = request.family or family_of(config)
    family = check_family(name, config)
    request.check_choices(name, family)
    request = replace(request, family=name)
    most = max(request.concurrency)
    prompts = default_prompts(folder, most) if request.prompt is None else [request.prompt] * most
    limit = config.max_position_embeddings
    tokenizer, ids = _tokenized(folder, prompts, request.max_new_tokens, limit)
    # Room for the drafts of the last steps too, where the model has it.
    max_seq_len = max(map(len, ids)) + request.max_new_tokens + max(request.wanted)
    max_seq_len = min(max_seq_len, limit) if limit else max_seq_len

    with (
        open_backend(request.backend) as gpu,
        open_checkpoint(folder, gpu, max_seq_len, name, most) as checkpoint,
    ):
        if request.quantizations:
            forced = dict.fromkeys(forced_quantization(config, quant) for quant in request.quantizations)
            request = replace(request, quantizations=tuple(forced))
        make = checkpoint.proposer
        heads = request.plan(family, *((make.quantizations(), make.hidden_modes()) if max(request.wanted) else ()))
        proposers = [
            make(head.levers, head.quantization, head.hidden_mode) if max(head.drafts) else None for head in heads
        ]
        alone: dict[tuple[int, ...], Generation] = {}
        for tokens in ids:
            if tuple(tokens) not in alone:
                alone[tuple(tokens)] = _generate(checkpoint, None, 0, heads[0], [tokens], request)[0]
        plain = [alone[tuple(tokens)] for tokens in ids]
        return list(
            _runs(request, checkpoint, list(zip(heads, proposers, strict=True)), prompts, ids, tokenizer, plain)
        )


def _runs(
    request: Request,
    checkpoint: Checkpoint,
    heads: Sequence[tuple[HeadRuns, DraftProposer | None]],
    prompts: list[str],
    ids: list[list[int]],
    tokenizer: Any,
    plain: list[Generation],
) -> Iterator[Run]:
    for n in request.concurrency:
        for head, proposer in heads:
            for num_drafts in head.drafts:
                if n == 1 and num_drafts == 0:
                    results = plain[:1]
                else:
                    results = _generate(checkpoint, proposer, num_drafts, head, ids[:n], request)
                yield _run(request, checkpoint, head, prompts[:n], tokenizer, num_drafts, results, plain[:n])


def _generate(
    checkpoint: Checkpoint,
    proposer: DraftProposer | None,
    num_drafts: int,
    head: HeadRuns,
    ids: list[list[int]],
    request: Request,
) -> list[Generation]:
    gpu, eos, levers = checkpoint.target.gpu, checkpoint.config.eos_token_ids, head.levers
    what = f"{num_drafts} draft{'' if num_drafts == 1 else 's'}"
    if num_drafts:
        choices = [_rows(levers.row_policy.value, levers.refeed), *([head.name] if head.name else [])]
        what += f" ({', '.join(choices)})"
    if len(ids) > 1:
        what += f", {len(ids)} sequences"
    click.echo(f"{what} on {gpu.name}, {gpu.device_name()} ...", err=True)
    drafter = proposer if num_drafts else None
    if len(ids) == 1:
        one = SpeculativeDecoder(checkpoint.target, drafter, num_drafts, eos, levers)
        return [one.generate(ids[0], request.max_new_tokens)]
    several = BatchedSpeculativeDecoder(checkpoint.target, drafter, num_drafts, eos, levers)
    return several.generate_all(ids, request.max_new_tokens)


def _rows(row_policy: str, refeed: bool) -> str:
    return row_policy + ("+refeed" if refeed else "")


def _run(
    request: Request,
    checkpoint: Checkpoint,
    head: HeadRuns,
    prompts: Sequence[str],
    tokenizer: Any,
    num_drafts: int,
    results: Sequence[Generation],
    plain: Sequence[Generation],
) -> Run:
    stats, levers = SpeculativeStats(), head.levers
    for result in results:
        stats.merge(result.stats)
    sequences = [
        {"prompt": prompt, "text": tokenizer.decode(r.tokens), "token_ids": r.tokens, "finish": r.finish}
        for prompt, r in zip(prompts, results, strict=True)
    ]
    new_tokens, seconds = sum(len(result.tokens) for result in results), max(result.seconds for result in results)
    return Run(
        backend=checkpoint.target.gpu.name,
        device=checkpoint.target.gpu.device_name(),
        family=request.family or "",
        quantization=head.quantization and head.quantization.value,
        hidden_mode=head.hidden_mode and head.hidden_mode.value,
        num_drafts=num_drafts,
        concurrency=len(results),
        row_policy=levers.row_policy.value,
        refeed=levers.refeed,
        drafter_prefill=levers.drafter_prefill,
        prompt=prompts[0],
        text=sequences[0]["text"],
        token_ids=results[0].tokens,
        new_tokens=new_tokens,
        finish=results[0].finish,
        verify_steps=stats.verify_steps,
        drafted=stats.drafted,
        accepted=stats.accepted,
        acceptance_rate=stats.acceptance_rate,
        mean_accepted_length=stats.mean_accepted_length,
        per_position=stats.accepted_at,
        drafted_per_position=stats.drafted_at,
        identical_to_greedy=all(r.tokens == p.tokens for r, p in zip(results, plain, strict=True)),
        seconds=seconds,
        prefill_seconds=sum(result.prefill_seconds for result in results),
        tokens_per_second=new_tokens / seconds,
        sequences=sequences,
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
    first, several = runs[0], any(run.concurrency > 1 for run in runs)
    heads = len({(_head(run), run.drafter_prefill) for run in runs}) > 1
    broken = width < _ROOMY and any(run.hidden_mode for run in runs)  # names of modes need the room
    unfed = "the drafter does not see the prompt"
    title = first.family + (f" in {_head(first)}" if _head(first) and not heads else "")
    title += f" on {first.backend}, {first.device}, {first.new_tokens} new tokens"
    why = ": only a bf16 head can be shown it" if first.quantization else ""
    if FAMILIES[first.family].several_modules:
        why = ": several modules are shown it with refeed alone"
    notes = [f"* {unfed}{why}"] if heads else []
    if note := note_on_modes(runs):
        notes.append(note)
    table = Table(
        title=title + ("" if heads or first.drafter_prefill else f"; {unfed}"),
        title_justify="left",
        caption="\n".join(notes) or None,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1) if width >= _ROOMY else 0,
    )
    headers = (
        *(("at\nonce",) if several else ()),
        "drafts", *(("head",) if heads else ()), "drafter\nrows", "accepted", "per position", "mean\naccepted\nlength",
        "verify\nsteps", "tokens\nper\nsecond", "identical",
    )  # fmt: skip
    for header in headers:
        table.add_column(header, justify="right", vertical="bottom", no_wrap=header != "per position")
    for run in runs:
        shares = [
            f"{accepted / drafted:.0%}" if drafted else "-"
            for accepted, drafted in zip(run.per_position, run.drafted_per_position, strict=True)
        ]
        head = (_head(run) or "head") + ("" if run.drafter_prefill else "*")
        table.add_row(
            *((str(run.concurrency),) if several else ()),
            str(run.num_drafts),
            *((head if run.num_drafts else "-",) if heads else ()),
            _rows(run.row_policy, run.refeed).replace("+", "\n+" if broken else "+") if run.num_drafts else "-",
            "-" if run.acceptance_rate is None else f"{run.acceptance_rate:.0%}",
            " ".join(shares) or "-",
            "-" if run.mean_accepted_length is None else f"{run.mean_accepted_length:.2f}",
            str(run.verify_steps),
            f"{run.tokens_per_second:.1f}",
            "yes" if run.identical_to_greedy else "NO",
        )
    return table


def _head(run: Run) -> str:
    return ", ".join(filter(None, (run.quantization, run.hidden_mode)))
