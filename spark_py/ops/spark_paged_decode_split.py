# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_paged_decode_split`: attention split along the sequence, then merged. Lengths and block
ids are on the device, so a launcher cannot check them; the backends that check memory do."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import block_stride, count, finite, multiple_of
from .paged_decode import check_heads

MOST_SPLITS = 64
HEAD_STEP, MAX_HEAD_DIM = 64, 256
_HEADS, _LOAD, _F32 = 8, 8, 4


def takes_head(head_dim: int) -> bool:
    """Whether the kernels have heads of `head_dim` elements: 64, 128, 192 and 256."""
    return 0 < head_dim <= MAX_HEAD_DIM and head_dim % HEAD_STEP == 0


def partial_bytes(num_seqs: int, num_q_heads: int, head_dim: int) -> int:
    """Bytes of `partial`: FP32 [num_seqs, num_q_heads, 64, head_dim]."""
    return num_seqs * num_q_heads * MOST_SPLITS * head_dim * _F32


def sums_bytes(num_seqs: int, num_q_heads: int) -> int:
    """Bytes of `sums`: FP32 [num_seqs, num_q_heads, 64, 2]."""
    return num_seqs * num_q_heads * MOST_SPLITS * 2 * _F32


def _check_head(head_dim: int) -> None:
    if not takes_head(count("head_dim", head_dim)):
        raise InvalidArgumentError("head_dim", head_dim, f"a multiple of {HEAD_STEP} up to {MAX_HEAD_DIM} is needed")


def spark_paged_decode_split(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    k_cache: DevicePtr,
    v_cache: DevicePtr,
    partial: DevicePtr,
    sums: DevicePtr,
    block_tables: DevicePtr,
    seq_lens: DevicePtr,
    table_stride: int,
    lens_stride: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    scale: float,
    q_stride: int,
    cache_stride: int,
    sliding_window: int,
    stream: StreamLike,
    *,
    fp8: bool = False,
) -> None:
    """The splits of every sequence: partial FP32 [num_seqs, num_q_heads, 64, head_dim], sums FP32 [num_seqs,
    num_q_heads, 64, 2], of which a sequence fills as much as it has splits.

    q: BF16, rows q_stride elements apart, on 16-byte addresses; caches: BF16, or with `fp8` E4M3 bytes, [blocks,
    block_size, num_kv_heads, head_dim], blocks cache_stride elements apart, on 16-byte (FP8: 8-byte) addresses; strides
    are multiples of 8. Of sequence s the length lies at seq_lens + s * lens_stride, the table at block_tables + s *
    table_stride, int32. scale: of a score, for FP8 with the scale of K in it. sliding_window: how many of the last
    positions are seen, 0 for all. `kernel` is `spark_paged_decode_split::spark_paged_decode_split`, or `..._fp8`.
    """
    _check_head(head_dim)
    check_heads(num_q_heads, num_kv_heads, head_dim, multiple_of("q_stride", q_stride, _LOAD, "rows are read so"))
    dense = count("block_size", block_size) * num_kv_heads * head_dim
    if block_stride("cache_stride", cache_stride, dense) % _LOAD:
        raise InvalidArgumentError("cache_stride", cache_stride, f"a multiple of {_LOAD} is needed: rows are read so")
    if sliding_window != 0:
        count("sliding_window", sliding_window)
    wide = _LOAD if fp8 else 2 * _LOAD
    for name, ptr, bytes_ in (("q", q, 2 * _LOAD), ("k_cache", k_cache, wide), ("v_cache", v_cache, wide)):
        if ptr.address % bytes_:
            raise InvalidArgumentError(
                name, ptr, f"a {bytes_}-byte address is needed: rows are read {bytes_} at a time"
            )
    parts = div_ceil(num_q_heads // num_kv_heads, _HEADS)
    (
        KernelLaunch(gpu, kernel)
        .grid((num_kv_heads * parts, MOST_SPLITS, count("num_seqs", num_seqs)))
        .block((128, 1, 1))
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(partial)
        .arg_ptr(sums)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(count("table_stride", table_stride))
        .arg_u32(count("lens_stride", lens_stride))
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(finite("scale", scale))
        .arg_u32(q_stride)
        .arg_u64(cache_stride)
        .arg_u32(sliding_window)
        .launch(stream)
    )


def spark_paged_decode_merge(
    gpu: GpuBackend,
    kernel: KernelHandle,
    partial: DevicePtr,
    sums: DevicePtr,
    output: DevicePtr,
    gate: DevicePtr,
    seq_lens: DevicePtr,
    lens_stride: int,
    num_seqs: int,
    num_q_heads: int,
    head_dim: int,
    output_scale: float,
    gate_stride: int,
    sliding_window: int,
    stream: StreamLike,
) -> None:
    """output BF16 [num_seqs, num_q_heads, head_dim] = output_scale * attention, from what `spark_paged_decode_split`
    left; with a gate that is not NULL, BF16 rows gate_stride elements apart, the rounded result times sigmoid(gate).

    A sequence of length 0 leaves its rows of output as they are. `kernel` is
    `spark_paged_decode_split::spark_paged_decode_merge`.
    """
    _check_head(head_dim)
    if not gate.is_null and count("gate_stride", gate_stride) < count("num_q_heads", num_q_heads) * head_dim:
        raise InvalidArgumentError("gate_stride", gate_stride, f"at least {num_q_heads * head_dim} is needed")
    (
        KernelLaunch(gpu, kernel)
        .grid((count("num_q_heads", num_q_heads), count("num_seqs", num_seqs), head_dim // HEAD_STEP))
        .block((256, 1, 1))
        .arg_ptr(partial)
        .arg_ptr(sums)
        .arg_ptr(output)
        .arg_ptr(gate)
        .arg_ptr(seq_lens)
        .arg_u32(count("lens_stride", lens_stride))
        .arg_u32(num_q_heads)
        .arg_u32(head_dim)
        .arg_f32(finite("output_scale", output_scale))
        .arg_u32(gate_stride)
        .arg_u32(sliding_window)
        .launch(stream)
    )
