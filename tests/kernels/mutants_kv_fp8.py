# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the E4M3 KV cache: reshape_and_cache_flash_fp8 and paged_decode_attn_fp8."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CACHE = "reshape_and_cache::reshape_and_cache_flash_fp8"
_START_CU = "const size_t to = block * cache_stride + (static_cast<size_t>(slot) - block * block_size) * count;"
_START_PY = "start = slot // block_size * cache_stride + slot % block_size * row"
_FACTOR_PY = "to_e4m3(to_f32(rows) * (np.float32(1.0) / np.float32(scale)))"
_VALUE_CU = "quantise_row(value + token * value_stride, v_cache + to, count, 1.0f / v_scale);"
_PAIR_CU = "return spark_pack_e4m3(spark_low(word) * inverse, spark_high(word) * inverse);"
_BEGIN_CU = ") {\n    spark_wait_for_previous();\n    spark_let_next_start();\n"
_SLOT_CU = "cache_stride" + _BEGIN_CU + "    const long long slot = slot_mapping[blockIdx.x];"
_ONE_CU = "return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);"
_TWO_CU = "return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);"

CACHE: tuple[Mutant, ...] = (
    Mutant(
        _CACHE,
        "blocks taken to lie without a gap",
        cu=Patch("reshape_and_cache.cu", _START_CU, "const size_t to = static_cast<size_t>(slot) * count;"),
        py=Patch("reshape_and_cache.py", _START_PY, "start = slot * row"),
    ),
    Mutant(
        _CACHE,
        "multiplied by the scale",
        cu=Patch("reshape_and_cache.cu", _VALUE_CU, _VALUE_CU.replace("1.0f / v_scale", "v_scale")),
        py=Patch("reshape_and_cache.py", _FACTOR_PY, "to_e4m3(to_f32(rows) * np.float32(scale))"),
    ),
    Mutant(
        _CACHE,
        "divided instead of times the reciprocal",
        cu=Patch(
            "reshape_and_cache.cu",
            _PAIR_CU,
            "return spark_pack_e4m3(spark_low(word) / (1.0f / inverse), spark_high(word) / (1.0f / inverse));",
        ),
        py=Patch("reshape_and_cache.py", _FACTOR_PY, "to_e4m3(to_f32(rows) / np.float32(scale))"),
    ),
    Mutant(
        _CACHE,
        "product rounded to BF16 first",
        py=Patch(
            "reshape_and_cache.py",
            _FACTOR_PY,
            "to_e4m3(to_f32((to_f32(rows) * (np.float32(1.0) / np.float32(scale))).astype(rows.dtype)))",
        ),
    ),
    Mutant(
        _CACHE,
        "values by the scale of keys",
        cu=Patch("reshape_and_cache.cu", _VALUE_CU, _VALUE_CU.replace("v_scale", "k_scale")),
    ),
    Mutant(
        _CACHE,
        "NaN beyond 448",
        cu=Patch("spark_fp8.cuh", _TWO_CU, _TWO_CU.replace("__NV_SATFINITE", "__NV_NOSAT")),
        py=Patch(
            "reshape_and_cache.py",
            _FACTOR_PY,
            _FACTOR_PY.replace("to_e4m3", "").replace("(scale)))", "(scale))).astype('float8_e4m3fn').view(np.uint8)"),
        ),
    ),
    Mutant(
        _CACHE,
        "NaN beyond 448, where a row is not aligned",
        cu=Patch("spark_fp8.cuh", _ONE_CU, _ONE_CU.replace("__NV_SATFINITE", "__NV_NOSAT")),
    ),
    Mutant(
        _CACHE,
        "the bytes of a pair exchanged",
        cu=Patch("spark_fp8.cuh", _TWO_CU, _TWO_CU.replace("low, high", "high, low")),
    ),
    Mutant(
        _CACHE,
        "a negative slot is slot 0",
        cu=Patch("reshape_and_cache.cu", _SLOT_CU, _SLOT_CU.replace("];", "] < 0 ? 0 : slot_mapping[blockIdx.x];")),
        py=Patch(
            "reshape_and_cache.py",
            "        if slot >= 0:\n            " + _START_PY,
            "        if True:\n            slot = max(slot, 0)\n            " + _START_PY,
        ),
    ),
    Mutant(
        _CACHE + "@far",
        "32-bit address",
        cu=Patch(
            "reshape_and_cache.cu",
            _START_CU,
            _START_CU.replace("block * cache", "static_cast<unsigned>(block * cache").replace("stride +", "stride) +"),
        ),
    ),
)

_DECODE = "paged_decode_fp8::paged_decode_attn_fp8"
_FACTOR_CU = "inv_sqrt_d * k_scale, v_scale);"
_SCALED_PY = "factor = float(np.float32(scale) * np.float32(k_scale))"
_WALK_CU = "static_cast<size_t>(*block) * block_stride +"
_READ_PY = "keys, values = from_e4m3(k_cache[blocks, offsets]), from_e4m3(v_cache[blocks, offsets])"
_ATTEND_PY = "output[sequence] = attend(query[sequence], keys, values, factor, v_scale)"
_LENGTH_CU = "const unsigned end = static_cast<unsigned>(length);"
_LENGTH_PY = "positions = np.arange(length)"

DECODE: tuple[Mutant, ...] = (
    Mutant(
        _DECODE,
        "scores without k_scale",
        cu=Patch("paged_decode_fp8.cu", _FACTOR_CU, "inv_sqrt_d, v_scale);"),
        py=Patch("paged_decode_fp8.py", _SCALED_PY, "factor = float(np.float32(scale))"),
    ),
    Mutant(
        _DECODE,
        "output without v_scale",
        cu=Patch("paged_decode_fp8.cu", _FACTOR_CU, "inv_sqrt_d * k_scale, 1.0f);"),
        py=Patch("paged_decode_fp8.py", _ATTEND_PY, _ATTEND_PY.replace("v_scale", "1.0")),
    ),
    Mutant(
        _DECODE,
        "scales exchanged",
        cu=Patch("paged_decode_fp8.cu", _FACTOR_CU, "inv_sqrt_d * v_scale, k_scale);"),
        py=Patch(
            "paged_decode_fp8.py",
            _ATTEND_PY,
            "output[sequence] = attend(query[sequence], keys, values, scale * v_scale, k_scale)",
        ),
    ),
    Mutant(
        _DECODE,
        "output rounded to BF16, then scaled",
        cu=Patch(
            "paged_decode.cuh",
            "(weight == 0.0f ? 0.0f : sum / weight) * output_scale",
            "__bfloat162float(__float2bfloat16_rn(weight == 0.0f ? 0.0f : sum / weight)) * output_scale",
        ),
        py=Patch(
            "paged_decode_fp8.py",
            _ATTEND_PY,
            "rounded = attend(query[sequence], keys, values, factor).astype(np.float32)\n"
            "        output[sequence] = (rounded * v_scale).astype(query.dtype)",
        ),
    ),
    Mutant(
        _DECODE,
        "blocks taken to lie without a gap",
        cu=Patch("paged_decode_fp8.cu", _WALK_CU, "static_cast<size_t>(*block) * block_size * token_stride +"),
    ),
    Mutant(
        _DECODE,
        "one position too many",
        cu=Patch(
            "paged_decode_fp8.cu", _LENGTH_CU, _LENGTH_CU.replace("(length)", "(length) + (length % 16 ? 1u : 0u)")
        ),
        py=Patch("paged_decode_fp8.py", _LENGTH_PY, "positions = np.arange(length + (length % block_size > 0))"),
    ),
    Mutant(
        _DECODE,
        "empty sequences written with zeros",
        cu=Patch(
            "paged_decode_fp8.cu",
            "    if (length <= 0) {\n        return;\n    }\n",
            "    if (length <= 0) {\n        for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {\n"
            "            spark_store(O + (sequence * num_q_heads + head) * head_dim + d, 0.0f);\n        }\n"
            "        return;\n    }\n",
        ),
        py=Patch(
            "paged_decode_fp8.py",
            "        if length <= 0:\n            continue\n",
            "        if length <= 0:\n            output[sequence] = 0\n            continue\n",
        ),
    ),
    Mutant(
        _DECODE,
        "bytes read as E5M2",
        cu=Patch(
            "paged_decode_fp8.cu",
            "spark_widen_e4m3(static_cast<unsigned short>(bytes & 0xffffu), to);",
            "to[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(bytes << 8)));\n"
            "        to[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(bytes & 0xff00u)));",
        ),
        py=Patch(
            "paged_decode_fp8.py",
            _READ_PY,
            "keys, values = (c[blocks, offsets].view('float8_e5m2').astype(query.dtype) for c in (k_cache, v_cache))",
        ),
    ),
    Mutant(
        _DECODE,
        "sign turned where a head has 32 elements",
        cu=Patch("paged_decode_fp8.cu", "to[0] = spark_from_e4m3(byte);", "to[0] = spark_from_e4m3(byte ^ 0x80u);"),
    ),
    Mutant(
        _DECODE + "@far",
        "32-bit address",
        cu=Patch(
            "paged_decode_fp8.cu", _WALK_CU, "static_cast<unsigned>(*block) * static_cast<unsigned>(block_stride) +"
        ),
    ),
)

MUTANTS: tuple[Mutant, ...] = CACHE + DECODE
