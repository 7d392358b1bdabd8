# SPDX-License-Identifier: AGPL-3.0-only
"""Small random matrices in the formats of DeepSeek-V4, a mixture of experts of them, and its output in FP64.

Values of codes are written out here from the formats; nothing of the package decodes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from spark_py.model.layers.deepseek_v4 import V4ExpertWeights, V4FfnShape, V4FfnWeights, V4RouterWeights, V4Weight
from spark_py.model.weight_map import DenseWeight, Fp8Weight, Mxfp4Weight
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.testing import F32, Array, f64, normal, upload

FFN = V4FfnShape(hidden_size=64, num_experts=9, top_k=3, inter=32, swiglu_limit=0.75, vocab_size=23)
"""A limit that activations of about 1 exceed on either side."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_GAP = 2.0**-5  # between the selection scores of the last expert chosen and the first one not


class Matrix(Protocol):
    """A weight [n, k]: its values in FP64, and the same on a device."""

    def values(self) -> Array: ...

    def to_device(self, gpu: GpuBackend) -> V4Weight: ...


@dataclass(frozen=True)
class Bf16:
    """BF16 of variance 1 / k."""

    stored: Array

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int, k: int) -> Bf16:
        return cls(normal(rng, n, k, scale=k**-0.5))

    def values(self) -> Array:
        return f64(self.stored)

    def to_device(self, gpu: GpuBackend) -> V4Weight:
        return DenseWeight(upload(gpu, self.stored), self.stored.shape)


@dataclass(frozen=True)
class Mxfp4:
    """Codes u8 [n, k / 2] and E8M0 bytes [n, k / 32]; the last two fields name misreadings."""

    codes: Array
    scales: Array
    high_first: bool = False
    scale_as_number: bool = False

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int, k: int) -> Mxfp4:
        """Scales of 2^-2 to 2^1 of 1 / sqrt(k), about."""
        middle = 125 - int(np.log2(k) / 2)
        scales = rng.integers(middle, middle + 4, (n, k // 32), dtype=np.uint8)
        return cls(rng.integers(0, 256, (n, k // 2), dtype=np.uint8), scales)

    def values(self) -> Array:
        low, high = E2M1[self.codes & 15], E2M1[self.codes >> 4]
        pairs = np.stack([high, low] if self.high_first else [low, high], axis=-1)
        scales = f64(self.scales) if self.scale_as_number else 2.0 ** (f64(self.scales) - 127)
        result: Array = pairs.reshape(len(self.codes), -1) * np.repeat(scales, 32, axis=1)
        return result

    def to_device(self, gpu: GpuBackend) -> V4Weight:
        n, half = self.codes.shape
        return Mxfp4Weight(upload(gpu, self.codes), upload(gpu, self.scales), n, 2 * half)


@dataclass(frozen=True)
class Fp8:
    """E4M3 [n, k] and an E8M0 byte a block of 128 x 128, on the device FP32."""

    codes: Array
    scales: Array
    scale_as_number: bool = False

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int, k: int) -> Fp8:
        codes = (rng.standard_normal((n, k)) * 16).astype(ml_dtypes.float8_e4m3fn)
        middle = 123 - int(np.log2(k) / 2)
        return cls(codes, rng.integers(middle - 1, middle + 2, (-(-n // 128), -(-k // 128)), dtype=np.uint8))

    def values(self) -> Array:
        n, k = self.codes.shape
        scales = f64(self.scales) if self.scale_as_number else 2.0 ** (f64(self.scales) - 127)
        result: Array = f64(self.codes) * np.repeat(np.repeat(scales, 128, 0)[:n], 128, 1)[:, :k]
        return result

    def to_device(self, gpu: GpuBackend) -> V4Weight:
        scales = (2.0 ** (f64(self.scales) - 127)).astype(F32)
        return Fp8Weight(upload(gpu, self.codes.view(np.uint8)), upload(gpu, scales), *self.codes.shape)


@dataclass(frozen=True)
class Expert:
    w1: Matrix
    w3: Matrix
    w2: Matrix

    @classmethod
    def draw(cls, rng: np.random.Generator, kinds: tuple[Any, Any, Any], shape: V4FfnShape = FFN) -> Expert:
        h, inter = shape.hidden_size, shape.inter
        sizes = ((inter, h), (inter, h), (h, inter))
        return cls(*(kind.draw(rng, n, k) for kind, (n, k) in zip(kinds, sizes, strict=True)))

    def to_device(self, gpu: GpuBackend) -> V4ExpertWeights:
        return V4ExpertWeights(*(each.to_device(gpu) for each in (self.w1, self.w3, self.w2)))

    def misread(self, **changes: Any) -> Expert:
        """The expert with another reading of its codes."""
        parts: list[Any] = [self.w1, self.w3, self.w2]
        return Expert(*(replace(part, **changes) for part in parts))


@dataclass(frozen=True)
class HostFfn:
    """A mixture on the host: gate BF16 [E, h]; bias FP32 [E], or a table i64 [V, k]."""

    gate: Array
    bias: Array | None
    table: Array | None
    experts: tuple[Expert, ...]
    shared: Expert
    shape: V4FfnShape = field(default=FFN)

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        routed: Any = Mxfp4,
        shared: tuple[Any, Any, Any] = (Fp8, Fp8, Fp8),
        *,
        hashed: bool = False,
        shape: V4FfnShape = FFN,
    ) -> HostFfn:
        experts, k = shape.num_experts, shape.top_k
        table = np.stack([rng.permutation(experts)[:k] for _ in range(shape.vocab_size)]).astype(np.int64)
        return cls(
            # Logits of about 2: scores between 0.2 and 2, biases that change the choice.
            gate=normal(rng, experts, shape.hidden_size, scale=2 * shape.hidden_size**-0.5),
            bias=None if hashed else rng.uniform(-1, 1, experts).astype(F32),
            table=table if hashed else None,
            experts=tuple(Expert.draw(rng, (routed,) * 3, shape) for _ in range(experts)),
            shared=Expert.draw(rng, shared, shape),
            shape=shape,
        )

    def to_device(self, gpu: GpuBackend) -> V4FfnWeights:
        router = V4RouterWeights(
            DenseWeight(upload(gpu, self.gate), self.gate.shape),
            DevicePtr.NULL if self.bias is None else upload(gpu, self.bias),
            DevicePtr.NULL if self.table is None else upload(gpu, self.table),
        )
        return V4FfnWeights(router, [each.to_device(gpu) for each in self.experts], self.shared.to_device(gpu))

    def rows(self, rng: np.random.Generator, count: int) -> Array:
        """BF16 [count, h] whose experts no rounding of the logits changes."""
        found: list[Array] = []
        while len(found) < count:
            row = normal(rng, self.shape.hidden_size)
            scores = np.sort(self._scores(row) + (0.0 if self.bias is None else f64(self.bias)))[::-1]
            if scores[self.shape.top_k - 1] - scores[self.shape.top_k] > _GAP:
                found.append(row)
        return np.stack(found)

    def _scores(self, row: Array) -> Array:
        scores: Array = np.sqrt(np.log1p(np.exp(f64(self.gate) @ f64(row))))
        return scores

    def output(
        self,
        row: Array,
        token: int = 0,
        *,
        bias_in_weights: bool = False,
        scaling: float | None = None,
        normalise: bool = True,
        sigmoid: bool = False,
        limits: tuple[float, float] | None = None,
        gate_below: bool = False,
    ) -> Array:
        """FP64 [h] of a row BF16 [h]. `limits` are those of the routed experts and of the shared one; the other
        arguments name misreadings."""
        shape, x, scores = self.shape, f64(row), self._scores(row)
        if sigmoid:
            scores = 1.0 / (1.0 + np.exp(-f64(self.gate) @ x))
        choice = scores if self.bias is None else scores + f64(self.bias)
        chosen = np.argsort(-choice, kind="stable")[: shape.top_k] if self.table is None else self.table[token]
        weights = (choice if bias_in_weights else scores)[chosen]
        weights = weights / weights.sum() if normalise else weights
        weights = weights * (shape.routed_scaling if scaling is None else scaling)
        routed_limit, shared_limit = limits or (shape.swiglu_limit, shape.swiglu_limit)

        def through(expert: Expert, limit: float) -> Array:
            g, u = expert.w1.values() @ x, expert.w3.values() @ x
            g = np.clip(g, -limit if gate_below else None, limit)
            with np.errstate(over="ignore"):  # of a misread scale
                result: Array = expert.w2.values() @ (g / (1.0 + np.exp(-g)) * np.clip(u, -limit, limit))
            return result

        total = through(self.shared, shared_limit)
        for weight, number in zip(weights, chosen, strict=True):
            total = total + weight * through(self.experts[number], routed_limit)
        return total
