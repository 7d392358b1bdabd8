# SPDX-License-Identifier: AGPL-3.0-only
"""Mutants of spark_moe_topk_sigmoid: ties, NaN, what a group is worth, and what the bias is for."""

from __future__ import annotations

from .mutants import Mutant, Patch

_ONE = "spark_moe_topk_sigmoid::spark_moe_topk_sigmoid"
_BATCHED = "spark_moe_topk_sigmoid::spark_moe_topk_sigmoid_batched"
_CU, _PY = "spark_moe_topk_sigmoid.cu", "spark_moe_topk_sigmoid.py"

_WINNER_CU = "__reduce_min_sync(SPARK_FULL_MASK, best == most ? expert : SIGMOID_NOWHERE)"
_LAST_PY = "indices = largest_first(biased, top_k)\n"
_WEIGHT_CU = "lane < k ? sigmoid_score(spark_load(logits + chosen)) : 0.0f"
_WEIGHTS_PY = "weights = np.take_along_axis(scores,"
_BEST_PY = "worth = (best[:, 0] + best[:, 1]).reshape(tokens, n_group)"
_NEXT_CU = "sigmoid_value(best) + sigmoid_value(next)"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        _ONE,
        "ties to the highest index",
        cu=Patch(_CU, _WINNER_CU, "__reduce_max_sync(SPARK_FULL_MASK, best == most ? expert : 0u)"),
        py=Patch(
            _PY,
            _LAST_PY,
            "indices = np.uint32(biased.shape[1] - 1) - largest_first(biased[:, ::-1], top_k)\n",
        ),
    ),
    Mutant(
        _ONE,
        "NaN wins",
        cu=Patch(_CU, "return SIGMOID_NAN;", "return 0xffffffffu;"),
        py=Patch(_PY, _LAST_PY, "indices = largest_first(np.nan_to_num(biased, nan=np.inf), top_k)\n"),
    ),
    Mutant(
        _ONE,
        "the bias left out of the choice",
        cu=Patch(_CU, "bias == nullptr ? score : score + bias[expert]", "score"),
        py=Patch(_PY, "scores if bias is None else scores + bias", "scores"),
    ),
    Mutant(
        _ONE,
        "the bias in the weights",
        cu=Patch(_CU, _WEIGHT_CU, _WEIGHT_CU.replace("chosen))", "chosen)) + (bias == nullptr ? 0.0f : bias[chosen])")),
        py=Patch(_PY, _WEIGHTS_PY, _WEIGHTS_PY.replace("(scores", "(biased")),
    ),
    Mutant(
        _ONE,
        "softmax-like scores: exp without the one",
        cu=Patch(_CU, "1.0f / (1.0f + expf(-l))", "expf(l)"),
        py=Patch(_PY, "np.float32(1.0) / (np.float32(1.0) + np.exp(-to_f32(logits)))", "np.exp(to_f32(logits))"),
    ),
    Mutant(
        _ONE,
        "a group is worth its best expert",
        cu=Patch(_CU, _NEXT_CU, "sigmoid_value(best)"),
        py=Patch(_PY, _BEST_PY, _BEST_PY.replace("(best[:, 0] + best[:, 1])", "best[:, 0]")),
    ),
    Mutant(
        _ONE,
        "a group is worth its best expert twice",
        cu=Patch(_CU, _NEXT_CU, "sigmoid_value(best) + sigmoid_value(best)"),
        py=Patch(_PY, _BEST_PY, _BEST_PY.replace("best[:, 1]", "best[:, 0]")),
    ),
    Mutant(
        _ONE,
        "the second best of a lane is forgotten",
        cu=Patch(_CU, "mine ? second : first", "mine ? SIGMOID_NONE : first"),
    ),
    Mutant(
        _ONE,
        "groups without the bias",
        py=Patch(_PY, "open_experts(biased, n_group", "open_experts(scores, n_group"),
    ),
    Mutant(
        _ONE,
        "equal groups: the last",
        cu=Patch(
            _CU,
            "static_cast<unsigned>(__ffs(static_cast<int>(__ballot_sync(SPARK_FULL_MASK, key == most)))) - 1u;",
            "31u - static_cast<unsigned>(__clz(static_cast<int>(__ballot_sync(SPARK_FULL_MASK, key == most))));",
        ),
        py=Patch(
            _PY,
            "largest_first(worth, topk_group).astype(np.intp)",
            "(n_group - 1 - largest_first(worth[:, ::-1], topk_group).astype(np.intp))",
        ),
    ),
    Mutant(
        _ONE,
        "experts of other groups count as 0",
        cu=Patch(_CU, "!= 0u ? keys[i] : SIGMOID_NONE", "!= 0u ? keys[i] : expert < experts ? 0x80000000u : 0u"),
        py=Patch(
            _PY,
            "order = largest_first(biased, biased.shape[1]).astype(np.intp)\n",
            "order = largest_first(np.where(open_, biased, 0), biased.shape[1]).astype(np.intp)\n"
            "            open_[:] = True\n",
        ),
    ),
    Mutant(
        _ONE,
        "groups are interleaved",
        cu=Patch(_CU, "open >> (expert / size) & 1u", "open >> (expert % n_group) & 1u"),
        py=Patch(_PY, "np.repeat(chosen, experts // n_group, axis=1)", "np.tile(chosen, (1, experts // n_group))"),
    ),
    Mutant(
        _ONE,
        "always normalised",
        cu=Patch(_CU, "    if (normalize) {", "    if (normalize || k != 0u) {"),
        py=Patch(_PY, "        if normalize:\n", "        if normalize or top_k > 0:\n"),
    ),
    Mutant(
        _ONE,
        "no scaling factor",
        cu=Patch(_CU, "weight * scaling_factor;", "weight + 0.0f * scaling_factor;"),
        py=Patch(_PY, "weights * np.float32(scaling_factor)", "weights"),
    ),
    Mutant(
        _ONE,
        "the last 32 experts left out",
        cu=Patch(_CU, "        if (expert < experts) {\n", "        if (expert < experts && i < 15u) {\n"),
    ),
    Mutant(
        _ONE,
        "NULL read as a bias",
        cu=Patch(
            _CU, "bias == nullptr ? score : score + bias[expert]", "score + (bias == nullptr ? -score : bias[expert])"
        ),
    ),
    Mutant(
        _BATCHED,
        "the first token for all",
        cu=Patch(_CU, "topk_sigmoid(gate_logits + token * num_experts,", "topk_sigmoid(gate_logits + 0u * token,"),
        py=Patch(_PY, "np.exp(-to_f32(logits))", "np.exp(-to_f32(logits)[[0] * len(logits)])"),
    ),
    Mutant(
        _BATCHED,
        "indices of tokens one too far apart",
        cu=Patch(_CU, "expert_indices + token * top_k", "expert_indices + token * (top_k + 1u)"),
    ),
    Mutant(
        _BATCHED,
        "a bias of each token",
        cu=Patch(
            _CU,
            "token * num_experts, correction_bias,",
            "token * num_experts, correction_bias == nullptr ? nullptr : correction_bias + token % num_experts,",
        ),
    ),
    Mutant(
        _BATCHED,
        "never normalised",
        cu=Patch(_CU, "    if (normalize) {", "    if (normalize && k == 0u) {"),
        py=Patch(_PY, "        if normalize:\n", "        if normalize and top_k < 1:\n"),
    ),
)
