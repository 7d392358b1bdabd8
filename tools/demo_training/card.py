# SPDX-License-Identifier: AGPL-3.0-only
"""The model card (README.md) and the table that a run ends with, both from the contents of metrics.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from demo_training.base import family
from demo_training.settings import Settings

__all__ = ["GOALS", "Description", "experts_of", "goals_met", "model_card", "summary"]

GOALS = {
    "first-draft acceptance": 0.72,
    "mean accepted length": 2.6,
    "teacher-forced first-draft agreement": 0.65,
    "distinct 4-grams of the output": 0.25,
}
"""The least that a shipped checkpoint reaches on held-out files, where its family names no other number. The last is
there because a model that repeats one token has perfect acceptance."""


@dataclass(frozen=True)
class Description:
    """A family's words for the model card. `model` follows "A small", `drafter` is the subject of `drafts`, `short`
    names it elsewhere, `architecture` is the class of transformers."""

    model: str
    drafter: str
    short: str
    shape: str
    architecture: str
    wider: str = ""
    """What follows "in BF16" where some tensors are not."""
    drafts: str = "drafts"
    balance: str = "The routers' load-balancing loss has the weight {weight}."
    rows: str = (
        "`refeed` makes the accepted drafts' rows again from the target's\nhidden, `verified` keeps them as they are, "
        "`seed` drops the last of them."
    )
    """What becomes of the drafter's rows after a verify step."""


def goals(metrics: dict[str, Any]) -> dict[str, float]:
    return GOALS | getattr(family(Settings(**metrics["settings"])), "GOALS", {})


def reached(metrics: dict[str, Any]) -> dict[str, float]:
    run = metrics["speculative"]["refeed"]
    return {
        "first-draft acceptance": run["acceptance_by_position"][0],
        "mean accepted length": run["mean_accepted_length"],
        "teacher-forced first-draft agreement": metrics["teacher_forced"]["held-out"]["agreement"][0],
        "distinct 4-grams of the output": metrics["distinct_four_grams"],
    }


def goals_met(metrics: dict[str, Any]) -> bool:
    least = goals(metrics)
    return all(value >= least[name] for name, value in reached(metrics).items())


def summary(metrics: dict[str, Any]) -> str:
    """The final table, as text."""
    lines = [f"{'held-out':44}{'value':>8}{'goal':>8}"]
    least = goals(metrics)
    for name, value in reached(metrics).items():
        mark = "" if value >= least[name] else "  missed"
        lines.append(f"{name:44}{value:8.3f}{least[name]:8.2f}{mark}")
    for policy, run in metrics["speculative"].items():
        shares = "  ".join(f"{x:.3f}" for x in run["acceptance_by_position"])
        lines.append(f"{'accepted by position, ' + policy:44}{shares}   length {run['mean_accepted_length']:.3f}")
    for part, row in metrics["teacher_forced"].items():
        shares = "  ".join(f"{x:.3f}" for x in row["agreement"])
        lines.append(f"{'teacher-forced agreement, ' + part:44}{shares}   trunk loss {row['trunk_loss']:.3f}")
    lines.append(f"{'equal to transformers':44}{metrics['verify']['equal']!s:>8}")
    size = metrics["size"]
    lines.append(f"{'parameters, folder bytes':44}{size['parameters']:8d}  {size['folder_bytes']}")
    return "\n".join(lines)


def model_card(metrics: dict[str, Any], example: tuple[str, str]) -> str:
    """README.md. `example` is a held-out prompt and what the model writes after it."""
    s, corpus, size = metrics["settings"], metrics["corpus"], metrics["size"]
    files = ", ".join(f"{corpus['files'][part]} {part}" for part in corpus["files"])
    policies = "\n".join(
        f"| {policy} | {' | '.join(f'{x:.3f}' for x in run['acceptance_by_position'])} | "
        f"{run['mean_accepted_length']:.3f} | {run['steps']} |"
        for policy, run in metrics["speculative"].items()
    )
    forced = "\n".join(
        f"| {part} | {row['tokens']:.0f} | {row['trunk_loss']:.3f} | {row['trunk_top1']:.3f} | "
        f"{' | '.join(f'{x:.3f}' for x in row['agreement'])} |"
        for part, row in metrics["teacher_forced"].items()
    )
    positions = " | ".join(f"draft {j + 1}" for j in range(s["drafts"]))
    log = "\n".join(_log_row(row) for row in metrics["log"] if row["phase"] != "generate")
    about, done = family(Settings(**s)).describe(s), metrics["steps"]
    shape = f"{about.shape}; {s['vocab']} tokens (byte-level BPE); {s['window']} positions; untied head"
    phases = (
        f"1. {done['joint']} steps of {s['batch']} x {s['window']} tokens, trunk and {about.short} together, on text.\n"
        f"2. {done['distil']} steps of the {about.short} alone, distilled from the frozen trunk on text and on what "
        "the trunk\n   writes after train prompts."
    )
    if s["chain_step"] > 1:
        phases += (
            f"\n\nWhole chains of drafts are made at every {_ordinal(s['chain_step'])} row, first drafts at all rows."
        )
    if s["experts"]:
        phases += "\n" + about.balance.format(weight=s["balance"])
    python = f"{corpus['implementation']} {corpus['python']}"
    tokens = f"{corpus['tokens']['train']} train tokens"
    count, same = len(metrics["prompts"]), metrics["identical_to_greedy"]
    versions = ", ".join(f"{name} {version}" for name, version in metrics["versions"].items())
    return f"""# Demo checkpoint: Python sources, {size["parameters"] / 1e6:.1f} M parameters

A small {about.model}, {about.drafter}
that {about.drafts} for it included. It exists to show speculative decoding with a real proposer on any machine; it
writes text that looks like Python and knows nothing.

- {shape}
- {size["parameters"]} parameters in BF16{about.wider}, {size["weights_bytes"]} bytes
- `transformers` loads the folder as `{about.architecture}` and leaves out the tensors of the {about.short}
- comparison with transformers when it was made: {_verification(metrics["verify"], about.short)}

## Corpus and licence

The standard library's own sources, as found beside the Python that ran the script: {python}, under the Python Software
Foundation Licence, version 2 (a few files name another permissive licence). {files} files, {corpus["bytes"]} bytes,
{tokens}. Left out: tables (`encodings`, `pydoc_data`), files that are not UTF-8, files above 300 kB.
A file's part depends on the hash of its content. Held-out files were used for the numbers below and for nothing else.
SHA-256 of the list of hashes, parts and names: `{corpus["digest"]}`.
`prompts.json` and the example below quote held-out files and stay under that licence.

## Training

    {metrics["command"]}

{phases}

The weights are moving averages, at the steps that validation files liked best (least loss; longest accepted length).
Seed {s["seed"]}, {metrics["device"]}, {versions}, {metrics["seconds"]:.0f} s in all.
Another Python version is another corpus; another device or torch rounds differently.

| phase | step | train loss | validation |
|---|---|---|---|
{log}

## Evaluation on held-out files

FP32 arithmetic on the BF16 weights. {count} prompts (`prompts.json`), greedy, {s["new_tokens"]} new tokens at most,
{s["drafts"]} drafts a step. A draft is accepted when it and those before it equal the target's greedy choices.
Shares are over all verify steps; mean accepted length = 1 + accepted / verify steps. The rows of the table differ in
what stays in the drafter's cache after a verify step: {about.rows}

| rows | {positions} | mean accepted length | verify steps |
|---|{"---|" * s["drafts"]}---|---|
{policies}

The output equals greedy decoding without drafts on {same} of {count} prompts.
Share of distinct 4-grams: {metrics["distinct_four_grams"]:.3f}.

{_experts(metrics)}Teacher forcing, share of positions where draft j is the target's argmax:

| part | tokens | target loss (nats a token) | target top-1 | draft 1 | draft 2 | draft 3 |
|---|---|---|---|---|---|---|
{forced}

`metrics.json` holds all of this, and each prompt's output ids and counts.

## Example

A held-out prompt, and below the line what the model writes:

```
{example[0].rstrip(chr(10))}
----
{example[1].rstrip(chr(10))}
```
"""


def _log_row(row: dict[str, Any]) -> str:
    if "train_loss" in row:
        return f"| {row['phase']} | {row['step']:.0f} | {row['train_loss']:.4f} | |"
    values = ", ".join(f"{name.replace('_', ' ')} {row[name]:.4f}" for name in row if name not in ("phase", "step"))
    return f"| {row['phase']} | {row['step']:.0f} | | {values} |"


def _verification(result: dict[str, Any], short: str) -> str:
    if "logits" not in result:
        return f"not made ({result['reason']})."
    return (
        f"version {result['transformers']}, largest difference of logits {result['logits']:.1e} (target) and "
        f"{result['draft_logits']:.1e} ({short} run as its decoder layer), relative to the largest logit, in FP32."
    )


def _ordinal(n: int) -> str:
    return f"{n}{'th' if n > 3 else ('st', 'nd', 'rd')[n - 1]}"


def experts_of(s: dict[str, Any]) -> str:
    """A mixture of experts in words."""
    shared = f", and a shared one of {s['shared_ffn']}" if s["shared_ffn"] else ""
    return f"{s['experts']} experts of {s['expert_ffn']}, {s['experts_per_token']} a token{shared}"


def _experts(metrics: dict[str, Any]) -> str:
    """How evenly the routers of each layer choose, as a table; empty without experts."""
    shares = metrics.get("expert_shares", {})
    if not shares:
        return ""
    rows = "\n".join(f"| `{name}` | {min(row):.3f} | {max(row):.3f} |" for name, row in shares.items())
    return f"""Share of a router's choices that its least and its most chosen expert have, under teacher forcing:

| layer | least | most |
|---|---|---|
{rows}

"""
