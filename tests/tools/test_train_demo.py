# SPDX-License-Identifier: AGPL-3.0-only
"""The training script of the demo checkpoint: its parts against plain recomputation, and one tiny run of the whole."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed; the training script needs it")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as when the script is run

from demo_training import corpus, evaluate  # noqa: E402
from demo_training.base import CHAIN, DemoModel, balance, build  # noqa: E402
from demo_training.drafter import POLICIES  # noqa: E402
from demo_training.qwen3_next import MixtureOfExperts  # noqa: E402
from demo_training.settings import FAMILIES, FOLDER_LIMITS, QUICK, QUICK_FAMILIES  # noqa: E402
from demo_training.train import PROMPT, Trainer  # noqa: E402

SETTINGS = dataclasses.replace(
    QUICK, vocab=16, hidden=32, ffn=64, window=128, steps=40, distill_steps=10, lr=5e-3, dropout=0.0, validate_every=10
)
EXPERTS = dataclasses.replace(
    SETTINGS, ffn=0, experts=4, experts_per_token=2, expert_ffn=16, shared_ffn=24, balance=0.01, chain_step=2
)
V4 = dataclasses.replace(
    EXPERTS,
    architecture="deepseek_v4",
    kv_heads=1,
    shared_ffn=16,
    q_rank=16,
    out_groups=2,
    out_rank=8,
    attention_window=8,
    streams=4,
    hash_layers=1,
    train_iterations=6,
)
"""A window that prompts and chains go past."""
END = SETTINGS.vocab  # no token: nothing ends early


def noisy_stream(seed: int, length: int) -> Any:
    """Tokens that follow from the two before them, but one in ten: some guesses are right, some are not."""
    random = Random(seed)
    tokens = [1, 2]
    while len(tokens) < length:
        noise = random.randrange(16) if random.random() < 0.1 else 0
        tokens.append((tokens[-1] * 5 + tokens[-2] // 4 + noise) % 16)
    return torch.tensor(tokens)


@pytest.fixture(scope="module", params=[SETTINGS, EXPERTS, V4], ids=["dense", "experts", "v4"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    torch.set_num_threads(1)  # products this small only wait for a second thread
    model = build(request.param)
    model.initialise(torch.Generator().manual_seed(7))
    prompts = noisy_stream(3, PROMPT * SETTINGS.validation_rows).view(-1, PROMPT)
    made = Trainer(model, noisy_stream(1, 20_000), noisy_stream(2, 2_000), prompts)
    made.joint()
    made.distil()
    model.eval()
    return made


@pytest.fixture(scope="module")
def model(trainer: Trainer) -> DemoModel:
    return trainer.model


def test_both_phases_learn(trainer: Trainer) -> None:
    def values(name: str) -> list[Any]:
        return [row[name] for row in trainer.log if name in row]

    uniform = math.log(SETTINGS.vocab)
    assert values("trunk_loss")[-1] < 0.8 * uniform
    assert max(values("accepted_length")) > 1.5


def prompt_ids(seed: int, length: int = 20) -> list[int]:
    return torch.randint(SETTINGS.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def test_cached_trunk_is_the_whole_one(model: DemoModel) -> None:
    ids = torch.tensor([prompt_ids(1, 40)])
    cache = model.cache(SETTINGS.layers, 1, 40, torch.float32)
    parts = [model.hidden(part, cache) for part in ids.split((13, 1, 4, 22), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model.hidden(ids), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_training_sees_the_chains_that_decoding_runs(model: DemoModel) -> None:
    """`draft_outputs` of a whole window equals, base by base, drafts chained on a cache (with the window's tokens)."""
    ids = prompt_ids(2, 30)
    hidden = model.hidden(torch.tensor([ids]))
    together = model.draft_outputs(torch.tensor([ids]), hidden)
    for base in range(len(ids) - CHAIN):
        drafter = model.drafter(CHAIN, len(ids), "refeed")
        if base:
            drafter.append(ids[1 : base + 1], hidden[0, :base], 1)
        state = hidden[0, base : base + 1]
        for j in range(CHAIN):
            state = drafter.append([ids[base + 1 + j]], state, base + 1 + j)
            torch.testing.assert_close(state[0], together[j][0, base], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_chains_at_some_bases_are_those_of_all(model: DemoModel) -> None:
    ids = torch.tensor([prompt_ids(3, 30), prompt_ids(4, 30)])
    hidden = model.hidden(ids)
    whole = model.draft_outputs(ids, hidden)
    for bases in (slice(0, None, 4), slice(3, None, 4), slice(1, None, 2)):
        for j, part in enumerate(model.draft_outputs(ids, hidden, bases)):
            wanted = whole[j] if j == 0 else whole[j][:, bases]
            torch.testing.assert_close(part, wanted, rtol=1e-4, atol=1e-5)


def experts_layer() -> Any:
    layer = MixtureOfExperts(EXPERTS)
    generator = torch.Generator().manual_seed(11)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
    return layer


@torch.no_grad()
def test_experts_are_the_chosen_ones_weighted() -> None:
    layer = experts_layer()
    x = torch.randn(3, 5, EXPERTS.hidden, generator=torch.Generator().manual_seed(12))
    found = layer(x)
    gates, downs = layer.experts.gate_up_proj, layer.experts.down_proj
    for row, got in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        odds = (layer.gate.weight @ row).exp()
        best = sorted(range(EXPERTS.experts), key=lambda e: -float(odds[e]))[: EXPERTS.experts_per_token]
        wanted = torch.sigmoid(layer.shared_expert_gate.weight @ row) * layer.shared_expert(row)
        for e in best:
            gate, up = (gates[e] @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            wanted = wanted + odds[e] / odds[best].sum() * (downs[e] @ inner)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_balance_is_least_where_experts_are_used_alike() -> None:
    odds = torch.eye(4)[torch.arange(8) % 4] * 0.4 + torch.eye(4)[(torch.arange(8) + 1) % 4] * 0.4 + 0.05
    mask = odds > 0.1
    assert float(balance(odds, mask)) == pytest.approx(2.0)
    one = odds[:1].expand(8, 4)
    assert float(balance(one, one > 0.1)) == pytest.approx(4 * 2 * 0.45)


def test_balance_is_that_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason="needs transformers")
    logits = torch.randn(100, 8, generator=torch.Generator().manual_seed(1))
    odds = logits.softmax(-1)
    mask = (odds.topk(2).indices[..., None] == torch.arange(8)).any(-2)
    wanted = theirs.load_balancing_loss_func((logits,), 8, 2)
    torch.testing.assert_close(balance(odds, mask), wanted)


def test_tensors_of_experts_are_taken_apart_and_put_together() -> None:
    model, other = build(EXPERTS), build(EXPERTS)
    model.initialise(torch.Generator().manual_seed(3))
    found = model.tensors()
    prefix = "mtp.layers.0.mlp.experts."
    assert found[f"{prefix}3.gate_proj.weight"].shape == found[f"{prefix}3.up_proj.weight"].shape == (16, 32)
    assert found[f"{prefix}0.down_proj.weight"].shape == (32, 16)
    stack = model.mtp.layers[0].mlp.experts
    assert torch.equal(found[f"{prefix}2.gate_proj.weight"], stack.gate_up_proj[2, :16])
    assert not any(name.endswith("experts.down_proj") for name in found)
    other.load_tensors(found)
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    del found[f"{prefix}0.up_proj.weight"]
    with pytest.raises(KeyError, match=f"{prefix}0.up_proj"):
        other.load_tensors(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_fits_the_limit(family: str) -> None:
    """With 200 kB left for the tokenizer, prompts and numbers."""
    settings = FAMILIES[family]
    assert build(settings).checkpoint_bytes() <= FOLDER_LIMITS[settings.architecture] - 200_000


def run_from_scratch(model: DemoModel, prompt: list[int], limit: int, drafts: int) -> evaluate.Tally:
    """Speculation with nothing kept: every step computes trunk and drafter over the whole sequence again."""
    text = list(prompt)
    text.append(int(model.logits(model.hidden(torch.tensor([text])))[0, -1].argmax()))
    tally = evaluate.Tally([], 0, [0] * drafts)
    while len(text) - len(prompt) < limit:
        hidden = model.hidden(torch.tensor([text[:-1]]))[0]
        drafter = model.drafter(drafts, len(text) + drafts, "refeed")
        states = drafter.append(text[1:], hidden, 1)
        guesses = [int(model.draft_logits(states[-1]).argmax())]
        state = states[-1:]
        while len(guesses) < drafts:
            state = drafter.append([guesses[-1]], state, len(text) - 1 + len(guesses))
            guesses.append(int(model.draft_logits(state)[0].argmax()))
        tally.steps += 1
        for j in range(drafts + 1):
            pick = int(model.logits(model.hidden(torch.tensor([text])))[0, -1].argmax())
            text.append(pick)
            if j == drafts or guesses[j] != pick:
                break
            tally.accepted[j] += 1
    tally.tokens = text[len(prompt) :][:limit]
    return tally


@torch.no_grad()
def test_refed_speculation_equals_recomputation(model: DemoModel) -> None:
    lengths = set()
    for seed in range(6):
        prompt = prompt_ids(seed)
        fast = evaluate.speculate(model, prompt, 32, CHAIN, END, "refeed")
        assert fast == run_from_scratch(model, prompt, 32, CHAIN)
        reached = [fast.steps, *fast.accepted, 0]
        lengths |= {j for j in range(CHAIN + 1) if reached[j] > reached[j + 1]}
    assert {0, CHAIN} < lengths  # steps that accepted no draft, all, and some


@pytest.mark.parametrize("policy", POLICIES)
def test_output_is_greedy_whatever_rows_stay(model: DemoModel, policy: str) -> None:
    prompt = prompt_ids(5)
    plain = evaluate.greedy(model, prompt, 40, END)
    tally = evaluate.speculate(model, prompt, 40, CHAIN, END, policy)
    assert tally.tokens == plain
    assert tally.accepted == sorted(tally.accepted, reverse=True)
    assert tally.steps + sum(tally.accepted) >= 39
    end = plain[17]
    assert evaluate.speculate(model, prompt, 40, CHAIN, end, policy).tokens == plain[: plain.index(end) + 1]


def test_distinct_four_grams() -> None:
    assert evaluate.distinct_four_grams([[1, 2, 3, 4, 5], [1, 2, 3, 4]]) == pytest.approx(2 / 3)
    assert evaluate.distinct_four_grams([[1, 1, 1, 1, 1, 1]]) == pytest.approx(1 / 3)


def test_parts_depend_on_content_and_do_not_overlap() -> None:
    files = corpus.read()
    parts = {part: {f.sha256 for f in files if f.part == part} for part in corpus.PARTS}
    assert all(parts.values())
    assert sum(map(len, parts.values())) == len(files) == len(set.union(*parts.values()))
    assert 0.03 < len(parts["held-out"]) / len(files) < 0.13
    assert corpus.digest(files) == corpus.digest(corpus.read())


@pytest.mark.parametrize("family", FAMILIES)
def test_quick_run(tmp_path: Path, family: str) -> None:
    """Two runs of the whole script: every file is there, reads back, and the second run wrote the same weights."""
    weights = []
    for name in ("a", "b"):
        command = [
            sys.executable,
            "tools/train_demo.py",
            "--quick",
            "--family",
            family,
            "--device",
            "cpu",
            "--output",
            str(tmp_path / name),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "mean accepted length" in done.stdout
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]

    folder = tmp_path / "a"
    read = {name: json.loads((folder / name).read_text()) for name in ("config.json", "metrics.json", "prompts.json")}
    metrics, prompts = read["metrics.json"], read["prompts.json"]["prompts"]
    assert metrics["size"]["folder_bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    assert read["config.json"]["model_type"] == QUICK_FAMILIES[family].architecture
    assert (folder / "README.md").read_text().startswith("# Demo checkpoint")

    from demo_training import files

    assert ("expert_shares" in metrics) == bool(QUICK_FAMILIES[family].experts)
    for shares in metrics.get("expert_shares", {}).values():
        assert sum(shares) == pytest.approx(1)
    saved = files.load_weights(folder, QUICK_FAMILIES[family])
    for prompt, row in zip(prompts, metrics["prompts"], strict=True):
        assert corpus.MIN_PROMPT <= len(prompt["ids"]) <= corpus.MAX_PROMPT
        tally = evaluate.speculate(saved, prompt["ids"], QUICK.new_tokens, QUICK.drafts, 0, "refeed")
        assert (tally.tokens, tally.steps, tally.accepted) == (
            row["tokens"],
            row["refeed"]["steps"],
            row["refeed"]["accepted"],
        )
    held_out = {f.name for f in corpus.read(QUICK.max_files) if f.part == "held-out"}
    assert {p["file"] for p in prompts} <= held_out

    again = [sys.executable, "tools/train_demo.py", "--quick", "--output", str(folder)]
    refused = subprocess.run(again, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert refused.returncode != 0
    assert "not empty" in refused.stderr
