# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the MXFP4 kernels and of the limited activation: nibbles, scales, the order of the sum, what is clamped,
rows and outputs at edges."""

from __future__ import annotations

from .mutants import Mutant, Patch

_GEMV = "spark_mxfp4_gemv::spark_mxfp4_gemv"
_ROWS = "spark_mxfp4_gemv::spark_mxfp4_gemv_batchm"

_CUH, _CU, _PY = "mxfp4.cuh", "spark_mxfp4_gemv.cu", "spark_mxfp4_gemv.py"
_DECODE_CU = "spark_w4_decode(values[o], mxfp4_word(codes[o], word));"
_SCALE_CU = "const float scale = mxfp4_scale(scales[o]);"
_SCALE_AT_CU = "scales[d][o] = weights.scales[at];"
_SCALE_PY = "decode_e8m0(scales[tile])"
_CODES_PY = "codes(packed[tile])"
_SUM_CU = "spark_store(C + row * out_stride + block_output + at, halves[0] + halves[1]);"
_LAST_CU = "        MXFP4_CASE(8u)\n"
_ROWS_PY = "to_bf16(mxfp4_products(to_f32(x), packed, scales))"

_EXPERT, _CLAMPED = "spark_moe_expert_mxfp4", "spark_moe_expert_silu_down_clamped"
_GATE_UP, _GATE_UP_ROWS = (
    f"{_EXPERT}::spark_moe_expert_gate_up_mxfp4",
    f"{_EXPERT}::spark_moe_expert_gate_up_mxfp4_rows",
)
_DOWN = f"{_EXPERT}::spark_moe_expert_silu_down_clamped_mxfp4"
_DOWN_ROWS = f"{_DOWN}_rows"
_NVFP4_DOWN, _NVFP4_DOWN_ROWS = f"{_CLAMPED}::{_CLAMPED}", f"{_CLAMPED}::{_CLAMPED}_rows"

_EXPERT_CU, _CLAMPED_CU = f"{_EXPERT}.cu", f"{_CLAMPED}.cu"
_SHARED_CUH, _LIMIT_CUH = "moe_expert.cuh", "moe_limit.cuh"
_EXPERT_PY, _CLAMPED_PY = f"{_EXPERT}.py", f"{_CLAMPED}.py"
_OUTPUTS_CU = "mxfp4_outputs(row, tables, expert_indices[at], out + at * n, n, k);"
_ROW_CU = "reinterpret_cast<const uint4*>(a + static_cast<size_t>(t) * k)"
_STAGE_CU = "row = mxfp4_stage(staged, gate + at * k, up + at * k, limit, k);"
_GATED_CU = "spark_gated(g[word], u[word], values, SparkLimit{limit});"
_SECOND_CU = "const float sum = half + spark_warp_sum("
_ONE_CU = """\
    const bool up = blockIdx.z != 0u;
    mxfp4_project(A, {up ? up_packed_ptrs : gate_packed_ptrs, up ? up_scale_ptrs : gate_scale_ptrs},"""
_DOWN_GRID_CU = "C, expert_indices, blockIdx.y, blockIdx.z, N"
_GATE_LIMIT_CU = "return g > limit ? limit : g;"
_UP_LIMIT_CU = "return u > limit ? limit : u < -limit ? -limit : u;"
_BOTH_CU = """\
row = spark_stage_gated(staged, (routed ? gate : sh_gate) + at * k, (routed ? up : sh_up) + at * k, k, limit);"""
_ROUTED_CU = "spark_stage_gated(staged, gate + at * k, up + at * k, k, {})"
_ALONE_CU = "spark_stage_gated(staged, sh_gate + at * k, sh_up + at * k, k, {})"
_SLOT_PY = "result[slot] = mxfp4_products(x[None], *expert)[0]"
_ROWS_OF_PY = "rows = list(gated_within(gate, up, limit))"
_CLAMPED_ROWS_PY = "list(gated_within(gate, up, limit))"


def _limits(check: str, name: str, routed: str, alone: str) -> Mutant:
    """Limits of routed experts and of the shared one apart."""
    apart = f"row = routed ? {_ROUTED_CU.format(routed)} : {_ALONE_CU.format(alone)};"
    return Mutant(check, name, cu=Patch(_SHARED_CUH, _BOTH_CU, apart))


def _expert(check: str, name: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(_EXPERT_CU, find, replace))


def _cuh(check: str, name: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(_CUH, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _GEMV,
        "high nibble first",
        cu=Patch(
            _CUH,
            _DECODE_CU,
            "const unsigned w = mxfp4_word(codes[o], word);\n"
            "spark_w4_decode(values[o], ((w & 0x0f0f0f0fu) << 4) | ((w >> 4) & 0x0f0f0f0fu));",
        ),
        py=Patch(_PY, _CODES_PY, "codes((packed[tile] << 4) | (packed[tile] >> 4))"),
    ),
    Mutant(
        _GEMV,
        "a scale as a number",
        cu=Patch(_CUH, _SCALE_CU, "const float scale = static_cast<float>(scales[o]);"),
        py=Patch(_PY, _SCALE_PY, "scales[tile].astype(np.float32)"),
    ),
    Mutant(
        _GEMV,
        "a scale for 16 values",
        cu=Patch(_CUH, _SCALE_AT_CU, "scales[d][o] = weights.scales[at - chunk + 2u * chunk % weights.chunks];"),
        py=Patch(_PY, _SCALE_PY, _SCALE_PY + "[:, 2 * np.arange(scales.shape[1]) % scales.shape[1]]"),
    ),
    Mutant(
        _GEMV,
        "2^-127 as 0",
        cu=Patch(_CUH, "byte == 0u ? 0x00400000u : byte << 23", "byte << 23"),
        py=Patch(_PY, "np.uint32(1 << 22)", "np.uint32(0)"),
    ),
    Mutant(
        _GEMV,
        "NaN among the scales as infinity",
        cu=Patch(_CUH, "byte == 0xffu ? 0x7fffffffu : bits", "bits"),
        py=Patch(_PY, "np.float32(np.nan)", "np.float32(np.inf)"),
    ),
    Mutant(
        _GEMV,
        "products added without an order",
        py=Patch(
            _PY,
            _ROWS_PY,
            "to_bf16(to_f32(x) @ (codes(packed) * np.repeat(decode_e8m0(scales), CHUNK, axis=1)).T)",
        ),
    ),
    _cuh(
        _GEMV,
        "both halves of a chunk in one accumulator",
        "sums[r][o][half] = fmaf(scale, parts[r][o], sums[r][o][half]);",
        "sums[r][o][0] = fmaf(scale, parts[r][o], sums[r][o][0]);",
    ),
    _cuh(_GEMV, "the second 32 lanes left out", _SUM_CU, _SUM_CU.replace("halves[0] + halves[1]", "halves[0]")),
    _cuh(
        _GEMV,
        "accumulators added after the tree",
        "spark_warp_sum(sums[0][r][o][0] + sums[0][r][o][1], SPARK_WARP);",
        "spark_warp_sum(sums[0][r][o][0], SPARK_WARP) + spark_warp_sum(sums[0][r][o][1], SPARK_WARP);",
    ),
    _cuh(
        _GEMV,
        "chunks beyond the first turn left out",
        "first < weights.chunks; first += DEPTH * STEP",
        "first < weights.chunks && first < DEPTH * STEP; first += DEPTH * STEP",
    ),
    Mutant(
        _ROWS,
        "rows from 4 on are the first rows again",
        cu=Patch(_CUH, "rows.load(a, r, MXFP4_WORDS", "rows.load(a, r % 4u, MXFP4_WORDS"),
        py=Patch(_PY, _ROWS_PY, _ROWS_PY.replace("to_f32(x)", "to_f32(x)[[m % 4 for m in range(len(x))]]")),
    ),
    _cuh(_ROWS, "rows of output N apart", "C + row * out_stride", "C + static_cast<size_t>(row) * N"),
    _cuh(
        _ROWS,
        "the second output is the first again",
        "static_cast<size_t>(o < weights.outputs ? o : 0u)",
        "static_cast<size_t>(0u)",
    ),
    Mutant(_ROWS, "eight rows left out", cu=Patch(_CU, _LAST_CU, "")),
    _cuh(_ROWS, "one output of two where there are many rows", "from < OUTPUTS;", "from < TOGETHER;"),
    _expert(_GATE_UP, "the slot for the expert", _OUTPUTS_CU, _OUTPUTS_CU.replace("expert_indices[at]", "slot")),
    _expert(_GATE_UP, "the scales of gate for up", _ONE_CU, _ONE_CU.replace("? up_scale_ptrs", "? gate_scale_ptrs")),
    _expert(_GATE_UP, "the second lane of each thread left out", _SECOND_CU, "const float sum = half + 0.0f * ("),
    _expert(_GATE_UP, "nothing written for an expert that is elsewhere", "spark_store(out + first + lane, 0.0f);", ";"),
    _cuh(
        _GATE_UP,
        "high nibble first",
        _DECODE_CU,
        "const unsigned w = mxfp4_word(codes[o], word);\n"
        "spark_w4_decode(values[o], ((w & 0x0f0f0f0fu) << 4) | ((w >> 4) & 0x0f0f0f0fu));",
    ),
    _cuh(_GATE_UP, "a scale as a number", _SCALE_CU, "const float scale = static_cast<float>(scales[o]);"),
    Mutant(
        _GATE_UP,
        "gate for up",
        py=Patch(_EXPERT_PY, "_slots(rows, up, outputs)", "_slots(rows, gate, outputs)"),
    ),
    _expert(_GATE_UP_ROWS, "the activations of the first row", _ROW_CU, "reinterpret_cast<const uint4*>(a)"),
    _expert(
        _GATE_UP_ROWS,
        "the experts of the first row",
        _OUTPUTS_CU,
        _OUTPUTS_CU.replace("expert_indices[at]", "expert_indices[slot]"),
    ),
    _expert(_GATE_UP_ROWS, "each slot twice", "blockIdx.y, blockIdx.z / 2u", "blockIdx.y, blockIdx.z / 4u"),
    _expert(_GATE_UP_ROWS, "gate for up", "up = blockIdx.z % 2u != 0u", "up = blockIdx.z > 1u << 20"),
    Mutant(
        _DOWN,
        "gate clamped below",
        cu=Patch(_LIMIT_CUH, _GATE_LIMIT_CU, "return g > limit ? limit : g < -limit ? -limit : g;"),
        py=Patch(
            _EXPERT_PY,
            _ROWS_OF_PY,
            "rows = list(gated_within(np.maximum(gate, gate.dtype.type(-limit)), up, limit))",
        ),
    ),
    _cuh(
        _DOWN,
        "products rounded",
        "parts[r][o] = fmaf(a[i], values[o][i], parts[r][o]);",
        "parts[r][o] = a[i] * values[o][i] + parts[r][o];",
    ),
    Mutant(
        _DOWN,
        "up clamped from above alone",
        cu=Patch(_LIMIT_CUH, _UP_LIMIT_CU, "return u > limit ? limit : u;"),
    ),
    Mutant(
        _DOWN,
        "not clamped",
        cu=Patch(_EXPERT_CU, _GATED_CU, "spark_gated(g[word], u[word], values);"),
        py=Patch(_EXPERT_PY, _ROWS_OF_PY, "rows = list(gated_within(gate, up, 1e30))"),
    ),
    Mutant(
        _DOWN,
        "activation rounded to BF16",
        cu=Patch(
            _EXPERT_CU,
            _GATED_CU,
            _GATED_CU
            + "\n        for (unsigned i = 0u; i < 8u; ++i) {\n"
            + "            values[i] = __bfloat162float(__float2bfloat16_rn(values[i]));\n        }",
        ),
        py=Patch(_EXPERT_PY, _ROWS_OF_PY, "rows = list(to_f32(to_bf16(gated_within(gate, up, limit))))"),
    ),
    Mutant(
        _DOWN,
        "gate and up swapped",
        cu=Patch(_EXPERT_CU, _GATED_CU, "spark_gated(u[word], g[word], values, SparkLimit{limit});"),
        py=Patch(_EXPERT_PY, _ROWS_OF_PY, "rows = list(gated_within(up, gate, limit))"),
    ),
    _expert(_DOWN, "one pair of a warp alone", "pair < EXPERT_DOWN_PAIRS; ++pair", "pair < 1u; ++pair"),
    _expert(
        _DOWN, "warps one pair apart", "SPARK_EXPERT_WARPS + warp) * pairs + pair", "SPARK_EXPERT_WARPS + warp) + pair"
    ),
    _expert(_DOWN_ROWS, "the first row for all", _DOWN_GRID_CU, _DOWN_GRID_CU.replace("blockIdx.y", "0u")),
    _expert(_DOWN_ROWS, "the gate of the first row", _STAGE_CU, _STAGE_CU.replace("gate + at", "gate + slot")),
    _expert(
        _DOWN_ROWS,
        "up of the slot before",
        _STAGE_CU,
        _STAGE_CU.replace("up + at * k", "up + (at > 0u ? at - 1u : 0u) * k"),
    ),
    Mutant(
        _NVFP4_DOWN,
        "gate clamped below",
        cu=Patch(_LIMIT_CUH, _GATE_LIMIT_CU, "return g > limit ? limit : g < -limit ? -limit : g;"),
        py=Patch(_CLAMPED_PY, "g = np.minimum(to_f32(gate), most)", "g = np.clip(to_f32(gate), -most, most)"),
    ),
    Mutant(
        _NVFP4_DOWN,
        "up clamped from above alone",
        cu=Patch(_LIMIT_CUH, _UP_LIMIT_CU, "return u > limit ? limit : u;"),
        py=Patch(_CLAMPED_PY, "u = np.clip(to_f32(up), -most, most)", "u = np.minimum(to_f32(up), most)"),
    ),
    _limits(_NVFP4_DOWN, "the shared expert not clamped", "limit", "SparkNoLimit()"),
    _limits(_NVFP4_DOWN, "the shared expert alone clamped", "SparkNoLimit()", "limit"),
    Mutant(
        _NVFP4_DOWN,
        "clamped at 10 whatever the limit",
        py=Patch(_CLAMPED_PY, _CLAMPED_ROWS_PY, "list(gated_within(gate, up, 10.0))"),
    ),
    Mutant(
        _NVFP4_DOWN_ROWS,
        "the first row for all",
        cu=Patch(_CLAMPED_CU, "expert_indices, blockIdx.y,\n", "expert_indices, 0u,\n"),
    ),
    Mutant(
        _NVFP4_DOWN_ROWS,
        "clamped at twice the limit",
        cu=Patch(
            _CLAMPED_CU,
            "blockIdx.z, N, K, top_k, SparkLimit{limit}",
            "blockIdx.z, N, K, top_k, SparkLimit{2.0f * limit}",
        ),
    ),
    Mutant(
        _NVFP4_DOWN_ROWS,
        "the routed activations of the first row",
        cu=Patch(
            _SHARED_CUH,
            _BOTH_CU,
            _BOTH_CU.replace("(routed ? gate : sh_gate) + at * k", "(routed ? gate + slot * k : sh_gate + at * k)"),
        ),
    ),
)
