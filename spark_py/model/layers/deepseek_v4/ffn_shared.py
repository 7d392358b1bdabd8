# SPDX-License-Identifier: AGPL-3.0-only
"""V4SharedExpert: the expert of V4Ffn that sees every row, each of its matrices in a format of its own."""

from __future__ import annotations

from ....ops.spark_moe_silu_mul_clamped import silu_mul_clamped
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from .projection import V4Projection
from .scratch import OwnedBuffers
from .weights import V4ExpertWeights, V4FfnShape

__all__ = ["V4SharedExpert"]

_BF16 = 2  # bytes


class V4SharedExpert:
    """W2 (silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)), in three launches where W1 and W3 are E4M3, else in
    four; the activation is BF16.

    Errors as V4Projection; nothing stays allocated after one.
    """

    def __init__(self, weights: V4ExpertWeights, shape: V4FfnShape, gpu: GpuBackend, max_rows: int, name: str) -> None:
        self._gpu, self._inter, self._limit = gpu, shape.inter, shape.swiglu_limit
        h, inter = shape.hidden_size, shape.inter
        self._w1 = V4Projection(weights.w1, inter, h, gpu, f"{name}.w1")
        self._w3 = V4Projection(weights.w3, inter, h, gpu, f"{name}.w3")
        self._w2 = V4Projection(weights.w2, h, inter, gpu, f"{name}.w2")
        self._silu_k = gpu.kernel("spark_moe_silu_mul_clamped", "spark_moe_silu_mul_clamped")
        self._scratch = OwnedBuffers(gpu, name, max_rows, {"gate": inter * _BF16, "up": inter * _BF16})

    def run(self, x: DevicePtr, output: DevicePtr, rows: int, stream: StreamLike) -> None:
        """output BF16 [rows, h] of x BF16 [rows, h]; they lie apart."""
        gate, up = self._scratch["gate"], self._scratch["up"]
        self._w1.run_with(self._w3, x, gate, up, rows, stream)
        silu_mul_clamped(self._gpu, self._silu_k, gate, up, gate, rows * self._inter, self._limit, stream)
        self._w2.run(gate, output, rows, stream)

    def release(self) -> None:
        """Free the scratch; a second call does nothing."""
        self._scratch.release()
