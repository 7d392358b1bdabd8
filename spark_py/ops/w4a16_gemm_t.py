# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `w4a16`'s tile GEMM, and the transposed twin of an NVFP4 weight that it reads.

For the LM head of a batch of drafts: its sums are not those of the `w4a16_gemv` family, so results may differ in the
last bit from a row's alone. A row's bits do not depend on the number of rows.
"""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of
from .quantize_nvfp4 import Nvfp4Weight
from .spark_nvfp4_transpose import spark_nvfp4_transpose
from .w4a16_gemv import HasNvfp4Weight, chunks_of, only

OUTPUTS, ROWS, BLOCK = 128, 64, 128
ALIGN = 16
MODULE = "w4a16"
P3, PARENT = "w4a16_gemm_t_p3", "w4a16_gemm_t"


def tgemm_kernel(gpu: GpuBackend, three_stages: bool = True) -> KernelHandle:
    """The set's tile GEMM: `w4a16_gemm_t_p3` where it has one and `three_stages` allows it, else `w4a16_gemm_t`, else
    handle 0."""
    found = gpu.try_kernel(MODULE, P3) if three_stages else None
    return found if found is not None and not found.is_null else gpu.try_kernel(MODULE, PARENT)


def _aligned(name: str, ptr: DevicePtr) -> DevicePtr:
    if int(ptr) % ALIGN:
        raise InvalidArgumentError(name, ptr, f"an address that is a multiple of {ALIGN} is needed")
    return ptr


def w4a16_gemm_n128_ldb(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    ldb: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16; weight is the twin of `transpose_nvfp4`.

    Codes [k / 2, ldb], scales [k / 16, ldb]. k a multiple of 16, ldb a multiple of 16 of at least n, and the three
    inputs on 16-byte addresses. `kernel` is one that `tgemm_kernel` gives.
    """
    only(kernel, f"{MODULE}::{PARENT}", f"{MODULE}::{P3}")
    chunks_of(k)
    if multiple_of("ldb", ldb, ALIGN, "rows of the weight are read 16 bytes at a time") < count("n", n):
        raise InvalidArgumentError("ldb", ldb, f"at least n = {n} is needed")
    (
        KernelLaunch(gpu, kernel)
        .grid((div_ceil(n, OUTPUTS), div_ceil(count("m", m), ROWS), 1))
        .block((BLOCK, 1, 1))
        .arg_ptr(_aligned("input", input))
        .arg_ptr(_aligned("weight", weight.weight))
        .arg_ptr(_aligned("weight_scale", weight.weight_scale))
        .arg_f32(weight.weight_scale_2)
        .arg_ptr(output)
        .arg_u32(m)
        .arg_u32(n)
        .arg_u32(k)
        .arg_u32(ldb)
        .launch(stream)
    )


def transpose_nvfp4(
    gpu: GpuBackend, weight: HasNvfp4Weight, n: int, k: int, stream: StreamLike | None = None
) -> tuple[Nvfp4Weight, int]:
    """The twin of an NVFP4 weight [n, k] for `w4a16_gemm_n128_ldb`, in new memory, and its ldb; waits until it is made.

    Codes u8 [k / 2, ldb] and scales u8 [k / 16, ldb] with ldb = n rounded up to 128 and zeros from n on; the factor is
    the weight's. Whoever asked for the twin frees it. The kernel set must have `spark_nvfp4_transpose`, or
    ModuleNotFoundInSetError is raised.
    """
    chunks_of(k)
    ldb = div_ceil(count("n", n), OUTPUTS) * OUTPUTS
    count("ldb", ldb)
    queue = gpu.default_stream() if stream is None else stream
    kernel = gpu.kernel("spark_nvfp4_transpose", "spark_nvfp4_transpose")
    packed = gpu.alloc(k // 2 * ldb, "nvfp4 weight, transposed")
    try:
        scales = gpu.alloc(k // 16 * ldb, "nvfp4 scales, transposed")
        try:
            spark_nvfp4_transpose(gpu, kernel, weight.weight, packed, n, k // 2, ldb, queue)
            spark_nvfp4_transpose(gpu, kernel, weight.weight_scale, scales, n, k // 16, ldb, queue)
            gpu.synchronize(queue)
        except BaseException:
            gpu.free(scales)
            raise
    except BaseException:
        gpu.free(packed)
        raise
    return Nvfp4Weight(packed, scales, weight.weight_scale_2), ldb
