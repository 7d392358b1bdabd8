# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the BF16 experts: whose weights, whose row, the order of sums, the activation, tiles and tails."""

from __future__ import annotations

from .mutants import Mutant, Patch

_GATE_UP = "moe_shared_expert_fused_bf16::moe_expert_gate_up_shared_bf16"
_DOWN = "moe_shared_expert_fused_bf16::moe_expert_silu_down_shared_bf16"
_GATE_UP_ROWS = "spark_moe_rows::spark_moe_expert_gate_up_shared_bf16_rows"
_DOWN_ROWS = "spark_moe_rows::spark_moe_expert_silu_down_shared_bf16_rows"
_BLEND_ROWS = "spark_moe_rows::spark_moe_weighted_sum_blend_rows"

_CLAMPED = "spark_moe_expert_silu_down_clamped_bf16"
_CLAMPED_ROWS = f"{_CLAMPED}::{_CLAMPED}_rows"

_CUH, _CU, _ROWS_CU = "moe_expert_bf16.cuh", "moe_shared_expert_fused_bf16.cu", "spark_moe_rows.cu"
_PY, _ROWS_PY = "moe_shared_expert_fused_bf16.py", "spark_moe_rows.py"

_PAIR_CU = (
    "sum = sum + a[2u * i] * spark_low(word[i]);\n"
    "                        sum = sum + a[2u * i + 1u] * spark_high(word[i]);"
)
_PAIRED_CU = "sum = sum + (a[2u * i] * spark_low(word[i]) + a[2u * i + 1u] * spark_high(word[i]));"
_HALVES_CU = "spark_warp_sum(sums[0][o], SPARK_WARP) + spark_warp_sum(sums[1][o], SPARK_WARP);"
_HALVES_PY = "return halving_sum(lanes[:, :WARP]) + halving_sum(lanes[:, WARP:])"
_GATED_CU = "return g * (1.0f / (1.0f + __expf(-g))) * u;"
_GATED_PY = "return g * sigmoid(g) * to_f32(up)"
_OUTPUTS_PY = "return gate_out, up_out, _project(x, sh_gate, n), _project(x, sh_up, n)"
_TILE_CU = "if (start != 0u) {\n            __syncthreads();  // all have read the tile before\n        }\n"
_SLOT_CU = "up ? sh_up_weight : sh_gate_weight, up ? sh_up_out : sh_gate_out, 0u, blockIdx.y, N, top_k);"
_GATE_ROWS_PY = "for row in zip(x, gate, up, strict=True)"
_DOWN_ROWS_PY = "for row in zip(gate, up, weights, sh_gate, sh_up, strict=True)"
_BLEND_ROWS_PY = "zip(expert_out, weights, shared_out, x, strict=True)"

_CLAMPED_CU, _LIMIT_CUH, _LIMIT_PY = f"{_CLAMPED}.cu", "moe_limit.cuh", "gated_within(g, u, limit)"


def _cu(check: str, name: str, file: str, find: str, replace: str) -> Mutant:
    return Mutant(check, name, cu=Patch(file, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _GATE_UP,
        "the first expert for every slot",
        cu=Patch(_CUH, "table[expert_indices[row]]", "table[expert_indices[t * top_k]]"),
        py=Patch(
            _PY,
            "np.stack([_project(x, weights, n) for weights in gate])",
            "np.stack([_project(x, gate[0], n)] * len(gate))",
        ),
    ),
    Mutant(
        _GATE_UP,
        "gate and up of the shared expert swapped",
        cu=Patch(_CU, _SLOT_CU, _SLOT_CU.replace("up ? sh_up_weight", "!up ? sh_up_weight")),
        py=Patch(_PY, _OUTPUTS_PY, "return gate_out, up_out, _project(x, sh_up, n), _project(x, sh_gate, n)"),
    ),
    Mutant(
        _GATE_UP,
        "pair added first",
        cu=Patch(
            _CUH, _PAIR_CU, "sum = sum + (a[2u * i] * spark_low(word[i]) + a[2u * i + 1u] * spark_high(word[i]));"
        ),
    ),
    Mutant(
        _GATE_UP,
        "descending k",
        py=Patch(
            _PY,
            "np.zeros(n, BF16) if weights is None else dense_gemv_bf16(x, weights)",
            "np.zeros(n, BF16) if weights is None else to_bf16(dot_fp32(to_f32(x)[::-1], weights[:, ::-1]))",
        ),
    ),
    _cu(_GATE_UP, "one sum for both lanes of a thread", _CUH, "sums[step % 2u][o] = sum;", "sums[0][o] = sum;"),
    _cu(
        _GATE_UP,
        "the halves of the lanes added before the tree",
        _CUH,
        _HALVES_CU,
        "spark_warp_sum(sums[0][o] + sums[1][o], SPARK_WARP);",
    ),
    _cu(_GATE_UP, "one stride of chunks alone", _CUH, "base < chunks; base += MOE_BF16_STRIDE", "base < 1u; ++base"),
    _cu(_GATE_UP, "one output past N written", _CUH, "count = n - first < MOE_BF16_OUTPUTS ? 1u :", "count ="),
    _cu(
        _GATE_UP,
        "zeros of an absent expert in the first block alone",
        _CUH,
        "static_cast<size_t>(blockIdx.x) * OUTPUTS + threadIdx.x",
        "static_cast<size_t>(threadIdx.x)",
    ),
    Mutant(
        _DOWN,
        "activation rounded to BF16",
        cu=Patch(
            _CUH, _GATED_CU, "return __bfloat162float(__float2bfloat16_rn(g * (1.0f / (1.0f + __expf(-g))) * u));"
        ),
        py=Patch(_PY, _GATED_PY, "return to_f32(to_bf16(g * sigmoid(g) * to_f32(up)))"),
    ),
    Mutant(
        _DOWN,
        "gate clamped at 10",
        cu=Patch(_CUH, "const float g = limit.gate(gate);", "const float g = fminf(limit.gate(gate), 10.0f);"),
        py=Patch(_PY, "    g = to_f32(gate)\n", "    g = np.minimum(to_f32(gate), np.float32(10))\n"),
    ),
    Mutant(
        _DOWN,
        "silu of up",
        cu=Patch(_CUH, _GATED_CU, "return u * (1.0f / (1.0f + __expf(-u))) * g;"),
        py=Patch(_PY, _GATED_PY, "return g * sigmoid(to_f32(up)) * to_f32(up)"),
    ),
    Mutant(
        _DOWN,
        "second half of the lanes left out",
        py=Patch(_PY, _HALVES_PY, "return halving_sum(lanes[:, :WARP])"),
        cu=Patch(_CUH, _HALVES_CU, "spark_warp_sum(sums[0][o], SPARK_WARP);"),
    ),
    Mutant(
        _DOWN,
        "another lane to chunk mapping",
        py=Patch(
            _PY,
            "reshape(len(weights), -1, LANES, CHUNK).transpose(1, 3, 0, 2)",
            "reshape(len(weights), LANES, -1, CHUNK).transpose(2, 3, 0, 1)",
        ),
    ),
    _cu(
        _DOWN,
        "pair added first",
        _CUH,
        _PAIR_CU,
        _PAIRED_CU,
    ),
    _cu(
        _DOWN,
        "2048 inputs at most",
        _CUH,
        "start < chunks; start += MOE_BF16_TILE",
        "start < 1u; start += MOE_BF16_TILE",
    ),
    _cu(
        _DOWN,
        "the first tile's activations for all",
        _CUH,
        "reinterpret_cast<const uint2*>(gate) + 2u * start",
        "reinterpret_cast<const uint2*>(gate)",
    ),
    _cu(
        _DOWN,
        "the routed experts' row for the shared expert",
        _CU,
        "(slot.routed ? gate_out : sh_gate_in) + slot.row * K",
        "gate_out + slot.row * K",
    ),
    _cu(
        _GATE_UP_ROWS,
        "the experts of the first row for all",
        _CUH,
        "table[expert_indices[row]]",
        "table[expert_indices[slot]]",
    ),
    Mutant(
        _GATE_UP_ROWS,
        "the activations of the first row for all",
        cu=Patch(_ROWS_CU, "moe_bf16_project(A + row * K, slot, N, K);", "moe_bf16_project(A, slot, N, K);"),
        py=Patch(_ROWS_PY, _GATE_ROWS_PY, "for row in zip([x[0]] * len(x), gate, up, strict=True)"),
    ),
    Mutant(
        _GATE_UP_ROWS,
        "rows in reverse",
        py=Patch(_ROWS_PY, _GATE_ROWS_PY, "for row in zip(x[::-1], gate[::-1], up[::-1], strict=True)"),
    ),
    _cu(
        _GATE_UP_ROWS,
        "experts and results of the rows in reverse",
        _ROWS_CU,
        "sh_gate_out, row, blockIdx.z / 2u,",
        "sh_gate_out, gridDim.y - 1u - row, blockIdx.z / 2u,",
    ),
    _cu(
        _GATE_UP_ROWS,
        "all gates before all ups",
        _ROWS_CU,
        "blockIdx.z % 2u != 0u",
        "blockIdx.z > top_k",
    ),
    Mutant(
        _DOWN_ROWS,
        "the shared expert's row from the routed ones",
        cu=Patch(_ROWS_CU, "(slot.routed ? up_out : sh_up_in) + slot.row * K", "up_out + slot.row * K"),
        py=Patch(_ROWS_PY, _DOWN_ROWS_PY, "for row in zip(gate, up, weights, sh_gate, up[:, 0], strict=True)"),
    ),
    Mutant(
        _DOWN_ROWS,
        "the experts of the first row for all",
        cu=Patch(
            _CUH,
            "table[expert_indices[row]]",
            "table[expert_indices[slot]]",
        ),
        py=Patch(
            _ROWS_PY, _DOWN_ROWS_PY, "for row in zip(gate, up, [weights[0]] * len(gate), sh_gate, sh_up, strict=True)"
        ),
    ),
    _cu(
        _DOWN_ROWS,
        "the first row alone",
        _ROWS_CU,
        "sh_down_out, blockIdx.y, blockIdx.z, N,",
        "sh_down_out, 0u, blockIdx.z, N,",
    ),
    Mutant(
        _BLEND_ROWS,
        "the weights of the first row for all",
        cu=Patch(_ROWS_CU, "expert_weights + row * top_k", "expert_weights"),
        py=Patch(_ROWS_PY, _BLEND_ROWS_PY, "zip(expert_out, weights[[0] * len(x)], shared_out, x, strict=True)"),
    ),
    Mutant(
        _BLEND_ROWS,
        "the gate of the first row for all",
        cu=Patch(_ROWS_CU, "input + row * K, gate_weight", "input, gate_weight"),
        py=Patch(_ROWS_PY, _BLEND_ROWS_PY, "zip(expert_out, weights, shared_out, x[[0] * len(x)], strict=True)"),
    ),
    Mutant(
        _BLEND_ROWS,
        "the shared expert of the first row for all",
        cu=Patch(_ROWS_CU, "shared_out + row * hidden", "shared_out"),
        py=Patch(_ROWS_PY, _BLEND_ROWS_PY, "zip(expert_out, weights, shared_out[[0] * len(x)], x, strict=True)"),
    ),
    Mutant(
        _CLAMPED_ROWS,
        "gate clamped below",
        cu=Patch(_LIMIT_CUH, "return g > limit ? limit : g;", "return g > limit ? limit : g < -limit ? -limit : g;"),
        py=Patch(f"{_CLAMPED}.py", _LIMIT_PY, "gated_within(np.maximum(g, g.dtype.type(-limit)), u, limit)"),
    ),
    Mutant(
        _CLAMPED_ROWS,
        "up clamped from above alone",
        cu=Patch(_LIMIT_CUH, "return u > limit ? limit : u < -limit ? -limit : u;", "return u > limit ? limit : u;"),
    ),
    Mutant(
        _CLAMPED_ROWS,
        "not clamped",
        cu=Patch(_CLAMPED_CU, "slot, N, K, SparkLimit{limit}", "slot, N, K"),
        py=Patch(f"{_CLAMPED}.py", _LIMIT_PY, "gated_within(g, u, 1e30)"),
    ),
    _cu(
        _CLAMPED_ROWS,
        "the shared expert not clamped",
        _CLAMPED_CU,
        "SparkLimit{limit}",
        "SparkLimit{slot.routed ? limit : 1e30f}",
    ),
    _cu(_CLAMPED_ROWS, "the shared gates for all", _CLAMPED_CU, "slot.routed ? gate_out : sh_gate_in", "sh_gate_in"),
    _cu(_CLAMPED_ROWS, "the first row for all", _CLAMPED_CU, "sh_down_out, blockIdx.y", "sh_down_out, 0u"),
    Mutant(
        _CLAMPED_ROWS,
        "activation rounded to BF16",
        cu=Patch(_CUH, _GATED_CU, "return spark_low(spark_pack(g * (1.0f / (1.0f + __expf(-g))) * u, 0.0f));"),
        py=Patch(f"{_CLAMPED}.py", _LIMIT_PY, "gated_within(g, u, limit).astype(BF16).astype(np.float32)"),
    ),
)
