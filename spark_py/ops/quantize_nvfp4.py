# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `quantize_nvfp4`, and `quantize_to_nvfp4`: both launches with the host's step between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, multiple_of, weight_ptr

BLOCK = 256
MOST_BLOCKS = 1024
GROUP = 16


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """An NVFP4 tensor made at run time, with the fields of `QuantizedWeight`; whoever asked for it frees it.

    `weight`: packed E2M1 u8 [N, K / 2], the even k in the low nibble; `weight_scale`: E4M3 u8 [N, K / 16];
    `weight_scale_2`: an FP32 number. w = value * scale * weight_scale_2. There is no input scale.
    """

    weight: DevicePtr
    weight_scale: DevicePtr
    weight_scale_2: float
    input_scale: DevicePtr = DevicePtr.NULL

    def free(self, gpu: GpuBackend) -> None:
        """Free both buffers."""
        gpu.free(self.weight)
        gpu.free(self.weight_scale)


def nvfp4_global_absmax(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    global_max: DevicePtr,
    total: int,
    stream: StreamLike,
) -> None:
    """global_max = max(global_max, max |input|): BF16 [total], FP32 [1] that the caller zeroes first.

    NaN is passed over. `kernel` is `quantize_nvfp4::nvfp4_global_absmax`.
    """
    blocks = min(max(count("total", total) // BLOCK, 1), MOST_BLOCKS)
    launch = KernelLaunch(gpu, kernel).grid((blocks, 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(input).arg_ptr(global_max).arg_u32(total).launch(stream)


def quantize_bf16_to_nvfp4(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    packed: DevicePtr,
    scales: DevicePtr,
    scale2: float,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """packed u8 [n, k / 2] and scales u8 [n, k / 16] of BF16 input [n, k] under the factor scale2. k % 16 == 0.

    `kernel` is `quantize_nvfp4::quantize_bf16_to_nvfp4`.
    """
    multiple_of("k", k, GROUP, "a group of 16 values shares a scale")
    launch = KernelLaunch(gpu, kernel).grid((count("n", n), 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(input).arg_ptr(packed).arg_ptr(scales).arg_f32(scale2).arg_u32(n).arg_u32(k).launch(stream)


def quantize_to_nvfp4(
    gpu: GpuBackend,
    absmax_kernel: KernelHandle,
    quantize_kernel: KernelHandle,
    weight: Weight,
    n: int,
    k: int,
    stream: StreamLike,
) -> Nvfp4Weight:
    """A BF16 weight [n, k] as NVFP4, in new memory; waits until it is done. k % 16 == 0.

    weight_scale_2 = largest magnitude / (6 * 448), in FP32, or 1 for zeros alone. Refused with InvalidArgumentError:
    more than 2**32 - 1 elements, which the kernel cannot count; an infinity; a largest magnitude above 0 whose factor
    has no finite reciprocal. A NaN is passed over by the maximum and becomes +6 steps of its group.
    """
    multiple_of("k", k, GROUP, "a group of 16 values shares a scale")
    total = count("n * k", count("n", n) * k)
    source = weight_ptr(weight)
    scale2 = _scale2(_largest(gpu, absmax_kernel, source, total, stream))
    packed = gpu.alloc(total // 2, "nvfp4 weight")
    try:
        scales = gpu.alloc(total // GROUP, "nvfp4 scales")
        try:
            quantize_bf16_to_nvfp4(gpu, quantize_kernel, source, packed, scales, scale2, n, k, stream)
            gpu.synchronize(stream)
        except BaseException:
            gpu.free(scales)
            raise
    except BaseException:
        gpu.free(packed)
        raise
    return Nvfp4Weight(packed, scales, scale2)


def _largest(gpu: GpuBackend, kernel: KernelHandle, source: DevicePtr, total: int, stream: StreamLike) -> np.float32:
    """The largest magnitude of `total` values; waits for it."""
    result = np.zeros(1, np.float32)
    device = gpu.alloc(result.nbytes, "nvfp4 largest magnitude")
    try:
        gpu.memset_async(device, 0, result.nbytes, stream)
        nvfp4_global_absmax(gpu, kernel, source, device, total, stream)
        gpu.copy_d2h_on_stream(device, result, stream)
    finally:
        gpu.free(device)
    return np.float32(result[0])


def _scale2(largest: np.float32) -> float:
    if largest == 0:
        return 1.0
    scale2 = largest / np.float32(6 * 448)
    with np.errstate(all="ignore"):
        usable = np.isfinite(scale2) and np.isfinite(np.float32(1) / scale2)
    if not usable:
        raise InvalidArgumentError(
            "largest magnitude of weight", float(largest), "finite, and large enough for 2688 / it to be finite in FP32"
        )
    return float(scale2)
