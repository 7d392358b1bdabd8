# SPDX-License-Identifier: AGPL-3.0-only
"""BF16 arrays as FP32 and back, and sums in the order of a warp."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

BF16 = np.dtype(ml_dtypes.bfloat16)

Bf16Array: TypeAlias = "np.ndarray[Any, Any]"
F32Array: TypeAlias = npt.NDArray[np.float32]
U32Array: TypeAlias = npt.NDArray[np.uint32]

WARP = 32


def to_f32(array: Bf16Array) -> F32Array:
    """BF16 values as FP32: exact. Shape is kept; a new array."""
    bits: U32Array = array.view(np.uint16).astype(np.uint32)
    np.left_shift(bits, np.uint32(16), out=bits)
    return bits.view(np.float32)


def to_bf16(array: F32Array) -> Bf16Array:
    """FP32 values rounded to BF16, nearest, ties to even. Shape is kept."""
    return array.astype(BF16)


def sigmoid(x: F32Array) -> F32Array:
    """1 / (1 + exp(-x)) in FP32, step by step as the kernels do: 0 where exp(-x) overflows."""
    one = np.float32(1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        result: F32Array = one / (one + np.exp(-x))
    return result


def halving_sum(values: F32Array) -> F32Array:
    """Sum over the last axis (a power of two long) as the tree n/2, ..., 2, 1 in FP32: lane i adds lane i + step."""
    step = values.shape[-1] // 2
    while step:
        values = values[..., :step] + values[..., step : 2 * step]
        step //= 2
    return values[..., 0]


def folded(values: F32Array) -> F32Array:
    """`halving_sum` over the first axis, which is faster where the other is long: FP32 [2^p, n] gives [n]."""
    step = values.shape[0] // 2
    while step:
        values = values[:step] + values[step : 2 * step]
        step //= 2
    total: F32Array = values[0]
    return total


def padded(values: F32Array, length: int) -> F32Array:
    """The last axis filled up with zeros to `length`, which leaves sums of the kernels' kind unchanged."""
    missing = length - values.shape[-1]
    if missing == 0:
        return values
    return np.concatenate([values, np.zeros((*values.shape[:-1], missing), np.float32)], axis=-1)
