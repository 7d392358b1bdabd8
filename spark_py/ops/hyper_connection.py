# SPDX-License-Identifier: AGPL-3.0-only
"""Launchers of module `hyper_connection`, with many blocks a token where the kernel set has `spark_hyper_connection`.

T tokens, hc_mult (1 to 4) FP32 streams of hidden_size elements each: streams [T, hc, H]. Both forms give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import Weight, count, epsilon, multiple_of, weight_ptr

MAX_STREAMS = 4
BLOCK, WARP = 256, 32
SHARES = BLOCK // WARP
MIX_BLOCK = 64
ELEMENTS = 4 * BLOCK
FUSED_STEP = 64
"""What hidden_size must be a multiple of for the kernels of `spark_hc_norm`."""
SPREAD_TOKENS = 64
"""Up to so many tokens a token is spread over many blocks; more tokens than that fill a GPU with a block each, which
reads the streams once instead of once a row."""


def mix_rows(hc: int) -> int:
    """Rows of hc_fn: hc for the weights of the layer's input, hc for post, hc * hc for comb."""
    return (2 + hc) * hc


@dataclass(frozen=True, slots=True)
class HyperConnectionKernels:
    """The kernels of a set: the engine's four, and handle 0 for each of this project's that the set lacks."""

    expand: KernelHandle
    pre: KernelHandle
    post: KernelHandle
    head: KernelHandle
    mix: KernelHandle
    pre_finish: KernelHandle
    head_finish: KernelHandle
    spread_post: KernelHandle
    expand_sum: KernelHandle
    pre_norm: KernelHandle
    head_norm: KernelHandle

    @classmethod
    def of(cls, gpu: GpuBackend) -> HyperConnectionKernels:
        """Resolve them; the engine's four are required, and an error of `GpuBackend.kernel` where one is missing."""
        needed = [gpu.kernel("hyper_connection", name) for name in ("hc_expand", "hc_pre", "hc_post", "hc_head")]
        own = ("spark_hc_mix", "spark_hc_pre_finish", "spark_hc_head_finish", "spark_hc_post")
        spread = (gpu.try_kernel("spark_hyper_connection", name) for name in own)
        fused = ("spark_hc_expand_sum", "spark_hc_pre_norm", "spark_hc_head_norm")
        return cls(*needed, *spread, *(gpu.try_kernel("spark_hc_norm", name) for name in fused))


def shares_bytes(num_tokens: int, hc_mult: int) -> int:
    """Bytes of the scratch that `hc_pre` and `hc_head` take for that many tokens, FP32 [T, (2 + hc) hc + 1, 8]."""
    return count("num_tokens", num_tokens) * (mix_rows(_streams(hc_mult)) + 1) * SHARES * 4


def _streams(hc_mult: int) -> int:
    if count("hc_mult", hc_mult) > MAX_STREAMS:
        raise InvalidArgumentError("hc_mult", hc_mult, f"the kernels mix {MAX_STREAMS} streams at most")
    return hc_mult


def _block_a_token(gpu: GpuBackend, kernel: KernelHandle, num_tokens: int) -> KernelLaunch:
    return KernelLaunch(gpu, kernel).grid((count("num_tokens", num_tokens), 1, 1)).block((BLOCK, 1, 1))


def _blocks(gpu: GpuBackend, kernel: KernelHandle, num_tokens: int, hidden_size: int, more: int = 0) -> KernelLaunch:
    return KernelLaunch(gpu, kernel).grid((div_ceil(hidden_size, ELEMENTS) + more, num_tokens, 1)).block((BLOCK, 1, 1))


def _spread(num_tokens: int, *kernels: KernelHandle) -> bool:
    return count("num_tokens", num_tokens) <= SPREAD_TOKENS and all(kernels)


def _mix(
    gpu: GpuBackend,
    kernel: KernelHandle,
    streams: DevicePtr,
    fn: Weight,
    shares: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    rows: int,
    stream: StreamLike,
) -> None:
    grid = ((rows + 1) * (BLOCK // MIX_BLOCK), num_tokens, 1)
    launch = KernelLaunch(gpu, kernel).grid(grid).block((MIX_BLOCK, 1, 1))
    launch.arg_ptr(streams).arg_ptr(weight_ptr(fn)).arg_ptr(shares)
    launch.arg_u32(hidden_size).arg_u32(hc_mult).arg_u32(rows).launch(stream)


def hc_expand(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    hidden: DevicePtr,
    streams: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    stream: StreamLike,
) -> None:
    """Every stream of a token starts as its hidden row: hidden BF16 [T, H] to streams FP32 [T, hc, H]."""
    launch = _block_a_token(gpu, kernels.expand, num_tokens).arg_ptr(hidden).arg_ptr(streams)
    launch.arg_u32(count("hidden_size", hidden_size)).arg_u32(_streams(hc_mult)).launch(stream)


def hc_pre(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    streams: DevicePtr,
    hc_fn: Weight,
    hc_scale: Weight,
    hc_base: Weight,
    y_out: DevicePtr,
    post_out: DevicePtr,
    comb_out: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
    stream: StreamLike,
    *,
    shares: DevicePtr = DevicePtr.NULL,
) -> None:
    """What goes into a sublayer and how it comes back: y_out BF16 [T, H], post_out FP32 [T, hc], comb_out [T, hc, hc].

    streams FP32 [T, hc, H], hc_fn [(2+hc)hc, hc*H], hc_scale [3], hc_base [(2+hc)hc], all FP32; the maths is that of
    `reference.hyper_connection.hc_pre`. `shares` is scratch of `shares_bytes`, needed to spread a token over many
    blocks: without it, without the kernels for that, or beyond 64 tokens, a token has one block.
    """
    count("hidden_size", hidden_size)
    count("sinkhorn_iters", sinkhorn_iters)
    rows = mix_rows(_streams(hc_mult))
    spread = not shares.is_null and _spread(num_tokens, kernels.mix, kernels.pre_finish)
    if spread:
        _mix(gpu, kernels.mix, streams, hc_fn, shares, num_tokens, hidden_size, hc_mult, rows, stream)
        launch = _blocks(gpu, kernels.pre_finish, num_tokens, hidden_size, 1).arg_ptr(streams).arg_ptr(shares)
    else:
        launch = _block_a_token(gpu, kernels.pre, num_tokens).arg_ptr(streams).arg_ptr(weight_ptr(hc_fn))
    launch.arg_ptr(weight_ptr(hc_scale)).arg_ptr(weight_ptr(hc_base))
    launch.arg_ptr(y_out).arg_ptr(post_out).arg_ptr(comb_out).arg_u32(hidden_size).arg_u32(hc_mult)
    launch.arg_u32(sinkhorn_iters).arg_f32(epsilon(norm_eps)).arg_f32(epsilon(hc_eps))
    launch.launch(stream)


def hc_post(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    block_out: DevicePtr,
    residual: DevicePtr,
    post: DevicePtr,
    comb: DevicePtr,
    out: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    stream: StreamLike,
) -> None:
    """out_jd = post_j o_d + sum over i of comb_ij residual_id: block_out (o) BF16 [T, H] back into the streams.

    residual and out FP32 [T, hc, H], which may be one buffer; post FP32 [T, hc], comb [T, hc, hc] of `hc_pre`.
    """
    count("hidden_size", hidden_size)
    if _spread(num_tokens, kernels.spread_post):
        launch = _blocks(gpu, kernels.spread_post, num_tokens, hidden_size)
    else:
        launch = _block_a_token(gpu, kernels.post, num_tokens)
    launch.arg_ptr(block_out).arg_ptr(residual).arg_ptr(post).arg_ptr(comb).arg_ptr(out)
    launch.arg_u32(hidden_size).arg_u32(_streams(hc_mult)).launch(stream)


def hc_head(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    streams: DevicePtr,
    head_fn: Weight,
    head_scale: Weight,
    head_base: Weight,
    y_out: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    norm_eps: float,
    hc_eps: float,
    stream: StreamLike,
    *,
    shares: DevicePtr = DevicePtr.NULL,
) -> None:
    """The streams as one row, y_out BF16 [T, H]: head_fn [hc, hc*H], head_scale [1], head_base [hc], all FP32.

    `shares` as in `hc_pre`.
    """
    count("hidden_size", hidden_size)
    spread = not shares.is_null and _spread(num_tokens, kernels.mix, kernels.head_finish)
    if spread:
        _mix(gpu, kernels.mix, streams, head_fn, shares, num_tokens, hidden_size, _streams(hc_mult), hc_mult, stream)
        launch = _blocks(gpu, kernels.head_finish, num_tokens, hidden_size).arg_ptr(streams).arg_ptr(shares)
    else:
        launch = _block_a_token(gpu, kernels.head, num_tokens).arg_ptr(streams).arg_ptr(weight_ptr(head_fn))
    launch.arg_ptr(weight_ptr(head_scale)).arg_ptr(weight_ptr(head_base)).arg_ptr(y_out)
    launch.arg_u32(hidden_size).arg_u32(_streams(hc_mult)).arg_f32(epsilon(norm_eps)).arg_f32(epsilon(hc_eps))
    launch.launch(stream)


def fits_fused(num_tokens: int, hidden_size: int, *kernels: KernelHandle) -> bool:
    """Whether launches of `spark_hc_norm`, whose kernels these are, do: they are there, and hidden_size fits."""
    return _spread(num_tokens, *kernels) and hidden_size % FUSED_STEP == 0


def hc_expand_sum(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    own: DevicePtr,
    common: DevicePtr,
    streams: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    apart: bool,
    stream: StreamLike,
) -> None:
    """streams FP32 [T, hc, H] = bf16(own + common): own BF16 [T, hc, H] where `apart`, else [T, H] for all streams;
    common BF16 [T, H]. The bits of `residual_add` and `hc_expand`. hidden_size is a multiple of 64."""
    multiple_of("hidden_size", hidden_size, FUSED_STEP, "the fused kernels have whole warps")
    grid = (div_ceil(hidden_size, ELEMENTS), _streams(hc_mult), count("num_tokens", num_tokens))
    launch = KernelLaunch(gpu, kernels.expand_sum).grid(grid).block((BLOCK, 1, 1))
    launch.arg_ptr(own).arg_ptr(common).arg_ptr(streams)
    launch.arg_u32(hidden_size).arg_u32(hc_mult).arg_u32(int(apart)).launch(stream)


def hc_pre_norm(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    streams: DevicePtr,
    hc_fn: Weight,
    hc_scale: Weight,
    hc_base: Weight,
    weight: Weight,
    output: DevicePtr,
    post_out: DevicePtr,
    comb_out: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
    eps: float,
    stream: StreamLike,
    *,
    shares: DevicePtr,
) -> None:
    """`hc_pre`, and `rms_norm` of its y_out with `weight` BF16 [H] and eps: output BF16 [T, H]. Two launches with the
    bits of three. hidden_size is a multiple of 64."""
    multiple_of("hidden_size", hidden_size, FUSED_STEP, "the fused kernels have whole warps")
    rows = mix_rows(_streams(hc_mult))
    count("sinkhorn_iters", sinkhorn_iters)
    _mix(gpu, kernels.mix, streams, hc_fn, shares, num_tokens, hidden_size, hc_mult, rows, stream)
    launch = KernelLaunch(gpu, kernels.pre_norm).grid((2, num_tokens, 1)).block((min(hidden_size, 1024), 1, 1))
    launch.arg_ptr(streams).arg_ptr(shares).arg_ptr(weight_ptr(hc_scale)).arg_ptr(weight_ptr(hc_base))
    launch.arg_ptr(weight_ptr(weight)).arg_ptr(output).arg_ptr(post_out).arg_ptr(comb_out)
    launch.arg_u32(hidden_size).arg_u32(hc_mult).arg_u32(sinkhorn_iters)
    launch.arg_f32(epsilon(norm_eps)).arg_f32(epsilon(hc_eps)).arg_f32(epsilon(eps)).launch(stream)


def hc_head_norm(
    gpu: GpuBackend,
    kernels: HyperConnectionKernels,
    streams: DevicePtr,
    head_fn: Weight,
    head_scale: Weight,
    head_base: Weight,
    weight: Weight,
    y_out: DevicePtr,
    output: DevicePtr,
    num_tokens: int,
    hidden_size: int,
    hc_mult: int,
    norm_eps: float,
    hc_eps: float,
    eps: float,
    stream: StreamLike,
    *,
    shares: DevicePtr,
) -> None:
    """`hc_head`, and `rms_norm` of its y_out with `weight` BF16 [H] and eps: output BF16 [T, H]. Two launches with the
    bits of three. hidden_size is a multiple of 64."""
    multiple_of("hidden_size", hidden_size, FUSED_STEP, "the fused kernels have whole warps")
    _mix(gpu, kernels.mix, streams, head_fn, shares, num_tokens, hidden_size, _streams(hc_mult), hc_mult, stream)
    launch = KernelLaunch(gpu, kernels.head_norm).grid((num_tokens, 1, 1)).block((min(hidden_size, 1024), 1, 1))
    launch.arg_ptr(streams).arg_ptr(shares).arg_ptr(weight_ptr(head_scale)).arg_ptr(weight_ptr(head_base))
    launch.arg_ptr(weight_ptr(weight)).arg_ptr(y_out).arg_ptr(output).arg_u32(hidden_size).arg_u32(hc_mult)
    launch.arg_f32(epsilon(norm_eps)).arg_f32(epsilon(hc_eps)).arg_f32(epsilon(eps)).launch(stream)
