# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of DeepSeek-V4's routers and of its clamped activation."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ONE = "moe_topk_sqrt::moe_topk_sqrtsoftplus"
_BATCHED = "moe_topk_sqrt::moe_topk_sqrtsoftplus_batched"
_HASH = "moe_hash_route::moe_hash_route"
_SILU = "spark_moe_silu_mul_clamped::spark_moe_silu_mul_clamped"
_CUH, _CU, _PY = "moe_sqrt.cuh", "moe_topk_sqrt.cu", "moe_topk_sqrt.py"
_HASH_CU, _HASH_PY = "moe_hash_route.cu", "moe_hash_route.py"
_SILU_CU, _SILU_PY = "spark_moe_silu_mul_clamped.cu", "spark_moe_silu_mul_clamped.py"

_SOFTPLUS_CU = "fmaxf(l, 0.0f) + log1pf(expf(-fabsf(l)))"
_SOFTPLUS_PY = "floor + np.log1p(np.exp(-np.abs(logits)))"
_INDICES_PY = "indices = largest_first(scores + bias, top_k)"
_CHOSEN_PY = "chosen = np.take_along_axis(scores, indices.astype(np.intp), axis=1)"
_SCORE_CU = "lane < k ? scores[chosen] : 0.0f"
_SUM_CU = "if (!(sum <= SQRT_SMALLEST_SUM)) {"
_SUM_PY = "total <= np.float32(SMALLEST_SUM)"
_KNOWN_CU = "entry >= 0 && entry < static_cast<long long>(num_experts)"
_KNOWN_PY = "known = (entries >= 0) & (entries < len(logits))"
_GATE_CU = "const float g = gate > limit ? limit : gate;"
_UP_CU = "const float u = up > limit ? limit : up < -limit ? -limit : up;"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _ONE,
        "log(1 + exp(l)) as it is written: large logits overflow, small ones vanish",
        cu=Patch(_CUH, _SOFTPLUS_CU, "logf(1.0f + expf(l))"),
        py=Patch(_PY, _SOFTPLUS_PY, "0 * floor + np.log(np.float32(1) + np.exp(logits))"),
    ),
    Mutant(
        _ONE,
        "linear above 20 and below it the plain formula",
        cu=Patch(_CUH, _SOFTPLUS_CU, "l > 20.0f ? l : logf(1.0f + expf(l))"),
        py=Patch(_PY, _SOFTPLUS_PY, "np.where(logits > 20, floor, np.log(np.float32(1) + np.exp(logits)))"),
    ),
    Mutant(
        _ONE,
        "ties to the highest index",
        cu=Patch(
            _CU,
            "__reduce_min_sync(SPARK_FULL_MASK, best == most ? expert : 0xffffffffu);",
            "__reduce_max_sync(SPARK_FULL_MASK, best == most ? expert : 0u);",
        ),
        py=Patch(
            _PY,
            _INDICES_PY,
            "indices = np.uint32(scores.shape[1] - 1) - largest_first((scores + bias)[:, ::-1], top_k)",
        ),
    ),
    Mutant(
        _ONE,
        "NaN wins",
        cu=Patch(_CU, "return SQRT_NAN;", "return 0xffffffffu;"),
        py=Patch(_PY, _INDICES_PY, "indices = largest_first(np.nan_to_num(scores + bias, nan=np.inf), top_k)"),
    ),
    Mutant(
        _ONE,
        "the bias left out of the choice",
        cu=Patch(
            _CU,
            "sqrt_key(scores[expert] + bias[expert])",
            "sqrt_key(scores[expert])",
        ),
        py=Patch(_PY, _INDICES_PY, "indices = largest_first(scores, top_k)"),
    ),
    Mutant(
        _ONE,
        "the bias in the weights",
        cu=Patch(_CU, _SCORE_CU, _SCORE_CU.replace("[chosen]", "[chosen] + bias[chosen]")),
        py=Patch(_PY, _CHOSEN_PY, _CHOSEN_PY.replace("(scores,", "(scores + bias,")),
    ),
    Mutant(
        _ONE,
        "no scaling factor",
        cu=Patch(_CUH, "return score * scaling_factor;", "return score + 0.0f * scaling_factor;"),
        py=Patch(_PY, "return scores * np.float32(scaling_factor)", "return scores"),
    ),
    Mutant(
        _ONE,
        "never normalised",
        cu=Patch(_CUH, _SUM_CU, "if (sum < 0.0f) {"),
        py=Patch(_PY, _SUM_PY, "total >= np.float32(0)"),
    ),
    Mutant(
        _ONE,
        "the 32 last experts left out",
        cu=Patch(_CU, "if (expert < experts) {", "if (expert < experts && expert < SQRT_MAX_EXPERTS - SPARK_WARP) {"),
    ),
    Mutant(
        _BATCHED,
        "the first token for all",
        cu=Patch(_CU, "topk_sqrt(gate_logits + token * num_experts,", "topk_sqrt(gate_logits + 0u * token,"),
        py=Patch(
            _PY, "scores = sqrt_softplus(to_f32(logits))", "scores = sqrt_softplus(to_f32(logits))[[0] * len(logits)]"
        ),
    ),
    Mutant(
        _BATCHED,
        "weights of tokens one too far apart",
        cu=Patch(_CU, "expert_weights + token * top_k", "expert_weights + token * (top_k + 1u)"),
    ),
    Mutant(
        _BATCHED,
        "weights in the order of experts",
        py=Patch(
            _PY, _CHOSEN_PY, "chosen = np.take_along_axis(scores, np.sort(indices, axis=1).astype(np.intp), axis=1)"
        ),
    ),
    Mutant(
        _BATCHED,
        "always normalised",
        cu=Patch(
            _CU,
            "              num_experts, top_k, normalize != 0u, scaling_factor);",
            "              num_experts, top_k, true, scaling_factor);",
        ),
        py=Patch(_PY, "    if normalize:\n", "    if True:\n"),
    ),
    Mutant(
        _HASH,
        "the table's first row",
        cu=Patch(_HASH_CU, "static_cast<size_t>(token_id_ptr[0]) * top_k + lane", "lane + 0u * token_id_ptr[0]"),
    ),
    Mutant(
        _HASH,
        "entries read as 32 bits",
        cu=Patch(
            _HASH_CU, "const bool known = " + _KNOWN_CU, "const bool known = static_cast<unsigned>(entry) < num_experts"
        ),
        py=Patch(_HASH_PY, _KNOWN_PY, "entries = entries & 0xFFFFFFFF\n        known = entries < len(logits)"),
    ),
    Mutant(
        _HASH,
        "a wrong entry counts as expert 0",
        cu=Patch(_HASH_CU, "__uint_as_float(0x7fffffffu)", "sqrt_softplus(spark_load(gate_logits))"),
        py=Patch(
            _HASH_PY,
            "np.where(known, sqrt_softplus(to_f32(logits))[indices], np.float32(np.nan))",
            "sqrt_softplus(to_f32(logits))[indices]",
        ),
    ),
    Mutant(
        _HASH,
        "experts in ascending order",
        py=Patch(_HASH_PY, "np.where(known, entries, 0)", "np.sort(np.where(known, entries, 0))"),
    ),
    Mutant(
        _HASH,
        "the first 16 slots alone in the sum",
        cu=Patch(_CUH, "spark_warp_sum(score, SPARK_WARP)", "spark_warp_sum(score, SPARK_WARP / 2u)"),
    ),
    Mutant(
        _SILU,
        "no limit on the gate",
        cu=Patch(_SILU_CU, _GATE_CU, "const float g = gate;"),
        py=Patch(_SILU_PY, "np.minimum(to_f32(gate), most)", "to_f32(gate)"),
    ),
    Mutant(
        _SILU,
        "the gate bounded on both sides",
        cu=Patch(_SILU_CU, _GATE_CU, "const float g = gate > limit ? limit : gate < -limit ? -limit : gate;"),
        py=Patch(_SILU_PY, "np.minimum(to_f32(gate), most)", "np.clip(to_f32(gate), -most, most)"),
    ),
    Mutant(
        _SILU,
        "up bounded from above alone",
        cu=Patch(_SILU_CU, _UP_CU, "const float u = up > limit ? limit : up;"),
        py=Patch(_SILU_PY, "np.clip(to_f32(up), -most, most)", "np.minimum(to_f32(up), most)"),
    ),
    Mutant(
        _SILU,
        "the limit on silu(gate)",
        cu=Patch(
            _SILU_CU,
            "return g * sigmoid * u;",
            "return fminf(gate / (1.0f + __expf(-gate)), limit) * u + 0.0f * (g * sigmoid);",
        ),
        py=Patch(
            _SILU_PY,
            "return to_bf16(g * sigmoid(g) * u)",
            "return to_bf16(np.minimum(to_f32(gate) * sigmoid(to_f32(gate)), most) * u)",
        ),
    ),
    Mutant(
        _SILU,
        "a limit of 10 whatever is asked",
        cu=Patch(
            _SILU_CU,
            "clamped_product(spark_low(gate), spark_low(up), limit)",
            "clamped_product(spark_low(gate), spark_low(up), 10.0f)",
        ),
        py=Patch(_SILU_PY, "most = np.float32(limit)", "most = np.float32(10.0)"),
    ),
    Mutant(
        _SILU,
        "the last elements left out",
        cu=Patch(_SILU_CU, "i < end && i < total_elements; ++i", "i + 1u < end && i < total_elements; ++i"),
    ),
)
