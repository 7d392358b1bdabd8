# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the tile GEMM and of the transposition: formats, who has which k, output and row, edges, roundings."""

from __future__ import annotations

from .mutants import Mutant, Patch

_GEMM = "w4a16::w4a16_gemm_t"
_TURN = "spark_nvfp4_transpose::spark_nvfp4_transpose"
_CU, _PY = "w4a16_gemm_t.cu", "w4a16_gemm_t.py"
_TURN_CU, _TURN_PY = "spark_nvfp4_transpose.cu", "spark_nvfp4_transpose.py"

_STORE_CU = "total * REST * scale2);"
_STORE_PY = "to_bf16(sums * np.float32(scale2))"
_SUM_PY = "sums += by_k[k] * factors[k]"
_NIBBLES_PY = "np.stack([packed_t & 15, packed_t >> 4], axis=1)"
_FACTOR_PY = "decode_e4m3(scales_t)"
_TOTAL_CU = "(first[0] + first[8u * OUTPUTS]) + (first[16u * OUTPUTS] + first[24u * OUTPUTS])"
_TURNED_PY = "result[:, :rows] = source.T"


def _cu(check: str, name: str, file: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(file, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _GEMM,
        "high nibble first",
        cu=Patch(
            _CU,
            "((codes << 12) & SIGN) | ((codes << 6) & MAGNITUDE)",
            "((codes << 8) & SIGN) | ((codes << 2) & MAGNITUDE)",
        ),
        py=Patch(_PY, _NIBBLES_PY, "np.stack([packed_t >> 4, packed_t & 15], axis=1)"),
    ),
    Mutant(
        _GEMM,
        "codes without their sign",
        cu=Patch(_CU, "constexpr unsigned SIGN = 0x80008000u;", "constexpr unsigned SIGN = 0u;"),
        py=Patch(_PY, "E2M1_VALUES[nibbles]", "np.abs(E2M1_VALUES[nibbles])"),
    ),
    Mutant(
        _GEMM,
        "scales without their sign",
        cu=Patch(_CU, "(codes & 0x80008000u) | ((codes >> 4)", "((codes >> 4)"),
        py=Patch(_PY, _FACTOR_PY, "np.abs(decode_e4m3(scales_t))"),
    ),
    Mutant(
        _GEMM,
        "NaN scale as the number after the largest",
        cu=Patch(
            _CU, "return times(times(bits, TO_ONE), UP) | nan;", "return times(times(bits, TO_ONE), UP) | (nan & 0u);"
        ),
        py=Patch(_PY, _FACTOR_PY, "np.nan_to_num(decode_e4m3(scales_t), nan=480.0)"),
    ),
    Mutant(
        _GEMM,
        "subnormal scales as zero",
        cu=Patch(
            _CU,
            "return times(times(bits, TO_ONE), UP) | nan;",
            "const unsigned kept = ((bits & 0x0780u) ? 0xffffu : 0u) | ((bits & 0x07800000u) ? 0xffff0000u : 0u);\n"
            "    return times(times(bits & kept, TO_ONE), UP) | nan;",
        ),
        py=Patch(_PY, _FACTOR_PY, "np.where(scales_t & 0x78, decode_e4m3(scales_t), np.float32(0))"),
    ),
    Mutant(
        _GEMM,
        "the scale of the group before",
        cu=Patch(
            _CU,
            "from.scales + k / GROUP * from.ldb + output",
            "from.scales + (k ? k / GROUP - 1u : 0u) * from.ldb + output",
        ),
        py=Patch(
            _PY,
            _FACTOR_PY + ".repeat",
            "np.concatenate([decode_e4m3(scales_t)[:1], decode_e4m3(scales_t)[:-1]]).repeat",
        ),
    ),
    Mutant(
        _GEMM,
        "sum rounded to BF16 before the factor",
        cu=Patch(_CU, _STORE_CU, "spark_low(spark_pack(total * REST, 0.0f)) * scale2);"),
        py=Patch(_PY, _STORE_PY, "to_bf16(to_f32(to_bf16(sums)) * np.float32(scale2))"),
    ),
    Mutant(
        _GEMM,
        "factor left out",
        cu=Patch(_CU, _STORE_CU, "total * REST);"),
        py=Patch(_PY, _STORE_PY, "to_bf16(sums)"),
    ),
    Mutant(
        _GEMM,
        "activations narrowed to E4M3",
        py=Patch(
            _PY,
            "np.ascontiguousarray(to_f32(a).T)",
            "np.ascontiguousarray(np.clip(to_f32(a), -448, 448).astype('float8_e4m3fn').astype(np.float32).T)",
        ),
    ),
    Mutant(_GEMM, "BF16 sums", py=Patch(_PY, _SUM_PY, "sums = to_f32(to_bf16(sums + by_k[k] * factors[k]))")),
    _cu(
        _GEMM, "the last warp's sum left out", _CU, _TOTAL_CU, "(first[0] + first[8u * OUTPUTS]) + first[16u * OUTPUTS]"
    ),
    _cu(
        _GEMM,
        "chunks past the first turn of the warps left out",
        _CU,
        "return 2u * ((chunks + WARPS - 1u - warp) / WARPS);",
        "return chunks > warp ? 2u : 0u;",
    ),
    _cu(
        _GEMM,
        "the last 8 of K left out",
        _CU,
        "const bool inside = k < from.depth;",
        "const bool inside = k + STEP < from.depth;",
    ),
    _cu(
        _GEMM,
        "rows of weights N bytes apart",
        _CU,
        "const Operands from = {A + row * K, B_packed, B_scale, rows, K, ldb};",
        "const Operands from = {A + row * K, B_packed, B_scale, rows, K, (N + 15u) / 16u * 16u};",
    ),
    _cu(
        _GEMM,
        "the row past M stored",
        _CU,
        "if (8u * tile + row < from.rows && output < n) {",
        "if (8u * tile + row <= from.rows && output < n) {",
    ),
    _cu(
        _GEMM,
        "outputs past N stored in the next row",
        _CU,
        "if (8u * tile + row < from.rows && output < n) {",
        "if (8u * tile + row < from.rows && (output < n || 8u * tile + row + 1u < from.rows)) {",
    ),
    _cu(
        _GEMM,
        "rows past 32 of a block left out",
        _CU,
        "row < last_row; row += PASS_ROWS",
        "row < last_row; row += BLOCK_ROWS",
    ),
    _cu(
        _GEMM,
        "the scales of the chunk before",
        _CU,
        "scales = lane.load_scales(step / 2u + 1u);",
        "scales = lane.load_scales(step / 2u);",
    ),
    _cu(
        _GEMM,
        "the stage before the one that is ready",
        _CU,
        "unsigned reading = 0u;",
        "unsigned reading = STAGES - 1u;",
    ),
    _cu(
        _GEMM,
        "pairs of activations in their own order",
        _CU,
        "b[tile][0] = __byte_perm(a.x, a.y, 0x5410u);",
        "b[tile][0] = a.x;",
    ),
    Mutant(
        _GEMM,
        "sums read before every warp has stored its own",
        cu=Patch(
            _CU,
            "        __syncthreads();\n        const size_t output = first_output + threadIdx.x;",
            "        const size_t output = first_output + threadIdx.x;",
        ),
        race=True,
    ),
    _cu(
        _GEMM + "@far",
        "32-bit offset of a row of codes",
        _CU,
        "from.packed + k / 2u * from.ldb + output",
        "from.packed + static_cast<unsigned>(k / 2u * from.ldb + output)",
    ),
    Mutant(
        _TURN,
        "rows and columns exchanged in a word",
        cu=Patch(
            _TURN_CU,
            "(tile[4u * word + i][line / 4u] >> (line % 4u * 8u) & 0xffu)",
            "(tile[4u * word + line % 4u][line / 4u] >> (i * 8u) & 0xffu)",
        ),
        py=Patch(
            _TURN_PY,
            _TURNED_PY,
            "result[:, :rows] = source.T\n    result[:, : rows // 4 * 4] ="
            " result[:, : rows // 4 * 4].reshape(columns, -1, 4)[:, :, ::-1].reshape(columns, -1)",
        ),
    ),
    Mutant(
        _TURN,
        "the last row left out",
        cu=Patch(
            _TURN_CU,
            "tile[line][word] = bytes;",
            "tile[line][word] = row + 1u < rows ? bytes : 0u;",
        ),
        py=Patch(_TURN_PY, _TURNED_PY, "result[:, : rows - 1] = source.T[:, : rows - 1]"),
    ),
    Mutant(
        _TURN,
        "padding not written",
        cu=Patch(_TURN_CU, "if (column < columns && row < ldb) {", "if (column < columns && row < rows) {"),
        py=Patch(_TURN_PY, "np.zeros((columns, ldb), np.uint8)", "np.full((columns, ldb), 0xA5, np.uint8)"),
    ),
    _cu(
        _TURN,
        "the last byte of a word that is read singly left out",
        _TURN_CU,
        "i < 4u && column + i < columns; ++i",
        "i < 3u && column + i < columns; ++i",
    ),
    _cu(
        _TURN + "@far",
        "32-bit address of the target",
        _TURN_CU,
        "target + column * ldb + row",
        "target + static_cast<unsigned>(column * ldb + row)",
    ),
)
