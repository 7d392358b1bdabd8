# SPDX-License-Identifier: AGPL-3.0-only
"""Module `spark_nvfp4_transpose`: an NVFP4 weight's bytes, two codes or one scale each, turned for the tile GEMM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]


def spark_nvfp4_transpose(source: U8Array, ldb: int) -> U8Array:
    """uint8 [rows, columns] transposed, each row filled up with zeros: uint8 [columns, ldb], ldb >= rows."""
    rows, columns = source.shape
    result = np.zeros((columns, ldb), np.uint8)
    result[:, :rows] = source.T
    return result
