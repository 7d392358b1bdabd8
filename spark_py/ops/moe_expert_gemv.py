# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of `moe_expert_gemv::moe_expert_gemv`: one NVFP4 projection of each expert that a router chose."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of
from .moe_shared_expert_fused import HasNvfp4Tables
from .w4a16_gemv import chunks_of, only

OUTPUTS = 4


def moe_expert_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    tables: HasNvfp4Tables,
    output: DevicePtr,
    expert_indices: DevicePtr,
    n: int,
    k: int,
    top_k: int,
    input_stride: int,
    stream: StreamLike,
) -> None:
    """output BF16 [top_k, n]: row i of input through the weights [n, k] of expert expert_indices u32 [i].

    Rows of input BF16 [k] are input_stride elements apart, a multiple of 8 and not less than k; 0: one row for all. k
    is a multiple of 16. An expert with address 0 gives zeros. `kernel` is `moe_expert_gemv::moe_expert_gemv`.
    """
    only(kernel, "moe_expert_gemv::moe_expert_gemv")
    chunks_of(k)
    if isinstance(input_stride, bool) or input_stride != 0:
        multiple_of("input_stride", input_stride, 8, "each row starts on a 16-byte address")
        if input_stride < k:
            raise InvalidArgumentError("input_stride", input_stride, f"0 or at least k = {k} is needed")
    grid = (div_ceil(count("n", n), OUTPUTS), count("top_k", top_k), 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((128, 1, 1)).arg_ptr(input)
    launch.arg_ptr(tables.packed_ptrs).arg_ptr(tables.scale_ptrs).arg_ptr(tables.scale2_vals).arg_ptr(output)
    launch.arg_ptr(expert_indices).arg_u32(n).arg_u32(k).arg_u32(top_k).arg_u32(input_stride).launch(stream)
