# SPDX-License-Identifier: AGPL-3.0-only
"""`--mtp-quantization` of `spark-py generate` and `spark-py demo`: which runs it gives, and what they are called."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from spark_py.cli import decoding, demo, main
from tests.model.scripted import write_drafting_tiny
from tests.model.tiny import MOE, Tiny

EXPERTS = MOE | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
TOKENS = 4
Start = Callable[..., Any]


def starter(tiny: Tiny, backend_name: str) -> Start:
    (tiny.folder / "prompts.json").write_text(json.dumps({"prompts": [{"text": "def f("}, {"text": "import os"}]}))
    family = "qwen3_next_moe" if tiny.raw["num_experts"] else "qwen3_next"

    def start(command: str, *arguments: object) -> Any:
        options = ("--backend", backend_name.removesuffix("-checked"), "--max-new-tokens", TOKENS, "--family", family)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo, "DEMO_MODELS", tiny.folder.parent)
            words = (*(("demo",) if command == "demo" else ("generate", tiny.folder)), *options, *arguments)
            return CliRunner().invoke(main.cli, [str(word) for word in words])

    return start


@pytest.fixture
def not_emulated(backend_name: str) -> None:
    if backend_name.startswith("emulated"):
        pytest.skip("dozens of runs: too much for kernels that run thread by thread")


@pytest.fixture
def dense(tmp_path: Path, rng: np.random.Generator, backend_name: str) -> Start:
    return starter(write_drafting_tiny(tmp_path / "qwen3_next", rng), backend_name)


@pytest.fixture
def sparse_tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_drafting_tiny(tmp_path / "qwen3_next_moe", rng, **EXPERTS)


@pytest.fixture
def sparse(sparse_tiny: Tiny, backend_name: str) -> Start:
    return starter(sparse_tiny, backend_name)


def runs(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    several: list[dict[str, Any]] = found.get("runs", [found])
    assert all(run["identical_to_greedy"] for run in several)
    assert len({tuple(run["token_ids"]) for run in several}) == 1
    return several


def heads(result: Any) -> list[tuple[int, str, bool]]:
    return [(run["num_drafts"], run["quantization"], run["drafter_prefill"]) for run in runs(result)]


@pytest.mark.parametrize("word", ["bf16", "BF16", "fp8", "nvfp4", "NVFP4"])
def test_one_run(sparse: Start, word: str) -> None:
    (run,) = runs(sparse("generate", "--num-drafts", 2, "--mtp-quantization", word, "--json"))
    assert (run["quantization"], run["drafter_prefill"]) == (word.lower(), word.lower() == "bf16")
    assert run["drafted"] > 0


def test_given_several_times(sparse: Start) -> None:
    words = ("--mtp-quantization", "fp8", "--mtp-quantization", "bf16", "--mtp-quantization", "FP8")
    assert heads(sparse("generate", "--num-drafts", 1, "--json", *words)) == [(1, "fp8", False), (1, "bf16", True)]
    found = heads(sparse("generate", "--json", *words))
    fp8 = [(drafts, "fp8", False) for drafts in range(4)]
    assert found == fp8 + [(drafts, "bf16", True) for drafts in (1, 2, 3)], "the plain run has no head"


def test_by_default(sparse: Start) -> None:
    assert {head[1:] for head in heads(sparse("generate", "--json"))} == {("bf16", True)}


@pytest.mark.deep
@pytest.mark.usefixtures("not_emulated")
def test_the_demo_compares_what_the_checkpoint_offers(sparse: Start, dense: Start) -> None:
    """Beside the others, a BF16 head that does not see the prompt either."""
    before = [(drafts, "bf16", True) for drafts in (0, 1, 2, 3, 3, 3)]
    others = [(3, "bf16", False), (3, "fp8", False), (3, "nvfp4", False)]
    assert heads(sparse("demo", "--json")) == before + others
    assert heads(dense("demo", "--json")) == before + others[:2]
    unfed = heads(dense("demo", "--json", "--no-drafter-prefill"))
    assert unfed == [(drafts, "bf16", False) for drafts in (0, 1, 2, 3, 3, 3)] + others[1:2]
    assert heads(sparse("demo", "--json", "--row-policy", "seed")) == before[:4]
    assert {quant for _, quant, _ in heads(sparse("demo", "--json", "--mtp-quantization", "nvfp4"))} == {"nvfp4"}
    assert heads(sparse("demo", "--json", "--num-drafts", 2)) == [(2, "bf16", True)]


@pytest.mark.usefixtures("not_emulated")
def test_the_table_says_which_head_and_who_saw_the_prompt(sparse: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    table = sparse("demo").stdout
    rows = [line.split()[:2] for line in table.splitlines() if re.match(r" +\d.* yes *$", line)]
    named = ["-", *["bf16"] * 5, "bf16*", "fp8*", "nvfp4*"]
    assert rows == [[drafts, head] for drafts, head in zip("012333333", named, strict=True)]
    assert "* the drafter does not see the prompt" in table
    table = " ".join(sparse("generate", "--mtp-quantization", "fp8").stdout.split())
    assert "in fp8 on" in table
    assert "; the drafter does not see the prompt" in table
    assert "* the drafter" not in table
    monkeypatch.setattr(decoding, "_MIN_WIDTH", 80)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = sparse("demo").stdout
    assert "\u2026" not in narrow, "cut"
    assert "nvfp4*" in narrow
    assert "verified+refeed" in narrow


def test_several_sequences(sparse: Start) -> None:
    words = ("--mtp-quantization", "fp8", "--mtp-quantization", "nvfp4", "--concurrency", 2, "--num-drafts", 2)
    found = runs(sparse("generate", "--json", *words))
    assert [(run["quantization"], run["concurrency"]) for run in found] == [("fp8", 2), ("nvfp4", 2)]


def test_nvfp4_is_refused_for_a_dense_ffn(dense: Start) -> None:
    for command in ("generate", "demo"):
        result = dense(command, "--mtp-quantization", "nvfp4")
        assert result.exit_code == 2
        assert result.stdout == ""
        error = result.stderr.strip().splitlines()[-1]
        assert "NVFP4 mode is not supported" in error
        assert "--mtp-quantization fp8 or bf16" in error, "the way out"


def test_the_plain_run_asks_for_no_head(dense: Start) -> None:
    (run,) = runs(dense("generate", "--num-drafts", 0, "--mtp-quantization", "nvfp4", "--json"))
    assert (run["quantization"], run["drafted"]) == ("nvfp4", 0)


def test_a_checkpoint_that_forces_bf16(sparse_tiny: Tiny, sparse: Start) -> None:
    """The output says what the head is, not what was asked for."""
    sparse_tiny.raw["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}
    sparse_tiny.save()
    words = ("--mtp-quantization", "fp8", "--mtp-quantization", "nvfp4", "--num-drafts", 1)
    result = sparse("generate", "--json", *words)
    assert heads(result) == [(1, "bf16", True)]
    assert "stays BF16, not fp8" in result.stderr.replace("\n", " ")
    assert {head[1:] for head in heads(sparse("demo", "--json"))} == {("bf16", True)}


def test_another_word(dense: Start) -> None:
    result = dense("generate", "--mtp-quantization", "int8")
    assert result.exit_code == 2
    assert "int8" in result.stderr
