# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py check`: green on a good folder, red with the place named after any single break."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spark_py.catalog import find
from spark_py.cli.check import ARCHS, check, check_command
from spark_py.runtime.errors import UnsupportedError
from spark_py.runtime.manifest import kernels_path

pytest.importorskip("cupy_backends", reason="CuPy, which reaches NVRTC, is not installed")

USERS_CACHE = os.environ.get("SPARK_PY_CACHE_DIR")
KEYS = {"module", "function", "file", "arch", "ok", "params", "registers", "shared", "stack", "spill_bytes", "log"}
MANIFEST = """
[modules.residual_add]
source = "residual_add.cu"
functions = ["bf16_residual_add"]

[modules.own]
source = "own.cu"
functions = ["own_copy"]

[modules.newer]
source = "newer.cu"
functions = ["newer_copy"]
min_arch = "sm_100a"
"""
HEADER = "#pragma once\n#include <cuda_bf16.h>\n#define ROW 32u\n"
RESIDUAL_ADD = """#include "shared.cuh"
extern "C" __global__ void bf16_residual_add(__nv_bfloat16* residual, const __nv_bfloat16* src, unsigned n) {
    __shared__ float s[ROW];
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    s[threadIdx.x % ROW] = 0.0f;
    if (i < n) residual[i] = __float2bfloat16(__bfloat162float(residual[i]) + __bfloat162float(src[i]) + s[0]);
}
"""
OWN = """#include "shared.cuh"
extern "C" __global__ void own_copy(float* y, const float* x, unsigned n) {
    if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x];
}
"""
NEWER = 'extern "C" __global__ void newer_copy(float* y) { y[0] = 1.0f; }\n'


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PY_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "kernels é"
    root.mkdir()
    for name, text in (
        ("kernels.toml", MANIFEST),
        ("shared.cuh", HEADER),
        ("residual_add.cu", RESIDUAL_ADD),
        ("own.cu", OWN),
        ("newer.cu", NEWER),
    ):
        (root / name).write_text(text)
    return root


def run(*arguments: object) -> Result:
    return CliRunner().invoke(check_command, [str(argument) for argument in arguments])


def rows(result: Result) -> list[dict[str, Any]]:
    return list(json.loads(result.stdout)["kernels"])


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        text = (root / name).read_text()
        assert text.count(old) >= 1
        (root / name).write_text(text.replace(old, new, 1))

    return edit


# ---------------------------------------------------------------- green


def test_a_good_folder(folder: Path) -> None:
    result = run(folder, "--json")
    assert result.exit_code == 0, result.output
    found = rows(result)
    assert len(found) == 3 * len(ARCHS)
    assert len({(row["module"], row["function"], row["arch"]) for row in found}) == len(found)
    for row in found:
        assert set(row) == KEYS
        assert row["ok"] is True
        assert Path(row["file"]).is_file()
        if row["module"] == "newer" and row["arch"] != "sm_100a":
            assert row["registers"] is None
            assert "needs sm_100a" in row["log"]
        else:
            assert row["registers"] > 0
            assert row["log"] == ""
            assert row["stack"] == row["spill_bytes"] == 0
    first = found[0]
    assert first["params"] == ["bf16* residual", "const bf16* src", "u32 n"]
    assert first["shared"] == 128


def test_the_table_names_kernels_and_says_what_was_not_compiled(folder: Path) -> None:
    result = run(folder, "--arch", "sm_90a")
    assert result.exit_code == 0
    assert "residual_add::bf16_residual_add" in result.stdout
    assert "128" in result.stdout
    assert "needs sm_100a, not compiled for sm_90a" in result.stdout
    assert "3 checks, 0 failed" in result.stdout


def test_a_second_run_says_the_same_from_the_cache(folder: Path) -> None:
    assert rows(run(folder, "--json")) == rows(run(folder, "--json"))


def test_files_folders_without_manifest_and_ptx(folder: Path, tmp_path: Path) -> None:
    one = rows(run(folder / "own.cu", "--arch", "sm_80", "--json"))
    assert [(row["module"], row["function"]) for row in one] == [("own", "own_copy")]
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "a.cu").write_text(NEWER)
    (loose / "b.ptx").write_text(".version 8.0\n.target sm_90a\n.visible .entry b(.param .u32 n)\n{ ret; }\n")
    found = rows(run(loose, "--arch", "sm_80,sm_90a", "--json"))
    assert [(row["module"], row["function"], row["arch"], row["ok"]) for row in found] == [
        ("a", "newer_copy", "sm_80", True),
        ("a", "newer_copy", "sm_90a", True),
        ("b", "b", "sm_80", True),
        ("b", "b", "sm_90a", True),
    ]
    assert "sm_90a runs on" in found[2]["log"]
    assert found[3]["params"] == ["32-bit word param_0"] or found[3]["params"] == ["32-bit word n"]


def test_own_kernels_are_the_default_and_all_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # The user's cache: CuTe takes half a minute, and other tests compile the same files.
    monkeypatch.delenv("SPARK_PY_CACHE_DIR")
    if USERS_CACHE is not None:
        monkeypatch.setenv("SPARK_PY_CACHE_DIR", USERS_CACHE)
    result = run("--json", "--arch", "sm_90a")
    assert result.exit_code == 0, result.stdout
    found = rows(result)
    assert all(Path(row["file"]).parent == kernels_path() for row in found)
    assert any(find(row["module"], row["function"]) for row in found)


# ---------------------------------------------------------------- red


@pytest.mark.parametrize(
    ("edit", "module", "says"),
    [
        pytest.param(
            replace("residual_add.cu", ", unsigned n)", ", unsigned n, float extra)"),
            "residual_add",
            "parameter 3 'f32 extra'",
            id="one parameter more",
        ),
        pytest.param(
            replace("residual_add.cu", "const __nv_bfloat16* src, unsigned n", "unsigned n, const __nv_bfloat16* src"),
            "residual_add",
            "parameter 1",
            id="two swapped",
        ),
        pytest.param(
            replace(
                "residual_add.cu",
                "__nv_bfloat16* residual, const __nv_bfloat16* src",
                "__nv_bfloat16* src, __nv_bfloat16* residual",
            ),
            "residual_add",
            "stands at",
            id="two of one type swapped",
        ),
        pytest.param(
            replace("residual_add.cu", "unsigned n)", "unsigned long long n)"),
            "residual_add",
            "u64 n",
            id="another width",
        ),
        pytest.param(
            replace("residual_add.cu", "unsigned n)", "int n)"), "residual_add", "i32 n", id="another signedness"
        ),
        pytest.param(
            replace("residual_add.cu", 'extern "C" ', ""), "residual_add", 'put extern "C"', id="mangled name"
        ),
        pytest.param(
            replace("residual_add.cu", "bf16_residual_add", "bf16_residual_sum"),
            "residual_add",
            "no function 'bf16_residual_add'",
            id="renamed",
        ),
        pytest.param(replace("own.cu", "[threadIdx.x];", "[threadIdx.x]"), "own", "own.cu:", id="syntax"),
        pytest.param(replace("shared.cuh", "#define ROW 32u", "#define ROW"), "residual_add", ":3", id="header"),
        pytest.param(replace("own.cu", "shared.cuh", "gone.cuh"), "own", "'gone.cuh' not found", id="missing header"),
        pytest.param(lambda root: (root / "own.cu").write_text(""), "own", "empty", id="empty file"),
    ],
)
def test_one_break_is_red_and_names_the_place(
    folder: Path, edit: Callable[[Path], object], module: str, says: str
) -> None:
    assert run(folder, "--arch", "sm_90a").exit_code == 0
    edit(folder)
    result = run(folder, "--arch", "sm_90a", "--json")
    assert result.exit_code == 1
    bad = [row for row in rows(result) if not row["ok"]]
    assert [row["module"] for row in bad] == [module]
    assert says in bad[0]["log"]
    assert str(folder) in bad[0]["log"]
    text = run(folder, "--arch", "sm_90a")
    assert text.exit_code == 1
    assert "FAIL" in text.stdout
    assert says in text.stdout


def test_the_catalogue_knows_the_kernel_that_these_tests_break() -> None:
    assert find("residual_add", "bf16_residual_add") is not None


@pytest.mark.parametrize(
    ("text", "says"), [("[modules", "not valid TOML"), (MANIFEST.replace("own.cu", "gone.cu"), "gone.cu")]
)
def test_a_broken_manifest_is_red(folder: Path, text: str, says: str) -> None:
    (folder / "kernels.toml").write_text(text)
    result = run(folder, "--json")
    assert result.exit_code == 1
    assert says in rows(result)[0]["log"]
    assert "kernels.toml" in run(folder).stdout


def test_bad_ptx_is_red(tmp_path: Path) -> None:
    path = tmp_path / "k.ptx"
    path.write_text(".version 8.0\n.target sm_80\n.visible .entry k(.param .u32 n)\n{ ret;")
    result = run(path)
    assert result.exit_code == 1
    assert "truncated" in result.stdout
    path.write_text(".version 8.0\n.target sm_80\n.visible .entry k(.param .texref n)\n{ ret; }\n")
    result = run(path)
    assert result.exit_code == 1
    assert "cannot read parameter 0" in result.stdout


def test_a_failure_in_one_folder_does_not_hide_the_others(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "x.cu").write_text("nonsense")
    found = rows(run(other, folder, "--arch", "sm_90a", "--json"))
    assert [row["ok"] for row in found].count(False) == 1
    assert len(found) == 4


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such/folder"], "does not exist"),
        (["--arch", "sm_9x"], "sm_9x"),
        (["--arch", ""], "at least one"),
        (["--arch", "sm_30"], "sm_30 is not known"),
        (["--nope"], "--nope"),
        ([__file__], "neither a kernel folder"),
    ],
)
def test_bad_usage_is_2(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


def test_the_function_raises_for_an_unknown_architecture(folder: Path) -> None:
    with pytest.raises(UnsupportedError):
        check([folder], ["sm_90a", "sm_30"])


def test_progress_is_told_of_every_job(folder: Path) -> None:
    done: list[str] = []
    check([folder], ["sm_80", "sm_90a"], done.append)
    assert sorted(done) == sorted(f"{m} {a}" for m in ("own", "newer", "residual_add") for a in ("sm_80", "sm_90a"))
