# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of the experts in two launches: routing, slots, rings and stripes, the order of sums, the shared expert."""

from __future__ import annotations

from .mutants import Mutant, Patch

_MODULE = "spark_moe_step_bf16"
_GATE_UP, _DOWN = f"{_MODULE}::spark_moe_route_gate_up_bf16", f"{_MODULE}::spark_moe_down_blend_bf16"
_CU, _CUH, _PY = f"{_MODULE}.cu", "spark_moe_step.cuh", f"{_MODULE}.py"


def _cu(check: str, name: str, find: str, replace: str, file: str = _CU) -> Mutant:
    return Mutant(check, name, cu=Patch(file, find, replace))


MUTANTS: tuple[Mutant, ...] = (
    _cu(_GATE_UP, "up is gate", "up_entries.read(up_weight_ptrs,", "up_entries.read(gate_weight_ptrs,"),
    _cu(_GATE_UP, "the best expert for every slot", "weights.enter(gates[ids[slot]],", "weights.enter(gates[ids[0]],"),
    _cu(_GATE_UP, "the shared expert first", "now < N ? top_k : now / N - 1u;", "now / N;"),
    _cu(
        _GATE_UP,
        "other blocks route without the last experts",
        "mine.load(logits, num_experts);",
        "mine.load(logits, num_experts - num_experts / 4u);",
        _CUH,
    ),
    _cu(
        _GATE_UP,
        "the first row's logits for all",
        "moe_route(gate_logits + row * num_experts,",
        "moe_route(gate_logits,",
    ),
    _cu(
        _GATE_UP,
        "one sum for both lanes of a thread",
        "up[j % 2u] = step_dot(up[j % 2u], a,",
        "up[0] = step_dot(up[0], a,",
    ),
    _cu(_GATE_UP, "the ring starts over in a long row", "unsigned next = first + STRIDE;", "unsigned next = chunks;"),
    _cu(
        _GATE_UP,
        "the halves of the lanes the other way round in the tree",
        "for (int step = 8; step > 0; step /= 2) {",
        "for (int step = 1; step < 16; step *= 2) {",
        _CUH,
    ),
    _cu(_GATE_UP, "gate not rounded", "const float g = moe_rounded(", "const float g = ("),
    Mutant(
        _GATE_UP,
        "the shared expert's weights swapped",
        cu=Patch(_CU, "weights.enter(shared_gate, shared_up, task,", "weights.enter(shared_up, shared_gate, task,"),
        py=Patch(_PY, "_activation(row, sh_gate, sh_up, n)]", "_activation(row, sh_up, sh_gate, n)]"),
    ),
    Mutant(
        _GATE_UP,
        "the logits of other experts",
        py=Patch(_PY, "np.take_along_axis(values, indices.astype(np.intp), axis=1)", "values[:, :top_k]"),
    ),
    Mutant(
        _DOWN,
        "never normalised",
        cu=Patch(_CU, "num_experts, top_k, normalize != 0u);", "num_experts, top_k, false);"),
        py=Patch(
            _PY, "softmax_weights(to_f32(logits), best, normalize)", "softmax_weights(to_f32(logits), best, False)"
        ),
    ),
    _cu(_DOWN, "the first activations alone", "first += ACTIVATIONS * OTHERS;", "first = quarters;"),
    _cu(_DOWN, "products not rounded to BF16", "const float result = moe_rounded(", "const float result = ("),
    _cu(_DOWN, "the first share for every slot", "total + shares[slot] * result;", "total + shares[0] * result;"),
    _cu(_DOWN, "sums go on from slot to slot", "                sums[1] = 0.0f;\n", ""),
    _cu(_DOWN, "an absent expert has the weights before", "table[ids[slot]] != 0u)", "true)"),
    _cu(
        _DOWN,
        "activations of a slot too far",
        "staged[2u * slot * chunks + chunk]",
        "staged[2u * (slot / 2u) * chunks + chunk]",
    ),
    _cu(
        _DOWN,
        "the gate's second half left out",
        "lane < MOE_GATE_WARPS ? sums",
        "lane < MOE_GATE_WARPS / 4u ? sums",
        _CUH,
    ),
    Mutant(
        _DOWN,
        "nobody waits for the activations",
        cu=Patch(_CU, "gate_weight, N);\n    }\n    __syncthreads();", "gate_weight, N);\n    }"),
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
