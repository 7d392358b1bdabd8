# SPDX-License-Identifier: AGPL-3.0-only
"""The runtime: one checked GpuBackend, on CUDA and on the CPU.

from spark_py.runtime import open_backend

with open_backend() as gpu:
    ptr = gpu.alloc(1024)
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from . import errors
from .errors import BackendUnavailableError, InvalidArgumentError, SparkError
from .gpu import (
    DeviceLimits,
    DevicePtr,
    FunctionAttributes,
    GpuBackend,
    GraphHandle,
    HostPtr,
    KernelAuditRow,
    KernelHandle,
)
from .launch import KernelArg, KernelLaunch, div_ceil, pack_kernel_args
from .signature import Kind, Param, Signature
from .tensormap import TensorMap

if TYPE_CHECKING:
    from ..emulator.launch import Schedule

__all__ = [
    "DeviceLimits",
    "DevicePtr",
    "FunctionAttributes",
    "GpuBackend",
    "GraphHandle",
    "HostPtr",
    "KernelArg",
    "KernelAuditRow",
    "KernelHandle",
    "KernelLaunch",
    "Kind",
    "Param",
    "Signature",
    "SparkError",
    "TensorMap",
    "div_ceil",
    "errors",
    "open_backend",
    "pack_kernel_args",
]

log = logging.getLogger("spark_py.runtime")


def open_backend(
    name: Literal["auto", "cuda", "emulated", "host"] = "auto",
    ordinal: int = 0,
    kernels: Path | str | None = None,
    on_leak: Literal["warn", "raise"] = "warn",
    *,
    debug_sync_kernels: bool = False,
    poison: bool = True,
    checked: bool = False,
    schedule: Schedule | None = None,
) -> GpuBackend:
    """A backend, to be used as a context manager.

    `name`: "cuda", "host", "emulated" (the .cu files compiled for the CPU), or "auto", which takes CUDA where a GPU
    answers and host otherwise. `ordinal`: device number. `kernels`: a folder of .cu or .ptx with a manifest instead of
    the package's own. `on_leak`: whether allocations that are left at the end are logged or raise LeakError.
    `debug_sync_kernels` waits after each launch. `poison` (CPU only) fills fresh and freed memory with 0xFF.
    `checked` and `schedule` are for "emulated" alone: whether every access and barrier is checked, and in which order
    threads run.

    BackendUnavailableError says what "cuda" or "emulated" lacks on this machine.
    """
    if name not in ("auto", "cuda", "emulated", "host"):
        raise InvalidArgumentError("name", name, 'one of "auto", "cuda", "emulated", "host"')
    if name == "emulated":
        from .emulated import EmulatedBackend

        return EmulatedBackend(ordinal, kernels, on_leak, debug_sync_kernels, poison, checked, schedule)
    if checked or schedule is not None:
        raise InvalidArgumentError("checked" if checked else "schedule", checked or schedule, '"emulated" alone has it')
    if name != "host":
        from .cuda import CudaBackend

        try:
            return CudaBackend(ordinal, kernels, on_leak, debug_sync_kernels)
        except BackendUnavailableError as error:
            if name == "cuda":
                raise
            log.info("no CUDA: %s; using the CPU", error)
    from .host import HostBackend

    return HostBackend(ordinal, kernels, on_leak, debug_sync_kernels, poison)
