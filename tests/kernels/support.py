# SPDX-License-Identifier: AGPL-3.0-only
"""The core check of each kernel, by name, for the mutants that must fail it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from spark_py.runtime.gpu import GpuBackend

Check: TypeAlias = Callable[[GpuBackend, np.random.Generator], None]

CHECKS: dict[str, Check] = {}
"""The core check of each kernel, "module::function" or "module::function@aspect"; mutants must fail theirs."""


def checks(name: str) -> Callable[[Check], Check]:
    """Register a function `check(gpu, rng)` under `name`."""

    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register
