# SPDX-License-Identifier: AGPL-3.0-only
"""From router logits to the chosen experts and their weights: softmax (Qwen), or sigmoid with a bias and groups
(DeepSeek-V3, GLM-4.5, MiniMax-M2)."""

from __future__ import annotations

from dataclasses import dataclass

from ...ops.moe_topk import MAX_EXPERTS, MAX_TOP_K, moe_topk_softmax, moe_topk_softmax_batched
from ...ops.spark_moe_topk_sigmoid import grouped, spark_moe_topk_sigmoid, spark_moe_topk_sigmoid_batched
from ...runtime.errors import InvalidArgumentError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ...runtime.sizes import count
from ..config import ModelConfig
from ..weight_map import F32Weight

__all__ = ["MoeRouter", "MoeRouting"]


@dataclass(frozen=True, slots=True)
class MoeRouting:
    """How experts are chosen and weighed.

    Softmax: the largest probabilities, and they are the weights. Sigmoid: with s = sigmoid(logit), the largest
    s + bias, and s alone are the weights. With `n_group` > 1, sigmoid only, the choice is among the experts of the
    `topk_group` best of so many runs. `normalize`: the weights are divided by their sum; `scaling_factor` comes last.
    """

    sigmoid: bool = False
    biased: bool = False
    normalize: bool = True
    n_group: int = 1
    topk_group: int = 1
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.sigmoid:
            return
        for name, value, plain in (
            ("a correction bias", self.biased, False),
            ("n_group", self.n_group, 1),
            ("routed_scaling_factor", self.scaling_factor, 1.0),
        ):
            if value != plain:
                raise UnsupportedError(f"softmax routing with {name} ({value}) is not offered: sigmoid routing has it")

    @classmethod
    def of(cls, config: ModelConfig) -> MoeRouting:
        """The routing of a configuration; UnsupportedError for a combination that is not offered."""
        return cls(
            sigmoid=config.scoring_func == "sigmoid",
            biased=config.use_routing_bias,
            normalize=config.norm_topk_prob,
            n_group=config.n_group,
            topk_group=config.topk_group,
            scaling_factor=config.routed_scaling_factor,
        )

    def kernels(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """(module, function) for one row and for several."""
        return _SIGMOID if self.sigmoid else _SOFTMAX


_SOFTMAX = ("moe_topk", "moe_topk_softmax"), ("moe_topk", "moe_topk_softmax_batched")
_SIGMOID = (
    ("spark_moe_topk_sigmoid", "spark_moe_topk_sigmoid"),
    ("spark_moe_topk_sigmoid", "spark_moe_topk_sigmoid_batched"),
)


class MoeRouter:
    """Launches a routing's kernels: `top_k` of `num_experts`. bias: FP32 [E], the caller's. rows: several may be routed
    at once, if the set has `rows_kernel`.

    InvalidArgumentError for numbers that do not fit (1 <= k <= E, E <= 512, k <= 32, and what groups ask), and for a
    bias that is missing, not wanted or of another shape; a KernelSetError for a set without the kernel for one row.
    """

    def __init__(
        self,
        routing: MoeRouting,
        num_experts: int,
        top_k: int,
        bias: F32Weight | None,
        gpu: GpuBackend,
        name: str,
        *,
        rows: bool,
    ) -> None:
        self.routing, self.num_experts, self.top_k, self.bias, self.gpu = routing, num_experts, top_k, bias, gpu
        limits = {
            "num_experts": (num_experts, MAX_EXPERTS),
            "num_experts_per_tok": (top_k, min(MAX_TOP_K, num_experts)),
        }
        for what, (number, limit) in limits.items():
            if count(what, number) > limit:
                raise InvalidArgumentError(what, number, f"{limit} at most are routed to")
        grouped(num_experts, top_k, routing.n_group, routing.topk_group)
        if (bias is None) is routing.biased:
            wanted = "the routing has one" if routing.biased else "None: the routing has none"
            raise InvalidArgumentError(f"{name} correction_bias", bias, wanted)
        if bias is not None:
            bias.check_shape(f"{name} correction_bias", num_experts)
        one, several = routing.kernels()
        self.kernel, self.rows_kernel = gpu.kernel(*one), gpu.try_kernel(*several) if rows else KernelHandle(0)

    def route(self, logits: DevicePtr, ids: DevicePtr, weights: DevicePtr, stream: StreamLike) -> None:
        """ids u32 [k] and weights FP32 [k] of logits BF16 [E], the best first."""
        self._launch(self.kernel, logits, ids, weights, None, stream)

    def route_rows(self, logits: DevicePtr, ids: DevicePtr, weights: DevicePtr, rows: int, stream: StreamLike) -> None:
        """`route` of BF16 [rows, E], each row with the bits that it has alone, where there is a `rows_kernel`."""
        self._launch(self.rows_kernel, logits, ids, weights, rows, stream)

    def _launch(
        self,
        kernel: KernelHandle,
        logits: DevicePtr,
        ids: DevicePtr,
        weights: DevicePtr,
        rows: int | None,
        stream: StreamLike,
    ) -> None:
        r, experts, k = self.routing, self.num_experts, self.top_k
        if r.sigmoid:
            options = (r.n_group, r.topk_group, r.normalize, r.scaling_factor, stream)
            if rows is None:
                spark_moe_topk_sigmoid(self.gpu, kernel, logits, self.bias, ids, weights, experts, k, *options)
            else:
                spark_moe_topk_sigmoid_batched(
                    self.gpu, kernel, logits, self.bias, ids, weights, rows, experts, k, *options
                )
        elif rows is None:
            moe_topk_softmax(self.gpu, kernel, logits, ids, weights, experts, k, r.normalize, stream)
        else:
            moe_topk_softmax_batched(self.gpu, kernel, logits, ids, weights, rows, experts, k, r.normalize, stream)
