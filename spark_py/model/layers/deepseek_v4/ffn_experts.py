# SPDX-License-Identifier: AGPL-3.0-only
"""The experts of V4Ffn, in MXFP4 or in BF16: the products of rows with the experts that were chosen for them.

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
from ....ops.spark_moe_expert_silu_down_clamped_bf16 import moe_expert_silu_down_clamped_bf16_rows
from ....ops.spark_moe_rows import spark_moe_expert_gate_up_shared_bf16_rows
from ....ops.spark_mxfp4_experts import mxfp4_experts_gate_up, mxfp4_experts_silu_down
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...weight_map import DenseWeight, Mxfp4Weight
from .scratch import OwnedBuffers
from .weights import V4ExpertWeights, V4FfnShape, V4FfnWeights

__all__ = ["RoutedExperts", "routed_experts"]

_BF16 = 2  # bytes
_ADDRESS = 8
_PARTS = ("w1", "w3", "w2")
_TENSOR = "spark_mxfp4_experts"
_CLAMPED = "spark_moe_expert_silu_down_clamped"


class RoutedExperts(Protocol):
    """The experts of a layer in one format, with the scratch for them; the shared one too where `with_shared`."""

    with_shared: bool

    def run(
        self, x: DevicePtr, ids: DevicePtr, output: DevicePtr, shared_output: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        """output BF16 [rows, k, h]: x BF16 [rows, h] through the experts ids u32 [rows, k], unweighted. Where
        `with_shared` is false, what shared_output BF16 [rows, h] holds then means nothing."""
        ...

    def release(self) -> None:
        """Free tables and scratch; a second call does nothing."""
        ...


def routed_experts(
    weights: V4FfnWeights, shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str
) -> RoutedExperts:
    """The experts of weights that have been checked, in the format that they have."""
    kind = _Mxfp4 if isinstance(weights.experts[0].w1, Mxfp4Weight) else _Bf16
    return kind(weights, shape, gpu, max_rows, name)


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
    """Two launches, of `spark_mxfp4_experts` where the set has it; the activation stays FP32."""

    with_shared = False

    def __init__(self, weights: V4FfnWeights, shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str) -> None:
        self._gpu, self._shape = gpu, shape
        tensor = tuple(gpu.try_kernel(_TENSOR, f"{_TENSOR}_{part}") for part in ("gate_up", "silu_down"))
        self._tensor = all(tensor)
        if self._tensor:
            self._gate_up_k, self._down_k = tensor
        else:
            module = "spark_moe_expert_mxfp4"
            self._gate_up_k = gpu.kernel(module, "spark_moe_expert_gate_up_mxfp4_rows")
            self._down_k = gpu.kernel(module, f"{_CLAMPED}_mxfp4_rows")
        wide = shape.top_k * shape.inter * _BF16
        columns, sizes = ("weight", "weight_scale"), {"gate": wide, "up": wide}
        self._owned = _Tables(weights.experts, columns, gpu, name, max_rows, sizes)

    def run(
        self, x: DevicePtr, ids: DevicePtr, output: DevicePtr, shared_output: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        gpu, shape, owned = self._gpu, self._shape, self._owned
        h, inter, k = shape.hidden_size, shape.inter, shape.top_k
        w1, w3, w2 = (Mxfp4Tables(owned.table(part, "weight"), owned.table(part, "weight_scale")) for part in _PARTS)
        gate, up = owned["gate"], owned["up"]
        project = mxfp4_experts_gate_up if self._tensor else moe_expert_gate_up_mxfp4
        down = mxfp4_experts_silu_down if self._tensor else moe_expert_silu_down_clamped_mxfp4
        project(gpu, self._gate_up_k, x, w1, gate, w3, up, ids, inter, h, k, stream, rows=rows)
        down(gpu, self._down_k, gate, up, w2, output, ids, h, inter, k, shape.swiglu_limit, stream, rows=rows)

    def release(self) -> None:
        self._owned.release()


class _Bf16:
    """Two launches, of the shared expert too where it is in BF16; the activation stays FP32."""

    def __init__(self, weights: V4FfnWeights, shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str) -> None:
        self._gpu, self._shape = gpu, shape
        shared = [getattr(weights.shared, part) for part in _PARTS]
        self.with_shared = all(isinstance(part, DenseWeight) for part in shared)
        self._shared_parts = shared if self.with_shared else [DenseWeight(DevicePtr.NULL)] * len(_PARTS)
        self._gate_up_k = gpu.kernel("spark_moe_rows", "spark_moe_expert_gate_up_shared_bf16_rows")
        self._down_k = gpu.kernel(f"{_CLAMPED}_bf16", f"{_CLAMPED}_bf16_rows")
        wide, narrow = shape.top_k * shape.inter * _BF16, shape.inter * _BF16
        sizes = {"gate": wide, "up": wide, "shared_gate": narrow, "shared_up": narrow}
        self._owned = _Tables(weights.experts, ("weight",), gpu, name, max_rows, sizes)

    def run(
        self, x: DevicePtr, ids: DevicePtr, output: DevicePtr, shared_output: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        gpu, shape, owned = self._gpu, self._shape, self._owned
        h, inter, k = shape.hidden_size, shape.inter, shape.top_k
        w1, w3, w2 = (owned.table(part, "weight") for part in _PARTS)
        sh_w1, sh_w3, sh_w2 = self._shared_parts
        gate, up, sh_gate, sh_up = (owned[each] for each in ("gate", "up", "shared_gate", "shared_up"))
        spark_moe_expert_gate_up_shared_bf16_rows(
            gpu, self._gate_up_k, x, w1, gate, w3, up, ids, sh_w1, sh_gate, sh_w3, sh_up, rows, inter, h, k, stream
        )
        moe_expert_silu_down_clamped_bf16_rows(
            gpu, self._down_k, gate, up, w2, output, ids, sh_gate, sh_up, sh_w2, shared_output, rows, h, inter, k,
            shape.swiglu_limit, stream,
        )  # fmt: skip

    def release(self) -> None:
        self._owned.release()
