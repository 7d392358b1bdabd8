# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of fused_k_norm_rope_cache: a second rounding, angles, streams of positions, slots."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _PY = "fused_k_norm_rope_cache.cu", "fused_k_norm_rope_cache.py"
_BF16 = "fused_k_norm_rope_cache::fused_k_norm_rope_cache_write_bf16"
_MROPE = "fused_k_norm_rope_cache::fused_k_norm_rope_mrope_cache_write_bf16"
_FP8 = "fused_k_norm_rope_cache::fused_k_norm_rope_cache_write_fp8"

_NORMED_CU = "normed[i] = x * rsqrtf(mean + head.eps) * (1.0f + spark_load(head.weight + i));"
_NORMED_PY = "normed: F32Array = x * root * (np.float32(1.0) + to_f32(weight))"
_ANGLE_CU = "const float angle = static_cast<float>(static_cast<double>(position(i)) * frequency);"
_STREAM_CU = "i % 3u == 0u ? pos_t : i % 3u == 1u ? pos_h : pos_w;"
_STREAM_PY = "turned = streams[pair % STREAMS, :, pair].T"
_START_CU = "return (static_cast<size_t>(slot) * num_kv_heads + blockIdx.y) * head_dim;"
_FP8_CU = "to[i] = spark_to_e4m3(y * inv_scale);"
_FP8_PY = "to_e4m3(y * np.float32(inv_scale))"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _BF16,
        "normalised head rounded to BF16, as the chain of kernels does",
        cu=Patch(_CU, _NORMED_CU, _NORMED_CU + "\n    normed[i] = spark_low(spark_pack(normed[i], 0.0f));"),
        py=Patch(_PY, _NORMED_PY, _NORMED_PY + "\n        normed = to_f32(to_bf16(normed))"),
    ),
    Mutant(
        _BF16,
        "weight as it is",
        cu=Patch(_CU, "(1.0f + spark_load(head.weight + i))", "spark_load(head.weight + i)"),
        py=Patch(_PY, "(np.float32(1.0) + to_f32(weight))", "to_f32(weight)"),
    ),
    Mutant(
        _BF16,
        "eps left out",
        cu=Patch(_CU, "rsqrtf(mean + head.eps)", "rsqrtf(mean)"),
        py=Patch(_PY, " + np.float32(eps)", ""),
    ),
    Mutant(
        _BF16,
        "angle as a product of FP32 numbers",
        cu=Patch(
            _CU, _ANGLE_CU, "const float angle = static_cast<float>(position(i)) * static_cast<float>(frequency);"
        ),
        py=Patch(
            _PY,
            "turned = angles(positions, rotary_dim, theta)\n    _write",
            "turned = positions.astype(np.float32)[:, None] * angles(np.ones(1, np.uint32), rotary_dim, theta)\n"
            "    _write",
        ),
    ),
    Mutant(
        _BF16,
        "heads of a slot in one place",
        cu=Patch(_CU, _START_CU, _START_CU.replace("blockIdx.y", "0u")),
    ),
    Mutant(
        _BF16,
        "what is not rotated left out",
        cu=Patch(_CU, "} else if (i >= head.rotary_dim) {", "} else if (i > head.rotary_dim) {"),
    ),
    Mutant(
        _BF16 + "@far",
        "32-bit address",
        cu=Patch(_CU, _START_CU, _START_CU.replace("static_cast<size_t>", "static_cast<unsigned>")),
    ),
    Mutant(
        _MROPE,
        "streams in thirds instead of turns",
        cu=Patch(
            _CU,
            _STREAM_CU,
            "i * 6u < rotary_dim ? pos_t : i * 3u < rotary_dim ? pos_h : pos_w;",
        ),
        py=Patch(_PY, _STREAM_PY, "turned = streams[pair * STREAMS // max(len(pair), 1), :, pair].T"),
    ),
    Mutant(
        _MROPE,
        "height and width exchanged",
        cu=Patch(_CU, _STREAM_CU, "i % 3u == 0u ? pos_t : i % 3u == 2u ? pos_h : pos_w;"),
        py=Patch(_PY, _STREAM_PY, "turned = streams[-pair % STREAMS, :, pair].T"),
    ),
    Mutant(
        _MROPE,
        "one position for all pairs",
        cu=Patch(_CU, _STREAM_CU, "pos_t;"),
        py=Patch(_PY, _STREAM_PY, "turned = streams[0, :, pair].T"),
    ),
    Mutant(
        _FP8,
        "divided by inv_scale",
        cu=Patch(_CU, _FP8_CU, "to[i] = spark_to_e4m3(y / inv_scale);"),
        py=Patch(_PY, _FP8_PY, "to_e4m3(y / np.float32(inv_scale))"),
    ),
    Mutant(
        _FP8,
        "rounded to BF16 on the way",
        cu=Patch(_CU, _FP8_CU, "to[i] = spark_to_e4m3(spark_low(spark_pack(y * inv_scale, 0.0f)));"),
        py=Patch(_PY, _FP8_PY, "to_e4m3(to_f32(to_bf16(y * np.float32(inv_scale))))"),
    ),
    Mutant(
        _FP8,
        "NaN beyond 448",
        cu=Patch(
            _CU,
            _FP8_CU,
            "to[i] = fabsf(y * inv_scale) > 464.0f ? static_cast<unsigned char>(0x7f) : spark_to_e4m3(y * inv_scale);",
        ),
        py=Patch(_PY, _FP8_PY, "(y * np.float32(inv_scale)).astype('float8_e4m3fn').view(np.uint8)"),
    ),
    Mutant(
        _FP8,
        "a negative slot is slot 0",
        py=Patch(
            _PY,
            "    kept = slots >= 0\n",
            "    slots = np.maximum(slots, 0)\n    kept = slots >= 0\n",
        ),
    ),
)
