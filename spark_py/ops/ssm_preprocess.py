# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `ssm_preprocess`: one block a row, which waits in shared memory."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import count, dynamic_shared

BLOCK = 256


def deinterleave_qg(
    gpu: GpuBackend,
    kernel: KernelHandle,
    data: DevicePtr,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    stride: int,
    stream: StreamLike,
) -> None:
    """[Q0 G0 Q1 G1 ...] to [Q0 Q1 ... | G0 G1 ...] in each of num_tokens rows of data, in place, BF16.

    Rows hold 2 * num_heads * head_dim elements and are `stride` elements apart. Where a row is larger than the shared
    memory that a launch gets by itself, the kernel's limit is raised, which Rust leaves to the caller; GeometryError
    says so where the device has less. `kernel` is `ssm_preprocess::deinterleave_qg`.
    """
    row = 2 * count("num_heads", num_heads) * count("head_dim", head_dim)
    if count("stride", stride) < row:
        raise InvalidArgumentError("stride", stride, f"at least 2 * num_heads * head_dim = {row} is needed")
    launch = KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block((BLOCK, 1, 1))
    launch.shared_mem(dynamic_shared(gpu, kernel, 2 * row)).arg_ptr(data)
    launch.arg_u32(num_heads).arg_u32(head_dim).arg_u32(stride).launch(stream)
