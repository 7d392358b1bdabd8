# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `embed_from_argmax`. The ids are on the device, so a launcher cannot check them: an id beyond the
table is refused by the backends that check memory, and reads other memory on CUDA."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, weight_ptr

BLOCK = 256


def embed_from_argmax(
    gpu: GpuBackend,
    kernel: KernelHandle,
    argmax_result: DevicePtr,
    embed_table: Weight,
    output: DevicePtr,
    token_id_out: DevicePtr,
    hidden_size: int,
    stream: StreamLike,
) -> None:
    """output BF16 [hidden_size] = row argmax_result[0] of embed_table BF16 [V, hidden_size]; the id goes to
    token_id_out u32 [1] as well."""
    grid = (div_ceil(count("hidden_size", hidden_size), BLOCK), 1, 1)
    (
        KernelLaunch(gpu, kernel)
        .grid(grid)
        .block((BLOCK, 1, 1))
        .arg_ptr(argmax_result)
        .arg_ptr(weight_ptr(embed_table))
        .arg_ptr(output)
        .arg_ptr(token_id_out)
        .arg_u32(hidden_size)
        .launch(stream)
    )


def batched_embed(
    gpu: GpuBackend,
    kernel: KernelHandle,
    token_ids: DevicePtr,
    embed_table: Weight,
    output: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    stream: StreamLike,
) -> None:
    """output BF16 [num_tokens, hidden_size] = embed_table[token_ids]: u32 [num_tokens], BF16 [V, hidden_size]."""
    launch = KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block((BLOCK, 1, 1))
    launch.arg_ptr(token_ids).arg_ptr(weight_ptr(embed_table)).arg_ptr(output)
    launch.arg_u32(count("hidden_size", hidden_size)).launch(stream)
