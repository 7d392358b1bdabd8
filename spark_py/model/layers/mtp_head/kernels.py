# SPDX-License-Identifier: AGPL-3.0-only
"""The kernel handles of `layers/mtp_head/new.rs`, resolved for what a head is made of."""

from __future__ import annotations

from collections.abc import Mapping, Set

from ....ops.w4a16_gemm_t import tgemm_kernel
from ....runtime.gpu import GpuBackend, KernelHandle
from ....runtime.kv_cache import KvCacheDtype
from ...drafting.rows import LM_HEAD_WIDTHS
from ...weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight
from .body import HeadBody
from .types import MtpQuantization, NormConvention

__all__ = ["MtpHeadKernels"]

_NONE = KernelHandle(0)
_TWICE = 8
QG_ROWS = (2, 3)


class MtpHeadKernels:
    """Handles under Rust's names. What this head has no use for is handle 0, as is an optional kernel that the set
    lacks; the others are required, and a KernelSetError names the one that is missing.

    `w4a16_batchm` has the batched NVFP4 GEMVs of the set, by the rows that they take at most; Rust's fields
    `w4a16_batchm`, `w4a16_gemv_batch16_k` and `w4a16_gemv_batch32_k`. `w4a16_gemv_qg_batch`: those of queries and
    gates, by the rows that they take exactly.
    """

    # fmt: off
    rms_norm_k: KernelHandle
    residual_add_rms_norm_k: KernelHandle
    rope_k: KernelHandle
    reshape_cache_k: KernelHandle
    paged_decode_k: KernelHandle
    residual_add_k: KernelHandle
    sigmoid_gate_mul_k: KernelHandle
    bf16_concat_k: KernelHandle
    argmax_k: KernelHandle
    embed_from_argmax_k: KernelHandle
    batched_embed_k: KernelHandle
    dense_gemv_k: KernelHandle
    dense_gemv_fp8w_k: KernelHandle
    dense_gemv_fp8w_batchm_k: KernelHandle
    w8a16_gemv_k: KernelHandle
    w8a16_gemv_batchm_k: KernelHandle
    w4a16_gemv_k: KernelHandle
    w4a16_gemv_sw_k: KernelHandle
    w4a16_gemv_qg_k: KernelHandle
    w4a16_gemv_qg_batch: Mapping[int, KernelHandle]
    w4a16_gemv_dual_k: KernelHandle
    deinterleave_qg_k: KernelHandle
    moe_silu_mul_k: KernelHandle
    moe_weighted_sum_blend_k: KernelHandle
    dense_gemm_k: KernelHandle
    dense_gemm_pipelined_k: KernelHandle
    dense_gemv_batchm_k: KernelHandle
    spark_gemv_rows_k: KernelHandle
    spark_fp8_gemv_rows_k: KernelHandle
    spark_w4a16_gemv_rows_k: KernelHandle
    w4a16_batchm: Mapping[int, KernelHandle]
    w4a16_gemm_t_k: KernelHandle
    argmax_batch_k: KernelHandle
    argmax_batch_lp_k: KernelHandle
    # fmt: on

    def _resolve_kernels(
        self,
        gpu: GpuBackend,
        quant: MtpQuantization,
        body: HeadBody,
        formats: Set[type],
        *,
        silu: bool,
        routes: bool,
        tiles: bool,
    ) -> None:
        """Resolve all. `body` decides the norm, and whether there are gates. `formats`: of projections, router and LM
        head. `silu`: the head runs an activation by itself, `routes`: and a mixture of experts; `tiles`: it has a
        transposed LM head."""
        bf16, nvfp4 = DenseWeight in formats, QuantizedWeight in formats

        def needed(use: bool, module: str, function: str) -> KernelHandle:
            return gpu.kernel(module, function) if use else _NONE

        def optional(use: bool, module: str, function: str) -> KernelHandle:
            return gpu.try_kernel(module, function) if use else _NONE

        # What every head runs.
        plain = body.norm is NormConvention.PLAIN
        vanilla = ("rms_norm_vanilla", "rms_norm_vanilla")
        self.rms_norm_k = gpu.kernel(*vanilla) if plain else gpu.kernel("norm", "rms_norm")
        fused_vanilla = ("spark_residual_add_rms_norm_vanilla", "spark_residual_add_rms_norm_vanilla")
        self.residual_add_rms_norm_k = (
            gpu.try_kernel(*fused_vanilla) if plain else gpu.kernel("norm", "residual_add_rms_norm")
        )
        self.rope_k = gpu.kernel("rope", "rope_forward")
        self.residual_add_k = gpu.kernel("residual_add", "bf16_residual_add")
        self.sigmoid_gate_mul_k = needed(body.gated, "residual_add", "sigmoid_gate_mul")
        self.bf16_concat_k = gpu.kernel("residual_add", "bf16_concat")
        self.argmax_k = gpu.kernel("argmax", "argmax_bf16")
        self.embed_from_argmax_k = gpu.kernel("embed_from_argmax", "embed_from_argmax")

        # By the KV pool's format.
        if quant.kv_dtype() is KvCacheDtype.BF16:
            self.reshape_cache_k = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash")
            self.paged_decode_k = gpu.kernel("paged_decode", "paged_decode_attn")
        else:
            self.reshape_cache_k = gpu.kernel("reshape_and_cache", "reshape_and_cache_flash_fp8")
            self.paged_decode_k = gpu.kernel("paged_decode_fp8", "paged_decode_attn_fp8")

        # By the weights' formats.
        self.dense_gemv_k = needed(bf16, "gemv", "dense_gemv_bf16")
        self.dense_gemv_fp8w_k = needed(Fp8DenseWeight in formats, "gemv_fp8w", "dense_gemv_fp8w")
        self.w8a16_gemv_k = needed(Fp8Weight in formats, "w8a16_gemv", "w8a16_gemv")
        self.w4a16_gemv_k = needed(nvfp4, "w4a16_gemv", "w4a16_gemv")
        self.w4a16_gemv_sw_k = optional(nvfp4, "w4a16_gemv", "w4a16_gemv_sw")
        packed = quant is MtpQuantization.NVFP4
        self.w4a16_gemv_qg_k = needed(packed and body.gated, "w4a16_gemv", "w4a16_gemv_qg")
        self.w4a16_gemv_dual_k = needed(packed, "w4a16_gemv_fused", "w4a16_gemv_dual")
        self.deinterleave_qg_k = needed(not packed and body.gated, "ssm_preprocess", "deinterleave_qg")

        # By the FFN.
        self.moe_silu_mul_k = needed(silu, "moe_silu_mul", "moe_silu_mul")
        self.moe_weighted_sum_blend_k = needed(routes, "moe_expert_gemv", "moe_weighted_sum_blend")

        # For several rows at a time; without them rows go one at a time, or (the GEMM) not at all. The GEMMs are for
        # BF16 heads alone: in others each row of a batch has the bits that it has alone, also behind a BF16 LM head.
        rows = quant is MtpQuantization.BF16
        self.dense_gemm_k = optional(rows, "gemm", "dense_gemm_bf16")
        self.dense_gemm_pipelined_k = optional(rows, "gemm", "dense_gemm_bf16_pipelined")
        self.dense_gemv_batchm_k = optional(bf16, "dense_gemv_bf16_batchm", "dense_gemv_bf16_batchm")
        self.spark_gemv_rows_k = optional(bf16, "spark_gemv_rows", "spark_gemv_rows")
        fp8 = Fp8DenseWeight in formats
        self.spark_fp8_gemv_rows_k = optional(fp8, "spark_fp8_gemv_rows", "spark_fp8_gemv_rows")
        self.spark_w4a16_gemv_rows_k = optional(nvfp4, "spark_w4a16_gemv_rows", "spark_w4a16_gemv_rows")
        self.dense_gemv_fp8w_batchm_k = optional(Fp8DenseWeight in formats, "gemv_fp8w", "spark_dense_gemv_fp8w_batchm")
        self.w8a16_gemv_batchm_k = optional(Fp8Weight in formats, "w8a16_gemv", "spark_w8a16_gemv_batchm")
        self.w4a16_batchm = _w4a16_widths(gpu) if nvfp4 else {}
        self.w4a16_gemv_qg_batch = _qg_widths(gpu) if packed and body.gated else {}
        self.w4a16_gemm_t_k = tgemm_kernel(gpu) if tiles else _NONE
        self.argmax_batch_k = gpu.try_kernel("argmax", "argmax_bf16_batch")
        self.argmax_batch_lp_k = gpu.try_kernel("argmax", "argmax_bf16_batch_lp")
        self.batched_embed_k = gpu.try_kernel("embed_from_argmax", "batched_embed")


def _w4a16_widths(gpu: GpuBackend) -> dict[int, KernelHandle]:
    """The batched GEMVs. There are two of width 8, of which `_rt2` is preferred."""
    found = {}
    for width in LM_HEAD_WIDTHS:
        name = f"w4a16_gemv_batch{width}"
        preferred = gpu.try_kernel("w4a16_gemv", f"{name}_rt2") if width == _TWICE else _NONE
        if handle := preferred or gpu.try_kernel("w4a16_gemv", name):
            found[width] = handle
    return found


def _qg_widths(gpu: GpuBackend) -> dict[int, KernelHandle]:
    handles = {rows: gpu.try_kernel("w4a16_gemv", f"w4a16_gemv_qg_batch{rows}") for rows in QG_ROWS}
    return {rows: handle for rows, handle in handles.items() if handle}
