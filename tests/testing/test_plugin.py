# SPDX-License-Identifier: AGPL-3.0-only
"""The pytest plugin in a project of a user: the kernel and the test of the README, and the options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import spark_py
from spark_py.emulator.compiler import find_compiler
from spark_py.runtime.errors import BackendUnavailableError
from tests.child import environment

pytestmark = pytest.mark.host_only("runs a pytest of its own, which names its backend")

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
KERNEL, TEST = (
    next(block for block in re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S) if "scale_rows" in block)
    for language in ("cuda", "python")
)
OFF_BY_ONE = ("i < n;", "i + 1 < n;")
BEYOND = ("__bfloat162float(x[row * n + i])", "__bfloat162float(x[row * n + i + 1])")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The user's folder. The entry point is what an installed package brings."""
    try:
        find_compiler()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "scale.cu").write_text(KERNEL)
    (tmp_path / "test_scale.py").write_text(TEST)
    info = tmp_path / "site" / "spark_py_entry-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spark_py_entry\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nspark_py = spark_py.testing.plugin\n")
    return tmp_path


def edit(project: Path, change: tuple[str, str]) -> None:
    file = project / "kernels" / "scale.cu"
    assert change[0] in file.read_text()
    file.write_text(file.read_text().replace(*change))


def pytest_in(project: Path, *arguments: str) -> tuple[int, str]:
    package = Path(spark_py.__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    child = environment(project / "site", package, PYTEST_ADDOPTS="", PYTEST_PLUGINS="")
    done = subprocess.run(command, cwd=project, env=child, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("backend", [(), ("--backend", "emulated-checked")], ids=str)
def test_ten_lines_are_enough(project: Path, backend: tuple[str, ...]) -> None:
    code, text = pytest_in(project, "--kernels", "kernels", *backend)
    assert code == 0, text
    assert f"backend {backend[1] if backend else 'emulated'}, seed 0, kernels {project / 'kernels'}" in text


def test_a_wrong_kernel_shows_the_worst_element(project: Path) -> None:
    edit(project, OFF_BY_ONE)
    code, text = pytest_in(project, "--kernels", "kernels")
    assert code == 1, text
    assert "scale::scale_rows: out: 7 of 7000 differ (at most 0 ulp), worst at [" in text
    assert ", 999]: got -2.86" in text
    assert "(0xa5a5)" in text


def test_a_wrong_element_has_the_block_that_wrote_it(project: Path) -> None:
    edit(project, ("scale[row])", "(row == 5 && i == 70 ? 9.0f : scale[row]))"))
    code, text = pytest_in(project, "--kernels", "kernels")
    assert code == 1, text
    assert "1 of 7000 differ (at most 0 ulp), worst at [5, 70]" in text
    assert "ulp; written by block (5, 0, 0)" in text


def test_a_read_beyond_is_found_by_the_checked_backend(project: Path) -> None:
    edit(project, BEYOND)
    code, text = pytest_in(project, "--kernels", "kernels", "--backend", "emulated-checked")
    assert code == 1, text
    assert "KernelBoundsError" in text
    assert "scale.cu:6" in text


def test_options_that_make_no_sense_are_refused(project: Path) -> None:
    code, text = pytest_in(project, "--kernels", "nowhere")
    assert code == 4
    assert "--kernels nowhere: no such file or folder" in text
    code, text = pytest_in(project, "--backend", "abacus")
    assert code == 4
    code, text = pytest_in(project, "-p", "no:spark_py")
    assert "fixture 'kernel_case' not found" in text


def test_the_seed_is_in_the_header_and_decides(project: Path) -> None:
    (project / "test_scale.py").write_text("def test_draw(rng):\n    print('drew', rng.random())\n")
    drawn = [
        next(line for line in pytest_in(project, "-s", *seed)[1].splitlines() if "drew" in line)
        for seed in ((), ("--seed", "0"), ("--seed", "7"))
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    code, text = pytest_in(project, "--seed", "random")
    assert code == 0
    assert "seed random" not in text
