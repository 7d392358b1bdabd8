# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the FFNs in `layers/mtp_head/forward.rs`: `dense_ffn_forward_generic`, `moe_forward_generic`, and which of
them a head has."""

from __future__ import annotations

import numpy as np

from ....ops.gemv import dense_gemv
from ....ops.moe_silu_mul import silu_mul
from ....ops.moe_weighted_sum_blend import moe_weighted_sum_blend
from ....runtime.errors import CapacityError
from ....runtime.gpu import DevicePtr, StreamLike
from ....runtime.scratch import ScratchRegion
from ...layer import ForwardContext
from .new import BF16_BYTES
from .projection import MtpHeadProjection
from .types import FfnProjections

__all__ = ["MtpHeadFfn"]


class MtpHeadFfn(MtpHeadProjection):
    """The FFN of one row."""

    def ffn(self, normed: DevicePtr, ctx: ForwardContext, stream: StreamLike) -> DevicePtr:
        """The FFN of BF16 [h] `normed`; gives the address of the result, `moe_output`. Reads nothing back unless
        `ffn_reads_back`."""
        if self.dense_ffn_generic is not None:
            return self.dense_ffn_forward_generic(normed, self.dense_ffn_generic, ctx, stream)
        if (moe := self.moe_nvfp4 or self.moe_fused) is not None:
            return moe.forward(normed, ctx, stream)
        return self.moe_forward_generic(normed, ctx, stream)

    @property
    def ffn_reads_back(self) -> bool:
        """Whether `ffn` waits for the device, which no graph can hold: the loop over experts needs their ids."""
        return self.moe_experts_generic is not None

    def dense_ffn_forward_generic(
        self, normed: DevicePtr, ffn: FfnProjections, ctx: ForwardContext, stream: StreamLike
    ) -> DevicePtr:
        """down(silu(gate x) * up x) of one row; the address of the result, `moe_output`."""
        gate, up, output = ctx.buffers.expert_gate_out(), ctx.buffers.expert_up_out(), ctx.buffers.moe_output()
        self._swiglu(normed, ffn, self.inter, gate, up, output, stream)
        return output

    def moe_forward_generic(
        self, normed: DevicePtr, ctx: ForwardContext, stream: StreamLike, row: int = 0
    ) -> DevicePtr:
        """The mixture of experts, one expert after the other: the router's ids are read back in between. The result is
        row `row` of `moe_output`.

        Overwrites `gate_logits`, `logits`, `ssm_qkvz`, `attn_output`, the experts' buffers and the routing in scratch.
        """
        experts, shared = self.moe_experts_generic, self.moe_shared_generic
        gate, router = self.moe_gate, self.router
        assert experts is not None
        assert gate is not None
        assert router is not None
        gpu, buf, h, top_k = self.gpu, ctx.buffers, self.h, self.experts_per_token
        logits, expert_out = buf.gate_logits(), buf.expert_down_out()
        output = buf.moe_output().offset(row * h * BF16_BYTES)

        dense_gemv(gpu, self.dense_gemv_k, normed, gate, logits, len(experts), h, stream)
        with buf.lease(ScratchRegion.moe_routing(1, top_k)) as lease:
            indices, weights = lease.ptr, lease.ptr.offset(4 * top_k)
            router.route(logits, indices, weights, stream)
            for slot, expert in enumerate(self._read_ids(indices, top_k, len(experts), stream)):
                inner = slot * self.inter * BF16_BYTES
                gate_out, up_out = buf.expert_gate_out().offset(inner), buf.expert_up_out().offset(inner)
                down_out = expert_out.offset(slot * h * BF16_BYTES)
                self._swiglu(normed, experts[expert], self.inter, gate_out, up_out, down_out, stream)
            shared_out = buf.attn_output()
            if shared is None:
                gpu.memset_async(shared_out, 0, h * BF16_BYTES, stream)
            else:
                self._swiglu(normed, shared, self.shared_inter, buf.logits(), buf.ssm_qkvz(), shared_out, stream)
            moe_weighted_sum_blend(
                gpu, self.moe_weighted_sum_blend_k, output, expert_out, weights, shared_out, normed,
                self.shared_expert_gate, h, top_k, h, stream,
            )  # fmt: skip
        return output

    def _swiglu(
        self,
        normed: DevicePtr,
        ffn: FfnProjections,
        inter: int,
        gate: DevicePtr,
        up: DevicePtr,
        output: DevicePtr,
        stream: StreamLike,
    ) -> None:
        """output [h] = down(silu(gate x) * up x), by way of `gate` and `up` [inter]."""
        gate_proj, up_proj, down_proj = ffn
        self._project_gate_up(normed, gate_proj, up_proj, gate, up, inter, stream)
        silu_mul(self.gpu, self.moe_silu_mul_k, gate, up, gate, inter, stream)
        self.gemv(gate, down_proj, output, self.h, inter, stream)

    def _read_ids(self, indices: DevicePtr, top_k: int, num_experts: int, stream: StreamLike) -> list[int]:
        ids = np.empty(top_k, "<u4")
        self.gpu.copy_d2h_on_stream(indices, ids.view(np.uint8), stream)
        if (largest := int(ids.max())) >= num_experts:
            raise CapacityError("expert id that the router gave", largest, num_experts - 1, "the last expert")
        return [int(expert) for expert in ids]
