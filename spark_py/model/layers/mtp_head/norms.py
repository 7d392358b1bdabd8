# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the norms in `layers/mtp_head/forward.rs`, and of what stands before and after them: the two inputs side by
side, and additions to the residual stream.

Where the set has `spark_norm_rows`, these are one launch each, with the bits of the single kernels.
"""

from __future__ import annotations

from ....ops.norm import residual_add_rms_norm, rms_norm
from ....ops.residual_add import bf16_concat, residual_add
from ....ops.spark_norm_rows import spark_add_then_norm, spark_norm_concat, takes_hidden
from ....runtime.gpu import DevicePtr, KernelHandle, StreamLike
from ...layer import ForwardContext
from ...weight_map import DenseWeight, MtpWeights
from .ffn import MtpHeadFfn
from .new import BF16_BYTES
from .types import NormConvention

__all__ = ["MtpHeadNorms"]

_PAIR_BYTES = 4


class MtpHeadNorms(MtpHeadFfn):
    """Norms of rows."""

    spark_norm_concat_k = KernelHandle(0)
    spark_add_then_norm_k = KernelHandle(0)

    def _build(self, weights: MtpWeights, main_kv_blocks: int) -> None:
        super()._build(weights, main_kv_blocks)
        if takes_hidden(self.h):
            self.spark_norm_concat_k = self.gpu.try_kernel("spark_norm_rows", "spark_norm_concat")
            self.spark_add_then_norm_k = self.gpu.try_kernel("spark_norm_rows", "spark_add_then_norm")

    @property
    def _one_plus(self) -> bool:
        return self.body.norm is NormConvention.ONE_PLUS_W

    def _rms_norm(
        self, source: DevicePtr, weight: DenseWeight, output: DevicePtr, rows: int, width: int, stream: StreamLike
    ) -> None:
        rms_norm(self.gpu, self.rms_norm_k, source, weight, output, rows, width, self.eps, stream)

    def _norm_inputs(
        self, embed: DevicePtr, hidden: DevicePtr, rows: int, ctx: ForwardContext, stream: StreamLike
    ) -> DevicePtr:
        """The norms of BF16 [rows, h] each side by side, in the order of the columns of `fc`: the address of BF16
        [rows, 2h], `ssm_ba`. `hidden` may be `ssm_gates`, `embed` `ssm_deinterleaved`: both are overwritten."""
        gpu, buf, h, eps = self.gpu, ctx.buffers, self.h, self.eps
        concat = buf.ssm_ba()
        inputs = (embed, self.pre_fc_norm_embedding), (hidden, self.pre_fc_norm_hidden)
        if self.spark_norm_concat_k and (embed.address | hidden.address) % _PAIR_BYTES == 0:
            first, second = inputs[::-1] if self.body.hidden_first else inputs
            kernel, plus = self.spark_norm_concat_k, self._one_plus
            sources, weights = (first[0], second[0]), (first[1], second[1])
            spark_norm_concat(gpu, kernel, *sources, *weights, concat, rows, h, plus, eps, stream)
            return concat
        normed = (buf.ssm_deinterleaved(), buf.ssm_gates())
        for (source, weight), target in zip(inputs, normed, strict=True):
            self._rms_norm(source, weight, target, rows, h, stream)
        if rows == 1:
            bf16_concat(gpu, self.bf16_concat_k, *self._in_order(*normed), concat, h, stream)
        else:
            self._concat_rows(*normed, concat, rows, stream)
        return concat

    def _in_order(self, embed: DevicePtr, hidden: DevicePtr) -> tuple[DevicePtr, DevicePtr]:
        """The two inputs as the columns of `fc` have them."""
        return (hidden, embed) if self.body.hidden_first else (embed, hidden)

    def _concat_rows(
        self, embed: DevicePtr, hidden: DevicePtr, concat: DevicePtr, rows: int, stream: StreamLike
    ) -> None:
        """concat BF16 [rows, 2h] of BF16 [rows, h] each."""
        row = self.h * BF16_BYTES
        first, second = self._in_order(embed, hidden)
        for source, target in ((first, concat), (second, concat.offset(row))):
            self.gpu.copy_d2d_2d_async(source, row, target, 2 * row, row, rows, stream)

    def _residual_add_rms_norm(
        self,
        hidden: DevicePtr,
        src: DevicePtr,
        weight: DenseWeight,
        output: DevicePtr,
        residual: DevicePtr,
        stream: StreamLike,
        rows: int = 1,
    ) -> None:
        gpu, h = self.gpu, self.h
        if kernel := self.residual_add_rms_norm_k:
            residual_add_rms_norm(gpu, kernel, hidden, src, weight, output, residual, rows, h, self.eps, stream)
            return
        # A set without the fused kernel for plain weights, whose mean square is of the sums before rounding; here of
        # those after.
        residual_add(gpu, self.residual_add_k, hidden, src, rows * h, stream)
        gpu.copy_d2d_async(hidden, residual, rows * h * BF16_BYTES, stream)
        self._rms_norm(hidden, weight, output, rows, h, stream)

    def _add_then_norm(
        self,
        hidden: DevicePtr,
        src: DevicePtr,
        weight: DenseWeight,
        output: DevicePtr,
        stream: StreamLike,
        rows: int = 1,
    ) -> None:
        """hidden += src, output = the norm of hidden: BF16 [rows, h] of the arena each."""
        gpu, h = self.gpu, self.h
        if kernel := self.spark_add_then_norm_k:
            spark_add_then_norm(gpu, kernel, hidden, src, weight, output, rows, h, self._one_plus, self.eps, stream)
            return
        residual_add(gpu, self.residual_add_k, hidden, src, rows * h, stream)
        self._rms_norm(hidden, weight, output, rows, h, stream)
