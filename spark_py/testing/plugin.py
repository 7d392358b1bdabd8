# SPDX-License-Identifier: AGPL-3.0-only
"""The pytest plugin: one backend, one kernel set and one seed for the whole run.

    pytest --backend host|emulated|emulated-checked|cuda --kernels FOLDER --seed N

Tests take `gpu` (a GpuBackend), `rng` (a NumPy Generator of their own) and `kernel_case`, and never name a backend.
`-p no:spark_py` turns the plugin off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.gpu import GpuBackend
    from .case import KernelCase

BACKENDS = ("host", "emulated", "emulated-checked", "cuda")


def _seed(text: str) -> str:
    return text if text == "random" else str(int(text))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("spark_py")
    group.addoption(
        "--backend",
        choices=BACKENDS,
        help="where the kernels run (default: emulated with --kernels, host without)",
    )
    group.addoption("--kernels", metavar="PATH", help="kernel folder, or .cu file, instead of spark_py's own kernels")
    group.addoption(
        "--seed", type=_seed, default="0", metavar="N", help="seed of every random input, or 'random' (default: 0)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Settle what the options leave open."""
    config.addinivalue_line("markers", "gpu_only(reason): needs the cuda backend; `reason` says what the others lack")
    config.addinivalue_line("markers", "host_only(reason): needs the host backend; `reason` says why")
    path = config.option.kernels
    if path is not None:
        # The run may change its folder; workers of pytest-xdist get the option as it stands here.
        config.option.kernels = str((config.invocation_params.dir / path).resolve())
        if not Path(config.option.kernels).exists():
            raise pytest.UsageError(f"--kernels {path}: no such file or folder")
    if config.option.backend is None:
        config.option.backend = "host" if path is None else "emulated"
    if config.option.seed == "random":
        # Drawn once: the workers of pytest-xdist take the number that the header shows.
        import numpy as np

        shared = getattr(config, "workerinput", {}).get("spark_seed")
        config.option.seed = shared or str(np.random.SeedSequence().generate_state(1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of pytest-xdist the seed of this run."""
    node.workerinput["spark_seed"] = node.config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    """Backend, seed and kernel folder in the header."""
    kernels = f", kernels {config.option.kernels}" if config.option.kernels else ""
    return f"spark_py: backend {config.option.backend}, seed {config.option.seed}{kernels}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked for another backend, with the reason that the mark must give."""
    for item in items:
        for marker, wanted in (("gpu_only", "cuda"), ("host_only", "host")):
            mark = item.get_closest_marker(marker)
            if mark is None:
                continue
            reason = mark.args[0] if mark.args else mark.kwargs.get("reason")
            if not reason:
                raise pytest.UsageError(f"{item.nodeid}: @pytest.mark.{marker} needs a reason")
            if config.option.backend != wanted:
                item.add_marker(pytest.mark.skip(reason=f"needs --backend {wanted}: {reason}"))


@pytest.fixture(scope="session")
def backend_name(request: pytest.FixtureRequest) -> str:
    """The backend of this run: "host", "emulated", "emulated-checked" or "cuda"."""
    return str(request.config.option.backend)


@pytest.fixture(scope="session")
def kernels_folder(request: pytest.FixtureRequest) -> str | None:
    """The folder or file of `--kernels`; None for spark_py's own kernels."""
    path: str | None = request.config.option.kernels
    return path


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on `--seed` and on the test's node id alone, not on order or other tests."""
    import numpy as np

    key = f"{request.config.option.seed}:{request.node.nodeid}"
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "little"))


@pytest.fixture(scope="session")
def cuda_session(backend_name: str, kernels_folder: str | None) -> Iterator[GpuBackend | None]:
    """One CUDA backend for the run, since a context and compiled kernels are dear; None on the CPU."""
    if backend_name != "cuda":
        yield None
        return
    from ..runtime import open_backend

    with open_backend("cuda", kernels=kernels_folder, on_leak="warn") as backend:
        yield backend


def drop_replaced_methods(backend: GpuBackend) -> None:
    """Remove instance attributes that hide methods. An older pytest's undo of `monkeypatch.setattr(gpu, "alloc", ...)`
    leaves one behind, the bound method, and a later test that patches the class would patch nothing."""
    for name in [name for name in vars(backend) if callable(getattr(type(backend), name, None))]:
        delattr(backend, name)


@pytest.fixture
def gpu(backend_name: str, kernels_folder: str | None, cuda_session: GpuBackend | None) -> Iterator[GpuBackend]:
    """The backend under test, with no live allocation before the test; what the test leaves is freed after it.

    On the CPU each test has a backend of its own, so that nothing of one test can reach another.
    """
    if cuda_session is not None:
        drop_replaced_methods(cuda_session)
        yield cuda_session
        drop_replaced_methods(cuda_session)
        if not cuda_session.closed:
            cuda_session.abort_capture_if_active(cuda_session.default_stream())
            cuda_session.sweep_unreleased()
        return
    from ..runtime import open_backend

    name: Any = backend_name.removesuffix("-checked")
    checked = backend_name == "emulated-checked"
    with open_backend(name, kernels=kernels_folder, on_leak="warn", checked=checked) as backend:
        yield backend


@pytest.fixture
def kernel_case(gpu: GpuBackend, rng: np.random.Generator) -> KernelCase:
    """Launch a kernel and compare it with its reference; see `spark_py.testing.KernelCase`."""
    from .case import KernelCase

    return KernelCase(gpu, rng)
