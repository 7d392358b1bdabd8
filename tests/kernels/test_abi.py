# SPDX-License-Identifier: AGPL-3.0-only
"""The kernel ABI is locked: catalogue, .cu text and compiled kernels have the engine's parameters, in its order.

`kernel_abi.json` is the lock: one row a function of the engine, `params` as [name, type] pairs. Functions whose names
start with `spark_` are this project's own and are not in it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from spark_py import catalog
from spark_py.catalog.spec import KernelSpec
from spark_py.runtime.manifest import KernelSet, ModuleSource, kernels_path
from spark_py.runtime.signature import parse_source

ROWS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "kernel_abi.json").read_text())
# Rows with a variant are model-specific shadows of the same function.
LOCK = {(row["module"], row["function"]): row for row in ROWS if "variant" not in row}
CATALOGUED = list(catalog.all_kernels())
FILES = list(KernelSet.open(kernels_path()).files())
# The lowest supported, Hopper, and the Blackwells.
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
CUTE_ARCHITECTURE = "sm_90a"

_CTYPES = {"__nv_bfloat16": "bf16", "unsigned int": "u32", "float": "f32", "int": "i32", "unsigned char": "u8"}
_CTYPES |= {"unsigned long long": "u64", "long long": "i64"}


def of_engine() -> list[KernelSpec]:
    return [spec for spec in CATALOGUED if not spec.function.startswith("spark_")]


def name(spec: KernelSpec) -> str:
    return "::".join(spec.key)


def written(module: str, function: str) -> list[list[str]]:
    """Parameters as the .cu text declares them, by a reading of our own."""
    text = KernelSet.open(kernels_path()).module(module).holding(function).path.read_text()
    bounds = r"(?:__launch_bounds__\([^)]*\)\s*)?"
    found = re.findall(rf'extern "C" __global__ void {bounds}{function}\(([^)]*)\)', text)
    assert len(found) == 1, f"{function} is declared {len(found)} times"
    params = []
    for declaration in found[0].split(","):
        ctype, param = " ".join(declaration.replace("__restrict__", "").split()).rsplit(" ", 1)
        for long, short in _CTYPES.items():
            ctype = re.sub(rf"\b{long}\b", short, ctype)
        params.append([param, ctype])
    return params


def test_the_lock_has_no_function_twice() -> None:
    keys = [(row["module"], row["function"], row.get("variant")) for row in ROWS]
    assert len(keys) == len(set(keys))
    assert len(ROWS) == 80


@pytest.mark.parametrize("spec", of_engine(), ids=name)
def test_the_catalogue_has_the_engines_parameters(spec: KernelSpec) -> None:
    row = LOCK[spec.key]
    assert [[p.name, p.ctype] for p in spec.params] == row["params"]
    assert spec.optional == row["optional"]
    assert spec.shared_bytes == row["shared_bytes"]


@pytest.mark.parametrize("spec", CATALOGUED, ids=name)
def test_the_source_has_the_catalogues_parameters(spec: KernelSpec) -> None:
    expected = [[p.name, p.ctype] for p in spec.params]
    assert written(*spec.key) == expected
    path = KernelSet.open(kernels_path()).module(spec.module).holding(spec.function).path
    assert [[p.name, p.ctype] for p in parse_source(path.read_text())[spec.function].params] == expected


def test_manifest_and_catalogue_list_the_same_kernels() -> None:
    listed = {(file.name, function): file for file in FILES for function in file.functions}
    assert listed.keys() == {spec.key for spec in CATALOGUED}
    for spec in CATALOGUED:
        assert listed[spec.key].min_arch == spec.min_arch
        assert listed[spec.key].gpu_only == spec.gpu_only


SPILLS = {("spark_paged_decode_split_fp8", "sm_80"): 192}
"""Bytes a thread that a kernel may spill: without an instruction for E4M3 the compiler keeps what it has widened."""


@pytest.mark.host_only("compiles for every architecture whatever the device; the run on the host has done it")
@pytest.mark.parametrize("source", FILES, ids=lambda file: file.path.stem)
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=() if a == "sm_90a" else pytest.mark.deep) for a in ARCHITECTURES]
)
def test_every_file_compiles_for_every_architecture(source: ModuleSource, arch: str) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC is reached through CuPy, which is not installed")
    from spark_py.runtime.arch import parse_arch, runs_on
    from spark_py.runtime.modules import compile_module, toolkit

    if not runs_on(source.min_arch, parse_arch(arch).capability):
        pytest.skip(f"{source.path.name} needs {source.min_arch}")
    if "cute/" in source.path.read_text():
        if toolkit().cutlass is None:
            pytest.skip(f"{source.path.name} needs nvidia-cutlass, which is not installed")
        if arch != CUTE_ARCHITECTURE:
            pytest.skip(f"CuTe takes half a minute each time: `spark-py check` compiles {source.path.name} for all")
    compiled = compile_module(source, arch)  # from the cache where neither source nor compiler changed
    assert set(compiled.signatures) == set(source.functions)
    for spec in CATALOGUED:
        if spec.module == source.name and spec.function in source.functions:
            assert len(compiled.signatures[spec.function].params) == len(spec.params)
            resources = compiled.resources[spec.function]
            # A block of 1024 threads has 64 registers for each; spills would slow every launch.
            assert resources.registers <= 64 or "1024" not in spec.block_text
            assert resources.spill_stores <= SPILLS.get((spec.function, arch), 0)
