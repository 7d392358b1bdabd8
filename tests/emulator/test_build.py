# SPDX-License-Identifier: AGPL-3.0-only
"""Building: what is needed and how its absence is told, compile errors, the cache and processes that share it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spark_py import catalog
from spark_py.emulator import compiler
from spark_py.emulator.build import build_module
from spark_py.emulator.launch import EmulatedModule
from spark_py.emulator.symbols import shared_variables
from spark_py.runtime import open_backend
from spark_py.runtime.emulated import Schedule
from spark_py.runtime.errors import (
    BackendUnavailableError,
    CompileError,
    FunctionNotFoundError,
    HeaderNotFoundError,
    InvalidArgumentError,
    ModuleNotFoundInSetError,
)
from spark_py.runtime.manifest import KernelSet
from spark_py.runtime.signature import compare, kernel_spec_signature
from tests.child import environment

from .support import emulate, launch

SIMPLE = 'extern "C" __global__ void k(unsigned* out) { out[threadIdx.x] = VALUE; }'


@pytest.mark.deep
def test_every_kernel_compiles_with_the_parameters_of_the_catalogue(tmp_path: Path) -> None:
    emulate(tmp_path, SIMPLE.replace("VALUE", "1u")).close()  # skips where nothing compiles
    seen = 0
    for module in KernelSet.open().modules.values():
        for source in module.files:
            if source.gpu_only:
                continue
            compiled = EmulatedModule(build_module(source, checked=False))
            for function, signature in compiled.signatures.items():
                spec = catalog.find(module.name, function)
                assert spec is not None
                assert compare(signature, kernel_spec_signature(spec)) is None
                seen += 1
    assert seen >= 20


def test_without_a_compiler_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.ENVIRONMENT, str(tmp_path / "no-such-compiler"))
    with pytest.raises(BackendUnavailableError, match=r"(?s)no-such-compiler.*install g\+\+ 12"):
        open_backend("emulated")


def test_an_old_compiler_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho 'g++ (GCC) 9.4.0'\n")
    old.chmod(0o755)
    monkeypatch.setenv(compiler.ENVIRONMENT, str(old))
    with pytest.raises(BackendUnavailableError, match=r"gcc 9\.4\.0, 12 or newer"):
        open_backend("emulated")


def test_without_headers_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from spark_py.runtime import emulated

    def none() -> None:
        raise BackendUnavailableError("no headers; run: pip install")

    monkeypatch.setattr(emulated, "find_headers", none)
    try:
        compiler.find_compiler()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with pytest.raises(BackendUnavailableError, match="pip install"):
        open_backend("emulated")


def test_a_compile_error_names_file_and_line(tmp_path: Path) -> None:
    text = '// one\n// two\nextern "C" __global__ void k(float* p) {\n    p[0] = nonsense;\n}\n'
    with emulate(tmp_path, text) as gpu, pytest.raises(CompileError, match="nonsense") as caught:
        gpu.kernel("kernels", "k")
    assert (caught.value.path, caught.value.line) == (tmp_path / "kernels.cu", 4)


def test_a_missing_header_is_named(tmp_path: Path) -> None:
    text = '#include "not_there.cuh"\nextern "C" __global__ void k(float* p) {}\n'
    with emulate(tmp_path, text) as gpu, pytest.raises(HeaderNotFoundError) as caught:
        gpu.kernel("kernels", "k")
    assert (caught.value.header, caught.value.line) == ("not_there.cuh", 1)


def test_missing_names(tmp_path: Path) -> None:
    with emulate(tmp_path, SIMPLE.replace("VALUE", "1u")) as gpu:
        with pytest.raises(ModuleNotFoundInSetError):
            gpu.kernel("other", "k")
        with pytest.raises(FunctionNotFoundError, match="present: k"):
            gpu.kernel("kernels", "other")
        assert gpu.try_kernel("kernels", "other").is_null
        gpu.fail_lookup("kernels", "k")
        assert gpu.try_kernel("kernels", "k").is_null


def test_kernels_of_macros_and_linkage_blocks(tmp_path: Path) -> None:
    text = """
    #define MAKE(name, value) \\
        extern "C" __global__ void name##_kernel(unsigned* out) { out[0] = value; }
    MAKE(two, 2u)
    extern "C" {
    __global__ void __launch_bounds__(64) three(unsigned* __restrict__ out) { out[0] = 3u; }
    }
    """
    with emulate(tmp_path, text) as gpu:
        assert launch(gpu, "three", 1, 1, [np.zeros(1, np.uint32)])[0][0] == 3
        assert launch(gpu, "two_kernel", 1, 1, [np.zeros(1, np.uint32)])[0][0] == 2
        with pytest.raises(FunctionNotFoundError):
            gpu.kernel("kernels", "four_kernel")


def test_a_changed_header_is_compiled_again(tmp_path: Path) -> None:
    text = '#include "value.cuh"\n' + SIMPLE
    for value in (4, 5, 4):
        tmp_path.joinpath("value.cuh").write_text(f"#define VALUE {value}u\n")
        with emulate(tmp_path, text) as gpu:
            assert launch(gpu, "k", 1, 1, [np.zeros(1, np.uint32)])[0][0] == value


def test_flags_of_the_manifest_count(tmp_path: Path) -> None:
    tmp_path.joinpath("kernels.cu").write_text(SIMPLE)
    for value in (6, 7):
        tmp_path.joinpath("kernels.toml").write_text(
            f'[modules.kernels]\nsource = "kernels.cu"\nfunctions = ["k"]\nflags = ["-DVALUE={value}u", "-O3"]\n'
        )
        with emulate(tmp_path, SIMPLE) as gpu:
            assert launch(gpu, "k", 1, 1, [np.zeros(1, np.uint32)])[0][0] == value


PROCESS = """
import sys, numpy as np
from pathlib import Path
from tests.emulator.support import emulate, launch
with emulate(Path(sys.argv[1]), Path(sys.argv[1], "kernels.cu").read_text()) as gpu:
    print(launch(gpu, "k", 1, 4, [np.zeros(4, np.uint32)])[0].tolist())
"""


@pytest.mark.deep
def test_processes_that_start_together_share_a_cold_cache(tmp_path: Path) -> None:
    emulate(tmp_path / "set", SIMPLE.replace("VALUE", "9u")).close()
    root = Path(__file__).parents[2]
    child = environment(root, SPARK_PY_CACHE_DIR=str(tmp_path / "cache"))
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "set")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child, cwd=root)
        for _ in range(3)
    ]
    for process in running:
        out, err = process.communicate()
        assert process.returncode == 0, err
        assert out.strip() == "[9, 9, 9, 9]"
    entries = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache" / "emulated").iterdir())
    assert entries in (["kernels", "prefix", "runtime"], ["kernels", "runtime"])


@pytest.mark.deep
def test_a_cache_that_cannot_be_made_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPARK_PY_CACHE_DIR", str(blocked / "cache"))
    with emulate(tmp_path / "set", SIMPLE.replace("VALUE", "8u")) as gpu:
        assert launch(gpu, "k", 1, 1, [np.zeros(1, np.uint32)])[0][0] == 8


def test_names_of_shared_variables(tmp_path: Path) -> None:
    text = """
    template <class T> __device__ T* one() { __shared__ T first[10]; return first; }
    __shared__ double second[3];
    extern "C" __global__ void k(unsigned* out) {
        __shared__ unsigned third[5], fourth[2];
        third[threadIdx.x] = fourth[threadIdx.x] = 1u;
        out[0] = one<unsigned short>()[0] + (unsigned)second[0] + third[1] + fourth[0];
    }
    """
    emulate(tmp_path, text).close()
    built = build_module(KernelSet.open(tmp_path).module("kernels"), checked=True)
    found = {variable.name: variable.size for variable in shared_variables(built.library)}
    assert found.items() >= {"first": 20, "second": 24, "third": 20, "fourth": 8}.items()


@pytest.mark.parametrize(
    ("field", "value"), [("workers", -1), ("workers", True), ("order", "random"), ("seed", -1), ("timeout", 0)]
)
def test_a_wrong_schedule_is_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        Schedule(**{field: value})  # type: ignore[arg-type]


def test_only_the_emulation_takes_a_schedule() -> None:
    with pytest.raises(InvalidArgumentError):
        open_backend("host", checked=True)
    with pytest.raises(InvalidArgumentError):
        open_backend("host", schedule=Schedule())
