# SPDX-License-Identifier: AGPL-3.0-only
"""One backend and one seed for the whole run: `pytest --backend host|emulated|emulated-checked|cuda --seed N`.

Tests take `gpu` (a GpuBackend) and `rng` (a NumPy Generator of their own) and never name a backend.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

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

BACKENDS = ("host", "emulated", "emulated-checked", "cuda")


def _seed(text: str) -> str:
    return text if text == "random" else str(int(text))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("spark_py")
    group.addoption("--backend", choices=BACKENDS, default="host", help="where the kernels run (default: host)")
    group.addoption(
        "--seed", type=_seed, default="0", metavar="N", help="seed of every random input, or 'random' (default: 0)"
    )
    group.addoption(
        "--sanitizer",
        action="store_true",
        help="for compute-sanitizer: only tests that take `gpu` and are not marked no_sanitizer, with CuPy's pools off",
    )
    group.addoption("--audit", metavar="FILE", help="write the kernels looked up to FILE (or FILE.worker), as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed == "random":
        # Drawn once: the workers of pytest-xdist take the number that the header shows.
        shared = getattr(config, "workerinput", {}).get("spark_seed")
        config.option.seed = shared or str(np.random.SeedSequence().generate_state(1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["spark_seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"spark_py: backend {config.getoption('--backend')}, seed {config.getoption('--seed')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    backend = config.getoption("--backend")
    if config.getoption("--sanitizer"):
        unfit = [
            i for i in items if "gpu" not in getattr(i, "fixturenames", ()) or i.get_closest_marker("no_sanitizer")
        ]
        config.hook.pytest_deselected(items=unfit)
        items[:] = [item for item in items if item not in unfit]
    for item in items:
        for marker, wanted in (("gpu_only", "cuda"), ("host_only", "host")):
            mark = item.get_closest_marker(marker)
            if mark is None:
                continue
            reason = mark.args[0] if mark.args else mark.kwargs.get("reason")
            if not reason:
                raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{marker} needs a reason")
            if backend != wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs --backend {wanted}: {reason}"))


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """The backend of this run: "host", "emulated", "emulated-checked" or "cuda"."""
    return str(request.config.getoption("--backend"))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on `--seed` and on the test's node id alone, not on order or other tests."""
    key = f"{request.config.getoption('--seed')}:{request.node.nodeid}"
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))


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
    used.update(f"{row.module}::{row.function}" for row in backend.kernel_audit() if row.status == "used")


@pytest.fixture(scope="session")
def cuda_session(
    request: pytest.FixtureRequest, backend_name: str, kernels_used: set[str]
) -> Iterator[GpuBackend | None]:
    """One CUDA backend for the run, since a context and compiled kernels are dear; None on the host."""
    if backend_name != "cuda":
        yield None
        return
    from spark_py.runtime import open_backend

    with open_backend("cuda", on_leak="warn") as backend:
        if request.config.getoption("--sanitizer"):
            # A pool hides reads past the end and reads of stale memory from compute-sanitizer.
            import cupy

            cupy.cuda.set_allocator(None)
            cupy.cuda.set_pinned_memory_allocator(None)
        yield backend
        if not backend.closed:
            _note_used(backend, kernels_used)


@pytest.fixture
def gpu(backend_name: str, cuda_session: GpuBackend | None, kernels_used: set[str]) -> Iterator[GpuBackend]:
    """The backend under test, with no live allocation before the test; what the test leaves is freed after it.

    On the host each test has a backend of its own, so that nothing of one test can reach another.
    """
    if cuda_session is not None:
        yield cuda_session
        if not cuda_session.closed:
            cuda_session.abort_capture_if_active(cuda_session.default_stream())
            cuda_session.sweep_unreleased()
        return
    from spark_py.runtime import open_backend

    checked = backend_name == "emulated-checked"
    with open_backend(backend_name.removesuffix("-checked"), on_leak="warn", checked=checked) as backend:
        yield backend
        if not backend.closed:
            _note_used(backend, kernels_used)
