# SPDX-License-Identifier: AGPL-3.0-only
"""Kernel folders: both manifest forms, loose files, and every way a manifest can be wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spark_py.runtime import manifest
from spark_py.runtime.audit import KernelAudit
from spark_py.runtime.errors import ManifestError, ModuleNotFoundInSetError
from spark_py.runtime.manifest import KernelSet, kernels_path, nvrtc_flags
from tests.child import environment

KERNEL = 'extern "C" __global__ void {}(float* x) {{ x[0] = 1.0f; }}\n'


def folder(root: Path, *files: str, **texts: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name in files:
        (root / name).write_text(KERNEL.format(Path(name).stem))
    for name, text in texts.items():
        (root / name.replace("_toml", ".toml")).write_text(text)
    return root


def test_own_form(tmp_path: Path) -> None:
    root = folder(
        tmp_path,
        "a.cu",
        "b.ptx",
        kernels_toml="""
        [modules.first]
        source = "a.cu"
        functions = ["a", "a2"]
        flags = ["-DX=1", "-Iinclude"]
        min_arch = "sm_90a"
        gpu_only = true
        [modules.second]
        source = "b.ptx"
        """,
    )
    opened = KernelSet.open(root)
    first = opened.module("first")
    assert list(opened.modules) == ["first", "second"]
    assert (first.path, first.functions, first.min_arch, first.gpu_only) == (root / "a.cu", ("a", "a2"), "sm_90a", True)
    assert first.flags == ("-DX=1", f"-I{root / 'include'}", f"-I{root}")
    assert opened.module("second").is_ptx
    assert opened.module("second").min_arch == "sm_80"
    with pytest.raises(TypeError):
        opened.modules["third"] = first  # type: ignore[index]


SEVERAL = """
[modules.gemm]
source = "a.cu"
functions = ["plain"]
[[modules.gemm.others]]
source = "b.cu"
functions = ["fast", "faster"]
flags = ["-default-device"]
min_arch = "sm_90"
gpu_only = true
dependent = true
"""


def test_a_module_of_several_files(tmp_path: Path) -> None:
    root = folder(tmp_path, "a.cu", "b.cu", kernels_toml=SEVERAL)
    opened = KernelSet.open(root)
    module = opened.module("gemm")
    assert [file.path.name for file in module.files] == ["a.cu", "b.cu"]
    assert [file.path.name for file in opened.files()] == ["a.cu", "b.cu"]
    other = module.holding("faster")
    assert (other.name, other.path, other.min_arch, other.gpu_only) == ("gemm", root / "b.cu", "sm_90", True)
    assert other.flags == ("-default-device", f"-I{root}")
    assert (module.flags, module.min_arch, module.gpu_only) == ((f"-I{root}",), "sm_80", False)
    assert (other.dependent, module.dependent) == (True, False)
    assert module.holding("plain") is module.holding("nowhere") is module
    assert opened.known_kernels() == (("gemm", "plain"), ("gemm", "fast"), ("gemm", "faster"))
    alone = KernelSet.open(root / "b.cu").module("gemm")
    assert (alone.path, alone.functions, alone.others) == (root / "b.cu", ("fast", "faster"), ())


@pytest.mark.parametrize(
    ("find", "replace", "message"),
    [
        ('"fast", "faster"', '"fast", "plain"', r"gemm\.others\[0\]\.functions names 'plain', which modules\.gemm has"),
        ('functions = ["plain"]\n', "", r"modules\.gemm\.functions is missing"),
        ('functions = ["fast", "faster"]\n', "", r"gemm\.others\[0\]\.functions is missing"),
        ('source = "b.cu"', 'source = "c.cu"', r"gemm\.others\[0\]\.source is 'c\.cu': no such file"),
        ("gpu_only", "gpu_just", r"unknown key 'modules\.gemm\.others\[0\]\.gpu_just'"),
        ("[[modules.gemm.others]]", "[modules.gemm.others]", r"modules\.gemm\.others is .*: a list is needed"),
    ],
)
def test_mistakes_in_a_module_of_several_files(tmp_path: Path, find: str, replace: str, message: str) -> None:
    assert find in SEVERAL
    root = folder(tmp_path, "a.cu", "b.cu", kernels_toml=SEVERAL.replace(find, replace))
    with pytest.raises(ManifestError, match=message):
        KernelSet.open(root)


def test_engine_form(tmp_path: Path) -> None:
    root = folder(
        tmp_path,
        "dense_gemv_bf16.cu",
        "rms_norm.cu",
        "ready.ptx",
        "header.cuh",
        KERNEL_toml="""
        [build]
        extra_nvcc_flags = ["-O3", "--fmad=false", "--Werror", "all-warnings", "-DTQ_PLUS_SIGNS", "-DTQ_PLUS_SIGNS"]
        extra_hipcc_flags = ["-x"]
        [modules]
        dense_gemv_bf16 = "gemv"
        of_another_folder = "elsewhere"
        [shadow_exempt]
        rms_norm = "why"
        """,
    )
    opened = KernelSet.open(root)
    assert sorted(opened.modules) == ["gemv", "ready", "rms_norm"]
    assert opened.module("gemv").path.name == "dense_gemv_bf16.cu"
    assert opened.module("gemv").flags == ("--fmad=false", "-DTQ_PLUS_SIGNS", f"-I{root}")
    assert opened.known_kernels()[0] == ("gemv", "dense_gemv_bf16")


def test_loose_files_and_single_files(tmp_path: Path) -> None:
    root = folder(tmp_path / "loose é folder", "a.cu", "b.ptx")
    (root / "note.txt").write_text("no kernel")
    assert list(KernelSet.open(str(root)).modules) == ["a", "b"]
    assert list(KernelSet.open(root / "a.cu").modules) == ["a"]


def test_a_file_keeps_the_names_its_manifest_gives(tmp_path: Path) -> None:
    root = folder(
        tmp_path, "a.cu", "b.cu", kernels_toml='[modules.one]\nsource = "a.cu"\n[modules.two]\nsource = "a.cu"\n'
    )
    assert list(KernelSet.open(root / "a.cu").modules) == ["one", "two"]
    assert list(KernelSet.open(root / "b.cu").modules) == ["b"]


def test_links_are_followed(tmp_path: Path) -> None:
    common = folder(tmp_path / "common", "a.cu")
    other = folder(tmp_path / "other", "b.cu")
    (other / "a.cu").symlink_to(common / "a.cu")
    assert sorted(KernelSet.open(other).modules) == ["a", "b"]


def test_unknown_module_lists_those_present(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundInSetError) as error:
        KernelSet.open(folder(tmp_path, "a.cu", "b.cu")).module("nope")
    assert error.value.present == ("a", "b")
    assert str(tmp_path) in str(error.value)


ONE = '[modules.m]\nsource = "a.cu"\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[modules.m\nsource=1", "not valid TOML"),
        ("", "names no module"),
        ("[modules]", "names no module"),
        ('modules = "m"', "modules is 'm'"),
        ("[modules]\nm = 3", "modules.m is 3"),
        ("[modules.m]", "modules.m.source is missing"),
        ('[modules.m]\nsource = ""', "modules.m.source is missing"),
        ("[modules.m]\nsource = 4", "modules.m.source is 4: a str"),
        ('[modules.m]\nsource = "gone.cu"', "'gone.cu': no such file"),
        ('[modules.m]\nsource = "kernels.toml"', "a .cu or .ptx file"),
        ('[modules.""]\nsource = "a.cu"', "name is empty"),
        (ONE + "sources = []", "unknown key 'modules.m.sources'"),
        (ONE + 'functions = "a"', "modules.m.functions is 'a': a list"),
        (ONE + "functions = [1]", "modules.m.functions"),
        (ONE + 'functions = ["a", "a"]', "names 'a' twice"),
        (ONE + 'flags = "-DX"', "modules.m.flags"),
        (ONE + "min_arch = 90", "modules.m.min_arch is 90"),
        (ONE + 'min_arch = "90a"', "modules.m.min_arch"),
        (ONE + "gpu_only = 1", "modules.m.gpu_only is 1: a bool"),
        (ONE + 'dependent = "yes"', "modules.m.dependent is 'yes': a bool"),
        (ONE + "[extra]\nx = 1", "unknown key 'extra'"),
    ],
)
def test_own_form_faults_name_file_and_key(tmp_path: Path, text: str, says: str) -> None:
    root = folder(tmp_path, "a.cu", kernels_toml=text)
    with pytest.raises(ManifestError) as error:
        KernelSet.open(root)
    assert error.value.path == root / "kernels.toml"
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<<<<<<< HEAD\n[modules]", "not valid TOML"),
        ("build = 1", "build is 1"),
        ('[build]\nextra_nvcc_flags = "-DX"', "build.extra_nvcc_flags"),
        ("[modules]\na = 1", "modules.a is 1"),
        ('[modules]\na = "b"', "module 'b' comes from both a.cu and b.cu"),
    ],
)
def test_engine_form_faults(tmp_path: Path, text: str, says: str) -> None:
    root = folder(tmp_path, "a.cu", "b.cu", KERNEL_toml=text)
    with pytest.raises(ManifestError) as error:
        KernelSet.open(root)
    assert says in str(error.value)


def test_faults_of_the_folder(tmp_path: Path) -> None:
    for make, says in (
        (lambda: tmp_path / "gone", "no such kernel folder"),
        (lambda: folder(tmp_path / "empty"), "holds no .cu or .ptx"),
        (lambda: folder(tmp_path / "twice", "a.cu", "a.ptx"), "both a.cu and a.ptx"),
        (lambda: folder(tmp_path / "both", "a.cu", kernels_toml=ONE, KERNEL_toml=""), "keep one"),
        (lambda: folder(tmp_path / "text", "a.txt") / "a.txt", "neither a folder nor"),
    ):
        with pytest.raises(ManifestError) as error:
            KernelSet.open(make())
        assert says in str(error.value)


def test_a_manifest_that_is_not_utf8(tmp_path: Path) -> None:
    root = folder(tmp_path, "a.cu")
    (root / "kernels.toml").write_bytes(b"[modules.\xff]")
    with pytest.raises(ManifestError):
        KernelSet.open(root)


def test_flags_for_nvrtc(tmp_path: Path) -> None:
    nvcc = ["-O3", "-O", "--ptx", "--Werror=all-warnings", "-arch", "sm_90", "-arch=sm_90", "-Xcompiler", "-fPIC"]
    nvcc += ["--expt-relaxed-constexpr", "--extended-lambda", "-DA=1", "-D", "B", "-I", "inc", "--include-path=/abs"]
    nvcc += ["-DA=1", "-std=c++20", "--use_fast_math"]
    assert nvrtc_flags(nvcc, tmp_path) == (
        "-DA=1",
        "-DB",
        f"-I{tmp_path / 'inc'}",
        "-I/abs",
        "-std=c++20",
        "--use_fast_math",
    )


def test_own_kernels_open_and_every_listed_function_is_in_its_source() -> None:
    opened = KernelSet.open()
    assert opened.root == kernels_path()
    assert KernelSet.open(None).modules.keys() == opened.modules.keys()
    for module in opened.modules.values():
        assert module.functions, module.name


def test_an_installed_package_has_its_kernels_inside(tmp_path: Path) -> None:
    package = Path(manifest.__file__).parents[1]
    shutil.copytree(package, tmp_path / "spark_py", ignore=shutil.ignore_patterns("__pycache__", "_cuda_src"))
    folder(tmp_path / "cuda_src", "wrong.cu", kernels_toml='[modules.wrong]\nsource = "wrong.cu"\n')
    folder(tmp_path / "spark_py" / "_cuda_src", "right.cu", kernels_toml='[modules.right]\nsource = "right.cu"\n')
    text = "from spark_py.runtime.manifest import KernelSet; print(*KernelSet.open().modules)"
    child = environment(tmp_path)

    def opened() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", text]
        return subprocess.run(command, capture_output=True, text=True, env=child, cwd=tmp_path, check=False)

    assert opened().stdout.split() == ["right"]
    shutil.rmtree(tmp_path / "spark_py" / "_cuda_src")
    assert opened().stdout.split() == ["wrong"]  # a checkout: beside the package
    shutil.rmtree(tmp_path / "cuda_src")
    assert "the package's own kernels are missing" in opened().stderr


def test_audit_rows(tmp_path: Path) -> None:
    opened = KernelSet.open(folder(tmp_path, "a.cu", "b.cu"))
    audit = KernelAudit()
    audit.record("a", "a", False, "x.py:1")
    audit.record("a", "a", True, "x.py:2")
    audit.record("a", "a", True, "x.py:2")
    audit.record("a", "gone", False, "y.py:3")
    assert [(row.module, row.function, row.status, row.sites) for row in audit.rows(opened.known_kernels())] == [
        ("a", "a", "used", ("x.py:1", "x.py:2")),
        ("a", "gone", "missing", ("y.py:3",)),
        ("b", "b", "unused", ()),
    ]
