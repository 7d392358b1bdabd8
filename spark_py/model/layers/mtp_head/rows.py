# SPDX-License-Identifier: AGPL-3.0-only
"""Projections by this project's kernels for rows: up to eight rows through up to three weights of one format in one
launch, each row with the bits that it has alone. What they do not take goes by the engine's kernels, in
`projection.py`. Which of them a weight goes by is a matter of the set and the weight alone, so that it is the same for
one row and for many, launch by launch and in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ....ops.spark_fp8_gemv_rows import Fp8Projection, spark_fp8_gemv_rows
from ....ops.spark_gemv_rows import MAX_ROWS, Projection, spark_gemv_rows
from ....ops.spark_w4a16_gemv_rows import STRIPE, Nvfp4Projection, spark_w4a16_gemv_rows
from ....runtime.gpu import DevicePtr, StreamLike
from ...weight_map import DenseWeight, Fp8DenseWeight, QuantizedWeight
from .new import BF16_BYTES, MtpHeadNew
from .types import ProjectionWeight

__all__ = ["MtpHeadRows", "Part"]

Part: TypeAlias = tuple[ProjectionWeight, DevicePtr, int]
"""A weight [n, k], where its outputs BF16 [m, n] go, and n."""
_LOAD = 16


class MtpHeadRows(MtpHeadNew):
    """Rows through weights that lie together."""

    def _takes(self, weights: Sequence[ProjectionWeight], k: int) -> bool:
        """Whether one launch takes all of these weights: of one format, and a set with its kernel."""
        if all(isinstance(each, DenseWeight) for each in weights):
            return bool(self.spark_gemv_rows_k)
        if all(isinstance(each, Fp8DenseWeight) for each in weights):
            return bool(self.spark_fp8_gemv_rows_k)
        if k % STRIPE or not self.spark_w4a16_gemv_rows_k:
            return False
        return all(
            isinstance(each, QuantizedWeight) and (each.weight.address | each.weight_scale.address) % _LOAD == 0
            for each in weights
        )

    def _project_parts(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        parts: Sequence[Part],
        m: int,
        k: int,
        stream: StreamLike,
        head_dim: int = 0,
    ) -> None:
        """Every part's output [m, n] = input [m, k] . weight [n, k] transposed, of weights that it `_takes`. head_dim:
        the first part's rows are stored as the queries of all heads, then the gates of all."""
        gpu = self.gpu
        for start in range(0, m, MAX_ROWS):
            rows, a = min(MAX_ROWS, m - start), input.offset(start * k * BF16_BYTES)
            dense: list[Projection] = []
            fp8: list[Fp8Projection] = []
            nvfp4: list[Nvfp4Projection] = []
            for weight, output, n in parts:
                c = output.offset(start * n * BF16_BYTES)
                match weight:
                    case DenseWeight():
                        dense.append(Projection(weight, c, n, n))
                    case Fp8DenseWeight():
                        fp8.append(Fp8Projection(weight, c, n, n))
                    case QuantizedWeight():
                        nvfp4.append(Nvfp4Projection(weight, c, n, n))
            if dense:
                spark_gemv_rows(gpu, self.spark_gemv_rows_k, a, dense, rows, k, stream, head_dim=head_dim)
            if fp8:
                spark_fp8_gemv_rows(gpu, self.spark_fp8_gemv_rows_k, a, fp8, rows, k, stream, head_dim=head_dim)
            if nvfp4:
                spark_w4a16_gemv_rows(gpu, self.spark_w4a16_gemv_rows_k, a, nvfp4, rows, k, stream, head_dim=head_dim)
