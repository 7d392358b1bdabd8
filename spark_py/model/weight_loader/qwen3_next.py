# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the MTP part of `weight_loader/`: the draft head of Qwen3-Next, 3.5 and 3.6, dense or with experts.

Its tensors begin with `mtp.` and may be in the model's own shards or in `mtp.safetensors`; the store knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ...runtime.errors import InvalidArgumentError, MissingWeightError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import ModelConfig
from ..weight_map import DenseExpertWeight, DenseWeight, Fp8ExpertWeight, Fp8Weight, MtpWeights
from . import mtp_names as names
from .dequant_plan import WeightPlan, check_scales_applied
from .upload import in_store, is_block_scaled, plan_for_device, upload_weights

__all__ = ["free_copied", "has_dense_ffn", "load_mtp_weights"]

log = logging.getLogger("spark_py.model.weight_loader")

_PREFIX = "mtp."
_HINT = "the checkpoint lacks (part of) its MTP module: take one that was saved with it, or decode without drafts"
_MUST_BE_READ = re.compile(r"mtp\.layers\.(?!0\.)|mtp\.embed_tokens|lm_head|shared_head")
"""Tensors that change what the others mean. To leave one of them aside would give a head that runs and drafts noise."""
_LISTED = 12
_BF16 = 2  # bytes


def load_mtp_weights(
    store: WeightStore, config: ModelConfig, gpu: GpuBackend, *, native_fp8: bool = False
) -> MtpWeights:
    """Upload and check the tensors of an MTP head; the store owns them. Nothing is uploaded first and refused then.

    The FFN is dense if `mlp.gate_proj.weight` exists and `mlp.gate.weight` does not; routed experts are two stacks if
    both stacks exist, and the slices that are handed out belong to the stack: they must not be freed. Norms, router
    and shared gate are BF16, or F32, which is rounded; so are stacks. All else may have any format of `plan_weight`
    and becomes BF16. With `native_fp8` what is block-scaled E4M3 stays so: a projection by itself, the dense FFN, or
    all experts, where all of it is.

    MissingWeightError lists every tensor that is not there. A WeightFormatError names a quantised tensor that has no
    scale, or one that does not fit, or is under the configuration's ignore_modules; UnreadScaleError lists scales that
    belong to nothing. UnsupportedError names a tensor of a dtype that is not offered, more modules than one, experts
    that the configuration does not have, and a tensor that the head would have to take into account (a table of its
    own, say); InvalidArgumentError names one of another shape. Other `mtp.` tensors that nothing reads are listed in a
    warning.
    """
    if config.num_mtp_modules > 1:
        raise UnsupportedError(f"{config.num_mtp_modules} MTP modules are configured: this head has one")
    dense = has_dense_ffn(store, config)
    stacked = not dense and all(name in store for name in names.STACKED)
    single = names.attention_tensor_shapes(config) | ({} if dense else names.routing_tensor_shapes(config))
    experts = [names.ffn_tensor_shapes(names.MLP, config.intermediate_size, config.hidden_size)]
    if not dense:
        experts = names.expert_tensor_shapes(config)[: 1 if stacked else None]
    stacks = names.stacked_tensor_shapes(config) if stacked else {}

    shapes = dict(pair for group in (single, *experts, stacks) for pair in group.values())
    if missing := sorted(name for name in shapes if not in_store(store, name)):
        raise MissingWeightError(missing, {}, str(store.source), _missing_hint(store, stacked))
    plain = {name for field, (name, _) in single.items() if names.is_plain(field)} | {n for n, _ in stacks.values()}
    plans = {name: _plan(store, name, shape, name in plain, config) for name, shape in shapes.items()}
    accounted = {scale for plan in plans.values() for scale in plan.accounted}
    check_scales_applied(store, accounted, _PREFIX)
    _check_rest(store, accounted | {plan.name for plan in plans.values()})

    native: set[str] = set()
    if native_fp8:
        groups = [[name] for name, _ in single.values()]
        every = [name for expert in experts for name, _ in expert.values()]
        groups += [] if stacked else [every]  # stacks are BF16, and one format holds for all experts
        native = _native(store, plans, groups)
    upload_weights(store, gpu, plans.values(), {plans[name].name for name in native})

    def weight(name: str) -> DenseWeight | Fp8Weight:
        plan = plans[name]
        tensor = store.get(plan.name)
        if name in native:
            return Fp8Weight(tensor.ptr, store.get(plan.scale).ptr, *plan.shape)
        return DenseWeight(tensor.ptr, tensor.shape)

    fields: dict[str, Any] = {field: weight(name) for field, (name, _) in single.items()}
    made = [_expert([weight(expert[part][0]) for part in names.PROJECTIONS]) for expert in experts]
    if dense:
        return MtpWeights(**fields, dense_ffn=made[0])
    routed = _slices(store) if stacked else made[1:]
    return MtpWeights(**fields, shared_expert=made[0], experts=tuple(routed))


def has_dense_ffn(store: WeightStore, config: ModelConfig) -> bool:
    """Whether a checkpoint's MTP head has a dense FFN and no experts: by the tensors that are there; where neither is,
    by the configuration, so that the right ones are missed. UnsupportedError for experts that the configuration does
    not have."""
    if names.ROUTER in store:
        if config.num_experts == 0:
            raise UnsupportedError(f"the MTP head has experts ({names.ROUTER!r}), the configuration none")
        return False
    return in_store(store, names.DENSE) or config.num_experts == 0


def free_copied(store: WeightStore, weights: MtpWeights, gpu: GpuBackend) -> None:
    """Free the store's tensors that a quantised head has copies of once it is built: all BF16 ones but norms, router
    and shared gate. `weights` is what `load_mtp_weights` gave for `store`; after this only such a head can use it."""
    plain = [getattr(weights, field) for field in weights.__slots__ if names.is_plain(field)]
    kept = {weight.weight for weight in plain if weight is not None}
    for name in store.names():
        if store.is_loaded(name) and name.startswith(_PREFIX):
            tensor = store.get(name)
            if tensor.dtype is WeightDtype.BF16 and tensor.ptr not in kept:
                gpu.free(store.remove(name).ptr)


def _missing_hint(store: WeightStore, stacked: bool) -> str:
    half = [] if stacked else [name for name in names.STACKED if name in store]
    return f"{_HINT}; of the stacked experts there is {half[0]!r} alone" if half else _HINT


def _plan(store: WeightStore, name: str, shape: tuple[int, ...], plain: bool, config: ModelConfig) -> WeightPlan:
    if plain and not store.is_loaded(name):
        dtype = store.info(name).dtype
        if dtype not in (WeightDtype.BF16, WeightDtype.F32):
            raise UnsupportedError(f"tensor {name!r} is {dtype}: here an MTP head takes BF16, or F32, which is rounded")
    plan = plan_for_device(store, name, config.ignore_modules)
    if plan.shape != shape:
        raise InvalidArgumentError(f"shape of {name}", plan.shape, f"{shape} is needed by the configuration")
    return plan


def _native(store: WeightStore, plans: dict[str, WeightPlan], groups: Iterable[Sequence[str]]) -> set[str]:
    """The tensors of the groups that are block-scaled E4M3 from the first to the last."""
    whole = [group for group in groups if all(is_block_scaled(store, plans[name]) for name in group)]
    return {name for group in whole for name in group}


def _expert(parts: Sequence[DenseWeight | Fp8Weight]) -> DenseExpertWeight | Fp8ExpertWeight:
    dense = [part for part in parts if isinstance(part, DenseWeight)]
    if len(dense) == len(parts):
        return DenseExpertWeight(*dense)
    return Fp8ExpertWeight(*(part for part in parts if isinstance(part, Fp8Weight)))


def _slices(store: WeightStore) -> list[DenseExpertWeight]:
    """The experts within the two stacks [E, 2I, h] and [E, h, I], gate rows before up rows."""
    gate_up, down = (store.get(name) for name in names.STACKED)
    count, h, inter = down.shape
    size = inter * h * _BF16

    def expert(e: int) -> DenseExpertWeight:
        gate = gate_up.ptr.offset(2 * e * size)
        return DenseExpertWeight(
            DenseWeight(gate, (inter, h)),
            DenseWeight(gate.offset(size), (inter, h)),
            DenseWeight(down.ptr.offset(e * size), (h, inter)),
        )

    return [expert(e) for e in range(count)]


def _check_rest(store: WeightStore, read: set[str]) -> None:
    rest = [name for name in store.names() if name.startswith(_PREFIX) and name not in read]
    if needed := [name for name in rest if _MUST_BE_READ.search(name)]:
        raise UnsupportedError(f"tensors that an MTP head of one module cannot take into account: {_listed(needed)}")
    if rest:
        log.warning("tensors of the MTP module that nothing reads: %s", _listed(rest))


def _listed(found: Sequence[str]) -> str:
    some = ", ".join(repr(name) for name in found[:_LISTED])
    return some if len(found) <= _LISTED else f"{some} and {len(found) - _LISTED} more"
