# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_rms_norm_f32`: `norm.rms_norm` with that module's handle, whose input is FP32, apart from
the output; and both norms of a drafter's inputs in one launch."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, epsilon, weight_ptr
from .norm import MAX_BLOCK, rms_norm

__all__ = ["rms_norm", "rms_norm_both"]


def rms_norm_both(
    gpu: GpuBackend,
    kernel: KernelHandle,
    embed: DevicePtr,
    embed_weight: Weight,
    embed_out: DevicePtr,
    streams: DevicePtr,
    stream_weight: Weight,
    streams_out: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    eps: float,
    stream: StreamLike,
) -> None:
    """`rms_norm_vanilla` of embed BF16 [T, H] and `spark_rms_norm_f32` of streams FP32 [T, hc, H], with their bits:
    embed_out BF16 [T, H], streams_out BF16 [T, hc, H]. `kernel` is `spark_rms_norm_f32::spark_rms_norm_both`."""
    blocks = count("num_tokens", num_tokens) * (count("hc_mult", hc_mult) + 1)
    threads = min(count("hidden_size", hidden_size), MAX_BLOCK)
    launch = KernelLaunch(gpu, kernel).grid((blocks, 1, 1)).block((threads, 1, 1))
    launch.arg_ptr(embed).arg_ptr(weight_ptr(embed_weight)).arg_ptr(embed_out)
    launch.arg_ptr(streams).arg_ptr(weight_ptr(stream_weight)).arg_ptr(streams_out)
    launch.arg_u32(hidden_size).arg_u32(hc_mult).arg_f32(epsilon(eps)).launch(stream)
