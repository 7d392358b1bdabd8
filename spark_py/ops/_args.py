# SPDX-License-Identifier: AGPL-3.0-only
"""Checks that the launchers share."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle

U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1


class HasWeight(Protocol):
    """A weight struct, as Rust's `DenseWeight`."""

    @property
    def weight(self) -> DevicePtr: ...


Weight: TypeAlias = "DevicePtr | HasWeight"


def weight_ptr(weight: Weight) -> DevicePtr:
    """The pointer of a weight."""
    return weight if isinstance(weight, DevicePtr) else weight.weight


def count(name: str, value: int) -> int:
    """`value` if it is an integer from 1 to 2**32 - 1; InvalidArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= U32_MAX:
        raise InvalidArgumentError(name, value, f"an integer from 1 to {U32_MAX} is needed")
    return int(value)


def multiple_of(name: str, value: int, step: int, why: str) -> int:
    """`count`, and a multiple of `step`."""
    number = count(name, value)
    if number % step:
        raise InvalidArgumentError(name, value, f"a multiple of {step} is needed: {why}")
    return number


def block_stride(name: str, value: int, dense: int) -> int:
    """`value` if it is an integer from `dense`, a block's elements, to 2**64 - 1; InvalidArgumentError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not dense <= value <= U64_MAX:
        limit = f"at least block_size * num_kv_heads * head_dim = {dense} elements are needed, {U64_MAX} at most"
        raise InvalidArgumentError(name, value, limit)
    return int(value)


def epsilon(value: float) -> float:
    """A norm's eps: finite and not negative."""
    if not 0.0 <= value < float("inf"):
        raise InvalidArgumentError("eps", value, "a finite number of at least 0 is needed")
    return value


def finite(name: str, value: float) -> float:
    """`value` if it is a finite number; InvalidArgumentError otherwise."""
    if not -float("inf") < value < float("inf"):
        raise InvalidArgumentError(name, value, "a finite number is needed")
    return value


def dynamic_shared(gpu: GpuBackend, kernel: KernelHandle, nbytes: int) -> int:
    """`nbytes` of dynamic shared memory for a launch; where a launch gets less by itself the kernel's limit is raised,
    and a GeometryError says so where the device has less."""
    if nbytes and not kernel.is_null and nbytes > gpu.function_attributes(kernel).shared_dynamic_max:
        gpu.set_kernel_max_dynamic_smem(kernel, nbytes)
    return nbytes
