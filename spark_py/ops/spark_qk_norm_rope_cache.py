# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_qk_norm_rope_cache`: norms, rotation and cache write of new rows, with the bits of the
single kernels one after the other. Slots are on the device, as in `reshape_and_cache`."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.kv_cache import fp8_scale
from ..runtime.launch import KernelLaunch
from ._args import Weight, block_stride, count, epsilon, weight_ptr

LARGEST_HEAD = 256


def spark_qk_norm_rope_cache(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    k: DevicePtr,
    v: DevicePtr,
    q_weight: Weight | None,
    k_weight: Weight | None,
    k_cache: DevicePtr,
    v_cache: DevicePtr,
    positions: DevicePtr,
    slots: DevicePtr,
    position_stride: int,
    slot_stride: int,
    rows: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    q_stride: int,
    cache_stride: int,
    one_plus: bool,
    eps: float,
    theta: float,
    stream: StreamLike,
    *,
    fp8_scales: tuple[float, float] | None = None,
) -> None:
    """q BF16 [rows, num_q_heads, head_dim], rows q_stride elements apart, and k BF16 [rows, num_kv_heads,
    head_dim]: normed head by head and rotated, in place; then k and v, of k's shape, go to their slots, blocks
    cache_stride elements apart.

    A weight that is None means no norm; `one_plus`: weights are used as 1 + w. positions u32 and slots i64 lie their
    strides apart, in elements. With `fp8_scales`, of K and V, caches are E4M3 and `kernel` is
    `spark_qk_norm_rope_cache::spark_qk_norm_rope_cache_fp8`, else `...::spark_qk_norm_rope_cache`.
    """
    if count("head_dim", head_dim) > LARGEST_HEAD:
        raise InvalidArgumentError("head_dim", head_dim, f"{LARGEST_HEAD} at most")
    if count("rotary_dim", rotary_dim) % 2 or rotary_dim > head_dim:
        raise InvalidArgumentError("rotary_dim", rotary_dim, f"an even number up to head_dim = {head_dim} is needed")
    if not 0.0 < theta < float("inf"):
        raise InvalidArgumentError("theta", theta, "a finite number above 0 is needed")
    if count("q_stride", q_stride) < count("num_q_heads", num_q_heads) * head_dim:
        raise InvalidArgumentError("q_stride", q_stride, f"at least {num_q_heads * head_dim} is needed")
    dense = count("block_size", block_size) * count("num_kv_heads", num_kv_heads) * head_dim
    launch = (
        KernelLaunch(gpu, kernel)
        .grid((num_q_heads + 2 * num_kv_heads, count("rows", rows), 1))
        .block((head_dim, 1, 1))
        .arg_ptr(q)
        .arg_ptr(k)
        .arg_ptr(v)
        .arg_ptr(DevicePtr.NULL if q_weight is None else weight_ptr(q_weight))
        .arg_ptr(DevicePtr.NULL if k_weight is None else weight_ptr(k_weight))
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(positions)
        .arg_ptr(slots)
        .arg_u32(count("position_stride", position_stride))
        .arg_u32(count("slot_stride", slot_stride))
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(rotary_dim)
        .arg_u32(block_size)
        .arg_u32(q_stride)
        .arg_u64(block_stride("cache_stride", cache_stride, dense))
        .arg_u32(int(one_plus))
        .arg_f32(epsilon(eps))
        .arg_f32(theta)
    )
    if fp8_scales is not None:
        launch.arg_f32(fp8_scale("k_scale", fp8_scales[0])).arg_f32(fp8_scale("v_scale", fp8_scales[1]))
    launch.launch(stream)
