# SPDX-License-Identifier: AGPL-3.0-only
"""What the emulator's tests share: a backend over CUDA text, and launches on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from spark_py.runtime import DevicePtr, GpuBackend, open_backend
from spark_py.runtime.emulated import EmulatedBackend, Schedule
from spark_py.runtime.errors import BackendUnavailableError

Array: TypeAlias = "np.ndarray[Any, Any]"
Dims: TypeAlias = "int | tuple[int, int, int]"

ORDERS = (
    Schedule(workers=1),
    Schedule(workers=1, order="reverse"),
    *(Schedule(workers=1, order="priority", seed=seed) for seed in (1, 2, 3)),
)
"""The five orders in which every right kernel gives the same bytes."""


def order_id(schedule: Schedule) -> str:
    return f"{schedule.order}-{schedule.seed}" if schedule.order == "priority" else schedule.order


def dims(size: Dims) -> tuple[int, int, int]:
    return (size, 1, 1) if isinstance(size, int) else size


def emulate(
    folder: Path, text: str, *, checked: bool = False, schedule: Schedule | None = None, name: str = "kernels"
) -> EmulatedBackend:
    """An emulated backend whose kernel set is `text` alone, as module `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}.cu"
    if not source.exists() or source.read_text() != text:  # processes may share the folder
        source.write_text(text)
    try:
        gpu = open_backend("emulated", kernels=folder, checked=checked, schedule=schedule)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert isinstance(gpu, EmulatedBackend)
    return gpu


def put(gpu: GpuBackend, array: Array) -> DevicePtr:
    """A copy of `array` in an allocation of exactly its size."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    ptr = gpu.alloc(data.nbytes)
    gpu.copy_h2d(data, ptr)
    return ptr


def get(gpu: GpuBackend, ptr: DevicePtr, like: Array) -> Array:
    """What the device holds at `ptr`, of the shape and type of `like`."""
    data = np.empty(like.nbytes, np.uint8)
    gpu.copy_d2h(ptr, data)
    return data.view(like.dtype).reshape(like.shape)


def launch(
    gpu: GpuBackend,
    function: str,
    grid: Dims,
    block: Dims,
    args: Sequence[Array | DevicePtr | int | float],
    *,
    shared: int = 0,
    module: str = "kernels",
    cooperative: bool = False,
) -> list[Array]:
    """Run a kernel; arrays are copied in and, after the launch, out again. Returns what each array became."""
    held = [put(gpu, each) if isinstance(each, np.ndarray) else each for each in args]
    call = gpu.launch_cooperative if cooperative else gpu.launch_typed
    try:
        call(gpu.kernel(module, function), dims(grid), dims(block), shared, gpu.default_stream(), held)
        return [get(gpu, ptr, each) for ptr, each in zip(held, args, strict=True) if isinstance(each, np.ndarray)]
    finally:
        for ptr, each in zip(held, args, strict=True):
            if isinstance(each, np.ndarray):
                gpu.free(ptr)
