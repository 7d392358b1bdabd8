# SPDX-License-Identifier: AGPL-3.0-only
"""The command line: exit codes, streams, and what `kernels` and `demo` print. Runs without a GPU."""

from __future__ import annotations

import inspect
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from spark_py import __version__, catalog
from spark_py.catalog import all_kernels, find
from spark_py.catalog.spec import DTYPES
from spark_py.cli import kernel_demo, main
from spark_py.runtime.errors import CompileError, InvalidArgumentError, LeakError

ROOT = Path(main.__file__).resolve().parents[2]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(main.cli, arguments)


def test_version_and_help_name_every_command() -> None:
    assert call("--version").stdout == f"spark-py, version {__version__}\n"
    result = call("--help")
    assert result.exit_code == 0
    for name in ("check", "demo", "doctor", "generate", "kernels"):
        assert f"\n  {name} " in result.stdout


def test_unknown_command_is_a_usage_error() -> None:
    result = call("chekc")
    assert result.exit_code == 2
    assert "No such command 'chekc'" in result.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """A command `fail` that raises what the list holds."""
    errors: list[Exception] = []

    @click.command("fail")
    def command() -> None:
        raise errors[0]

    monkeypatch.setattr(main.cli, "get_command", lambda ctx, name: command)
    return errors


def test_a_typed_error_is_one_line_and_exit_code_2(failing: list[Exception]) -> None:
    failing.append(LeakError("3 allocations were alive"))
    result = call("fail")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: 3 allocations were alive\n")


def test_verbose_adds_the_compilers_log(failing: list[Exception]) -> None:
    failing.append(CompileError("a.cu", "sm_90a", "a.cu(3): error: x\nmany lines", 3, "x is undefined"))
    quiet, loud = call("fail"), call("-v", "fail")
    assert quiet.stderr == "error: a.cu:3: does not compile for sm_90a: x is undefined (spark-py -v shows the rest)\n"
    assert "many lines" in loud.stderr
    assert quiet.exit_code == loud.exit_code == 2


def test_debug_lets_the_error_through(failing: list[Exception]) -> None:
    failing.append(LeakError("left"))
    assert isinstance(call("--debug", "fail").exception, LeakError)


def test_a_fault_of_the_program_is_no_clean_exit(failing: list[Exception]) -> None:
    failing.append(RuntimeError("a bug"))
    assert isinstance(call("fail").exception, RuntimeError)


def test_no_log_handler_stays_behind() -> None:
    before = list(logging.getLogger("spark_py").handlers)
    call("-vv", "kernels")
    assert logging.getLogger("spark_py").handlers == before


def test_import_touches_no_gpu_library() -> None:
    script = "import sys, spark_py.cli.main, spark_py.cli.kernels, spark_py.cli.doctor, spark_py.cli.demo; "
    script += "import spark_py.cli.generate; "
    script += "print(*({'cupy', 'torch', 'cuda'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_kernels_json_is_the_catalogue() -> None:
    rows = json.loads(call("kernels", "--json").stdout)
    specs = list(all_kernels())
    assert [(row["module"], row["function"]) for row in rows] == [spec.key for spec in specs]
    for row, spec in zip(rows, specs, strict=True):
        assert [(p["type"], p["name"]) for p in row["parameters"]] == [(p.ctype, p.name) for p in spec.params]
        assert (row["grid"], row["block"], row["gpu_only"]) == (spec.grid_text, spec.block_text, spec.gpu_only)
        assert row["docstring"] == inspect.getdoc(spec.reference)
        assert row["source"].endswith(".cu")


def test_kernels_text() -> None:
    spec = find("norm", "rms_norm")
    assert spec is not None
    doc = inspect.getdoc(spec.reference) or ""
    several, one = call("kernels", "norm::*").stdout, call("kernels", "norm::rms_norm").stdout
    assert "norm::rms_norm_residual(" in several
    assert "gemv" not in several
    assert doc.splitlines()[-1] not in several
    assert one.startswith("norm::rms_norm(const bf16* input, ")
    for wanted in (spec.grid_text, spec.block_text, *doc.splitlines(), "norm.cu"):
        assert wanted in one


def test_kernels_of_no_match() -> None:
    result = call("kernels", "no_such_*")
    assert result.exit_code == 2
    assert "no_such_*" in result.stderr
    with pytest.raises(InvalidArgumentError):
        CliRunner().invoke(main.cli, ["--debug", "kernels", "no_such_*"], catch_exceptions=False)


def test_demo_reports_what_it_ran() -> None:
    result = call("demo", "--kernels", "--backend", "host", "--seed", "3")
    assert result.exit_code == 0
    assert f"{len(list(all_kernels()))} kernels" in result.stdout
    assert "backend host" in result.stdout
    assert "seed 3" in result.stdout
    found = json.loads(call("demo", "--kernels", "--backend", "host", "--seed", "3", "--json").stdout)
    assert (found["backend"], found["seed"], set(found["outputs"])) == ("host", 3, {"sum", "norm"})
    assert sum(map(len, found["kernels"].values())) == len(list(all_kernels()))


def test_demo_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = kernel_demo.run_kernel

    def wrong(*arguments: Any) -> Any:
        sums, norm = right(*arguments)
        norm.view(np.uint16)[2, 100] += 2
        return sums, norm

    monkeypatch.setattr(kernel_demo, "run_kernel", wrong)
    result = call("demo", "--kernels", "--backend", "host")
    assert result.exit_code == 1
    assert "the kernel is wrong" in result.stderr


def test_ulp_distance() -> None:
    numbers = np.array([1.0, -1.0, 0.0, -0.0, 2.0], DTYPES["bf16"])
    others = np.array([1.0078125, -1.0078125, -0.0, 0.0, -2.0], DTYPES["bf16"])
    assert kernel_demo.ulp_distance(numbers, others).tolist() == [1, 1, 0, 0, 2 * 0x4000]


def test_the_readmes_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    # The other block is a user's test file; the tests of the pytest plugin run it.
    (block,) = (block for block in blocks if "open_backend" in block)
    exec(compile(block, "README.md", "exec"), {})
    error = float(capsys.readouterr().out.split("largest relative error:")[1])
    # Half a BF16 ulp is at most 2^-8 of the value; the FP32 arithmetic before it may move it to the next number.
    assert 0 < error < 2.0**-7


def test_the_readme_names_every_kernel_family() -> None:
    families = re.search(r"^Families so far: (.*?)\.$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert families is not None
    files = {path.stem for path in Path(catalog.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert set(re.findall(r"`(\w+)`", families[1])) == files - {"spec"}
