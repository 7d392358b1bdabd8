# SPDX-License-Identifier: AGPL-3.0-only
"""Module `hyper_connection`: manifold-constrained hyper-connections (DeepSeek-V4), the official maths on FP32 streams.

A token has hc streams of H elements, X [hc, H]; x is X flattened, n = hc H. FP32 throughout, with sums in the kernels'
order, so that a token's bits depend on neither T nor the number of blocks.
"""

from __future__ import annotations

import numpy as np

from ._bf16 import WARP, Bf16Array, F32Array, halving_sum, padded, sigmoid, to_bf16, to_f32

BLOCK = 256
SHARES = BLOCK // WARP
MAX_STREAMS = 4


def mix_rows(hc: int) -> int:
    """Rows of hc_fn: hc for the weights of y, hc for post, hc * hc for comb."""
    return (2 + hc) * hc


def hc_expand(hidden: Bf16Array, hc: int) -> F32Array:
    """X_sd = h_d for every stream s: hidden BF16 [T, H] gives FP32 [T, hc, H]."""
    return np.repeat(to_f32(hidden)[:, None], hc, axis=1)


def shares_of(streams: F32Array, fn: F32Array) -> F32Array:
    """What each of 8 warps adds to fn x and, as the last row, to the sum of squares: FP32 [T, rows + 1, 8].

    streams [T, hc, H], fn [rows, hc * H]. Thread t of 256 takes the quads of 4 elements t, t + 256, ... of x and adds
    one product at a time; then the tree 16, 8, 4, 2, 1 in each warp.
    """
    tokens, size = len(streams), fn.shape[1]
    turns = -(-size // (4 * BLOCK))
    x = padded(streams.reshape(tokens, size), turns * 4 * BLOCK).reshape(tokens, turns, BLOCK, 4)
    f = padded(fn, turns * 4 * BLOCK).reshape(len(fn), turns, BLOCK, 4)
    sums = np.zeros((tokens, len(fn) + 1, BLOCK), np.float32)
    for turn in range(turns):
        for element in range(4):
            values = x[:, turn, :, element]
            sums[:, :-1] += f[None, :, turn, :, element] * values[:, None]
            sums[:, -1] += values * values
    return halving_sum(sums.reshape(tokens, len(fn) + 1, SHARES, WARP))


def mixes_of(shares: F32Array, size: int, norm_eps: float) -> F32Array:
    """(fn x) * r, r = 1 / sqrt(mean(x^2) + norm_eps): [T, rows] from the shares [T, rows + 1, 8] of `size` elements.

    The root is rounded once, from FP64.
    """
    totals = halving_sum(shares)
    mean = totals[:, -1:] / np.float32(size) + np.float32(norm_eps)
    r = (1.0 / np.sqrt(mean.astype(np.float64))).astype(np.float32)
    return totals[:, :-1] * r


def _sums(comb: F32Array, axis: int) -> F32Array:
    """Sums of [T, hc, hc] over an axis, which stays: (c0 + c1) + (c2 + c3), zeros where there are fewer streams."""
    terms = padded(np.moveaxis(comb, axis, -1), MAX_STREAMS)
    total: F32Array = (terms[..., 0] + terms[..., 1]) + (terms[..., 2] + terms[..., 3])
    return np.expand_dims(total, axis)


def sinkhorn(logits: F32Array, iters: int, hc_eps: float) -> F32Array:
    """comb of logits, FP32 [T, hc, hc]: softmax over j, + hc_eps, then a column step and iters - 1 times a row step and
    a column step. A step divides by the sum over the row (over j) or the column (over i) + hc_eps."""
    eps = np.float32(hc_eps)
    comb: F32Array = np.exp(logits - logits.max(axis=2, keepdims=True))
    comb = comb / _sums(comb, 2) + eps
    comb = comb / (_sums(comb, 1) + eps)
    for _ in range(1, iters):
        comb = comb / (_sums(comb, 2) + eps)
        comb = comb / (_sums(comb, 1) + eps)
    return comb


def mixed(streams: F32Array, weights: F32Array) -> Bf16Array:
    """y_d = weights_0 X_0d + weights_1 X_1d + ..., added in that order, rounded once: BF16 [T, H]."""
    total = weights[:, :1] * streams[:, 0]
    for s in range(1, streams.shape[1]):
        total = total + weights[:, s : s + 1] * streams[:, s]
    return to_bf16(total)


def stream_weights(mixes: F32Array, scale: F32Array, base: F32Array, hc_eps: float) -> F32Array:
    """The weights of y, sigmoid(m * scale + base) + hc_eps: mixes [T, hc], scale one number, base [hc]."""
    return sigmoid(mixes * scale + base) + np.float32(hc_eps)


def hc_pre_finish(
    streams: F32Array,
    shares: F32Array,
    scale: F32Array,
    base: F32Array,
    iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Bf16Array, F32Array, F32Array]:
    """`hc_pre` from what `shares_of` gives."""
    tokens, hc, size = streams.shape
    with np.errstate(all="ignore"):
        mixes = mixes_of(shares, hc * size, norm_eps)
        pre = stream_weights(mixes[:, :hc], scale[0], base[:hc], hc_eps)
        post = np.float32(2.0) * sigmoid(mixes[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        logits = mixes[:, 2 * hc :] * scale[2] + base[2 * hc :]
        return mixed(streams, pre), post, sinkhorn(logits.reshape(tokens, hc, hc), iters, hc_eps)


def hc_pre(
    streams: F32Array, fn: F32Array, scale: F32Array, base: F32Array, iters: int, norm_eps: float, hc_eps: float
) -> tuple[Bf16Array, F32Array, F32Array]:
    """(y BF16 [T, H], post FP32 [T, hc], comb FP32 [T, hc, hc]) of streams FP32 [T, hc, H].

    With m = (fn x) * r: pre_i = sigmoid(m_i scale_0 + base_i) + hc_eps and y_d = sum over i of pre_i X_id; post_i = 2
    sigmoid(m_{hc+i} scale_1 + base_{hc+i}); comb is `sinkhorn` of m_{2hc+i hc+j} scale_2 + base. fn [(2+hc)hc, hc H],
    scale [3], base [(2+hc)hc]. iters >= 1 counts column steps. A NaN in a token's streams makes all its results NaN.
    """
    with np.errstate(all="ignore"):
        shares = shares_of(streams, fn)
    return hc_pre_finish(streams, shares, scale, base, iters, norm_eps, hc_eps)


def hc_post(block_out: Bf16Array, residual: F32Array, post: F32Array, comb: F32Array) -> F32Array:
    """X'_jd = post_j o_d + comb_0j X_0d + comb_1j X_1d + ..., added in that order: FP32 [T, hc, H].

    block_out (o) BF16 [T, H], residual (X) FP32 [T, hc, H], post [T, hc], comb [T, hc, hc]: the first index of comb is
    summed over.
    """
    with np.errstate(all="ignore"):
        total = post[:, :, None] * to_f32(block_out)[:, None]
        for i in range(residual.shape[1]):
            total = total + comb[:, i, :, None] * residual[:, i, None]
    return total


def hc_head_finish(
    streams: F32Array, shares: F32Array, scale: F32Array, base: F32Array, norm_eps: float, hc_eps: float
) -> Bf16Array:
    """`hc_head` from what `shares_of` gives."""
    _, hc, size = streams.shape
    with np.errstate(all="ignore"):
        mixes = mixes_of(shares, hc * size, norm_eps)
        return mixed(streams, stream_weights(mixes, scale[0], base, hc_eps))


def hc_head(
    streams: F32Array, fn: F32Array, scale: F32Array, base: F32Array, norm_eps: float, hc_eps: float
) -> Bf16Array:
    """y_d = sum over i of (sigmoid((fn x)_i r scale + base_i) + hc_eps) X_id: BF16 [T, H].

    streams FP32 [T, hc, H], fn [hc, hc H], scale [1], base [hc].
    """
    with np.errstate(all="ignore"):
        shares = shares_of(streams, fn)
    return hc_head_finish(streams, shares, scale, base, norm_eps, hc_eps)
