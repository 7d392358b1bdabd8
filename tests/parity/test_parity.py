# SPDX-License-Identifier: AGPL-3.0-only
"""The target and the MTP head against fixtures that Hugging Face's code gave (tools/make_goldens.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.runtime.gpu import GpuBackend
from tests.parity.support import MAX_SEQ_LEN, Array, Part, check, load, run_head, run_target
from tools.goldens import cases, checkpoint

SHARE = {"random": 0.80, "random_moe": 0.65, "demo": 0.95}
"""Of the ids, so many must qualify for the comparison at least. It depends on the fixture alone. The demo's are those
that the checkpoint writes; within the prompts, which others wrote, it is less sure (92 % of all positions qualify)."""


@pytest.fixture(params=cases.NAMES)
def name(request: pytest.FixtureRequest, backend_name: str) -> str:
    found = str(request.param)
    if found == "demo" and backend_name.startswith("emulated"):
        pytest.skip("the demo checkpoint takes minutes where kernels are emulated; `random` runs the same kernels")
    return found


@pytest.fixture
def model(name: str, gpu: GpuBackend, tmp_path: Path) -> Iterator[Checkpoint]:
    if name == "demo":
        folder, family = cases.DEMO, "qwen3_next"
    else:
        folder, family = tmp_path, "qwen3_next_moe" if cases.CONFIGS[name]["num_experts"] else "qwen3_next"
        checkpoint.write(folder, cases.CONFIGS[name])
    with open_checkpoint(folder, gpu, MAX_SEQ_LEN, family) as found:
        yield found


def decided(part: Part) -> Array:
    """Mask of the positions from which the model writes on."""
    spans = [np.arange(n) >= first for n, first in zip(part.lengths, part.decided, strict=True)]
    return np.concatenate(spans)


@pytest.mark.no_sanitizer("1,700 rows through four layers")
def test_target(name: str, model: Checkpoint, capsys: pytest.CaptureFixture[str]) -> None:
    part = Part(load(name), "target")
    line = check(part, run_target(model.target, part), SHARE[name], decided(part))
    with capsys.disabled():
        print(f"\n{name} {line}")


@pytest.mark.no_sanitizer("1,300 drafts")
def test_mtp_head(
    name: str, model: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = load(name)
    part = Part(arrays, "head")
    line = check(part, run_head(model, Part(arrays, "target"), part, monkeypatch), SHARE[name])
    with capsys.disabled():
        print(f"\n{name} {line}")


@pytest.mark.parametrize("name", cases.CONFIGS)
def test_the_fixture_is_of_the_checkpoint_that_the_seed_gives(name: str, tmp_path: Path) -> None:
    """Else two different models would be compared: the weights are made again, not stored."""
    checkpoint.write(tmp_path, cases.CONFIGS[name])
    meta, _ = cases.load(Path(__file__).parent / "fixtures" / f"{name}.npz")
    assert checkpoint.digest(tmp_path) == meta["checkpoint"]


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_fixture_says_what_made_it_and_covers_what_it_should(name: str) -> None:
    meta, arrays = cases.load(Path(__file__).parent / "fixtures" / f"{name}.npz")
    assert {"torch", "transformers", "numpy", "checkpoint"} <= meta.keys()
    case = cases.case(name)
    spans = np.split(arrays["target_tokens"], np.cumsum(arrays["target_lengths"])[:-1])
    for span, wanted in zip(spans, case.sequences, strict=True):
        if case.clear:
            assert len(span) == case.clear
            rest = iter(wanted)
            assert all(token in rest for token in span.tolist()), "not in this order among the candidates"
        else:
            assert span.tolist() == wanted
    bases = [len(span) - first for span, first in zip(spans, case.head_first, strict=False)]
    assert len(bases) >= 3
    assert min(bases) >= 40
    assert len(arrays["head_ids"]) == cases.DRAFTS * sum(bases)


def test_the_routing_of_experts_is_clear() -> None:
    """Of the target everywhere, of the head in most rows."""
    arrays = load("random_moe")
    routers = checkpoint.MOE_CONFIG["num_hidden_layers"] - len(checkpoint.MOE_CONFIG["mlp_only_layers"])
    assert arrays["target_routing_gap"].shape == (len(arrays["target_tokens"]), routers)
    assert Part(arrays, "target").sure().all()
    assert Part(arrays, "head").sure().mean() > 0.8
    assert Part(load("random"), "head").sure().all()
