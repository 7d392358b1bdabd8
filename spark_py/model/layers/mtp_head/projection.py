# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `MtpHead::gemv` and its neighbours in `layers/mtp_head/forward.rs`: a row through a projection, by the
projection's format. Nothing else in the head asks for a format."""

from __future__ import annotations

from ....ops.dense_gemv_bf16_batchm import dense_gemv_batchm
from ....ops.gemv import dense_gemv
from ....ops.gemv_fp8w import dense_gemv_fp8w, dense_gemv_fp8w_batchm
from ....ops.residual_add import residual_add
from ....ops.ssm_preprocess import deinterleave_qg
from ....ops.w4a16_gemv import w4a16_gemv, w4a16_gemv_batchm, w4a16_gemv_qg, w4a16_gemv_sw
from ....ops.w4a16_gemv_fused import w4a16_gemv_dual
from ....ops.w8a16_gemv import w8a16_gemv, w8a16_gemv_batchm
from ....runtime.gpu import DevicePtr, KernelHandle, StreamLike
from ...drafting.rows import EXACT_M_WIDTHS, lm_head_batch_width
from ...weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight
from .new import BF16_BYTES
from .rows import MtpHeadRows
from .types import ProjectionWeight

__all__ = ["MtpHeadProjection"]

BATCHM_ROWS = 8
"""Rows that every batched BF16 or FP8 GEMV of this ABI takes; older ones leave rows beyond it as they were, without a
word."""


class MtpHeadProjection(MtpHeadRows):
    """Projections of one row, and of several with the same bits."""

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
        if self._takes((proj,), k):
            self._project_parts(input, [(proj, output, n)], 1, k, stream)
            return
        match proj:
            case DenseWeight():
                dense_gemv(self.gpu, self.dense_gemv_k, input, proj, output, n, k, stream)
            case QuantizedWeight():
                self.w4a16_decode_gemv(input, proj, output, n, k, stream)
            case Fp8DenseWeight():
                dense_gemv_fp8w(self.gpu, self.dense_gemv_fp8w_k, input, proj, output, n, k, stream)
            case Fp8Weight():
                w8a16_gemv(self.gpu, self.w8a16_gemv_k, input, proj, proj.row_scale, output, n, k, stream)

    def gemv_rows(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        proj: ProjectionWeight,
        output: DevicePtr,
        m: int,
        n: int,
        k: int,
        stream: StreamLike,
    ) -> None:
        """output [m, n] = input [m, k] . proj [n, k] transposed, BF16, each row with the bits of `gemv`: as many rows
        at a time as the set's batched kernels take."""
        if self._takes((proj,), k):
            self._project_parts(input, [(proj, output, n)], m, k, stream)
            return
        gpu, step = self.gpu, self._rows_at_once(proj)
        for start in range(0, m, step):
            rows = min(step, m - start)
            a, c = input.offset(start * k * BF16_BYTES), output.offset(start * n * BF16_BYTES)
            if rows == 1:
                self.gemv(a, proj, c, n, k, stream)
                continue
            match proj:
                case DenseWeight():
                    dense_gemv_batchm(gpu, self.dense_gemv_batchm_k, a, proj, c, rows, n, k, n, stream)
                case QuantizedWeight():
                    w4a16_gemv_batchm(gpu, self._w4a16_tier(rows), a, proj, c, rows, n, k, stream)
                case Fp8DenseWeight():
                    dense_gemv_fp8w_batchm(gpu, self.dense_gemv_fp8w_batchm_k, a, proj, c, rows, n, k, n, stream)
                case Fp8Weight():
                    scales = proj.row_scale
                    w8a16_gemv_batchm(gpu, self.w8a16_gemv_batchm_k, a, proj, scales, c, rows, n, k, n, stream)

    def _rows_at_once(self, proj: ProjectionWeight) -> int:
        """Rows of one launch; 1 where the set has no batched kernel for the format."""
        match proj:
            case DenseWeight():
                kernel = self.dense_gemv_batchm_k
            case QuantizedWeight():
                hidden = frozenset() if self.levers.gemv_exact_m_tiers else EXACT_M_WIDTHS
                return max(self.w4a16_batchm.keys() - hidden, default=1)
            case Fp8DenseWeight():
                kernel = self.dense_gemv_fp8w_batchm_k
            case Fp8Weight():
                kernel = self.w8a16_gemv_batchm_k
        return BATCHM_ROWS if kernel else 1

    def _w4a16_tier(self, rows: int) -> KernelHandle:
        """The narrowest batched NVFP4 GEMV for `rows`, of which there is one."""
        width = lm_head_batch_width(rows, self.w4a16_batchm, self.levers.gemv_exact_m_tiers)
        assert width is not None
        return self.w4a16_batchm[width]

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

    def _project_qkv(
        self, normed: DevicePtr, q: DevicePtr, k: DevicePtr, v: DevicePtr, stream: StreamLike, rows: int = 1
    ) -> None:
        """q BF16 [rows, q_width], queries before gates, k and v BF16 [rows, nkv, hd]: all in one launch where one
        `_takes` the three weights, else of one row. Biases are added."""
        weights, kv = (self.q_proj, self.k_proj, self.v_proj), self.nkv * self.hd
        if self._takes(weights, self.h):
            parts = list(zip(weights, (q, k, v), (self.q_width, kv, kv), strict=True))
            self._project_parts(normed, parts, rows, self.h, stream, self.hd if self.body.gated else 0)
        else:
            self._project_qg(normed, q, stream)
            self._project_kv(normed, k, v, stream)
        self._add_biases(q, k, v, rows, stream)

    def _add_biases(self, q: DevicePtr, k: DevicePtr, v: DevicePtr, rows: int, stream: StreamLike) -> None:
        """The biases of the three projections, where the body has them: q BF16 [rows, nq, hd], k and v
        [rows, nkv, hd]."""
        for x, bias, heads in ((q, self.q_bias, self.nq), (k, self.k_bias, self.nkv), (v, self.v_bias, self.nkv)):
            self._add_bias(x, bias, rows, heads * self.hd, stream)

    def _add_bias(self, x: DevicePtr, bias: DenseWeight | None, rows: int, n: int, stream: StreamLike) -> None:
        """x BF16 [rows, n] += bias [n], a launch a row."""
        if bias is None:
            return
        for row in range(rows):
            at = x.offset(row * n * BF16_BYTES)
            residual_add(self.gpu, self.residual_add_k, at, bias.weight, n, stream)

    def _project_gate_up(
        self,
        normed: DevicePtr,
        gate_proj: ProjectionWeight,
        up_proj: ProjectionWeight,
        gate: DevicePtr,
        up: DevicePtr,
        inter: int,
        stream: StreamLike,
        rows: int = 1,
    ) -> None:
        """gate and up BF16 [rows, inter]: in one launch where one `_takes` both weights, else of one row."""
        if self._takes((gate_proj, up_proj), self.h):
            self._project_parts(normed, [(gate_proj, gate, inter), (up_proj, up, inter)], rows, self.h, stream)
            return
        self.gemv(normed, gate_proj, gate, inter, self.h, stream)
        self.gemv(normed, up_proj, up, inter, self.h, stream)

    def _project_qg(self, normed: DevicePtr, output: DevicePtr, stream: StreamLike) -> None:
        """output BF16 [2, nq, hd]: the queries of all heads, then the gates of all heads. Without gates [nq, hd]."""
        n = self.q_width
        if not self.body.gated:
            self.gemv(normed, self.q_proj, output, n, self.h, stream)
            return
        if isinstance(self.q_proj, QuantizedWeight):
            kernel = self.w4a16_gemv_qg_k
            w4a16_gemv_qg(self.gpu, kernel, normed, self.q_proj, output, n, self.h, self.nq, self.hd, stream)
            return
        self.gemv(normed, self.q_proj, output, n, self.h, stream)
        deinterleave_qg(self.gpu, self.deinterleave_qg_k, output, 1, self.nq, self.hd, n, stream)

    def _project_kv(self, normed: DevicePtr, k: DevicePtr, v: DevicePtr, stream: StreamLike) -> None:
        """k and v BF16 [nkv, hd]."""
        n = self.nkv * self.hd
        pair = (self.k_proj, self.v_proj)
        if (
            isinstance(self.k_proj, QuantizedWeight)
            and isinstance(self.v_proj, QuantizedWeight)
            and not self._takes(pair, self.h)
        ):
            kernel = self.w4a16_gemv_dual_k
            w4a16_gemv_dual(self.gpu, kernel, normed, self.k_proj, k, self.v_proj, v, n, self.h, stream)
            return
        self.gemv(normed, self.k_proj, k, n, self.h, stream)
        self.gemv(normed, self.v_proj, v, n, self.h, stream)

    def _lm_head(self, normed: DevicePtr, logits: DevicePtr, stream: StreamLike) -> None:
        """logits BF16 [draft_vocab], the first rows of the head: padding behind them is never read."""
        self.gemv(normed, self.lm_head, logits, self.draft_vocab, self.h, stream)
