# SPDX-License-Identifier: AGPL-3.0-only
"""The cubin cache: its key, damaged entries, folders it must refuse, and processes side by side."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_py.runtime import modules
from spark_py.runtime.compiled import CompiledModule, Resources
from spark_py.runtime.cubin_cache import CubinCache, default_cache
from spark_py.runtime.errors import InvalidArgumentError
from spark_py.runtime.manifest import ModuleSource
from spark_py.runtime.signature import Kind, Param, Signature
from tests.child import environment

KEY = "ab" + "0" * 62
MODULE = CompiledModule(
    b"\x7fELF image \0 with anything \xff",
    "cubin",
    "sm_90a",
    {"f": Signature("f", (Param("x", Kind.PTR, 8, "const bf16*", 16), Param("n", Kind.U32, 4, "u32")))},
    {"f": Resources(32, 128, 8, 4, 2)},
    "log ✓",
)


def same(a: CompiledModule, b: CompiledModule) -> bool:
    return (a.image, a.header()) == (b.image, b.header())


# ---------------------------------------------------------------- entries


def test_what_is_written_is_read(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "c")
    assert cache.read(KEY) is None
    cache.write(KEY, MODULE)
    found = cache.read(KEY)
    assert found is not None
    assert same(found, MODULE)
    assert found.from_cache
    assert not MODULE.from_cache
    assert [path.name for path in cache.path(KEY).parent.iterdir()] == [f"{KEY}.bin"]  # nothing temporary is left


def test_every_damaged_byte_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CubinCache(tmp_path)
    cache.write(KEY, MODULE)
    path = cache.path(KEY)
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x40]) + good[position + 1 :])
        with caplog.at_level(logging.WARNING, "spark_py"):
            assert cache.read(KEY) is None, position
        assert not path.exists()
    assert "damaged" in caplog.text


@pytest.mark.parametrize("keep", [0, 1, 8, 47, 48, 60, -1])
def test_a_truncated_entry_is_removed(tmp_path: Path, keep: int) -> None:
    cache = CubinCache(tmp_path)
    cache.write(KEY, MODULE)
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes()[:keep])
    assert cache.read(KEY) is None
    assert not path.exists()


# ---------------------------------------------------------------- folders


def test_the_folder_is_private(tmp_path: Path) -> None:
    cache = CubinCache(tmp_path / "deep" / "cache")
    assert cache.enabled
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_everybody_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="everybody may write"):
        CubinCache(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(InvalidArgumentError, match=f"belongs to user {uid}") as error:
        CubinCache(tmp_path)
    assert "SPARK_PY_CACHE_DIR" in str(error.value)


def test_a_folder_that_cannot_be_made_turns_the_cache_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "spark_py"):
        cache = CubinCache(tmp_path / "file" / "cache")
        cache.write(KEY, MODULE)
        with cache.locked(KEY):
            assert cache.read(KEY) is None
    assert not cache.enabled
    assert len([record for record in caplog.records if "not cached" in record.message]) == 1


def test_a_disk_that_fails_while_writing_turns_the_cache_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    cache = CubinCache(tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    with caplog.at_level(logging.WARNING, "spark_py"):
        cache.write(KEY, MODULE)
        cache.write(KEY, MODULE)
    assert not cache.enabled
    assert caplog.text.count("No space left") == 1
    assert not list(cache.path(KEY).parent.iterdir())


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_PY_CACHE_DIR", str(tmp_path / "é folder"))
    assert CubinCache().folder == tmp_path / "é folder"
    assert default_cache().folder == tmp_path / "é folder"
    assert default_cache() is default_cache()
    monkeypatch.setenv("SPARK_PY_CACHE_DIR", str(tmp_path / "other"))
    assert default_cache().folder == tmp_path / "other"


# ---------------------------------------------------------------- keys, with the real compiler

needs_nvrtc = pytest.mark.usefixtures("nvrtc")


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cupy_backends", reason="CuPy, which reaches NVRTC, is not installed")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "inc").mkdir(parents=True)
    (root / "k.cu").write_text(
        '#include "a.cuh"\n#include <sub.cuh>\nextern "C" __global__ void f(int* x) { x[0] = A + SUB + X; }\n'
    )
    (root / "a.cuh").write_text('#include "b.cuh"\n#define A B\n')
    (root / "b.cuh").write_text("#define B 1\n")
    (root / "inc" / "sub.cuh").write_text("#define SUB 2\n")
    return root


def compiled(tree: Path, cache: CubinCache, arch: str = "sm_90a", *flags: str) -> CompiledModule:
    wanted = flags or ("-DX=1",)
    return modules.compile_module(ModuleSource("k", tree / "k.cu", ("f",), (*wanted, f"-I{tree / 'inc'}")), arch, cache)


@needs_nvrtc
def test_second_compile_comes_from_the_cache_and_says_the_same(tmp_path: Path, tree: Path) -> None:
    first = compiled(tree, CubinCache(tmp_path / "c"))
    second = compiled(tree, CubinCache(tmp_path / "c"))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert same(first, second)


@needs_nvrtc
@pytest.mark.parametrize("file", ["k.cu", "a.cuh", "b.cuh", "inc/sub.cuh"])
def test_editing_any_file_gives_a_new_binary(tmp_path: Path, tree: Path, file: str) -> None:
    cache = CubinCache(tmp_path / "c")
    before = compiled(tree, cache)
    path = tree / file
    path.write_text(path.read_text().replace("2", "20").replace("B 1", "B 10").replace("A B", "A (B + 5)") + "// end\n")
    if file == "k.cu":
        path.write_text(path.read_text().replace("SUB + X", "SUB - X"))
    after = compiled(tree, cache)
    assert not after.from_cache
    assert after.image != before.image


@needs_nvrtc
def test_flags_architecture_switch_and_new_headers_are_in_the_key(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "c")
    compiled(tree, cache)
    assert not compiled(tree, cache, "sm_90a", "-DX=2").from_cache
    assert not compiled(tree, cache, "sm_80").from_cache
    monkeypatch.setenv("SPARK_PY_LINEINFO", "1")
    with_lines = compiled(tree, cache)
    assert not with_lines.from_cache
    assert b".debug_line" in with_lines.image
    monkeypatch.setenv("SPARK_PY_LINEINFO", "yes")
    with pytest.raises(InvalidArgumentError, match="SPARK_PY_LINEINFO"):
        compiled(tree, cache)
    monkeypatch.delenv("SPARK_PY_LINEINFO")
    assert compiled(tree, cache).from_cache
    # A header that shadows another one from now on.
    (tree / "sub.cuh").write_text("#define SUB 9\n")
    assert not compiled(tree, cache).from_cache


@needs_nvrtc
def test_a_replaced_toolkit_is_in_the_key(tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CubinCache(tmp_path / "c")
    compiled(tree, cache)
    other = dataclasses.replace(modules.toolkit(), fingerprint="replaced")
    monkeypatch.setattr(modules, "toolkit", lambda: other)
    assert not compiled(tree, cache).from_cache


@needs_nvrtc
def test_a_header_that_appears_where_has_include_looks(tmp_path: Path, tree: Path) -> None:
    (tree / "k.cu").write_text(
        '#if __has_include("later.cuh")\n#define A 5\n#else\n#define A 1\n#endif\n'
        'extern "C" __global__ void f(int* x) { x[0] = A; }\n'
    )
    cache = CubinCache(tmp_path / "c")
    before = compiled(tree, cache)
    (tree / "later.cuh").touch()
    after = compiled(tree, cache)
    assert not after.from_cache
    assert after.image != before.image


@needs_nvrtc
def test_a_header_named_by_a_macro_is_never_cached(tmp_path: Path, tree: Path) -> None:
    (tree / "k.cu").write_text('#define H "b.cuh"\n#include H\nextern "C" __global__ void f(int* x) { x[0] = B; }\n')
    cache = CubinCache(tmp_path / "c")
    before = compiled(tree, cache)
    (tree / "b.cuh").write_text("#define B 99\n")
    after = compiled(tree, cache)
    assert not after.from_cache
    assert after.image != before.image


@needs_nvrtc
def test_a_damaged_entry_is_compiled_again(tmp_path: Path, tree: Path) -> None:
    cache = CubinCache(tmp_path / "c")
    before = compiled(tree, cache)
    (entry,) = cache.folder.glob("*/*.bin")
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)
    again = compiled(tree, cache)
    assert not again.from_cache
    assert again.image == before.image
    assert compiled(tree, cache).from_cache


_PROCESS = """
import sys, hashlib
from pathlib import Path
from spark_py.runtime import modules
from spark_py.runtime.cubin_cache import CubinCache
from spark_py.runtime.manifest import ModuleSource

tree = Path(sys.argv[2])
source = ModuleSource("k", tree / "k.cu", ("f",), ("-DX=1", f"-I{tree / 'inc'}"))
modules.toolkit()
print("ready", flush=True)
sys.stdin.readline()
found = modules.compile_module(source, "sm_90a", CubinCache(sys.argv[1]))
print(found.from_cache, hashlib.sha256(found.image).hexdigest())
"""


@needs_nvrtc
def test_processes_side_by_side_compile_once(tmp_path: Path, tree: Path) -> None:
    command = [sys.executable, "-c", _PROCESS, str(tmp_path / "c"), str(tree)]
    child = environment(Path(modules.__file__).parents[2])
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": child}
    workers = [subprocess.Popen(command, **pipes) for _ in range(4)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    answers = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert sorted(from_cache for from_cache, _ in answers) == ["False", "True", "True", "True"]
    assert len({image for _, image in answers}) == 1
