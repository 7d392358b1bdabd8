# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of moe_topk: ties, NaN, the edges of the table of experts, and what a weight is divided by."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ONE = "moe_topk::moe_topk_softmax"
_BATCHED = "moe_topk::moe_topk_softmax_batched"
_CU, _CUH, _PY = "moe_topk.cu", "moe_topk.cuh", "moe_topk.py"

_ORDER_PY = 'order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]'
_DOWNWARDS_CU = (
    "(0xffffu - expert);\n}\n\n"
    "__device__ __forceinline__ unsigned topk_expert(unsigned key) { return 0xffffu - (key & 0xffffu); }"
)
_NORMALIZE_CU = "weight = weight / topk_sum(weight);\n    }"
_LAST_PY = "    return indices, weights\n"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _ONE,
        "ties to the highest index",
        cu=Patch(
            _CUH,
            _DOWNWARDS_CU,
            _DOWNWARDS_CU.replace("0xffffu - ", ""),
        ),
        py=Patch(
            _PY,
            _ORDER_PY,
            'order = logits.shape[1] - 1 - np.argsort(-logits[:, ::-1], axis=1, kind="stable")[:, :top_k]',
        ),
    ),
    Mutant(
        _ONE,
        "-0 below +0",
        cu=Patch(_CUH, "bits != magnitude && magnitude != 0u", "bits != magnitude"),
        py=Patch(
            _PY,
            _ORDER_PY,
            "order = np.lexsort((np.signbit(logits), -logits), axis=1)[:, :top_k]",
        ),
    ),
    Mutant(
        _ONE,
        "NaN wins",
        cu=Patch(_CUH, "magnitude > TOPK_INFINITY ? 0u : number", "number"),
        py=Patch(_PY, "np.argsort(-logits,", "np.argsort(-np.nan_to_num(logits, nan=np.inf),"),
    ),
    Mutant(
        _ONE,
        "logits at or below -1e30 are never chosen: index 0 again",
        py=Patch(
            _PY,
            "np.asarray(order, np.uint32)",
            "np.asarray(np.where(np.take_along_axis(logits, order, axis=1) > -1e30, order, 0), np.uint32)",
        ),
    ),
    Mutant(
        _ONE,
        "the 32 last experts left out",
        cu=Patch(_CU, "keys[i] = expert < experts", "keys[i] = expert < experts && i < 15u"),
    ),
    Mutant(
        _ONE,
        "always normalised: a softmax over the chosen alone",
        cu=Patch(
            _CU,
            _NORMALIZE_CU,
            _NORMALIZE_CU + " else {\n        weight = weight * sum / topk_sum(weight * sum);\n    }",
        ),
        py=Patch(_PY, "    if normalize:\n", "    if normalize or indices.shape[1] < values.shape[1]:\n"),
    ),
    Mutant(
        _ONE,
        "never normalised",
        cu=Patch(_CU, "if (normalize) {", "if (normalize && experts == 0u) {"),
        py=Patch(_PY, "    if normalize:\n", "    if normalize and indices.shape[1] > 32:\n"),
    ),
    Mutant(
        _ONE,
        "exponentials without the maximum",
        cu=Patch(_CU, "__expf(topk_value(keys[i]) - top)", "__expf(topk_value(keys[i]))"),
        py=Patch(_PY, "np.exp(values - top)", "np.exp(values)"),
    ),
    Mutant(
        _BATCHED,
        "the first token for all",
        cu=Patch(_CU, "topk_softmax(gate_logits + token * num_experts,", "topk_softmax(gate_logits + 0u * token,"),
        py=Patch(_PY, "values = to_f32(logits)\n", "values = to_f32(logits)[[0] * len(logits)]\n"),
    ),
    Mutant(
        _BATCHED,
        "indices of tokens one too far apart",
        cu=Patch(_CU, "expert_indices + token * top_k", "expert_indices + token * (top_k + 1u)"),
    ),
    Mutant(
        _BATCHED,
        "weights in the order of experts",
        py=Patch(
            _PY, _LAST_PY, "    return indices, np.take_along_axis(weights, np.argsort(indices, axis=1), axis=1)\n"
        ),
    ),
    Mutant(
        _BATCHED,
        "always normalised",
        cu=Patch(
            _CU,
            "expert_weights + token * top_k,\n                 num_experts, top_k, normalize != 0u);",
            "expert_weights + token * top_k,\n                 num_experts, top_k, true);",
        ),
        py=Patch(_PY, "    if normalize:\n", "    if True:\n"),
    ),
)
