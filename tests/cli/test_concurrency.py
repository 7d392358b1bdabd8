# SPDX-License-Identifier: AGPL-3.0-only
"""`--concurrency` of `spark-py generate`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from spark_py.cli import decoding, main
from spark_py.model.batched_speculative import BatchedSpeculativeDecoder
from spark_py.model.speculative import SpeculativeStats
from tests.model.tiny import Tiny, write_tiny

PROMPTS = ["def f(", "import os", "x = ["]


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    found = write_tiny(tmp_path / "model", rng)
    (found.folder / "prompts.json").write_text(json.dumps({"prompts": [{"text": text} for text in PROMPTS]}))
    return found


@pytest.fixture
def generate(tiny: Tiny, backend_name: str) -> Callable[..., Any]:
    def run(*arguments: object) -> Any:
        backend = backend_name.removesuffix("-checked")
        options = ("generate", tiny.folder, "--backend", backend, "--max-new-tokens", 5, *arguments)
        return CliRunner().invoke(main.cli, [str(argument) for argument in options])

    return run


def test_a_run_of_several_sequences(generate: Callable[..., Any]) -> None:
    runs = {n: json.loads(generate("--json", "--num-drafts", 2, "--concurrency", n).stdout) for n in (1, 4)}
    one, four = runs[1], runs[4]
    assert (one["concurrency"], four["concurrency"]) == (1, 4)
    assert [sequence["prompt"] for sequence in four["sequences"]] == [*PROMPTS, PROMPTS[0]]
    assert (one["identical_to_greedy"], four["identical_to_greedy"]) == (True, True)
    assert one["sequences"] == [{key: one[key] for key in ("prompt", "text", "token_ids", "finish")}]
    assert four["sequences"][0] == four["sequences"][3] == one["sequences"][0]
    assert four["token_ids"] == one["token_ids"]
    assert four["new_tokens"] == sum(len(sequence["token_ids"]) for sequence in four["sequences"]) == 20
    assert four["drafted"] == sum(four["drafted_per_position"])
    assert four["mean_accepted_length"] == 1 + four["accepted"] / four["verify_steps"]
    assert four["tokens_per_second"] == pytest.approx(20 / four["seconds"])


def test_a_row_of_the_table_for_each(generate: Callable[..., Any]) -> None:
    result = generate("--num-drafts", 1, "--concurrency", 1, "--concurrency", 3)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:2] for row in rows] == [["1", "1"], ["3", "1"]]
    assert [row[-1] for row in rows] == ["yes", "yes"]
    assert "once" in result.stdout
    assert "3 sequences" in result.stderr
    runs = json.loads(generate("--json", "--concurrency", 2, "--concurrency", 5, "--prompt", "a").stdout)["runs"]
    found = [(run["concurrency"], run["num_drafts"]) for run in runs]
    assert found == [(n, drafts) for n in (2, 5) for drafts in range(4)]
    assert all(run["identical_to_greedy"] for run in runs)
    assert len({tuple(sequence["token_ids"]) for run in runs for sequence in run["sequences"]}) == 1
    assert [len(run["per_position"]) for run in runs] == [0, 1, 2, 3, 0, 1, 1, 1], "more than 4 have one draft each"


def test_a_sequence_that_differs_is_a_fault(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = BatchedSpeculativeDecoder.generate_all

    def wrong(self: BatchedSpeculativeDecoder, *args: Any) -> Any:
        results = right(self, *args)
        results[1].tokens[0] ^= 1
        return results

    monkeypatch.setattr(decoding.BatchedSpeculativeDecoder, "generate_all", wrong)
    result = generate("--num-drafts", 1, "--concurrency", 2)
    assert result.exit_code == 1
    assert "drafts changed the tokens" in result.stderr


@pytest.mark.parametrize("n", [0, -1])
def test_concurrency_that_is_refused(generate: Callable[..., Any], n: int) -> None:
    result = generate("--concurrency", n)
    assert result.exit_code == 2
    assert "--concurrency" in result.stderr


def test_counts_are_added() -> None:
    total = SpeculativeStats()
    for drafted, accepted in (((3, 2), (1, 0)), ((1,), (1,))):
        other = SpeculativeStats()
        for n, a in zip(drafted, accepted, strict=True):
            other.add(n, a)
        total.merge(other)
    assert (total.verify_steps, total.drafted_at, total.accepted_at) == (3, [3, 2, 1], [2, 0, 0])
