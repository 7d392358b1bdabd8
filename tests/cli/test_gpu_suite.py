# SPDX-License-Identifier: AGPL-3.0-only
"""What the GPU suite makes of other programs' output; no GPU, no compute-sanitizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_benchmarks as benchmarks
from tools import gpu_children as children
from tools import gpu_sanitizer as sanitizer
from tools import gpu_suite as suite
from tools.gpu_goals import goals_of

SEEN = {"ok": True, "faults": 1, "summary": "ERROR SUMMARY: 1 error"}
CLEAN = "========= COMPUTE-SANITIZER\n12 passed in 3.2s\n========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_error_summary(tool: str) -> None:
    assert sanitizer.read_summary(tool, CLEAN) == (0, "ERROR SUMMARY: 0 errors")
    assert sanitizer.read_summary(tool, "========= ERROR SUMMARY: 1 error\n")[0] == 1
    two = CLEAN + "========= ERROR SUMMARY: 3 errors\n========= ERROR SUMMARY: 4 errors\n"
    assert sanitizer.read_summary(tool, two) == (7, "ERROR SUMMARY: 4 errors")


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("0 hazards displayed (0 errors, 0 warnings)", 0),
        ("1 hazard displayed (1 error, 0 warnings)", 1),
        ("2 hazards displayed (0 errors, 2 warnings)", 2),
        # --print-limit caps what is displayed, not what is counted.
        ("50 hazards displayed (70 errors, 1 warning)", 71),
    ],
)
def test_racecheck_summary(text: str, faults: int) -> None:
    assert sanitizer.read_summary("racecheck", f"========= RACECHECK SUMMARY: {text}\n")[0] == faults


@pytest.mark.parametrize(
    ("tool", "output"),
    [
        ("memcheck", ""),
        ("memcheck", "12 passed in 3.2s\n"),
        ("memcheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"),
        ("racecheck", CLEAN),
        ("initcheck", "a test that prints ========= ERROR SUMMARY: 0 errors\n"),
        ("memcheck", "========= ERROR SUMMARY: errors\n"),
    ],
)
def test_no_summary_is_no_zero(tool: str, output: str) -> None:
    assert sanitizer.read_summary(tool, output) == (None, "")


def test_junit_counts_and_reasons() -> None:
    report = children.read_junit(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="ok"/>
        <testcase classname="tests.a" name="bad"><failure message="assert 1 == 2&#10;more"/></testcase>
        <testcase classname="tests.a" name="broken"><error message="no fixture"/></testcase>
        <testcase classname="tests.a" name="left"><skipped message="needs --backend host: why"/></testcase>
        <testcase classname="tests.b" name="left"><skipped message="needs --backend host: why"/></testcase>
        </testsuite></testsuites>"""
    )
    assert report == {
        "passed": 1,
        "failed": 1,
        "errors": 1,
        "skipped": 2,
        "skips": {"needs --backend host: why": 2},
        "failures": ["tests.a::bad: assert 1 == 2", "tests.a::broken: no fixture"],
    }


def test_sanitizer_message_is_the_telling_line() -> None:
    output = "========= COMPUTE-SANITIZER\n========= Error: Device not supported\n========= ERROR SUMMARY: 1 error\n"
    assert sanitizer.sanitizer_message(output) == "Error: Device not supported"
    assert sanitizer.sanitizer_message("Segmentation fault\n") == "Segmentation fault"
    assert sanitizer.sanitizer_message("") == "it printed nothing"


def test_time_limit_ends_children_too(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    done = children.run([sys.executable, "-c", script], tmp_path / "log", 1.0, {})
    assert done.returncode is None


def test_hashes_are_those_of_git(tmp_path: Path) -> None:
    # Git sorts a folder as if its name ended in "/": after "z-1" and "z.1", before "z0".
    for name in ("a/z/deep.cu", "a/z-1", "a/z.1", "a/z0", "b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    (tmp_path / "a" / "z-1").chmod(0o755)

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    tree = git("write-tree")
    for folder in ("a", "a/only_caches"):
        cache = tmp_path / folder / "__pycache__"
        cache.mkdir(parents=True)
        (cache / "x.pyc").write_bytes(b"")
    for path in ("a", "b.py"):
        assert suite.git_object(tmp_path / path) == git("rev-parse", f"{tree}:{path}")


def _results(**changed: Any) -> dict[str, Any]:
    counts = {"passed": 5, "failed": 0, "errors": 0, "skipped": 1, "skips": {"why": 1}, "failures": [], "seconds": 1.0}
    tool = {**counts, "ok": True, "faults": 0, "summary": "ERROR SUMMARY: 0 errors", "control": SEEN}
    results = {
        "ran": "everything",
        "environment": {"device": "a GPU"},
        "commit": "c0ffee",
        "date": "2025-01-01T00:00:00+00:00",
        "trees": {"cuda_src": "11"},
        "tests": {**counts, "ok": True},
        "sanitizer": {"available": True, "tools": {"memcheck": tool}, "kernels": ["m::f"], "kernels_not_run": ["m::g"]},
        "demo": {"on the GPU": {"ok": True, "values": {"runs": [{"num_drafts": 3, "text": "x", "verify_steps": 7}]}}},
        "benchmarks": {"launch": {"ok": True, "values": {"ours": {"median_us": 1.5}, "device": "a GPU"}}},
        "goals": goals_of({}),
        "problems": [],
        "clean": True,
    }
    return {**results, **changed}


def test_a_clean_run_has_no_problems() -> None:
    results = _results()
    assert suite.problems_of(results, {"cuda_src": "11"}) == []
    text = suite.render(results)
    for wanted in (
        "a GPU",
        "c0ffee",
        "| memcheck | ERROR SUMMARY: 0 errors | 5 passed",
        "m::g",
        "| ours | 1.5 |",
        "| 3 | 7 |",
        "| 11 |",
    ):
        assert wanted in text


def test_each_fault_is_a_problem() -> None:
    results = _results(
        tests={"ok": False, "message": "stopped after 180 s"},
        sanitizer={
            "available": True,
            "tools": {
                "initcheck": {
                    "ok": False,
                    "summary": "",
                    "message": "no summary line: the tool did not finish",
                    "control": SEEN,
                }
            },
            "kernels": [],
            "kernels_not_run": [],
        },
        demo={"on the GPU": {"ok": False, "message": "exit code 1"}},
        benchmarks={"launch": {"ok": False, "message": "exit code 1"}},
    )
    problems = suite.problems_of(results, {"cuda_src": "22", "spark_py/ops": "33"})
    assert [text.partition(":")[0] for text in problems] == [
        "files differ from the commit's",
        "tests",
        "initcheck",
        "demo on the GPU",
        "benchmark launch",
    ]
    assert "cuda_src, spark_py/ops" in problems[0]
    assert "no summary line" in suite.render(_results(**results))


def _fake_sanitizer(folder: Path, body: str) -> str:
    """A program in compute-sanitizer's place: `body` runs after the command it was given."""
    path = folder / "compute-sanitizer"
    path.write_text(f'#!/bin/bash\ntool="$2"; shift 4; [ "$1" = --print-limit ] && shift 2\n{body}\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('echo "========= Error: Device not supported"; exit 1', "Error: Device not supported"),
        ('echo "no summary at all"', "no summary at all"),
    ],
)
def test_a_sanitizer_that_cannot_attach(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = _fake_sanitizer(tmp_path, body)
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: binary)
    result = sanitizer.sanitize(suite.parse_arguments(["--output", str(tmp_path)]), {"PATH": "/usr/bin:/bin"})
    assert result == {"available": False, "message": message}


# In place of the tools: the probe passes, "pytest" reports one passed test, and the kernel that is wrong is seen.
GOOD = """
for word in "$@"; do case "$word" in
  --junitxml=*) echo '<testsuite><testcase classname="a" name="b"/></testsuite>' > "${word#--junitxml=}";;
esac; done
last="${@: -1}"; faults=0; if [ "$last" = "$tool" ]; then faults=1; fi
summary() {
  if [ "$tool" = racecheck ]; then
    echo "========= RACECHECK SUMMARY: $faults hazards displayed ($faults errors, 0 warnings)"
  else echo "========= ERROR SUMMARY: $faults errors"; fi
}
"""


@pytest.mark.parametrize(
    ("ending", "red", "why"),
    [
        ("summary", [], ""),
        ('if [ "$tool" = memcheck ]; then summary; fi', ["racecheck", "initcheck"], "no summary line"),
        ('if [ "$tool" = initcheck ]; then faults=0; fi; summary', ["initcheck"], "a fault that is there was not seen"),
    ],
)
def test_what_makes_a_tool_red(
    ending: str, red: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing summary line, or a tool that does not see the fault of a kernel that is wrong on purpose."""
    binary = _fake_sanitizer(tmp_path, GOOD + ending)
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: binary)
    result = sanitizer.sanitize(suite.parse_arguments(["--output", str(tmp_path)]), {"PATH": "/usr/bin:/bin"})
    assert result["available"]
    assert [tool for tool, row in result["tools"].items() if not row["ok"]] == red
    problems = suite.problems_of(_results(sanitizer=result), None)
    assert [text.partition(":")[0] for text in problems] == red
    assert all(why in text for text in problems)


@pytest.mark.parametrize(
    ("words", "ran", "order"),
    [
        (["--bench"], "the benchmarks alone", ["doctor", *benchmarks.QUIET, *benchmarks.BESIDE]),
        ([], "everything", ["doctor", *benchmarks.QUIET, "tests", "sanitizer", *suite.DEMO, *benchmarks.BESIDE]),
        (["--skip-benchmark"], "everything", ["doctor", "tests", "sanitizer", *suite.DEMO]),
    ],
)
def test_what_runs_and_when(
    words: list[str], ran: str, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of the host are measured before anything else runs; each program finds the kernels of the first one."""
    seen, caches = list[str](), set[Any]()
    programs = {**benchmarks.QUIET, **benchmarks.BESIDE, **suite.DEMO}

    def step(script: list[str], log: Path, limit: float, env: dict[str, str]) -> dict[str, Any]:
        seen.append(next((name for name, program in programs.items() if program == script), "doctor"))
        caches.add(env.get("SPARK_PY_CACHE_DIR"))
        return {"ok": True, "seconds": 1.0, "values": {"findings": [], "runs": []}}

    def tests(*arguments: Any) -> dict[str, Any]:
        seen.append("tests")
        return {"ok": True, "passed": 1, "failed": 0, "errors": 0, "skipped": 0, "seconds": 1.0, "output": ""}

    def sanitize(*arguments: Any) -> dict[str, Any]:
        seen.append("sanitizer")
        return {"available": True, "tools": {}}

    monkeypatch.setattr(benchmarks, "json_step", step)
    monkeypatch.setattr(suite, "json_step", step)
    monkeypatch.setattr(suite, "pytest_run", tests)
    monkeypatch.setattr(suite, "sanitize", sanitize)
    trees = tmp_path / "trees.json"
    trees.write_text(json.dumps(suite.trees_of(suite.ROOT)))
    assert suite.main(["--output", str(tmp_path), "--trees", str(trees), *words]) == 0
    assert seen == order
    assert len(caches) == (1 if words == ["--skip-benchmark"] else 2)  # the doctor tells of the user's own
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["ran"], results["clean"]) == (ran, not words)
    assert [goal["reached"] for goal in results["goals"]] == ["not measured"] * 11
    assert f"- ran: {ran}" in (tmp_path / "RESULTS.md").read_text()


def test_no_two_options_that_leave_nothing() -> None:
    with pytest.raises(SystemExit):
        suite.parse_arguments(["--output", "x", "--bench", "--skip-benchmark"])


def test_committed_results_match_their_page() -> None:
    folder = suite.ROOT / "docs" / "gpu"
    if not (folder / "results.json").exists():
        pytest.skip("no GPU results are committed")
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "RESULTS.md").read_text() == suite.render(results)
