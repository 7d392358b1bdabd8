# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_v4_paged_decode`: a block a query head and sequence.

Lengths and block ids are on the device, so a launcher cannot check them; the backends that check memory do.
"""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, finite
from .spark_v4_qkv import check_address, check_head

BLOCK = 256
HEADS = 1
BF16_LOAD = 16
FP8_LOAD = 8
PAIR_BYTES = 4


def _decode(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    pool: DevicePtr,
    pool_load: int,
    output: DevicePtr,
    block_tables: DevicePtr,
    seq_lens: DevicePtr,
    positions: DevicePtr,
    sinks: DevicePtr,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    theta: float,
    sliding_window: int,
    stream: StreamLike,
) -> None:
    check_head(head_dim, rope_dim, theta)
    if sliding_window != 0:
        count("sliding_window", sliding_window)
    for name, ptr, step in (("q", q, BF16_LOAD), ("pool", pool, pool_load), ("output", output, PAIR_BYTES)):
        check_address(name, ptr, step)
    (
        KernelLaunch(gpu, kernel)
        .grid((div_ceil(count("num_heads", num_heads), HEADS), count("num_seqs", num_seqs), 1))
        .block((BLOCK, 1, 1))
        .arg_ptr(q)
        .arg_ptr(pool)
        .arg_ptr(output)
        .arg_ptr(block_tables)
        .arg_ptr(seq_lens)
        .arg_ptr(positions)
        .arg_ptr(sinks)
        .arg_u32(count("max_blocks_per_seq", max_blocks_per_seq))
        .arg_u32(num_heads)
        .arg_u32(head_dim)
        .arg_u32(rope_dim)
        .arg_u32(count("block_size", block_size))
        .arg_f32(finite("inv_sqrt_d", inv_sqrt_d))
        .arg_f32(theta)
        .arg_u32(sliding_window)
        .launch(stream)
    )


def spark_v4_paged_decode(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    pool: DevicePtr,
    output: DevicePtr,
    block_tables: DevicePtr,
    seq_lens: DevicePtr,
    positions: DevicePtr,
    sinks: DevicePtr,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    theta: float,
    sliding_window: int,
    stream: StreamLike,
) -> None:
    """output [num_seqs, num_heads, head_dim] = attention of one query row a sequence, its tail turned back, BF16.

    q: as output, normalised and rotated; pool: BF16 [blocks, block_size, head_dim], keys and values both; block_tables:
    int32 [num_seqs, max_blocks_per_seq]; seq_lens: int32 [num_seqs], the row just written included; positions: u32
    [num_seqs], by which the queries were rotated; sinks: FP32 [num_heads], or NULL. sliding_window: how many of the
    last positions are seen, 0 for all. The last rope_dim elements of an output head are rotated by minus its position,
    base theta. A sequence of length 0 leaves its rows of output as they are. q and pool lie on 16-byte addresses,
    output on a 4-byte address; head_dim is a multiple of 8 up to 512. `kernel` is
    `spark_v4_paged_decode::spark_v4_paged_decode`.
    """
    _decode(
        gpu, kernel, q, pool, BF16_LOAD, output, block_tables, seq_lens, positions, sinks, max_blocks_per_seq, num_seqs,
        num_heads, head_dim, rope_dim, block_size, inv_sqrt_d, theta, sliding_window, stream,
    )  # fmt: skip


def spark_v4_paged_decode_fp8(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    pool: DevicePtr,
    output: DevicePtr,
    block_tables: DevicePtr,
    seq_lens: DevicePtr,
    positions: DevicePtr,
    sinks: DevicePtr,
    max_blocks_per_seq: int,
    num_seqs: int,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    block_size: int,
    inv_sqrt_d: float,
    theta: float,
    sliding_window: int,
    stream: StreamLike,
) -> None:
    """As `spark_v4_paged_decode` over a pool of E4M3 bytes on an 8-byte address, with a scale of 1. `kernel` is
    `spark_v4_paged_decode::spark_v4_paged_decode_fp8`."""
    _decode(
        gpu, kernel, q, pool, FP8_LOAD, output, block_tables, seq_lens, positions, sinks, max_blocks_per_seq, num_seqs,
        num_heads, head_dim, rope_dim, block_size, inv_sqrt_d, theta, sliding_window, stream,
    )  # fmt: skip
