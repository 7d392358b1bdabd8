# SPDX-License-Identifier: AGPL-3.0-only
"""The tensors of DeepSeek-V4 from the files to the device: what each is stored as, and what it becomes.

Block-scaled E4M3 stays so, its E8M0 scales widened to FP32, which is exact. A code times a power of two is a BF16
number (unless it is below 2^-133), so that as BF16 a tensor would give the same products at twice the bytes. MXFP4
experts stay so too: see `Mxfp4Weight` for what NVFP4 would lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...ops.moe_hash_route import check_hash_table
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import ModelConfig
from ..layers.deepseek_v4 import V4Weight
from ..weight_map import DenseWeight, Fp8Weight, Mxfp4Weight
from .deepseek_v4_names import Kind, V4Tensor
from .dequant_codes import Array
from .dequant_plan import WeightFormat, WeightPlan, plan_weight
from .upload import free_quietly, insert, is_block_scaled, upload_weights

__all__ = ["V4Loaded", "V4Plans"]

_FP8_STEP = 16  # elements of a row that the E4M3 product loads at once


@dataclass(frozen=True)
class V4Loaded:
    """Tensors on the device, by their published names; the store owns them."""

    store: WeightStore
    plans: dict[str, WeightPlan]
    native: frozenset[str]

    def address(self, name: str) -> DevicePtr:
        """Of a tensor that is not a weight."""
        return self.store.get(self.plans[name].name).ptr

    def dense(self, name: str) -> DenseWeight:
        """A BF16 tensor."""
        return DenseWeight(self.address(name), self.plans[name].shape)

    def matrix(self, name: str) -> V4Weight:
        """A matrix in the format that it has."""
        plan = self.plans[name]
        if plan.name not in self.native:
            return self.dense(name)
        kind = Mxfp4Weight if plan.format is WeightFormat.MXFP4 else Fp8Weight
        return kind(self.address(name), self.store.get(plan.scale).ptr, *plan.shape)

    def grouped(self, name: str) -> DenseWeight | Fp8Weight:
        """A matrix of `Kind.GROUPED`."""
        weight = self.matrix(name)
        assert not isinstance(weight, Mxfp4Weight)
        return weight


@dataclass(frozen=True)
class V4Plans:
    """What the headers say of tensors: how each is stored, checked against its shape and kind. `tables` were read."""

    store: WeightStore
    plans: dict[str, WeightPlan]
    kinds: dict[str, Kind]
    tables: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, store: WeightStore, tensors: Sequence[tuple[V4Tensor, str]], config: ModelConfig) -> V4Plans:
        """Plans of tensors that are in the store under the names beside them.

        UnsupportedError for a dtype that a tensor's kind does not take, InvalidArgumentError for another shape or a
        table with an entry that is no expert, else errors as `plan_weight`.
        """
        plans = {tensor.name: _plan(store, tensor, name, config) for tensor, name in tensors}
        kinds = {tensor.name: tensor.kind for tensor, _ in tensors}
        tables = {name: store.read(plans[name].name) for name, kind in kinds.items() if kind is Kind.TABLE}
        for table in tables.values():
            check_hash_table(table, config.num_experts)
        return cls(store, plans, kinds, tables)

    def accounted(self) -> set[str]:
        """The tensors of the files that these plans answer for, scales among them."""
        return {name for plan in self.plans.values() for name in (plan.name, *plan.accounted)}

    def upload(self, gpu: GpuBackend) -> V4Loaded:
        """All of the tensors on the device; after an error nothing of this call is left there."""
        store, native = self.store, self._native()
        before = {name for name in store.names() if store.is_loaded(name)}
        exact = [self.plans[name] for name, kind in self.kinds.items() if kind in (Kind.F32, Kind.TABLE)]
        weights = [plan for name, plan in self.plans.items() if self.kinds[name] not in (Kind.F32, Kind.TABLE)]
        for plan in exact:
            if plan.name in before and store.get(plan.name).dtype is WeightDtype.BF16:
                raise UnsupportedError(f"tensor {plan.name!r} is on the device as BF16: F32 is needed")
        reserve = sum(_exact_bytes(store, plan) for plan in exact if plan.name not in before)
        try:
            upload_weights(store, gpu, weights, native, reserve_bytes=reserve)
            store.load(gpu, [plan.name for plan in exact if store.info(plan.name).dtype is WeightDtype.F32])
            for name, kind in self.kinds.items():
                if not store.is_loaded(self.plans[name].name):
                    self._insert(gpu, name, kind)
        except BaseException:
            for name in store.names():
                if store.is_loaded(name) and name not in before:
                    free_quietly(gpu, store.remove(name).ptr)
            raise
        return V4Loaded(store, self.plans, native)

    def _insert(self, gpu: GpuBackend, name: str, kind: Kind) -> None:
        """A table, or a BF16 tensor as F32."""
        stored = self.plans[name].name
        if kind is Kind.TABLE:
            insert(self.store, gpu, stored, self.tables[name], WeightDtype.I64)
        else:
            insert(self.store, gpu, stored, self.store.read(stored).astype(np.float32), WeightDtype.F32)

    def _native(self) -> frozenset[str]:
        """Tensors of the files that stay as they are; the experts of a block only where all of them are MXFP4."""
        found = set()
        experts: dict[str, list[WeightPlan]] = {}
        for name, plan in self.plans.items():
            if self.kinds[name] is Kind.EXPERT:
                experts.setdefault(name.partition(".experts.")[0], []).append(plan)
            elif _stays(self.store, plan, self.kinds[name]):
                found.add(plan.name)
        for block in experts.values():
            if all(plan.format is WeightFormat.MXFP4 for plan in block):
                found |= {plan.name for plan in block}
        return frozenset(found)


def _stays(store: WeightStore, plan: WeightPlan, kind: Kind) -> bool:
    if plan.format is WeightFormat.MXFP4:
        return kind is Kind.MATRIX
    if kind not in (Kind.MATRIX, Kind.GROUPED):
        return False
    return is_block_scaled(store, plan) and plan.shape[1] % _FP8_STEP == 0


def _plan(store: WeightStore, tensor: V4Tensor, name: str, config: ModelConfig) -> WeightPlan:
    if tensor.kind is Kind.TABLE:
        info = store.info(name)
        if info.dtype is not WeightDtype.I64:
            raise UnsupportedError(f"tensor {name!r} is {info.dtype}: a table of experts is I64")
        # The format of a table is not asked for.
        plan = WeightPlan(name, WeightFormat.F32, info.shape)
    else:
        plan = plan_weight(store, name, config.ignore_modules)
        if tensor.kind in (Kind.PLAIN, Kind.F32) and plan.format.is_quantised:
            raise UnsupportedError(f"tensor {name!r} is {plan.format}: here it is BF16 or F32")
    if plan.shape != tensor.shape:
        raise InvalidArgumentError(f"shape of {name}", plan.shape, f"{tensor.shape} is needed by the configuration")
    return plan


def _exact_bytes(store: WeightStore, plan: WeightPlan) -> int:
    return math.prod(plan.shape) * (8 if store.info(plan.name).dtype is WeightDtype.I64 else 4)
