# SPDX-License-Identifier: AGPL-3.0-only
"""The MTP modules of MiniMax-M2 and GLM-4.5, one a layer behind the last. Rust's loader of MiniMax-M2 stops with an
error where it finds them."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...runtime.errors import InvalidArgumentError, MissingWeightError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import ModelConfig
from ..weight_map import DenseWeight, F32Weight, Fp8Weight, MtpWeights
from . import module_names as names
from .dequant_plan import WeightFormat, WeightPlan, check_scales_applied
from .head_plans import MISSING_HINT, checked_plan, expert_of, free_bf16, listed, native_names, on_device
from .mtp_names import PROJECTIONS, Named, is_plain
from .upload import free_quietly, in_store, insert, plan_for_device, upload_weights

__all__ = ["free_copied_modules", "load_mtp_modules", "modules_present"]

log = logging.getLogger("spark_py.model.weight_loader")

_HARMLESS = (".rotary_emb.inv_freq", ".k_scale", ".v_scale")
"""Ends of names that say nothing about weights: a table that follows from the configuration, and an FP8 cache's."""
_OWN_TABLES = {"embed_tokens": "embed_tokens.weight", "lm_head": "shared_head.head.weight"}
_F32_BYTES = 4


def modules_present(store: WeightStore, config: ModelConfig) -> int:
    """MTP modules of which the checkpoint has any tensor. MissingWeightError where one is left out before the last,
    UnsupportedError for more than the configuration has (0 there says nothing)."""
    layer, first = re.compile(r"model\.layers\.(\d+)\."), config.num_hidden_layers
    found = (layer.match(name) for name in store.names())
    there = sorted({int(match[1]) - first for match in found if match and int(match[1]) >= first})
    for index, module in enumerate(there):
        if module != index:
            missing = [name for name, _ in names.module_shapes(config, index).values()]
            raise MissingWeightError(missing, {}, str(store.source), f"{MISSING_HINT}; module {module} is there")
    if config.num_mtp_modules and len(there) > config.num_mtp_modules:
        raise UnsupportedError(
            f"the checkpoint has {len(there)} MTP modules, its configuration {config.num_mtp_modules}"
        )
    return len(there)


def load_mtp_modules(
    store: WeightStore, config: ModelConfig, gpu: GpuBackend, *, native_fp8: bool = False
) -> list[MtpWeights]:
    """Upload and check the tensors of every module that is there; the store owns them. Nothing is uploaded first and
    refused then.

    Norms and router are BF16, or F32, which is rounded; the router's bias is F32, or BF16, which is widened. All else
    may have any format of `plan_weight` and becomes BF16. With `native_fp8` what is block-scaled E4M3 stays so: a
    projection by itself, the shared expert, or all routed ones of a module, where all of it is. A module's embedding
    or LM head is loaded where it is not, bit for bit, the target's.

    MissingWeightError lists what is not there: all of module 0 where no module is, and the rest of one that is there in
    part. A module fewer than the configuration has is no error: the caller sees how many came. Otherwise the errors are
    those of `load_mtp_weights`, and UnsupportedError names tensors under a module's prefix that nothing reads.
    """
    found = [_ModulePlans.of(store, config, index) for index in range(max(1, modules_present(store, config)))]
    accounted = {scale for module in found for plan in module.plans.values() for scale in plan.accounted}
    for index, module in enumerate(found):
        prefix = names.module_prefix(config, index)
        left = [name for name in store.names() if name.startswith(prefix) and name.endswith(_HARMLESS)]
        check_scales_applied(store, {*accounted, *left}, prefix)
        module.check_rest(store, prefix, accounted)
    native = {name for module in found for name in module.native(store)} if native_fp8 else set()
    plans = {name: plan for module in found for name, plan in module.plans.items()}
    biases = {name for module in found for name, _ in module.bias.values()}
    fresh = [name for name in biases if not store.is_loaded(name)]
    before = {name for name in store.names() if store.is_loaded(name)}
    try:
        reserve = sum(_F32_BYTES * config.num_experts for _ in fresh)
        stored = {plans[name].name for name in native}
        weights = [plan for name, plan in plans.items() if name not in biases]
        upload_weights(store, gpu, weights, stored, reserve_bytes=reserve)
        for name in fresh:
            insert(store, gpu, name, store.read(name).astype(np.float32), WeightDtype.F32)
    except BaseException:
        for name in store.names():
            if store.is_loaded(name) and name not in before:
                free_quietly(gpu, store.remove(name).ptr)
        raise
    return [module.weights(store, native) for module in found]


def free_copied_modules(
    store: WeightStore, config: ModelConfig, modules: Sequence[MtpWeights], gpu: GpuBackend
) -> None:
    """Free the store's tensors that quantised heads have copies of once they are built: all BF16 ones but norms,
    router and tables."""
    kept = set()
    for module in modules:
        for field in MtpWeights.__slots__:
            weight = getattr(module, field)
            if isinstance(weight, DenseWeight) and (is_plain(field) or field in _OWN_TABLES):
                kept.add(weight.weight)
    for index in range(len(modules)):
        free_bf16(store, names.module_prefix(config, index), kept, gpu)


@dataclass(frozen=True, slots=True)
class _ModulePlans:
    """What the headers say of a module: fields of MtpWeights, the experts, and how each tensor is stored."""

    single: Named
    bias: Named
    tables: dict[str, str]
    shared: Named
    experts: list[Named]
    plans: dict[str, WeightPlan]

    @classmethod
    def of(cls, store: WeightStore, config: ModelConfig, index: int) -> _ModulePlans:
        prefix = names.module_prefix(config, index)
        norms = [norm for norm in names.FINAL_NORMS if prefix + norm in store]
        single = names.module_shapes(config, index, *norms[:1])
        bias, shared = names.bias_shape(config, prefix), names.shared_expert_shapes(config, prefix)
        experts = names.expert_shapes(config, prefix)
        shapes = dict(pair for group in (single, bias, shared, *experts) for pair in group.values())
        if missing := sorted(name for name in shapes if not in_store(store, name)):
            hint = f"{MISSING_HINT} (the configuration has num_mtp_modules {config.num_mtp_modules})"
            raise MissingWeightError(missing, {}, str(store.source), hint)
        plain = {name for field, (name, _) in single.items() if is_plain(field)}
        biases = {name for name, _ in bias.values()}
        plans = {
            name: _bias_plan(store, name, shape) if name in biases
            else checked_plan(store, name, shape, name in plain, config)
            for name, shape in shapes.items()
        }  # fmt: skip
        tables = {}
        for field, own in _OWN_TABLES.items():
            name = prefix + own
            if in_store(store, name) and not _is_targets(store, config, field, name):
                plans[name] = plan = plan_for_device(store, name, config.ignore_modules)
                if len(plan.shape) != 2 or plan.shape[1] != config.hidden_size:
                    raise InvalidArgumentError(
                        f"shape of {name}", plan.shape, f"[rows, {config.hidden_size}] is needed"
                    )
                tables[field] = name
        return cls(single, bias, tables, shared, experts, plans)

    def check_rest(self, store: WeightStore, prefix: str, accounted: set[str]) -> None:
        """UnsupportedError for tensors of the module that change what the others mean, or might."""
        read = accounted | {plan.name for plan in self.plans.values()} | {prefix + own for own in _OWN_TABLES.values()}
        rest = [n for n in store.names() if n.startswith(prefix) and n not in read and not n.endswith(_HARMLESS)]
        if rest:
            raise UnsupportedError(f"tensors that an MTP module of this kind cannot take into account: {listed(rest)}")

    def native(self, store: WeightStore) -> set[str]:
        """What stays block-scaled E4M3 in a head that takes it."""
        groups = [[name] for field, (name, _) in self.single.items() if not is_plain(field)]
        groups += [[name for name, _ in self.shared.values()]] if self.shared else []
        groups += [[name for expert in self.experts for name, _ in expert.values()]]
        return native_names(store, self.plans, groups)

    def weights(self, store: WeightStore, native: set[str]) -> MtpWeights:
        """The struct, of tensors that are on the device."""

        def weight(name: str) -> DenseWeight | Fp8Weight:
            return on_device(store, self.plans[name], name in native)

        def expert(named: Named) -> Any:
            return expert_of([weight(named[part][0]) for part in PROJECTIONS])

        fields: dict[str, Any] = {"q_norm": None, "k_norm": None}
        fields |= {field: weight(name) for field, (name, _) in self.single.items()}
        fields |= {field: weight(name) for field, name in self.tables.items()}
        for field, (name, shape) in self.bias.items():
            fields[field] = F32Weight(store.get(name).ptr, shape)
        shared = expert(self.shared) if self.shared else None
        return MtpWeights(**fields, shared_expert=shared, experts=tuple(expert(each) for each in self.experts))


def _bias_plan(store: WeightStore, name: str, shape: tuple[int, ...]) -> WeightPlan:
    found: Any = store.get(name) if store.is_loaded(name) else store.info(name)
    if found.dtype not in (WeightDtype.F32, WeightDtype.BF16):
        raise UnsupportedError(f"tensor {name!r} is {found.dtype}: a router's bias is F32, or BF16, which is widened")
    if found.shape != shape:
        raise InvalidArgumentError(f"shape of {name}", found.shape, f"{shape} is needed by the configuration")
    return WeightPlan(name, WeightFormat.BF16, shape)


def _is_targets(store: WeightStore, config: ModelConfig, field: str, name: str) -> bool:
    """Whether a module's table is the target's, bit for bit: then it is not held twice."""
    tied = config.tie_word_embeddings or field == "embed_tokens"
    target = "model.embed_tokens.weight" if tied else "lm_head.weight"
    try:
        own, other = store.info(name), store.info(target)
    except MissingWeightError:
        return False
    if (own.dtype, own.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(store.read(name).view(np.uint8), store.read(target).view(np.uint8))
