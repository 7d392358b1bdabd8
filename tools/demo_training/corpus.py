# SPDX-License-Identifier: AGPL-3.0-only
"""The corpus: the standard library's own sources, split by content hash; its tokenizer; prompts from held-out files.

The text differs from one Python version (and distribution) to the next, so a run records both and a digest.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

__all__ = ["END", "PARTS", "Prompt", "SourceFile", "digest", "draw_prompts", "encode_part", "read", "train_tokenizer"]

END = "<|endoftext|>"
PARTS = ("train", "validation", "held-out")
HELD_OUT_PERCENT, VALIDATION_PERCENT = 8, 5
MIN_PROMPT, MAX_PROMPT = 64, 128
"""Lengths of a prompt in tokens, both inclusive."""

_LARGEST = 300_000
# Tables and bundled data rather than source text, what other packages installed, and files of one machine.
_LEFT_OUT = {"__pycache__", "dist-packages", "encodings", "pydoc_data", "site-packages"}


@dataclass(frozen=True)
class SourceFile:
    """One source file: `name` relative to the standard library, the hex SHA-256 of its bytes, and its part."""

    name: str
    sha256: str
    part: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """Whole lines of a held-out file, from `line` (1-based), and their token ids."""

    file: str
    line: int
    text: str
    ids: list[int]


def read(max_files: int = 0, stdlib: Path | None = None) -> list[SourceFile]:
    """Every UTF-8 .py file of a standard library (the running Python's unless given), by name; each content once.

    A file's part depends on its content alone. `max_files` keeps the files whose hash is smallest (0: all).
    """
    root = stdlib or Path(sysconfig.get_path("stdlib"))
    found: dict[str, SourceFile] = {}
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _LEFT_OUT & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        raw = path.read_bytes()
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue
        if not text.strip() or len(raw) > _LARGEST or "\0" in text:
            continue
        sha = hashlib.sha256(raw).hexdigest()
        found.setdefault(sha, SourceFile(relative.as_posix(), sha, _part(sha), text.replace("\r\n", "\n")))
    kept = sorted(found)[: max_files or None]
    return sorted((found[sha] for sha in kept), key=lambda f: f.name)


def _part(sha: str) -> str:
    bucket = int(sha[-8:], 16) % 100
    if bucket < HELD_OUT_PERCENT:
        return "held-out"
    return "validation" if bucket < HELD_OUT_PERCENT + VALIDATION_PERCENT else "train"


def digest(files: list[SourceFile]) -> str:
    """SHA-256 over the names, hashes and parts of the files, in order."""
    lines = "".join(f"{f.sha256}  {f.part}  {f.name}\n" for f in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def train_tokenizer(files: list[SourceFile], vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` tokens over the train part. Token 0 is `END`, which stands between files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f.text for f in files if f.part == "train"), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise SystemExit(f"the corpus gives a tokenizer of {tokenizer.get_vocab_size()} tokens, not {vocab}")
    return tokenizer


def encode_part(files: list[SourceFile], part: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of all files of one part, in order, with `END` before each and after the last."""
    end = tokenizer.token_to_id(END)
    stream = [end]
    for encoding in tokenizer.encode_batch([f.text for f in files if f.part == part], add_special_tokens=False):
        stream += encoding.ids
        stream.append(end)
    return stream


def draw_prompts(files: list[SourceFile], part: str, tokenizer: Tokenizer, count: int, seed: int) -> list[Prompt]:
    """`count` prompts of 64 to 128 tokens, each from a random line of a file, in turn over the shuffled files."""
    random = Random(seed)
    sources = [f for f in files if f.part == part and len(f.text) > 2000]
    random.shuffle(sources)
    prompts: list[Prompt] = []
    seen: set[tuple[str, int]] = set()
    for turn in range(20 * count):
        if len(prompts) == count or not sources:
            break
        source = sources[turn % len(sources)]
        lines = source.text.splitlines(keepends=True)
        start = random.randrange(len(lines))
        ids: list[int] = []
        text = ""
        for line in lines[start:]:
            text += line
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) >= MIN_PROMPT:
                break
        if MIN_PROMPT <= len(ids) <= MAX_PROMPT and (source.name, start) not in seen:
            seen.add((source.name, start))
            prompts.append(Prompt(source.name, start + 1, text, ids))
    if len(prompts) < count:
        raise SystemExit(f"{len(sources)} files of the {part} part give {len(prompts)} prompts, {count} are asked for")
    return prompts
