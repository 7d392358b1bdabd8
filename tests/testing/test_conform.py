# SPDX-License-Identifier: AGPL-3.0-only
"""spark-py conform sorts a foreign tree: right, other parameters, other values, races, other decisions, GPU-only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from spark_py.cli.main import cli
from spark_py.runtime.errors import InvalidArgumentError, ManifestError, UnsupportedError
from spark_py.runtime.manifest import kernels_path
from spark_py.testing.conform import KernelReport, conform
from spark_py.testing.trees import open_sets

pytestmark = pytest.mark.host_only("compiles and emulates whatever the device; the run on the host has done it")

FOREIGN = Path(__file__).parent / "foreign"
COMMON, MODEL = "gb10/common", "gb10/qwen/nvfp4"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["conform", *map(str, arguments)])


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str, str], KernelReport]:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC is reached through CuPy, which is not installed")
    return {(r.set, r.module, r.function): r for r in conform(FOREIGN)}


@pytest.mark.parametrize(
    ("kernel", "status"),
    [
        (("norm", "rms_norm"), "ok"),
        (("norm", "rms_norm_residual"), "ok"),
        (("residual_add", "bf16_residual_add"), "ok"),
        (("ssm_preprocess", "deinterleave_qg"), "ok"),
        (("residual_add", "sigmoid_gate_mul"), "failed: values"),
        (("residual_add", "bf16_concat"), "failed: parameters"),
        (("embed_from_argmax", "embed_from_argmax"), "failed: parameters"),
        (("argmax", "argmax_bf16"), "differs: argmax ties, argmax of very negative rows"),
        (("gemv", "dense_gemv_bf16"), "differs: order of sums"),
        (("rms_norm_vanilla", "rms_norm_vanilla"), "failed: faults"),
        (("moe_silu_mul", "moe_silu_mul"), "failed: faults"),
        (("reshape_and_cache", ""), "failed: compiling"),
        (("gemm", "dense_gemm_bf16"), "cuda only: inline PTX"),
        (("gemm", "house_special"), "unknown"),
    ],
    ids=str,
)
def test_each_kernel_is_sorted(
    reports: dict[tuple[str, str, str], KernelReport], kernel: tuple[str, str], status: str
) -> None:
    report = reports[COMMON, *kernel]
    assert report.status == status, report.as_json()
    assert report.fails(strict=False) == status.startswith("failed")
    assert report.fails(strict=True) == status.startswith(("failed", "differs"))
    if status == "ok":
        assert report.passed > 5
        assert report.faults == []
        assert report.compiles == {"sm_121a": True}


def test_messages_name_what_is_wrong(reports: dict[tuple[str, str, str], KernelReport]) -> None:
    race = "\n".join(reports[COMMON, "rms_norm_vanilla", "rms_norm_vanilla"].faults or [])
    assert "DataRaceError" in race
    assert "rms_norm_vanilla.cu:10" in race
    beyond = "\n".join(reports[COMMON, "moe_silu_mul", "moe_silu_mul"].faults or [])
    assert "KernelBoundsError" in beyond
    assert "'gate'" in beyond
    assert "SwiGLU clamp" in reports[COMMON, "moe_silu_mul", "moe_silu_mul"].differs
    assert "parameter 3" in (reports[COMMON, "residual_add", "bf16_concat"].abi or "")
    assert 'extern "C"' in (reports[COMMON, "embed_from_argmax", "embed_from_argmax"].abi or "")
    assert "store.cu:5" in reports[COMMON, "reshape_and_cache", ""].messages[0]
    ties = [f.message for f in reports[COMMON, "argmax", "argmax_bf16"].failures if "(1, 2)" in f.case]
    assert "got 2 (0x00000002), expected 1 (0x00000001)" in ties[0]


def test_a_models_file_takes_the_place_of_the_common_one(reports: dict[tuple[str, str, str], KernelReport]) -> None:
    report = reports[MODEL, "norm", "rms_norm"]
    assert report.status == "failed: values"
    assert report.file.endswith("qwen/nvfp4/rows.cu")
    assert (MODEL, "norm", "rms_norm_residual") not in reports
    # Kernels that borrow are those of the lender, which were looked at.
    assert not any(key[0].startswith("gb10/borrower") for key in reports)


def test_flags_and_names_are_merged() -> None:
    sets = {each.label: each for each in open_sets(FOREIGN)}
    assert list(sets) == [COMMON, MODEL, "gb10/borrower/nvfp4"]
    rows = next(module for module in sets[MODEL].modules if module.name == "norm")
    flags = ["-DROW_THREADS_MOST=1024", "--fmad=false", "-DGREEDY_THREADS=1024", "-DGAIN_OFFSET=0.f"]
    assert rows.flags == (*flags, f"-I{FOREIGN / 'gb10/qwen/nvfp4'}")
    greedy = next(module for module in sets[MODEL].modules if module.name == "argmax")
    assert greedy.flags[-1] == f"-I{FOREIGN / 'gb10/common'}"
    assert sets[COMMON].arch == "sm_121a"
    assert sets[MODEL].absent == {("norm", "rms_norm_residual"): "this model keeps no copy"}
    assert [each.label for each in open_sets(FOREIGN / "gb10/qwen/nvfp4")] == [MODEL]


@pytest.mark.parametrize("name", ["HARDWARE.toml", "common/KERNEL.toml", "qwen/MODEL.toml", "qwen/nvfp4/KERNEL.toml"])
def test_a_manifest_that_is_not_toml_stops_with_its_name(tmp_path: Path, name: str) -> None:
    tree = Path(shutil.copytree(FOREIGN, tmp_path / "tree"))
    (tree / "gb10" / name).write_text("[build\nflags = ")
    with pytest.raises(ManifestError, match="not valid TOML") as error:
        open_sets(tree)
    assert name in str(error.value)
    result = run(tree)
    assert result.exit_code == 2
    assert name in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("HARDWARE.toml", '[hardware]\narch = "gfx942"\nvendor = "amd"\n', UnsupportedError),
        ("HARDWARE.toml", '[hardware]\nvendor = "nvidia"\n', ManifestError),
        ("common/KERNEL.toml", '[build]\nextra_nvcc_flags = "-O3"\n', ManifestError),
        ("common/KERNEL.toml", '[modules]\nrows = "argmax"\ngreedy = "argmax"\n', ManifestError),
        ("borrower/MODEL.toml", '[model]\nkernel_source = "nobody"\n', ManifestError),
        ("qwen/MODEL.toml", '[model]\nkernel_source = "borrower"\n', ManifestError),
        ("qwen/MODEL.toml", "[expected_absent]\nnorm = 3\n", ManifestError),
    ],
)
def test_a_manifest_with_other_mistakes_is_refused(
    tmp_path: Path, name: str, text: str, error: type[Exception]
) -> None:
    tree = Path(shutil.copytree(FOREIGN, tmp_path / "tree"))
    (tree / "gb10" / name).write_text(text)
    with pytest.raises(error):
        open_sets(tree)


def test_exit_codes_and_json() -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC is reached through CuPy, which is not installed")
    assert run(FOREIGN, "--module", "argmax").exit_code == 0
    assert run(FOREIGN, "--module", "argmax", "--strict").exit_code == 1
    assert run(FOREIGN, "--module", "gemm").exit_code == 0
    assert run(FOREIGN, "--module", "nobody").exit_code == 2
    assert run(FOREIGN / "gb10/HARDWARE.toml").exit_code == 2
    result = run(FOREIGN, "--module", "residual_add", "--json")
    assert result.exit_code == 1
    rows: list[dict[str, Any]] = json.loads(result.stdout)["kernels"]
    assert {"module", "function", "compiles", "abi", "tests", "races", "status"} <= rows[0].keys()
    failed = [failure for row in rows for failure in row["tests"]["failed"]]
    assert {failure["tag"] for failure in failed} == {"numeric", "abi"}


def test_a_loose_file_stands_for_the_module_that_is_named(tmp_path: Path) -> None:
    file = Path(shutil.copy(FOREIGN / "gb10/common/split.cu", tmp_path / "their_split.cu"))
    (unknown,) = conform(file, archs=("sm_90a",))
    assert unknown.status == "unknown"
    assert "ssm_preprocess" in unknown.messages[-1]
    (report,) = conform(file, "ssm_preprocess", archs=("sm_90a",))
    assert report.status == "ok", report.as_json()
    with pytest.raises(InvalidArgumentError):
        open_sets(FOREIGN, "nobody")


def test_what_the_catalogue_does_not_know_is_listed_whether_it_compiles_or_not(tmp_path: Path) -> None:
    shutil.copy(FOREIGN / "gb10/common/split.cu", tmp_path / "ssm_preprocess.cu")
    (tmp_path / "vendor.cu").write_text('#include "absent.cuh"\nextern "C" __global__ void theirs(float* p) {}\n')
    reports = {(r.module, r.function): r for r in conform(tmp_path, archs=("sm_90a",))}
    assert reports["ssm_preprocess", "deinterleave_qg"].status == "ok"
    assert reports["vendor", "theirs"].status == "unknown"
    assert not any(report.fails(strict=True) for report in reports.values())


def test_what_only_the_cpu_does_not_compile_is_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC is reached through CuPy, which is not installed")
    file = Path(shutil.copy(FOREIGN / "gb10/common/split.cu", tmp_path / "ssm_preprocess.cu"))
    file.write_text("#ifndef __CUDACC_RTC__\n#error only here\n#endif\n" + file.read_text())
    (report,) = conform(file, archs=("sm_90a",))
    assert report.status == "not run: it does not compile for the CPU"
    assert "only here" in report.messages[0]
    assert not report.fails(strict=True)


def test_a_kernel_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_py.testing.conform._SECONDS", 0.3)
    file = Path(shutil.copy(FOREIGN / "gb10/common/split.cu", tmp_path / "ssm_preprocess.cu"))
    text = file.read_text()
    file.write_text(text.replace("__syncthreads();", "while (*(volatile unsigned*)&row[0] != 0xDEADu) {}"))
    assert file.read_text() != text
    (report,) = conform(file, archs=("sm_90a",), backend="emulated")
    assert report.status == "failed: faults"
    assert "KernelTimeoutError" in (report.faults or [""])[0]


def test_an_architecture_that_nobody_knows_is_bad_usage() -> None:
    assert run(FOREIGN, "--arch", "sm_12").exit_code == 2
    assert run(FOREIGN, "--arch", ",").exit_code == 2


def test_without_checks_values_are_still_compared() -> None:
    (values,) = [r for r in conform(FOREIGN / "gb10/qwen/nvfp4", "norm", "emulated") if r.function == "rms_norm"]
    assert values.status == "failed: values"
    assert values.faults is None
    (unrun,) = conform(FOREIGN / "gb10/qwen/nvfp4", "norm", "host")
    assert unrun.status.startswith("not run")
    assert unrun.passed == 0


@pytest.mark.deep
def test_our_own_kernels_conform() -> None:
    result = run(kernels_path(), "--arch", "sm_90a", "--strict", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["kernels"]
    assert {row["status"] for row in rows} == {"ok", "cuda only: CuTe"}
