# SPDX-License-Identifier: AGPL-3.0-only
"""The one table of kernels: (module, function) -> parameters, geometry, reference, GPU-only, lowest architecture.

The rows stand in one file a kernel family; this file joins them. Names, parameter order and types are the engine's
launch ABI; functions whose names start with `spark_` are this project's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import (
    argmax,
    dense_gemv_bf16_batchm,
    embed_from_argmax,
    fused_k_norm_rope_cache,
    gemm,
    gemv,
    gemv_fp8w,
    hyper_connection,
    moe_expert_gemv,
    moe_expert_gemv_fused,
    moe_hash_route,
    moe_shared_expert_fused,
    moe_shared_expert_fused_bf16,
    moe_silu_mul,
    moe_topk,
    moe_topk_sqrt,
    moe_weighted_sum_blend,
    norm,
    paged_decode,
    paged_decode_fp8,
    quantize_nvfp4,
    reshape_and_cache,
    residual_add,
    rms_norm_vanilla,
    rope,
    spark_fp8_gemv_rows,
    spark_gemv_rows,
    spark_hc_norm,
    spark_hyper_connection,
    spark_moe_expert_mxfp4,
    spark_moe_expert_silu_down_clamped,
    spark_moe_expert_silu_down_clamped_bf16,
    spark_moe_rows,
    spark_moe_shared_expert_fused_fp8,
    spark_moe_silu_mul_clamped,
    spark_moe_step_bf16,
    spark_moe_step_nvfp4,
    spark_moe_topk_sigmoid,
    spark_mxfp4_experts,
    spark_mxfp4_gemv,
    spark_norm_rows,
    spark_nvfp4_transpose,
    spark_paged_decode_split,
    spark_propose_inputs,
    spark_qk_norm_rope_cache,
    spark_residual_add_rms_norm_vanilla,
    spark_rms_norm_f32,
    spark_v4_grouped_gemv,
    spark_v4_paged_decode,
    spark_v4_qkv,
    spark_v4_rope,
    spark_w4a16_gemv_rows,
    spark_w8a16_rows,
    ssm_preprocess,
    w4a16_gemm_t,
    w4a16_gemv,
    w4a16_gemv_fused,
    w4a16_gemv_joint_batch,
    w8a16_gemv,
)
from .spec import KernelSpec

_FAMILIES: tuple[tuple[KernelSpec, ...], ...] = (
    norm.KERNELS,
    rms_norm_vanilla.KERNELS,
    spark_residual_add_rms_norm_vanilla.KERNELS,
    spark_norm_rows.KERNELS,
    spark_rms_norm_f32.KERNELS,
    residual_add.KERNELS,
    gemv.KERNELS,
    argmax.KERNELS,
    embed_from_argmax.KERNELS,
    spark_propose_inputs.KERNELS,
    moe_silu_mul.KERNELS,
    moe_expert_gemv.KERNELS,
    moe_expert_gemv_fused.KERNELS,
    moe_shared_expert_fused.KERNELS,
    spark_moe_shared_expert_fused_fp8.KERNELS,
    moe_topk.KERNELS,
    moe_topk_sqrt.KERNELS,
    spark_moe_topk_sigmoid.KERNELS,
    moe_hash_route.KERNELS,
    spark_moe_silu_mul_clamped.KERNELS,
    hyper_connection.KERNELS,
    spark_hyper_connection.KERNELS,
    moe_weighted_sum_blend.KERNELS,
    moe_shared_expert_fused_bf16.KERNELS,
    spark_moe_rows.KERNELS,
    spark_moe_step_bf16.KERNELS,
    spark_moe_step_nvfp4.KERNELS,
    dense_gemv_bf16_batchm.KERNELS,
    spark_gemv_rows.KERNELS,
    rope.KERNELS,
    reshape_and_cache.KERNELS,
    fused_k_norm_rope_cache.KERNELS,
    paged_decode.KERNELS,
    paged_decode_fp8.KERNELS,
    spark_paged_decode_split.KERNELS,
    spark_qk_norm_rope_cache.KERNELS,
    spark_v4_rope.KERNELS,
    spark_v4_qkv.KERNELS,
    spark_v4_paged_decode.KERNELS,
    spark_v4_grouped_gemv.KERNELS,
    ssm_preprocess.KERNELS,
    gemm.KERNELS,
    quantize_nvfp4.KERNELS,
    w4a16_gemm_t.KERNELS,
    spark_nvfp4_transpose.KERNELS,
    w4a16_gemv.KERNELS,
    spark_w4a16_gemv_rows.KERNELS,
    spark_w8a16_rows.KERNELS,
    spark_hc_norm.KERNELS,
    spark_mxfp4_experts.KERNELS,
    w4a16_gemv_joint_batch.KERNELS,
    w4a16_gemv_fused.KERNELS,
    gemv_fp8w.KERNELS,
    spark_fp8_gemv_rows.KERNELS,
    w8a16_gemv.KERNELS,
    spark_mxfp4_gemv.KERNELS,
    spark_moe_expert_mxfp4.KERNELS,
    spark_moe_expert_silu_down_clamped.KERNELS,
    spark_moe_expert_silu_down_clamped_bf16.KERNELS,
)

CATALOG: dict[tuple[str, str], KernelSpec] = {spec.key: spec for family in _FAMILIES for spec in family}


def find(module: str, function: str) -> KernelSpec | None:
    """The catalogue's row, or None for a kernel it does not know."""
    return CATALOG.get((module, function))


def all_kernels() -> Iterator[KernelSpec]:
    """Every row, in table order."""
    yield from CATALOG.values()
