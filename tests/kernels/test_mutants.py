# SPDX-License-Identifier: AGPL-3.0-only
"""Every mutant is noticed: patched references on the host, patched .cu files on a GPU; all of them compile."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import spark_py.reference
from spark_py import catalog
from spark_py.runtime import open_backend
from spark_py.runtime.errors import KernelFaultError
from spark_py.runtime.manifest import KernelSet, kernels_path

from .mutants import Mutant, Patch, all_mutants
from .support import CHECKS, caught

_TESTS = Path(__file__).parent
REFERENCES = Path(spark_py.reference.__file__).parent

for _file in sorted(_TESTS.glob("test_*.py")):
    if _file.stem != Path(__file__).stem:
        importlib.import_module(f"{__package__}.{_file.stem}")

MUTANTS = all_mutants()
PY_MUTANTS = [m for m in MUTANTS if m.py is not None]
CU_MUTANTS = [m for m in MUTANTS if m.cu is not None]
SPARSE = ("argmax", "embed_from_argmax")
"""Modules whose checks of far rows read little of the memory that they ask for."""


def load_reference(patch: Patch) -> types.ModuleType:
    """The patched reference as a module of its own; the package keeps the right one."""
    module = types.ModuleType(f"spark_py.reference._mutant_{Path(patch.file).stem}")
    module.__package__ = "spark_py.reference"
    exec(compile(patch.apply(REFERENCES), f"mutant of {patch.file}", "exec"), module.__dict__)
    return module


def patched_kernels(patch: Patch, folder: Path) -> Path:
    """A copy of the kernel set with one file patched."""
    copy = Path(shutil.copytree(kernels_path(), folder / "kernels"))
    (copy / patch.file).write_text(patch.apply(kernels_path()))
    return copy


def test_every_kernel_has_three_mutants() -> None:
    counts: dict[tuple[str, str], int] = {}
    for mutant in MUTANTS:
        counts[mutant.kernel] = counts.get(mutant.kernel, 0) + 1
    assert all(mutant.check in CHECKS for mutant in MUTANTS), "a mutant names no registered check"
    tested = {tuple(name.partition("@")[0].split("::")) for name in CHECKS}
    assert {key for key in tested if counts.get((key[0], key[1]), 0) < 3} == set()


@pytest.mark.deep
@pytest.mark.host_only("patched references stand in for kernels on the host alone")
@pytest.mark.parametrize("mutant", PY_MUTANTS, ids=str)
def test_the_check_notices_a_wrong_reference(
    mutant: Mutant, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutant.py is not None
    patched = load_reference(mutant.py)
    spec = catalog.CATALOG[mutant.kernel]
    rows = sys.modules[spec.run.__module__]
    monkeypatch.setattr(rows, "reference", patched)
    wrong = dataclasses.replace(spec, reference=getattr(patched, spec.reference.__name__))
    monkeypatch.setitem(catalog.CATALOG, mutant.kernel, wrong)
    with open_backend("host") as gpu:
        with pytest.raises(AssertionError):
            CHECKS[mutant.check](gpu, rng)
        gpu.sweep_unreleased()


@pytest.mark.no_sanitizer("opens a backend for each mutant")
@pytest.mark.parametrize("mutant", CU_MUTANTS, ids=str)
def test_the_check_notices_a_wrong_kernel(
    mutant: Mutant, backend_name: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    assert mutant.cu is not None
    if backend_name == "host":
        pytest.skip("needs --backend cuda, emulated or emulated-checked: patched .cu files run there")
    if backend_name == "cuda" and mutant.race:
        pytest.skip("needs --backend emulated-checked: a race need not show on a GPU")
    if backend_name != "cuda" and catalog.CATALOG[mutant.kernel].gpu_only:
        pytest.skip("needs --backend cuda: the kernel runs on a GPU alone")
    if backend_name != "cuda" and mutant.check.endswith("@far") and mutant.kernel[0] not in SPARSE:
        pytest.skip("needs --backend cuda: 8.6 GB of operands: too much to read on a CPU in a test")
    name, checked = backend_name.removesuffix("-checked"), backend_name.endswith("-checked")
    with open_backend(name, kernels=patched_kernels(mutant.cu, tmp_path), checked=checked) as gpu:
        # The emulation may find the fault itself, say a read past the end.
        with pytest.raises((AssertionError, KernelFaultError)):
            CHECKS[mutant.check](gpu, rng)
        gpu.sweep_unreleased()
        if "@" not in mutant.check and backend_name != "cuda":  # a GPU does not outlive a fault
            assert caught(gpu, catalog.CATALOG[mutant.kernel], rng), "no case for other people's kernels notices"
        gpu.sweep_unreleased()


@pytest.mark.deep
@pytest.mark.host_only("elsewhere the mutant is compiled to be run")
@pytest.mark.parametrize("mutant", CU_MUTANTS, ids=str)
def test_a_wrong_kernel_compiles(mutant: Mutant, tmp_path: Path) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC is reached through CuPy, which is not installed")
    from spark_py.runtime.modules import compile_module

    assert mutant.cu is not None
    if catalog.CATALOG[mutant.kernel].gpu_only:
        pytest.skip("CuTe takes half a minute to compile; done where the mutant runs")
    kernels = KernelSet.open(patched_kernels(mutant.cu, tmp_path))
    module, function = mutant.kernel
    assert function in compile_module(kernels.module(module).holding(function), "sm_90a", None).signatures
