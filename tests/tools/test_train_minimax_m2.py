# SPDX-License-Identifier: AGPL-3.0-only
"""The training script's MiniMax-M2: its parts against plain recomputation, its names, and transformers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed; the training script needs it")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as when the script is run

from demo_training import evaluate, minimax_m2  # noqa: E402
from demo_training.base import CHAIN, build, causal  # noqa: E402
from demo_training.drafter import POLICIES  # noqa: E402
from demo_training.settings import QUICK_FAMILIES  # noqa: E402

SETTINGS = dataclasses.replace(
    QUICK_FAMILIES["minimax_m2"], vocab=40, hidden=32, expert_ffn=16, window=128, dropout=0.0
)
END = SETTINGS.vocab  # no token: nothing ends early


@pytest.fixture(scope="module")
def model() -> Any:
    """Random weights, wide enough that drafts are right now and then."""
    torch.set_num_threads(1)
    made = build(SETTINGS).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            spread, centre = (0.2, 0.0) if parameter.ndim > 1 else (0.3, float(parameter[0]))
            parameter.normal_(centre, spread, generator=generator)
    return made


def ids_of(seed: int, length: int) -> list[int]:
    return torch.randint(SETTINGS.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def chain(model: Any, tokens: list[int], position: int, hidden: Any) -> list[int]:
    """Drafts after tokens[position], every module over all its rows anew. `hidden` is the trunk's [>= position, h]."""
    known, drafts = tokens[: position + 1], []
    for i in range(SETTINGS.modules):
        state = hidden[None, :position]
        for j in range(i + 1):
            state, normed = model.module_hidden(
                j, torch.tensor([known[j + 1 : position + j + 1]]), state, j + 1, causal
            )
        drafts.append(int(model.draft_logits(normed)[0, -1].argmax()))
        known = [*known, drafts[-1]]
    return drafts


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 2, 3, 20])
def test_refed_modules_draft_as_without_a_cache(model: Any, prompt: int) -> None:
    random, ids = Random(prompt), ids_of(prompt, 48)
    drafter, position = model.drafter(CHAIN, 60, "refeed"), prompt
    hidden = model.hidden(torch.tensor([ids]))[0]
    drafter.append(ids[1:prompt], hidden[: prompt - 1], 1)
    while position < 40:
        drafts = drafter.propose(ids[position], hidden[position - 1 : position], position)
        assert drafts == chain(model, ids, position, hidden)
        accepted = random.randrange(CHAIN + 1)
        ids[position + 1 : position + 1 + accepted] = drafts[:accepted]
        hidden = model.hidden(torch.tensor([ids]))[0]
        drafter.after_verify(drafts, accepted, hidden[position : position + CHAIN + 1], position)
        position += accepted + 1


@torch.no_grad()
def test_training_sees_the_rows_that_decoding_has(model: Any) -> None:
    ids = ids_of(5, 30)
    hidden = model.hidden(torch.tensor([ids]))
    together = [model.draft_logits(state).argmax(-1)[0] for state in model.draft_outputs(torch.tensor([ids]), hidden)]
    for position in range(1, 27):
        state = hidden[:, :position]
        for i in range(SETTINGS.modules):  # with the text's tokens, not with drafts
            tokens = torch.tensor([ids[i + 1 : position + i + 1]])
            state, normed = model.module_hidden(i, tokens, state, i + 1, causal)
            assert int(model.draft_logits(normed)[0, -1].argmax()) == int(together[i][position - 1])


@torch.no_grad()
@pytest.mark.parametrize(("policy", "kept"), [("seed", 0), ("verified", 1)])
def test_modules_that_are_not_refed_write_a_row_a_step(model: Any, policy: str, kept: int) -> None:
    ids, position = ids_of(6, 40), 10
    hidden = model.hidden(torch.tensor([ids]))[0]
    drafter = model.drafter(CHAIN, 60, policy)
    drafter.append(ids[1:position], hidden[: position - 1], 1)
    lengths = [0] * CHAIN
    assert [cache.length for cache in drafter.caches] == lengths  # the prompt is not seen
    for accepted in (0, 3, 1, 2, 0):
        drafts = drafter.propose(ids[position], hidden[position - 1 : position], position)
        assert [cache.length for cache in drafter.caches] == [n + 1 for n in lengths]
        drafter.after_verify(drafts, accepted, hidden[position : position + CHAIN + 1], position)
        lengths = [n + (i < accepted + kept) for i, n in enumerate(lengths)]
        assert [cache.length for cache in drafter.caches] == lengths
        position += accepted + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_output_is_greedy_whatever_rows_stay(model: Any, policy: str) -> None:
    prompt = ids_of(7, 12)
    tally = evaluate.speculate(model, prompt, 40, CHAIN, END, policy)
    assert tally.tokens == evaluate.greedy(model, prompt, 40, END)
    assert tally.accepted == sorted(tally.accepted, reverse=True)


def test_more_drafts_than_modules_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="4 drafts are asked of 3 modules"):
        model.drafter(4, 20, "refeed")
    with pytest.raises(ValueError, match="policy 'other'"):
        model.drafter(3, 20, "other")


def experts_layer() -> Any:
    layer = minimax_m2.MixtureOfExperts(SETTINGS)
    generator = torch.Generator().manual_seed(11)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
    return layer


@torch.no_grad()
def test_the_bias_chooses_and_does_not_weigh() -> None:
    layer = experts_layer()
    x = torch.randn(40, SETTINGS.hidden, generator=torch.Generator().manual_seed(12))
    differ = 0
    for row, got in zip(x, layer(x), strict=True):
        scores = torch.sigmoid(layer.gate.weight @ row)
        order = sorted(range(SETTINGS.experts), key=lambda e: -float(scores[e] + layer.e_score_correction_bias[e]))
        best = order[: SETTINGS.experts_per_token]
        differ += set(best) != set(scores.topk(SETTINGS.experts_per_token).indices.tolist())
        wanted = torch.zeros(SETTINGS.hidden)
        for e in best:
            gate, up = (layer.experts.gate_up_proj[e] @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            wanted += scores[e] / scores[best].sum() * (layer.experts.down_proj[e] @ inner)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert 0 < differ < 40


def test_the_balancing_term_lowers_the_bias_of_experts_chosen_too_often() -> None:
    layer = experts_layer().train()
    with torch.no_grad():
        layer.e_score_correction_bias.copy_(torch.tensor([2.0, 0.0, 0.0, -2.0]))
    layer(torch.randn(1, 50, SETTINGS.hidden, generator=torch.Generator().manual_seed(13)))
    (term,) = layer.balance
    gradient = torch.autograd.grad(term, layer.e_score_correction_bias)[0]
    assert gradient[0] == pytest.approx(0.25)  # one of two choices each time, a quarter were even
    assert gradient[3] == pytest.approx(-0.25)
    assert float(gradient.sum()) == pytest.approx(0.0, abs=1e-6)


def test_names_and_types_are_the_checkpoints() -> None:
    model, other = build(SETTINGS), build(SETTINGS)
    model.initialise(torch.Generator().manual_seed(3))
    found = model.tensors()
    module = f"model.layers.{SETTINGS.layers + 2}."
    own = {name.removeprefix(module).replace(".3.", ".E.") for name in found if name.startswith(module)}
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    moe = ("gate.weight", "e_score_correction_bias", *(f"experts.E.{w}.weight" for w in ("w1", "w2", "w3")))
    norms = ("enorm", "hnorm", "eh_proj", "norm", "input_layernorm", "post_attention_layernorm")
    wanted = {f"{name}.weight" for name in norms} | {f"self_attn.{name}.weight" for name in attention}
    assert {name for name in own if ".experts." not in name or ".E." in name} == wanted | {
        f"block_sparse_moe.{name}" for name in moe
    }
    stack = model.model.layers[-1].block_sparse_moe.experts
    assert torch.equal(found[f"{module}block_sparse_moe.experts.2.w3.weight"], stack.gate_up_proj[2, 16:])
    assert torch.equal(found[f"{module}block_sparse_moe.experts.2.w2.weight"], stack.down_proj[2])
    assert {model.dtype_of(name) for name in found if name.endswith("_bias")} == {torch.float32}
    assert model.is_draft(module + "norm.weight")
    assert not model.is_draft("model.layers.1.input_layernorm.weight")
    assert not model.is_draft("lm_head.weight")
    assert not model.is_draft("model.norm.weight")
    other.load_tensors(found)
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def test_transformers_computes_the_same(model: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps(minimax_m2.config(SETTINGS)))
    tensors = {name: value.detach().contiguous() for name, value in model.tensors().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = minimax_m2.compare(tmp_path, model, ids_of(8, 24))
    assert found["logits"] < 1e-5
    assert found["draft_logits"] < 1e-5
