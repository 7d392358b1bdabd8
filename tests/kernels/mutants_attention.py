# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of what surrounds and makes up attention: rope, reshape_and_cache, ssm_preprocess, paged_decode."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ROPE = "rope::rope_forward"
_ANGLE_CU = "const float angle = static_cast<float>(static_cast<double>(positions[token]) * frequency);"
_ANGLE_PY = "return (positions.astype(np.float64)[..., None] * frequencies).astype(np.float32)"
_FREQUENCY_PY = "frequencies = 1.0 / np.power(np.float64(theta), exponents)"
_SECOND_CU = "spark_store(x + half, x1 * c + x0 * s);"
_SECOND_PY = "to_bf16(second * cosine + first * sine)"
_HALVES_PY = "first, second = to_f32(x[..., :half]), to_f32(x[..., half:rotary_dim])"
_LOOP_CU = "for (unsigned work = threadIdx.x; work < tokens * half; work += blockDim.x) {"

ROPE: tuple[Mutant, ...] = (
    Mutant(
        _ROPE,
        "frequency rounded to FP32",
        cu=Patch("rope.cu", _ANGLE_CU, _ANGLE_CU.replace("frequency)", "static_cast<float>(frequency))")),
        py=Patch("rope.py", _FREQUENCY_PY, _FREQUENCY_PY + ".astype(np.float32).astype(np.float64)"),
    ),
    Mutant(
        _ROPE,
        "product in FP32",
        cu=Patch(
            "rope.cu",
            _ANGLE_CU,
            "const float angle = static_cast<float>(positions[token]) * static_cast<float>(frequency);",
        ),
        py=Patch(
            "rope.py", _ANGLE_PY, "return positions.astype(np.float32)[..., None] * frequencies.astype(np.float32)"
        ),
    ),
    Mutant(
        _ROPE,
        "turned the other way",
        cu=Patch("rope.cu", "const float s = sinf(angle);", "const float s = -sinf(angle);"),
        py=Patch("rope.py", "np.sin(turned)", "np.sin(-turned)"),
    ),
    Mutant(
        _ROPE,
        "neighbours paired instead of halves",
        cu=Patch("rope.cu", "* head_dim + pair;", "* head_dim + 2u * pair - (2u * pair >= half ? half - 1u : 0u);"),
        py=Patch(
            "rope.py", _HALVES_PY, "first, second = to_f32(x[..., :rotary_dim:2]), to_f32(x[..., 1:rotary_dim:2])"
        ),
    ),
    Mutant(
        _ROPE,
        "second half from the rotated first",
        cu=Patch("rope.cu", _SECOND_CU, "spark_store(x + half, x1 * c + spark_load(x) * s);"),
        py=Patch("rope.py", _SECOND_PY, "to_bf16(second * cosine + to_f32(result[..., :half]) * sine)"),
    ),
    Mutant(
        _ROPE,
        "spare threads rotate the next token again",
        cu=Patch("rope.cu", _LOOP_CU, "for (unsigned work = threadIdx.x; work < blockDim.x; work += blockDim.x) {"),
    ),
    Mutant(
        _ROPE,
        "frequencies over head_dim",
        cu=Patch("rope.cu", "static_cast<double>(rotary_dim)", "static_cast<double>(head_dim)"),
    ),
    Mutant(
        _ROPE,
        "a batch's rows where one sequence's lie",
        cu=Patch("rope.cu", "blockIdx.z) * seq_len + in_sequence;", "blockIdx.z) + in_sequence;"),
    ),
)

_CACHE = "reshape_and_cache::reshape_and_cache_flash"
_BEGIN_CU = ") {\n    spark_wait_for_previous();\n    spark_let_next_start();\n"
_SLOT_CU = "value_stride" + _BEGIN_CU + "    const long long slot = slot_mapping[blockIdx.x];"
_SKIP_CU = _SLOT_CU + "\n    if (slot < 0) {"
_ROW_PY = "target[slots[kept]] = rows.view(np.uint16)[kept]"

CACHE: tuple[Mutant, ...] = (
    Mutant(
        _CACHE,
        "a negative slot is slot 0",
        cu=Patch(
            "reshape_and_cache.cu",
            _SLOT_CU,
            _SLOT_CU.replace("];", "] < 0 ? 0 : slot_mapping[blockIdx.x];"),
        ),
        py=Patch("reshape_and_cache.py", _ROW_PY, "target[np.maximum(slots, 0)] = rows.view(np.uint16)"),
    ),
    Mutant(
        _CACHE,
        "slot 0 skipped",
        cu=Patch("reshape_and_cache.cu", _SKIP_CU, _SKIP_CU.replace("<", "<=")),
        py=Patch("reshape_and_cache.py", "kept = slots >= 0", "kept = slots > 0"),
    ),
    Mutant(
        _CACHE,
        "through FP32, which changes the payload of a signalling NaN",
        py=Patch(
            "reshape_and_cache.py",
            _ROW_PY,
            "cache[slots[kept]] = (rows.astype(np.float32) + 0).astype(rows.dtype)[kept]",
        ),
    ),
    Mutant(
        _CACHE,
        "value rows by the stride of keys",
        cu=Patch(
            "reshape_and_cache.cu", "copy_row(value + token * value_stride", "copy_row(value + token * key_stride"
        ),
    ),
    Mutant(
        _CACHE,
        "tail of a row left out",
        cu=Patch("reshape_and_cache.cu", "if (tail < count) {", "if (false) {"),
    ),
    Mutant(
        _CACHE + "@far",
        "32-bit address",
        cu=Patch("reshape_and_cache.cu", "static_cast<size_t>(slot) * count;", "static_cast<unsigned>(slot) * count;"),
    ),
)

_SPLIT = "ssm_preprocess::deinterleave_qg"
_SPLIT_PY = "return pairs.swapaxes(1, 2).copy().reshape(rows.shape)"
_SOURCE_CU = "target < num_heads ? 2u * target : 2u * (target - num_heads) + 1u;"

SPLIT: tuple[Mutant, ...] = (
    Mutant(
        _SPLIT,
        "gates before queries",
        cu=Patch("ssm_preprocess.cu", _SOURCE_CU, "target < num_heads ? 2u * target + 1u : 2u * (target - num_heads);"),
        py=Patch("ssm_preprocess.py", _SPLIT_PY, "return pairs[:, :, ::-1].swapaxes(1, 2).copy().reshape(rows.shape)"),
    ),
    Mutant(
        _SPLIT,
        "interleaved instead",
        cu=Patch("ssm_preprocess.cu", _SOURCE_CU, "target % 2u == 0u ? target / 2u : num_heads + target / 2u;"),
        py=Patch(
            "ssm_preprocess.py",
            _SPLIT_PY,
            "return rows.reshape(-1, 2, num_heads, head_dim).swapaxes(1, 2).copy().reshape(rows.shape)",
        ),
    ),
    Mutant(
        _SPLIT,
        "rows packed, whatever their stride",
        cu=Patch(
            "ssm_preprocess.cu",
            "static_cast<size_t>(blockIdx.x) * stride;",
            "static_cast<size_t>(blockIdx.x) * 2u * num_heads * head_dim;",
        ),
    ),
    Mutant(
        _SPLIT,
        "without the shared copy",
        cu=Patch(
            "ssm_preprocess.cu",
            "row[i] = held[source * piece + i % piece];",
            "row[i] = row[source * piece + i % piece];",
        ),
    ),
)

_DECODE = "paged_decode::paged_decode_attn"
_WINDOW_CU = "sliding_window > 0u && end > sliding_window ? end - sliding_window : 0u;"
_WINDOW_PY = "return length - sliding_window if 0 < sliding_window < length else 0"
_EMPTY_CU = "    if (length <= 0) {\n        return;\n    }\n"
_EMPTY_PY = "        if length <= 0:\n            continue\n"
_SCALED_CU = "? sum_everywhere(dot) * scale :"
_TOTAL_PY = "mean = np.where(total == 0.0, np.float32(0.0), sums / total)"
_POSITIONS_PY = "positions = np.arange(window_start(length, sliding_window), length)"
_ATTEND_CU = "const size_t cache_head = head / (num_q_heads / num_kv_heads);"
_SHARE_CU = "share[w] = expf(tops[w] - top);"

DECODE: tuple[Mutant, ...] = (
    Mutant(
        _DECODE,
        "one position too many",
        cu=Patch(
            "paged_decode.cu",
            "const unsigned end = static_cast<unsigned>(length);",
            "const unsigned end = static_cast<unsigned>(length) + (length % 16 ? 1u : 0u);",
        ),
        py=Patch(
            "paged_decode.py",
            _POSITIONS_PY,
            "positions = np.arange(window_start(length, sliding_window), length + (length % block_size > 0))",
        ),
    ),
    Mutant(
        _DECODE,
        "last position left out",
        cu=Patch(
            "paged_decode.cu",
            "const unsigned end = static_cast<unsigned>(length);",
            "const unsigned end = length > 1 ? static_cast<unsigned>(length) - 1u : 1u;",
        ),
        py=Patch(
            "paged_decode.py",
            _POSITIONS_PY,
            "positions = np.arange(window_start(length, sliding_window), max(length - 1, 1))",
        ),
    ),
    Mutant(
        _DECODE,
        "window one wider",
        cu=Patch(
            "paged_decode.cu",
            _WINDOW_CU,
            "sliding_window > 0u && end > sliding_window ? end - sliding_window - 1u : 0u;",
        ),
        py=Patch(
            "paged_decode.py", _WINDOW_PY, "return length - sliding_window - 1 if 0 < sliding_window < length else 0"
        ),
    ),
    Mutant(
        _DECODE,
        "window ignored",
        cu=Patch("paged_decode.cu", _WINDOW_CU, "0u;"),
        py=Patch("paged_decode.py", _WINDOW_PY, "return 0"),
    ),
    Mutant(
        _DECODE,
        "empty sequences written with zeros",
        cu=Patch(
            "paged_decode.cu",
            _EMPTY_CU,
            "    if (length <= 0) {\n        for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {\n"
            "            spark_store(O + (sequence * num_q_heads + head) * head_dim + d, 0.0f);\n        }\n"
            "        return;\n    }\n",
        ),
        py=Patch(
            "paged_decode.py",
            _EMPTY_PY,
            "        if length <= 0:\n            output[sequence] = 0\n            continue\n",
        ),
    ),
    Mutant(
        _DECODE,
        "score rounded to BF16",
        cu=Patch(
            "paged_decode.cuh",
            _SCALED_CU,
            "? __bfloat162float(__float2bfloat16_rn(sum_everywhere(dot) * scale)) :",
        ),
        py=Patch("paged_decode.py", "halving_sum(lanes) * scale", "to_f32(to_bf16(halving_sum(lanes) * scale))"),
    ),
    Mutant(
        _DECODE,
        "weights rounded to BF16",
        cu=Patch(
            "paged_decode.cuh",
            "? expf(score[j] - highest) :",
            "? __bfloat162float(__float2bfloat16_rn(expf(score[j] - highest))) :",
        ),
        py=Patch(
            "paged_decode.py",
            "sums = folding_sum(weights[",
            "weights = to_f32(to_bf16(weights))\n            sums = folding_sum(weights[",
        ),
    ),
    Mutant(
        _DECODE,
        "query heads dealt out to cache heads in turn",
        cu=Patch("paged_decode.cu", _ATTEND_CU, "const size_t cache_head = head % num_kv_heads;"),
        py=Patch(
            "paged_decode.py",
            "mine = slice(head * group, (head + 1) * group)",
            "mine = slice(head, None, keys.shape[1])",
        ),
    ),
    Mutant(
        _DECODE,
        "warps merged as if their maxima were one",
        cu=Patch("paged_decode.cuh", _SHARE_CU, "share[w] = 1.0f;"),
    ),
    Mutant(
        _DECODE,
        "older sums not faded when the maximum grows",
        cu=Patch("paged_decode.cuh", "output[i] = output[i] * faded;", "output[i] = output[i] * 1.0f;"),
    ),
    Mutant(
        _DECODE,
        "divided before the last rounding but one",
        py=Patch("paged_decode.py", _TOTAL_PY, "mean = to_f32(to_bf16(sums)) / total"),
    ),
    Mutant(
        _DECODE,
        "queries packed, whatever their stride",
        cu=Patch("paged_decode.cu", "Q + sequence * q_stride +", "Q + sequence * num_q_heads * head_dim +"),
    ),
    Mutant(
        _DECODE + "@far",
        "32-bit address",
        cu=Patch(
            "paged_decode.cu",
            "return slot * token_stride + head_start;",
            "return static_cast<unsigned>(slot * token_stride + head_start);",
        ),
    ),
)

MUTANTS: tuple[Mutant, ...] = ROPE + CACHE + SPLIT + DECODE
