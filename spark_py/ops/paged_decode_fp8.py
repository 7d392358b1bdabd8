# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `paged_decode_fp8`: one block a query head and sequence, over a cache of E4M3. Lengths and block
ids are on the device, so a launcher cannot check them; the backends that check memory do."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.kv_cache import fp8_scale
from ..runtime.launch import KernelLaunch
from ._args import block_stride, count
from .paged_decode import BLOCK, check_heads

LOAD = 8


def paged_decode_attn_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    k_cache: DevicePtr,
    v_cache: DevicePtr,
    output: DevicePtr,
    block_tables: DevicePtr,
    seq_lens: DevicePtr,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    k_scale: float,
    v_scale: float,
    q_stride: int,
    cache_stride: int,
    stream: StreamLike,
) -> None:
    """output [num_seqs, num_q_heads, head_dim] = attention of one query row a sequence, BF16, over a cache of E4M3.

    q: rows q_stride elements apart; caches: E4M3 bytes [blocks, block_size, num_kv_heads, head_dim] on 8-byte
    addresses, blocks cache_stride elements apart (a multiple of 8); block_tables: int32
    [num_seqs, max_blocks_per_seq]; seq_lens: int32 [num_seqs], the row just written included. Scales are those that the
    cache was written with, finite and above 0, as FP32 and as their reciprocals. A sequence of length 0 leaves its rows
    of output as they are. There is no window. `kernel` is `paged_decode_fp8::paged_decode_attn_fp8`; head_dim is a
    multiple of 32, 512 at most.
    """
    check_heads(num_q_heads, num_kv_heads, head_dim, q_stride)
    dense = count("block_size", block_size) * num_kv_heads * head_dim
    if block_stride("cache_stride", cache_stride, dense) % LOAD:
        raise InvalidArgumentError("cache_stride", cache_stride, f"a multiple of {LOAD} is needed: rows are read so")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.address % LOAD:
            limit = f"an {LOAD}-byte address is needed: rows are read {LOAD} bytes at a time"
            raise InvalidArgumentError(name, cache, limit)
    (
        KernelLaunch(gpu, kernel)
        .grid((num_q_heads, count("num_seqs", num_seqs), 1))
        .block((BLOCK, 1, 1))
        .arg_ptr(q)
        .arg_ptr(k_cache)
        .arg_ptr(v_cache)
        .arg_ptr(output)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_u32(count("max_blocks_per_seq", max_blocks_per_seq))
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(block_size)
        .arg_f32(inv_sqrt_d)
        .arg_f32(fp8_scale("k_scale", k_scale))
        .arg_f32(fp8_scale("v_scale", v_scale))
        .arg_u32(q_stride)
        .arg_u64(cache_stride)
        .launch(stream)
    )
