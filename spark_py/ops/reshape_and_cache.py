# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `reshape_and_cache`: one block a row. The slots are on the device, so a launcher cannot check
them: one beyond the cache is refused by the backends that check memory, and writes other memory on CUDA."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.kv_cache import fp8_scale
from ..runtime.launch import KernelLaunch
from ._args import block_stride, count

BLOCK = 256


def _check_rows(num_kv_heads: int, head_dim: int, key_stride: int, value_stride: int) -> int:
    """Elements of a row, of which the strides are at least one."""
    row = count("num_kv_heads", num_kv_heads) * count("head_dim", head_dim)
    for name, stride in (("key_stride", key_stride), ("value_stride", value_stride)):
        if count(name, stride) < row:
            raise InvalidArgumentError(name, stride, f"at least num_kv_heads * head_dim = {row} is needed")
    return row


def reshape_and_cache(
    gpu: GpuBackend,
    kernel: KernelHandle,
    key: DevicePtr,
    value: DevicePtr,
    k_cache: DevicePtr,
    v_cache: DevicePtr,
    slot_mapping: DevicePtr,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    key_stride: int,
    value_stride: int,
    stream: StreamLike,
) -> None:
    """Copy rows of key and value into slot slot_mapping[t] of the caches; a negative slot skips the row.

    key, value: BF16 rows of num_kv_heads * head_dim elements, key_stride and value_stride elements apart; caches: BF16
    [blocks, block_size, num_kv_heads, head_dim]; slot_mapping: int64 [num_tokens], block * block_size + offset.
    `kernel` is `reshape_and_cache::reshape_and_cache_flash`.
    """
    _check_rows(num_kv_heads, head_dim, key_stride, value_stride)
    (
        KernelLaunch(gpu, kernel)
        .grid((count("num_tokens", num_tokens), 1, 1))
        .block((BLOCK, 1, 1))
        .arg_ptr(key)
        .arg_ptr(value)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(slot_mapping)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(count("block_size", block_size))
        .arg_u32(key_stride)
        .arg_u32(value_stride)
        .launch(stream)
    )


def reshape_and_cache_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    key: DevicePtr,
    value: DevicePtr,
    k_cache: DevicePtr,
    v_cache: DevicePtr,
    slot_mapping: DevicePtr,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    k_scale: float,
    v_scale: float,
    key_stride: int,
    value_stride: int,
    cache_stride: int,
    stream: StreamLike,
) -> None:
    """`reshape_and_cache` into caches of E4M3: x * (1 / k_scale) or x * (1 / v_scale), saturating at +-448.

    k_cache, v_cache: E4M3 bytes, blocks cache_stride elements apart; what lies between blocks is left alone. Scales are
    finite and above 0, as FP32 and as their reciprocals, and whoever reads the cache has to use the same.
    `kernel` is `reshape_and_cache::reshape_and_cache_flash_fp8`.
    """
    row = _check_rows(num_kv_heads, head_dim, key_stride, value_stride)
    (
        KernelLaunch(gpu, kernel)
        .grid((count("num_tokens", num_tokens), 1, 1))
        .block((BLOCK, 1, 1))
        .arg_ptr(key)
        .arg_ptr(value)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(slot_mapping)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(count("block_size", block_size))
        .arg_f32(fp8_scale("k_scale", k_scale))
        .arg_f32(fp8_scale("v_scale", v_scale))
        .arg_u32(key_stride)
        .arg_u32(value_stride)
        .arg_u64(block_stride("cache_stride", cache_stride, block_size * row))
        .launch(stream)
    )
