# SPDX-License-Identifier: AGPL-3.0-only
"""What the references of `spark_gemv_argmax.cuh` share: winners of rows of outputs, and what they name."""

from __future__ import annotations

from ._bf16 import Bf16Array, U32Array
from .argmax import argmax_rows


def winners(outputs: Bf16Array, table: Bf16Array | None) -> tuple[U32Array, Bf16Array | None]:
    """(ids u32 [M], rows ids of `table` BF16 [V, K]) for outputs BF16 [M, N]; no rows without a table."""
    ids = argmax_rows(outputs)
    return ids, None if table is None else table[ids]
