# SPDX-License-Identifier: AGPL-3.0-only
"""What the loaders of draft heads share: plans that are checked, native groups, experts, lists in messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import ModelConfig
from ..weight_map import DenseExpertWeight, DenseWeight, Fp8ExpertWeight, Fp8Weight
from .dequant_plan import WeightPlan
from .upload import is_block_scaled, plan_for_device

__all__ = ["MISSING_HINT", "checked_plan", "expert_of", "free_bf16", "listed", "native_names", "on_device"]

MISSING_HINT = (
    "the checkpoint lacks (part of) its MTP module: take one that was saved with it, or decode without drafts"
)
_LISTED = 12


def checked_plan(store: WeightStore, name: str, shape: tuple[int, ...], plain: bool, config: ModelConfig) -> WeightPlan:
    """The plan of a tensor of that shape; `plain`: it has to be BF16, or F32, which is rounded. UnsupportedError and
    InvalidArgumentError name one that is not."""
    if plain and not store.is_loaded(name):
        dtype = store.info(name).dtype
        if dtype not in (WeightDtype.BF16, WeightDtype.F32):
            raise UnsupportedError(f"tensor {name!r} is {dtype}: here an MTP head takes BF16, or F32, which is rounded")
    plan = plan_for_device(store, name, config.ignore_modules)
    if plan.shape != shape:
        raise InvalidArgumentError(f"shape of {name}", plan.shape, f"{shape} is needed by the configuration")
    return plan


def native_names(store: WeightStore, plans: Mapping[str, WeightPlan], groups: Iterable[Sequence[str]]) -> set[str]:
    """The tensors of the groups that are block-scaled E4M3 from the first to the last."""
    whole = [group for group in groups if all(is_block_scaled(store, plans[name]) for name in group)]
    return {name for group in whole for name in group}


def on_device(store: WeightStore, plan: WeightPlan, native: bool) -> DenseWeight | Fp8Weight:
    """A weight that `upload_weights` has put on the device."""
    tensor = store.get(plan.name)
    return (
        Fp8Weight(tensor.ptr, store.get(plan.scale).ptr, *plan.shape)
        if native
        else DenseWeight(tensor.ptr, tensor.shape)
    )


def expert_of(parts: Sequence[DenseWeight | Fp8Weight]) -> DenseExpertWeight | Fp8ExpertWeight:
    """gate_proj, up_proj and down_proj, all of one format."""
    dense = [part for part in parts if isinstance(part, DenseWeight)]
    if len(dense) == len(parts):
        return DenseExpertWeight(*dense)
    return Fp8ExpertWeight(*(part for part in parts if isinstance(part, Fp8Weight)))


def free_bf16(store: WeightStore, prefix: str, kept: Collection[DevicePtr], gpu: GpuBackend) -> None:
    """Free the store's BF16 tensors on the device whose names begin with `prefix`, but for those of `kept`."""
    for name in store.names():
        if store.is_loaded(name) and name.startswith(prefix):
            tensor = store.get(name)
            if tensor.dtype is WeightDtype.BF16 and tensor.ptr not in kept:
                gpu.free(store.remove(name).ptr)


def listed(found: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    some = ", ".join(repr(name) for name in found[:_LISTED])
    return some if len(found) <= _LISTED else f"{some} and {len(found) - _LISTED} more"
