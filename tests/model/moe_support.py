# SPDX-License-Identifier: AGPL-3.0-only
"""A small random mixture of experts in each format, and its output in FP64.

The oracle is written from the formulas and shares no code with the package but the tables of the number formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.moe import MoeLayer
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import (
    DenseExpertWeight,
    DenseWeight,
    ExpertWeight,
    Fp8DenseExpertWeight,
    Fp8DenseWeight,
    MoeWeights,
    QuantizedWeight,
)
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.gpu import DevicePtr, GpuBackend

from .support import BF16, RAW, Array, dense, download, upload

MOE: dict[str, Any] = {
    "mlp_only_layers": [],
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

Stored = tuple[Any, Array]
"""A projection on the device, and its weights in FP64."""


def moe_config(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | MOE | changes)


def _bf16(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int) -> Stored:
    values = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(BF16)
    return dense(gpu, values), values.astype(np.float64)


def _nvfp4(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int) -> Stored:
    nibbles = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scales = rng.integers(0x30, 0x48, (n, k // 16), dtype=np.uint8)
    factor = float(np.float32(0.4 / np.sqrt(k)))
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    weight = QuantizedWeight(upload(gpu, packed), upload(gpu, scales), factor, shape=(n, k))
    spread = np.repeat(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), 16, axis=1)
    return weight, E2M1[nibbles] * spread * factor


def _fp8(gpu: GpuBackend, rng: np.random.Generator, n: int, k: int) -> Stored:
    values = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
    scales = (rng.uniform(0.5, 1.5, n) / np.sqrt(k)).astype(np.float32)
    weight = Fp8DenseWeight(upload(gpu, values.view(np.uint8)), upload(gpu, scales), n, k)
    return weight, values.astype(np.float64) * scales.astype(np.float64)[:, None]


@dataclass(frozen=True)
class Kind:
    """An expert's type, one of its projections, and a place where none is."""

    expert: Callable[..., Any]
    projection: Callable[[GpuBackend, np.random.Generator, int, int], Stored]
    null: Callable[[], Any]


KINDS = {
    "nvfp4": Kind(ExpertWeight, _nvfp4, QuantizedWeight.null),
    "bf16": Kind(DenseExpertWeight, _bf16, lambda: DenseWeight(DevicePtr.NULL)),
    "fp8": Kind(Fp8DenseExpertWeight, _fp8, lambda: Fp8DenseWeight(DevicePtr.NULL, DevicePtr.NULL, 0, 0)),
}


@dataclass
class MoeRig:
    """A layer on a backend, its weights in FP64 and an arena."""

    gpu: GpuBackend
    config: ModelConfig
    weights: MoeWeights[Any]
    router: Array
    experts: list[tuple[Array, ...] | None]
    shared: tuple[Array, ...] | None
    shared_gate: Array | None
    ctx: ForwardContext

    def layer(self) -> MoeLayer:
        return MoeLayer(self.weights, self.config, self.gpu)

    def put(self, x: Array) -> DevicePtr:
        """Rows in `norm_output`, where a target has them."""
        self.gpu.copy_h2d(np.ascontiguousarray(x).reshape(-1).view(np.uint8), self.ctx.buffers.norm_output())
        return self.ctx.buffers.norm_output()

    def run(self, layer: MoeLayer, x: Array) -> Array:
        """x BF16 [h] or [rows, h] through the layer; outputs are poisoned first."""
        stream, buffers = self.gpu.default_stream(), self.ctx.buffers
        at = self.put(x)
        self.gpu.memset(buffers.moe_output(), 0xA5, x.nbytes)
        forward = layer.forward(at, self.ctx, stream) if x.ndim == 1 else None
        out = forward or layer.forward_rows(at, len(x), self.ctx, stream)
        return download(self.gpu, out, x.shape)

    def logits(self, rows: int) -> Array:
        """The router logits of the last run, [rows, E]: which experts are chosen follows from these."""
        return download(self.gpu, self.ctx.buffers.gate_logits(), (rows, self.config.num_experts))

    def expected(self, x: Array, logits: Array) -> tuple[Array, Array]:
        """(output, sum of its terms' magnitudes), FP64 [h], of one row with the experts that `logits` choose."""
        values, row = logits.astype(np.float64), x.astype(np.float64)
        chosen = np.lexsort((np.arange(len(values)), -values))[: self.config.num_experts_per_tok]
        weights = np.exp(values - values.max())
        weights /= weights.sum()
        weights = weights[chosen]
        if self.config.norm_topk_prob:
            weights /= weights.sum()
        gate = 1.0 if self.shared_gate is None else 1.0 / (1.0 + np.exp(-(self.shared_gate @ row)))
        output, terms = np.zeros(len(row)), np.zeros(len(row))
        for weight, expert in (
            *((w, self.experts[e]) for w, e in zip(weights, chosen, strict=True)),
            (gate, self.shared),
        ):
            if expert is not None:
                gate_proj, up_proj, down_proj = expert
                g = gate_proj @ row
                activation = g / (1.0 + np.exp(-g)) * (up_proj @ row)
                output += weight * (down_proj @ activation)
                terms += weight * (np.abs(down_proj) @ np.abs(activation))
        return output, terms


def moe_rig(
    gpu: GpuBackend,
    rng: np.random.Generator,
    kind: Kind,
    *,
    missing: tuple[int, ...] = (),
    gated: bool = True,
    rows: int = 8,
    **changes: Any,
) -> MoeRig:
    """`missing` experts are elsewhere; `gated`: the shared expert has a gate."""
    config = moe_config(**changes)
    h, inter, shared_inter = config.hidden_size, config.moe_intermediate_size, config.shared_expert_intermediate_size

    def expert(width: int) -> tuple[Any, tuple[Array, ...] | None]:
        if width == 0:
            return kind.expert(kind.null(), kind.null(), kind.null()), None
        parts = [kind.projection(gpu, rng, n, k) for n, k in ((width, h), (width, h), (h, width))]
        return kind.expert(*(part[0] for part in parts)), tuple(part[1] for part in parts)

    experts = [expert(0 if e in missing else inter) for e in range(config.num_experts)]
    shared = expert(shared_inter)
    router, shared_gate = _bf16(gpu, rng, config.num_experts, h), _bf16(gpu, rng, 1, h)
    weights = MoeWeights(
        gate=router[0],
        shared_expert=shared[0],
        shared_expert_gate=shared_gate[0] if gated else DenseWeight(DevicePtr.NULL),
        experts=[each[0] for each in experts],
    )
    arena = BufferArena(config, rows, 64, 16, 1, gpu)
    return MoeRig(
        gpu, config, weights, router[1], [each[1] for each in experts], shared[1],
        shared_gate[1][0] if gated else None, ForwardContext(arena, gpu, config, ModelLevers()),
    )  # fmt: skip
