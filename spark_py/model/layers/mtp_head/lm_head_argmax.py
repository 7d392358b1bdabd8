# SPDX-License-Identifier: AGPL-3.0-only
"""The LM head that writes no logits: products, argmax and the next draft's embedding in one launch. Rust has three."""

from __future__ import annotations

from collections.abc import Callable

from ....ops._gemv_rows import ARGMAX_ROOM_BYTES, MAX_ROWS, ArgmaxRoom
from ....ops.spark_fp8_gemv_rows import spark_fp8_gemv_rows_argmax
from ....ops.spark_gemv_rows import spark_gemv_rows_argmax
from ....ops.spark_w4a16_gemv_rows import spark_w4a16_gemv_rows_argmax
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...weight_map import DenseWeight, Fp8DenseWeight, QuantizedWeight
from .new import BF16_BYTES
from .types import ProjectionWeight

__all__ = ["LmHeadArgmax"]

_ALIGN = 16
_MODULES = {
    DenseWeight: "spark_gemv_rows",
    Fp8DenseWeight: "spark_fp8_gemv_rows",
    QuantizedWeight: "spark_w4a16_gemv_rows",
}


class LmHeadArgmax:
    """For rows BF16 [k] through `weight` [n, k], which this project's kernels for rows take: the ids that
    `argmax_bf16` would find in the logits, and the rows of `table` BF16 [n or more, k] that they name."""

    def __init__(
        self,
        gpu: GpuBackend,
        weight: ProjectionWeight,
        n: int,
        k: int,
        table: DenseWeight,
        alloc: Callable[[str, int], DevicePtr],
    ) -> None:
        self._gpu, self._weight, self._table, self._n, self._k = gpu, weight, table.weight, n, k
        module = _MODULES.get(type(weight))
        self._kernel = None
        if module is not None and table.weight.address % _ALIGN == 0:
            self._kernel = gpu.try_kernel(module, f"{module}_argmax") or None
        if self._kernel is not None:
            base = alloc("argmax_room", ARGMAX_ROOM_BYTES)
            gpu.memset(base, 0, ARGMAX_ROOM_BYTES)
            self._room = ArgmaxRoom.at(base)

    def __bool__(self) -> bool:
        """Whether the set has the kernel, and the table lies where it reads."""
        return self._kernel is not None

    def run(self, normed: DevicePtr, ids: DevicePtr, embed: DevicePtr | None, rows: int, stream: StreamLike) -> None:
        """ids u32 [rows] and, where there is one, embed BF16 [rows, k] of normed BF16 [rows, k]."""
        assert self._kernel is not None
        gpu, kernel, weight, room, n, k = self._gpu, self._kernel, self._weight, self._room, self._n, self._k
        for first in range(0, rows, MAX_ROWS):
            m, at = min(MAX_ROWS, rows - first), first * k * BF16_BYTES
            source, picked = normed.offset(at), ids.offset(4 * first)
            table, to = (DevicePtr.NULL,) * 2 if embed is None else (self._table, embed.offset(at))
            match weight:
                case DenseWeight():
                    spark_gemv_rows_argmax(gpu, kernel, source, weight, picked, table, to, room, m, n, k, stream)
                case Fp8DenseWeight():
                    spark_fp8_gemv_rows_argmax(gpu, kernel, source, weight, picked, table, to, room, m, n, k, stream)
                case QuantizedWeight():
                    spark_w4a16_gemv_rows_argmax(gpu, kernel, source, weight, picked, table, to, room, m, n, k, stream)
