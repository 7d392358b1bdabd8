# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of `MtpHead::gemv` and its neighbours in `layers/mtp_head/forward.rs`: a row through a projection, by the
projection's format. Nothing else in the head asks for a format."""

from __future__ import annotations

from collections.abc import Sequence

from ....ops.dense_gemv_bf16_batchm import dense_gemv_batchm
from ....ops.gemv import dense_gemv
from ....ops.gemv_fp8w import dense_gemv_fp8w, dense_gemv_fp8w_batchm
from ....ops.residual_add import residual_add
from ....ops.spark_gemv_rows import MAX_ROWS, Projection, spark_gemv_rows
from ....ops.spark_w4a16_gemv_rows import STRIPE, Nvfp4Projection, spark_w4a16_gemv_rows
from ....ops.ssm_preprocess import deinterleave_qg
from ....ops.w4a16_gemv import w4a16_gemv, w4a16_gemv_batchm, w4a16_gemv_qg, w4a16_gemv_sw
from ....ops.w4a16_gemv_fused import w4a16_gemv_dual
from ....ops.w8a16_gemv import w8a16_gemv, w8a16_gemv_batchm
from ....runtime.gpu import DevicePtr, KernelHandle, StreamLike
from ...drafting.rows import EXACT_M_WIDTHS, lm_head_batch_width
from ...weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight
from .new import BF16_BYTES, MtpHeadNew
from .types import ProjectionWeight

__all__ = ["MtpHeadProjection"]

BATCHM_ROWS = 8
"""Rows that every batched BF16 or FP8 GEMV of this ABI takes; older ones leave rows beyond it as they were, without a
word."""


STRIPE_ALIGN = 16
"""Bytes that the own NVFP4 kernel reads at a time."""


class MtpHeadProjection(MtpHeadNew):
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
        match proj:
            case DenseWeight() if self.spark_gemv_rows_k:
                self._dense_rows(input, [Projection(proj, output, n, n)], 1, k, stream)
            case DenseWeight():
                dense_gemv(self.gpu, self.dense_gemv_k, input, proj, output, n, k, stream)
            case QuantizedWeight() if self._takes_packed(proj, k):
                self._packed_rows(input, [Nvfp4Projection(proj, output, n, n)], 1, k, stream)
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
        if isinstance(proj, DenseWeight) and self.spark_gemv_rows_k:
            self._dense_rows(input, [Projection(proj, output, n, n)], m, k, stream)
            return
        if isinstance(proj, QuantizedWeight) and self._takes_packed(proj, k):
            self._packed_rows(input, [Nvfp4Projection(proj, output, n, n)], m, k, stream)
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

    def _dense_rows(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        projections: Sequence[Projection],
        m: int,
        k: int,
        stream: StreamLike,
        head_dim: int = 0,
    ) -> None:
        """Every projection of BF16 [m, k], eight rows in one launch, each with the bits that it has alone."""
        for start in range(0, m, MAX_ROWS):
            some = [
                Projection(each.weight, each.output.offset(start * each.stride * BF16_BYTES), each.n, each.stride)
                for each in projections
            ]
            rows, a = min(MAX_ROWS, m - start), input.offset(start * k * BF16_BYTES)
            spark_gemv_rows(self.gpu, self.spark_gemv_rows_k, a, some, rows, k, stream, head_dim=head_dim)

    def _packed_rows(
        self,
        input: DevicePtr,  # noqa: A002 - the engine's name
        projections: Sequence[Nvfp4Projection],
        m: int,
        k: int,
        stream: StreamLike,
        head_dim: int = 0,
    ) -> None:
        """`_dense_rows` of NVFP4 weights that `_takes_packed`."""
        for start in range(0, m, MAX_ROWS):
            some = [
                Nvfp4Projection(each.weight, each.output.offset(start * each.stride * BF16_BYTES), each.n, each.stride)
                for each in projections
            ]
            rows, a = min(MAX_ROWS, m - start), input.offset(start * k * BF16_BYTES)
            kernel = self.spark_w4a16_gemv_rows_k
            spark_w4a16_gemv_rows(self.gpu, kernel, a, some, rows, k, stream, head_dim=head_dim)

    def _takes_packed(self, proj: QuantizedWeight, k: int) -> bool:
        """Whether the set's own kernel for rows takes an NVFP4 weight: by its addresses and the length of its rows."""
        aligned = (proj.weight.address | proj.weight_scale.address) % STRIPE_ALIGN == 0
        return bool(self.spark_w4a16_gemv_rows_k) and k % STRIPE == 0 and aligned

    def _dense_together(self, projections: Sequence[ProjectionWeight]) -> bool:
        """Whether one launch takes all of them: BF16, and a set with the kernel."""
        return bool(self.spark_gemv_rows_k) and all(isinstance(proj, DenseWeight) for proj in projections)

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
        """q BF16 [rows, q_width], queries before gates, k and v BF16 [rows, nkv, hd]: all in one launch where
        `_dense_together`, else of one row. Biases are added."""
        weights = (self.q_proj, self.k_proj, self.v_proj)
        if (packed := self._packed_qkv()) is not None:
            widths = (self.q_width, self.nkv * self.hd, self.nkv * self.hd)
            whole = [Nvfp4Projection(*each) for each in zip(packed, (q, k, v), widths, widths, strict=True)]
            self._packed_rows(normed, whole, rows, self.h, stream, self.hd if self.body.gated else 0)
            self._add_biases(q, k, v, rows, stream)
            return
        if not self._dense_together(weights):
            self._project_qg(normed, q, stream)
            self._project_kv(normed, k, v, stream)
            self._add_biases(q, k, v, 1, stream)
            return
        widths = (self.q_width, self.nkv * self.hd, self.nkv * self.hd)
        projections = [Projection(*each) for each in zip(weights, (q, k, v), widths, widths, strict=True)]
        self._dense_rows(normed, projections, rows, self.h, stream, self.hd if self.body.gated else 0)
        self._add_biases(q, k, v, rows, stream)

    def _packed_qkv(self) -> list[QuantizedWeight] | None:
        """Projections of attention that `_takes_packed`, all three; else None."""
        weights = (self.q_proj, self.k_proj, self.v_proj)
        packed = [each for each in weights if isinstance(each, QuantizedWeight) and self._takes_packed(each, self.h)]
        return packed if len(packed) == len(weights) else None

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
        """gate and up BF16 [rows, inter]: in one launch where `_dense_together`, else of one row."""
        if self._dense_together((gate_proj, up_proj)):
            pair = [Projection(gate_proj, gate, inter, inter), Projection(up_proj, up, inter, inter)]
            self._dense_rows(normed, pair, rows, self.h, stream)
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
        if isinstance(self.k_proj, QuantizedWeight) and isinstance(self.v_proj, QuantizedWeight):
            kernel = self.w4a16_gemv_dual_k
            w4a16_gemv_dual(self.gpu, kernel, normed, self.k_proj, k, self.v_proj, v, n, self.h, stream)
            return
        self.gemv(normed, self.k_proj, k, n, self.h, stream)
        self.gemv(normed, self.v_proj, v, n, self.h, stream)

    def _lm_head(self, normed: DevicePtr, logits: DevicePtr, stream: StreamLike) -> None:
        """logits BF16 [draft_vocab], the first rows of the head: padding behind them is never read."""
        self.gemv(normed, self.lm_head, logits, self.draft_vocab, self.h, stream)
