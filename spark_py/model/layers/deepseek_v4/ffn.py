# SPDX-License-Identifier: AGPL-3.0-only
"""V4Ffn: DeepSeek-V4's mixture of experts, without a read-back.

    s = sqrt(softplus(gate x));  the k experts with the largest s + bias, or those of the token in a table;
    w = s of the chosen / their sum * routed_scaling;  y = sum of w_e E_e(x) + E_shared(x),
    E(x) = W2 (silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)).

The shared expert has the limit too, and no gate. Logits are BF16, all weights are used as they are.
DeepSeek-V4's `inference/model.py` is the source.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from ....ops.moe_hash_route import moe_hash_route
from ....ops.moe_topk_sqrt import moe_topk_sqrtsoftplus_batched
from ....ops.spark_moe_rows import spark_moe_weighted_sum_blend_rows
from ....runtime.errors import InvalidArgumentError
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ...weight_map import DenseWeight
from .ffn_experts import routed_experts
from .ffn_shared import V4SharedExpert
from .projection import V4Projection
from .scratch import OwnedBuffers
from .weights import V4FfnShape, V4FfnWeights

__all__ = ["V4Ffn"]

_BF16, _U32, _F32 = 2, 4, 4  # bytes
_HASH, _LEARNED = ("moe_hash_route", "moe_hash_route"), ("moe_topk_sqrt", "moe_topk_sqrtsoftplus_batched")


class V4Ffn:
    """The feed-forward part of a layer for up to `max_rows` rows; a row's bits do not depend on how many there are.

    Weights stay the caller's and must outlive this. A hash router reads `token_ids`, u32 [max_rows] at an address that
    stays: row i has the experts of token_ids[i], which must be below vocab_size. The caller writes them before a call.

    InvalidArgumentError for a tensor that does not fit, or a hash router without token_ids; UnsupportedError for a
    format of experts that is not offered; a KernelSetError for a kernel that the set lacks. Nothing stays allocated
    after an error.
    """

    def __init__(
        self,
        weights: V4FfnWeights,
        shape: V4FfnShape,
        gpu: GpuBackend,
        max_rows: int = 1,
        token_ids: DevicePtr = DevicePtr.NULL,
        name: str = "ffn",
    ) -> None:
        weights.check(shape, name)
        self.gpu, self.weights, self.shape, self._token_ids = gpu, weights, shape, token_ids
        self._hash = weights.router.is_hash
        if self._hash and token_ids.is_null:
            raise InvalidArgumentError(f"{name} token_ids", token_ids, "a hash router reads the ids of the rows there")
        h = shape.hidden_size
        self._gate = V4Projection(weights.router.gate, shape.num_experts, h, gpu, f"{name}.gate")
        self._route_k = gpu.kernel(*(_HASH if self._hash else _LEARNED))
        self._blend_k = gpu.kernel("spark_moe_rows", "spark_moe_weighted_sum_blend_rows")
        sizes = {
            "logits": shape.num_experts * _BF16,
            "ids": shape.top_k * _U32,
            "weights": shape.top_k * _F32,
            "experts_out": shape.top_k * h * _BF16,
            "shared_out": h * _BF16,
        }
        with ExitStack() as made:
            self._experts = routed_experts(weights, shape, gpu, max_rows, f"{name}.experts")
            made.callback(self._experts.release)
            self._shared: V4SharedExpert | None = None
            if not self._experts.with_shared:
                self._shared = V4SharedExpert(weights.shared, shape, gpu, max_rows, f"{name}.shared_experts")
                made.callback(self._shared.release)
            self._scratch = OwnedBuffers(gpu, name, max_rows, sizes)
            made.callback(self._scratch.release)
            self._owned = made.pop_all()

    def __call__(self, x: DevicePtr, y: DevicePtr, rows: int, stream: StreamLike) -> None:
        """y BF16 [rows, h] of x BF16 [rows, h], normalised; they lie apart. CapacityError for more than max_rows."""
        rows, shape, buffers = self._scratch.check_rows(rows), self.shape, self._scratch
        experts_out, shared_out = buffers["experts_out"], buffers["shared_out"]
        self._route(x, rows, stream)
        self._experts.run(x, buffers["ids"], experts_out, shared_out, rows, stream)
        if self._shared is not None:
            self._shared.run(x, shared_out, rows, stream)
        ungated = DenseWeight(DevicePtr.NULL)
        spark_moe_weighted_sum_blend_rows(
            self.gpu, self._blend_k, y, experts_out, buffers["weights"], shared_out, x, ungated, rows,
            shape.hidden_size, shape.top_k, shape.hidden_size, stream,
        )  # fmt: skip

    def _route(self, x: DevicePtr, rows: int, stream: StreamLike) -> None:
        """ids u32 and weights FP32 [rows, k] of the experts."""
        shape, router = self.shape, self.weights.router
        logits, ids, weights = (self._scratch[each] for each in ("logits", "ids", "weights"))
        experts, k = shape.num_experts, shape.top_k
        self._gate.run(x, logits, rows, stream)
        if not self._hash:
            moe_topk_sqrtsoftplus_batched(
                self.gpu, self._route_k, logits, router.bias, ids, weights, rows, experts, k, shape.norm_topk_prob,
                shape.routed_scaling, stream,
            )  # fmt: skip
            return
        for row in range(rows):
            moe_hash_route(
                self.gpu, self._route_k, logits.offset(row * experts * _BF16), router.tid2eid,
                self._token_ids.offset(row * _U32), ids.offset(row * k * _U32), weights.offset(row * k * _F32), experts,
                k, shape.norm_topk_prob, shape.routed_scaling, stream,
            )  # fmt: skip

    def release(self) -> None:
        """Free the scratch and the tables; a second call does nothing. Weights stay."""
        self._owned.close()

    def __enter__(self) -> V4Ffn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
