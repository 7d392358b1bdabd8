# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `layers/moe`: a mixture of SwiGLU experts, and a shared one where there is one.

    p = the weights of the k chosen experts, of x . router as `moe_routing` says;
    y = sum of p_e * E_e(x) + sigmoid(x . shared gate) * E_shared(x), E(x) = W_down (silu(W_gate x) * W_up x).

Expert ids never leave the device, so that a pass can be captured in a graph.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from ...ops.dense_gemv_bf16_batchm import MAX_ROWS as ROUTER_ROWS
from ...ops.dense_gemv_bf16_batchm import dense_gemv_batchm
from ...ops.gemv import dense_gemv
from ...ops.moe_silu_mul import silu_mul
from ...ops.moe_weighted_sum_blend import moe_weighted_sum_blend
from ...ops.spark_moe_rows import spark_moe_weighted_sum_blend_rows
from ...runtime.buffers import BufferArena
from ...runtime.errors import CapacityError, InvalidArgumentError, ReleasedError, SparkError, UnsupportedError
from ...runtime.gpu import DevicePtr, GpuBackend, KernelHandle, StreamLike
from ...runtime.scratch import ScratchRegion
from ...runtime.sizes import count
from ..config import ModelConfig
from ..layer import ForwardContext
from ..weight_map import AnyExpertWeight, MoeWeights
from .moe_formats import expert_format
from .moe_routing import MoeRouter, MoeRouting

__all__ = ["MoeLayer"]

log = logging.getLogger("spark_py.model.moe")
_BF16 = 2
_ROUTE = 4
_PROJECTIONS = ("gate", "up", "down")
# What a pass writes: its input may lie in none of them.
_CLOBBERED = (
    "gate_logits", "scratch", "expert_gate_out", "expert_up_out", "expert_down_out", "logits", "ssm_qkvz",
    "attn_output", "moe_output",
)  # fmt: skip


class MoeLayer:
    """The experts of one layer; E experts, k of them a token, h hidden_size, I and Is widths of routed and shared ones.

    weights: router BF16 [E, h]; experts of one format (NVFP4, BF16, or FP8 with row scales), gate and up [I, h], down
    [h, I], NULL for an expert that is elsewhere, which counts as zeros; a shared expert of width Is =
    shared_expert_intermediate_size in the same format, NULL where that is 0; the shared expert's gate BF16 [1, h],
    NULL for a factor of 1; the routing's correction_bias FP32 [E], where the config has one. They stay the caller's and
    must outlive the layer. I is moe_intermediate_size, or intermediate_size where that is 0, as in Rust.

    Refusals: InvalidArgumentError for a number or tensor that does not fit (1 <= k <= E, E <= 512, k <= 32),
    UnsupportedError for a format or a router that is not offered, a KernelSetError for a kernel that the set lacks.
    Nothing stays allocated after an error.
    """

    def __init__(self, weights: MoeWeights[Any], config: ModelConfig, gpu: GpuBackend, name: str = "moe") -> None:
        self.gpu, self.weights, self.name = gpu, weights, name
        self.h = config.hidden_size
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.inter = config.moe_intermediate_size or config.intermediate_size
        self.shared_inter = config.shared_expert_intermediate_size
        self.format = expert_format([*weights.experts, weights.shared_expert])
        self._checked: tuple[weakref.ref[BufferArena], int] | None = None
        self._released = False
        self._owned: list[DevicePtr] = []
        self.router = MoeRouter(
            MoeRouting.of(config), self.num_experts, self.top_k, weights.correction_bias, gpu, name, rows=True
        )
        self._check()
        # One launch runs the shared expert along with the others where it is as wide as they are.
        self._fused_shared = self.shared_inter == self.inter
        self._resolve_kernels()
        try:
            self._gate, self._up, self._down = (self._tables(projection) for projection in _PROJECTIONS)
        except BaseException:
            self.release()
            raise
        log.info(
            "%s: %d experts in %s, %d a token, widths %d and (shared) %d, rows %s, %s",
            name, self.num_experts, self.format.name, self.top_k, self.inter, self.shared_inter,
            "in one pass" if self.rows_in_one_pass else "one by one",
            "two launches" if self._step_k else "a launch a step",
        )  # fmt: skip

    @staticmethod
    def offered(gpu: GpuBackend, experts: Sequence[AnyExpertWeight]) -> bool:
        """Whether the kernel set has what a layer with such experts launches beside its router."""
        fmt = expert_format(experts)
        needed = (fmt.gate_up_k, fmt.down_k, *_COMMON)
        return all(gpu.try_kernel(*key) for key in needed)

    # ------------------------------------------------------------ construction

    def _check(self) -> None:
        weights, fmt, h = self.weights, self.format, self.h
        if len(weights.experts) != self.num_experts:
            raise InvalidArgumentError("experts", len(weights.experts), f"num_experts = {self.num_experts} are needed")
        for what, width in (
            ("hidden_size", h),
            ("moe_intermediate_size", self.inter),
            ("shared_expert_intermediate_size", self.shared_inter or fmt.quantum),
        ):
            if count(what, width) % fmt.quantum:
                raise InvalidArgumentError(what, width, f"a multiple of {fmt.quantum} is needed by {fmt.name} experts")
        if weights.router_pre_norm is not None:
            raise UnsupportedError(f"{self.name}: a router with a router_pre_norm is not offered")
        weights.gate.check_shape(f"{self.name} gate", self.num_experts, h)
        if not weights.shared_expert_gate.weight.is_null:
            weights.shared_expert_gate.check_shape(f"{self.name} shared_expert_gate", 1, h)
        for number, expert in enumerate(weights.experts):
            self._check_expert(f"{self.name} experts.{number}", expert, self.inter)
        shared = f"{self.name} shared_expert"
        here = self._check_expert(shared, weights.shared_expert, self.shared_inter or self.inter)
        if here != bool(self.shared_inter):
            wanted = "an expert is needed" if self.shared_inter else "NULL is needed: the config has no width for it"
            raise InvalidArgumentError(shared, weights.shared_expert, wanted)

    def _check_expert(self, name: str, expert: Any, inter: int) -> bool:
        """Whether the expert is here; InvalidArgumentError where a part of it is, or where a tensor does not fit."""
        here = [not getattr(expert, f"{each}_proj").weight.is_null for each in _PROJECTIONS]
        if not any(here):
            return False
        for projection in _PROJECTIONS:
            n, k = (self.h, inter) if projection == "down" else (inter, self.h)
            self.format.check(f"{name}.{projection}_proj", getattr(expert, f"{projection}_proj"), n, k)
        return True

    def _resolve_kernels(self) -> None:
        gpu, fmt = self.gpu, self.format
        self.gate_up_k, self.down_k = gpu.kernel(*fmt.gate_up_k), gpu.kernel(*fmt.down_k)
        self.dense_gemv_k, self.moe_weighted_sum_blend_k = (gpu.kernel(*key) for key in _COMMON)
        self.gemv_k = self.moe_silu_mul_k = KernelHandle(0)
        if self.shared_inter and not self._fused_shared:
            self.gemv_k, self.moe_silu_mul_k = gpu.kernel(*fmt.gemv_k), gpu.kernel("moe_silu_mul", "moe_silu_mul")
        # Kernels for several rows give each the bits of those for one, which the engine's own do not promise: they are
        # used together, where the set has all of them.
        rows = (fmt.gate_up_rows_k, fmt.down_rows_k, *_COMMON_ROWS)
        self._rows_k = [gpu.try_kernel(*key) for key in rows]
        self._step_k = self._step_kernels()

    def _step_kernels(self) -> list[KernelHandle]:
        """The kernels of a pass in two launches behind the router's product; none where they do not suit the layer."""
        step, k, inter = self.format.step, self.top_k, self.inter
        if step is None or self.router.routing.sigmoid or self.shared_inter not in (0, inter):
            return []
        # The activations in FP32 go where the experts' outputs would.
        if not step.fits(inter, self.h, k) or 2 * (k + 1) * inter > k * self.h:
            return []
        experts = (*self.weights.experts, *([self.weights.shared_expert] if self.shared_inter else ()))
        if not all(step.takes(getattr(expert, f"{each}_proj")) for expert in experts for each in _PROJECTIONS):
            return []
        kernels = [self.gpu.try_kernel(*key) for key in (step.gate_up_k, step.down_k)]
        return kernels if all(kernels) else []

    @property
    def rows_in_one_pass(self) -> bool:
        """Whether `forward_rows` launches kernels for several rows, not those for one in a loop."""
        return all(self._rows_k) and bool(self.router.rows_kernel)

    def _tables(self, projection: str) -> Any:
        """The device tables of a projection, an entry an expert."""
        experts = self.weights.experts
        entries = [self.format.entry(getattr(expert, f"{projection}_proj")) for expert in experts]
        pointers = []
        for number, (column, dtype) in enumerate(self.format.columns.items()):
            values = np.array([entry[number] for entry in entries], dtype)
            ptr = self.gpu.alloc(values.nbytes, f"{self.name}.{projection}.{column}")
            self._owned.append(ptr)
            self.gpu.copy_h2d(values.view(np.uint8), ptr)
            pointers.append(ptr)
        return self.format.tables(pointers)

    def check_buffers(self, buffers: BufferArena, rows: int = 1) -> None:
        """CapacityError where a buffer of the arena is too small for a pass over `rows` rows."""
        if self._checked is not None and self._checked[0]() is buffers and rows <= self._checked[1]:
            return
        # A kernel without a shared expert writes zeros as wide as a routed one.
        shared = max(self.inter, self.shared_inter)
        need = {
            "gate_logits": self.num_experts,
            "expert_gate_out": self.top_k * self.inter,
            "expert_up_out": self.top_k * self.inter,
            "expert_down_out": self.top_k * self.h,
            "logits": shared,
            "ssm_qkvz": shared,
            "attn_output": self.h,
            "moe_output": self.h,
        }
        for name, elements in need.items():
            have, nbytes = getattr(buffers.sizes(), name), rows * elements * _BF16
            if nbytes > have:
                raise CapacityError(f"bytes that {self.name} writes to {name}", nbytes, have, "the arena's buffer")
        self._checked = weakref.ref(buffers), rows

    # ------------------------------------------------------------ forward

    def forward(self, normed: DevicePtr, ctx: ForwardContext, stream: StreamLike) -> DevicePtr:
        """The mixture's output for a row BF16 [h]: the address of BF16 [h], `moe_output`.

        Also written: gate_logits, expert_gate_out, expert_up_out, expert_down_out, logits, ssm_qkvz, attn_output (some
        of them) and the routing at the start of scratch. normed may lie in none of them, nor in scratch. Nothing is
        read back.
        """
        return self.forward_rows(normed, 1, ctx, stream)

    def forward_rows(self, normed: DevicePtr, rows: int, ctx: ForwardContext, stream: StreamLike) -> DevicePtr:
        """`forward` of BF16 [rows, h], each row with the bits that it has alone: `moe_output` BF16 [rows, h].

        With BF16 experts, for which one row and several have kernels of their own, that holds as far as each product of
        gate and up is zero or a normal FP32 number.
        """
        if self._released:
            raise ReleasedError(f"{self.name} was released")
        buf = ctx.buffers
        m = count("rows", rows)
        self.check_buffers(buf, m)
        self._check_input(normed, m, buf)
        output = buf.moe_output()
        with buf.lease(ScratchRegion.moe_routing(m, self.top_k)) as routing:
            if m > 1 and self.rows_in_one_pass:
                self._rows(normed, output, m, routing.ptr, buf, stream)
            else:
                for row in range(m):
                    at = row * self.h * _BF16
                    self._row(normed.offset(at), output.offset(at), routing.ptr, buf, stream)
        return output

    def _check_input(self, normed: DevicePtr, rows: int, buf: BufferArena) -> None:
        end = normed.address + rows * self.h * _BF16
        for name in _CLOBBERED:
            start = buf.pointer(name).address
            if normed.address < start + getattr(buf.sizes(), name) and start < end:
                raise InvalidArgumentError("normed", normed, f"another buffer than {name}, which the pass writes")

    def _row(self, normed: DevicePtr, output: DevicePtr, ids: DevicePtr, buf: BufferArena, stream: StreamLike) -> None:
        gpu, h, k = self.gpu, self.h, self.top_k
        logits, weights = buf.gate_logits(), ids.offset(_ROUTE * k)
        dense_gemv(gpu, self.dense_gemv_k, normed, self.weights.gate, logits, self.num_experts, h, stream)
        if self._step_k:
            self._step(normed, output, 1, ids, buf, stream)
            return
        self.router.route(logits, ids, weights, stream)
        self._experts(self.gate_up_k, self.down_k, normed, ids, None, buf, stream)
        moe_weighted_sum_blend(
            gpu, self.moe_weighted_sum_blend_k, output, buf.expert_down_out(), weights, buf.attn_output(), normed,
            self.weights.shared_expert_gate, h, k, h, stream,
        )  # fmt: skip

    def _rows(
        self, normed: DevicePtr, output: DevicePtr, m: int, ids: DevicePtr, buf: BufferArena, stream: StreamLike
    ) -> None:
        gpu, h, k, experts = self.gpu, self.h, self.top_k, self.num_experts
        gate_up, down, router, blend = self._rows_k
        logits, weights = buf.gate_logits(), ids.offset(_ROUTE * m * k)
        for first in range(0, m, ROUTER_ROWS):
            some, at = min(ROUTER_ROWS, m - first), logits.offset(first * experts * _BF16)
            rows = normed.offset(first * h * _BF16)
            dense_gemv_batchm(gpu, router, rows, self.weights.gate, at, some, experts, h, experts, stream)
        if self._step_k and self.format.step is not None and self.format.step.several_rows:
            self._step(normed, output, m, ids, buf, stream)
            return
        self.router.route_rows(logits, ids, weights, m, stream)
        self._experts(gate_up, down, normed, ids, m, buf, stream)
        spark_moe_weighted_sum_blend_rows(
            gpu, blend, output, buf.expert_down_out(), weights, buf.attn_output(), normed,
            self.weights.shared_expert_gate, m, h, k, h, stream,
        )  # fmt: skip

    def _step(
        self,
        normed: DevicePtr,
        output: DevicePtr,
        m: int,
        ids: DevicePtr,
        buf: BufferArena,
        stream: StreamLike,
    ) -> None:
        """All behind the router's product in two launches."""
        gpu, h, k, inter, experts = self.gpu, self.h, self.top_k, self.inter, self.num_experts
        step = self.format.step
        assert step is not None
        gate_up, down = self._step_k
        shared = self.weights.shared_expert if self.shared_inter else None
        sh_gate, sh_up, sh_down = (shared and getattr(shared, f"{each}_proj") for each in _PROJECTIONS)
        logits, activation = buf.gate_logits(), buf.expert_down_out()
        step.gate_up(
            gpu, gate_up, normed, logits, self._gate, self._up, ids, sh_gate, sh_up, activation,
            m, inter, h, experts, k, stream,
        )  # fmt: skip
        step.down(
            gpu, down, activation, self._down, logits, ids, sh_down, normed, self.weights.shared_expert_gate,
            output, m, h, inter, experts, k, self.router.routing.normalize, stream,
        )  # fmt: skip

    def _experts(
        self,
        gate_up: KernelHandle,
        down: KernelHandle,
        normed: DevicePtr,
        ids: DevicePtr,
        rows: int | None,
        buf: BufferArena,
        stream: StreamLike,
    ) -> None:
        """The chosen experts into `expert_down_out`, the shared one into `attn_output`."""
        gpu, fmt, h, inter = self.gpu, self.format, self.h, self.inter
        gate_out, up_out, out = buf.expert_gate_out(), buf.expert_up_out(), buf.expert_down_out()
        sh_gate_out, sh_up_out, sh_out = buf.logits(), buf.ssm_qkvz(), buf.attn_output()
        shared = self.weights.shared_expert if self._fused_shared else None
        sh_gate, sh_up, sh_down = (shared and getattr(shared, f"{each}_proj") for each in _PROJECTIONS)
        fmt.gate_up(
            gpu, gate_up, normed, self._gate, gate_out, self._up, up_out, ids, sh_gate, sh_gate_out, sh_up, sh_up_out,
            inter, h, self.top_k, stream, rows=rows,
        )  # fmt: skip
        fmt.down(
            gpu, down, gate_out, up_out, self._down, out, ids, sh_gate_out, sh_up_out, sh_down, sh_out,
            h, inter, self.top_k, stream, rows=rows,
        )  # fmt: skip
        if self.gemv_k:
            self._shared_alone(normed, rows or 1, buf, stream)

    def _shared_alone(self, normed: DevicePtr, rows: int, buf: BufferArena, stream: StreamLike) -> None:
        """A shared expert of another width: three products a row, over the zeros that the kernels left."""
        gpu, fmt, h, inter, shared = self.gpu, self.format, self.h, self.shared_inter, self.weights.shared_expert
        gate_out, up_out, out = buf.logits(), buf.ssm_qkvz(), buf.attn_output()
        for row in range(rows):
            x, at = normed.offset(row * h * _BF16), row * inter * _BF16
            fmt.gemv(gpu, self.gemv_k, x, shared.gate_proj, gate_out.offset(at), inter, h, stream)
            fmt.gemv(gpu, self.gemv_k, x, shared.up_proj, up_out.offset(at), inter, h, stream)
        silu_mul(gpu, self.moe_silu_mul_k, gate_out, up_out, gate_out, rows * inter, stream)
        for row in range(rows):
            x, y = gate_out.offset(row * inter * _BF16), out.offset(row * h * _BF16)
            fmt.gemv(gpu, self.gemv_k, x, shared.down_proj, y, h, inter, stream)

    # ------------------------------------------------------------ life

    def release(self) -> None:
        """Free the tables; a second call does nothing. Weights stay. All are tried, then the first error is raised."""
        self._released = True
        owned, self._owned = self._owned, []
        first: SparkError | None = None
        # A backend that was closed before has freed everything itself.
        for ptr in () if self.gpu.closed else owned:
            try:
                self.gpu.free(ptr)
            except SparkError as error:
                first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> MoeLayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


_COMMON = (("gemv", "dense_gemv_bf16"), ("moe_expert_gemv", "moe_weighted_sum_blend"))
_COMMON_ROWS = (
    ("dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm"),
    ("spark_moe_rows", "spark_moe_weighted_sum_blend_rows"),
)
