# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py generate` and `spark-py demo` on DeepSeek-V4: what the drafter reads, which runs there are, and what is
refused."""

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
from spark_py.cli.decoding import Run
from spark_py.cli.decoding_notes import note_on_modes
from spark_py.cli.decoding_request import Request
from spark_py.model.checkpoint import FAMILIES
from spark_py.model.layers.hidden_mode import HiddenMode
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.weights import WeightStore
from tests.model import v4_files
from tests.model.tiny import Tiny, write_tiny, write_tokenizer
from tests.model.v4_tiny import write_drafting_v4

Start = Callable[..., Any]


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    found = write_drafting_v4(tmp_path / "deepseek_v4", rng)
    prompts = [{"text": "def f("}, {"text": "import os"}]
    (found.folder / "prompts.json").write_text(json.dumps({"prompts": prompts}))
    return found


@pytest.fixture
def start(tiny: Tiny, backend_name: str) -> Start:
    def run(command: str, *arguments: object, tokens: int = 4, folder: Path = tiny.folder) -> Any:
        words: tuple[object, ...] = (folder,) if command == "generate" else ("--family", "deepseek_v4")
        options = ("--backend", backend_name.removesuffix("-checked"), "--max-new-tokens", tokens)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo, "DEMO_MODELS", folder.parent)
            return CliRunner().invoke(main.cli, [str(word) for word in (command, *words, *options, *arguments)])

    return run


def runs(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    several: list[dict[str, Any]] = found.get("runs", [found])
    assert all(run["identical_to_greedy"] for run in several)
    assert len({tuple(run["token_ids"]) for run in several}) == 1
    return several


def one_line(result: Any, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one line of error that says `words`."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


# ---------------------------------------------------------------- which runs


def planned(**chosen: Any) -> list[tuple[str, str, bool, bool, tuple[int, ...]]]:
    """(hidden mode, row policy, refeed, sees the prompt, drafts) of each head."""
    fields: dict[str, Any] = {"num_drafts": None, "row_policy": None, "refeed": False, "drafter_prefill": True}
    request = Request("deepseek_v4", "host", "x", 4, **(fields | {"compare": True} | chosen))
    found = request.plan(FAMILIES["deepseek_v4"], (), tuple(HiddenMode))
    assert {head.quantization for head in found} == {None}
    return [
        (
            head.hidden_mode.value if head.hidden_mode else "",
            head.levers.row_policy.value,
            head.levers.refeed,
            head.levers.drafter_prefill,
            head.drafts,
        )
        for head in found
    ]


REFERENCE = [
    ("reference", "verified", False, True, (0, 1, 2, 3)),
    ("reference", "seed", False, True, (3,)),
    ("reference", "verified", True, True, (3,)),
]
COLLAPSED = [("collapsed", policy, refeed, True, (3,)) for _, policy, refeed, _, _ in REFERENCE]


def test_the_demo_compares_modes_policies_and_a_drafter_without_the_prompt() -> None:
    unfed = [(mode, "verified", False, False, (3,)) for mode in ("reference", "collapsed")]
    assert planned() == [*REFERENCE, unfed[0], *COLLAPSED, unfed[1]]
    nothing = planned(drafter_prefill=False)
    assert [(*head[:3], head[4]) for head in nothing] == [(*head[:3], head[4]) for head in REFERENCE + COLLAPSED]
    assert not any(head[3] for head in nothing)
    collapsed = planned(hidden_modes=(HiddenMode.COLLAPSED,))
    assert collapsed == [("collapsed", *head[1:]) for head in REFERENCE]
    assert planned(row_policy="seed") == [("reference", "seed", False, True, (0, 1, 2, 3))]
    assert planned(num_drafts=2) == [("reference", "verified", False, True, (2,))]
    assert planned(compare=False) == REFERENCE[:1]
    both = planned(compare=False, hidden_modes=tuple(HiddenMode), num_drafts=1)
    assert [head[0] for head in both] == ["reference", "collapsed"]


def test_only_families_with_a_choice_are_asked_for_it() -> None:
    for name, family in FAMILIES.items():
        for chosen, has in (
            ({"quantizations": (MtpQuantization.FP8,)}, family.quantizes),
            ({"hidden_modes": (HiddenMode.COLLAPSED,)}, family.hidden_modes),
        ):
            request = Request(name, "host", "x", 4, 1, None, False, True, **chosen)  # type: ignore[arg-type]
            if has:
                request.check_choices(name, family)
                continue
            with pytest.raises(InvalidArgumentError, match=name):
                request.check_choices(name, family)


# ---------------------------------------------------------------- what is printed


def test_one_run(start: Start) -> None:
    (run,) = runs(start("generate", "--num-drafts", 2, "--json"))
    assert (run["family"], run["hidden_mode"], run["quantization"]) == ("deepseek_v4", "reference", None)
    assert (run["row_policy"], run["drafter_prefill"]) == ("verified", True)
    assert run["drafted"] == 2 * run["verify_steps"] > 0
    (run,) = runs(start("generate", "--num-drafts", 1, "--json", "--hidden-mode", "Collapsed", "--no-drafter-prefill"))
    assert (run["hidden_mode"], run["drafter_prefill"]) == ("collapsed", False)


def test_both_modes_in_one_call(start: Start) -> None:
    words = ("--hidden-mode", "reference", "--hidden-mode", "collapsed", "--row-policy", "all", "--num-drafts", 2)
    found = runs(start("generate", "--json", *words))
    assert [(run["hidden_mode"], run["row_policy"], run["refeed"]) for run in found] == [
        (mode, *policy)
        for mode in ("reference", "collapsed")
        for policy in (("seed", False), ("verified", False), ("verified", True))
    ]
    assert any(run["accepted"] for run in found)


def test_several_sequences(start: Start) -> None:
    (run,) = runs(start("generate", "--json", "--num-drafts", 2, "--concurrency", 2))
    assert run["concurrency"] == len(run["sequences"]) == 2


def test_the_table(start: Start, backend_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend_name.startswith("emulated"):
        pytest.skip("a dozen runs: too much for kernels that run thread by thread")
    table = start("demo").stdout
    rows = [line.split() for line in table.splitlines() if re.match(r" +\d.* yes *$", line)]
    modes = ["-", *["reference"] * 5, "reference*", *["collapsed"] * 3, "collapsed*"]
    assert [row[:2] for row in rows] == [[drafts, mode] for drafts, mode in zip("01233333333", modes, strict=True)]
    assert [row[2] for row in rows[3:]] == ["verified", "seed", "verified+refeed", "verified"] * 2
    caption = next(line for line in table.splitlines() if line.startswith("*"))
    assert caption.strip() == "* the drafter does not see the prompt"
    title = " ".join(start("generate", "--hidden-mode", "collapsed", "--no-drafter-prefill").stdout.split())
    assert "deepseek_v4 in collapsed on" in title
    assert "; the drafter does not see the prompt" in title
    monkeypatch.setattr(decoding, "_MIN_WIDTH", 80)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = start("demo").stdout
    assert "\u2026" not in narrow, "cut"
    assert re.search(r"reference\* +verified ", narrow)
    assert " +refeed " in narrow


def run_of(mode: str, per_position: list[int], steps: int = 20, prompt: bool = True) -> Run:
    accepted, drafted = sum(per_position), len(per_position)
    values = dict.fromkeys(Run.__slots__, "") | {
        "hidden_mode": mode,
        "drafter_prefill": prompt,
        "num_drafts": drafted,
        "verify_steps": steps,
        "accepted": accepted,
        "per_position": per_position,
        "mean_accepted_length": 1 + accepted / steps,
    }
    return Run(**values)


def test_what_the_table_says_where_reference_is_not_the_best() -> None:
    """Accepted drafts a step, of 20 steps: 3 in 10 of them and 0 in the others have a variance of 2.25."""
    reference = run_of("reference", [10, 10, 10])
    assert note_on_modes([reference, run_of("collapsed", [10, 10, 9])]) is None
    assert note_on_modes([reference, run_of("reference", [20, 20, 20], prompt=False)]) is None, "one mode"
    near = note_on_modes([run_of("reference", [9], 10), reference, run_of("collapsed", [12, 12, 12])])
    error = (2.25 / 20 + 9 * 0.6 * 0.4 / 20) ** 0.5
    assert near is not None
    assert near.startswith(f"collapsed is 0.30 tokens a step above reference, with a standard error of {error:.2f}: ")
    assert "does not tell them apart" in near
    far = note_on_modes([reference, run_of("collapsed", [10, 10, 10]), run_of("collapsed", [19, 19, 19], prompt=False)])
    assert far is not None
    assert far.startswith("collapsed* is 1.35 ")
    assert far.endswith("drafts better so")


def test_a_folder_as_published(
    start: Start, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4M3, MXFP4 and scales in three shards with an index: the plain run reads nothing of the module, and a run with
    drafts all of it."""
    tensors = v4_files.published(rng)
    folder = v4_files.write_folder(tmp_path / "published", tensors)
    write_tokenizer(folder)
    loaded: set[str] = set()
    load = WeightStore.load

    def noted(self: WeightStore, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        found = load(self, *args, **kwargs)
        loaded.update(found)
        return found

    monkeypatch.setattr(WeightStore, "load", noted)
    options = ("generate", "--prompt", "x", "--json", "--num-drafts")
    runs(start(*options, 0, folder=folder))
    assert loaded
    assert not any(name.startswith("mtp.") for name in loaded)
    loaded.clear()
    (run,) = runs(start(*options, 2, folder=folder))
    assert (run["hidden_mode"], run["drafted"] > 0) == ("reference", True)
    experts = {f"mtp.0.ffn.experts.{e}.{w}.weight" for e in range(6) for w in ("w1", "w2", "w3")}
    assert experts <= loaded


# ---------------------------------------------------------------- what is refused


def test_an_unknown_mode(start: Start) -> None:
    result = start("generate", "--hidden-mode", "both")
    assert result.exit_code == 2
    assert "'both' is not one of 'reference', 'collapsed'" in " ".join(result.stderr.split())


def test_options_of_other_families(start: Start, tmp_path: Path, rng: np.random.Generator) -> None:
    one_line(start("generate", "--mtp-quantization", "fp8"), "--mtp-quantization", "fp8", "deepseek_v4")
    qwen = write_tiny(tmp_path / "qwen", rng)
    result = start("generate", "--prompt", "x", "--hidden-mode", "reference", folder=qwen.folder)
    one_line(result, "--hidden-mode", "reference", "qwen3_next")


def test_a_family_that_does_not_open_the_folder(start: Start, tmp_path: Path, rng: np.random.Generator) -> None:
    one_line(start("generate", "--family", "qwen3_next"), "family", "qwen3_next", "'deepseek_v4'")
    qwen = write_tiny(tmp_path / "qwen", rng)
    one_line(start("generate", "--family", "deepseek_v4", folder=qwen.folder), "deepseek_v4", "'qwen3_next'")


@pytest.mark.parametrize(
    ("name", "plain"), [("layers.1.attn.wkv.weight", False), ("hc_head_fn", False), ("mtp.0.ffn.gate.bias", True)]
)
def test_a_missing_tensor_is_named(start: Start, tiny: Tiny, name: str, plain: bool) -> None:
    """One of the module's is missed where there are drafts alone."""
    del tiny.weights[name]
    tiny.save()
    one_line(start("generate"), name)
    if plain:
        (run,) = runs(start("generate", "--num-drafts", 0, "--json"))
        assert run["drafted"] == 0


def test_a_layer_with_a_compressor_is_named(start: Start, tiny: Tiny) -> None:
    tiny.raw["layer_types"] = ["sliding_attention", "compressed_sparse_attention"]
    tiny.save()
    one_line(start("generate"), "layer 1", "compressed_sparse_attention")
