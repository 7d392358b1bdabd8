# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `spark_propose_inputs`: a graph fetches what the host left for it in page-locked memory."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, multiple_of, weight_ptr

__all__ = ["PIECE", "Given", "spark_propose_inputs"]

PIECE = 16
"""Bytes of a piece of the slab."""
_BLOCK, _PARTS = 256, 3


@dataclass(frozen=True, slots=True)
class Given:
    """Where the host left what a propose of n rows is given, under device addresses: `slab` u8 [16 * used], on a
    16-byte address, `used` u32 [1], `sources` u64 [n], addresses of hidden rows, and `tokens` u32 [n]."""

    slab: DevicePtr
    used: DevicePtr
    sources: DevicePtr
    tokens: DevicePtr


def spark_propose_inputs(
    gpu: GpuBackend,
    kernel: KernelHandle,
    given: Given,
    embed_table: Weight,
    slab: DevicePtr,
    hidden: DevicePtr,
    embed: DevicePtr,
    rows: int,
    row_bytes: int,
    hidden_size: int,
    stream: StreamLike,
) -> None:
    """slab = given.slab; hidden u8 [rows, row_bytes] = the rows behind given.sources, which the launch cannot check;
    embed BF16 [rows, hidden_size] = the rows given.tokens of embed_table BF16 [V, hidden_size].

    `kernel` is `spark_propose_inputs::spark_propose_inputs`; row_bytes is even. Addresses and tokens are read when the
    launch runs: of page-locked memory what the host wrote there last.
    """
    multiple_of("row_bytes", row_bytes, 2, "rows are copied by elements of 2 bytes at least")
    widest = max(row_bytes, 2 * count("hidden_size", hidden_size))
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(widest, _BLOCK * PIECE), count("rows", rows), _PARTS))
    launch.block((_BLOCK, 1, 1)).arg_ptr(given.slab).arg_ptr(given.used).arg_ptr(given.sources).arg_ptr(given.tokens)
    launch.arg_ptr(weight_ptr(embed_table)).arg_ptr(slab).arg_ptr(hidden).arg_ptr(embed)
    launch.arg_u32(row_bytes).arg_u32(hidden_size).launch(stream)
