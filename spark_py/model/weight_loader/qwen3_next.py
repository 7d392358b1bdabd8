# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the MTP part of `weight_loader/`: the draft head of Qwen3-Next, 3.5 and 3.6, dense or with experts.

Its tensors begin with `mtp.` and may be in the model's own shards or in `mtp.safetensors`; the store knows.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from ...runtime.errors import MissingWeightError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightStore
from ..config import ModelConfig
from ..weight_map import DenseExpertWeight, DenseWeight, Fp8Weight, MtpWeights
from . import mtp_names as names
from .dequant_plan import check_scales_applied
from .head_plans import MISSING_HINT, checked_plan, expert_of, free_bf16, listed, native_names, on_device
from .upload import in_store, upload_weights

__all__ = ["free_copied", "has_dense_ffn", "load_mtp_weights"]

log = logging.getLogger("spark_py.model.weight_loader")

_PREFIX = "mtp."
_MUST_BE_READ = re.compile(r"mtp\.layers\.(?!0\.)|mtp\.embed_tokens|lm_head|shared_head")
"""Tensors that change what the others mean. To leave one of them aside would give a head that runs and drafts noise."""
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
    plans = {name: checked_plan(store, name, shape, name in plain, config) for name, shape in shapes.items()}
    accounted = {scale for plan in plans.values() for scale in plan.accounted}
    check_scales_applied(store, accounted, _PREFIX)
    _check_rest(store, accounted | {plan.name for plan in plans.values()})

    native: set[str] = set()
    if native_fp8:
        groups = [[name] for name, _ in single.values()]
        every = [name for expert in experts for name, _ in expert.values()]
        groups += [] if stacked else [every]  # stacks are BF16, and one format holds for all experts
        native = native_names(store, plans, groups)
    upload_weights(store, gpu, plans.values(), {plans[name].name for name in native})

    def weight(name: str) -> DenseWeight | Fp8Weight:
        return on_device(store, plans[name], name in native)

    fields: dict[str, Any] = {field: weight(name) for field, (name, _) in single.items()}
    made = [expert_of([weight(expert[part][0]) for part in names.PROJECTIONS]) for expert in experts]
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
    free_bf16(store, _PREFIX, kept, gpu)


def _missing_hint(store: WeightStore, stacked: bool) -> str:
    half = [] if stacked else [name for name in names.STACKED if name in store]
    return f"{MISSING_HINT}; of the stacked experts there is {half[0]!r} alone" if half else MISSING_HINT


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
        raise UnsupportedError(f"tensors that an MTP head of one module cannot take into account: {listed(needed)}")
    if rest:
        log.warning("tensors of the MTP module that nothing reads: %s", listed(rest))
