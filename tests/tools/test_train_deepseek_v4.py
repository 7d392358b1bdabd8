# SPDX-License-Identifier: AGPL-3.0-only
"""The training script's DeepSeek-V4: its parts against plain recomputation, and its model against transformers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed; the training script needs it")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as when the script is run

from demo_training import deepseek_v4, files  # noqa: E402
from demo_training.base import build  # noqa: E402
from demo_training.latent_attention import LatentCache, windowed  # noqa: E402
from demo_training.settings import QUICK_FAMILIES  # noqa: E402

SETTINGS = dataclasses.replace(
    QUICK_FAMILIES["deepseek_v4"], vocab=40, hidden=32, layers=3, expert_ffn=16, shared_ffn=16, attention_window=8
)


def random_model() -> Any:
    """Every parameter and bias random, sinks and bases included."""
    model = build(SETTINGS).eval()
    generator = torch.Generator().manual_seed(5)
    model.initialise(generator)
    with torch.no_grad():
        for value in (*model.parameters(), *(buffer for name, buffer in model.named_buffers() if "bias" in name)):
            spread = 0.3 if value.ndim == 1 else value.shape[-1] ** -0.5
            value.add_(torch.randn(value.shape, generator=generator) * spread)
    return model


@torch.no_grad()
def test_the_model_is_that_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the window, in trunk and MTP module, from a folder as it is saved; a window one less is noticed."""
    pytest.importorskip("transformers.models.deepseek_v4", reason="needs transformers with DeepSeek-V4")
    from tokenizers import Tokenizer, models

    model = random_model()
    files.save(tmp_path, model, Tokenizer(models.BPE()))
    saved = files.load_weights(tmp_path, SETTINGS)
    prompt = torch.randint(SETTINGS.vocab, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    found = deepseek_v4.compare(tmp_path, saved, prompt)
    # FP32 sums in another order, and Sinkhorn without the epsilon of its sums, which is worth 1e-6.
    assert max(found.values()) < 1e-5
    monkeypatch.setattr(deepseek_v4.Model, "causal", lambda _self: windowed(7))
    wrong = deepseek_v4.compare(tmp_path, saved, prompt)
    assert min(wrong.values()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24, 30])
def test_blocks_and_the_cache_see_the_window(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    q, kv = torch.randn(2, rows, 3, 4, generator=generator), torch.randn(2, rows, 4, generator=generator)
    sinks = torch.tensor([8.0, -30.0, 0.3])
    scores = torch.einsum("bqhd,bkd->bqhk", q, kv) / 2
    query, key = torch.arange(rows)[:, None], torch.arange(rows)
    scores = scores.masked_fill(((key > query) | (key <= query - 8))[:, None], -torch.inf).exp()
    wanted = scores @ kv[:, None] / (scores.sum(-1) + sinks.exp())[..., None]
    torch.testing.assert_close(windowed(8)(q, kv, sinks), wanted)
    for sizes in ((rows,), (1,) * rows, (min(5, rows), rows - min(5, rows))):
        cache, parts = LatentCache((1, 2, rows, 4), torch.float32, torch.device("cpu"), 8), []
        for part, row in zip(q.split(sizes, 1), kv.split(sizes, 1), strict=True):
            parts.append(cache.attend(0)(part, row, sinks))
            cache.length += row.shape[1]
        torch.testing.assert_close(torch.cat(parts, 1), wanted)


def test_sinkhorn_is_that_of_the_official_code() -> None:
    """Mild logits and large ones, whose rows do not sum to 1 after 20 iterations."""
    mild = torch.tensor([[0.2, -1.0, 0.7, 0.1], [1.5, 0.3, -0.4, 0.0], [-0.6, 0.9, 0.05, 1.1], [0.4, -0.2, 0.8, -1.3]])
    for logits in (mild, 8 * mild):
        mix = logits.double().softmax(-1) + 1e-6
        mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
            mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
        torch.testing.assert_close(deepseek_v4.sinkhorn(logits, 20).double(), mix, rtol=0, atol=5e-6)
    assert deepseek_v4.sinkhorn(mild, 20)[0, 2] == pytest.approx(0.38269349, abs=2e-6)


def test_the_bias_evens_out_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router that prefers two experts: each call of rebalance moves biases, until all are chosen alike."""
    monkeypatch.setattr(deepseek_v4, "BIAS_STEP", 0.01)
    router = deepseek_v4.Router(SETTINGS, hashed=False).train()
    x = torch.randn(400, SETTINGS.hidden, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        router.weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(3))
        x[:, 0], router.weight[:, 0] = 1.0, torch.tensor([2.0, 2.0, 0.0, 0.0])
    shares: list[Any] = []
    for _ in range(150):
        _, mask = router(x, None)
        shares.append(mask.float().mean(0))
        router.rebalance()
    assert shares[0][:2].min() > 0.9
    assert (shares[-1] - 0.5).abs().max() < 0.1
    assert float(router.load.sum()) == 0


def test_tokens_name_experts_in_the_first_layer_alone() -> None:
    model = random_model()
    tables = [name for name, _ in model.named_buffers() if name.endswith("tid2eid")]
    assert tables == ["layers.0.ffn.gate.tid2eid"]
    table = model.get_buffer(tables[0])
    assert table.dtype == torch.int64
    assert all(len(set(row)) == SETTINGS.experts_per_token for row in table.tolist())
    scores, mask = model.layers[0].ffn.gate(torch.zeros(1, 3, SETTINGS.hidden), torch.tensor([[4, 0, 4]]))
    assert [set(row.nonzero()[:, 0].tolist()) for row in mask[0]] == [set(table[t].tolist()) for t in (4, 0, 4)]
    torch.testing.assert_close(scores, torch.full_like(scores, 0.83255461))


def test_tensors_have_the_published_names_and_types() -> None:
    model = random_model()
    kinds = {name: model.dtype_of(name) for name in model.tensors()}
    wide = {name for name, kind in kinds.items() if kind == torch.float32}
    assert {"hc_head_fn", "layers.0.hc_attn_fn", "layers.2.hc_ffn_scale", "mtp.0.hc_head_base"} <= wide
    assert {"layers.1.ffn.gate.bias", "mtp.0.ffn.gate.bias", "layers.0.attn.attn_sink"} <= wide
    assert all("hc_" in name or name.endswith(("attn_sink", "gate.bias")) for name in wide)
    assert {"embed.weight", "head.weight", "norm.weight", "mtp.0.e_proj.weight", "mtp.0.hnorm.weight"} <= kinds.keys()
    assert kinds["mtp.0.ffn.experts.3.w2.weight"] == kinds["layers.1.ffn.shared_experts.w1.weight"] == torch.bfloat16
    assert model.is_draft("mtp.0.norm.weight")
    assert not model.is_draft("norm.weight")
