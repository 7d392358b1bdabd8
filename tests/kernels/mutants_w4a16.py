# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the NVFP4 GEMVs: formats, the two orders of arithmetic, and who computes which row and output."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ONE = "w4a16_gemv::w4a16_gemv"
_SW = "w4a16_gemv::w4a16_gemv_sw"
_BATCH3 = "w4a16_gemv::w4a16_gemv_batch3"
_BATCH8 = "w4a16_gemv::w4a16_gemv_batch8"
_RT2 = "w4a16_gemv::w4a16_gemv_batch8_rt2"
_BATCH32 = "w4a16_gemv::w4a16_gemv_batch32"
_QG = "w4a16_gemv::w4a16_gemv_qg"
_LOGITS = "w4a16_gemv::w4a16_gemv_logits"
_DUAL = "w4a16_gemv_fused::w4a16_gemv_dual"
_DUAL_SW = "w4a16_gemv_fused::w4a16_gemv_dual_sw"

_CUH, _CU, _BATCH_CU, _FUSED_CU = "w4a16.cuh", "w4a16_gemv.cu", "w4a16_gemv_batch.cu", "w4a16_gemv_fused.cu"
_PY, _FUSED_PY = "w4a16_gemv.py", "w4a16_gemv_fused.py"

_FACTOR_CU = "sums[r][o] = fmaf(factor[o], parts[r][o], sums[r][o]);"
_FACTOR_PY = "fma(factor[:, turn], parts[:, turn], sums[:, live])"
_ODD_CU = "spark_w4_chunk(second, from, chunk + 1u);"
_LAST_CU = "if (chunk + 1u < from.chunks) {"
_ACCUMULATORS_PY = "_over_lanes(sums[:, 0::2] + sums[:, 1::2])"
_BATCH_PY = "return to_bf16(scaled_by_chunk(x, packed, scales, scale2))"
_HALF_CU = "const float half = spark_warp_sum(first[0][0], SPARK_WARP);\n    const float sum = half + "
_HALVES_CU = _HALF_CU + "spark_warp_sum(second[0][0], SPARK_WARP);"
_LANES_CU = "spark_w4_lane(first, mine, lane);\n    spark_w4_lane(second, mine, lane + SPARK_WARP);"
_PAIR_CU = "sum = sum + spark_low(a) * (low * factor);\n    return sum + spark_high(a) * (high * factor);"  # fmt: skip
_PLACE_CU = "element < head_dim ? element : static_cast<size_t>(num_heads) * head_dim + element - head_dim;"
_WEIGHTS_PY = "weights = codes(packed[tile]) * np.repeat(factors(scales[tile], scale2), CHUNK, axis=1)"
_LANES_PY = "lanes[:, : turn.shape[1]] += turn[:, :, step]"
_LOGITS_PY = "    return scaled_by_weight(x, packed, scales, scale2)\n"
_SECOND_PY = "second = w4a16_gemv(x, packed_2, scales_2, scale2_2)"


def _cu(check: str, name: str, file: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(file, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _ONE,
        "high nibble first",
        cu=Patch(_CUH, "codes >> (4u * i)", "codes >> (4u * (i ^ 1u))"),
        py=Patch(_PY, "[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"),
    ),
    Mutant(
        _ONE,
        "scales without their sign",
        cu=Patch(_CUH, "((code & 0x80u) << 24) | ((code & 0x7fu) << 20)", "(code & 0x7fu) << 20"),
        py=Patch(_PY, "E4M3[scales] *", "np.abs(E4M3[scales]) *"),
    ),
    Mutant(
        _ONE,
        "NaN scale as the number after the largest",
        cu=Patch(_CUH, "(code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fffffffu) : value", "value"),
        py=Patch(_PY, "E4M3[scales] *", "np.nan_to_num(E4M3[scales], nan=480.0) *"),
    ),
    Mutant(
        _ONE,
        "subnormal scales as zero",
        cu=Patch(
            _CUH,
            "return (code & 0x7fu) == 0x7fu",
            "if ((code & 0x78u) == 0u) return 0.0f;\n    return (code & 0x7fu) == 0x7fu",
        ),
        py=Patch(_PY, "E4M3[scales] *", "np.where(scales & 0x78, E4M3[scales], np.float32(0)) *"),
    ),
    Mutant(
        _ONE,
        "factor multiplied and added apart",
        cu=Patch(_CUH, _FACTOR_CU, "sums[r][o] = sums[r][o] + factor[o] * parts[r][o];"),
        py=Patch(_PY, _FACTOR_PY, "sums[:, live] + factor[:, turn] * parts[:, turn]"),
    ),
    Mutant(
        _ONE,
        "factor with the first product of a chunk: scaled by weight",
        py=Patch(
            _PY,
            "parts = _chain(apart[m], values)",
            "parts = _chain(apart[m], values * factor) / factor",
        ),
    ),
    Mutant(
        _ONE,
        "sum multiplied by the tensor's factor at the end",
        py=Patch(
            _PY,
            f"result[m, tile] = {_ACCUMULATORS_PY}",
            f"result[m, tile] = {_ACCUMULATORS_PY} * np.float32(scale2)",
        ),
    ),
    Mutant(
        _ONE,
        "third product of a half chunk before the second",
        cu=Patch(
            _CUH,
            "part = fmaf(spark_high(a.x), codes[1], part);\n    part = fmaf(spark_low(a.y), codes[2], part);",
            "part = fmaf(spark_low(a.y), codes[2], part);\n    part = fmaf(spark_high(a.x), codes[1], part);",
        ),
        py=Patch(
            _PY,
            "zip(x, values, strict=True)",
            "zip(x[[0, 2, 1, *range(3, 16)]], values[[0, 2, 1, *range(3, 16)]], strict=True)",
        ),
    ),
    Mutant(
        _ONE,
        "one accumulator a lane",
        cu=Patch(_CUH, _ODD_CU, "spark_w4_chunk(first, from, chunk + 1u);"),
    ),
    Mutant(
        _ONE,
        "chunks dealt to the lanes one by one",
        py=Patch(_PY, _ACCUMULATORS_PY, "_over_lanes(sums[:, :LANES] + sums[:, LANES:])"),
    ),
    _cu(_ONE, "an odd chunk at the end left out", _CUH, _LAST_CU, "if (chunk + 2u < from.chunks) {"),
    _cu(_ONE, "outputs past N written", _CUH, " && threadIdx.x % OUTPUTS < outputs) {", ") {"),
    _cu(_SW, "second half of the lanes left out", _CUH, _HALVES_CU, _HALVES_CU.replace("half + ", "half + 0.0f * ")),
    _cu(
        _SW,
        "halves added before the tree",
        _CUH,
        _HALVES_CU,
        "const float sum = spark_warp_sum(first[0][0] + second[0][0], SPARK_WARP);",
    ),
    _cu(
        _SW,
        "a thread's two lanes next to each other",
        _CUH,
        _LANES_CU,
        "spark_w4_lane(first, mine, 2u * lane);\n    spark_w4_lane(second, mine, 2u * lane + 1u);",
    ),
    _cu(_SW, "four outputs a block", _CUH, "constexpr unsigned WARPS = 8u;", "constexpr unsigned WARPS = 4u;"),
    Mutant(
        _BATCH8,
        "rows from 4 on are the first rows again",
        cu=Patch(_CUH, "from.a[r * from.a_step +", "from.a[0u * from.a_step +"),
        py=Patch(
            _PY,
            _BATCH_PY,
            "return to_bf16(scaled_by_chunk(x[[row % 4 for row in range(len(x))]], packed, scales, scale2))",
        ),
    ),
    Mutant(
        _BATCH8,
        "products added without an order",
        py=Patch(
            _PY,
            _BATCH_PY,
            "weights = codes(packed).astype(float) * np.repeat(factors(scales, scale2), CHUNK, axis=1)\n"
            "    return (x.astype(float) @ weights.T).astype(x.dtype)",
        ),
    ),
    _cu(
        _BATCH8,
        "rows beyond the last whole turn of the groups left out",
        _CUH,
        "mine.rows = (rows - row + ROW_GROUPS - 1u) / ROW_GROUPS;",
        "mine.rows = rows / ROW_GROUPS;",
    ),
    _cu(
        _BATCH8,
        "rows of output four apart",
        _CUH,
        "static_cast<size_t>(threadIdx.x / OUTPUTS) * n + block_output",
        "static_cast<size_t>(threadIdx.x / OUTPUTS) * OUTPUTS + block_output",
    ),
    _cu(
        _BATCH3,
        "two rows alone",
        _BATCH_CU,
        "spark_w4_block<3u, 2u, 4u>(A, B_packed, B_scale, scale2, C, 3u,",
        "spark_w4_block<3u, 2u, 4u>(A, B_packed, B_scale, scale2, C, 2u,",
    ),
    _cu(
        _BATCH3,
        "the outputs of the second pair are those of the first",
        _CUH,
        "(block_output + output) * mine.chunks;\n        mine.scales",
        "block_output * mine.chunks;\n        mine.scales",
    ),
    _cu(
        _BATCH3,
        "scales of the first output for all",
        _CUH,
        "from.scales[at]",
        "from.scales[chunk]",
    ),
    _cu(_RT2, "four rows at most", _BATCH_CU, "spark_w4_block<8u, 4u, 8u>", "spark_w4_block<4u, 4u, 8u>"),
    _cu(
        _RT2,
        "a row too many",
        _BATCH_CU,
        "spark_w4_block<8u, 4u, 8u>(A, B_packed, B_scale, scale2, C, M,",
        "spark_w4_block<8u, 4u, 8u>(A, B_packed, B_scale, scale2, C, M < 8u ? M + 1u : M,",
    ),
    _cu(
        _RT2,
        "without the tensor's factor",
        _BATCH_CU,
        "spark_w4_block<8u, 4u, 8u>(A, B_packed, B_scale, scale2,",
        "spark_w4_block<8u, 4u, 8u>(A, B_packed, B_scale, 1.0f,",
    ),
    _cu(_BATCH32, "16 rows at most", _BATCH_CU, "spark_w4_block<32u, 4u, 4u>", "spark_w4_block<16u, 4u, 4u>"),
    _cu(
        _BATCH32,
        "a row too many",
        _BATCH_CU,
        "spark_w4_block<32u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M,",
        "spark_w4_block<32u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M < 32u ? M + 1u : M,",
    ),
    _cu(
        _BATCH32,
        "the last row left out",
        _BATCH_CU,
        "spark_w4_block<32u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M,",
        "spark_w4_block<32u, 4u, 4u>(A, B_packed, B_scale, scale2, C, M - 1u,",
    ),
    Mutant(
        _QG,
        "queries and gates head by head",
        cu=Patch(
            _CUH,
            "return head * head_dim + at;",
            "return 2u * head * head_dim + element;",
        ),
        py=Patch(_PY, "heads.transpose(1, 0, 2).reshape(-1)", "heads.reshape(-1)"),
    ),
    _cu(
        _QG,
        "gates where the queries of one head end",
        _CUH,
        _PLACE_CU,
        "element;",
    ),
    Mutant(
        _QG,
        "factor after the product",
        cu=Patch(
            _CUH,
            _PAIR_CU,
            "sum = sum + spark_low(a) * low * factor;\n    return sum + spark_high(a) * high * factor;",
        ),
        py=Patch(
            _PY,
            "products = (to_f32(x) * weights)",
            "weights = to_f32(x) * codes(packed[tile])\n"
            "            products = (weights * np.repeat(factors(scales[tile], scale2), CHUNK, axis=1))",
        ),
    ),
    _cu(
        _QG,
        "fused",
        _CUH,
        _PAIR_CU,
        "sum = fmaf(spark_low(a), low * factor, sum);\n    return fmaf(spark_high(a), high * factor, sum);",
    ),
    Mutant(
        _LOGITS,
        "rounded to BF16",
        cu=Patch(_CU, "C[output] = sum;", "C[output] = __bfloat162float(__float2bfloat16_rn(sum));"),
        py=Patch(_PY, _LOGITS_PY, _LOGITS_PY.replace("return ", "return to_f32(to_bf16(").rstrip() + "))\n"),
    ),
    Mutant(
        _LOGITS,
        "the scale of the chunk before for the second half of a chunk",
        cu=Patch(_CUH, "row_scales[word / 2u]", "row_scales[word == 0u ? 0u : (word - 1u) / 2u]"),
        py=Patch(
            _PY,
            _WEIGHTS_PY,
            _WEIGHTS_PY.replace("np.repeat(", "np.roll(np.repeat(") + ", 8, axis=1)",
        ),
    ),
    Mutant(
        _LOGITS,
        "the order of the other kernels",
        py=Patch(_PY, _LOGITS_PY, "    return scaled_by_chunk(x[None], packed, scales, scale2)[0]\n"),
    ),
    Mutant(
        _LOGITS,
        "second half of the lanes left out",
        cu=Patch(_CUH, "return halves[0] + halves[1];", "return halves[0];"),
    ),
    Mutant(
        _LOGITS,
        "pair added first",
        cu=Patch(
            _CUH,
            _PAIR_CU,
            "return sum + (spark_low(a) * (low * factor) + spark_high(a) * (high * factor));",
        ),
        py=Patch(_PY, _LANES_PY, "lanes[:, : turn.shape[1]] += turn[:, :, step] if step % 2 else np.float32(0)"),
    ),
    Mutant(
        _DUAL,
        "the factor of the first for both",
        cu=Patch(
            _FUSED_CU,
            "second ? scale2_2 : scale2_1, second ? C2 : C1, 1u, N, K);",
            "scale2_1, second ? C2 : C1, 1u, N, K);",
        ),
        py=Patch(_FUSED_PY, _SECOND_PY, _SECOND_PY.replace("scale2_2", "scale2_1")),
    ),
    Mutant(
        _DUAL,
        "the scales of the first for both",
        cu=Patch(_FUSED_CU, "second ? B2_scale : B1_scale,\n", "B1_scale,\n"),
        py=Patch(_FUSED_PY, _SECOND_PY, _SECOND_PY.replace("scales_2", "scales_1")),
    ),
    Mutant(
        _DUAL,
        "outputs swapped",
        cu=Patch(_FUSED_CU, "second ? C2 : C1, 1u, N, K);", "second ? C1 : C2, 1u, N, K);"),
        py=Patch(_FUSED_PY, "return first, second", "return second, first"),
    ),
    _cu(
        _DUAL_SW,
        "the factor of the first for both",
        _FUSED_CU,
        "second ? scale2_2 : scale2_1,\n                   second ? C2 : C1, N, K);",
        "scale2_1,\n                   second ? C2 : C1, N, K);",
    ),
    _cu(_DUAL_SW, "the first one twice", _FUSED_CU, "second ? C2 : C1, N, K);", "C1, N, K);"),
    _cu(
        _DUAL_SW,
        "the scales of the first for both",
        _FUSED_CU,
        "second ? B2_scale : B1_scale, second ? scale2_2",
        "B1_scale, second ? scale2_2",
    ),
)
