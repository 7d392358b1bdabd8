# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_v4_rope`: a block of 256 threads a row and eight heads."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count

BLOCK = 256
HEADS = 8
MAX_ROPE_DIM = 512


def check_rotation(head_dim: int, rope_dim: int, theta: float) -> None:
    """InvalidArgumentError unless heads of head_dim can have the last rope_dim elements rotated by base theta."""
    if count("head_dim", head_dim) % 2:
        raise InvalidArgumentError("head_dim", head_dim, "an even number is needed")
    if count("rope_dim", rope_dim) % 2 or rope_dim > min(head_dim, MAX_ROPE_DIM):
        limit = f"an even number up to head_dim = {head_dim} and {MAX_ROPE_DIM} is needed"
        raise InvalidArgumentError("rope_dim", rope_dim, limit)
    if not 0.0 < theta < float("inf"):
        raise InvalidArgumentError("theta", theta, "a finite number above 0 is needed")


def spark_v4_rope(
    gpu: GpuBackend,
    kernel: KernelHandle,
    x: DevicePtr,
    positions: DevicePtr,
    rows: int,
    heads: int,
    head_dim: int,
    rope_dim: int,
    theta: float,
    stream: StreamLike,
    inverse: bool = False,
) -> None:
    """Rotate neighbours of the last rope_dim elements of each head of x BF16 [rows, heads, head_dim], in place.

    positions: u32 [rows] on the device. `inverse` turns back. head_dim and rope_dim are even, rope_dim is at most 512,
    x lies on a 4-byte address. `kernel` is `spark_v4_rope::spark_v4_rope`.
    """
    check_rotation(head_dim, rope_dim, theta)
    if x.address % 4:
        raise InvalidArgumentError("x", x, "a 4-byte address is needed: pairs are read as one word")
    (
        KernelLaunch(gpu, kernel)
        .grid((count("rows", rows), div_ceil(count("heads", heads), HEADS), 1))
        .block((BLOCK, 1, 1))
        .arg_ptr(x)
        .arg_ptr(positions)
        .arg_u32(heads)
        .arg_u32(head_dim)
        .arg_u32(rope_dim)
        .arg_f32(theta)
        .arg_u32(int(inverse))
        .launch(stream)
    )
