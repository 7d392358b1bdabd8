# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the MTP part of `weight_loader/`: the draft head of Qwen3-Next, 3.5 and 3.6 with a dense FFN.

Its tensors begin with `mtp.` and may be in the model's own shards or in `mtp.safetensors`; the store knows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from ...runtime.errors import InvalidArgumentError, MissingWeightError, UnsupportedError
from ...runtime.gpu import GpuBackend
from ...runtime.weights import WeightDtype, WeightStore
from ..config import ModelConfig
from ..weight_map import DenseExpertWeight, DenseWeight, MtpWeights

__all__ = ["load_mtp_weights", "mtp_tensor_shapes"]

log = logging.getLogger("spark_py.model.weight_loader")

_PREFIX = "mtp."
_LAYER = "mtp.layers.0."
_DENSE, _ROUTER = f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.gate.weight"
_TO_BF16: Mapping[WeightDtype | str, WeightDtype | str] = {WeightDtype.F32: WeightDtype.BF16}
_HINT = "the checkpoint lacks (part of) its MTP module: take one that was saved with it, or decode without drafts"
_MUST_BE_READ = re.compile(r"scale|zero_point|mtp\.layers\.(?!0\.)|mtp\.embed_tokens|lm_head|shared_head")
"""Tensors that change what the others mean. To leave one of them aside would give a head that runs and drafts noise."""


def mtp_tensor_shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Field of MtpWeights, or of its dense_ffn, to (name in the checkpoint, shape)."""
    h, inter, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    return {
        "pre_fc_norm_embedding": ("mtp.pre_fc_norm_embedding.weight", (h,)),
        "pre_fc_norm_hidden": ("mtp.pre_fc_norm_hidden.weight", (h,)),
        "fc": ("mtp.fc.weight", (h, 2 * h)),
        "input_layernorm": (f"{_LAYER}input_layernorm.weight", (h,)),
        "q_proj": (f"{_LAYER}self_attn.q_proj.weight", (2 * q, h)),
        "k_proj": (f"{_LAYER}self_attn.k_proj.weight", (kv, h)),
        "v_proj": (f"{_LAYER}self_attn.v_proj.weight", (kv, h)),
        "o_proj": (f"{_LAYER}self_attn.o_proj.weight", (h, q)),
        "q_norm": (f"{_LAYER}self_attn.q_norm.weight", (hd,)),
        "k_norm": (f"{_LAYER}self_attn.k_norm.weight", (hd,)),
        "post_attn_layernorm": (f"{_LAYER}post_attention_layernorm.weight", (h,)),
        "norm": ("mtp.norm.weight", (h,)),
        "gate_proj": (_DENSE, (inter, h)),
        "up_proj": (f"{_LAYER}mlp.up_proj.weight", (inter, h)),
        "down_proj": (f"{_LAYER}mlp.down_proj.weight", (h, inter)),
    }


def load_mtp_weights(store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> MtpWeights:
    """Upload and check the tensors of an MTP head; the store owns them. F32 becomes BF16. Nothing is uploaded first and
    refused then.

    MissingWeightError lists every tensor that is not there; UnsupportedError names one of another dtype, experts, more
    modules than one, and a tensor that the head would have to take into account (a scale, a table of its own);
    InvalidArgumentError names one of another shape. Other `mtp.` tensors that nothing reads are listed in a warning.
    """
    if config.num_mtp_modules > 1:
        raise UnsupportedError(f"{config.num_mtp_modules} MTP modules are configured: this head has one")
    if _ROUTER in store:
        raise UnsupportedError(f"the MTP head has experts ({_ROUTER!r}): a dense FFN is needed")
    shapes = mtp_tensor_shapes(config)
    names = {name for name, _ in shapes.values()}
    if missing := sorted(names - set(store.names())):
        raise MissingWeightError(missing, {}, str(store.source), _HINT)
    for name, shape in shapes.values():
        _check(store, name, shape)
    _check_rest(store, names)
    store.load(gpu, names, convert=_TO_BF16)

    def dense(field: str) -> DenseWeight:
        tensor = store.get(shapes[field][0])
        return DenseWeight(tensor.ptr, tensor.shape)

    ffn = ("gate_proj", "up_proj", "down_proj")
    own: dict[str, Any] = {field: dense(field) for field in shapes if field not in ffn}
    return MtpWeights(**own, dense_ffn=DenseExpertWeight(*(dense(field) for field in ffn)))


def _check(store: WeightStore, name: str, shape: tuple[int, ...]) -> None:
    loaded = store.is_loaded(name)
    found = store.get(name) if loaded else store.info(name)
    offered = (WeightDtype.BF16,) if loaded else (WeightDtype.BF16, WeightDtype.F32)
    if found.dtype not in offered:
        raise UnsupportedError(f"tensor {name!r} is {found.dtype}: an MTP head takes BF16, or F32, which is rounded")
    if found.shape != shape:
        raise InvalidArgumentError(f"shape of {name}", found.shape, f"{shape} is needed by the configuration")


def _check_rest(store: WeightStore, names: set[str]) -> None:
    rest = [name for name in store.names() if name.startswith(_PREFIX) and name not in names]
    if needed := [name for name in rest if _MUST_BE_READ.search(name)]:
        raise UnsupportedError(
            f"tensors that a BF16 MTP head of one module cannot take into account: {_listed(needed)}"
        )
    if rest:
        log.warning("tensors of the MTP module that nothing reads: %s", _listed(rest))


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
