# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of gemv_fp8w and w8a16_gemv: roundings, the order of the sum, where scales are found and applied, edges."""

from __future__ import annotations

from .mutants import Mutant, Patch

_QUANTIZE = "gemv_fp8w::quantize_bf16_to_fp8"
_ROW = "gemv_fp8w::dense_gemv_fp8w"
_ROW_BATCH = "gemv_fp8w::spark_dense_gemv_fp8w_batchm"
_BLOCK = "w8a16_gemv::w8a16_gemv"
_BLOCK_BATCH = "w8a16_gemv::spark_w8a16_gemv_batchm"

_CUH, _CU = "fp8_gemv.cuh", "gemv_fp8w.cu"
_PAIR_CU = "spark_pack_e4m3(spark_low(word[w]) * per_scale, spark_high(word[w]) * per_scale)"
_SCALE_CU = "const float scale = most > 0.0f ? most / E4M3_MAX : 1.0f;"
_WORDS_CU = "sum = sum + spark_low(a.x) * weights[0];\n    sum = sum + spark_high(a.x) * weights[1];"
_SUM_CU = "spark_warp_sum(sums[r][o], SPARK_WARP);"
_HALVES_CU = "halves[0] + halves[1]"
_ACTIVATIONS_CU = "const uint4 words = a[r * a_step + half];"
_FACTOR_CU = "const float factor = scales[output + o < N ? output + o : output];"
_CODES_CU = "(output + o < N ? output + o : output) * chunks;"
_TABLE_CU = "factors += block_output / FP8_SCALE_BLOCK * fp8_blocks(chunks);"
_LAST_ROWS_CU = "        FP8_ROWS(8u)\n"
_SCALED_CU = "weights[i] = weights[i] * scale;"

_PY, _BLOCK_PY = "gemv_fp8w.py", "w8a16_gemv.py"
_BYTES_PY = "return to_e4m3(values * per_scale[:, None]), scales"
_SCALE_PY = "np.where(most > 0, most / LARGEST, np.float32(1))"
_MOST_PY = "np.where(np.isnan(values), np.float32(0), np.abs(values)).max(axis=1, initial=0)"
_RESULT_PY = "to_bf16(sum_of_lanes(lane_shares(row, values) * row_scale[tile]))"
_HALVES_PY = "return folded(shares[:WARP]) + folded(shares[WARP:])"
_ROWS_PY = "for m, row in enumerate(rows):"
_BLOCK_ROWS_PY = "(first + np.arange(weights.shape[0])) // BLOCK"
_COLUMNS_PY = "np.arange(weights.shape[1]) // BLOCK"
_VALUES_PY = "to_f32(from_e4m3(weights)) * block_scale[np.ix_(rows, columns)]"
_BLOCK_RESULT_PY = "to_bf16(sum_of_lanes(lane_shares(row, values)))"


def _cuh(check: str, name: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(_CUH, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _QUANTIZE,
        "divided by the scale",
        cu=Patch(_CU, _PAIR_CU, _PAIR_CU.replace("* per_scale", "/ scale")),
        py=Patch(_PY, _BYTES_PY, "return to_e4m3(values / scales[:, None]), scales"),
    ),
    Mutant(
        _QUANTIZE,
        "rounded to BF16 on the way",
        cu=Patch(
            _CU,
            _PAIR_CU,
            "spark_pack_e4m3(\n                spark_low(spark_pack(spark_low(word[w]) * per_scale, 0.0f)),\n"
            "                spark_high(spark_pack(0.0f, spark_high(word[w]) * per_scale)))",
        ),
        py=Patch(_PY, _BYTES_PY, "return to_e4m3(to_f32(to_bf16(values * per_scale[:, None]))), scales"),
    ),
    Mutant(
        _QUANTIZE,
        "zero as the scale of a row of zeros",
        cu=Patch(_CU, _SCALE_CU, "const float scale = most / E4M3_MAX;"),
        py=Patch(_PY, _SCALE_PY, "most / LARGEST"),
    ),
    Mutant(
        _QUANTIZE,
        "bytes in pairs the other way round",
        cu=Patch(_CU, "pair[2] | (pair[3] << 16)", "pair[3] | (pair[2] << 16)"),
    ),
    Mutant(
        _QUANTIZE,
        "NaN as -448",
        cu=Patch(
            _CU,
            _PAIR_CU,
            "spark_pack_e4m3(fmaxf(spark_low(word[w]) * per_scale, -E4M3_MAX),\n"
            "                                      fmaxf(spark_high(word[w]) * per_scale, -E4M3_MAX))",
        ),
        py=Patch(_PY, _BYTES_PY, "return to_e4m3(np.fmax(values * per_scale[:, None], -LARGEST)), scales"),
    ),
    Mutant(
        _QUANTIZE,
        "last element of a row left out",
        cu=Patch(_CU, "threadIdx.x; i < count; i += blockDim.x", "threadIdx.x; i + 1u < count; i += blockDim.x"),
    ),
    Mutant(
        _QUANTIZE,
        "the largest of the first 256 values of a row",
        cu=Patch(_CU, "spark_absmax(from, count, ", "spark_absmax(from, count < 256u ? count : 256u, "),
        py=Patch(_PY, _MOST_PY, _MOST_PY.replace(".max(", "[:, :256].max(")),
    ),
    Mutant(
        _ROW,
        "scale after the sum over the lanes",
        py=Patch(_PY, _RESULT_PY, "to_bf16(sum_of_lanes(lane_shares(row, values)) * row_scale[tile])"),
    ),
    Mutant(
        _ROW,
        "scale of the block's first output",
        cu=Patch(_CUH, _FACTOR_CU, "const float factor = scales[block_output];"),
        py=Patch(
            _PY, _RESULT_PY, _RESULT_PY.replace("row_scale[tile]", "row_scale[tile][np.arange(len(values)) // 4 * 4]")
        ),
    ),
    Mutant(
        _ROW,
        "pair added first",
        cu=Patch(
            _CUH,
            _WORDS_CU,
            "sum = sum + (spark_low(a.x) * weights[0] + spark_high(a.x) * weights[1]);",
        ),
    ),
    Mutant(
        _ROW,
        "another lane to chunk mapping",
        cu=Patch(_CUH, "unsigned first = lane; ", "unsigned first = lane * 2u % FP8_LANES + lane / SPARK_WARP; "),
        py=Patch(_PY, "CHUNK = 16\n", "CHUNK = 8\n"),
    ),
    _cuh(_ROW, "chunks after the first turn left out", "first += DEPTH * FP8_LANES", "first += chunks"),
    Mutant(
        _ROW,
        "second half of the lanes left out",
        cu=Patch(_CUH, _HALVES_CU, "halves[0]"),
        py=Patch(_PY, _HALVES_PY, "return folded(shares[:WARP])"),
    ),
    Mutant(
        _ROW,
        "halves rounded to BF16 before they are added",
        cu=Patch(_CUH, _SUM_CU, f"__bfloat162float(__float2bfloat16_rn({_SUM_CU[:-1]}));"),
        py=Patch(
            _PY, _HALVES_PY, "return to_f32(to_bf16(folded(shares[:WARP]))) + to_f32(to_bf16(folded(shares[WARP:])))"
        ),
    ),
    _cuh(_ROW, "outputs past N written", "if (block_output + at < N) {", "if (output != ~0ull) {"),
    Mutant(
        _ROW_BATCH,
        "rows from 4 on are the first rows again",
        cu=Patch(_CUH, _ACTIVATIONS_CU, _ACTIVATIONS_CU.replace("r *", "r % 4u *")),
        py=Patch(_PY, _ROWS_PY, "for m, row in enumerate(rows[[i % 4 for i in range(len(x))]]):"),
    ),
    Mutant(
        _ROW_BATCH,
        "products added without an order",
        py=Patch(
            _PY,
            _RESULT_PY,
            "to_bf16(((row.astype(float) @ values.T.astype(float)) * row_scale[tile]).astype(np.float32))",
        ),
    ),
    _cuh(
        _ROW_BATCH, "rows of output without their stride", "row * out_stride + block_output", "row * N + block_output"
    ),
    _cuh(_ROW_BATCH, "a group's second output is its first", _CODES_CU, "output * chunks;"),
    _cuh(
        _ROW_BATCH, "the scale of a group's first output for both", _FACTOR_CU, "const float factor = scales[output];"
    ),
    _cuh(_ROW_BATCH, "eight rows forgotten", _LAST_ROWS_CU, ""),
    Mutant(
        _BLOCK,
        "rows of the table K / 128 long, rounded down",
        cu=Patch(_CUH, "(chunks + FP8_SCALE_CHUNKS - 1u) / FP8_SCALE_CHUNKS", "chunks / FP8_SCALE_CHUNKS"),
        py=Patch(
            _BLOCK_PY,
            "block_scale[np.ix_(rows, columns)]",
            "block_scale.reshape(-1)[rows[:, None] * (weights.shape[1] // BLOCK) + columns]",
        ),
    ),
    Mutant(
        _BLOCK,
        "the first rows' factors for all",
        cu=Patch(_CUH, _TABLE_CU, ""),
        py=Patch(_BLOCK_PY, _BLOCK_ROWS_PY, "np.zeros(weights.shape[0], np.intp)"),
    ),
    Mutant(
        _BLOCK,
        "the factor of the chunk before",
        cu=Patch(_CUH, "factors[chunk / FP8_SCALE_CHUNKS]", "factors[(chunk - (chunk > 0u)) / FP8_SCALE_CHUNKS]"),
        py=Patch(_BLOCK_PY, _COLUMNS_PY, "np.maximum(np.arange(weights.shape[1]) - 16, 0) // BLOCK"),
    ),
    Mutant(
        _BLOCK,
        "weight rounded to BF16",
        cu=Patch(_CUH, _SCALED_CU, "weights[i] = __bfloat162float(__float2bfloat16_rn(weights[i] * scale));"),
        py=Patch(_BLOCK_PY, _VALUES_PY, f"to_f32(to_bf16({_VALUES_PY}))"),
    ),
    _cuh(_BLOCK, "fused", _WORDS_CU.splitlines()[0], "sum = fmaf(spark_low(a.x), weights[0], sum);"),
    Mutant(
        _BLOCK,
        "NaN codes as zero",
        cu=Patch(_CUH, _SCALED_CU, "weights[i] = weights[i] == weights[i] ? weights[i] * scale : 0.0f;"),
        py=Patch(_BLOCK_PY, "to_f32(from_e4m3(weights))", "np.nan_to_num(to_f32(from_e4m3(weights)))"),
    ),
    _cuh(_BLOCK, "outputs past N written", "if (block_output + at < N) {", "if (output != ~0ull) {"),
    _cuh(
        _BLOCK_BATCH,
        "rows of the table as if a block had four outputs",
        _TABLE_CU,
        "factors += blockIdx.x * FP8_GROUPS / FP8_SCALE_BLOCK * fp8_blocks(chunks);",
    ),
    _cuh(
        _BLOCK_BATCH,
        "the factor of the first chunk of a turn for all",
        "factors[chunk / FP8_SCALE_CHUNKS]",
        "factors[first / FP8_SCALE_CHUNKS]",
    ),
    Mutant(
        _BLOCK_BATCH,
        "rows from 4 on are the first rows again",
        cu=Patch(_CUH, _ACTIVATIONS_CU, _ACTIVATIONS_CU.replace("r *", "r % 4u *")),
        py=Patch(_BLOCK_PY, _ROWS_PY, "for m, row in enumerate(rows[[i % 4 for i in range(len(x))]]):"),
    ),
    Mutant(
        _BLOCK_BATCH,
        "products added without an order",
        py=Patch(
            _BLOCK_PY,
            _BLOCK_RESULT_PY,
            "to_bf16((row.astype(float) @ values.T.astype(float)).astype(np.float32))",
        ),
    ),
    _cuh(_BLOCK_BATCH, "a group's second output is its first", _CODES_CU, "output * chunks;"),
)
