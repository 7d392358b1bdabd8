# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_qk_norm_rope_cache: what is rounded where, which weight and position a head has, where it goes."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _PY = "spark_qk_norm_rope_cache.cu", "spark_qk_norm_rope_cache.py"
_BF16 = "spark_qk_norm_rope_cache::spark_qk_norm_rope_cache"
_FP8 = _BF16 + "_fp8"
_TURNED_PY = "keys[...] = _headwise(keys, weights[1], positions, rotary_dim, eps, theta, one_plus)"
_START_PY = "start = slot // block_size * cache_stride + slot % block_size * made.shape[1]"
_PLUS_CU = "made = shape.one_plus ? spark_scale_pair<true>(word, r, known.weights)"
_BLOCK_CU = "const size_t to = block * shape.cache_stride +"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _BF16,
        "plain weights always",
        cu=Patch(_CU, _PLUS_CU, _PLUS_CU.replace("<true>", "<false>")),
        py=Patch(_PY, "norm = rms_norm if plus else rms_norm_vanilla", "norm = rms_norm_vanilla"),
    ),
    Mutant(
        _BF16,
        "keys with the weight of queries",
        cu=Patch(
            _CU,
            "know(is_query ? q_weight : is_key ? k_weight : nullptr",
            "know(is_query || is_key ? q_weight : nullptr",
        ),
        py=Patch(_PY, _TURNED_PY, _TURNED_PY.replace("weights[1]", "weights[0]")),
    ),
    Mutant(
        _BF16,
        "values rotated too",
        py=Patch(_PY, "enumerate((keys, values))", "enumerate((keys, keys))"),
    ),
    Mutant(
        _BF16,
        "a negative slot is slot 0",
        cu=Patch(
            _CU,
            "const long long slot = slots[row * slot_stride];",
            "const long long given = slots[row * slot_stride];\n    const long long slot = given < 0 ? 0 : given;",
        ),
        py=Patch(_PY, "if slot >= 0:", "if (slot := max(slot, 0)) >= 0:"),
    ),
    Mutant(
        _BF16,
        "second element of a pair not normed",
        cu=Patch(_CU, "normed[2u * i + 1u] = spark_high(made);", "normed[2u * i + 1u] = spark_high(word);"),
    ),
    Mutant(
        _BF16,
        "turned the other way",
        cu=Patch(_CU, "const float s = sinf(angle);", "const float s = -sinf(angle);"),
    ),
    Mutant(
        _BF16,
        "positions packed, whatever their stride",
        cu=Patch(_CU, "positions[row * position_stride];", "positions[row];"),
    ),
    Mutant(
        _BF16,
        "rows of queries packed",
        cu=Patch(_CU, "is_query ? shape.q_stride :", "is_query ? shape.num_q_heads * shape.head_dim :"),
    ),
    Mutant(
        _BF16,
        "without the barrier between norm and rotation",
        cu=Patch(_CU, "    __syncthreads();\n    const unsigned half", "    const unsigned half"),
        race=True,
    ),
    Mutant(
        _FP8,
        "blocks packed, whatever their stride",
        cu=Patch(_CU, _BLOCK_CU, "const size_t to = block * (shape.block_size * tokens) +"),
        py=Patch(_PY, _START_PY, "start = slot * made.shape[1]"),
    ),
    Mutant(
        _FP8,
        "values with the scale of keys",
        cu=Patch(_CU, "(key ? k_inverse : v_inverse)", "k_inverse"),
        py=Patch(_PY, "np.float32(scales[side])", "np.float32(scales[0])"),
    ),
    Mutant(
        _FP8,
        "multiplied by the scale",
        cu=Patch(_CU, "const float v_inverse = 1.0f / v_scale;", "const float v_inverse = v_scale;"),
    ),
    Mutant(
        _FP8,
        "heads of a row all at the first",
        cu=Patch(
            _CU,
            "static_cast<size_t>(head) * shape.head_dim;\n    if (is_key)",
            "0u * static_cast<size_t>(head) * shape.head_dim;\n    if (is_key)",
        ),
    ),
)
