# SPDX-License-Identifier: AGPL-3.0-only
"""Which format a checkpoint tensor is stored in, which scales belong to it, and the weight that they make together.

A tensor's own dtype decides, not what the configuration says of the model. Scales are found by name:

| stored         | scale of a row, block or group                | factor of the whole tensor                     |
|----------------|-----------------------------------------------|------------------------------------------------|
| BF16, F32      |                                               |                                                |
| F8_E4M3        | F32, BF16 or E8M0 in `weight_scale_inv`,      |                                                |
|                | `weight_scale` or `scale`                     |                                                |
| U8, I8 or F4   | E4M3 [N, K / 16], the same names: NVFP4       | `weight_scale_2`, a multiplier (modelopt), or  |
|                |                                               | `weight_global_scale`, a divisor               |
|                |                                               | (compressed-tensors)                           |
| U8, I8 or F4   | E8M0 (or U8) [N, K / 32], the same: MXFP4     |                                                |

Packed FP4 may be called `weight` or `weight_packed`. A name without `.weight` at its end takes `_scale_inv` and so on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ...runtime.errors import (
    AmbiguousScaleError,
    IgnoredModuleError,
    MissingScaleError,
    ScaleDtypeError,
    ScaleShapeError,
    ScaleValueError,
    UnreadScaleError,
    WeightFormatError,
    WeightScaleError,
)
from ...runtime.weights import WeightDtype, WeightInfo, WeightStore
from .dequant import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    Fp8Scales,
    dequant_fp8,
    dequant_mxfp4,
    dequant_nvfp4,
    fp8_scale_shapes,
    fp8_scales,
)
from .dequant_codes import Array, F32Array, round_to_bf16, widen_scale
from .ignore_modules import covering

__all__ = [
    "HostWeight",
    "WeightFormat",
    "WeightPlan",
    "check_scales_applied",
    "plan_weight",
    "read_factor",
    "read_scale",
    "read_weight",
]

log = logging.getLogger("spark_py.model.weight_loader")

_PACKED = frozenset({WeightDtype.U8, WeightDtype.I8, WeightDtype.F4})
_FP8_SCALE = (WeightDtype.F32, WeightDtype.BF16, WeightDtype.F8_E8M0)
_MULTIPLIER, _DIVISOR = "_scale_2", "_global_scale"
_LARGEST_MULTIPLIER, _USUAL_DIVISOR = 1e3, 1e3
_NVFP4_LARGEST = 6.0 * 448.0  # the largest code times the largest group scale


class WeightFormat(StrEnum):
    """How a tensor is stored."""

    BF16 = "bf16"
    F32 = "f32"
    FP8_TENSOR = "fp8_tensor"
    FP8_ROW = "fp8_row"
    FP8_BLOCK = "fp8_block"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"

    @property
    def is_quantised(self) -> bool:
        """Whether the tensor is codes that need scales."""
        return self not in (WeightFormat.BF16, WeightFormat.F32)


_FP8_FORMAT = {
    Fp8Scales.TENSOR: WeightFormat.FP8_TENSOR,
    Fp8Scales.ROW: WeightFormat.FP8_ROW,
    Fp8Scales.BLOCK: WeightFormat.FP8_BLOCK,
}


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What is known of a weight from the headers alone.

    `name` is the tensor that holds it, which may be `X.weight_packed` where `X.weight` was asked for. `shape` counts
    elements: [N, K] for packed codes too. `scale` and `factor` are the tensors applied to it, "" where the format has
    none. `activation_scales` belong to its input under quantised arithmetic and change nothing about the weight.
    `ignored_by` is the entry of ignore_modules that covers it, None where none does: it is not to be quantised either.
    """

    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    scale: str = ""
    factor: str = ""
    activation_scales: tuple[str, ...] = ()
    ignored_by: str | None = None

    @property
    def scales(self) -> tuple[str, ...]:
        """The scale tensors that are applied."""
        return tuple(name for name in (self.scale, self.factor) if name)

    @property
    def accounted(self) -> tuple[str, ...]:
        """Every scale that this weight answers for, applied or of activations: for `check_scales_applied`."""
        return self.scales + self.activation_scales


@dataclass(frozen=True, slots=True)
class HostWeight:
    """A weight on the host: its plan and FP32 values of the plan's shape."""

    plan: WeightPlan
    values: F32Array

    def bf16(self) -> Array:
        """The values rounded to BF16, nearest, ties to even; those of a BF16 tensor come back as they were,
        save that every NaN becomes the quiet one of its sign."""
        return round_to_bf16(self.values)


def plan_weight(store: WeightStore, name: str, ignore_modules: Iterable[str] = ()) -> WeightPlan:
    """Find out how the weight `name` is stored, and check types and shapes; reads headers only.

    MissingWeightError where no file has it; MissingScaleError; AmbiguousScaleError for two scales of one role, or both
    a `weight` and a `weight_packed`; ScaleDtypeError; ScaleShapeError; WeightScaleError for a factor that the format
    does not have; IgnoredModuleError for a quantised tensor under `ignore_modules` (`covering` has the rules of its
    entries); WeightFormatError for a dtype that no weight has, and quantised tensors that are no [N, K].
    """
    stem = _stem(name)
    info = store.info(_holder(store, name, stem))
    ignored_by = covering(info.name, ignore_modules)
    if info.dtype in (WeightDtype.BF16, WeightDtype.F32):
        plain = WeightFormat.BF16 if info.dtype is WeightDtype.BF16 else WeightFormat.F32
        return WeightPlan(info.name, plain, info.shape, ignored_by=ignored_by)
    if info.dtype is not WeightDtype.F8_E4M3 and info.dtype not in _PACKED:
        raise WeightFormatError(
            info.name, f"it is {info.dtype}: a weight is BF16, F32, F8_E4M3, or FP4 in U8, I8 or F4"
        )
    if ignored_by is not None:
        raise IgnoredModuleError(info.name, info.dtype, ignored_by)
    if len(info.shape) != 2 or 0 in info.shape:
        raise WeightFormatError(info.name, f"it is {info.dtype} of shape {list(info.shape)}: [N, K] is needed")
    scale = _scale_of(store, info, _scale_names(stem))
    factor = _only(store, info.name, (stem + _MULTIPLIER, stem + _DIVISOR))
    activations = tuple(n for n in _activation_names(stem) if n in store)
    if info.dtype is WeightDtype.F8_E4M3:
        kind = _check_fp8(info, scale, factor)
        return WeightPlan(info.name, kind, info.shape, scale.name, activation_scales=activations)
    kind, k = _check_fp4(store, info, scale, factor, stem)
    return WeightPlan(info.name, kind, (info.shape[0], k), scale.name, factor, activations)


def read_weight(store: WeightStore, name: str, ignore_modules: Iterable[str] = ()) -> HostWeight:
    """Read the weight `name` with its scales and dequantise it to FP32; BF16 is widened.

    Errors as `plan_weight`, and ScaleValueError for a scale that is NaN, infinite or negative, and as `read_factor`.
    """
    plan = plan_weight(store, name, ignore_modules)
    if not plan.format.is_quantised:
        return HostWeight(plan, store.read(plan.name).astype(np.float32, copy=False))
    scale = _read_checked_scale(store, plan)
    # The factor first: a wrong one is told before the weight is read.
    factor = read_factor(store, plan) if plan.factor else np.float32(1)
    codes = store.read(plan.name)
    if plan.format is WeightFormat.NVFP4:
        return HostWeight(plan, dequant_nvfp4(codes, scale, factor))
    if plan.format is WeightFormat.MXFP4:
        return HostWeight(plan, dequant_mxfp4(codes, scale))
    return HostWeight(plan, dequant_fp8(codes, scale))


def read_scale(store: WeightStore, plan: WeightPlan) -> F32Array:
    """The scale of a quantised weight in FP32, exactly, in its stored shape. ScaleValueError as `read_weight`."""
    return widen_scale(_read_checked_scale(store, plan))


def read_factor(store: WeightStore, plan: WeightPlan) -> np.float32:
    """The multiplier of an NVFP4 weight as kernels take it: `weight_scale_2` itself, or 1 / `weight_global_scale` in
    FP32.

    With group scales up to 448 a multiplier is max|w| / 2688, a divisor 2688 / max|w|. ScaleValueError for one that
    the other convention explains better: a multiplier above 1000, a divisor below 1 (weights beyond 2688); also for
    0, negative numbers, NaN and infinities. Less clear ones, a multiplier above 1 and a divisor below 1000, are
    logged as warnings.
    """
    value = np.float32(store.read(plan.factor).reshape(-1)[0])
    number, is_divisor = float(value), plan.factor.endswith(_DIVISOR)
    role, other = ("divisor", "multiplier") if is_divisor else ("multiplier", "divisor")
    if not (np.isfinite(value) and value > 0):
        raise ScaleValueError(plan.name, plan.factor, number, f"is {number!r}: a {role} above 0 is needed")
    largest = _NVFP4_LARGEST / number if is_divisor else _NVFP4_LARGEST * number
    told = f"is {number!r}: as a {role} it allows weights up to {largest:.3g}"
    if number < 1 if is_divisor else number > _LARGEST_MULTIPLIER:
        raise ScaleValueError(plan.name, plan.factor, number, f"{told}; it looks like a {other}")
    if number < _USUAL_DIVISOR if is_divisor else number > 1:
        log.warning("tensor %r: scale %r %s; is it a %s?", plan.name, plan.factor, told, other)
    return np.float32(1) / value if is_divisor else value


def check_scales_applied(store: WeightStore, applied: Collection[str], prefix: str = "") -> None:
    """UnreadScaleError for the tensors of the files under `prefix` that are scales or zero points by their name and
    are not in `applied`: the `accounted` of the plans, and what a model calls scale without quantising by it."""
    known = set(applied)
    left = [
        name
        for name in store.names()
        if name.startswith(prefix) and name not in known and _sounds_like_scale(name.rpartition(".")[2])
    ]
    if left:
        raise UnreadScaleError(left, str(store.source))


def _sounds_like_scale(last_part: str) -> bool:
    return "scale" in last_part or "zero_point" in last_part


def _stem(name: str) -> str:
    """The name that the names of scales begin with: that of the weight as if it were not packed."""
    return name.removesuffix("_packed")


def _holder(store: WeightStore, name: str, stem: str) -> str:
    """The tensor that holds the weight: as asked for, or its packed form."""
    packed = stem + "_packed"
    if packed not in store:
        return name
    if stem in store:
        raise AmbiguousScaleError(name, (stem, packed))
    return packed


def _scale_names(stem: str) -> tuple[str, ...]:
    names = (stem + "_scale_inv", stem + "_scale")
    module = _module(stem)
    return names if module is None else (*names, module + "scale")


def _activation_names(stem: str) -> tuple[str, ...]:
    module = _module(stem)
    return () if module is None else (module + "input_scale", module + "input_global_scale")


def _module(stem: str) -> str | None:
    """What is before `weight`, its dot included; None for a parameter that has another name."""
    head, dot, tail = stem.rpartition(".")
    return head + dot if tail == "weight" else None


def _only(store: WeightStore, tensor: str, names: Sequence[str]) -> str:
    found = [name for name in names if name in store]
    if len(found) > 1:
        raise AmbiguousScaleError(tensor, found)
    return found[0] if found else ""


def _scale_of(store: WeightStore, info: WeightInfo, names: Sequence[str]) -> WeightInfo:
    name = _only(store, info.name, names)
    if not name:
        raise MissingScaleError(info.name, info.dtype, names)
    return store.info(name)


def _check_fp8(info: WeightInfo, scale: WeightInfo, factor: str) -> WeightFormat:
    if factor:
        raise WeightScaleError(info.name, factor, "is a second scale, which FP8 does not have")
    if scale.dtype not in _FP8_SCALE:
        raise ScaleDtypeError(info.name, scale.name, scale.dtype, " or ".join(_FP8_SCALE))
    kind = fp8_scales(info.shape, scale.shape)
    if kind is None:
        n, k = info.shape
        allowed = [shape for shapes in fp8_scale_shapes(n, k).values() for shape in shapes]
        raise ScaleShapeError(info.name, info.shape, scale.name, scale.shape, allowed)
    return _FP8_FORMAT[kind]


def _check_fp4(
    store: WeightStore, info: WeightInfo, scale: WeightInfo, factor: str, stem: str
) -> tuple[WeightFormat, int]:
    n, k = info.shape[0], info.shape[1] * (1 if info.dtype is WeightDtype.F4 else 2)
    if scale.dtype is WeightDtype.F8_E4M3:
        kind, group = WeightFormat.NVFP4, NVFP4_GROUP
        if not factor:
            raise MissingScaleError(info.name, f"{info.dtype} with E4M3 scales", (stem + _MULTIPLIER, stem + _DIVISOR))
        _check_factor(info, store.info(factor))
    elif scale.dtype in (WeightDtype.F8_E8M0, WeightDtype.U8):
        kind, group = WeightFormat.MXFP4, MXFP4_GROUP
        if factor:
            raise WeightScaleError(info.name, factor, f"is a second scale, which FP4 with {scale.dtype} scales has not")
    else:
        raise ScaleDtypeError(info.name, scale.name, scale.dtype, "F8_E4M3 (NVFP4) or F8_E8M0 (MXFP4)")
    if k % group:
        raise WeightFormatError(info.name, f"K is {k}, no multiple of {group} as {kind} needs it")
    if scale.shape != (n, k // group):
        raise ScaleShapeError(info.name, info.shape, scale.name, scale.shape, [(n, k // group)])
    return kind, k


def _check_factor(info: WeightInfo, factor: WeightInfo) -> None:
    if factor.dtype is not WeightDtype.F32:
        raise ScaleDtypeError(info.name, factor.name, factor.dtype, WeightDtype.F32)
    if factor.shape not in ((), (1,)):
        raise ScaleShapeError(info.name, info.shape, factor.name, factor.shape, [(), (1,)])


def _read_checked_scale(store: WeightStore, plan: WeightPlan) -> Array:
    """The scale as stored; a U8 one of MXFP4 holds E8M0 codes."""
    scale = store.read(plan.scale)
    if plan.format is WeightFormat.MXFP4:
        scale = scale.view(WeightDtype.F8_E8M0.numpy)
    _check_values(plan, scale)
    return scale


def _check_values(plan: WeightPlan, scale: Array) -> None:
    values = widen_scale(scale).reshape(-1)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        value = float(values[bad[0]])
        message = f"holds {value!r} at {int(bad[0])}, one of {bad.size} numbers that are no scale of {values.size}"
        raise ScaleValueError(plan.name, plan.scale, value, message)
