# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `spark_norm_rows`: two norms side by side, and a norm after an addition."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch
from ._args import Weight, count, epsilon, multiple_of, weight_ptr

MAX_BLOCK, MAX_HIDDEN = 1024, 8192


def takes_hidden(hidden_size: int) -> bool:
    """Whether the kernels have rows of `hidden_size` elements: an even number up to 8192."""
    return 0 < hidden_size <= MAX_HIDDEN and hidden_size % 2 == 0


def _block(hidden_size: int) -> tuple[int, int, int]:
    if multiple_of("hidden_size", hidden_size, 2, "rows are read in pairs") > MAX_HIDDEN:
        raise InvalidArgumentError("hidden_size", hidden_size, f"{MAX_HIDDEN} at most")
    return min(hidden_size, MAX_BLOCK), 1, 1


def spark_norm_concat(
    gpu: GpuBackend,
    kernel: KernelHandle,
    first: DevicePtr,
    second: DevicePtr,
    first_weight: Weight,
    second_weight: Weight,
    output: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    one_plus: bool,
    eps: float,
    stream: StreamLike,
) -> None:
    """output BF16 [num_tokens, 2 * hidden_size] = [norm of first | norm of second], BF16 [num_tokens, hidden_size]
    each, with the bits of `norm.rms_norm` (`one_plus`: weights used as 1 + w) and a concatenation.

    `kernel` is `spark_norm_rows::spark_norm_concat`; hidden_size is even, 8192 at most.
    """
    block = _block(hidden_size)
    launch = KernelLaunch(gpu, kernel).grid((2, count("num_tokens", num_tokens), 1)).block(block)
    launch.arg_ptr(first).arg_ptr(second).arg_ptr(weight_ptr(first_weight)).arg_ptr(weight_ptr(second_weight))
    launch.arg_ptr(output).arg_u32(hidden_size).arg_u32(int(one_plus)).arg_f32(epsilon(eps)).launch(stream)


def spark_add_then_norm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    hidden: DevicePtr,
    src: DevicePtr,
    weight: Weight,
    output: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    one_plus: bool,
    eps: float,
    stream: StreamLike,
) -> None:
    """hidden += src, output = norm of hidden, BF16 [num_tokens, hidden_size]: with the bits of `residual_add` and
    `norm.rms_norm` one after the other, so that the mean square is of the rounded sums. output may be src.

    `kernel` is `spark_norm_rows::spark_add_then_norm`; hidden_size is even, 8192 at most.
    """
    block = _block(hidden_size)
    launch = KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block(block)
    launch.arg_ptr(hidden).arg_ptr(src).arg_ptr(weight_ptr(weight)).arg_ptr(output)
    launch.arg_u32(hidden_size).arg_u32(int(one_plus)).arg_f32(epsilon(eps)).launch(stream)
