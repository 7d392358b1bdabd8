# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_v4_qkv: a second rounding, weights and eps, pairs, slots."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _CUH, _PY = "spark_v4_qkv.cu", "spark_v4.cuh", "spark_v4_qkv.py"
_QUERY = "spark_v4_qkv::spark_v4_q_norm_rope"
_ROW = "spark_v4_qkv::spark_v4_kv_assemble"
_FP8 = "spark_v4_qkv::spark_v4_kv_assemble_fp8"
_BOTH = "spark_v4_qkv::spark_v4_q_and_kv"

_NORMED_CU = "values[v][i] = weight != nullptr && vector(v) < vectors ? n * w[i] : n;"
_NORMED_PY = "    normed[..., start:] = rotate("
_TURN_CU = "return make_float2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);"
_SIZE_CU = "v4_warp_sum(squares) / static_cast<float>(size) + eps"
_SLOT_CU = "pool + static_cast<size_t>(slot) * head_dim"
_ROUNDED_CU = _NORMED_CU + "\n                values[v][i] = spark_low(spark_pack(values[v][i], 0.0f));"
_ROUNDED_PY = "    normed = to_f32(to_bf16(normed))\n" + _NORMED_PY
_FP8_PY = "to_e4m3(heads(kv, weight, positions, rope_dim, eps, theta))"
_BYTES_CU = "make_uint2(spark_pack_e4m3(y[0], y[1]) | spark_pack_e4m3(y[2], y[3]) << 16,"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _QUERY,
        "normalised head rounded to BF16 before the rotation",
        cu=Patch(_CU, _NORMED_CU, _ROUNDED_CU),
        py=Patch(_PY, _NORMED_PY, _ROUNDED_PY),
    ),
    Mutant(
        _QUERY,
        "eps left out",
        cu=Patch(_CU, _SIZE_CU, _SIZE_CU.replace(" + eps", "")),
        py=Patch(_PY, " + np.float32(eps)", ""),
    ),
    Mutant(
        _QUERY,
        "one mean for all heads of a row",
        py=Patch(_PY, "mean = _sum_of_squares(values) /", "mean = _sum_of_squares(values)[..., :1] /"),
    ),
    Mutant(
        _QUERY,
        "mean of what is not rotated",
        cu=Patch(
            _CU,
            "squares = squares + values[v][i] * values[v][i];",
            "squares = squares + (vector(v) + 1u < vectors ? values[v][i] * values[v][i] : 0.0f);",
        ),
        py=Patch(_PY, "_sum_of_squares(values) /", "_sum_of_squares(values[..., : max(start, 2)]) /"),
    ),
    Mutant(
        _QUERY,
        "turned the other way",
        cu=Patch(_CUH, _TURN_CU, "return make_float2(a * turn.x + b * turn.y, b * turn.x - a * turn.y);"),
        py=Patch(
            _PY,
            "rotate(normed[..., start:], positions, theta)",
            "rotate(normed[..., start:], positions, theta, inverse=True)",
        ),
    ),
    Mutant(
        _QUERY,
        "the first elements turned instead of the last",
        cu=Patch(_CU, "head.turn(turns, head_dim - rope_dim);\n    if (mine", "head.turn(turns, 0u);\n    if (mine"),
        py=Patch(
            _PY,
            "normed[..., start:] = rotate(normed[..., start:], positions, theta)",
            "normed[..., :rope_dim] = rotate(normed[..., :rope_dim], positions, theta)",
        ),
    ),
    Mutant(
        _QUERY,
        "warps past the last head store it again",
        cu=Patch(_CU, "    if (mine < heads) {\n        head.store(", "    if (mine <= heads) {\n        head.store("),
    ),
    Mutant(
        _ROW,
        "weight as 1 + w",
        cu=Patch(_CU, _NORMED_CU, _NORMED_CU.replace("n * w[i]", "n * (1.0f + w[i])")),
        py=Patch(_PY, "normed * to_f32(weight)", "normed * (np.float32(1.0) + to_f32(weight))"),
    ),
    Mutant(
        _ROW,
        "latent before its rotation in the pool",
        cu=Patch(_CU, "head.turn(turns, head_dim - rope_dim);\n    head.store", "head.store"),
        py=Patch(
            _PY,
            "_write(pool, to_bf16(heads(kv, weight, positions, rope_dim, eps, theta)), slots)",
            "_write(pool, to_bf16(heads(kv, weight, positions * 0, rope_dim, eps, theta)), slots)",
        ),
    ),
    Mutant(
        _ROW,
        "normalised row rounded to BF16 before the rotation",
        cu=Patch(_CU, _NORMED_CU, _ROUNDED_CU),
        py=Patch(_PY, _NORMED_PY, _ROUNDED_PY),
    ),
    Mutant(
        _ROW,
        "a negative slot is slot 0",
        cu=Patch(
            _CU,
            "const long long slot = slot_mapping[row];",
            "const long long slot = slot_mapping[row] < 0 ? 0 : slot_mapping[row];",
        ),
        py=Patch(_PY, "    kept = slots >= 0\n", "    slots = np.maximum(slots, 0)\n    kept = slots >= 0\n"),
    ),
    Mutant(_ROW, "rows one after the other, whatever their slots", cu=Patch(_CU, _SLOT_CU, "pool + row * head_dim")),
    Mutant(
        _FP8,
        "rounded to BF16 on the way",
        cu=Patch(
            _CU,
            _BYTES_CU,
            "make_uint2(spark_pack_e4m3(spark_low(spark_pack(y[0], y[1])), spark_high(spark_pack(y[0], y[1]))) | "
            "spark_pack_e4m3(y[2], y[3]) << 16,",
        ),
        py=Patch(_PY, _FP8_PY, "to_e4m3(to_f32(to_bf16(heads(kv, weight, positions, rope_dim, eps, theta))))"),
    ),
    Mutant(
        _FP8,
        "NaN beyond 448",
        cu=Patch(
            "spark_fp8.cuh",
            "return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);",
            "return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_NOSAT, __NV_E4M3);",
        ),
        py=Patch(_PY, _FP8_PY, _FP8_PY.replace("to_e4m3(", "(") + ".astype('float8_e4m3fn').view(np.uint8)"),
    ),
    Mutant(
        _FP8,
        "the bytes of a word exchanged",
        cu=Patch(_CU, _BYTES_CU, "make_uint2(spark_pack_e4m3(y[2], y[3]) | spark_pack_e4m3(y[0], y[1]) << 16,"),
    ),
    Mutant(
        _FP8 + "@far",
        "32-bit address",
        cu=Patch(_CU, _SLOT_CU, "pool + static_cast<unsigned>(slot) * head_dim"),
    ),
    *(
        Mutant(
            check,
            name,
            cu=Patch(_CU, old, new),
        )
        for check in (_BOTH, _BOTH + "_fp8")
        for name, old, new in (
            ("the row without its weight", "of_query ? nullptr : weight, head_dim", "nullptr, head_dim"),
            ("the row's place by its number", "pool + static_cast<size_t>(at) * head_dim", "pool + row * head_dim"),
            ("queries of the first row", "q + (row * heads + (of_query", "q + (0u * row + (of_query"),
        )
    ),
)
