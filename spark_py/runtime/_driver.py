# SPDX-License-Identifier: AGPL-3.0-only
"""The few driver calls that CuPy does not offer, through libcuda and ctypes."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

from .errors import BackendUnavailableError, CudaError

_BF16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver library; BackendUnavailableError where none is installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise BackendUnavailableError(f"no CUDA driver: {error}; install the NVIDIA driver") from None


def _check(operation: str, status: int) -> None:
    if status == 0:
        return
    name = ctypes.c_char_p()
    libcuda().cuGetErrorName(status, ctypes.byref(name))
    raise CudaError(operation, status, (name.value or b"unknown").decode())


def driver_version() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA the driver runs, None without a driver."""
    try:
        library = libcuda()
    except BackendUnavailableError:
        return None
    number = ctypes.c_int()
    _check("cuDriverGetVersion", library.cuDriverGetVersion(ctypes.byref(number)))
    return number.value // 1000, number.value % 1000 // 10


def dependent_launcher(operation: str, function: int, geometry: Sequence[int], table: int) -> Callable[[int], None]:
    """A function of a stream that launches `function` there by cuLaunchKernelEx as programmatic stream serialization
    has it: it may start as soon as the kernel before it lets it. `geometry` is grid and block of x, y, z and bytes of
    dynamic shared memory, `table` the address of the arguments' addresses."""
    call = libcuda().cuLaunchKernelEx
    call.argtypes = [ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    attribute = _Attribute(_PROGRAMMATIC)
    attribute.value[0] = 1

    def launch(stream: int) -> None:
        config = _Config(*geometry, stream, ctypes.pointer(attribute), 1)
        _check(operation, call(ctypes.byref(config), function, table, None))

    return launch


def encode_tiled_2d_bf16(
    address: int, rows: int, cols: int, row_stride_bytes: int, box_rows: int, box_cols: int
) -> bytes:
    """The 128 bytes of a TMA descriptor (cuTensorMapEncodeTiled): BF16, rank 2, fastest dimension first."""
    library = libcuda()
    storage = ctypes.create_string_buffer(128 + 64)
    # The driver wants the descriptor on a 64-byte boundary.
    at = -ctypes.addressof(storage) % 64
    status = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(ctypes.addressof(storage) + at),
        ctypes.c_int(_BF16),
        ctypes.c_uint32(2),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(cols, rows),
        (ctypes.c_uint64 * 1)(row_stride_bytes),
        (ctypes.c_uint32 * 2)(box_cols, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        ctypes.c_int(0),
        ctypes.c_int(0),
        ctypes.c_int(_L2_128B),
        ctypes.c_int(0),
    )
    _check("cuTensorMapEncodeTiled", status)
    return storage.raw[at : at + 128]
