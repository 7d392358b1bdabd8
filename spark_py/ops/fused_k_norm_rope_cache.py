# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `fused_k_norm_rope_cache`: head norm, rotation and cache write of new keys in one pass.

The one rounding is at the store, so results are closer to the formula than those of `rms_norm`, `rope` and
`reshape_and_cache` one after the other, and not bit-equal to them. Slots are on the device, as in `reshape_and_cache`.
"""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.kv_cache import fp8_scale
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, epsilon, weight_ptr

LARGEST_HEAD = 256


def _start(
    gpu: GpuBackend,
    kernel: KernelHandle,
    k: DevicePtr,
    norm_weight: Weight,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
) -> KernelLaunch:
    """The geometry, and the arguments that all kernels begin with."""
    if count("head_dim", head_dim) > LARGEST_HEAD:
        raise InvalidArgumentError("head_dim", head_dim, f"{LARGEST_HEAD} at most")
    grid = count("num_tokens", num_tokens), count("num_kv_heads", num_kv_heads), 1
    launch = KernelLaunch(gpu, kernel).grid(grid).block((head_dim, 1, 1))
    return launch.arg_ptr(k).arg_ptr(weight_ptr(norm_weight))


def _end(
    launch: KernelLaunch,
    cache: DevicePtr,
    slot_mapping: DevicePtr,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    eps: float,
    theta: float,
) -> KernelLaunch:
    """The arguments from the cache on."""
    if count("rotary_dim", rotary_dim) % 2 or rotary_dim > head_dim:
        raise InvalidArgumentError("rotary_dim", rotary_dim, f"an even number up to head_dim = {head_dim} is needed")
    if not 0.0 < theta < float("inf"):
        raise InvalidArgumentError("theta", theta, "a finite number above 0 is needed")
    launch.arg_ptr(cache).arg_ptr(slot_mapping).arg_u32(num_kv_heads).arg_u32(head_dim).arg_u32(rotary_dim)
    return launch.arg_u32(count("block_size", block_size)).arg_f32(epsilon(eps)).arg_f32(theta)


def fused_k_norm_rope_cache_write(
    gpu: GpuBackend,
    kernel: KernelHandle,
    k: DevicePtr,
    norm_weight: Weight,
    positions: DevicePtr,
    k_cache: DevicePtr,
    slot_mapping: DevicePtr,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    """Row t of k, its heads normalised (weight 1 + w) and rotated, goes to slot slot_mapping[t] of k_cache.

    k: BF16 [num_tokens, num_kv_heads, head_dim], head_dim at most 256; norm_weight: BF16 [head_dim]; positions: u32
    [num_tokens]; k_cache: BF16 [blocks, block_size, num_kv_heads, head_dim]; slot_mapping: int64 [num_tokens], a
    negative one skips the row. Any even rotary_dim up to head_dim. `kernel` is
    `fused_k_norm_rope_cache::fused_k_norm_rope_cache_write_bf16`.
    """
    launch = _start(gpu, kernel, k, norm_weight, num_tokens, num_kv_heads, head_dim).arg_ptr(positions)
    _end(launch, k_cache, slot_mapping, num_kv_heads, head_dim, rotary_dim, block_size, eps, theta).launch(stream)


def fused_k_norm_rope_mrope_cache_write(
    gpu: GpuBackend,
    kernel: KernelHandle,
    k: DevicePtr,
    norm_weight: Weight,
    pos_t: DevicePtr,
    pos_h: DevicePtr,
    pos_w: DevicePtr,
    k_cache: DevicePtr,
    slot_mapping: DevicePtr,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    eps: float,
    theta: float,
    stream: StreamLike,
) -> None:
    """The same with three positions a token (time, height, width), u32 [num_tokens] each: pair i is turned by the one
    of number i % 3. `kernel` is `fused_k_norm_rope_cache::fused_k_norm_rope_mrope_cache_write_bf16`."""
    launch = _start(gpu, kernel, k, norm_weight, num_tokens, num_kv_heads, head_dim)
    launch.arg_ptr(pos_t).arg_ptr(pos_h).arg_ptr(pos_w)
    _end(launch, k_cache, slot_mapping, num_kv_heads, head_dim, rotary_dim, block_size, eps, theta).launch(stream)


def fused_k_norm_rope_cache_write_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    k: DevicePtr,
    norm_weight: Weight,
    positions: DevicePtr,
    k_cache: DevicePtr,
    slot_mapping: DevicePtr,
    num_tokens: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    eps: float,
    theta: float,
    inv_scale: float,
    stream: StreamLike,
) -> None:
    """As `fused_k_norm_rope_cache_write` into a cache of E4M3 bytes: E4M3(y * inv_scale), saturating; inv_scale is
    1 / scale of the cache. `kernel` is `fused_k_norm_rope_cache::fused_k_norm_rope_cache_write_fp8`."""
    factor = fp8_scale("inv_scale", inv_scale)
    launch = _start(gpu, kernel, k, norm_weight, num_tokens, num_kv_heads, head_dim).arg_ptr(positions)
    _end(launch, k_cache, slot_mapping, num_kv_heads, head_dim, rotary_dim, block_size, eps, theta)
    launch.arg_f32(factor).launch(stream)
