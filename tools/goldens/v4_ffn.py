# SPDX-License-Identifier: AGPL-3.0-only
"""Rows through transformers' `DeepseekV4SparseMoeBlock` in FP64, with a learned router and with a table.

The fixture holds the weights too, as BF16 bits: both blocks have the same experts. Every parameter is random, and
activations exceed the limit on either side. Rows are such that no rounding of logits to BF16 changes the choice.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["NAME", "SIZES", "arrays_of"]

Array = np.ndarray[Any, Any]
NAME = "v4_ffn"
SIZES = {"hidden_size": 32, "num_experts": 6, "top_k": 2, "inter": 32, "swiglu_limit": 0.5, "vocab_size": 11}
"""Named as the fields of V4FfnShape; the other ones have their defaults."""
_ROWS, _GAP = 12, 2.0**-4
_BF16 = np.dtype(ml_dtypes.bfloat16)


def _weights(rng: np.random.Generator) -> dict[str, Array]:
    """BF16 gate [E, h], w1, w3 [E, I, h], w2 [E, h, I], the same of the shared expert; FP32 bias [E]; table [V, k]."""
    h, inter, experts = int(SIZES["hidden_size"]), int(SIZES["inter"]), int(SIZES["num_experts"])

    def drawn(*shape: int) -> Array:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(_BF16)

    table = [rng.permutation(experts)[: int(SIZES["top_k"])] for _ in range(int(SIZES["vocab_size"]))]
    return {
        "gate": (drawn(experts, h).astype(np.float32) * 2).astype(_BF16),
        **{part: drawn(experts, inter, h) for part in ("w1", "w3")},
        "w2": drawn(experts, h, inter),
        **{f"shared_{part}": drawn(inter, h) for part in ("w1", "w3")},
        "shared_w2": drawn(h, inter),
        "bias": rng.uniform(-1, 1, experts).astype(np.float32),
        "table": np.stack(table).astype(np.int64),
    }


def arrays_of() -> dict[str, Array]:
    """The fixture: weights, rows, tokens, and what the two blocks choose and give."""
    rng = np.random.default_rng(31)
    weights = _weights(rng)
    tokens = rng.integers(0, int(SIZES["vocab_size"]), _ROWS)
    learned, hashed = (_block(weights, hashed=kind) for kind in (False, True))
    rows = _clear_rows(rng, learned, weights)
    found = {
        name: array.view(np.uint16) if array.dtype == _BF16 else array
        for name, array in (weights | {"x": rows}).items()
    }
    for name, block in (("learned", learned), ("hashed", hashed)):
        found |= {f"{name}_{part}": array for part, array in _run(block, rows, tokens).items()}
    return found | {"tokens": tokens}


def _block(weights: dict[str, Array], hashed: bool) -> Any:
    import torch
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

    config = DeepseekV4Config(
        vocab_size=SIZES["vocab_size"], hidden_size=SIZES["hidden_size"], moe_intermediate_size=SIZES["inter"],
        n_routed_experts=SIZES["num_experts"], num_experts_per_tok=SIZES["top_k"], swiglu_limit=SIZES["swiglu_limit"],
        num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["hash_moe" if hashed else "moe"],
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = DeepseekV4SparseMoeBlock(config, 0).eval().to(torch.float64)
    wide = {name: torch.from_numpy(array.astype(np.float64)) for name, array in weights.items()}
    state = {
        "gate.weight": wide["gate"],
        "experts.gate_up_proj": torch.cat([wide["w1"], wide["w3"]], dim=1),
        "experts.down_proj": wide["w2"],
        "shared_experts.gate_proj.weight": wide["shared_w1"],
        "shared_experts.up_proj.weight": wide["shared_w3"],
        "shared_experts.down_proj.weight": wide["shared_w2"],
    }
    choice = {"gate.tid2eid": torch.from_numpy(weights["table"])} if hashed else {
        "gate.e_score_correction_bias": wide["bias"]
    }  # fmt: skip
    block.load_state_dict(state | choice, strict=True)
    return block


def _run(block: Any, rows: Array, tokens: Array) -> dict[str, Array]:
    """Outputs FP64 [rows, h]; experts [rows, k] in ascending order and their weights."""
    import torch

    x, ids = torch.from_numpy(rows.astype(np.float64))[None], torch.from_numpy(tokens)[None]
    with torch.no_grad():
        output = block(x, ids)[0].numpy()
        _, weights, chosen = block.gate(x, ids) if block.is_hash else block.gate(x)
    order = np.argsort(chosen.numpy(), axis=1)
    pairs = {"experts": chosen.numpy(), "weights": weights.numpy()}
    return {"output": output} | {name: np.take_along_axis(array, order, 1) for name, array in pairs.items()}


def _clear_rows(rng: np.random.Generator, block: Any, weights: dict[str, Array]) -> Array:
    """BF16 [rows, h] whose last chosen expert is ahead of the next one by _GAP."""
    import torch

    found: list[Array] = []
    top = int(SIZES["top_k"])
    while len(found) < _ROWS:
        row = rng.standard_normal(int(SIZES["hidden_size"])).astype(_BF16)
        with torch.no_grad():
            logits, _, _ = block.gate(torch.from_numpy(row.astype(np.float64))[None, None])
        scores = np.sqrt(np.log1p(np.exp(logits[0].numpy()))) + weights["bias"]
        ordered = np.sort(scores)[::-1]
        if ordered[top - 1] - ordered[top] > _GAP:
            found.append(row)
    return np.stack(found)
