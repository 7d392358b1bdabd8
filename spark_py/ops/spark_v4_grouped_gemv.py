# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_v4_grouped_gemv`: four outputs of up to eight rows a block."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import U32_MAX, Weight, count, multiple_of, weight_ptr

OUTPUTS = 4
ROWS = 8


def spark_v4_grouped_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: Weight,
    output: DevicePtr,
    m: int,
    groups: int,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [m, groups, n] = input [m, groups, k] . weight [groups, n, k] transposed, group by group, BF16.

    `kernel` is `spark_v4_grouped_gemv::spark_v4_grouped_gemv`; a group of a row has the bits that `gemv.dense_gemv`
    gives it. k is a multiple of 8, groups * n below 2**32, input and weight lie on 16-byte addresses. For DeepSeek-V4's
    wo_a: groups = o_groups, n = o_lora_rank, k = heads / o_groups * head_dim.
    """
    multiple_of("k", k, 8, "each row starts on a 16-byte address")
    outputs = count("groups", groups) * count("n", n)
    if outputs > U32_MAX:
        raise InvalidArgumentError("n", n, f"{groups} groups of it are more than {U32_MAX} outputs")
    grid = div_ceil(outputs, OUTPUTS), div_ceil(count("m", m), ROWS), 1
    launch = KernelLaunch(gpu, kernel).grid(grid).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight_ptr(weight)).arg_ptr(output)
    launch.arg_u32(m).arg_u32(groups).arg_u32(n).arg_u32(k).launch(stream)
