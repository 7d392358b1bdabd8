# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py doctor` on machines that lack things. Each runs in a process of its own, where imports can be hidden."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from spark_py.cli import doctor
from spark_py.runtime.toolkit import find_cutlass
from tests.child import environment

ROOT = Path(doctor.__file__).resolve().parents[2]

_SCRIPT = """
import importlib.metadata as metadata
import sys

installed = {installed!r}
real = metadata.version

def version(name):
    if not name.startswith("cupy"):
        return real(name)
    if name not in installed:
        raise metadata.PackageNotFoundError(name)
    return installed[name]

metadata.version = version
if not installed:
    sys.modules["cupy"] = sys.modules["cupy_backends"] = None  # importing them raises ImportError
{more}
sys.argv = ["spark-py", "doctor", *{arguments!r}]
from spark_py.cli.main import main
main()
"""


def run_doctor(
    cache: Path, installed: dict[str, str], *arguments: str, more: str = ""
) -> subprocess.CompletedProcess[str]:
    """doctor in a process where exactly `installed` of CuPy's distributions are there; `more` runs before it."""
    script = _SCRIPT.format(installed=installed, arguments=arguments, more=more)
    env = environment(ROOT, SPARK_PY_CACHE_DIR=str(cache))
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(done.stdout)["findings"]}


def test_the_base_package_alone_is_healthy(tmp_path: Path) -> None:
    done = run_doctor(tmp_path / "cache", {}, "--json")
    assert done.returncode == 0, done.stderr
    rows = findings(done)
    assert rows["cpu backend"]["status"] == "ok"
    for name in ("cupy", "nvrtc", "cuda headers"):
        assert rows[name]["status"] == "missing"
        assert rows[name]["needed_for"]
        assert rows[name]["cure"].startswith("pip install 'cupy-cuda1")
    assert str(tmp_path / "cache") in rows["cache folder"]["value"]


def test_text_says_purpose_and_cure_of_what_is_missing(tmp_path: Path) -> None:
    lines = run_doctor(tmp_path, {}).stdout.splitlines()
    at = lines.index("missing  cupy: not found")
    assert lines[at + 1].strip() == 'needed for: open_backend("cuda") and compiling kernels'
    assert lines[at + 2].strip().startswith("cure: pip install")


def test_the_compiler_of_the_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PY_CXX", "no-such-compiler")
    row = findings(run_doctor(tmp_path, {}, "--json"))["c++ compiler"]
    assert row["status"] == "missing"
    assert "no-such-compiler" in row["value"]
    assert "emulated" in row["needed_for"]
    assert row["cure"]


def test_doctor_and_compiler_agree_on_cutlass() -> None:
    row = next(finding for finding in doctor._cutlass())
    found = find_cutlass()
    assert (row.status, row.value) == (("ok", str(found)) if found else ("missing", ""))


def test_two_cupys_are_an_error(tmp_path: Path) -> None:
    both = {"cupy-cuda12x": "14.0.0", "cupy-cuda13x": "14.0.1"}
    done = run_doctor(tmp_path, both, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["healthy"] is False
    row = findings(done)["cupy"]
    assert row["status"] == "error"
    assert "cupy-cuda12x 14.0.0" in row["value"]
    assert "cupy-cuda13x 14.0.1" in row["value"]
    assert row["cure"].startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x")


def test_a_broken_cpu_backend_is_an_error(tmp_path: Path) -> None:
    more = "import spark_py.runtime.host as host\nhost.HostBackend = None"
    done = run_doctor(tmp_path, {}, "--json", more=more)
    assert done.returncode == 1
    assert "TypeError" in findings(done)["cpu backend"]["value"]


def test_a_cache_folder_that_others_may_write_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    done = run_doctor(folder, {}, "--json")
    assert done.returncode == 0
    row = findings(done)["cache folder"]
    assert row["status"] == "missing"
    assert "everybody may write it" in row["value"]


def test_cache_size_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "x.bin").write_bytes(bytes(2_500_000))
    assert "2.5 MB" in findings(run_doctor(tmp_path, {}, "--json"))["cache folder"]["value"]


@pytest.mark.parametrize(
    ("text", "version", "extra"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12.2.0 \n",
            "550.54.15",
            12,
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05", 13),
        ("", "", 12),
    ],
)
def test_driver_decides_the_extra(
    text: str, version: str, extra: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(doctor, "_DRIVER_FILE", tmp_path / "version")
    assert doctor.kernel_driver() == version
    assert doctor.suggested_extra(version) == f"cuda{extra}"


def test_cures_install_what_the_extras_do() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, line in doctor.INSTALL.items():
        wanted = [f"'{need}'" for need in extras[name] if need != "spark-py[cutlass]"]
        assert line == f"pip install {' '.join(wanted)}"
