# SPDX-License-Identifier: AGPL-3.0-only
"""The cases of every catalogued kernel: what a kernel of that name has to do, whoever wrote it.

One file a module, each with `CASES`: function -> cases. A case is tagged `abi` (strides, aliases, addresses),
`numeric`, or `decision` where this project chose what the engine leaves open or does otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...catalog.spec import KernelSpec
from ..case import Case
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
    spark_gemv_rows,
    spark_moe_expert_mxfp4,
    spark_moe_expert_silu_down_clamped,
    spark_moe_expert_silu_down_clamped_bf16,
    spark_moe_rows,
    spark_moe_shared_expert_fused_fp8,
    spark_moe_silu_mul_clamped,
    spark_moe_topk_sigmoid,
    spark_mxfp4_gemv,
    spark_norm_rows,
    spark_nvfp4_transpose,
    spark_paged_decode_split,
    spark_qk_norm_rope_cache,
    spark_residual_add_rms_norm_vanilla,
    spark_rms_norm_f32,
    spark_v4_grouped_gemv,
    spark_v4_paged_decode,
    spark_v4_qkv,
    spark_v4_rope,
    ssm_preprocess,
    w4a16_gemm_t,
    w4a16_gemv,
    w4a16_gemv_fused,
    w4a16_gemv_joint_batch,
    w8a16_gemv,
)

__all__ = ["cases_of"]

_MODULES: Mapping[str, Mapping[str, tuple[Case, ...]]] = {
    "norm": norm.CASES,
    "rms_norm_vanilla": rms_norm_vanilla.CASES,
    "spark_residual_add_rms_norm_vanilla": spark_residual_add_rms_norm_vanilla.CASES,
    "spark_rms_norm_f32": spark_rms_norm_f32.CASES,
    "residual_add": residual_add.CASES,
    "gemv": gemv.CASES,
    "argmax": argmax.CASES,
    "embed_from_argmax": embed_from_argmax.CASES,
    "moe_silu_mul": moe_silu_mul.CASES,
    "moe_shared_expert_fused": moe_shared_expert_fused.CASES,
    "spark_moe_shared_expert_fused_fp8": spark_moe_shared_expert_fused_fp8.CASES,
    "moe_topk": moe_topk.CASES,
    "moe_topk_sqrt": moe_topk_sqrt.CASES,
    "spark_moe_topk_sigmoid": spark_moe_topk_sigmoid.CASES,
    "moe_hash_route": moe_topk_sqrt.HASH_CASES,
    "spark_moe_silu_mul_clamped": spark_moe_silu_mul_clamped.CASES,
    "hyper_connection": hyper_connection.CASES,
    "spark_hyper_connection": hyper_connection.SPARK_CASES,
    "moe_expert_gemv": {**moe_weighted_sum_blend.CASES, **moe_expert_gemv.CASES},
    "moe_expert_gemv_fused": moe_expert_gemv_fused.CASES,
    "moe_shared_expert_fused_bf16": moe_shared_expert_fused_bf16.CASES,
    "spark_moe_rows": spark_moe_rows.CASES,
    "dense_gemv_bf16_batchm": dense_gemv_bf16_batchm.CASES,
    "spark_gemv_rows": spark_gemv_rows.CASES,
    "rope": rope.CASES,
    "reshape_and_cache": reshape_and_cache.CASES,
    "fused_k_norm_rope_cache": fused_k_norm_rope_cache.CASES,
    "paged_decode": paged_decode.CASES,
    "paged_decode_fp8": paged_decode_fp8.CASES,
    "spark_paged_decode_split": spark_paged_decode_split.CASES,
    "spark_norm_rows": spark_norm_rows.CASES,
    "spark_qk_norm_rope_cache": spark_qk_norm_rope_cache.CASES,
    "spark_v4_rope": spark_v4_rope.CASES,
    "spark_v4_qkv": spark_v4_qkv.CASES,
    "spark_v4_paged_decode": spark_v4_paged_decode.CASES,
    "spark_v4_grouped_gemv": spark_v4_grouped_gemv.CASES,
    "ssm_preprocess": ssm_preprocess.CASES,
    "gemm": gemm.CASES,
    "quantize_nvfp4": quantize_nvfp4.CASES,
    "w4a16": w4a16_gemm_t.CASES,
    "spark_nvfp4_transpose": spark_nvfp4_transpose.CASES,
    "w4a16_gemv": {**w4a16_gemv.CASES, **w4a16_gemv_joint_batch.CASES},
    "w4a16_gemv_fused": w4a16_gemv_fused.CASES,
    "gemv_fp8w": gemv_fp8w.CASES,
    "w8a16_gemv": w8a16_gemv.CASES,
    "spark_mxfp4_gemv": spark_mxfp4_gemv.CASES,
    "spark_moe_expert_mxfp4": spark_moe_expert_mxfp4.CASES,
    "spark_moe_expert_silu_down_clamped": spark_moe_expert_silu_down_clamped.CASES,
    "spark_moe_expert_silu_down_clamped_bf16": spark_moe_expert_silu_down_clamped_bf16.CASES,
}


def cases_of(spec: KernelSpec) -> tuple[Case, ...]:
    """The cases of a catalogue row, in the order in which they are run; empty for a kernel that has none yet."""
    return _MODULES.get(spec.module, {}).get(spec.function, ())
