# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the expert kernels in NVFP4 and FP8: orders of arithmetic, the activation, and which expert goes where."""

from __future__ import annotations

from .mutants import Mutant, Patch

_CUH = "moe_expert.cuh"
_NVFP4_CU, _FP8_CU = "moe_shared_expert_fused.cu", "spark_moe_shared_expert_fused_fp8.cu"
_GEMV_CU, _FUSED_CU = "moe_expert_gemv.cu", "moe_expert_gemv_fused.cu"
_NVFP4_PY, _FP8_PY = "moe_shared_expert_fused.py", "spark_moe_shared_expert_fused_fp8.py"

_GATE_UP = "moe_shared_expert_fused::moe_expert_gate_up_shared"
_DOWN = "moe_shared_expert_fused::moe_expert_silu_down_shared"
_GATE_UP_ROWS = "moe_shared_expert_fused::spark_moe_expert_gate_up_shared_rows"
_DOWN_ROWS = "moe_shared_expert_fused::spark_moe_expert_silu_down_shared_rows"
_GEMV = "moe_expert_gemv::moe_expert_gemv"
_UNSHARED = "moe_expert_gemv_fused::moe_expert_gemv_"
_FP8 = "spark_moe_shared_expert_fused_fp8::"
_FP8_GATE_UP = f"{_FP8}spark_moe_expert_gate_up_shared_fp8"
_FP8_DOWN = f"{_FP8}spark_moe_expert_silu_down_shared_fp8"
_FP8_GATE_UP_ROWS, _FP8_DOWN_ROWS = f"{_FP8_GATE_UP}_rows", f"{_FP8_DOWN}_rows"

_PAIR_CU = "sum = sum + (a[i] * (values[i] * factor) + a[i + 1u] * (values[i + 1u] * factor));"
_FUSED_PAIR_CU = "sum = sum + fmaf(a[i + 1u], values[i + 1u] * factor, a[i] * (values[i] * factor));"
_SLOT_CU = "(first ? gate_out : up_out) + slot * n"
_SECOND_HALF_CU = "spark_gated(g[1], u[1], a + 8);"
_PAIR_PY = "pairs = products[..., 0] + products[..., 1]"
_LANES_PY = "turn = terms[first : first + WARP]"
_SILU_CU = "to[i] = g[i] * (1.0f / (1.0f + __expf(-g[i]))) * to[i];"
_SILU_PY = "activation: F32Array = g * sigmoid(g) * to_f32(up)"
_ABSENT_CU = "spark_store(out + first + lane, 0.0f);"
_SCALED_CU = "spark_warp_sum(weights.scaled(sums[o], at), SPARK_WARP)"
_QUARTER_CU = "sum = fmaf(a[2], w[2], sum);\n        return fmaf(a[3], w[3], sum);"
_ROW_CU = "const SparkRow row = {a + static_cast<size_t>(t) * k};"
_STAGE_CU = "to[chunks] = make_float4(values[4], values[5], values[6], values[7]);"
_Z_CU = "spark_expert_project(A, to, expert_indices, blockIdx.y, blockIdx.z / 2u, N, K, top_k);"
_UP_ROWS_CU = "const bool up = blockIdx.z % 2u != 0u;"
_OUTPUTS_CU = "n - static_cast<unsigned>(first) < OUTPUTS ? n - static_cast<unsigned>(first) : OUTPUTS;"
_PROJECT_CU = "(row, weights, (routed ? to.out : to.sh_out) + at * n, n, k);\n}\n\n// silu"
_SHARED_DOWN_CU = "(routed ? gate : sh_gate) + at * k, (routed ? up : sh_up) + at * k, k, limit);"
_TURNS_CU = "for (; chunk < chunks; chunk += SPARK_WARP) {"

# The kernels for one row: what stands before their own line of the grid.
_ONE_CU = """\
    const bool up = blockIdx.z != 0u;
    const unsigned char* shared = up ? sh_up_packed : sh_gate_packed;
    const SparkNvfp4Projection to = {
        {up ? up_packed_ptrs : gate_packed_ptrs, up ? up_scale_ptrs : gate_scale_ptrs,
         up ? up_scale2_vals : gate_scale2_vals},
        up ? up_out : gate_out,
        spark_nvfp4_shared(sh_gate_packed != nullptr ? shared : nullptr, up ? sh_up_scale : sh_gate_scale,"""
_FP8_ONE_CU = """\
    const bool up = blockIdx.z != 0u;
    const unsigned char* shared = up ? sh_up_weight : sh_gate_weight;
"""
_FP8_DOWN_CU = """\
    const SparkFp8Projection down = {
        {weight_ptrs, scale_ptrs}, C, spark_fp8_shared(sh_down_weight, sh_down_scale), sh_down_out};
    spark_expert_down(spark_staged, gate_out, up_out, sh_gate_in, sh_up_in, down, expert_indices, 0u, """


def _cu(check: str, name: str, file: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(file, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _GATE_UP,
        "products added one by one",
        cu=Patch(
            _CUH,
            _PAIR_CU,
            "sum = sum + a[i] * (values[i] * factor);\n            sum = sum + a[i + 1u] * (values[i + 1u] * factor);",
        ),
        py=Patch(_NVFP4_PY, _PAIR_PY, "pairs = products.reshape(len(weights), -1, CHUNK)"),
    ),
    _cu(
        _GATE_UP,
        "factor multiplied with the pair, not with the weight",
        _CUH,
        _PAIR_CU,
        "sum = sum + (a[i] * values[i] + a[i + 1u] * values[i + 1u]) * factor;",
    ),
    _cu(
        _GATE_UP,
        "pair fused",
        _CUH,
        _PAIR_CU,
        _FUSED_PAIR_CU,
    ),
    Mutant(
        _GATE_UP,
        "the lanes of a turn in reverse",
        py=Patch(_NVFP4_PY, _LANES_PY, "turn = terms[first : first + WARP][::-1]"),
    ),
    _cu(_GATE_UP, "one output a warp", _CUH, _OUTPUTS_CU, "1u;"),
    _cu(_GATE_UP, "outputs past N written", _CUH, _OUTPUTS_CU, "OUTPUTS;"),
    _cu(_GATE_UP, "nothing written for an expert that is not there", _CUH, _ABSENT_CU, "(void)out;"),
    _cu(
        _GATE_UP,
        "the scales of gate for up",
        _NVFP4_CU,
        _ONE_CU,
        _ONE_CU.replace("? up_scale_ptrs", "? gate_scale_ptrs"),
    ),
    _cu(
        _GATE_UP,
        "up without a shared gate",
        _NVFP4_CU,
        _ONE_CU,
        _ONE_CU.replace("sh_gate_packed != nullptr ? shared : nullptr", "shared"),
    ),
    Mutant(
        _DOWN,
        "activation rounded to BF16",
        cu=Patch(_CUH, _SILU_CU, _SILU_CU + "\n        to[i] = __bfloat162float(__float2bfloat16_rn(to[i]));"),
        py=Patch(_NVFP4_PY, _SILU_PY, "activation = to_f32(to_bf16(g * sigmoid(g) * to_f32(up)))"),
    ),
    Mutant(
        _DOWN,
        "clamped at 10",
        cu=Patch(
            _CUH,
            _SILU_CU,
            "g[i] = fminf(g[i], 10.0f);\n        to[i] = fmaxf(fminf(to[i], 10.0f), -10.0f);\n        " + _SILU_CU,
        ),
        py=Patch(_NVFP4_PY, "g = to_f32(gate)\n", "g = np.minimum(to_f32(gate), np.float32(10))\n"),
    ),
    Mutant(
        _DOWN,
        "gate and up swapped",
        cu=Patch(
            _CUH, "spark_gated(g[word], u[word], values, limit);", "spark_gated(u[word], g[word], values, limit);"
        ),
        py=Patch(_NVFP4_PY, "list(gated(gate, up))", "list(gated(up, gate))"),
    ),
    _cu(
        _DOWN,
        "the shared expert on the first routed row",
        _CUH,
        _SHARED_DOWN_CU,
        "gate + at * k, up + at * k, k, limit);",
    ),
    _cu(_DOWN, "second quarter of each half staged twice", _CUH, _STAGE_CU, "to[chunks] = to[0];"),
    Mutant(
        _DOWN,
        "sigmoid alone",
        py=Patch(_NVFP4_PY, "g * sigmoid(g) * to_f32(up)", "sigmoid(g) * to_f32(up)"),
    ),
    _cu(
        _GATE_UP_ROWS,
        "the experts of the first row",
        _CUH,
        "to.tables.of(routed ? expert_indices + at : nullptr, to.shared);\n    const SparkRow row",
        "to.tables.of(routed ? expert_indices + slot : nullptr, to.shared);\n    const SparkRow row",
    ),
    _cu(_GATE_UP_ROWS, "the activations of the first row", _CUH, _ROW_CU, "const SparkRow row = {a};"),
    _cu(
        _GATE_UP_ROWS,
        "no up",
        _NVFP4_CU,
        _UP_ROWS_CU,
        _UP_ROWS_CU.replace("blockIdx.z % 2u != 0u", "blockIdx.z > 1u << 20"),
    ),
    _cu(
        _GATE_UP_ROWS,
        "all shared results in one row",
        _CUH,
        _PROJECT_CU,
        _PROJECT_CU.replace("to.sh_out) + at * n", "to.sh_out - at * n) + at * n"),
    ),
    _cu(
        _DOWN_ROWS,
        "the first row for all",
        _NVFP4_CU,
        "expert_indices, blockIdx.y, blockIdx.z, N",
        "expert_indices, 0u, blockIdx.z, N",
    ),
    _cu(
        _DOWN_ROWS,
        "the routed activations of the first row",
        _CUH,
        _SHARED_DOWN_CU,
        "routed ? gate + slot * k : sh_gate + at * k, (routed ? up : sh_up) + at * k, k, limit);",
    ),
    _cu(
        _DOWN_ROWS,
        "up of the slot before",
        _CUH,
        _SHARED_DOWN_CU,
        "(routed ? gate : sh_gate) + at * k, (routed ? up : sh_up) + (at > 0u ? at - 1u : 0u) * k, k, limit);",
    ),
    Mutant(
        _FP8_GATE_UP,
        "factor after the tree",
        cu=Patch(_CUH, _SCALED_CU, "weights.scaled(spark_warp_sum(sums[o], SPARK_WARP), at)"),
        py=Patch(_FP8_PY, "folded(lanes * scale[tile])", "folded(lanes) * scale[tile]"),
    ),
    _cu(
        _FP8_GATE_UP,
        "fourth product before the third",
        _CUH,
        _QUARTER_CU,
        "sum = fmaf(a[3], w[3], sum);\n        return fmaf(a[2], w[2], sum);",
    ),
    Mutant(
        _FP8_GATE_UP,
        "the factor of the row before",
        cu=Patch(_CUH, "return sum * scales[row];", "return sum * scales[row == 0u ? 0u : row - 1u];"),
        py=Patch(_FP8_PY, "scale[tile]", "np.roll(scale, 1)[tile]"),
    ),
    Mutant(
        _FP8_GATE_UP,
        "chunk in descending k",
        py=Patch(_FP8_PY, "for step in range(CHUNK):", "for step in reversed(range(CHUNK)):"),
    ),
    _cu(
        _FP8_GATE_UP,
        "chunks beyond four turns left out",
        _CUH,
        _TURNS_CU,
        "for (; chunk < chunks && chunk < 32u; chunk += SPARK_WARP) {",
    ),
    _cu(
        _FP8_GATE_UP,
        "the shared gate for up",
        _FP8_CU,
        _FP8_ONE_CU,
        _FP8_ONE_CU.replace("? sh_up_weight", "? sh_gate_weight"),
    ),
    _cu(
        _FP8_DOWN,
        "the factors of the first expert for the shared one",
        _FP8_CU,
        _FP8_DOWN_CU,
        _FP8_DOWN_CU.replace("sh_down_scale", "reinterpret_cast<const float*>(scale_ptrs[0])"),
    ),
    _cu(_FP8_DOWN, "sigmoid of the wrong sign", _CUH, _SILU_CU, _SILU_CU.replace("__expf(-g[i])", "__expf(g[i])")),
    Mutant(
        _FP8_DOWN,
        "gate and up swapped",
        cu=Patch(
            _CUH, "spark_gated(g[word], u[word], values, limit);", "spark_gated(u[word], g[word], values, limit);"
        ),
        py=Patch(_FP8_PY, "list(gated(gate, up))", "list(gated(up, gate))"),
    ),
    _cu(_FP8_GATE_UP_ROWS, "the activations of the first row", _CUH, _ROW_CU, "const SparkRow row = {a};"),
    _cu(
        _FP8_GATE_UP_ROWS,
        "no up",
        _FP8_CU,
        _UP_ROWS_CU,
        _UP_ROWS_CU.replace("blockIdx.z % 2u != 0u", "blockIdx.z > 1u << 20"),
    ),
    _cu(_FP8_GATE_UP_ROWS, "each slot twice", _FP8_CU, _Z_CU, _Z_CU.replace("/ 2u", "/ 4u")),
    _cu(
        _FP8_DOWN_ROWS,
        "the first row for all",
        _FP8_CU,
        "expert_indices, blockIdx.y, blockIdx.z, N",
        "expert_indices, 0u, blockIdx.z, N",
    ),
    _cu(
        _FP8_DOWN_ROWS,
        "the routed activations of the first row",
        _CUH,
        _SHARED_DOWN_CU,
        "routed ? gate + slot * k : sh_gate + at * k, (routed ? up : sh_up) + at * k, k, limit);",
    ),
    _cu(
        _FP8_DOWN_ROWS,
        "the shared up of the first row",
        _CUH,
        _SHARED_DOWN_CU,
        "(routed ? gate : sh_gate) + at * k, routed ? up + at * k : sh_up, k, limit);",
    ),
    _cu(_GEMV, "the first row for all", _GEMV_CU, "A + slot * input_stride", "A"),
    _cu(_GEMV, "rows of K elements", _GEMV_CU, "A + slot * input_stride", "A + slot * (input_stride != 0u ? K : 0u)"),
    _cu(_GEMV, "the slot for the expert", _GEMV_CU, "tables.of(expert_indices[slot])", "tables.of(slot)"),
    _cu(_GEMV, "pair fused", _CUH, _PAIR_CU, _FUSED_PAIR_CU),
    *(
        mutant
        for function in ("gate_up", "gate_up_2x")
        for mutant in (
            _cu(
                _UNSHARED + function,
                "all in the first slot",
                _FUSED_CU,
                _SLOT_CU,
                _SLOT_CU.replace("slot * n", "0u * n"),
            ),
            _cu(_UNSHARED + function, "gate for up", _FUSED_CU, ": up.of(expert)", ": gate.of(expert)"),
            _cu(
                _UNSHARED + function,
                "the slot for the expert",
                _FUSED_CU,
                "expert = expert_indices[slot]",
                "expert = slot",
            ),
        )
    ),
    *(
        mutant
        for function in ("silu_down", "silu_down_2x", "silu_down_wide")
        for mutant in (
            _cu(_UNSHARED + function, "gate and up swapped", _CUH, _SECOND_HALF_CU, "spark_gated(u[1], g[1], a + 8);"),
            _cu(_UNSHARED + function, "the gate of the first slot", _FUSED_CU, "{gate + slot * k,", "{gate,"),
            _cu(
                _UNSHARED + function,
                "the first half of a chunk twice",
                _CUH,
                _SECOND_HALF_CU,
                "spark_gated(g[0], u[0], a + 8);",
            ),
        )
    ),
)
