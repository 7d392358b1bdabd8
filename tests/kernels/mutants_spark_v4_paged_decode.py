# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_v4_paged_decode: window, sink, scale, what a value is, the rotation back, merging, addresses."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CU, _PY = "spark_v4_paged_decode.cu", "spark_v4_paged_decode.py"
_WIDE = "spark_v4_paged_decode::spark_v4_paged_decode"
_NARROW = "spark_v4_paged_decode::spark_v4_paged_decode_fp8"

_WINDOW_CU = "sliding_window > 0u && end > sliding_window ? end - sliding_window : 0u;"
_WINDOW_PY = "places = np.arange(window_start(length, sliding_window), length)"
_END_CU = "const unsigned end = static_cast<unsigned>(length);"
_SINK_CU = "weight = sink == nullptr ? weight : weight + expf(*sink - top);"
_SINK_PY = "            total = total + np.exp(sinks - top)\n"
_SCALE_CU = "const float sum = v4_warp_sum(dot[h]) * scale;"
_SCALE_PY = "to_f32(query), size)) * np.float32(scale)"
_SUMS_PY = "sums = folding_sum(weights[:, :, None] * values[:, None, :])"
_VALUE_CU = "fmaf(score[h][j], x[i], output[h][v * V4_WIDTH + i]);"
_TURN_CU = "y = v4_turn(y.x, y.y, partial.turns[pair - tail]);"
_TURN_PY = "mixed[:, start:] = rotate(mixed[None, :, start:], own, theta, inverse=True)[0]"
_TABLE_CU = "v4_turns(partial.turns, positions[sequence], rope_dim, theta, true, own);"
_EMPTY_CU = "    if (length <= 0) {\n        return;\n    }\n"
_EMPTY_PY = "        if length <= 0:\n            continue\n"
_READ_PY = "_decode(query, pool, from_e4m3, output, block_tables, seq_lens, positions, sinks, *numbers)"
_ROW_CU = "const Vector* row = pool + walk.next() * vectors;"


def _window(step: str) -> Mutant:
    return Mutant(
        _WIDE,
        "window one narrower" if step == "-" else "window one wider",
        cu=Patch(
            _CU,
            _WINDOW_CU,
            f"sliding_window > 0u && end > sliding_window {step} 1u ? end - (sliding_window {step} 1u) : 0u;",
        ),
        py=Patch(_PY, _WINDOW_PY, _WINDOW_PY.replace("sliding_window", f"sliding_window {step} (sliding_window > 1)")),
    )


MUTANTS: tuple[Mutant, ...] = (
    _window("-"),
    _window("+"),
    Mutant(
        _WIDE,
        "window ignored",
        cu=Patch(_CU, _WINDOW_CU, "0u;"),
        py=Patch(_PY, _WINDOW_PY, "places = np.arange(length)"),
    ),
    Mutant(
        _WIDE,
        "last position left out",
        cu=Patch(_CU, _END_CU, "const unsigned end = length > 1 ? static_cast<unsigned>(length) - 1u : 1u;"),
        py=Patch(
            _PY,
            _WINDOW_PY,
            _WINDOW_PY.replace(", length)", ", max(length - 1, 1))").replace("(length,", "(max(length - 1, 1),"),
        ),
    ),
    Mutant(
        _WIDE,
        "sink in the numerator",
        cu=Patch(
            _CU,
            _SINK_CU,
            _SINK_CU + "\n    sum.x += sink == nullptr ? 0.0f : expf(*sink - top);\n"
            "    sum.y += sink == nullptr ? 0.0f : expf(*sink - top);",
        ),
        py=Patch(_PY, _SINK_PY, _SINK_PY + "            sums = sums + np.exp(sinks - top)[:, None]\n"),
    ),
    Mutant(
        _WIDE,
        "sink ignored",
        cu=Patch(_CU, _SINK_CU, ""),
        py=Patch(_PY, _SINK_PY, "            total = total + 0\n"),
    ),
    Mutant(
        _WIDE,
        "sink read as BF16",
        cu=Patch(_CU, _SINK_CU, _SINK_CU.replace("*sink", "spark_load(reinterpret_cast<const __nv_bfloat16*>(sink))")),
        py=Patch(
            _PY,
            _SINK_PY,
            "            sinks = to_f32(sinks.view(query.dtype)[: len(sinks)])\n" + _SINK_PY,
        ),
    ),
    Mutant(
        _WIDE,
        "sink rounded to BF16",
        cu=Patch(_CU, _SINK_CU, _SINK_CU.replace("*sink", "spark_low(spark_pack(*sink, 0.0f))")),
        py=Patch(_PY, _SINK_PY, _SINK_PY.replace("sinks", "to_f32(to_bf16(sinks))")),
    ),
    Mutant(
        _WIDE,
        "sink scaled like a score",
        cu=Patch(_CU, _SINK_CU, _SINK_CU.replace("*sink - top", "*sink * 0.125f - top")),
        py=Patch(_PY, _SINK_PY, _SINK_PY.replace("np.exp(sinks", "np.exp(sinks * np.float32(scale)")),
    ),
    Mutant(
        _WIDE,
        "the first head's sink for all",
        cu=Patch(_CU, "sinks + first + h);", "sinks + h);"),
    ),
    Mutant(
        _WIDE,
        "scale of a row of 576",
        cu=Patch(_CU, _SCALE_CU, _SCALE_CU.replace("* scale", "* (scale * 0.942809f)")),
        py=Patch(_PY, _SCALE_PY, _SCALE_PY.replace("(scale)", "(scale * (512 / 576) ** 0.5)")),
    ),
    Mutant(
        _WIDE,
        "score rounded to BF16",
        cu=Patch(_CU, _SCALE_CU, "const float sum = spark_low(spark_pack(v4_warp_sum(dot[h]) * scale, 0.0f));"),
        py=Patch(_PY, _SCALE_PY, _SCALE_PY + "\n        seen = to_f32(to_bf16(seen))"),
    ),
    Mutant(
        _WIDE,
        "values without their rotated end",
        cu=Patch(_CU, _VALUE_CU, _VALUE_CU.replace("x[i],", "vector(v) + 1u < vectors ? x[i] : 0.0f,")),
        py=Patch(
            _PY,
            _SUMS_PY,
            _SUMS_PY.replace("values[:", "np.where(np.arange(values.shape[1]) < size // 2, values, np.float32(0))[:"),
        ),
    ),
    Mutant(
        _WIDE,
        "no rotation back",
        cu=Patch(_CU, _TURN_CU, ""),
        py=Patch(_PY, _TURN_PY, ""),
    ),
    Mutant(
        _WIDE,
        "turned forwards",
        cu=Patch(_CU, _TABLE_CU, _TABLE_CU.replace("true", "false")),
        py=Patch(_PY, _TURN_PY, _TURN_PY.replace("True", "False")),
    ),
    Mutant(
        _WIDE,
        "turned by the length's position",
        cu=Patch(_CU, _TABLE_CU, _TABLE_CU.replace("positions[sequence]", "end - 1u")),
        py=Patch(_PY, _TURN_PY, _TURN_PY.replace("own", "np.array([length - 1], np.uint32)")),
    ),
    Mutant(
        _WIDE,
        "another base",
        cu=Patch(_CU, _TABLE_CU, _TABLE_CU.replace("own", "own / 16.0")),
        py=Patch(_PY, _TURN_PY, _TURN_PY.replace("theta", "theta * 16")),
    ),
    Mutant(
        _WIDE,
        "halves turned instead of neighbours",
        py=Patch(
            _PY,
            _TURN_PY,
            "order = np.arange(rope_dim).reshape(2, -1).T.reshape(-1) + start\n"
            "        mixed[:, order] = rotate(mixed[None][..., order], own, theta, inverse=True)[0]",
        ),
    ),
    Mutant(
        _WIDE,
        "rounded to BF16 before it is turned",
        cu=Patch(
            _CU,
            _TURN_CU,
            "y = make_float2(spark_low(spark_pack(y.x, 0.0f)), spark_low(spark_pack(y.y, 0.0f)));\n            "
            + _TURN_CU,
        ),
        py=Patch(_PY, _TURN_PY, "mixed = to_f32(to_bf16(mixed))\n        " + _TURN_PY),
    ),
    Mutant(
        _WIDE,
        "empty sequences written with zeros",
        cu=Patch(
            _CU,
            _EMPTY_CU,
            "    if (length <= 0) {\n        for (unsigned d = threadIdx.x; d < head_dim; d += blockDim.x) {\n"
            "            spark_store(O + (sequence * num_heads + blockIdx.x * DECODE_HEADS) * head_dim + d, 0.0f);\n"
            "        }\n        return;\n    }\n",
        ),
        py=Patch(_PY, _EMPTY_PY, "        if length <= 0:\n            output[sequence] = 0\n            continue\n"),
    ),
    Mutant(
        _WIDE,
        "warps merged as if their maxima were one",
        cu=Patch(
            _CU,
            "const float share = expf(partial.top[w][h] - top);",
            "const float share = expf(partial.top[0][h] - top);",
        ),
    ),
    Mutant(
        _WIDE,
        "older sums not faded when the maximum grows",
        cu=Patch(_CU, "output[h][i] = output[h][i] * faded;", "output[h][i] = output[h][i] * 1.0f;"),
    ),
    Mutant(
        _WIDE,
        "the query of the head before",
        cu=Patch(_CU, "(q + h * second)", "(q + h * second - (blockIdx.x > 0u ? head_dim : 0u))"),
    ),
    Mutant(
        _WIDE,
        "warps merged before all of them are done",
        cu=Patch(_CU, "    __syncthreads();\n    const unsigned tail", "    const unsigned tail"),
    ),
    Mutant(
        _NARROW,
        "bytes read as E5M2",
        cu=Patch(
            _CU,
            "spark_widen_e4m3(static_cast<unsigned short>(bytes.x & 0xffffu), to);",
            "to[0] = __half2float(__ushort_as_half(static_cast<unsigned short>(bytes.x << 8)));\n"
            "        to[1] = __half2float(__ushort_as_half(static_cast<unsigned short>(bytes.x & 0xff00u)));",
        ),
        py=Patch(
            _PY, _READ_PY, _READ_PY.replace("from_e4m3", "lambda rows: rows.view('float8_e5m2').astype(query.dtype)")
        ),
    ),
    Mutant(
        _NARROW,
        "words of a vector exchanged",
        cu=Patch(_CU, "bytes.y & 0xffffu), to + 4);", "bytes.x & 0xffffu), to + 4);"),
    ),
    Mutant(
        _NARROW,
        "window ignored",
        cu=Patch(_CU, _WINDOW_CU, "0u;"),
        py=Patch(_PY, _READ_PY, _READ_PY.replace("*numbers", "rope_dim, scale, theta, 0")),
    ),
    Mutant(
        _NARROW,
        "one position too many",
        cu=Patch(_CU, _END_CU, "const unsigned end = static_cast<unsigned>(length) + (length % block_size ? 1u : 0u);"),
        py=Patch(_PY, _READ_PY, _READ_PY.replace("seq_lens", "seq_lens + (seq_lens % pool.shape[1] > 0)")),
    ),
    Mutant(
        _NARROW + "@far",
        "32-bit address",
        cu=Patch(
            _CU,
            _ROW_CU,
            "const Vector* row = pool + static_cast<unsigned>(walk.next() * vectors * V4_WIDTH) / V4_WIDTH;",
        ),
    ),
)
