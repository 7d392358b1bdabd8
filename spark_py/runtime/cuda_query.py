# SPDX-License-Identifier: AGPL-3.0-only
"""What the CUDA driver says of a device and of a function, by its numbers.

CuPy names the attributes by CUDA version; the numbers never change.
"""

from __future__ import annotations

from collections.abc import Callable

from .gpu import DeviceLimits, FunctionAttributes

__all__ = ["DEVICE_ATTRIBUTES", "MAX_DYNAMIC_SHARED", "device_limits", "function_attributes"]

# cudaDeviceAttr
DEVICE_ATTRIBUTES = {
    "MaxThreadsPerBlock": 1,
    "MaxBlockDimX": 2,
    "MaxBlockDimY": 3,
    "MaxBlockDimZ": 4,
    "MaxGridDimX": 5,
    "MaxGridDimY": 6,
    "MaxGridDimZ": 7,
    "MaxSharedMemoryPerBlock": 8,
    "WarpSize": 10,
    "MultiProcessorCount": 16,
    "Integrated": 18,
    "ComputeCapabilityMajor": 75,
    "ComputeCapabilityMinor": 76,
    "CooperativeLaunch": 95,
    "MaxSharedMemoryPerBlockOptin": 97,
}
MAX_DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""


def device_limits(get: Callable[[str], int]) -> DeviceLimits:
    """The limits of a device whose attribute of a name in DEVICE_ATTRIBUTES is `get(name)`."""
    return DeviceLimits(
        max_grid=(get("MaxGridDimX"), get("MaxGridDimY"), get("MaxGridDimZ")),
        max_block=(get("MaxBlockDimX"), get("MaxBlockDimY"), get("MaxBlockDimZ")),
        max_threads_per_block=get("MaxThreadsPerBlock"),
        max_shared_default=get("MaxSharedMemoryPerBlock"),
        max_shared_optin=get("MaxSharedMemoryPerBlockOptin"),
        warp_size=get("WarpSize"),
        cooperative_launch=bool(get("CooperativeLaunch")),
    )


def function_attributes(get: Callable[[int], int]) -> FunctionAttributes:
    """The attributes of a function whose CUfunction_attribute of a number is `get(number)`."""
    return FunctionAttributes(
        registers=get(4),
        shared_static=get(1),
        shared_dynamic_max=get(MAX_DYNAMIC_SHARED),
        local_per_thread=get(3),
        max_threads_per_block=get(0),
        constant=get(2),
        ptx_version=get(5),
        binary_version=get(6),
    )
