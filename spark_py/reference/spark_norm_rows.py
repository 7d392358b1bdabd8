# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_norm_rows`: norms with what stands before or after them, as the single kernels one after the other."""

from __future__ import annotations

import numpy as np

from ._bf16 import Bf16Array
from .norm import rms_norm
from .residual_add import bf16_residual_add
from .rms_norm_vanilla import rms_norm_vanilla


def _norm(x: Bf16Array, weight: Bf16Array, eps: float, one_plus: bool) -> Bf16Array:
    return rms_norm(x, weight, eps) if one_plus else rms_norm_vanilla(x, weight, eps)


def spark_norm_concat(
    first: Bf16Array, second: Bf16Array, weights: tuple[Bf16Array, Bf16Array], eps: float, one_plus: bool
) -> Bf16Array:
    """[norm of first | norm of second]: BF16 [T, H] each, weights BF16 [H], give BF16 [T, 2H]."""
    pair = zip((first, second), weights, strict=True)
    return np.concatenate([_norm(x, weight, eps, one_plus) for x, weight in pair], axis=1)


def spark_add_then_norm(
    hidden: Bf16Array, src: Bf16Array, weight: Bf16Array, eps: float, one_plus: bool
) -> tuple[Bf16Array, Bf16Array]:
    """(s, norm of s), s = bf16(hidden + src): BF16 [T, H] each, weight BF16 [H]. The mean square is of s."""
    added = bf16_residual_add(hidden, src)
    return added, _norm(added, weight, eps, one_plus)
