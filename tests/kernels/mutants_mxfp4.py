# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the MXFP4 kernels: nibbles, scales, the order of the sum, rows and outputs at edges."""

from __future__ import annotations

from .mutants import Mutant, Patch

_GEMV = "spark_mxfp4_gemv::spark_mxfp4_gemv"
_ROWS = "spark_mxfp4_gemv::spark_mxfp4_gemv_batchm"

_CUH, _CU, _PY = "mxfp4.cuh", "spark_mxfp4_gemv.cu", "spark_mxfp4_gemv.py"
_DECODE_CU = "spark_w4_decode(values[o], mxfp4_word(codes[o], word));"
_SCALE_CU = "const float scale = mxfp4_scale(scales[o]);"
_SCALE_AT_CU = "scales[d][o] = weights.scales[at];"
_SCALE_PY = "decode_e8m0(scales[tile])"
_CODES_PY = "codes(packed[tile])"
_SUM_CU = "spark_store(C + row * out_stride + block_output + at, halves[0] + halves[1]);"
_LAST_CU = "        MXFP4_CASE(8u)\n"
_ROWS_PY = "to_bf16(mxfp4_products(to_f32(x), packed, scales))"


def _cuh(check: str, name: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(_CUH, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _GEMV,
        "high nibble first",
        cu=Patch(
            _CUH,
            _DECODE_CU,
            "const unsigned w = mxfp4_word(codes[o], word);\n"
            "spark_w4_decode(values[o], ((w & 0x0f0f0f0fu) << 4) | ((w >> 4) & 0x0f0f0f0fu));",
        ),
        py=Patch(_PY, _CODES_PY, "codes((packed[tile] << 4) | (packed[tile] >> 4))"),
    ),
    Mutant(
        _GEMV,
        "a scale as a number",
        cu=Patch(_CUH, _SCALE_CU, "const float scale = static_cast<float>(scales[o]);"),
        py=Patch(_PY, _SCALE_PY, "scales[tile].astype(np.float32)"),
    ),
    Mutant(
        _GEMV,
        "a scale for 16 values",
        cu=Patch(_CUH, _SCALE_AT_CU, "scales[d][o] = weights.scales[at - chunk + 2u * chunk % weights.chunks];"),
        py=Patch(_PY, _SCALE_PY, _SCALE_PY + "[:, 2 * np.arange(scales.shape[1]) % scales.shape[1]]"),
    ),
    Mutant(
        _GEMV,
        "2^-127 as 0",
        cu=Patch(_CUH, "byte == 0u ? 0x00400000u : byte << 23", "byte << 23"),
        py=Patch(_PY, "np.uint32(1 << 22)", "np.uint32(0)"),
    ),
    Mutant(
        _GEMV,
        "NaN among the scales as infinity",
        cu=Patch(_CUH, "byte == 0xffu ? 0x7fffffffu : bits", "bits"),
        py=Patch(_PY, "np.float32(np.nan)", "np.float32(np.inf)"),
    ),
    Mutant(
        _GEMV,
        "products added without an order",
        py=Patch(
            _PY,
            _ROWS_PY,
            "to_bf16(to_f32(x) @ (codes(packed) * np.repeat(decode_e8m0(scales), CHUNK, axis=1)).T)",
        ),
    ),
    _cuh(
        _GEMV,
        "both halves of a chunk in one accumulator",
        "sums[r][o][half] = fmaf(scale, parts[r][o], sums[r][o][half]);",
        "sums[r][o][0] = fmaf(scale, parts[r][o], sums[r][o][0]);",
    ),
    _cuh(_GEMV, "the second 32 lanes left out", _SUM_CU, _SUM_CU.replace("halves[0] + halves[1]", "halves[0]")),
    _cuh(
        _GEMV,
        "accumulators added after the tree",
        "spark_warp_sum(sums[0][r][o][0] + sums[0][r][o][1], SPARK_WARP);",
        "spark_warp_sum(sums[0][r][o][0], SPARK_WARP) + spark_warp_sum(sums[0][r][o][1], SPARK_WARP);",
    ),
    _cuh(
        _GEMV,
        "chunks beyond the first turn left out",
        "first < weights.chunks; first += DEPTH * STEP",
        "first < weights.chunks && first < DEPTH * STEP; first += DEPTH * STEP",
    ),
    Mutant(
        _ROWS,
        "rows from 4 on are the first rows again",
        cu=Patch(_CUH, "rows.load(a, r, MXFP4_WORDS", "rows.load(a, r % 4u, MXFP4_WORDS"),
        py=Patch(_PY, _ROWS_PY, _ROWS_PY.replace("to_f32(x)", "to_f32(x)[[m % 4 for m in range(len(x))]]")),
    ),
    _cuh(_ROWS, "rows of output N apart", "C + row * out_stride", "C + static_cast<size_t>(row) * N"),
    _cuh(
        _ROWS,
        "the second output is the first again",
        "static_cast<size_t>(o < weights.outputs ? o : 0u)",
        "static_cast<size_t>(0u)",
    ),
    Mutant(_ROWS, "eight rows left out", cu=Patch(_CU, _LAST_CU, "")),
    _cuh(_ROWS, "one output of two where there are many rows", "from < OUTPUTS;", "from < TOGETHER;"),
)
