# SPDX-License-Identifier: AGPL-3.0-only
"""The checkpoints that ship: what their cards say of drafts holds for the kernels too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.cli.demo import DEMO_MODELS
from spark_py.model.checkpoint import FAMILIES, open_checkpoint
from spark_py.model.config import ModelConfig
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.speculative import SpeculativeDecoder, SpeculativeStats
from spark_py.runtime.gpu import GpuBackend

PROMPTS, NEW_TOKENS, DRAFTS = 10, 64, 3


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str) -> Path:
    found = DEMO_MODELS / family
    if not found.is_dir():
        pytest.skip(f"no checkpoint of {family} ships yet")
    return found


@pytest.fixture(scope="module")
def card(folder: Path) -> list[dict[str, Any]]:
    """Prompt ids, greedy tokens and counts of each prompt, as the training script measured them in FP32."""
    prompts = json.loads((folder / "prompts.json").read_text())["prompts"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["settings"]["drafts"] == DRAFTS
    assert metrics["settings"]["new_tokens"] == NEW_TOKENS
    return [prompt | row for prompt, row in zip(prompts, metrics["prompts"], strict=True)][:PROMPTS]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "policy", "refeed"), [("refeed", RowPolicy.VERIFIED, True), ("seed", RowPolicy.SEED, False)]
)
def test_acceptance_is_what_the_card_says(
    gpu: GpuBackend,
    backend_name: str,
    family: str,
    folder: Path,
    card: list[dict[str, Any]],
    name: str,
    policy: RowPolicy,
    refeed: bool,
) -> None:
    """BF16 picks another token than FP32 here and there, and the text goes on differently from there: both are samples
    of one rate, so that the numbers of verify steps that accept a draft differ by sampling. Bound: three standard
    deviations of a difference of two binomial shares, for each position."""
    if backend_name.startswith("emulated"):
        pytest.skip("hundreds of tokens of millions of parameters: too much for kernels that run thread by thread")
    levers = ModelLevers(row_policy=policy, refeed=refeed, mtp_max_seqs=1)
    steps, accepted = 0, np.zeros(DRAFTS, int)
    with open_checkpoint(folder, gpu, 512, family) as found:
        decoder = SpeculativeDecoder(
            found.target, found.proposer(levers), DRAFTS, found.config.eos_token_ids, levers=levers
        )
        plain = SpeculativeDecoder(found.target, None, 0, found.config.eos_token_ids)
        for index, row in enumerate(card):
            result = decoder.generate(row["ids"], NEW_TOKENS)
            steps += result.stats.verify_steps
            accepted += result.stats.accepted_at
            if index == 0:
                assert plain.generate(row["ids"], NEW_TOKENS).tokens == result.tokens
    wanted_steps = sum(row[name]["steps"] for row in card)
    wanted = np.sum([row[name]["accepted"] for row in card], axis=0)
    shares, wanted_shares = accepted / steps, wanted / wanted_steps
    print(
        f"{family}, {name}: {shares.round(3)} in {steps} steps, on the card {wanted_shares.round(3)} in {wanted_steps}"
    )
    variance = wanted_shares * (1 - wanted_shares)
    assert (np.abs(shares - wanted_shares) < 3 * np.sqrt(variance / steps + variance / wanted_steps)).all()
    if name == "refeed":  # the goals of tools/train_demo.py are for it
        assert 1 + shares.sum() > 2.6, "mean accepted length"
        assert shares[0] > 0.72, "first draft"


@pytest.mark.deep
def test_streams_and_the_prompt_are_worth_more_than_the_engines_way(gpu: GpuBackend, backend_name: str) -> None:
    """DeepSeek-V4's module on five prompts: mean accepted lengths of about 3.1 and 2.4, with standard errors of 0.1;
    the text is the same."""
    if backend_name.startswith("emulated"):
        pytest.skip("hundreds of tokens of millions of parameters: too much for kernels that run thread by thread")
    folder = DEMO_MODELS / "deepseek_v4"
    prompts = json.loads((folder / "prompts.json").read_text())["prompts"][:5]
    ways = (
        (HiddenMode.REFERENCE, ModelLevers(True, row_policy=RowPolicy.VERIFIED, refeed=True, mtp_max_seqs=1)),
        (HiddenMode.COLLAPSED, ModelLevers(False, row_policy=RowPolicy.SEED, mtp_max_seqs=1)),
    )
    lengths, texts = [], []
    with open_checkpoint(folder, gpu, 512, "deepseek_v4") as found:
        for mode, levers in ways:
            head = found.proposer(levers, hidden_mode=mode)
            decoder = SpeculativeDecoder(found.target, head, DRAFTS, found.config.eos_token_ids, levers)
            stats = SpeculativeStats()
            texts.append([])
            for prompt in prompts:
                result = decoder.generate(prompt["ids"], NEW_TOKENS)
                stats.merge(result.stats)
                texts[-1].append(result.tokens)
            lengths.append(stats.mean_accepted_length or 0.0)
    assert texts[0] == texts[1]
    assert lengths[0] > lengths[1] + 0.3, lengths


def test_the_card_has_enough_prompts(card: list[dict[str, Any]], folder: Path) -> None:
    assert len(card) == PROMPTS
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12_000_000


def test_all_checkpoints_are_small_together() -> None:
    assert sum(file.stat().st_size for file in DEMO_MODELS.rglob("*") if file.is_file()) <= 36_000_000


def test_the_layers_are_those_of_the_family(family: str, folder: Path) -> None:
    config = ModelConfig.from_file(folder)
    sparse = [config.is_sparse_layer(layer) for layer in range(config.num_hidden_layers)]
    assert sparse == [family != "qwen3_next"] * config.num_hidden_layers
    if family == "deepseek_v4":
        assert 0 < config.num_hash_layers < config.num_hidden_layers, "both kinds of router"
