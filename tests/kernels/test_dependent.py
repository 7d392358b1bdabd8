# SPDX-License-Identifier: AGPL-3.0-only
"""What the assembler makes of kernels that wait for the one before them: it moves no access to before the wait.

The emulation shows that a kernel's text keeps the rules. But an address that a kernel's `const __restrict__` parameter
stands for is constant to the compiler, which may then load from it as early as it likes.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from spark_py import catalog
from spark_py.runtime.manifest import KernelSet, ModuleSource

DEPENDENT = [file for file in KernelSet.open().files() if file.dependent]
_SECTION = re.compile(r"^\s*\.section\s+\.text\.(\w+)", re.MULTILINE)
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_WAIT = re.compile(r"\bACQBULK\b")
_WRITE = re.compile(r"\b(?:STG|ST|ATOM|ATOMG|RED|REDG)\b")
_ACCESS = re.compile(r"\b(?:LDG|LD|LDGSTS|STG|ST|ATOM|ATOMG|RED|REDG)\b")


def disassembler() -> str | None:
    """nvdisasm of the toolkit, or of the wheel nvidia-cuda-nvdisasm."""
    found = shutil.which("nvdisasm")
    package = importlib.util.find_spec("nvidia")
    for folder in [] if found or package is None else package.submodule_search_locations or []:
        found = next((str(path) for path in Path(folder).glob("*/bin/nvdisasm")), None) or found
    return found


def instructions(source: ModuleSource, folder: Path, tool: str) -> dict[str, list[str]]:
    """The machine instructions of each kernel of a file for Hopper, in the order of addresses."""
    from spark_py.runtime.modules import compile_module

    image = folder / "image.cubin"
    # CuPy leaves the image's last byte out, which is a zero.
    image.write_bytes(compile_module(source, "sm_90a").image + b"\0")
    text = subprocess.run([tool, "-c", str(image)], capture_output=True, text=True, check=True).stdout
    pieces = _SECTION.split(text)[1:]
    return {name: _INSTRUCTION.findall(body) for name, body in zip(pieces[::2], pieces[1::2], strict=True)}


@pytest.mark.deep
@pytest.mark.host_only("about what the compiler makes of the kernels, which is the same for every backend")
@pytest.mark.parametrize("source", DEPENDENT, ids=lambda source: source.path.stem)
def test_nothing_is_read_before_the_wait(source: ModuleSource, tmp_path: Path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC is reached through CuPy, which is not installed")
    tool = disassembler()
    if tool is None:
        pytest.skip("needs nvdisasm, of the CUDA toolkit or of the wheel nvidia-cuda-nvdisasm")
    found = instructions(source, tmp_path, tool)
    assert set(found) == set(source.functions)
    for name, code in found.items():
        waits = [at for at, line in enumerate(code) if _WAIT.search(line)]
        assert waits, f"{name} never waits"
        spec = catalog.find(source.name, name)
        early = spec is not None and any(param.early for param in spec.params)
        wrong = _ACCESS if not early else _WRITE
        assert [line for line in code[: waits[0]] if wrong.search(line)] == [], name


def test_what_is_read_early_is_only_read() -> None:
    """No kernel writes what it, or another kernel of its own launch, reads before the wait."""
    for spec in catalog.CATALOG.values():
        assert all(param.access == "r" for param in spec.params if param.early), spec.key
