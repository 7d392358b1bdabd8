# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_v4_rope: which elements make a pair, the base, the way round, where the tail lies."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CHECK = "spark_v4_rope::spark_v4_rope"
_CU, _CUH, _PY = "spark_v4_rope.cu", "spark_v4.cuh", "spark_v4_rope.py"
_WORD_CU = "x + (head + 1u) * head_dim - rope_dim"
_ANGLE_CU = "const float angle = static_cast<float>(static_cast<double>(position) * frequency);"
_ANGLE_PY = "turned = angles(positions, tail.shape[-1], theta).astype(np.float64)"
_SINE_CU = "turns[pair] = make_float2(cosf(angle), inverse ? -s : s);"
_PAIRS_PY = "first, second = tail[..., 0::2], tail[..., 1::2]"
_TURN_CU = "return make_float2(a * turn.x - b * turn.y, a * turn.y + b * turn.x);"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _CHECK,
        "halves paired instead of neighbours",
        cu=Patch(
            _CU,
            "const float2 y = v4_turn(spark_low(before), spark_high(before), turns[pair]);\n        *word = "
            "spark_pack(y.x, y.y);",
            "(void)before;\n        __nv_bfloat16* t = x + (head + 1u) * head_dim - rope_dim + pair;\n"
            "        const float2 y = v4_turn(spark_load(t), spark_load(t + pairs), turns[pair]);\n"
            "        (void)word;\n        spark_store(t, y.x);\n        spark_store(t + pairs, y.y);",
        ),
        py=Patch(
            _PY,
            _PAIRS_PY,
            "first, second = tail[..., : tail.shape[-1] // 2], tail[..., tail.shape[-1] // 2 :]",
        ),
    ),
    Mutant(
        _CHECK,
        "another base",
        cu=Patch(_CUH, "pow(static_cast<double>(theta), exponent)", "pow(160000.0, exponent)"),
        py=Patch(_PY, "angles(positions, tail.shape[-1], theta)", "angles(positions, tail.shape[-1], 160000.0)"),
    ),
    Mutant(
        _CHECK,
        "inverse ignored",
        cu=Patch(_CUH, _SINE_CU, _SINE_CU.replace("inverse ? -s : s", "s")),
        py=Patch(_PY, "    if inverse:\n        sine = -sine\n", ""),
    ),
    Mutant(
        _CHECK,
        "the head of a head instead of its tail",
        cu=Patch(_CU, _WORD_CU, "x + head * head_dim"),
        py=Patch(
            _PY,
            "result[..., start:] = to_bf16(rotate(to_f32(x[..., start:]), positions, theta, inverse))",
            "result[..., :rope_dim] = to_bf16(rotate(to_f32(x[..., :rope_dim]), positions, theta, inverse))",
        ),
    ),
    Mutant(
        _CHECK,
        "angle as a product of FP32 numbers",
        cu=Patch(
            _CUH,
            _ANGLE_CU,
            "const float angle = static_cast<float>(position) * static_cast<float>(frequency);",
        ),
        py=Patch(
            _PY,
            _ANGLE_PY,
            "turned = positions.astype(np.float32)[:, None] * angles(np.ones(1, np.uint32), tail.shape[-1], theta)",
        ),
    ),
    Mutant(
        _CHECK,
        "frequencies over head_dim",
        cu=Patch(
            _CU,
            "const double own = v4_own_frequency(rope_dim, theta);",
            "const double own = v4_own_frequency(head_dim, theta);",
        ),
    ),
    Mutant(
        _CHECK,
        "the second of a pair from the first as it was turned",
        cu=Patch(
            _CUH,
            _TURN_CU,
            "const float first = a * turn.x - b * turn.y;\n    return make_float2(first, first * turn.y + b * turn.x);",
        ),
        py=Patch(_PY, "first * sine + second * cosine", "result[..., 0::2] * sine + second * cosine"),
    ),
    Mutant(
        _CHECK,
        "the position of row 0 for every row",
        cu=Patch(_CU, "positions[row], rope_dim", "positions[0], rope_dim"),
        py=Patch(_PY, "turned = turned.reshape(", "turned[1:] = turned[:1]\n    turned = turned.reshape("),
    ),
    Mutant(
        _CHECK,
        "a head past the last of a row rotated",
        cu=Patch(_CU, "? heads - first :", "? heads - first + 1u :"),
    ),
)
