# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `paged_decode`: one block a query head and sequence. Lengths and block ids are on the device, so a
launcher cannot check them; the backends that check memory do."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import count

BLOCK = 256
HEAD_STEP = 32
MAX_HEAD_DIM = 512


def check_heads(num_q_heads: int, num_kv_heads: int, head_dim: int, q_stride: int) -> None:
    """InvalidArgumentError for heads or rows of queries that the kernels do not take."""
    if count("head_dim", head_dim) % HEAD_STEP or head_dim > MAX_HEAD_DIM:
        raise InvalidArgumentError("head_dim", head_dim, f"a multiple of {HEAD_STEP} up to {MAX_HEAD_DIM} is needed")
    if count("num_q_heads", num_q_heads) % count("num_kv_heads", num_kv_heads):
        raise InvalidArgumentError("num_q_heads", num_q_heads, f"a multiple of num_kv_heads = {num_kv_heads} is needed")
    if count("q_stride", q_stride) < num_q_heads * head_dim:
        limit = f"at least num_q_heads * head_dim = {num_q_heads * head_dim} is needed"
        raise InvalidArgumentError("q_stride", q_stride, limit)


def paged_decode_attn(
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
    q_stride: int,
    sliding_window: int,
    stream: StreamLike,
) -> None:
    """output [num_seqs, num_q_heads, head_dim] = attention of one query row a sequence, BF16.

    q: rows q_stride elements apart; caches: BF16 [blocks, block_size, num_kv_heads, head_dim] on 16-byte addresses;
    block_tables: int32 [num_seqs, max_blocks_per_seq]; seq_lens: int32 [num_seqs], the row just written included.
    sliding_window: how many of the last positions are seen, 0 for all. A sequence of length 0 leaves its rows of output
    as they are. `kernel` is `paged_decode::paged_decode_attn`; head_dim is a multiple of 32, 512 at most.
    """
    check_heads(num_q_heads, num_kv_heads, head_dim, q_stride)
    if sliding_window != 0:
        count("sliding_window", sliding_window)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.address % 16:
            raise InvalidArgumentError(name, cache, "a 16-byte address is needed: rows are read 16 bytes at a time")
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
        .arg_u32(count("block_size", block_size))
        .arg_f32(inv_sqrt_d)
        .arg_u32(q_stride)
        .arg_u32(sliding_window)
        .launch(stream)
    )
