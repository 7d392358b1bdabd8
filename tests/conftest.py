# SPDX-License-Identifier: AGPL-3.0-only
"""What this project's own run adds to the plugin of `spark_py.testing`: compute-sanitizer, and an audit of kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spark_py.testing import plugin

try:
    from hypothesis import settings
except ImportError:
    pass
else:
    # Time is no property under test, and a slow shared machine is no failure.
    settings.register_profile("spark", deadline=None, print_blob=True)
    settings.load_profile("spark")

if TYPE_CHECKING:
    from spark_py.runtime.gpu import GpuBackend


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.has_plugin("spark_py"):  # a checkout on the path that is not installed
        pluginmanager.register(plugin, "spark_py")
    group = parser.getgroup("spark_py")
    group.addoption(
        "--sanitizer",
        action="store_true",
        help="for compute-sanitizer: only tests that take `gpu` and are not marked no_sanitizer, with CuPy's pools off",
    )
    group.addoption("--audit", metavar="FILE", help="write the kernels looked up to FILE (or FILE.worker), as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sanitizer"):
        unfit = [
            i for i in items if "gpu" not in getattr(i, "fixturenames", ()) or i.get_closest_marker("no_sanitizer")
        ]
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]


@pytest.fixture(scope="session")
def kernels_used(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """The kernels ("module::function") that tests looked up; written to the file of `--audit` at the end."""
    used: set[str] = set()
    yield used
    if path := request.config.getoption("--audit"):
        # One file a worker of pytest-xdist.
        worker = getattr(request.config, "workerinput", {}).get("workerid", "")
        Path(f"{path}.{worker}" if worker else path).write_text(json.dumps(sorted(used)))


def _note_used(backend: GpuBackend, used: set[str]) -> None:
    if not backend.closed:
        used.update(f"{row.module}::{row.function}" for row in backend.kernel_audit() if row.status == "used")


@pytest.fixture(scope="session")
def cuda_session(
    request: pytest.FixtureRequest, cuda_session: GpuBackend | None, kernels_used: set[str]
) -> Iterator[GpuBackend | None]:
    """The plugin's, with the pools off under compute-sanitizer."""
    if cuda_session is None:
        yield None
        return
    if request.config.getoption("--sanitizer"):
        # A pool hides reads past the end and reads of stale memory from compute-sanitizer.
        import cupy

        cupy.cuda.set_allocator(None)
        cupy.cuda.set_pinned_memory_allocator(None)
    yield cuda_session
    _note_used(cuda_session, kernels_used)


@pytest.fixture
def gpu(gpu: GpuBackend, cuda_session: GpuBackend | None, kernels_used: set[str]) -> Iterator[GpuBackend]:
    """The plugin's; the kernels that a test on the CPU looked up are noted."""
    yield gpu
    if cuda_session is None:
        _note_used(gpu, kernels_used)
