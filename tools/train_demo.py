# SPDX-License-Identifier: AGPL-3.0-only
"""Trains a demo checkpoint: a small model of a family, with what drafts for it, on the standard library's own sources.

    python tools/train_demo.py --output spark_py/demo_models/qwen3_next
    python tools/train_demo.py --output spark_py/demo_models/qwen3_next_moe --family qwen3_next_moe
    python tools/train_demo.py --output /tmp/quick --quick      # seconds on a CPU; goes through every step
    python tools/train_demo.py --output FOLDER --verify         # compares a finished folder with transformers

Needs torch, tokenizers and safetensors; transformers, if importable, checks the result. Writes only under --output,
which must be missing or empty. Exit code: 0; 1 where the finished checkpoint misses a goal or differs from
transformers (everything is written all the same).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

# Before the first use of cuBLAS, which reads it then: sums in one order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import safetensors
import tokenizers
import torch
from demo_training import card, corpus, evaluate, files
from demo_training.base import DemoModel, build
from demo_training.settings import FAMILIES, FOLDER_LIMITS, QUICK_FAMILIES, Settings
from demo_training.train import PROMPT, Trainer


def main(argv: list[str] | None = None) -> int:
    args, settings = parse(sys.argv[1:] if argv is None else argv)
    if args.verify:
        return verify_folder(args.output)
    if args.output.exists() and any(args.output.iterdir()):
        raise SystemExit(f"{args.output} is not empty; name a new folder, or empty it first")
    limit = FOLDER_LIMITS[settings.architecture]
    if build(settings).checkpoint_bytes() > limit:
        raise SystemExit(f"these settings give more than {limit} bytes of weights")
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(settings.seed)
    if args.quick:
        torch.set_num_threads(1)

    sources = corpus.read(settings.max_files, args.stdlib)
    tokenizer = corpus.train_tokenizer(sources, settings.vocab)
    streams = {part: corpus.encode_part(sources, part, tokenizer) for part in corpus.PARTS}
    prompts = corpus.draw_prompts(sources, "held-out", tokenizer, settings.prompts, settings.seed)
    facts = describe_corpus(sources, streams, args.stdlib_python or platform.python_version())
    print(f"corpus: Python {facts['python']}, files {facts['files']}, tokens {facts['tokens']}", flush=True)

    model = build(settings)
    model.initialise(torch.Generator().manual_seed(settings.seed))
    trainer = train(model.to(device), streams, device)
    files.save(args.output, model, tokenizer)
    trained = time.monotonic()

    metrics: dict[str, Any] = {
        "settings": dataclasses.asdict(settings),
        "quick": args.quick,
        "command": "python tools/train_demo.py " + shlex.join(sys.argv[1:] if argv is None else argv),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "versions": {m.__name__: m.__version__ for m in (torch, tokenizers, safetensors)},
        "corpus": facts,
        "steps": trainer.done,
        "log": trainer.log,
    }
    saved = files.load_weights(args.output, settings)
    metrics["teacher_forced"] = {
        part: evaluate.agreement(saved.to(device), streams[part], settings.validation_rows)
        for part in ("validation", "held-out")
    }
    if settings.experts:
        metrics["expert_shares"] = evaluate.expert_shares(saved, streams["held-out"], settings.validation_rows)
    outputs = measure(saved.cpu(), prompts, settings, metrics)
    metrics["verify"] = files.verify(args.output, saved, prompts[0].ids)
    metrics["seconds"] = time.monotonic() - started
    print(f"evaluation {time.monotonic() - trained:.0f} s, all {metrics['seconds']:.0f} s", flush=True)
    write(args.output, metrics, prompts, tokenizer, outputs)
    print(card.summary(metrics))
    return 0 if (args.quick or card.goals_met(metrics)) and metrics["verify"]["equal"] is not False else 1


def parse(argv: list[str]) -> tuple[argparse.Namespace, Settings]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--quick", action="store_true", help="tiny settings")
    parser.add_argument("--verify", action="store_true", help="train nothing, compare --output with transformers")
    parser.add_argument("--device", help="torch device (default: cuda where there is one, else cpu)")
    parser.add_argument("--stdlib", type=Path, help="folder of another CPython's standard library, as the corpus")
    parser.add_argument("--stdlib-python", metavar="VERSION", help="the version of --stdlib")
    parser.add_argument("--family", choices=list(FAMILIES), default="qwen3_next", help="default: %(default)s")
    group = parser.add_argument_group("settings", "defaults, of each family, are in demo_training/settings.py")
    options = {name: default for name, default in dataclasses.asdict(Settings()).items() if name != "architecture"}
    for name, default in options.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=None, metavar="N")
    args = parser.parse_args(argv)
    if (args.stdlib is None) != (args.stdlib_python is None):
        parser.error("--stdlib and --stdlib-python go together")
    if args.stdlib is not None and not args.stdlib.is_dir():
        parser.error(f"--stdlib {args.stdlib}: no such folder")
    chosen = {name: value for name in options if (value := getattr(args, name)) is not None}
    return args, dataclasses.replace((QUICK_FAMILIES if args.quick else FAMILIES)[args.family], **chosen)


def describe_corpus(sources: list[corpus.SourceFile], streams: dict[str, list[int]], python: str) -> dict[str, Any]:
    return {
        "python": python,
        "implementation": platform.python_implementation(),
        "digest": corpus.digest(sources),
        "bytes": sum(len(f.text.encode()) for f in sources),
        "files": {part: sum(f.part == part for f in sources) for part in corpus.PARTS},
        "tokens": {part: len(stream) for part, stream in streams.items()},
    }


def train(model: DemoModel, streams: dict[str, list[int]], device: torch.device) -> Trainer:
    text = torch.tensor(streams["train"], device=device)
    validation = torch.tensor(streams["validation"], device=device)
    for part, stream in (("train", text), ("validation", validation)):
        if len(stream) <= model.settings.window + 1:
            raise SystemExit(f"the {part} part has {len(stream)} tokens, less than a window of {model.settings.window}")
    generator = torch.Generator().manual_seed(model.settings.seed)
    starts = torch.randint(len(validation) - PROMPT, (model.settings.validation_rows, 1), generator=generator)
    trainer = Trainer(model, text, validation, validation[(starts + torch.arange(PROMPT)).to(device)])
    trainer.joint()
    trainer.distil()
    model.eval()
    return trainer


def measure(model: DemoModel, prompts: list[corpus.Prompt], s: Settings, metrics: dict[str, Any]) -> list[list[int]]:
    """Fills in the results of decoding; returns the new tokens of each prompt."""
    torch.set_num_threads(1)  # products of a few rows only wait for other threads
    plain = [evaluate.greedy(model, p.ids, s.new_tokens, end=0) for p in prompts]
    metrics["distinct_four_grams"] = evaluate.distinct_four_grams(plain)
    metrics["prompts"] = [{"tokens": tokens} for tokens in plain]
    metrics["speculative"] = {}
    for policy in model.policies:
        tallies = [evaluate.speculate(model, p.ids, s.new_tokens, s.drafts, 0, policy) for p in prompts]
        steps = sum(t.steps for t in tallies)
        accepted = [sum(t.accepted[j] for t in tallies) for j in range(s.drafts)]
        metrics["speculative"][policy] = {
            "steps": steps,
            "accepted": accepted,
            "acceptance_by_position": [n / steps for n in accepted],
            "mean_accepted_length": 1 + sum(accepted) / steps,
        }
        for row, tally in zip(metrics["prompts"], tallies, strict=True):
            row[policy] = {"steps": tally.steps, "accepted": tally.accepted}
        if policy == model.policies[0]:
            metrics["identical_to_greedy"] = sum(t.tokens == p for t, p in zip(tallies, plain, strict=True))
    return plain


def write(
    folder: Path, metrics: dict[str, Any], prompts: list[corpus.Prompt], tokenizer: tokenizers.Tokenizer, outputs: Any
) -> None:
    """prompts.json, README.md and metrics.json; the last says how large the folder is, itself included."""
    licence = "Python Software Foundation License Version 2; excerpts of the standard library"
    rows = [dataclasses.asdict(p) for p in prompts]
    (folder / "prompts.json").write_text(_rows_json({"licence": licence}, "prompts", rows), encoding="utf-8")
    weights = (folder / "model.safetensors").stat().st_size
    settings = Settings(**metrics["settings"])
    parameters = sum(p.numel() for p in build(settings).parameters())
    metrics["size"] = {"parameters": parameters, "weights_bytes": weights, "folder_bytes": 0}
    best = max(range(len(outputs)), key=lambda i: len(set(outputs[i])))
    readme = card.model_card(metrics, (prompts[best].text, tokenizer.decode(outputs[best])))
    (folder / "README.md").write_text(readme, encoding="utf-8")
    rows = metrics["prompts"]
    rest = {name: value for name, value in metrics.items() if name != "prompts"}
    for _ in range(3):  # the number is part of what it counts: 0, then as many digits as the last, then the last
        (folder / "metrics.json").write_text(_rows_json(rest, "prompts", rows), encoding="utf-8")
        metrics["size"]["folder_bytes"] = sum(p.stat().st_size for p in folder.iterdir())
    limit = FOLDER_LIMITS[settings.architecture]
    if metrics["size"]["folder_bytes"] > limit:
        raise SystemExit(f"{folder} holds {metrics['size']['folder_bytes']} bytes, more than {limit}")


def _rows_json(head: dict[str, Any], name: str, rows: list[dict[str, Any]]) -> str:
    """JSON of `head` with one more entry: a list with one row a line."""
    lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)
    return json.dumps(head, indent=2, ensure_ascii=False)[:-2] + f',\n  "{name}": [\n{lines}\n  ]\n}}\n'


def verify_folder(folder: Path) -> int:
    settings = Settings(**json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["settings"])
    prompt = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))["prompts"][0]["ids"]
    result = files.verify(folder, files.load_weights(folder, settings), prompt)
    print(json.dumps(result))
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
