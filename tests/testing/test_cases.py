# SPDX-License-Identifier: AGPL-3.0-only
"""The cases that foreign kernels are held to: our kernels pass all of them, and each wrong reference fails one.

That each wrong .cu file fails one is tested beside the kernels' own checks, where it is compiled.
"""

from __future__ import annotations

import inspect
import sys
import types

import numpy as np
import pytest

from spark_py import catalog
from spark_py.catalog.spec import KernelSpec
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import run_case
from spark_py.testing.cases import cases_of

from ..kernels.mutants import Mutant, all_mutants
from ..kernels.support import caught
from ..kernels.test_mutants import load_reference

# Cases have no buffers beyond 2**32 elements.
MUTANTS = [m for m in all_mutants() if "@" not in m.check and m.py]


def name(spec: KernelSpec) -> str:
    return "::".join(spec.key)


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
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_case_notices_a_wrong_reference(
    mutant: Mutant, gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutant.py is not None
    right = catalog.CATALOG[mutant.kernel]
    monkeypatch.setitem(catalog.CATALOG, mutant.kernel, spec_over(load_reference(mutant.py), mutant.kernel))
    assert caught(gpu, right, rng)
