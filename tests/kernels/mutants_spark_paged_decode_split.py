# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_paged_decode_split: where splits lie, what a lane holds, how weights fade, how splits merge."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _PY = "spark_paged_decode_split.cu", "spark_paged_decode_split.py"
_MODULE = "spark_paged_decode_split::"
_SPLIT, _FP8, _MERGE = (
    _MODULE + name for name in ("spark_paged_decode_split", "spark_paged_decode_split_fp8", "spark_paged_decode_merge")
)
_LENGTH_CU = "return length < SPLIT_SHORTEST ? SPLIT_SHORTEST : length;"
_LENGTH_PY = "return max(SHORTEST, min(few, max(ENOUGH, many)))"
_END_CU = "end = end - begin < length ? end : begin + length;"
_WINDOW_CU = "begin = window > 0u && end > window ? end - window : 0u;"
_TOP_PY = "top = np.fmax.reduce(seen, axis=0, initial=LOWEST)"
_MERGED_PY = "merged = to_bf16(mean * np.float32(output_scale))"
_GATED_PY = "merged = to_bf16(to_f32(merged) * sigmoid(to_f32(gate[sequence])))"
_SHARES_PY = "shares = np.exp(tops - np.fmax.reduce(tops, axis=1, initial=LOWEST)[:, None]).astype(np.float32)"
_SHARE_CU = "const float share = expf(own[i].x - highest);"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _SPLIT,
        "splits of 64 positions, however long the sequence",
        cu=Patch(_CU, _LENGTH_CU, "return length < SPLIT_SHORTEST ? SPLIT_SHORTEST : SPLIT_SHORTEST;"),
        py=Patch(_PY, _LENGTH_PY, "return max(SHORTEST, min(few, max(ENOUGH, many))) + (STEP if seen > 2048 else 0)"),
    ),
    *(
        Mutant(
            kernel,
            "64 splits whatever the number of query heads",
            cu=Patch(_CU, "num_q_heads > SPLIT_FEW_HEADS ?", "num_q_heads > 999u ?"),
            py=Patch(_PY, "if num_q_heads <= FEW_HEADS else", "if num_q_heads <= 999 else"),
        )
        for kernel in (_SPLIT, _MERGE)
    ),
    Mutant(
        _SPLIT,
        "last position of a sequence left out",
        cu=Patch(_CU, _END_CU, "end = end - begin <= length ? end - (end - begin > 1u) : begin + length;"),
        py=Patch(
            _PY,
            "positions = np.arange(begin, end)",
            "positions = np.arange(begin, end - (end == length and end > begin + 1))",
        ),
    ),
    Mutant(
        _SPLIT,
        "window one wider",
        cu=Patch(_CU, _WINDOW_CU, "begin = window > 0u && end > window ? end - window - 1u : 0u;"),
    ),
    Mutant(
        _SPLIT,
        "weights in one BF16",
        cu=Patch(
            _CU,
            "fine[half] = spark_pack(share[0] - spark_low(coarse[half]), share[1] - spark_high(coarse[half]));",
            "fine[half] = 0u;",
        ),
        py=Patch(_PY, "weights = np.exp(seen - top)", "weights = to_f32(to_bf16(np.exp(seen - top)))"),
    ),
    Mutant(
        _SPLIT,
        "scores not scaled",
        cu=Patch(_CU, "each = live ? each * scale : SPLIT_LOWEST;", "each = live ? each : SPLIT_LOWEST;"),
        py=Patch(_PY, "np.float32(scale))", "np.float32(1.0))"),
    ),
    Mutant(
        _SPLIT,
        "odd heads fade as even ones",
        cu=Patch(_CU, "static_cast<int>(8u * t + 4u));", "static_cast<int>(8u * t));"),
    ),
    Mutant(
        _SPLIT,
        "second half of a step's positions taken for the first",
        cu=Patch(_CU, "const unsigned at = 2u * t + r % 2u + r / 2u * 8u;", "const unsigned at = 2u * t + r % 2u;"),
    ),
    Mutant(
        _SPLIT,
        "a weight of the positions of one lane",
        cu=Patch(
            _CU,
            "weight = weight + __shfl_xor_sync(SPARK_FULL_MASK, weight, 2);",
            "weight = weight + 0.0f * __shfl_xor_sync(SPARK_FULL_MASK, weight, 2);",
        ),
    ),
    Mutant(
        _SPLIT,
        "warps merged as if their largest scores were one",
        cu=Patch(_CU, "const float share = expf(merge.tops[w][head] - highest);", "const float share = 1.0f;"),
    ),
    Mutant(
        _SPLIT,
        "heads past the eighth are the first again",
        cu=Patch(
            _CU,
            "const unsigned before = blockIdx.x % parts * SPLIT_HEADS;",
            "const unsigned before = 0u * blockIdx.x;",
        ),
    ),
    Mutant(
        _SPLIT,
        "queries packed, whatever their stride",
        cu=Patch(_CU, "Q + sequence * q_stride + head * head_dim;", "Q + (sequence * num_q_heads + head) * head_dim;"),
    ),
    Mutant(
        _SPLIT + "@far",
        "32-bit address",
        cu=Patch(
            _CU,
            "return static_cast<size_t>(table[block]) * block_stride + (position",
            "return static_cast<unsigned>(table[block] * static_cast<unsigned>(block_stride)) + (position",
        ),
    ),
    Mutant(
        _FP8,
        "bytes of a pair swapped",
        cu=Patch(_CU, "__float_as_uint(values[1]), 0x7632u)", "__float_as_uint(values[1]), 0x3276u)"),
        py=Patch(
            _PY,
            "return to_f32(from_e4m3(codes))",
            "return to_f32(from_e4m3(codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)))",
        ),
    ),
    Mutant(
        _FP8,
        "blocks packed, whatever their stride",
        cu=Patch(
            _CU,
            "static_cast<size_t>(table[block]) * block_stride",
            "static_cast<size_t>(table[block]) * (block_size * token_stride)",
        ),
    ),
    Mutant(
        _FP8,
        "largest score of a split without a sign",
        py=Patch(_PY, _TOP_PY, _TOP_PY.replace("seen, axis", "np.abs(seen), axis")),
    ),
    Mutant(
        _MERGE,
        "splits weigh the same",
        cu=Patch(_CU, _SHARE_CU, "const float share = 1.0f;"),
        py=Patch(_PY, _SHARES_PY, "shares = np.ones_like(tops)"),
    ),
    Mutant(
        _MERGE,
        "first split left out of the sum of weights",
        cu=Patch(
            _CU,
            "total = total + share * own[i].y;",
            "total = total + (i * SPARK_WARP + threadIdx.x == 0u && splits > 1u ? 0.0f : share * own[i].y);",
        ),
        py=Patch(_PY, "(shares * weights).T.copy()", "(shares * weights).T[count > 1 :].copy()"),
    ),
    Mutant(
        _MERGE,
        "scaled after the gate",
        cu=Patch(
            _CU,
            "spark_store(to, spark_load(to) * sigmoid);",
            "spark_store(to, spark_load(to) * sigmoid * output_scale);",
        ),
        py=Patch(_PY, _GATED_PY, _GATED_PY.replace("to_f32(merged) *", "to_f32(merged) * np.float32(output_scale) *")),
    ),
    Mutant(
        _MERGE,
        "gate on the mean before it is rounded",
        cu=Patch(
            _CU,
            "spark_store(to, spark_load(to) * sigmoid);",
            "spark_store(to, (whole == 0.0f ? 0.0f : added / whole) * output_scale * sigmoid);",
        ),
        py=Patch(_PY, "to_f32(merged) * sigmoid(", "mean * np.float32(output_scale) * sigmoid("),
    ),
    Mutant(
        _MERGE,
        "splits of the last group of threads left out",
        cu=Patch(_CU, "each < GROUPS; ++each", "each + 1u < GROUPS; ++each"),
    ),
    Mutant(
        _MERGE,
        "output rounded before it is scaled",
        py=Patch(_PY, _MERGED_PY, "merged = to_bf16(to_f32(to_bf16(mean)) * np.float32(output_scale))"),
    ),
)
