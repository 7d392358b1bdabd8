# SPDX-License-Identifier: AGPL-3.0-only
"""The GPU suite's child processes: what one that is out of time has found is not lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.gpu_children import hear_interrupts, json_step, pytest_run

SLOW = """
import time
def test_wrong(): assert 0, "a wrong number"
def test_right(): pass
def test_endless(): time.sleep(600)
"""

LIMIT = 30
"""Seconds: enough for two short tests on a machine with other things to do."""


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    hear_interrupts()
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.deep
@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.host_only("about processes")
def test_a_run_out_of_time_names_what_failed(tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    arguments = [str(tmp_path), f"--rootdir={tmp_path}", "-c", os.devnull, "-p", "tests.conftest"]
    result = pytest_run([], arguments, tmp_path / "log", LIMIT, env)
    assert (result["ok"], result["returncode"], result["message"]) == (False, None, f"stopped after {LIMIT} s")
    assert result["failures"] == ["test_slow::test_wrong: AssertionError: a wrong number"]


@pytest.mark.usefixtures("heard_interrupts")
@pytest.mark.host_only("about processes")
def test_a_script_out_of_time_may_still_say_what_it_had(tmp_path: Path) -> None:
    code = "import time\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('{\"rows\": [1]}')"
    found = json_step(["-c", code], tmp_path / "log", 2, dict(os.environ))
    assert (found["ok"], found["message"], found["values"]) == (False, "stopped after 2 s", {"rows": [1]})


@pytest.mark.host_only("about processes")
@pytest.mark.parametrize(
    ("code", "words"), [("print('no JSON')", "no JSON object"), ("print('{}'); raise SystemExit(3)", "exit code 3")]
)
def test_a_script_that_fails_is_no_result(tmp_path: Path, code: str, words: str) -> None:
    found = json_step(["-c", code], tmp_path / "log", 60, dict(os.environ))
    assert not found["ok"]
    assert words in found["message"]
