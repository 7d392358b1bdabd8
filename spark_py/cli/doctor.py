# SPDX-License-Identifier: AGPL-3.0-only
"""`spark-py doctor`: what this machine has, what it lacks, what that is needed for, and the line that cures it.

Works with the base package alone. Nothing but the CPU backend is required: a missing GPU or toolkit is information.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from spark_py import __version__
from spark_py.runtime.errors import BackendUnavailableError, SparkError, ToolkitMismatchError

CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy", "cupy-cuda11x")
"""Distributions that install the module `cupy`; the first two are those of our extras."""

INSTALL = {
    "cuda12": "pip install 'cupy-cuda12x>=14.0,<15' 'cuda-toolkit[cccl,cudart,nvrtc]==12.9.*'",
    "cuda13": "pip install 'cupy-cuda13x>=14.0,<15' 'cuda-toolkit[cccl,crt,cudart,nvrtc]==13.*'",
    "cutlass": "pip install 'nvidia-cutlass>=4.2'",
}
"""What each extra installs, as a line that also works where the package itself is not installed."""

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_FIRST_CUDA13_DRIVER = 580


@dataclass(frozen=True)
class Finding:
    """One row. `status` is "ok", "missing" (information) or "error"; `value` is "" where there is none."""

    name: str
    status: str
    value: str
    needed_for: str = ""
    cure: str = ""


def kernel_driver() -> str:
    """Version of the NVIDIA kernel module, as the kernel reports it; "" without one."""
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def distributions(names: tuple[str, ...]) -> dict[str, str]:
    """Installed distributions among `names`, with their versions."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _extra_of(nvrtc: tuple[int, int]) -> str:
    return INSTALL["cuda13" if nvrtc[0] >= 13 else "cuda12"]


def suggested_extra(driver: str) -> str:
    """cuda13 where the driver is known to be new enough for it, else cuda12."""
    return "cuda13" if driver and int(driver.partition(".")[0]) >= _FIRST_CUDA13_DRIVER else "cuda12"


def _base() -> Iterator[Finding]:
    yield Finding("spark_py", "ok", f"{__version__} in {Path(__file__).resolve().parent.parent}")
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("numpy", "ml_dtypes", "safetensors", "tokenizers"):
        yield Finding(name, "ok", metadata.version(name))


def _cpu_backend() -> Iterator[Finding]:
    from spark_py.runtime import open_backend

    needed = "everything that runs without a GPU"
    try:
        with open_backend("host") as gpu:
            ptr = gpu.alloc(256, "doctor")
            gpu.memset(ptr, 0, 256)
            gpu.free(ptr)
            yield Finding("cpu backend", "ok", f"works ({gpu.device_name()})", needed)
    except Exception as error:
        # Whatever breaks it is the finding.
        yield Finding("cpu backend", "error", f"{type(error).__name__}: {error}", needed, "install the package again")


def _cupy() -> Iterator[Finding]:
    needed = 'open_backend("cuda") and compiling kernels'
    found = distributions(CUPY)
    if not found:
        yield Finding("cupy", "missing", "", needed, INSTALL[suggested_extra(kernel_driver())])
        return
    value = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(found) == 1:
        yield Finding("cupy", "ok", value, needed)
        return
    cure = f"pip uninstall -y {' '.join(found)}; then {INSTALL[suggested_extra(kernel_driver())]}"
    yield Finding("cupy", "error", f"{value}: they overwrite each other's files", needed, cure)


def _toolkit() -> Iterator[Finding]:
    from spark_py.runtime.modules import toolkit

    needed = "compiling kernels (spark-py check, GPU)"
    try:
        kit = toolkit()
    except ToolkitMismatchError as error:
        yield Finding("nvrtc", "ok", _dotted(error.nvrtc), needed)
        yield Finding("cuda headers", "missing", str(error), needed, _extra_of(error.nvrtc))
    except BackendUnavailableError as error:
        found = distributions(CUPY)
        cure = "" if len(found) > 1 else INSTALL[suggested_extra(kernel_driver())]
        yield Finding("nvrtc", "missing", str(error) if found else "", needed, cure)
        yield Finding("cuda headers", "missing", "", needed, cure)
    else:
        cure = _extra_of(kit.nvrtc)
        where = f" in {kit.library.parent}" if kit.library else ""
        archs = " ".join(f"sm_{number}" for number in kit.archs)
        yield Finding("nvrtc", "ok", f"{_dotted(kit.nvrtc)}{where}, compiles for {archs}", needed)
        if kit.headers is None:
            yield Finding("cuda headers", "missing", "", needed, cure)
        else:
            folders = ", ".join(map(str, kit.include))
            # Another minor version of the same major works as a rule, so it is no error.
            warning = "" if kit.headers == kit.nvrtc else f" (NVRTC is {_dotted(kit.nvrtc)})"
            yield Finding(
                "cuda headers", "ok", f"{_dotted(kit.headers)}{warning} in {folders}", needed, cure if warning else ""
            )


def _cutlass() -> Iterator[Finding]:
    from spark_py.runtime.toolkit import find_cutlass

    needed = "kernel sets that include cute/ or cutlass/"
    folder = find_cutlass()
    if folder:
        yield Finding("cutlass headers", "ok", str(folder), needed)
    else:
        yield Finding("cutlass headers", "missing", "", needed, INSTALL["cutlass"])


def _compiler() -> Iterator[Finding]:
    from spark_py.emulator.compiler import find_compiler

    needed = 'open_backend("emulated"), with the CUDA headers: kernels on the CPU'
    try:
        compiler = find_compiler()
    except SparkError as error:
        yield Finding("c++ compiler", "missing", str(error), needed, "apt install g++, or: pip install ziglang")
    else:
        yield Finding("c++ compiler", "ok", compiler.version.partition("\n")[0], needed)


def _device() -> Iterator[Finding]:
    from spark_py.runtime.cuda import probe

    needed = 'open_backend("cuda")'
    seen, driver = probe(), kernel_driver()
    if seen["driver_version"]:
        text = f"CUDA {seen['driver_version']}" + (f", kernel module {driver}" if driver else "")
        yield Finding("driver", "ok", text, needed)
    else:
        text = f"libcuda is missing, kernel module is {driver}" if driver else ""
        yield Finding("driver", "missing", text, needed, "install NVIDIA's driver, which brings libcuda")
    for number, device in enumerate(seen["devices"]):
        text = f"{device['name']}, {device['arch']}, {device['memory'] / 2**30:.1f} GiB"
        text += ", dependent launches in graphs" if device["dependent"] else ""
        yield Finding(f"device {number}", "ok", text, needed)
    if not seen["devices"]:
        yield Finding("device", "missing", seen["error"], needed)


def _size(path: Path) -> int:
    """Bytes of a file; 0 for a folder, and for an entry that another process removed meanwhile."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def _cache() -> Iterator[Finding]:
    from spark_py.runtime.cubin_cache import CubinCache

    needed = "compiling each kernel once only"
    try:
        cache = CubinCache()
    except SparkError as error:
        yield Finding("cache folder", "missing", str(error), needed, "set SPARK_PY_CACHE_DIR to a folder of your own")
        return
    if cache.enabled:
        size = sum(map(_size, cache.folder.rglob("*")))
        yield Finding("cache folder", "ok", f"{cache.folder}, writable, {size / 1e6:.1f} MB", needed)
    else:
        cure = "set SPARK_PY_CACHE_DIR to a folder that you can write"
        yield Finding("cache folder", "missing", f"{cache.folder} is not writable", needed, cure)


def examine() -> list[Finding]:
    """All findings, in the order in which one depends on another."""
    parts = (_base, _cpu_backend, _cupy, _toolkit, _cutlass, _compiler, _device, _cache)
    return [finding for part in parts for finding in part()]


@click.command("doctor", short_help="Say what this machine has and lacks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor_command(as_json: bool) -> None:
    """Say what this machine has and lacks, what each thing is needed for, and how to get it.

    Exit code 1 when something is broken: the CPU backend does not work, or two CuPy distributions are installed
    together. Things that are missing are information.
    """
    findings = examine()
    healthy = all(finding.status != "error" for finding in findings)
    if as_json:
        click.echo(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        for finding in findings:
            click.echo(f"{finding.status:<8} {finding.name}: {finding.value or 'not found'}")
            if finding.status != "ok":
                click.echo(f"         needed for: {finding.needed_for}")
            if finding.cure:
                click.echo(f"         cure: {finding.cure}")
    sys.exit(0 if healthy else 1)
