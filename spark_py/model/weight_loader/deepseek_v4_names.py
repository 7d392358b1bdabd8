# SPDX-License-Identifier: AGPL-3.0-only
"""The tensors of DeepSeek-V4: names, shapes, and what each is on the device.

Names are the published repository's. transformers has others for the same tensors, and when it saves a model it turns
most of them back; every name is looked for in all forms:

| published              | transformers' modules                    | saved by transformers                |
|------------------------|------------------------------------------|--------------------------------------|
| `layers.0.attn.wq_a`   | `model.layers.0.self_attn.q_a_proj`      | `model.layers.0.attn.wq_a`           |
| `layers.0.attn.kv_norm`| `model.layers.0.self_attn.kv_norm`       | `model.layers.0.attn.norm`           |
| `embed`, `head`        | `model.embed_tokens`, `lm_head`          | `model.embed_tokens`, `head`         |
| `...ffn.experts.0.w1`  | `...mlp.experts.gate_up_proj`, all in one| `model....ffn.experts.0.w1`          |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from ...ops.spark_w8a16_rows import TILE
from ...runtime.errors import WeightFormatError
from ...runtime.weights import WeightStore
from ..layers.deepseek_v4 import V4Shapes
from .upload import in_store

__all__ = ["MTP", "Kind", "V4Tensor", "block_tensors", "expert_tensors", "found_names", "mtp_tensors", "stacks", "tops"]

MTP = "mtp.0."
_MODEL = "model."
_HYPER = ("fn", "base", "scale")


class Kind(Enum):
    """What a tensor becomes on the device."""

    PLAIN = "BF16, in the files too, or F32, which is rounded"
    DENSE = "BF16, in the files in any format"
    MATRIX = "as stored where that is block-scaled E4M3 or MXFP4, else BF16"
    GROUPED = "as stored where that is block-scaled E4M3, else BF16"
    EXPERT = "as stored where that is MXFP4, else BF16"
    F32 = "F32; BF16 is widened"
    TABLE = "I64"


@dataclass(frozen=True, slots=True)
class V4Tensor:
    """A tensor's published name, its shape in elements, what it becomes, and its other names."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    others: tuple[str, ...] = ()


_MODULES = {
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    **{f"hc_attn_{part}": f"attn_hc.{part}" for part in _HYPER},
    **{f"hc_ffn_{part}": f"ffn_hc.{part}" for part in _HYPER},
    **{f"hc_head_{part}": f"hc_head.hc_{part}" for part in _HYPER},
    "embed.weight": "embed_tokens.weight",
    "head.weight": "lm_head.weight",
}
_SAVED = {"attn.kv_norm.weight": "attn.norm.weight"}


def _tensor(prefix: str, leaf: str, shape: tuple[int, ...], kind: Kind) -> V4Tensor:
    """The tensor `leaf` under `prefix`, with all of its names."""
    leaves = [leaf, *(names[leaf] for names in (_MODULES, _SAVED) if leaf in names)]
    names = [f"{model}{prefix}{each}" for model in ("", _MODEL) for each in leaves]
    return V4Tensor(names[0], shape, kind, tuple(names[1:]))


def _listed(prefix: str, tensors: Iterable[tuple[str, tuple[int, ...], Kind]]) -> list[V4Tensor]:
    return [_tensor(prefix, *each) for each in tensors]


def _hyper(site: str, shapes: V4Shapes, head: bool = False) -> list[tuple[str, tuple[int, ...], Kind]]:
    hc, size = shapes.hyper.hc_mult, shapes.hyper.hc_mult * shapes.hyper.hidden_size
    mixes = hc if head else (2 + hc) * hc
    sizes = ((mixes, size), (mixes,), (1 if head else 3,))
    return [(f"hc_{site}_{part}", shape, Kind.F32) for part, shape in zip(_HYPER, sizes, strict=True)]


def tops(shapes: V4Shapes, vocab: int, tied: bool) -> list[V4Tensor]:
    """What is around the layers of a target: embed, head unless it is embed, norm and the head of connections."""
    h = shapes.hyper.hidden_size
    tables = ["embed.weight"] if tied else ["embed.weight", "head.weight"]
    named = [(table, (vocab, h), Kind.PLAIN) for table in tables]
    return _listed("", [*named, ("norm.weight", (h,), Kind.PLAIN), *_hyper("head", shapes, head=True)])


def block_tensors(shapes: V4Shapes, prefix: str, hashed: bool) -> list[V4Tensor]:
    """A block under `prefix`, but for its routed experts."""
    a, ffn = shapes.attention, shapes.ffn
    h, out = a.hidden_size, a.o_groups * a.o_lora_rank
    choice = (
        ("ffn.gate.tid2eid", (ffn.vocab_size, ffn.top_k), Kind.TABLE)
        if hashed
        else ("ffn.gate.bias", (ffn.num_experts,), Kind.F32)
    )
    return _listed(
        prefix,
        [
            ("attn_norm.weight", (h,), Kind.PLAIN),
            ("ffn_norm.weight", (h,), Kind.PLAIN),
            *_hyper("attn", shapes),
            *_hyper("ffn", shapes),
            ("attn.wq_a.weight", (a.q_lora_rank, h), Kind.MATRIX),
            ("attn.q_norm.weight", (a.q_lora_rank,), Kind.PLAIN),
            ("attn.wq_b.weight", (a.q_size, a.q_lora_rank), Kind.MATRIX),
            ("attn.wkv.weight", (a.head_dim, h), Kind.MATRIX),
            ("attn.kv_norm.weight", (a.head_dim,), Kind.PLAIN),
            ("attn.wo_a.weight", (out, a.group_size), Kind.GROUPED if a.o_lora_rank % TILE == 0 else Kind.DENSE),
            ("attn.wo_b.weight", (h, out), Kind.MATRIX),
            ("attn.attn_sink", (a.num_heads,), Kind.F32),
            ("ffn.gate.weight", (ffn.num_experts, h), Kind.PLAIN),
            choice,
            *((f"ffn.shared_experts.{part}.weight", shape, Kind.MATRIX) for part, shape in _expert(shapes)),
        ],
    )


def _expert(shapes: V4Shapes) -> list[tuple[str, tuple[int, int]]]:
    h, inter = shapes.ffn.hidden_size, shapes.ffn.inter
    return [("w1", (inter, h)), ("w3", (inter, h)), ("w2", (h, inter))]


def expert_tensors(shapes: V4Shapes, prefix: str) -> list[V4Tensor]:
    """The routed experts of a block, three tensors each: w1, w3, w2."""
    names = [
        (f"ffn.experts.{number}.{part}.weight", shape, Kind.EXPERT)
        for number in range(shapes.ffn.num_experts)
        for part, shape in _expert(shapes)
    ]
    return _listed(prefix, names)


def stacks(shapes: V4Shapes, prefix: str) -> list[V4Tensor]:
    """The routed experts of a block in two tensors, which have this one name: w1 rows before w3 rows, and w2."""
    experts, h, inter = shapes.ffn.num_experts, shapes.ffn.hidden_size, shapes.ffn.inter
    sizes = {"gate_up_proj": (experts, 2 * inter, h), "down_proj": (experts, h, inter)}
    return _listed(prefix, [(f"mlp.experts.{part}", shape, Kind.PLAIN) for part, shape in sizes.items()])


def mtp_tensors(shapes: V4Shapes) -> list[V4Tensor]:
    """What is around the block of an MTP module."""
    h = shapes.hyper.hidden_size
    norms = [(f"{part}.weight", (h,), Kind.PLAIN) for part in ("enorm", "hnorm", "norm")]
    projections = [(f"{part}.weight", (h, h), Kind.MATRIX) for part in ("e_proj", "h_proj")]
    return _listed(MTP, [*norms, *projections, *_hyper("head", shapes, head=True)])


def found_names(store: WeightStore, tensors: Sequence[V4Tensor]) -> dict[str, str]:
    """Published name -> the name that the store has, for those that it has. WeightFormatError where it has one tensor
    under two names."""
    found = {}
    for tensor in tensors:
        there = [name for name in (tensor.name, *tensor.others) if in_store(store, name)]
        if len(there) > 1:
            raise WeightFormatError(tensor.name, f"only one of {', '.join(map(repr, there))} can be it")
        if there:
            found[tensor.name] = there[0]
    return found
