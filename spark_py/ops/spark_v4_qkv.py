# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_v4_qkv`: DeepSeek-V4's queries and cache rows, normalised and rotated in one pass.

The one rounding is at the store. Slots are on the device, so a launcher cannot check them; the backends that check
memory do.
"""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, epsilon, weight_ptr
from .spark_v4_rope import check_rotation

QUERY_BLOCK = 256
QUERY_HEADS = 8
ROW_BLOCK = 32
WIDTH = 8
MAX_HEAD_DIM = 512
LOAD = 16


def check_head(head_dim: int, rope_dim: int, theta: float) -> None:
    """InvalidArgumentError for a head that a warp does not hold, or a rotation that cannot be."""
    if count("head_dim", head_dim) % WIDTH or head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError("head_dim", head_dim, f"a multiple of {WIDTH} up to {MAX_HEAD_DIM} is needed")
    check_rotation(head_dim, rope_dim, theta)


def check_address(name: str, ptr: DevicePtr, step: int) -> None:
    """InvalidArgumentError unless rows that start there can be read or written `step` bytes at a time."""
    if ptr.address % step:
        raise InvalidArgumentError(name, ptr, f"a {step}-byte address is needed: rows move {step} bytes at a time")


def spark_v4_q_norm_rope(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    positions: DevicePtr,
    rows: int,
    heads: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    """Normalise each head of q BF16 [rows, heads, head_dim] without a weight and rotate its tail, in place.

    positions: u32 [rows] on the device. head_dim is a multiple of 8 up to 512, rope_dim even; q lies on a 16-byte
    address. `kernel` is `spark_v4_qkv::spark_v4_q_norm_rope`.
    """
    check_head(head_dim, rope_dim, theta)
    check_address("q", q, LOAD)
    (
        KernelLaunch(gpu, kernel)
        .grid((count("rows", rows), div_ceil(count("heads", heads), QUERY_HEADS), 1))
        .block((QUERY_BLOCK, 1, 1))
        .arg_ptr(q)
        .arg_ptr(positions)
        .arg_u32(heads)
        .arg_u32(head_dim)
        .arg_u32(rope_dim)
        .arg_f32(epsilon(eps))
        .arg_f32(theta)
        .launch(stream)
    )


def _assemble(
    gpu: GpuBackend,
    kernel: KernelHandle,
    kv: DevicePtr,
    norm_weight: Weight,
    positions: DevicePtr,
    pool: DevicePtr,
    pool_step: int,
    slot_mapping: DevicePtr,
    rows: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    check_head(head_dim, rope_dim, theta)
    weight = weight_ptr(norm_weight)
    for name, ptr, step in (("kv", kv, LOAD), ("norm_weight", weight, LOAD), ("pool", pool, pool_step)):
        check_address(name, ptr, step)
    (
        KernelLaunch(gpu, kernel)
        .grid((count("rows", rows), 1, 1))
        .block((ROW_BLOCK, 1, 1))
        .arg_ptr(kv)
        .arg_ptr(weight)
        .arg_ptr(positions)
        .arg_ptr(pool)
        .arg_ptr(slot_mapping)
        .arg_u32(head_dim)
        .arg_u32(rope_dim)
        .arg_f32(epsilon(eps))
        .arg_f32(theta)
        .launch(stream)
    )


def spark_v4_kv_assemble(
    gpu: GpuBackend,
    kernel: KernelHandle,
    kv: DevicePtr,
    norm_weight: Weight,
    positions: DevicePtr,
    pool: DevicePtr,
    slot_mapping: DevicePtr,
    rows: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    """Row t of kv, normalised (weight as it is) and its tail rotated, goes to slot slot_mapping[t] of the pool.

    kv: BF16 [rows, head_dim]; norm_weight: BF16 [head_dim]; positions: u32 [rows]; pool: BF16
    [blocks, block_size, head_dim], keys and values both; slot_mapping: int64 [rows], a negative one skips the row. All
    on 16-byte addresses; head_dim is a multiple of 8 up to 512. `kernel` is `spark_v4_qkv::spark_v4_kv_assemble`.
    """
    _assemble(
        gpu, kernel, kv, norm_weight, positions, pool, LOAD, slot_mapping, rows, head_dim, rope_dim, eps, theta, stream
    )


def spark_v4_kv_assemble_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    kv: DevicePtr,
    norm_weight: Weight,
    positions: DevicePtr,
    pool: DevicePtr,
    slot_mapping: DevicePtr,
    rows: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    """As `spark_v4_kv_assemble` into a pool of E4M3 bytes on an 8-byte address, with a scale of 1 and saturating.
    `kernel` is `spark_v4_qkv::spark_v4_kv_assemble_fp8`."""
    _assemble(
        gpu, kernel, kv, norm_weight, positions, pool, WIDTH, slot_mapping, rows, head_dim, rope_dim, eps, theta, stream
    )


def spark_v4_q_and_kv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    kv: DevicePtr,
    norm_weight: Weight,
    positions: DevicePtr,
    pool: DevicePtr,
    slot_mapping: DevicePtr,
    rows: int,
    heads: int,
    head_dim: int,
    rope_dim: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    """`spark_v4_q_norm_rope` of q and `spark_v4_kv_assemble` of kv in one launch, with their bits. `kernel` is
    `spark_v4_qkv::spark_v4_q_and_kv`, or with `_fp8` for a pool of E4M3 bytes as `spark_v4_kv_assemble_fp8` has it."""
    check_head(head_dim, rope_dim, theta)
    weight = weight_ptr(norm_weight)
    pool_step = WIDTH if kernel.name.endswith("_fp8") else LOAD
    for name, ptr, step in (("q", q, LOAD), ("kv", kv, LOAD), ("norm_weight", weight, LOAD), ("pool", pool, pool_step)):
        check_address(name, ptr, step)
    grid = (count("rows", rows), div_ceil(count("heads", heads), QUERY_HEADS) + 1, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((QUERY_BLOCK, 1, 1)).arg_ptr(q).arg_ptr(kv).arg_ptr(weight)
    launch.arg_ptr(positions).arg_ptr(pool).arg_ptr(slot_mapping).arg_u32(heads).arg_u32(head_dim).arg_u32(rope_dim)
    launch.arg_f32(epsilon(eps)).arg_f32(theta).launch(stream)
