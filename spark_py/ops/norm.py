# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `norm` (and of `rms_norm_vanilla`, whose kernel has the same parameters)."""

from __future__ import annotations

from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, epsilon, weight_ptr

MAX_BLOCK = 1024


def _rows(gpu: GpuBackend, kernel: KernelHandle, num_tokens: int, hidden_size: int) -> KernelLaunch:
    threads = min(count("hidden_size", hidden_size), MAX_BLOCK)
    return KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block((threads, 1, 1))


def rms_norm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the kernel's parameter name
    weight: Weight,
    output: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    eps: float,
    stream: StreamLike,
) -> None:
    """output = RMS norm of input, BF16 [num_tokens, hidden_size]; weight BF16 [hidden_size]. output may be input.

    `kernel` is `norm::rms_norm` (weight used as 1 + w) or `rms_norm_vanilla::rms_norm_vanilla` (plain w).
    """
    (
        _rows(gpu, kernel, num_tokens, hidden_size)
        .arg_ptr(input)
        .arg_ptr(weight_ptr(weight))
        .arg_ptr(output)
        .arg_u32(hidden_size)
        .arg_f32(epsilon(eps))
        .launch(stream)
    )


def rms_norm_residual(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the kernel's parameter name
    weight: Weight,
    output: DevicePtr,
    residual: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    eps: float,
    stream: StreamLike,
) -> None:
    """As `rms_norm` with weight 1 + w; residual receives a bit copy of input. All BF16 [num_tokens, hidden_size]."""
    (
        _rows(gpu, kernel, num_tokens, hidden_size)
        .arg_ptr(input)
        .arg_ptr(weight_ptr(weight))
        .arg_ptr(output)
        .arg_ptr(residual)
        .arg_u32(hidden_size)
        .arg_f32(epsilon(eps))
        .launch(stream)
    )


def residual_add_rms_norm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    hidden: DevicePtr,
    src: DevicePtr,
    weight: Weight,
    output: DevicePtr,
    residual: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    eps: float,
    stream: StreamLike,
) -> None:
    """hidden += src; residual = hidden; output = RMS norm of hidden. All BF16 [num_tokens, hidden_size].

    The mean square is that of the sums before rounding to BF16. src may be output.
    """
    (
        _rows(gpu, kernel, num_tokens, hidden_size)
        .arg_ptr(hidden)
        .arg_ptr(src)
        .arg_ptr(weight_ptr(weight))
        .arg_ptr(output)
        .arg_ptr(residual)
        .arg_u32(hidden_size)
        .arg_f32(epsilon(eps))
        .launch(stream)
    )
