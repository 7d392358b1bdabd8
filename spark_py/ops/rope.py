# SPDX-License-Identifier: AGPL-3.0-only
"""Launcher of module `rope`: a block of 128 threads a head and as many tokens as it has threads for."""

from __future__ import annotations

from ..runtime.errors import InvalidArgumentError
from ..runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ..runtime.launch import KernelLaunch, div_ceil
from ._args import count

BLOCK = 128


def rope(
    gpu: GpuBackend,
    kernel: KernelHandle,
    q: DevicePtr,
    k: DevicePtr,
    positions: DevicePtr,
    seq_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    theta: float,
    stream: StreamLike,
    batch: int = 1,
) -> None:
    """Rotate q BF16 [batch, seq_len, num_q_heads, head_dim] and k [batch, seq_len, num_kv_heads, head_dim] in place.

    positions: u32 [batch, seq_len] on the device. `kernel` is `rope::rope_forward`. Any even rotary_dim from 2 to
    head_dim, any finite theta above 0.
    """
    count("head_dim", head_dim)
    if count("rotary_dim", rotary_dim) % 2 or rotary_dim > head_dim:
        raise InvalidArgumentError("rotary_dim", rotary_dim, f"an even number up to head_dim = {head_dim} is needed")
    if not 0.0 < theta < float("inf"):
        raise InvalidArgumentError("theta", theta, "a finite number above 0 is needed")
    heads = count("num_q_heads", num_q_heads) + count("num_kv_heads", num_kv_heads)
    tokens = max(1, BLOCK // (rotary_dim // 2))
    (
        KernelLaunch(gpu, kernel)
        .grid((heads, div_ceil(count("seq_len", seq_len), tokens), count("batch", batch)))
        .block((BLOCK, 1, 1))
        .arg_ptr(q)
        .arg_ptr(k)
        .arg_ptr(positions)
        .arg_u32(seq_len)
        .arg_u32(num_q_heads)
        .arg_u32(num_kv_heads)
        .arg_u32(head_dim)
        .arg_u32(rotary_dim)
        .arg_f32(theta)
        .launch(stream)
    )
