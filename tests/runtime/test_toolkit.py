# SPDX-License-Identifier: AGPL-3.0-only
"""Which headers belong to the NVRTC in use, whatever else lies around; and the stub headers."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from spark_py.runtime import modules, toolkit
from spark_py.runtime.errors import BackendUnavailableError, HeaderNotFoundError, ToolkitMismatchError
from spark_py.runtime.manifest import ModuleSource
from spark_py.runtime.toolkit import check_one_cupy, find_toolkit, header_version


def nvrtc(major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(getVersion=lambda: (major, minor), getSupportedArchs=lambda: (80, 90))


def headers(folder: Path, version: int, file: str = "cuda.h", macro: str = "CUDA_VERSION") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"#ifndef X\n #  define {macro} {version}\n#endif\n")
    return folder


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolkit, "_loaded_library", lambda: None)


def test_header_version(tmp_path: Path) -> None:
    assert header_version(headers(tmp_path / "a", 12090)) == (12, 9)
    assert header_version(headers(tmp_path / "b", 13050, "cuda_runtime_api.h", "CUDART_VERSION")) == (13, 5)
    assert header_version(tmp_path) is None
    (tmp_path / "cuda.h").write_text("nothing")
    assert header_version(tmp_path) is None


@pytest.mark.parametrize("layout", ["nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib", "usr/local/cuda-13.5/lib64"])
def test_headers_beside_the_library_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    library = tmp_path / layout / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.touch()
    root = library.parent.parent
    own = root.parent / "cuda_runtime" / "include" if root.name == "cuda_nvrtc" else root / "include"
    headers(own, 13050)
    other = headers(tmp_path / "other", 13050)
    monkeypatch.setattr(toolkit, "_loaded_library", lambda: library)
    assert find_toolkit(nvrtc(13, 5), lambda _: other).include[0] == own


def test_other_majors_beside_the_library_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # NVRTC 12.9 from one wheel, while the environment's other wheels are CUDA 13's.
    library = tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    own = headers(tmp_path / "nvidia" / "cuda_runtime" / "include", 12090)
    monkeypatch.setattr(toolkit, "_loaded_library", lambda: library)
    found = find_toolkit(nvrtc(12, 9), lambda _: headers(tmp_path / "nvidia" / "cu13" / "include", 13050))
    assert found.include == (own,)
    assert found.headers == (12, 9)


@pytest.mark.usefixtures("no_library")
def test_another_major_is_an_error_with_both_versions(tmp_path: Path) -> None:
    folder = headers(tmp_path / "inc", 13000)
    with pytest.raises(ToolkitMismatchError) as error:
        find_toolkit(nvrtc(12, 9), lambda _: folder)
    assert (error.value.nvrtc, error.value.headers) == ((12, 9), (13, 0))
    for part in ("12.9", "13.0", str(folder), ".[cuda12]"):
        assert part in str(error.value)


@pytest.mark.usefixtures("no_library")
def test_another_minor_is_taken_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = headers(tmp_path / "inc", 12040)
    with caplog.at_level(logging.WARNING, "spark_py"):
        found = find_toolkit(nvrtc(12, 9), lambda _: folder)
    assert found.headers == (12, 4)
    assert found.versions() == "NVRTC 12.9, headers 12.4"
    assert "12.4" in caplog.text
    assert "12.9" in caplog.text


@pytest.mark.usefixtures("no_library")
def test_no_headers_at_all(tmp_path: Path) -> None:
    found = find_toolkit(nvrtc(12, 9), lambda _: None)
    assert (found.include, found.headers) == ((), None)
    assert "headers none" in found.versions()


@pytest.mark.usefixtures("no_library")
def test_a_replaced_toolkit_has_another_fingerprint(tmp_path: Path) -> None:
    folder = headers(tmp_path / "inc", 12090)
    before = find_toolkit(nvrtc(12, 9), lambda _: folder).fingerprint
    (folder / "cuda.h").write_text("#define CUDA_VERSION 12090 // patched\n")
    assert find_toolkit(nvrtc(12, 9), lambda _: folder).fingerprint != before


def test_missing_library_and_missing_cupy_name_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.12: cannot open shared object file")

    with pytest.raises(BackendUnavailableError, match=r"libnvrtc.*\.\[cuda12\]"):
        find_toolkit(SimpleNamespace(getVersion=missing))
    modules._nvrtc.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nvrtc", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install -e '\.\[cuda12\]'"):
        modules._nvrtc()
    modules._nvrtc.cache_clear()


def test_two_cupy_distributions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("cupy-cuda12x", "cupy-cuda13x"):
            return "14.2.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(BackendUnavailableError) as error:
        check_one_cupy()
    assert "cupy-cuda12x 14.2.0" in str(error.value)
    assert "cupy-cuda13x 14.2.0" in str(error.value)
    assert "pip uninstall" in str(error.value)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(("installed", "warns"), [("cupy-cuda12x", True), ("cupy-cuda13x", False), ("cupy", False)])
def test_an_nvrtc_of_another_major_than_cupys_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, installed: str, warns: bool
) -> None:
    def version(name: str) -> str:
        if name == installed:
            return "14.2.0"
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with caplog.at_level(logging.WARNING, "spark_py"):
        find_toolkit(nvrtc(13, 5), lambda _: None)
    assert ("NVRTC 13.5 of another toolkit" in caplog.text) is warns


# ---------------------------------------------------------------- with the real NVRTC


@pytest.fixture
def real() -> toolkit.Toolkit:
    pytest.importorskip("cupy_backends", reason="CuPy, which reaches NVRTC, is not installed")
    return modules.toolkit()


def source(tmp_path: Path, text: str, **fields: object) -> ModuleSource:
    path = tmp_path / "k.cu"
    path.write_text(text)
    return ModuleSource("k", path, **fields)  # type: ignore[arg-type]


def test_real_toolkit_is_one_toolkit(real: toolkit.Toolkit) -> None:
    assert real.headers == real.nvrtc
    assert real.library is not None
    assert {80, 90, 100, 120, 121} <= set(real.archs)


def test_a_wrong_cuda_path_poisons_nothing(
    real: toolkit.Toolkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers(tmp_path / "include", 11080)
    (tmp_path / "include" / "cuda_runtime.h").write_text("#error wrong\n")
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    pathfinder = pytest.importorskip("cuda.pathfinder")
    locate = getattr(pathfinder, "locate_nvidia_header_directory", None)
    if hasattr(locate, "cache_clear"):
        locate.cache_clear()
    found = find_toolkit(modules._nvrtc())
    assert found.include == real.include
    assert not any(folder.is_relative_to(tmp_path) for folder in found.include)


@pytest.mark.parametrize(
    "header", ["cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h", "cuda_fp4.h", "cuda_pipeline.h", "cooperative_groups.h"]
)
def test_toolkit_headers_compile(real: toolkit.Toolkit, tmp_path: Path, header: str) -> None:
    text = f'#include <{header}>\nextern "C" __global__ void f(float* x) {{ x[0] = 1.0f; }}\n'
    assert modules.compile_module(source(tmp_path, text), "sm_90a", None).image.startswith(b"\x7fELF")


def test_mma_compiles_or_says_what_is_missing(real: toolkit.Toolkit, tmp_path: Path) -> None:
    kernel = source(tmp_path, '#include <mma.h>\nextern "C" __global__ void f(float* x) { x[0] = 1.0f; }\n')
    if any((folder / "crt" / "mma.h").exists() for folder in real.include):
        assert modules.compile_module(kernel, "sm_90a", None).signatures
        return
    with pytest.raises(HeaderNotFoundError) as error:
        modules.compile_module(kernel, "sm_90a", None)
    assert error.value.header == "crt/mma.h"
    assert str(real.include[0]) in error.value.folders
    assert real.versions() in str(error.value)


def test_stub_headers_and_infinity(real: toolkit.Toolkit, tmp_path: Path) -> None:
    text = """
    #include <math.h>
    #include <assert.h>
    #include <stdint.h>
    #include <cstdint>
    extern "C" __global__ void f(const uint32_t* x, std::uint64_t n, int64_t m, float* y) {
        assert(n > 0);
        y[0] = x[0] > UINT32_MAX / 2 ? INFINITY : -INFINITY;
        y[1] = sqrtf(NAN) + (float)M_PI;
    }
    """
    found = modules.compile_module(source(tmp_path, text), "sm_90a", None)
    assert str(found.signatures["f"]) == "f(const u32* x, u64 n, i64 m, f32* y)"


def test_infinity_without_a_header_and_with_an_own_definition(real: toolkit.Toolkit, tmp_path: Path) -> None:
    body = 'extern "C" __global__ void f(float* y) { y[0] = INFINITY; }\n'
    assert modules.compile_module(source(tmp_path, body), "sm_90a", None).signatures
    own = "#define INFINITY 3.0f\n" + body
    assert "redefinition" not in modules.compile_module(source(tmp_path, own), "sm_90a", None).log


def test_stub_types_are_those_of_cccl(real: toolkit.Toolkit, tmp_path: Path) -> None:
    if not any((folder / "cuda" / "std").is_dir() for folder in real.include):
        pytest.skip("CCCL's headers are not installed")
    for first, second in (("stdint.h", "cuda/std/cstdint"), ("cuda/std/cstdint", "cstdint")):
        text = f'#include <{first}>\n#include <{second}>\nextern "C" __global__ void f(int64_t* x) {{ x[0] = 1; }}\n'
        assert modules.compile_module(source(tmp_path, text), "sm_90a", None).signatures


def test_a_tree_that_ships_its_own_stub_keeps_it(real: toolkit.Toolkit, tmp_path: Path) -> None:
    (tmp_path / "math.h").write_text("#define MINE 7\n")
    text = '#include "math.h"\nextern "C" __global__ void f(int* x) { x[0] = MINE; }\n'
    assert modules.compile_module(source(tmp_path, text), "sm_90a", None).signatures
