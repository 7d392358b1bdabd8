# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `w4a16_gemv`: NVFP4 weights, for one row and for several.

k must be a multiple of 16 (a block scale covers 16 values); input lies on a 16-byte address and the packed codes on an
8-byte one. Kernels of this family differ in their grid or in how many rows they compute, so each launcher refuses the
handle of another kernel.
"""

from __future__ import annotations

from typing import Protocol

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count, multiple_of

CHUNK = 16
TIER_ROWS = {
    **{f"w4a16_gemv::w4a16_gemv_batch{rows}": rows for rows in (4, 5, 6, 7, 8, 16, 32)},
    "w4a16_gemv::w4a16_gemv_batch8_rt2": 8,
}
"""Most rows of the kernels that `w4a16_gemv_batchm` launches; a kernel leaves rows beyond them out in silence."""


class HasNvfp4Weight(Protocol):
    """An NVFP4 weight [n, k], as Rust's `QuantizedWeight`: codes [n, k / 2], block scales [n, k / 16], one factor."""

    @property
    def weight(self) -> DevicePtr: ...

    @property
    def weight_scale(self) -> DevicePtr: ...

    @property
    def weight_scale_2(self) -> float: ...


def only(kernel: KernelHandle, *names: str) -> None:
    """InvalidArgumentError unless `kernel` is one of `names`; a null handle is left to the launch, which refuses it."""
    if not kernel.is_null and kernel.name not in names:
        raise InvalidArgumentError("kernel", kernel.name, f"{' or '.join(names)} is launched here")


def chunks_of(k: int) -> int:
    """k, if it is a multiple of 16."""
    return multiple_of("k", k, CHUNK, f"a block scale covers {CHUNK} values")


def _start(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    outputs: int = 4,
) -> KernelLaunch:
    """The geometry and the arguments that all kernels begin with."""
    chunks_of(k)
    launch = KernelLaunch(gpu, kernel).grid((div_ceil(count("n", n), outputs), 1, 1)).block((256, 1, 1))
    launch.arg_ptr(input).arg_ptr(weight.weight).arg_ptr(weight.weight_scale).arg_f32(weight.weight_scale_2)
    return launch.arg_ptr(output)


def w4a16_gemv(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [n] = weight [n, k] . input [k], BF16. `kernel` is `w4a16_gemv::w4a16_gemv`."""
    only(kernel, "w4a16_gemv::w4a16_gemv")
    _start(gpu, kernel, input, weight, output, n, k).arg_u32(n).arg_u32(k).launch(stream)


def w4a16_gemv_sw(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """The bits of `w4a16_gemv` by a warp an output. `kernel` is `w4a16_gemv::w4a16_gemv_sw`."""
    only(kernel, "w4a16_gemv::w4a16_gemv_sw")
    _start(gpu, kernel, input, weight, output, n, k, outputs=8).arg_u32(n).arg_u32(k).launch(stream)


def w4a16_gemv_batch2(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [2, n] = input [2, k] . weight [n, k] transposed, BF16; each row has the bits of `w4a16_gemv`."""
    only(kernel, "w4a16_gemv::w4a16_gemv_batch2")
    _start(gpu, kernel, input, weight, output, n, k).arg_u32(n).arg_u32(k).launch(stream)


def w4a16_gemv_batch3(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """`w4a16_gemv_batch2` for three rows."""
    only(kernel, "w4a16_gemv::w4a16_gemv_batch3")
    _start(gpu, kernel, input, weight, output, n, k).arg_u32(n).arg_u32(k).launch(stream)


def w4a16_gemv_batchm(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    m: int,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [m, n] = input [m, k] . weight [n, k] transposed, BF16; each row has the bits of `w4a16_gemv`.

    `kernel` is one of `TIER_ROWS`, and m at most its number of rows.
    """
    only(kernel, *TIER_ROWS)
    if not kernel.is_null and count("m", m) > TIER_ROWS[kernel.name]:
        raise InvalidArgumentError("m", m, f"{kernel.name} takes {TIER_ROWS[kernel.name]} rows at most")
    _start(gpu, kernel, input, weight, output, n, k).arg_u32(m).arg_u32(n).arg_u32(k).launch(stream)


def w4a16_gemv_qg(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    num_heads: int,
    head_dim: int,
    stream: StreamLike,
) -> None:
    """Queries of all heads, then gates of all heads: output [2, num_heads, head_dim], BF16.

    weight is [num_heads, 2, head_dim, k], so n = 2 * num_heads * head_dim. `kernel` is `w4a16_gemv::w4a16_gemv_qg`.
    """
    only(kernel, "w4a16_gemv::w4a16_gemv_qg")
    rows = 2 * count("num_heads", num_heads) * count("head_dim", head_dim)
    if count("n", n) != rows:
        raise InvalidArgumentError("n", n, f"2 * num_heads * head_dim = {rows} is needed")
    launch = _start(gpu, kernel, input, weight, output, n, k)
    launch.arg_u32(n).arg_u32(k).arg_u32(num_heads).arg_u32(head_dim).launch(stream)


def w4a16_gemv_logits(
    gpu: GpuBackend,
    kernel: KernelHandle,
    input: DevicePtr,  # noqa: A002 - the engine's name
    weight: HasNvfp4Weight,
    output: DevicePtr,
    n: int,
    k: int,
    stream: StreamLike,
) -> None:
    """output [n] = weight [n, k] . input [k] in FP32. `kernel` is `w4a16_gemv::w4a16_gemv_logits`."""
    only(kernel, "w4a16_gemv::w4a16_gemv_logits")
    _start(gpu, kernel, input, weight, output, n, k).arg_u32(n).arg_u32(k).launch(stream)
