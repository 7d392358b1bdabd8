# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `MtpHead::quantize_proj` and of the closure `q` of `layers/mtp_head/new.rs`: weights of the checkpoint in the
head's quantisation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from ....ops.gemv_fp8w import quantize_to_fp8
from ....ops.quantize_nvfp4 import quantize_to_nvfp4
from ....runtime.errors import InvalidArgumentError, SparkError, UnsupportedError
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...weight_map import DenseExpertWeight, DenseWeight, Fp8DenseWeight, Fp8ExpertWeight, Fp8Weight, QuantizedWeight
from .types import FfnProjections, MtpQuantization, ProjectionWeight

__all__ = ["PROGRESS_STEP", "CheckpointExpert", "Quantizer"]

log = logging.getLogger("spark_py.model.mtp_head")

PROGRESS_STEP = 128
"""Experts after which the log says how far quantising is."""
CheckpointExpert = DenseExpertWeight | Fp8ExpertWeight
"""A SwiGLU FFN as checkpoints have it."""
_Made = TypeVar("_Made")


class Quantizer:
    """Makes a head's weights and remembers the memory that it took; `release` gives it back.

    Kernels: `quantize_nvfp4::nvfp4_global_absmax` and `::quantize_bf16_to_nvfp4` for NVFP4,
    `gemv_fp8w::quantize_bf16_to_fp8` for FP8, required; BF16 needs none. Each call waits until its tensor is done.
    """

    def __init__(self, gpu: GpuBackend, quant: MtpQuantization, stream: StreamLike) -> None:
        self.quant = quant
        self._gpu, self._stream = gpu, stream
        self._owned: list[DevicePtr] = []
        if quant is MtpQuantization.NVFP4:
            self._absmax_k = gpu.kernel("quantize_nvfp4", "nvfp4_global_absmax")
            self._nvfp4_k = gpu.kernel("quantize_nvfp4", "quantize_bf16_to_nvfp4")
        elif quant is MtpQuantization.FP8:
            self._fp8_k = gpu.kernel("gemv_fp8w", "quantize_bf16_to_fp8")

    def proj(self, name: str, weight: DenseWeight | Fp8Weight, n: int, k: int) -> ProjectionWeight:
        """A projection [n, k] in the head's quantisation.

        BF16 is the checkpoint's own tensor, not a copy; so is what a checkpoint has in block-scaled FP8, which an FP8
        head alone takes: UnsupportedError for the others. InvalidArgumentError names a tensor that does not fit.
        """
        weight.check_shape(f"mtp {name}", n, k)
        if isinstance(weight, Fp8Weight):
            if self.quant is not MtpQuantization.FP8:
                raise UnsupportedError(
                    f"mtp {name} is FP8 with block scales and the head {self.quant.value}: take "
                    f"{MtpQuantization.FP8.value}, or dequantise the checkpoint's tensor"
                )
            return weight
        match self.quant:
            case MtpQuantization.BF16:
                return weight
            case MtpQuantization.FP8:
                return self._fp8(name, weight, n, k)
            case MtpQuantization.NVFP4:
                return self._nvfp4(name, weight, n, k)

    def _nvfp4(self, name: str, weight: DenseWeight, n: int, k: int) -> QuantizedWeight:
        made = _named(
            name, lambda: quantize_to_nvfp4(self._gpu, self._absmax_k, self._nvfp4_k, weight, n, k, self._stream)
        )
        self._owned += [made.weight, made.weight_scale]
        return QuantizedWeight(made.weight, made.weight_scale, made.weight_scale_2, made.input_scale, (n, k))

    def _fp8(self, name: str, weight: DenseWeight, n: int, k: int) -> Fp8DenseWeight:
        made = _named(name, lambda: quantize_to_fp8(self._gpu, self._fp8_k, weight, n, k, self._stream))
        self._owned += [made.weight, made.row_scale]
        return Fp8DenseWeight(made.weight, made.row_scale, n, k)

    def ffn(self, name: str, weights: CheckpointExpert, inter: int, h: int) -> FfnProjections:
        """The three projections of a dense FFN or an expert, `inter` wide."""
        return (
            self.proj(f"{name}gate_proj", weights.gate_proj, inter, h),
            self.proj(f"{name}up_proj", weights.up_proj, inter, h),
            self.proj(f"{name}down_proj", weights.down_proj, h, inter),
        )

    def experts(self, experts: Sequence[CheckpointExpert], inter: int, h: int) -> list[FfnProjections]:
        """All routed experts, with a line in the log after each 128."""
        made = []
        for i, expert in enumerate(experts):
            made.append(self.ffn(f"experts[{i}].", expert, inter, h))
            if (i + 1) % PROGRESS_STEP == 0:
                log.info("  MTP experts quantized: %d/%d", i + 1, len(experts))
        return made

    def release(self) -> None:
        """Free what was made; a second call does nothing. All are tried, then the first error is raised."""
        first: SparkError | None = None
        # A backend that was closed before has freed everything itself.
        for ptr in () if self._gpu.closed else self._owned:
            try:
                self._gpu.free(ptr)
            except SparkError as error:
                first = first or error
        self._owned.clear()
        if first is not None:
            raise first


def _named(name: str, make: Callable[[], _Made]) -> _Made:
    """What `make` gives; a weight that it refuses is called by its name."""
    try:
        return make()
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"mtp {name}: {error.name}", error.value, error.limit) from error
