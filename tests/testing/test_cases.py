# SPDX-License-Identifier: AGPL-3.0-only
"""The cases that foreign kernels are held to: our kernels pass all of them, and each mutant fails one."""

from __future__ import annotations

import inspect
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from spark_py import catalog
from spark_py.catalog.spec import KernelSpec
from spark_py.runtime import open_backend
from spark_py.runtime.errors import KernelFaultError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import run_case
from spark_py.testing.cases import cases_of

from ..kernels.mutants import Mutant, all_mutants
from ..kernels.test_mutants import load_reference, patched_kernels

# What needs buffers beyond 2**32 elements has no place in a run of seconds.
MUTANTS = [m for m in all_mutants() if "@" not in m.check]
GPU_ONLY = {spec.key for spec in catalog.all_kernels() if spec.gpu_only}


def name(spec: KernelSpec) -> str:
    return "::".join(spec.key)


def caught(gpu: GpuBackend, spec: KernelSpec, rng: np.random.Generator) -> bool:
    """Whether a case notices. A checked backend may say so itself."""
    for case in cases_of(spec):
        try:
            if run_case(gpu, spec, case, rng):
                return True
        except KernelFaultError:
            return True
    return False


@pytest.mark.parametrize("spec", list(catalog.all_kernels()), ids=name)
def test_every_kernel_passes_its_cases(gpu: GpuBackend, rng: np.random.Generator, spec: KernelSpec) -> None:
    cases = cases_of(spec)
    assert any(case.tag == "numeric" for case in cases)
    assert all((case.tag == "decision") == bool(case.subject) for case in cases)
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        found = run_case(gpu, spec, case, rng)
        assert not found, f"{case.name}: " + "\n".join(map(str, found))


def spec_over(reference: types.ModuleType, key: tuple[str, str]) -> KernelSpec:
    """The row of the catalogue over another reference; the row that says what is right stays as it is."""
    spec = catalog.CATALOG[key]
    rows = sys.modules[spec.run.__module__]
    copy = types.ModuleType(rows.__name__)
    copy.__package__ = rows.__package__
    exec(compile(inspect.getsource(rows), f"mutant of {rows.__name__}", "exec"), copy.__dict__)
    copy.__dict__["reference"] = reference
    found: KernelSpec = next(row for row in copy.__dict__["KERNELS"] if row.key == key)
    return found


@pytest.mark.host_only("references run on the host alone")
@pytest.mark.parametrize("spec", list(catalog.all_kernels()), ids=name)
def test_the_right_reference_is_left_alone(
    spec: KernelSpec, gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalog.CATALOG, spec.key, spec_over(inspect.getmodule(spec.reference), spec.key))
    assert not caught(gpu, spec, rng)


@pytest.mark.host_only("patched references stand in for kernels on the host alone")
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.py], ids=str)
def test_a_case_notices_a_wrong_reference(
    mutant: Mutant, gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutant.py is not None
    right = catalog.CATALOG[mutant.kernel]
    monkeypatch.setitem(catalog.CATALOG, mutant.kernel, spec_over(load_reference(mutant.py), mutant.kernel))
    assert caught(gpu, right, rng)


@pytest.mark.no_sanitizer("opens a backend for each mutant")
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.cu], ids=str)
def test_a_case_notices_a_wrong_kernel(
    mutant: Mutant, backend_name: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    assert mutant.cu is not None
    if backend_name == "host":
        pytest.skip("needs --backend cuda, emulated or emulated-checked: patched .cu files run there")
    if backend_name != "cuda" and mutant.kernel in GPU_ONLY:
        pytest.skip("needs --backend cuda: the kernel runs on a GPU alone")
    which, checked = backend_name.removesuffix("-checked"), backend_name.endswith("-checked")
    with open_backend(which, kernels=patched_kernels(mutant.cu, tmp_path), checked=checked) as gpu:  # type: ignore[arg-type]
        assert caught(gpu, catalog.CATALOG[mutant.kernel], rng)
        gpu.sweep_unreleased()
