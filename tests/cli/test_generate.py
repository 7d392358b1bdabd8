# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py generate` and `spark-py demo`: what they print, and one line for all that is wrong with the input."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from spark_py.cli import decoding, demo, main
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.runtime import errors
from tests.model.tiny import BF16, Tiny, write_tiny

KEYS = {
    "backend", "device", "family", "quantization", "num_drafts", "row_policy", "drafter_prefill", "prompt", "text",
    "token_ids", "new_tokens", "verify_steps", "drafted", "accepted", "acceptance_rate", "mean_accepted_length",
    "per_position", "identical_to_greedy", "seconds", "tokens_per_second",
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_tiny(tmp_path / "model", rng)


def call(*arguments: object) -> Any:
    return CliRunner().invoke(main.cli, [str(argument) for argument in arguments])


@pytest.fixture
def generate(tiny: Tiny, backend_name: str) -> Callable[..., Any]:
    """`spark-py generate` on the checkpoint and the backend of the run."""

    def run(*arguments: object) -> Any:
        backend = backend_name.removesuffix("-checked")
        return call("generate", tiny.folder, "--backend", backend, "--max-new-tokens", 6, *arguments)

    return run


def one_line(result: Any, *words: str) -> None:
    """Exit code 2, nothing on stdout, and one line of error that says `words`."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


# ---------------------------------------------------------------- what is printed


def test_the_table_has_a_row_for_0_to_3_drafts(generate: Callable[..., Any]) -> None:
    result = generate("--prompt", "def f(")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[-1] for row in rows] == ["yes"] * 4
    assert result.stdout.startswith("def f(")
    assert "seed" in result.stdout
    for header in ("accepted", "per position", "length", "verify", "second", "identical"):
        assert header in result.stdout
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["0", "1", "2", "3"], "progress"


def test_json_has_every_run(generate: Callable[..., Any], backend_name: str) -> None:
    result = generate("--prompt", "def f(", "--json")
    runs = json.loads(result.stdout)["runs"]
    assert [run["num_drafts"] for run in runs] == [0, 1, 2, 3]
    for run in runs:
        assert set(run) >= KEYS
        assert run["backend"] == backend_name.removesuffix("-checked")
        assert (run["family"], run["quantization"], run["row_policy"]) == ("qwen3_next", "bf16", "seed")
        assert run["token_ids"] == runs[0]["token_ids"]
        assert run["identical_to_greedy"] is True
        assert run["new_tokens"] == len(run["token_ids"])
        assert run["accepted"] == sum(run["per_position"])
        assert len(run["per_position"]) == (run["num_drafts"] if run["verify_steps"] else 0)
        assert run["mean_accepted_length"] == 1 + run["accepted"] / run["verify_steps"]
        assert run["tokens_per_second"] == pytest.approx(run["new_tokens"] / run["seconds"])
        expected = run["accepted"] / run["drafted"] if run["num_drafts"] else None
        assert run["acceptance_rate"] == expected


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3, 9])
def test_json_of_one_run(generate: Callable[..., Any], num_drafts: int) -> None:
    options = ("--row-policy", "verified", "--refeed", "--no-drafter-prefill")
    run = json.loads(generate("--prompt", "x", "--json", "--num-drafts", num_drafts, *options).stdout)
    assert (run["num_drafts"], run["row_policy"], run["refeed"]) == (num_drafts, "verified", True)
    assert run["drafter_prefill"] is False
    assert run["drafted"] == num_drafts * run["verify_steps"]
    assert run["prompt"] == "x"


def test_every_row_policy(generate: Callable[..., Any]) -> None:
    runs = json.loads(generate("--prompt", "x", "--json", "--row-policy", "all").stdout)["runs"]
    policies = [("seed", False), ("verified", False), ("verified", True)]
    assert runs[0]["num_drafts"] == 0
    found = [(run["row_policy"], run["refeed"], run["num_drafts"]) for run in runs[1:]]
    assert found == [(*policy, drafts) for policy in policies for drafts in (1, 2, 3)]
    assert all(run["identical_to_greedy"] for run in runs)
    runs = json.loads(generate("--prompt", "x", "--json", "--row-policy", "all", "--num-drafts", 2).stdout)["runs"]
    assert [(run["row_policy"], run["refeed"]) for run in runs] == policies
    assert "verified+refeed" in generate("--prompt", "x", "--row-policy", "all").stdout
    one_line(generate("--prompt", "x", "--row-policy", "all", "--refeed"), "--refeed")


def test_the_text_is_that_of_the_ids(generate: Callable[..., Any], tiny: Tiny) -> None:
    from tokenizers import Tokenizer

    run = json.loads(generate("--prompt", "ab", "--json", "--num-drafts", 1).stdout)
    assert run["text"] == Tokenizer.from_file(str(tiny.folder / "tokenizer.json")).decode(run["token_ids"])


def test_a_prompt_comes_with_the_checkpoint(generate: Callable[..., Any], tiny: Tiny) -> None:
    one_line(generate(), "--prompt", "prompts.json")
    (tiny.folder / "prompts.json").write_text('{"prompts": [{"text": "import"}, {"text": "no"}]}')
    assert json.loads(generate("--json", "--num-drafts", 0).stdout)["prompt"] == "import"
    (tiny.folder / "prompts.json").write_text('{"prompts": []}')
    one_line(generate(), "prompts.json")


def test_a_run_that_differs_is_a_fault(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = SpeculativeDecoder.generate

    def wrong(self: SpeculativeDecoder, *args: Any, **kwargs: Any) -> Any:
        result = right(self, *args, **kwargs)
        if self.num_drafts == 2:
            result.tokens[1] ^= 1
        return result

    monkeypatch.setattr(decoding.SpeculativeDecoder, "generate", wrong)
    result = generate("--prompt", "x")
    assert result.exit_code == 1
    assert "drafts changed the tokens" in result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1].isdigit()]
    assert [row[-1] for row in rows] == ["yes", "yes", "NO", "yes"]


def test_the_demo_takes_the_packages_checkpoint(
    tiny: Tiny, backend_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tiny.folder / "prompts.json").write_text('{"prompts": [{"text": "import"}]}')
    tiny.folder.rename(tmp_path / "qwen3_next")
    monkeypatch.setattr(demo, "DEMO_MODELS", tmp_path)
    backend = backend_name.removesuffix("-checked")
    result = call("demo", "--backend", backend, "--max-new-tokens", 3, "--json", "--num-drafts", 2)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompt"] == "import"
    kernel = call("demo", "--backend", backend, "--kernels")
    assert "residual_add_rms_norm" in kernel.stdout


def test_the_demo_compares_what_the_drafter_keeps(
    tiny: Tiny, backend_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.folder.rename(tmp_path / "qwen3_next")
    monkeypatch.setattr(demo, "DEMO_MODELS", tmp_path)
    options = ("demo", "--backend", backend_name.removesuffix("-checked"), "--prompt", "x", "--max-new-tokens", 3)

    def runs(*more: object) -> list[tuple[int, str, bool]]:
        found = json.loads(call(*options, "--json", *more).stdout)["runs"]
        return [(run["num_drafts"], run["row_policy"], run["refeed"]) for run in found]

    seed = [(drafts, "seed", False) for drafts in range(4)]
    heads = [(3, "seed", False)] * 2  # tests/cli/test_quantization.py
    assert runs() == [*seed, (3, "verified", False), (3, "verified", True), *heads]
    assert runs("--mtp-quantization", "bf16") == [*seed, (3, "verified", False), (3, "verified", True)]
    assert runs("--row-policy", "seed") == seed
    assert runs("--refeed") == [(drafts, "seed", True) for drafts in range(4)]
    lines = call(*options, "--mtp-quantization", "bf16").stdout.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["3", "verified"], ["3", "verified+refeed"]]


def test_long_lines_are_not_broken(generate: Callable[..., Any]) -> None:
    prompt = "a word [b]and[/b] more, " * 8
    assert generate("--prompt", prompt, "--num-drafts", 0).stdout.startswith(prompt)


def test_the_table_fits_a_terminal(generate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MIN_WIDTH", 80)
    monkeypatch.setenv("COLUMNS", "80")
    table = generate("--prompt", "x", "--row-policy", "all").stdout[-1300:]
    assert "\u2026" not in table, "cut"
    for word in ("verified+refeed", "per position", "identical"):
        assert word in table
    assert "9 " in generate("--prompt", "x", "--num-drafts", 9).stdout


# ---------------------------------------------------------------- what is wrong with the request


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--num-drafts", -1), ("--num-drafts", "-1")),
        (("--max-new-tokens", 0), ("--max-new-tokens", "0")),
        (("--max-new-tokens", -3), ("--max-new-tokens", "-3")),
        (("--prompt", ""), ("--prompt",)),
        (("--prompt", "a\udcff"), ("--prompt", "Unicode")),
        (("--max-new-tokens", 10_000), ("10001", "256")),
        (("--prompt", "x" * 300), ("306", "256")),
    ],
)
def test_bad_requests(generate: Callable[..., Any], arguments: tuple[object, ...], words: tuple[str, ...]) -> None:
    one_line(generate("--prompt", "x", *arguments), *words)


def test_a_request_as_long_as_the_model_allows(generate: Callable[..., Any]) -> None:
    run = json.loads(generate("--prompt", "x" * 250, "--json", "--num-drafts", 3).stdout)
    assert (run["new_tokens"], run["finish"]) == (6, "max_new_tokens")


# ---------------------------------------------------------------- what is wrong with the checkpoint


def without(name: str) -> Callable[[Tiny], None]:
    def spoil(tiny: Tiny) -> None:
        del tiny.weights[name]
        tiny.save()

    return spoil


def reshaped(name: str) -> Callable[[Tiny], None]:
    def spoil(tiny: Tiny) -> None:
        tiny.weights[name] = np.concatenate([tiny.weights[name]] * 2).astype(BF16)
        tiny.save()

    return spoil


def configured(**fields: Any) -> Callable[[Tiny], None]:
    def spoil(tiny: Tiny) -> None:
        tiny.raw |= fields
        tiny.raw = {name: value for name, value in tiny.raw.items() if value is not None}
        tiny.save()

    return spoil


def truncated(tiny: Tiny) -> None:
    file = tiny.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def headless(tiny: Tiny) -> None:
    (tiny.folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")


def removed(name: str) -> Callable[[Tiny], None]:
    return lambda tiny: (tiny.folder / name).unlink()


def written(name: str, text: str) -> Callable[[Tiny], None]:
    def spoil(tiny: Tiny) -> None:
        (tiny.folder / name).write_text(text)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (removed("config.json"), ("config.json",)),
        (written("config.json", "{"), ("config.json", "JSON")),
        (written("config.json", "[]"), ("config.json",)),
        (configured(model_type="llama"), ("model_type", "llama")),
        (configured(model_type=None), ("model_type",)),
        (configured(hidden_size=None), ("hidden_size",)),
        (configured(hidden_size=72), ("(300, 64)", "72")),
        (configured(layer_types=["linear_attention", "full_attention"]), ("linear_",)),
        (removed("model.safetensors"), ("model.safetensors",)),
        (truncated, ("model.safetensors",)),
        (headless, ("model.safetensors",)),
        (without("model.norm.weight"), ("model.norm.weight",)),
        (without("model.layers.1.self_attn.k_norm.weight"), ("model.layers.1.self_attn.k_norm.weight",)),
        (without("mtp.fc.weight"), ("mtp.fc.weight",)),
        (reshaped("model.layers.0.mlp.up_proj.weight"), ("model.layers.0.mlp.up_proj.weight", "(192, 64)")),
        (reshaped("mtp.fc.weight"), ("mtp.fc.weight", "(128, 128)")),
        (removed("tokenizer.json"), ("tokenizer.json",)),
        (written("tokenizer.json", "{}"), ("tokenizer.json",)),
        (written("tokenizer.json", ""), ("tokenizer.json",)),
    ],
)
def test_bad_checkpoints(
    generate: Callable[..., Any], tiny: Tiny, spoil: Callable[[Tiny], None], words: tuple[str, ...]
) -> None:
    spoil(tiny)
    one_line(generate("--prompt", "x"), *words)


def test_a_tokenizer_with_more_ids_than_the_model(generate: Callable[..., Any], tiny: Tiny) -> None:
    tiny.raw["vocab_size"] = 50
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tiny.weights[name] = tiny.weights[name][:50]
    tiny.save()
    result = generate("--prompt", "x")
    assert result.exit_code == 2
    assert "a token id from 0 to 49 is needed" in result.stderr


def test_no_folder(tmp_path: Path) -> None:
    one_line(call("generate", tmp_path / "none", "--prompt", "x"), "none")
    (tmp_path / "empty").mkdir()
    one_line(call("generate", tmp_path / "empty", "--prompt", "x"), "config.json")


def test_without_the_mtp_module_the_plain_run_works(generate: Callable[..., Any], tiny: Tiny) -> None:
    tiny.weights = {name: value for name, value in tiny.weights.items() if not name.startswith("mtp.")}
    tiny.save()
    one_line(generate("--prompt", "x"), "15 tensors", "mtp.")
    run = json.loads(generate("--prompt", "x", "--num-drafts", 0, "--json").stdout)
    assert (run["verify_steps"], run["drafted"], run["acceptance_rate"]) == (5, 0, None)


def test_errors_are_typed(tiny: Tiny) -> None:
    request = decoding.Request("qwen3_next", "host", "x", 4, 1, "seed", False, True)
    del tiny.weights["mtp.norm.weight"]
    tiny.save()
    with pytest.raises(errors.MissingWeightError, match=r"mtp\.norm\.weight"):
        decoding.decode(tiny.folder, request)
