# SPDX-License-Identifier: AGPL-3.0-only
"""The demo's CPU path beside Hugging Face's greedy generation with torch, on the same CPU, checkpoint and prompt.

Ours: the decoding loop on backend host, NumPy alone, without drafts and with three, prompt and verifying included.
Theirs: `generate` of transformers in BF16 with its cache, eager attention, after one generation that does not count.
Both decode the same prompt greedily; `same_tokens` counts the first ids that agree, for BF16 sums in another order may
decide a near tie otherwise. Without torch and transformers there are our rows alone.

Prints a table and writes it, with the machine, to `--output` (default docs/cpu/laptop.json and LAPTOP.md beside it).

    python tools/bench_laptop.py [--output docs/cpu] [--max-new-tokens 64] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.cli.decoding import Request, decode, default_prompts
from spark_py.cli.demo import DEMO_MODELS
from tools.bench_emulator import ROOT, machine

FAMILIES = ("qwen3_next", "qwen3_next_moe")
"""Those of the demo whose checkpoint transformers loads as it is."""


def ours(family: str, prompt: str, max_new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Tokens a second of the best of `repeats` runs, without drafts and with three."""
    rows = []
    for drafts in (0, 3):
        request = Request(family, "host", prompt, max_new_tokens, drafts, None, False, True)
        runs = [decode(DEMO_MODELS / family, request)[0] for _ in range(repeats)]
        best = max(runs, key=lambda run: run.tokens_per_second)
        rows.append(
            {
                "what": f"spark_py, host, {drafts} drafts",
                "tokens_per_second": round(best.tokens_per_second, 1),
                "seconds": round(best.seconds, 3),
                "new_tokens": best.new_tokens,
                "same_tokens": best.new_tokens,
                "token_ids": best.token_ids,
            }
        )
    return rows


def theirs(family: str, prompt: str, max_new_tokens: int, repeats: int, wanted: Sequence[int]) -> list[dict[str, Any]]:
    """The same by transformers; empty without it."""
    try:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM
    except ImportError:
        return []
    folder = DEMO_MODELS / family
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids])
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
            )
        times.append(time.perf_counter() - start)
    tokens, best = found[0, ids.shape[1] :].tolist(), min(times[1:])
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, wanted, strict=False)))
    return [
        {
            "what": f"transformers generate, torch {torch.__version__}, {torch.get_num_threads()} threads",
            "tokens_per_second": round(len(tokens) / best, 1),
            "seconds": round(best, 3),
            "new_tokens": len(tokens),
            "same_tokens": same,
            "token_ids": tokens,
        }
    ]


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown."""
    lines = [
        "# The demo on a CPU",
        "",
        "Made by tools/bench_laptop.py: greedy, the prompt's time included, the best of several runs.",
        "",
        *(f"- {key}: {found[key]}" for key in ("cpu", "cores", "system")),
        "",
        "| checkpoint | what | tokens | of them as in the first row | seconds | tokens a second |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        names = ("family", "what", "new_tokens", "same_tokens", "seconds", "tokens_per_second")
        lines.append(f"| {' | '.join(str(row[name]) for name in names)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "cpu", help="folder (default docs/cpu)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="runs, of which the fastest counts (default 3)")
    options = parser.parse_args()
    if options.repeats < 1 or options.max_new_tokens < 1:
        parser.error("--repeats and --max-new-tokens are 1 or more")
    rows = list[dict[str, Any]]()
    for family in FAMILIES:
        prompt = default_prompts(DEMO_MODELS / family, 1)[0]
        own = ours(family, prompt, options.max_new_tokens, options.repeats)
        peers = theirs(family, prompt, options.max_new_tokens, options.repeats, own[0]["token_ids"])
        rows += [{"family": family} | row for row in own + peers]
    for row in rows:
        del row["token_ids"]
    found = machine() | {"rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "laptop.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.output / "LAPTOP.md").write_text(table(found))
    print(table(found), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
