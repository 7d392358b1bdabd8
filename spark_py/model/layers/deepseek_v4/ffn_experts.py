# SPDX-License-Identifier: AGPL-3.0-only
"""The routed experts of V4Ffn, in MXFP4 or in BF16: the products of rows with the experts that were chosen for them.

Experts are found by the ids on the device, through tables of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ....ops.spark_moe_expert_mxfp4 import (
    Mxfp4Tables,
    moe_expert_gate_up_mxfp4,
    moe_expert_silu_down_clamped_mxfp4,
)
from ....ops.spark_moe_rows import spark_moe_expert_gate_up_shared_bf16_rows
from ....ops.spark_moe_silu_mul_clamped import silu_mul_clamped
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...weight_map import DenseWeight, Mxfp4Weight
from .scratch import OwnedBuffers
from .weights import V4ExpertWeights, V4FfnShape

__all__ = ["RoutedExperts", "routed_experts"]

_BF16 = 2  # bytes
_ADDRESS = 8
_PARTS = ("w1", "w3", "w2")


class RoutedExperts(Protocol):
    """The experts of a layer in one format, with the scratch for them."""

    def run(self, x: DevicePtr, ids: DevicePtr, output: DevicePtr, rows: int, stream: StreamLike) -> None:
        """output BF16 [rows, k, h]: x BF16 [rows, h] through the experts ids u32 [rows, k], unweighted."""
        ...

    def release(self) -> None:
        """Free tables and scratch; a second call does nothing."""
        ...


def routed_experts(
    experts: Sequence[V4ExpertWeights], shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str
) -> RoutedExperts:
    """The experts, which have been checked, in the format that they have."""
    kind = _Mxfp4 if isinstance(experts[0].w1, Mxfp4Weight) else _Bf16
    return kind(experts, shape, gpu, max_rows, name)


class _Tables:
    """Tables u64 [E] by projection and column of addresses, and buffers by the row, freed together."""

    def __init__(
        self,
        experts: Sequence[V4ExpertWeights],
        columns: Sequence[str],
        gpu: GpuBackend,
        name: str,
        max_rows: int,
        row_bytes: dict[str, int],
    ) -> None:
        keys = [f"{part}.{column}" for part in _PARTS for column in columns]
        self._tables = OwnedBuffers(gpu, name, 1, dict.fromkeys(keys, len(experts) * _ADDRESS))
        try:
            for key in keys:
                part, _, column = key.partition(".")
                addresses = [getattr(getattr(expert, part), column).address for expert in experts]
                gpu.copy_h2d(np.array(addresses, np.uint64).view(np.uint8), self._tables[key])
            self._scratch = OwnedBuffers(gpu, name, max_rows, row_bytes)
        except BaseException:
            self._tables.release()
            raise

    def table(self, part: str, column: str) -> DevicePtr:
        return self._tables[f"{part}.{column}"]

    def __getitem__(self, buffer: str) -> DevicePtr:
        return self._scratch[buffer]

    def release(self) -> None:
        try:
            self._tables.release()
        finally:
            self._scratch.release()


class _Mxfp4:
    """Two launches; the activation stays FP32."""

    def __init__(
        self, experts: Sequence[V4ExpertWeights], shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str
    ) -> None:
        self._gpu, self._shape = gpu, shape
        module = "spark_moe_expert_mxfp4"
        self._gate_up_k = gpu.kernel(module, "spark_moe_expert_gate_up_mxfp4_rows")
        self._down_k = gpu.kernel(module, "spark_moe_expert_silu_down_clamped_mxfp4_rows")
        wide = shape.top_k * shape.inter * _BF16
        self._owned = _Tables(experts, ("weight", "weight_scale"), gpu, name, max_rows, {"gate": wide, "up": wide})

    def run(self, x: DevicePtr, ids: DevicePtr, output: DevicePtr, rows: int, stream: StreamLike) -> None:
        gpu, shape, owned = self._gpu, self._shape, self._owned
        h, inter, k = shape.hidden_size, shape.inter, shape.top_k
        w1, w3, w2 = (Mxfp4Tables(owned.table(part, "weight"), owned.table(part, "weight_scale")) for part in _PARTS)
        gate, up = owned["gate"], owned["up"]
        moe_expert_gate_up_mxfp4(gpu, self._gate_up_k, x, w1, gate, w3, up, ids, inter, h, k, stream, rows=rows)
        moe_expert_silu_down_clamped_mxfp4(
            gpu, self._down_k, gate, up, w2, output, ids, h, inter, k, shape.swiglu_limit, stream, rows=rows
        )

    def release(self) -> None:
        self._owned.release()


class _Bf16:
    """Three launches of kernels for experts beside a shared one, which is left out here.

    Theirs for a down projection has no limit. So the activation is made by itself, in BF16 as the model's own code has
    it, and each of its rows goes through w2 as a row with one expert in the place of w1, and with none in that of w3.
    """

    def __init__(
        self, experts: Sequence[V4ExpertWeights], shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str
    ) -> None:
        self._gpu, self._shape = gpu, shape
        self._project_k = gpu.kernel("spark_moe_rows", "spark_moe_expert_gate_up_shared_bf16_rows")
        self._silu_k = gpu.kernel("spark_moe_silu_mul_clamped", "spark_moe_silu_mul_clamped")
        wide, narrow = shape.top_k * shape.inter * _BF16, shape.top_k * shape.hidden_size * _BF16
        # What has no weights gets zeros, all of them in places of their own.
        sizes = {"gate": wide, "up": wide, "zeros0": max(wide, narrow), "zeros1": max(wide, narrow), "zeros2": narrow}
        self._owned = _Tables(experts, ("weight",), gpu, name, max_rows, sizes)
        try:
            self._none = OwnedBuffers(gpu, name, 1, {"none": len(experts) * _ADDRESS})
            gpu.memset(self._none["none"], 0, len(experts) * _ADDRESS)
        except BaseException:
            self.release()
            raise

    def run(self, x: DevicePtr, ids: DevicePtr, output: DevicePtr, rows: int, stream: StreamLike) -> None:
        gpu, shape, owned = self._gpu, self._shape, self._owned
        h, inter, k = shape.hidden_size, shape.inter, shape.top_k
        w1, w3, w2 = (owned.table(part, "weight") for part in _PARTS)
        gate, up, nothing = owned["gate"], owned["up"], DenseWeight(DevicePtr.NULL)
        zeros = [owned[f"zeros{number}"] for number in range(3)]
        spark_moe_expert_gate_up_shared_bf16_rows(
            gpu, self._project_k, x, w1, gate, w3, up, ids, nothing, zeros[0], nothing, zeros[1], rows, inter, h, k,
            stream,
        )  # fmt: skip
        silu_mul_clamped(gpu, self._silu_k, gate, up, gate, rows * k * inter, shape.swiglu_limit, stream)
        spark_moe_expert_gate_up_shared_bf16_rows(
            gpu, self._project_k, gate, w2, output, self._none["none"], zeros[2], ids, nothing, zeros[0], nothing,
            zeros[1], rows * k, h, inter, 1, stream,
        )  # fmt: skip

    def release(self) -> None:
        for owned in (self._owned, getattr(self, "_none", None)):
            if owned is not None:
                owned.release()
