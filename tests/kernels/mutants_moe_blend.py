# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the blend of experts: order, rounding, the gate, and which token's row is whose."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ONE = "moe_expert_gemv::moe_weighted_sum_blend"
_CUH, _PY = "moe_blend.cuh", "moe_weighted_sum_blend.py"

_ADD_CU = "sum = sum + weights[e] * spark_load(expert_out + static_cast<size_t>(e) * hidden + h);"
_LOOP_PY = "for row, weight in zip(expert_out, weights, strict=True):"
_ADD_PY = "total = total + weight * to_f32(row)"
_LAST_PY = "return to_bf16(total + gate * to_f32(shared_out))"
_GATE_PY = "sigmoid(gate_logit(x, gate_weight))"
_NO_GATE_PY = "np.float32(1.0) if gate_weight is None"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _ONE,
        "last slot first",
        cu=Patch(_CUH, _ADD_CU, _ADD_CU.replace("[e]", "[top_k - 1u - e]").replace("(e)", "(top_k - 1u - e)")),
        py=Patch(_PY, _LOOP_PY, _LOOP_PY.replace("expert_out, weights", "expert_out[::-1], weights[::-1]")),
    ),
    Mutant(
        _ONE,
        "fused multiply-add",
        cu=Patch(
            _CUH, _ADD_CU, "sum = fmaf(weights[e], spark_load(expert_out + static_cast<size_t>(e) * hidden + h), sum);"
        ),
    ),
    Mutant(
        _ONE,
        "the shared expert first",
        cu=Patch(_CUH, "        shared = spark_load(shared_out + h);\n", "        sum = spark_load(shared_out + h);\n"),
        py=Patch(_PY, _LAST_PY, _LAST_PY.replace("total +", "0.0 * total +")),
    ),
    Mutant(
        _ONE,
        "the experts' sum rounded to BF16 before the shared expert",
        cu=Patch(_CUH, "sum + gate * shared", "__bfloat162float(__float2bfloat16_rn(sum)) + gate * shared"),
        py=Patch(_PY, _LAST_PY, _LAST_PY.replace("total +", "to_f32(to_bf16(total)) +")),
    ),
    Mutant(
        _ONE,
        "the gate multiplies everything",
        cu=Patch(_CUH, "sum + gate * shared", "gate * (sum + shared)"),
        py=Patch(_PY, _LAST_PY, "return to_bf16(gate * (total + to_f32(shared_out)))"),
    ),
    Mutant(
        _ONE,
        "no sigmoid",
        cu=Patch(_CUH, "1.0f / (1.0f + __expf(-spark_block_sum(logit)))", "spark_block_sum(logit)"),
        py=Patch(_PY, _GATE_PY, "gate_logit(x, gate_weight)"),
    ),
    Mutant(
        _ONE,
        "no gate means 0",
        cu=Patch(_CUH, "float gate = 1.0f;", "float gate = 0.0f;"),
        py=Patch(_PY, _NO_GATE_PY, _NO_GATE_PY.replace("1.0", "0.0")),
    ),
    Mutant(
        _ONE,
        "the logit rounded to BF16",
        cu=Patch(_CUH, "-spark_block_sum(logit)", "-__bfloat162float(__float2bfloat16_rn(spark_block_sum(logit)))"),
        py=Patch(_PY, _GATE_PY, "sigmoid(to_f32(to_bf16(gate_logit(x, gate_weight))))"),
    ),
    Mutant(
        _ONE,
        "one chunk of the gate a thread",
        cu=Patch(_CUH, "c < K / SPARK_DOT_CHUNK; c += SPARK_BLEND_BLOCK", "c < K / SPARK_DOT_CHUNK; c += K"),
        py=Patch(_PY, "for step in steps:", "for step in steps[:CHUNK]:"),
    ),
    Mutant(
        _ONE,
        "one element past the row written",
        cu=Patch(_CUH, "if (h < hidden) {\n        spark_store", "if (h <= hidden) {\n        spark_store"),
    ),
)
