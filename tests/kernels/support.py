# SPDX-License-Identifier: AGPL-3.0-only
"""The core check of each kernel, by name, and its cases: what mutants must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from spark_py import catalog
from spark_py.catalog.spec import KernelSpec
from spark_py.runtime.errors import KernelFaultError
from spark_py.runtime.gpu import GpuBackend
from spark_py.testing import run_case
from spark_py.testing.cases import cases_of

Check: TypeAlias = Callable[[GpuBackend, np.random.Generator], None]

CHECKS: dict[str, Check] = {}
"""The core check of each kernel, "module::function" or "module::function@aspect"; mutants must fail theirs."""


def checks(name: str) -> Callable[[Check], Check]:
    """Register a function `check(gpu, rng)` under `name`."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def check_cases(gpu: GpuBackend, rng: np.random.Generator, name: str) -> None:
    """Every case of kernel "module::function" passes."""
    module, function = name.split("::")
    spec = catalog.CATALOG[module, function]
    for case in cases_of(spec):
        wrong = run_case(gpu, spec, case, rng)
        assert not wrong, f"{case.name}: {'; '.join(map(str, wrong))}"


def caught(gpu: GpuBackend, spec: KernelSpec, rng: np.random.Generator) -> bool:
    """Whether a case of `spec` notices what is wrong with the backend's kernel, or the backend itself does."""
    for case in cases_of(spec):
        try:
            if run_case(gpu, spec, case, rng):
                return True
        except KernelFaultError:
            return True
    return False
