# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of norm, rms_norm_vanilla, spark_residual_add_rms_norm_vanilla and spark_rms_norm_f32."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ROOT = "return rsqrtf(sum_of_squares / static_cast<float>(size) + eps);"
_ONE_PLUS = "const float w1 = ONE_PLUS ? 1.0f + spark_high(weight) : spark_high(weight);"
_SCALED = "return spark_pack(spark_low(x) * r * w0, spark_high(x) * r * w1);"
_ROUND_EARLY = (
    "return spark_pack(__bfloat162float(__float2bfloat16_rn(spark_low(x) * r)) * w0,\n"
    "                  __bfloat162float(__float2bfloat16_rn(spark_high(x) * r)) * w1);"
)
_PLAIN_PY = "return to_bf16(values * inverse_rms(values, eps) * (np.float32(1.0) + to_f32(weight)))"
_MEAN_PY = "mean = row_sum_of_squares(x) / np.float32(x.shape[1]) + np.float32(eps)"
_COPY_PY = "return rms_norm(x, weight, eps), x.copy()"
_ADDED_PY = "scaled = to_f32(rounded) * inverse_rms(sums, eps)"
_COPY_CU = "spark_rms_norm<true>(input, weight, output, residual, hidden_size, eps);"
_SQUARES_CU = "squares += s0 * s0 + s1 * s1;"
_HIDDEN_CU = "spark_store_pair<WIDE>(hidden, pair, size, rounded);"
_RESIDUAL_CU = "spark_store_pair<WIDE>(residual, pair, size, rounded);"
_VANILLA_CU = "spark_rms_norm<false>(input, weight, output, nullptr, hidden_size, eps);"
_VANILLA_PY = "return to_bf16(values * inverse_rms(values, eps) * to_f32(weight))"
_FUSED = "spark_residual_add_rms_norm_vanilla::spark_residual_add_rms_norm_vanilla"
_FUSED_CU, _FUSED_PY = "spark_residual_add_rms_norm_vanilla.cu", "spark_residual_add_rms_norm_vanilla.py"
_TWO = "spark_rms_norm_f32::spark_rms_norm_both"
_WIDE, _WIDE_CU, _WIDE_PY = "spark_rms_norm_f32::spark_rms_norm_f32", "spark_rms_norm_f32.cu", "spark_rms_norm_f32.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "norm::rms_norm",
        "plain weight on the odd elements",
        cu=Patch("rms_norm.cuh", _ONE_PLUS, "const float w1 = spark_high(weight);"),
        py=Patch("norm.py", _PLAIN_PY, "return to_bf16(values * inverse_rms(values, eps) * to_f32(weight))"),
    ),
    Mutant(
        "norm::rms_norm",
        "eps outside the root",
        cu=Patch("rms_norm.cuh", _ROOT, "return rsqrtf(sum_of_squares / static_cast<float>(size)) + eps;"),
        py=Patch("norm.py", _MEAN_PY, "mean = row_sum_of_squares(x) / np.float32(x.shape[1])"),
    ),
    Mutant(
        "norm::rms_norm",
        "eps added to the sum instead of the mean",
        cu=Patch("rms_norm.cuh", _ROOT, "return rsqrtf((sum_of_squares + eps) / static_cast<float>(size));"),
        py=Patch("norm.py", _MEAN_PY, "mean = (row_sum_of_squares(x) + np.float32(eps)) / np.float32(x.shape[1])"),
    ),
    Mutant(
        "norm::rms_norm",
        "rounded to BF16 before the weight",
        cu=Patch("rms_norm.cuh", _SCALED, _ROUND_EARLY),
        py=Patch(
            "norm.py",
            _PLAIN_PY,
            "normed = to_f32(to_bf16(values * inverse_rms(values, eps)))\n"
            "        return to_bf16(normed * (np.float32(1.0) + to_f32(weight)))",
        ),
    ),
    Mutant(
        "norm::rms_norm",
        "last element of an odd row left out",
        cu=Patch("rms_norm.cuh", "return size / 2u + (size & 1u);", "return size / 2u;"),
        py=Patch(
            "norm.py",
            "squares = padded(x * x, 2 * pairs)",
            "squares = padded((x * x)[:, : size // 2 * 2], 2 * pairs)",
        ),
    ),
    Mutant(
        "norm::rms_norm",
        "only the first warp's sum counts",
        cu=Patch("spark_common.cuh", "lane < warps ? warp_sums[lane] : 0.0f", "lane < 1u ? warp_sums[lane] : 0.0f"),
        py=Patch("norm.py", "return halving_sum(padded(sums, WARP))", "return sums[:, 0]"),
    ),
    Mutant(
        "norm::rms_norm",
        "rows off a 4-byte address lose every second element",
        cu=Patch(
            "rms_norm.cuh",
            "const unsigned high = whole ? __bfloat16_as_ushort(row[2u * pair + 1u]) : 0u;",
            "const unsigned high = 0u;",
        ),
    ),
    Mutant(
        "norm::rms_norm@far",
        "32-bit row offset",
        cu=Patch(
            "rms_norm.cuh",
            "static_cast<size_t>(blockIdx.x) * size;\n    const __nv_bfloat16* x",
            "blockIdx.x * size;\n    const __nv_bfloat16* x",
        ),
    ),
    Mutant(
        "norm::rms_norm_residual",
        "output and copy swapped",
        cu=Patch("norm.cu", _COPY_CU, "spark_rms_norm<true>(input, weight, residual, output, hidden_size, eps);"),
        py=Patch("norm.py", _COPY_PY, "return x.copy(), rms_norm(x, weight, eps)"),
    ),
    Mutant(
        "norm::rms_norm_residual",
        "copy of the result, not of the input",
        cu=Patch(
            "norm.cu",
            _COPY_CU,
            "spark_rms_norm<true>(input, weight, output, nullptr, hidden_size, eps);\n"
            "    spark_rms_norm<true>(output, weight, residual, nullptr, hidden_size, eps);",
        ),
        py=Patch("norm.py", _COPY_PY, "return rms_norm(x, weight, eps), rms_norm(x, weight, eps)"),
    ),
    Mutant(
        "norm::rms_norm_residual",
        "eps dropped",
        cu=Patch("norm.cu", _COPY_CU, "spark_rms_norm<true>(input, weight, output, residual, hidden_size, 0.0f);"),
        py=Patch("norm.py", _COPY_PY, "return rms_norm(x, weight, 0.0), x.copy()"),
    ),
    Mutant(
        "norm::residual_add_rms_norm",
        "mean square of the rounded sums",
        cu=Patch(
            "rms_norm.cuh",
            _SQUARES_CU,
            "squares += spark_low(rounded) * spark_low(rounded) + spark_high(rounded) * spark_high(rounded);",
        ),
        py=Patch("norm.py", _ADDED_PY, "scaled = to_f32(rounded) * inverse_rms(to_f32(rounded), eps)"),
    ),
    Mutant(
        "norm::residual_add_rms_norm",
        "numerator from the unrounded sums",
        py=Patch("norm.py", _ADDED_PY, "scaled = sums * inverse_rms(sums, eps)"),
    ),
    Mutant(
        "norm::residual_add_rms_norm",
        "hidden not updated",
        cu=Patch("rms_norm.cuh", _HIDDEN_CU, ""),
        py=Patch("norm.py", "rounded = to_bf16(sums)", "rounded = hidden"),
    ),
    Mutant(
        "norm::residual_add_rms_norm",
        "residual is the hidden before the addition",
        cu=Patch("rms_norm.cuh", _RESIDUAL_CU, "spark_store_pair<WIDE>(residual, pair, size, h);"),
    ),
    Mutant(
        "norm::residual_add_rms_norm",
        "output written where src is still to be read",
        cu=Patch(
            "rms_norm.cuh",
            _RESIDUAL_CU,
            _RESIDUAL_CU + "\n        if (pair + 1u < pairs) {\n"
            "            spark_store_pair<WIDE>(output, pair + 1u, size, 0u);\n        }",
        ),
    ),
    Mutant(
        "rms_norm_vanilla::rms_norm_vanilla",
        "one plus the weight",
        cu=Patch(
            "rms_norm_vanilla.cu",
            _VANILLA_CU,
            "spark_rms_norm<true>(input, weight, output, nullptr, hidden_size, eps);",
        ),
        py=Patch(
            "rms_norm_vanilla.py",
            _VANILLA_PY,
            "return to_bf16(values * inverse_rms(values, eps) * (1 + to_f32(weight)))",
        ),
    ),
    Mutant(
        "rms_norm_vanilla::rms_norm_vanilla",
        "rounded to BF16 before the weight",
        cu=Patch("rms_norm.cuh", _SCALED, _ROUND_EARLY),
        py=Patch(
            "rms_norm_vanilla.py",
            _VANILLA_PY,
            "return to_bf16(to_f32(to_bf16(values * inverse_rms(values, eps))) * to_f32(weight))",
        ),
    ),
    Mutant(
        "rms_norm_vanilla::rms_norm_vanilla",
        "eps dropped",
        cu=Patch(
            "rms_norm_vanilla.cu",
            _VANILLA_CU,
            "spark_rms_norm<false>(input, weight, output, nullptr, hidden_size, 0.0f);",
        ),
        py=Patch(
            "rms_norm_vanilla.py",
            _VANILLA_PY,
            "return to_bf16(values * inverse_rms(values, 0.0) * to_f32(weight))",
        ),
    ),
    Mutant(
        _FUSED,
        "one plus the weight",
        cu=Patch(_FUSED_CU, "spark_residual_add_rms_norm<false>", "spark_residual_add_rms_norm<true>"),
        py=Patch(_FUSED_PY, "* to_f32(weight))", "* (1 + to_f32(weight)))"),
    ),
    Mutant(
        _FUSED,
        "mean square of the rounded sums",
        cu=Patch(
            "rms_norm.cuh",
            _SQUARES_CU,
            "squares += spark_low(rounded) * spark_low(rounded) + spark_high(rounded) * spark_high(rounded);",
        ),
        py=Patch(_FUSED_PY, "inverse_rms(sums, eps)", "inverse_rms(to_f32(rounded), eps)"),
    ),
    Mutant(
        _FUSED,
        "numerator from the unrounded sums",
        py=Patch(_FUSED_PY, "to_f32(rounded) * inverse_rms", "sums * inverse_rms"),
    ),
    Mutant(
        _FUSED,
        "hidden and residual swapped with output",
        cu=Patch(_FUSED_CU, "(hidden, src, weight, output, residual,", "(output, src, weight, hidden, residual,"),
    ),
    Mutant(
        _FUSED,
        "hidden not updated",
        cu=Patch("rms_norm.cuh", _HIDDEN_CU, ""),
        py=Patch(_FUSED_PY, "rounded = to_bf16(sums)", "rounded = hidden"),
    ),
    Mutant(
        _FUSED,
        "eps dropped",
        cu=Patch(_FUSED_CU, "residual, hidden_size, eps);", "residual, hidden_size, 0.0f);"),
        py=Patch(_FUSED_PY, "inverse_rms(sums, eps)", "inverse_rms(sums, 0.0)"),
    ),
    Mutant(
        _WIDE,
        "streams rounded to BF16 before the norm",
        cu=Patch(
            _WIDE_CU,
            "spark_pack(v.x * r * spark_low(w), v.y * r * spark_high(w))",
            "spark_pack(spark_low(spark_pack(v.x, 0.0f)) * r * spark_low(w), v.y * r * spark_high(w))",
        ),
        py=Patch(_WIDE_PY, "return to_bf16(x * inverse", "return to_bf16(to_f32(to_bf16(x)) * inverse"),
    ),
    Mutant(
        _WIDE,
        "one plus the weight",
        cu=Patch(_WIDE_CU, "v.x * r * spark_low(w)", "v.x * r * (1.0f + spark_low(w))"),
        py=Patch(_WIDE_PY, "* to_f32(weight))", "* (1 + to_f32(weight)))"),
    ),
    Mutant(
        _WIDE,
        "second elements missing in the mean",
        cu=Patch(_WIDE_CU, "squares += v.x * v.x + v.y * v.y;", "squares += v.x * v.x;"),
        py=Patch(_WIDE_PY, "inverse_rms(x, eps)", "inverse_rms(x[:, ::2], eps)"),
    ),
    Mutant(
        _WIDE,
        "every row is the first",
        cu=Patch(_WIDE_CU, "const float* x = input + row * hidden_size;", "const float* x = input;"),
        py=Patch(_WIDE_PY, "return to_bf16(x * inverse", "return to_bf16(x[:1] * inverse"),
    ),
    Mutant(
        _TWO,
        "streams by the embedding's weight",
        cu=Patch(_WIDE_CU, "spark_f32_norm(streams, stream_weight, ", "spark_f32_norm(streams, embed_weight, "),
    ),
    Mutant(
        _TWO,
        "tokens' streams over each other",
        cu=Patch(_WIDE_CU, "token * hc_mult + stream - 1u, hidden", "token + stream - 1u, hidden"),
    ),
    Mutant(
        _TWO,
        "the first token's embedding",
        cu=Patch(_WIDE_CU, "embed + token * hidden_size;", "embed + 0u * token;"),
    ),
)
