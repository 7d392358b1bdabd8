# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `MtpHead::gemv` and its neighbours in `layers/mtp_head/forward.rs`: a row through a projection, by the
projection's format. Nothing else in the head asks for a format."""

from __future__ import annotations

from ....ops.gemv import dense_gemv
from ....ops.gemv_fp8w import dense_gemv_fp8w
from ....ops.ssm_preprocess import deinterleave_qg
from ....ops.w4a16_gemv import w4a16_gemv, w4a16_gemv_qg, w4a16_gemv_sw
from ....ops.w4a16_gemv_fused import w4a16_gemv_dual
from ....ops.w8a16_gemv import w8a16_gemv
from ....runtime.gpu import DevicePtr, StreamLike
from ...weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight
from .new import MtpHeadNew
from .types import ProjectionWeight

__all__ = ["MtpHeadProjection"]


class MtpHeadProjection(MtpHeadNew):
    """Projections of one row."""

    def gemv(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        proj: ProjectionWeight,
        output: DevicePtr,
        n: int,
        k: int,
        stream: StreamLike,
    ) -> None:
        """output [n] = proj [n, k] . input [k], BF16, by the kernel of the projection's format."""
        match proj:
            case DenseWeight():
                dense_gemv(self.gpu, self.dense_gemv_k, input, proj, output, n, k, stream)
            case QuantizedWeight():
                self.w4a16_decode_gemv(input, proj, output, n, k, stream)
            case Fp8DenseWeight():
                dense_gemv_fp8w(self.gpu, self.dense_gemv_fp8w_k, input, proj, output, n, k, stream)
            case Fp8Weight():
                w8a16_gemv(self.gpu, self.w8a16_gemv_k, input, proj, proj.row_scale, output, n, k, stream)

    def w4a16_decode_gemv(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        weight: QuantizedWeight,
        output: DevicePtr,
        n: int,
        k: int,
        stream: StreamLike,
    ) -> None:
        """`gemv` of an NVFP4 weight: a warp an output where the set and the levers have it. The bits are the same."""
        if self.gemv_sw and self.w4a16_gemv_sw_k:
            w4a16_gemv_sw(self.gpu, self.w4a16_gemv_sw_k, input, weight, output, n, k, stream)
        else:
            w4a16_gemv(self.gpu, self.w4a16_gemv_k, input, weight, output, n, k, stream)

    def _project_qg(self, normed: DevicePtr, output: DevicePtr, stream: StreamLike) -> None:
        """output BF16 [2, nq, hd]: the queries of all heads, then the gates of all heads."""
        n = 2 * self.nq * self.hd
        if isinstance(self.q_proj, QuantizedWeight):
            kernel = self.w4a16_gemv_qg_k
            w4a16_gemv_qg(self.gpu, kernel, normed, self.q_proj, output, n, self.h, self.nq, self.hd, stream)
            return
        self.gemv(normed, self.q_proj, output, n, self.h, stream)
        deinterleave_qg(self.gpu, self.deinterleave_qg_k, output, 1, self.nq, self.hd, n, stream)

    def _project_kv(self, normed: DevicePtr, k: DevicePtr, v: DevicePtr, stream: StreamLike) -> None:
        """k and v BF16 [nkv, hd]."""
        n = self.nkv * self.hd
        if isinstance(self.k_proj, QuantizedWeight) and isinstance(self.v_proj, QuantizedWeight):
            kernel = self.w4a16_gemv_dual_k
            w4a16_gemv_dual(self.gpu, kernel, normed, self.k_proj, k, self.v_proj, v, n, self.h, stream)
            return
        self.gemv(normed, self.k_proj, k, n, self.h, stream)
        self.gemv(normed, self.v_proj, v, n, self.h, stream)

    def _lm_head(self, normed: DevicePtr, logits: DevicePtr, stream: StreamLike) -> None:
        """logits BF16 [draft_vocab], the first rows of the head: padding behind them is never read."""
        self.gemv(normed, self.lm_head, logits, self.draft_vocab, self.h, stream)
