# SPDX-License-Identifier: AGPL-3.0-only
"""tools/make_goldens.py makes the stored fixtures again, and says where two of them differ."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import pytest

from tests.parity.support import FIXTURES, Array
from tools import make_goldens
from tools.goldens import cases


def unusable(name: str) -> str | None:
    """Why a fixture cannot be made here. transformers has Qwen3-Next's layers under these names since 5.17; MTP modules
    (MtpModel, generate(use_mtp=True)) and DeepSeek-V4's layers are those of 5.24."""
    for package in ("torch", "transformers"):
        try:
            found = version(package)
        except PackageNotFoundError:
            return f"{package} is not installed: the fixtures cannot be made again here"
        needed = (5, 17) if name in cases.NAMES else (5, 24)
        if package == "transformers" and tuple(map(int, found.split(".")[:2])) < needed:
            return f"transformers {found} is older than {needed[0]}.{needed[1]}, of which this fixture is made"
    return None


@pytest.mark.parametrize("name", make_goldens.NAMES)
def test_the_stored_fixture_can_be_made_again(name: str) -> None:
    """Without the spreads, which take minutes: `make_goldens.py --check` compares them too."""
    if reason := unusable(name):
        pytest.skip(reason)
    command = [sys.executable, str(cases.ROOT / "tools" / "make_goldens.py"), "--check", "--quick", "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same" in done.stdout


@pytest.fixture(scope="module")
def stored() -> dict[str, Array]:
    return cases.load(FIXTURES / "random.npz")[1]


def test_the_same_fixture_has_no_differences(stored: dict[str, Array]) -> None:
    assert make_goldens.differences(stored, {name: value.copy() for name, value in stored.items()}) == []


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("target_logits", 1e-4),
        ("head_logits", 1e-4),
        ("head_hidden", 1e-4),
        ("target_top_logits", 1e-4),
        ("head_spread_rms", 1.0),
        ("head_hidden_in", 2),
        ("target_tokens", 1),
        ("head_first", 1),
    ],
)
def test_a_difference_is_named(stored: dict[str, Array], name: str, by: float) -> None:
    made = {key: value.copy() for key, value in stored.items()}
    place = np.unravel_index(np.abs(made[name].astype(np.float64)).argmax(), made[name].shape)
    made[name][place] += np.array(by * (stored[name][place] if isinstance(by, float) else 1), made[name].dtype)
    found = make_goldens.differences(stored, made)
    assert len(found) == 1
    assert found[0].startswith(f"{name}: ")


@pytest.mark.parametrize(("name", "prefix"), [("target_top_ids", "target"), ("head_ids", "head")])
def test_an_id_may_differ_at_a_tie_alone(stored: dict[str, Array], name: str, prefix: str) -> None:
    gaps = stored[f"{prefix}_top_logits"][:, 0] - stored[f"{prefix}_top_logits"][:, 1]
    made = {key: value.copy() for key, value in stored.items()}
    made[name][int(gaps.argmax())] += 1
    assert make_goldens.differences(stored, made) != []
    tied = {key: value.copy() for key, value in stored.items()}
    tied[f"{prefix}_top_logits"][0, 1] = tied[f"{prefix}_top_logits"][0, 0]
    made = {key: value.copy() for key, value in tied.items()}
    made[name][0] += 1
    assert make_goldens.differences(tied, made) == []


def test_missing_arrays_and_other_shapes_are_named(stored: dict[str, Array]) -> None:
    made = {name: value for name, value in stored.items() if name != "head_ids"}
    made["target_top_ids"] = made["target_top_ids"][1:]
    found = make_goldens.differences(stored, made)
    assert [line.split(":")[0] for line in found] == ["head_ids", "target_top_ids"]
