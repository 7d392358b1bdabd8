# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of residual_add, moe_silu_mul and embed_from_argmax."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ADD_CU = "spark_store(residual + i, spark_load(residual + i) + spark_load(src + i));"
_ADD_PY = "return to_bf16(to_f32(residual) + to_f32(src))"
_GATE_CU = "const float sigmoid = 1.0f / (1.0f + expf(-spark_load(gate + i)));"
_GATE_PY = "return to_bf16(to_f32(x) * sigmoid(to_f32(gate)))"
_CONCAT_PY = "return np.concatenate([a, b])"
_SILU_CU = "spark_store(output + i, g * sigmoid * spark_load(up + i));"
_SILU_G_CU = "const float g = spark_load(gate + i);"
_SILU_PY = "return to_bf16(g * sigmoid(g) * to_f32(up))"
_ROW_CU = "output[i] = embed_table[static_cast<size_t>(id) * hidden_size + i];"
_ROW_PY = "return row.copy(), argmax_result.copy()"
_FROM_CU = "embed_table + static_cast<size_t>(token_ids[blockIdx.x]) * hidden_size;"
_BATCH_PY = "return table[token_ids]"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "residual_add::bf16_residual_add",
        "the kernel before is waited for by those that store alone",
        cu=Patch(
            "residual_add.cu",
            "src, unsigned int n) {\n    spark_let_next_start();\n    spark_wait_for_previous();\n",
            "src, unsigned int n) {\n    if (blockIdx.x * blockDim.x + threadIdx.x < n) {\n"
            "        spark_wait_for_previous();\n    }\n",
        ),
        race=True,
    ),
    Mutant(
        "residual_add::bf16_residual_add",
        "truncated instead of rounded",
        cu=Patch(
            "residual_add.cu",
            _ADD_CU,
            "residual[i] = __float2bfloat16_rz(spark_load(residual + i) + spark_load(src + i));",
        ),
        py=Patch(
            "residual_add.py",
            _ADD_PY,
            "total = to_f32(residual) + to_f32(src)\n"
            "        return (total.view(np.uint32) >> 16).astype(np.uint16).view(residual.dtype)",
        ),
    ),
    Mutant(
        "residual_add::bf16_residual_add",
        "ties rounded away from zero",
        py=Patch(
            "residual_add.py",
            _ADD_PY,
            "total = to_f32(residual) + to_f32(src)\n"
            "        return ((total.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(residual.dtype)",
        ),
        cu=Patch(
            "residual_add.cu",
            _ADD_CU,
            "const float total = spark_load(residual + i) + spark_load(src + i);\n"
            "        residual[i] = __ushort_as_bfloat16(\n"
            "            static_cast<unsigned short>((__float_as_uint(total) + 0x8000u) >> 16));",
        ),
    ),
    Mutant(
        "residual_add::bf16_residual_add",
        "last element left out",
        cu=Patch("residual_add.cu", "if (i < n) {\n        " + _ADD_CU, "if (i + 1u < n) {\n        " + _ADD_CU),
        py=Patch(
            "residual_add.py",
            _ADD_PY,
            "total = to_bf16(to_f32(residual) + to_f32(src))\n        total[-1] = residual[-1]\n        return total",
        ),
    ),
    Mutant(
        "residual_add::bf16_residual_add",
        "one element too many",
        cu=Patch("residual_add.cu", "if (i < n) {\n        " + _ADD_CU, "if (i <= n) {\n        " + _ADD_CU),
    ),
    Mutant(
        "residual_add::sigmoid_gate_mul",
        "sigmoid of the negated gate",
        cu=Patch("residual_add.cu", _GATE_CU, "const float sigmoid = 1.0f / (1.0f + expf(spark_load(gate + i)));"),
        py=Patch("residual_add.py", _GATE_PY, "return to_bf16(to_f32(x) * sigmoid(-to_f32(gate)))"),
    ),
    Mutant(
        "residual_add::sigmoid_gate_mul",
        "sigmoid rounded to BF16 first",
        cu=Patch(
            "residual_add.cu",
            _GATE_CU,
            "const float sigmoid =\n"
            "            __bfloat162float(__float2bfloat16_rn(1.0f / (1.0f + expf(-spark_load(gate + i)))));",
        ),
        py=Patch("residual_add.py", _GATE_PY, "return to_bf16(to_f32(x) * to_f32(to_bf16(sigmoid(to_f32(gate)))))"),
    ),
    Mutant(
        "residual_add::sigmoid_gate_mul",
        "input and gate exchanged",
        cu=Patch("residual_add.cu", _GATE_CU, _GATE_CU.replace("gate + i", "input + i")),
        py=Patch("residual_add.py", _GATE_PY, "return to_bf16(to_f32(gate) * sigmoid(to_f32(x)))"),
    ),
    Mutant(
        "residual_add::bf16_concat",
        "halves exchanged",
        cu=Patch(
            "residual_add.cu",
            "out[i] = a[i];\n        out[N + i] = b[i];",
            "out[i] = b[i];\n        out[N + i] = a[i];",
        ),
        py=Patch("residual_add.py", _CONCAT_PY, "return np.concatenate([b, a])"),
    ),
    Mutant(
        "residual_add::bf16_concat",
        "interleaved",
        cu=Patch(
            "residual_add.cu",
            "out[i] = a[i];\n        out[N + i] = b[i];",
            "out[2u * i] = a[i];\n        out[2u * i + 1u] = b[i];",
        ),
        py=Patch("residual_add.py", _CONCAT_PY, "return np.stack([a, b], axis=1).reshape(-1)"),
    ),
    Mutant(
        "residual_add::bf16_concat",
        "copied through FP32, which loses NaN payloads",
        cu=Patch("residual_add.cu", "out[N + i] = b[i];", "spark_store(out + N + i, spark_load(b + i));"),
        py=Patch("residual_add.py", _CONCAT_PY, "return to_bf16(np.concatenate([to_f32(a), to_f32(b)]))"),
    ),
    Mutant(
        "moe_silu_mul::moe_silu_mul",
        "gate clamped to 10",
        cu=Patch("moe_silu_mul.cu", _SILU_G_CU, "const float g = fminf(spark_load(gate + i), 10.0f);"),
        py=Patch("moe_silu_mul.py", "g = to_f32(gate)", "g = np.minimum(to_f32(gate), np.float32(10.0))"),
    ),
    Mutant(
        "moe_silu_mul::moe_silu_mul",
        "up clamped to 10",
        cu=Patch(
            "moe_silu_mul.cu",
            _SILU_CU,
            "spark_store(output + i, g * sigmoid * fminf(fmaxf(spark_load(up + i), -10.0f), 10.0f));",
        ),
        py=Patch("moe_silu_mul.py", _SILU_PY, "return to_bf16(g * sigmoid(g) * np.clip(to_f32(up), -10, 10))"),
    ),
    Mutant(
        "moe_silu_mul::moe_silu_mul",
        "silu rounded to BF16 before up",
        cu=Patch(
            "moe_silu_mul.cu",
            _SILU_CU,
            "spark_store(output + i, __bfloat162float(__float2bfloat16_rn(g * sigmoid)) * spark_load(up + i));",
        ),
        py=Patch("moe_silu_mul.py", _SILU_PY, "return to_bf16(to_f32(to_bf16(g * sigmoid(g))) * to_f32(up))"),
    ),
    Mutant(
        "moe_silu_mul::moe_silu_mul",
        "gate and up exchanged",
        cu=Patch("moe_silu_mul.cu", _SILU_CU, "spark_store(output + i, sigmoid * spark_load(up + i));"),
        py=Patch("moe_silu_mul.py", _SILU_PY, "return to_bf16(sigmoid(to_f32(up)) * to_f32(up) * g)"),
    ),
    Mutant(
        "embed_from_argmax::embed_from_argmax@far",
        "32-bit row offset",
        cu=Patch("embed_from_argmax.cu", _ROW_CU, "output[i] = embed_table[id * hidden_size + i];"),
    ),
    Mutant(
        "embed_from_argmax::embed_from_argmax",
        "copied through FP32, which loses NaN payloads",
        cu=Patch(
            "embed_from_argmax.cu",
            _ROW_CU,
            "spark_store(output + i, spark_load(embed_table + static_cast<size_t>(id) * hidden_size + i));",
        ),
        py=Patch(
            "embed_from_argmax.py", _ROW_PY, "return (row.astype('f4') * 1).astype(row.dtype), argmax_result.copy()"
        ),
    ),
    Mutant(
        "embed_from_argmax::embed_from_argmax",
        "id not copied",
        cu=Patch("embed_from_argmax.cu", "*token_id_out = id;", "*token_id_out = 0u;"),
        py=Patch("embed_from_argmax.py", _ROW_PY, "return row.copy(), argmax_result * 0"),
    ),
    Mutant(
        "embed_from_argmax::embed_from_argmax",
        "last element left out",
        cu=Patch("embed_from_argmax.cu", "if (i < hidden_size) {", "if (i + 1u < hidden_size) {"),
        py=Patch(
            "embed_from_argmax.py",
            _ROW_PY,
            "row = row.copy()\n    row[-1:] = 0\n    return row, argmax_result.copy()",
        ),
    ),
    Mutant(
        "embed_from_argmax::batched_embed@far",
        "32-bit row offset",
        cu=Patch("embed_from_argmax.cu", _FROM_CU, "embed_table + token_ids[blockIdx.x] * hidden_size;"),
    ),
    Mutant(
        "embed_from_argmax::batched_embed",
        "first id for every row",
        cu=Patch("embed_from_argmax.cu", _FROM_CU, _FROM_CU.replace("blockIdx.x", "0")),
        py=Patch("embed_from_argmax.py", _BATCH_PY, "return table[token_ids * 0 + token_ids[0]]"),
    ),
    Mutant(
        "embed_from_argmax::batched_embed",
        "elements after the last whole chunk left out",
        cu=Patch("embed_from_argmax.cu", "done = chunks * 8u;", "done = hidden_size;"),
        py=Patch(
            "embed_from_argmax.py",
            _BATCH_PY,
            "rows = table[token_ids]\n    rows[:, rows.shape[1] // 8 * 8 :] = 0\n    return rows",
        ),
    ),
    Mutant(
        "embed_from_argmax::batched_embed",
        "ids read as bytes",
        cu=Patch(
            "embed_from_argmax.cu",
            _FROM_CU,
            "embed_table + static_cast<size_t>(token_ids[blockIdx.x] & 31u) * hidden_size;",
        ),
        py=Patch("embed_from_argmax.py", _BATCH_PY, "return table[token_ids & 31]"),
    ),
)
