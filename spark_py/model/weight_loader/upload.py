# SPDX-License-Identifier: AGPL-3.0-only
"""Weights of any stored format on the device: as BF16, or block-scaled E4M3 or MXFP4 as the checkpoint has it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from ...runtime.errors import MissingWeightError, SparkError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend
from ...runtime.weights import WeightDtype, WeightStore, WeightTensor
from .dequant import Fp8Scales, fp8_scale_shapes
from .dequant_plan import WeightFormat, WeightPlan, plan_weight, read_scale, read_weight

__all__ = [
    "TO_BF16",
    "free_quietly",
    "in_store",
    "insert",
    "is_block_scaled",
    "plan_for_device",
    "upload_weights",
]

log = logging.getLogger("spark_py.model.weight_loader")

TO_BF16: Mapping[WeightDtype | str, WeightDtype | str] = {WeightDtype.F32: WeightDtype.BF16}
"""What `WeightStore.load` rounds of the tensors that are not quantised."""
_FP8_FORMATS = frozenset({WeightFormat.FP8_BLOCK, WeightFormat.FP8_ROW, WeightFormat.FP8_TENSOR})


def in_store(store: WeightStore, name: str) -> bool:
    """Whether a file or the device has the weight, packed or not."""
    return name in store or name + "_packed" in store


def plan_for_device(store: WeightStore, name: str, ignore_modules: Iterable[str] = ()) -> WeightPlan:
    """`plan_weight`, and for a tensor that is on the device alone a plan that says so: it has to be BF16."""
    try:
        return plan_weight(store, name, ignore_modules)
    except MissingWeightError:
        if not store.is_loaded(name):
            raise
    tensor = store.get(name)
    if tensor.dtype is not WeightDtype.BF16:
        raise UnsupportedError(f"tensor {name!r} is on the device as {tensor.dtype}, without a file: BF16 is needed")
    return WeightPlan(name, WeightFormat.BF16, tensor.shape)


def is_block_scaled(store: WeightStore, plan: WeightPlan) -> bool:
    """Whether a weight is E4M3 with one scale a block of 128 x 128, a single one where it is no larger than a block."""
    if plan.format not in _FP8_FORMATS:
        return False
    n, k = plan.shape
    return store.info(plan.scale).shape in fp8_scale_shapes(n, k)[Fp8Scales.BLOCK]


def upload_weights(
    store: WeightStore,
    gpu: GpuBackend,
    plans: Iterable[WeightPlan],
    native: Collection[str] = (),
    reserve_bytes: int = 0,
) -> None:
    """Have the tensors of `plans` on the device, each under its plan's name; the store owns them.

    Quantised ones become BF16 on the host, F32 is rounded to it. Those that `native` names stay as stored, and their
    scales are on the device too, under their own names: those of E4M3 widened to FP32, those of MXFP4 as E8M0. What is
    on the device already is left as it is.

    UnsupportedError names a tensor that is on the device in another form; otherwise errors as `WeightStore.load` and
    `read_weight`. All memory is asked for before the first allocation, `reserve_bytes` with it, and after an error
    nothing of this call is left on the device.
    """
    wanted = {plan.name: plan for plan in plans}
    scales = {plan.scale: plan for plan in wanted.values() if plan.name in native}
    for name, dtype in (
        *((name, store.info(name).dtype if name in native else WeightDtype.BF16) for name in wanted),
        *((name, _scale_dtype(plan)) for name, plan in scales.items()),
    ):
        if store.is_loaded(name) and store.get(name).dtype is not dtype:
            raise UnsupportedError(f"tensor {name!r} is on the device as {store.get(name).dtype}: {dtype} is needed")
    made = [
        p for p in wanted.values() if p.format.is_quantised and p.name not in native and not store.is_loaded(p.name)
    ]
    scaled = [plan for name, plan in scales.items() if not store.is_loaded(name)]
    need = sum(2 * math.prod(plan.shape) for plan in made)
    need += sum(math.prod(store.info(plan.scale).shape) * _scale_dtype(plan).numpy.itemsize for plan in scaled)
    direct = [name for name, plan in wanted.items() if not plan.format.is_quantised or name in native]
    fresh = [name for name in direct if not store.is_loaded(name)]
    loaded = list(store.load(gpu, fresh, reserve_bytes=need + reserve_bytes, convert=TO_BF16))
    try:
        for plan in scaled:
            scale, dtype = read_scale(store, plan), _scale_dtype(plan)
            if dtype is not WeightDtype.F32:  # powers of two, whose exponents are the codes
                scale = scale.astype(dtype.numpy)
            insert(store, gpu, plan.scale, scale, dtype)
            loaded.append(plan.scale)
        for plan in made:
            insert(store, gpu, plan.name, read_weight(store, plan.name).bf16(), WeightDtype.BF16)
            loaded.append(plan.name)
    except BaseException:
        for name in loaded:
            free_quietly(gpu, store.remove(name).ptr)
        raise
    if made:
        log.debug("%s: dequantised %d tensors to BF16", store.source, len(made))


def _scale_dtype(plan: WeightPlan) -> WeightDtype:
    """Of the scales of a weight that stays as stored, on the device."""
    return WeightDtype.F8_E8M0 if plan.format is WeightFormat.MXFP4 else WeightDtype.F32


def insert(store: WeightStore, gpu: GpuBackend, name: str, array: np.ndarray[Any, Any], dtype: WeightDtype) -> None:
    """Upload an array of the host as the tensor `name`; the store owns it."""
    ptr = gpu.alloc(array.nbytes, label=f"weight {name}")
    try:
        gpu.copy_h2d(np.ascontiguousarray(array).reshape(-1).view(np.uint8), ptr)
    except BaseException:
        free_quietly(gpu, ptr)
        raise
    store.insert(name, WeightTensor(ptr, array.shape, dtype))


def free_quietly(gpu: GpuBackend, ptr: DevicePtr) -> None:
    """The error that brought us here matters more than one of this call."""
    try:
        gpu.free(ptr)
    except SparkError as error:
        log.warning("freeing after a failed upload: %s", error)
