# SPDX-License-Identifier: AGPL-3.0-only
"""Compiling a module: what comes out, and a typed error with file, line and log for everything that can go wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from spark_py.runtime import modules
from spark_py.runtime.callsite import call_site
from spark_py.runtime.errors import (
    ArchMismatchError,
    CompileError,
    FunctionNotFoundError,
    HeaderNotFoundError,
    ImageError,
    InvalidArgumentError,
    KernelSetError,
    ToolkitMismatchError,
    UnsupportedError,
)
from spark_py.runtime.manifest import KernelSet, ModuleSource
from spark_py.runtime.modules import CompiledModule, Resources, compile_module
from spark_py.runtime.ptx import ptx_version_limit
from tests.child import environment

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
GOOD = 'extern "C" __global__ void f(float* x, unsigned n) { if (threadIdx.x < n) x[threadIdx.x] = 1.0f; }\n'
PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry f(
	.param .u64 f_param_0,
	.param .u32 f_param_1
)
{
	ret;
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PY_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cupy_backends", reason="CuPy, which reaches NVRTC, is not installed")


needs_nvrtc = pytest.mark.usefixtures("nvrtc")


def made(folder: Path, text: str, *functions: str, name: str = "k.cu", **fields: object) -> ModuleSource:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(text.encode())
    return ModuleSource("mod", path, functions, **fields)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what comes out


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_a_cubin_with_signature_and_resources(tmp_path: Path, arch: str) -> None:
    found = compile_module(made(tmp_path, GOOD, "f"), arch, None)
    assert found.image.startswith(b"\x7fELF")
    assert (found.kind, found.arch, found.from_cache) == ("cubin", arch, False)
    assert str(found.signatures["f"]) == "f(f32* x, u32 n)"
    assert found.resources["f"].registers > 0


@needs_nvrtc
def test_resources_are_the_assemblers(tmp_path: Path) -> None:
    text = """
    extern "C" __global__ void shared_kb(float* x) {
        __shared__ float s[256];
        s[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = s[255 - threadIdx.x];
    }
    extern "C" __global__ void stacked(float* x, int n) {
        float a[64];
        for (int i = 0; i < n; i++) a[(i * 7) % 64] = x[i];
        x[0] = a[n];
    }
    extern "C" __global__ void __launch_bounds__(1024, 2) spilled(float* x) {
        float a[80];
        #pragma unroll
        for (int i = 0; i < 80; i++) a[i] = x[i * 32];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < 80; i++) x[i] = a[i] * a[79 - i];
    }
    """
    found = compile_module(made(tmp_path, text), "sm_90a", None).resources
    assert found["shared_kb"].shared == 1024
    assert found["shared_kb"].stack == 0
    assert found["stacked"].stack == 256
    assert found["spilled"].registers <= 32
    assert found["spilled"].spill_stores > 0
    assert found["spilled"].spill_loads > 0
    assert all(isinstance(entry, Resources) for entry in found.values())


@needs_nvrtc
def test_no_fused_multiply_add_unless_the_set_says_so(tmp_path: Path) -> None:
    # The contraction of a*b+c changes the code, so the images differ; a plain add and multiply do not contract.
    text = 'extern "C" __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3]; }\n'
    split = 'extern "C" __global__ void f(float* x) { x[0] = __fadd_rn(__fmul_rn(x[1], x[2]), x[3]); }\n'
    source = made(tmp_path, text)
    plain = compile_module(source, "sm_80", None).image
    fused = compile_module(ModuleSource("mod", source.path, flags=("--fmad=true",)), "sm_80", None).image
    assert plain != fused
    assert compile_module(made(tmp_path, split), "sm_80", None).image == plain


@needs_nvrtc
@pytest.mark.parametrize("folder", ["plain", "with spaces", "é ü 漢字", "a(1): error"])
def test_folders_with_any_name_and_quoted_includes(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder / "deep").mkdir(parents=True)
    (tmp_path / folder / "h.cuh").write_text('#include "deep/d.cuh"\n')
    (tmp_path / folder / "deep" / "d.cuh").write_text("#define ONE 1.0f\n")
    text = '#include "h.cuh"\nextern "C" __global__ void f(float* x) { x[0] = ONE; }\n'
    source = made(tmp_path / folder, text, "f", name="kérnel one.cu")
    assert compile_module(source, "sm_90a").signatures
    angled = made(tmp_path / folder, text.replace('"h.cuh"', "<h.cuh>"))
    assert compile_module(KernelSet.open(angled.path).module("k"), "sm_90a").signatures


@needs_nvrtc
def test_a_relative_path_compiles_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "set", GOOD)
    monkeypatch.chdir(tmp_path)
    opened = KernelSet.open("set")
    monkeypatch.chdir("/")
    assert compile_module(opened.module("k"), "sm_90a").signatures


# ---------------------------------------------------------------- what goes wrong in a .cu


@needs_nvrtc
def test_a_syntax_error_names_file_line_arch_and_log(tmp_path: Path) -> None:
    source = made(tmp_path / "é folder", GOOD + "\n__global__ void broken( { }\n")
    with pytest.raises(CompileError) as error:
        compile_module(source, "sm_90a")
    assert (error.value.path, error.value.line, error.value.arch) == (source.path, 3, "sm_90a")
    assert "error" in error.value.log
    assert f"{source.path}:3" in str(error.value)


@needs_nvrtc
def test_an_error_in_a_header_names_the_header(tmp_path: Path) -> None:
    (tmp_path / "h.cuh").write_text("\n\nint x = nothing;\n")
    with pytest.raises(CompileError) as error:
        compile_module(made(tmp_path, '#include "h.cuh"\n' + GOOD), "sm_90a")
    assert (error.value.path, error.value.line) == (tmp_path / "h.cuh", 3)


@needs_nvrtc
def test_a_missing_header_names_header_folders_and_versions(tmp_path: Path) -> None:
    inc = tmp_path / "inc"
    source = made(tmp_path, '\n#include "gone.cuh"\n' + GOOD, flags=(f"-I{inc}",))
    with pytest.raises(HeaderNotFoundError) as error:
        compile_module(source, "sm_90a")
    assert (error.value.header, error.value.line) == ("gone.cuh", 2)
    assert error.value.folders[:2] == (str(tmp_path), str(inc))
    assert modules.toolkit().versions() in str(error.value)


@needs_nvrtc
def test_an_assembler_error_is_a_compile_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as error:
        compile_module(made(tmp_path, 'extern "C" __global__ void f() { asm("bogus.u32;"); }'), "sm_90a")
    assert "bogus" in str(error.value)


@needs_nvrtc
def test_an_unknown_flag_is_a_compile_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="bogus-flag"):
        compile_module(made(tmp_path, GOOD, flags=("--bogus-flag",)), "sm_90a")


@needs_nvrtc
@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "empty"), (b" \n\n", "empty"), (b"// \xff\n", "UTF-8"), (GOOD.encode() + b"\n\0 int x;", ":3")],
)
def test_a_source_that_is_no_text(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes(data)
    with pytest.raises(CompileError, match=says) as error:
        compile_module(ModuleSource("k", path), "sm_90a")
    assert error.value.path == path


@needs_nvrtc
def test_a_source_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="cannot be read"):
        compile_module(ModuleSource("k", tmp_path / "gone.cu"), "sm_90a")


@needs_nvrtc
def test_a_function_that_is_not_there_lists_the_others(tmp_path: Path) -> None:
    source = made(tmp_path, GOOD + 'extern "C" __global__ void g() {}', "f", "nope")
    with pytest.raises(FunctionNotFoundError) as error:
        compile_module(source, "sm_90a")
    assert (error.value.module, error.value.function) == ("mod", "nope")
    assert sorted(error.value.present) == ["f", "g"]
    assert 'extern "C"' not in str(error.value)
    assert str(source.path) in str(error.value)


@needs_nvrtc
@pytest.mark.parametrize("text", ["__global__ void f(int* x) {}", "namespace a { __global__ void f(int* x) {} }"])
def test_a_mangled_name_gets_the_hint(tmp_path: Path, text: str) -> None:
    with pytest.raises(FunctionNotFoundError, match='put extern "C" before __global__'):
        compile_module(made(tmp_path, text, "f"), "sm_90a")


@needs_nvrtc
def test_architectures_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError):
        compile_module(made(tmp_path, GOOD), "sm_9x")
    with pytest.raises(UnsupportedError, match=r"sm_199.*it knows .*sm_90"):
        compile_module(made(tmp_path, GOOD), "sm_199")
    with pytest.raises(ArchMismatchError, match="needs sm_100a, asked for sm_90a"):
        compile_module(made(tmp_path, GOOD, min_arch="sm_100a"), "sm_90a")


@needs_nvrtc
def test_headers_of_another_minor_are_named_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = modules.toolkit()
    old = dataclasses.replace(kit, headers=(kit.nvrtc[0], kit.nvrtc[1] + 1))
    monkeypatch.setattr(modules, "toolkit", lambda: old)
    assert compile_module(made(tmp_path, GOOD), "sm_90a", None).signatures
    with pytest.raises(CompileError) as error:
        compile_module(made(tmp_path, "__nv_fp8_e8m0 x;\n"), "sm_90a", None)
    for part in (old.versions(), str(kit.include[0]), ".[cuda"):
        assert part in str(error.value)


@needs_nvrtc
def test_no_headers_still_compile_what_includes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dataclasses.replace(modules.toolkit(), headers=None, include=())
    monkeypatch.setattr(modules, "toolkit", lambda: bare)
    assert compile_module(made(tmp_path, GOOD), "sm_90a", None).signatures
    with pytest.raises(HeaderNotFoundError, match=r"cuda_bf16\.h.*headers none.*\.\[cuda"):
        compile_module(made(tmp_path, "#include <cuda_bf16.h>\n" + GOOD), "sm_90a", None)


@needs_nvrtc
def test_cute_without_cutlass_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = dataclasses.replace(modules.toolkit(), cutlass=None)
    monkeypatch.setattr(modules, "toolkit", lambda: bare)
    words = r"cute/tensor\.hpp.*nvidia-cutlass.*pip install .*\[cutlass\]"
    with pytest.raises(HeaderNotFoundError, match=words) as error:
        compile_module(made(tmp_path, "#include <cute/tensor.hpp>\n" + GOOD), "sm_90a", None)
    assert error.value.package == "nvidia-cutlass"
    with pytest.raises(HeaderNotFoundError, match=r"other/tensor\.hpp") as error:
        compile_module(made(tmp_path, "#include <other/tensor.hpp>\n" + GOOD), "sm_90a", None)
    assert error.value.package == ""


def test_every_error_of_this_layer_has_one_base() -> None:
    for kind in (CompileError, HeaderNotFoundError, ImageError, FunctionNotFoundError, ToolkitMismatchError):
        assert issubclass(kind, KernelSetError)


@needs_nvrtc
def test_the_engines_tree_form_compiles(tmp_path: Path) -> None:
    """A folder as the engine has it: renamed modules, nvcc flags, stub headers, a local header by angle brackets."""
    (tmp_path / "KERNEL.toml").write_text(
        '[build]\nextra_nvcc_flags = ["-O3", "--fmad=false", "-DTQ_PLUS_SIGNS"]\n[modules]\nmoe_permute = "moe"\n'
    )
    (tmp_path / "local.cuh").write_text("#pragma once\n#define TWO 2\n")
    (tmp_path / "moe_permute.cu").write_text(
        "#include <assert.h>\n#include <stdint.h>\n#include <local.cuh>\n#ifndef TQ_PLUS_SIGNS\n#error flag\n#endif\n"
        'extern "C" __global__ void moe_permute(uint32_t* x) { assert(x); x[0] = TWO; }\n'
    )
    opened = KernelSet.open(tmp_path)
    assert opened.known_kernels() == (("moe", "moe_permute"),)
    assert str(compile_module(opened.module("moe"), "sm_121a").signatures["moe_permute"]) == "moe_permute(u32* x)"


# ---------------------------------------------------------------- PTX


def test_ptx_is_passed_on(tmp_path: Path) -> None:
    found = compile_module(made(tmp_path, PTX + "\0", "f", name="k.ptx"), "sm_90a", driver_version=12000)
    assert isinstance(found, CompiledModule)
    assert (found.kind, found.image) == ("ptx", PTX.encode())
    assert [p.size for p in found.signatures["f"].params] == [8, 4]
    assert found.resources == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        ("\x7fELF\0\0\1", "NUL"),
        ("hello", "no .version"),
        (PTX.replace(".target sm_80", ""), "no .target"),
        (PTX[: PTX.index("ret")], "truncated"),
        (PTX[: PTX.index(".param .u32")], "truncated"),
        (PTX[: PTX.index(".visible")], "no .entry|middle of a statement"),
        (PTX.replace(".entry", ".func"), "no .entry"),
        (PTX + "\0" + PTX, "NUL"),
        (PTX.replace(".u32 f_param_1", ".u32"), "parameter 1"),
        (PTX.replace("sm_80", "gfx942"), ".target"),
        (PTX + ".visible .ent", "middle of a statement"),
    ],
)
def test_bad_ptx_is_an_image_error_with_the_path(tmp_path: Path, text: str, says: str) -> None:
    source = made(tmp_path, text, name="k.ptx")
    with pytest.raises(ImageError, match=says) as error:
        compile_module(source, "sm_90a")
    assert error.value.path == source.path


def test_every_cut_through_ptx_is_noticed(tmp_path: Path) -> None:
    whole = PTX.rstrip()
    for end in range(len(whole)):
        with pytest.raises(ImageError):
            compile_module(made(tmp_path, whole[:end], name="k.ptx"), "sm_90a")


def test_braces_in_comments_and_strings_do_not_count(tmp_path: Path) -> None:
    text = '.version 8.0\n// {{{ (\n/* } */\n.file 1 "{(.cu"\n' + PTX.split("\n", 1)[1]
    assert compile_module(made(tmp_path, text, name="k.ptx"), "sm_90a").signatures


def test_binary_is_no_ptx(tmp_path: Path) -> None:
    path = tmp_path / "k.ptx"
    path.write_bytes(b"\x7fELF\xff\xfe\x00")
    with pytest.raises(ImageError, match="no PTX"):
        compile_module(ModuleSource("k", path), "sm_90a")


def test_ptx_for_another_architecture_and_for_a_newer_driver(tmp_path: Path) -> None:
    newer = made(tmp_path, PTX.replace("sm_80", "sm_121a"), name="k.ptx")
    with pytest.raises(ArchMismatchError, match=r"sm_121a.*9\.0"):
        compile_module(newer, "sm_90a")
    future = made(tmp_path, PTX.replace(".version 8.0", ".version 9.0"), name="k.ptx")
    with pytest.raises(ImageError, match=r"PTX 9\.0.*up to 8\.8"):
        compile_module(future, "sm_90a", driver_version=12090)
    assert compile_module(future, "sm_90a", driver_version=13000).kind == "ptx"


@pytest.mark.parametrize(
    ("driver", "limit"),
    [
        (11080, (7, 8)),
        (12000, (8, 0)),
        (12040, (8, 4)),
        (12060, (8, 5)),
        (12090, (8, 8)),
        (13000, (9, 0)),
        (14000, None),
    ],
)
def test_ptx_versions_of_drivers(driver: int, limit: tuple[int, int] | None) -> None:
    assert ptx_version_limit(driver) == limit


@needs_nvrtc
def test_own_ptx_round_trips(tmp_path: Path) -> None:
    """What NVRTC emits is PTX that the checks accept, with the signature of the source."""
    nvrtc_module = modules._nvrtc()
    program = nvrtc_module.createProgram(GOOD, "k.cu", (), ())
    nvrtc_module.compileProgram(program, ["-arch=compute_80"])
    text = bytes(nvrtc_module.getPTX(program)).decode()
    nvrtc_module.destroyProgram(program)
    found = compile_module(made(tmp_path, text, "f", name="k.ptx"), "sm_90a")
    assert [p.size for p in found.signatures["f"].params] == [8, 4]


# ---------------------------------------------------------------- call sites


def test_call_site_names_the_caller(tmp_path: Path) -> None:
    here = call_site()
    assert here.startswith(__file__ + ":")
    interior = Path(modules.__file__).parent / "made_up.py"
    space: dict[str, object] = {"call_site": call_site}
    exec(compile("def through():\n    return call_site()\n", str(interior), "exec"), space)
    for folder in ("ops", "runtime"):
        path = interior.parent.parent / folder / "made_up.py"
        exec(compile("def outer():\n    return through()\n", str(path), "exec"), space)
        assert space["outer"]().startswith(__file__ + ":")  # type: ignore[operator]
    model = interior.parent.parent / "model" / "made_up.py"
    exec(compile("def outer():\n    return through()\n", str(model), "exec"), space)
    assert space["outer"]() == f"{model}:2"  # type: ignore[operator]


def test_this_layer_imports_no_cupy() -> None:
    text = "import sys, spark_py.runtime.modules, spark_py.cli.check; print([m for m in sys.modules if 'cupy' in m])"
    child = environment(Path(modules.__file__).parents[2])
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=child, check=True)
    assert run.stdout.strip() == "[]"
