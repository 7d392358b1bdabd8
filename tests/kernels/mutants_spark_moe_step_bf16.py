# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the experts in two launches: routing, slots, rings and stripes, the order of sums, the shared expert."""

from __future__ import annotations

from .mutants import Mutant, Patch

_MODULE = "spark_moe_step_bf16"
_GATE_UP, _DOWN = f"{_MODULE}::spark_moe_route_gate_up_bf16", f"{_MODULE}::spark_moe_down_blend_bf16"
_CU, _CUH, _PY = f"{_MODULE}.cu", "spark_moe_step.cuh", f"{_MODULE}.py"
_KEY = "expert < experts ? topk_key"
_OF_SLOT = "here = table[__shfl_sync(SPARK_FULL_MASK, id, static_cast<int>(e))] != 0u;"


def _cu(check: str, name: str, find: str, replace: str, file: str = _CU, race: bool = False) -> Mutant:
    return Mutant(check, name, cu=Patch(file, find, replace), race=race)


MUTANTS: tuple[Mutant, ...] = (
    _cu(_GATE_UP, "up is gate", "ups[e] = up_weight_ptrs[e];", "ups[e] = gate_weight_ptrs[e];"),
    _cu(_GATE_UP, "the best expert for every slot", "static_cast<int>(ahead / N - 1u)", "0"),
    _cu(
        _GATE_UP,
        "the shared expert first",
        "= turn == 0u ? top_k : turn - 1u;\n            act",
        "= turn;\n            act",
    ),
    _cu(_GATE_UP, "the last experts are not chosen", _KEY, _KEY.replace("expert <", "expert + experts / 4u <"), _CUH),
    _cu(_GATE_UP, "ties to the warp before", "if (head == best) {", "if (head / 65536u == best / 65536u) {", _CUH),
    _cu(
        _GATE_UP,
        "an expert is chosen again",
        "keys[i] == best ? 0u : keys[i]",
        "keys[i] == best && i > 0u ? 0u : keys[i]",
        _CUH,
    ),
    _cu(
        _GATE_UP,
        "the first row's logits for all",
        "route.find(gate_logits + row * num_experts,",
        "route.find(gate_logits,",
    ),
    _cu(_GATE_UP, "one sum for both lanes of a thread", "            up[0] = up_other;\n", ""),
    _cu(_GATE_UP, "outputs are skipped by the copies", "ahead += stride;", "ahead += 2u * stride;"),
    _cu(
        _GATE_UP,
        "the halves of the lanes the other way round in the tree",
        "for (int step = 8; step > 0; step /= 2) {",
        "for (int step = 1; step < 16; step *= 2) {",
    ),
    _cu(_GATE_UP, "gate not rounded", "const float g = moe_rounded(", "const float g = ("),
    Mutant(
        _GATE_UP,
        "the shared expert's up for its gate",
        cu=Patch(
            _CU,
            "moe_address gate = reinterpret_cast<moe_address>(sh_gate_weight);",
            "moe_address gate = reinterpret_cast<moe_address>(sh_up_weight);",
        ),
        py=Patch(_PY, "_activation(row, sh_gate, sh_up, n)]", "_activation(row, sh_up, sh_up, n)]"),
    ),
    Mutant(
        _GATE_UP,
        "the smallest logits are chosen",
        py=Patch(_PY, "largest_first(to_f32(logits), top_k)", "largest_first(-to_f32(logits), top_k)"),
    ),
    Mutant(
        _DOWN,
        "never normalised",
        cu=Patch(_CU, "num_experts, top_k, normalize != 0u);", "num_experts, top_k, false);"),
        py=Patch(_PY, "(to_f32(logits), indices, normalize)", "(to_f32(logits), indices, False)"),
    ),
    _cu(_DOWN, "exponentials without the maximum", "__expf(logits[e] - top)", "__expf(logits[e])", _CUH),
    _cu(
        _DOWN,
        "activations of the first turn alone",
        "i += STEP_THREADS) {\n            spark_copy_16(&staged",
        "i += 64u * STEP_THREADS) {\n            spark_copy_16(&staged",
    ),
    _cu(_DOWN, "products not rounded to BF16", "const float result = moe_rounded(", "const float result = ("),
    _cu(_DOWN, "the first share for every slot", "share, static_cast<int>(e)) * result;", "share, 0) * result;"),
    _cu(_DOWN, "the shared expert's product among the others", "shared = result;", "total = result;"),
    _cu(_DOWN, "activations of another slot", "2u * (e * chunks + chunk)", "2u * (e / 2u * chunks + chunk)"),
    _cu(_DOWN, "most of the gate's sums left out", "lane < MOE_GATE_WARPS ?", "lane < MOE_GATE_WARPS / 4u ?", _CUH),
    _cu(
        _DOWN,
        "nobody waits for the activations",
        "    spark_copies_wait<STEP_STAGES>();\n    __syncthreads();",
        "    spark_copies_wait<STEP_STAGES>();",
        race=True,
    ),
    Mutant(
        _DOWN,
        "the shared expert without its gate",
        cu=Patch(_CU, "total + gate * shared", "total + shared"),
        py=Patch(_PY, "_down(acts[-1], sh_down, n), one, gate_weight)", "_down(acts[-1], sh_down, n), one, None)"),
    ),
    Mutant(
        _DOWN,
        "a slot's activation for the next",
        py=Patch(_PY, "zip(acts[:-1], experts, strict=True)", "zip(acts[1:], experts, strict=True)"),
    ),
)
