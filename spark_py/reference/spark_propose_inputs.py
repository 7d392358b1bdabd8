# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_propose_inputs`: what a propose is given, copied to where its kernels read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ._bf16 import Bf16Array, U32Array

U8Array = npt.NDArray[np.uint8]


def spark_propose_inputs(
    given: U8Array, rows: Sequence[U8Array], tokens: U32Array, table: Bf16Array
) -> tuple[U8Array, U8Array, Bf16Array]:
    """(slab, hidden, embed), bit for bit: a copy of `given`, rows u8 [row_bytes] as [n, row_bytes], and table BF16
    [V, H] at tokens u32 [n], as [n, H]."""
    return given.copy(), np.stack(rows), table[tokens]
