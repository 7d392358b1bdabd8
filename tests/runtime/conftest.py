# SPDX-License-Identifier: AGPL-3.0-only
"""Fixtures of the tests of captures and graphs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from spark_py.runtime import GpuBackend

from .support import Concat


@pytest.fixture
def work(gpu: GpuBackend, rng: np.random.Generator) -> Concat:
    """A launch whose result tells whether, and with what, it ran."""
    return Concat(gpu, rng)


@pytest.fixture
def stream(gpu: GpuBackend) -> Iterator[int]:
    """A stream of the test's own, whose capture, if one is left, is dropped after it."""
    made = gpu.create_stream()
    yield made
    if not gpu.closed:
        gpu.abort_capture_if_active(made)
        gpu.destroy_stream(made)
