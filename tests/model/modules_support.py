# SPDX-License-Identifier: AGPL-3.0-only
"""Checkpoints with MTP modules behind their layers, in the published names of MiniMax-M2 and GLM-4.5."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layers.mtp_head import HeadBody
from spark_py.model.mtp_modules_factory import MtpModulesFactory
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightDtype, WeightStore
from tests.model.bodies_support import TABLES, Kind, body_arrays
from tests.model.support import BF16, FFN, Array, dense
from tests.runtime.weights_support import write

Tensors = dict[str, tuple[Array, WeightDtype]]
LAYERS = 2
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 203,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
RAW = {
    "minimax_m2": _SIZES
    | {
        "model_type": "minimax_m2",
        "intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "num_mtp_modules": 3,
    },
    "glm4_moe": _SIZES
    | {
        "model_type": "glm4_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "num_nextn_predict_layers": 3,
    },
}
"""config.json of each family."""
_WITHIN = {
    "pre_fc_norm_embedding": "enorm.weight",
    "pre_fc_norm_hidden": "hnorm.weight",
    "fc": "eh_proj.weight",
    "norm": "shared_head.norm.weight",
    "input_layernorm": "input_layernorm.weight",
    "post_attn_layernorm": "post_attention_layernorm.weight",
    **{f"{part}_proj": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_norm": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    "own.embed_tokens": "embed_tokens.weight",
    "own.lm_head": "shared_head.head.weight",
}
_MIXTURE = {
    "minimax_m2": {
        "moe_gate": "block_sparse_moe.gate.weight",
        "correction_bias": "block_sparse_moe.e_score_correction_bias",
        "experts": "block_sparse_moe.experts.",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
    "glm4_moe": {
        "moe_gate": "mlp.gate.weight",
        "correction_bias": "mlp.gate.e_score_correction_bias",
        "experts": "mlp.experts.",
        "shared_expert": "mlp.shared_experts.",
        **{name: name for name in FFN},
    },
}


@dataclass(frozen=True)
class FileKind(Kind):
    """The kind of head that a config.json describes."""

    raw: dict[str, Any] = field(default_factory=dict)

    def model_config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.raw)

    @classmethod
    def of(cls, raw: dict[str, Any]) -> FileKind:
        return cls(HeadBody.of(ModelConfig.from_dict(raw)), moe=True, raw=raw)


def published(family: str, index: int, name: str) -> str:
    """The name in a file of a tensor of `body_arrays`."""
    names, prefix = _MIXTURE[family], f"model.layers.{LAYERS + index}."
    if name in _WITHIN:
        return prefix + _WITHIN[name]
    if name.startswith("experts["):
        number, part = name.removeprefix("experts[").split("].")
        return f"{prefix}{names['experts']}{number}.{names[part]}.weight"
    if name.startswith("shared_expert."):
        return f"{prefix}{names['shared_expert']}{names[name.partition('.')[2]]}.weight"
    return prefix + names[name]


def stored(array: Array) -> tuple[Array, WeightDtype]:
    return array, WeightDtype.BF16 if array.dtype == BF16 else WeightDtype.F32


@dataclass
class ModulesFolder:
    """A checkpoint of tables and modules, without layers; `arrays[i]` are module i's by field, tables included."""

    folder: Path
    family: str
    raw: dict[str, Any]
    arrays: list[dict[str, Array]]
    tensors: Tensors

    @property
    def kind(self) -> FileKind:
        return FileKind.of(self.raw)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.raw)

    def name(self, index: int, field_name: str) -> str:
        return published(self.family, index, field_name)

    def save(self) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.raw))
        write(self.folder / "model.safetensors", self.tensors)

    def store(self) -> WeightStore:
        self.save()
        return WeightStore.open(self.folder)

    @contextmanager
    def factory(self, gpu: GpuBackend) -> Iterator[MtpModulesFactory]:
        """What makes heads; nothing stays on the device."""
        before = gpu.live_bytes()
        with ExitStack() as stack:
            store = stack.enter_context(self.store())
            tables = {name: dense(gpu, self.arrays[0][name]) for name in TABLES}
            for weight in tables.values():
                stack.callback(gpu.free, weight.weight)
            weights: Any = SimpleNamespace(**tables)
            yield MtpModulesFactory(self.folder, store, self.config, gpu, weights, 128, 64, stack)
            store.release(gpu)
        assert gpu.live_bytes() == before


def modules_folder(
    folder: Path, rng: np.random.Generator, family: str, modules: int = 3, **changes: Any
) -> ModulesFolder:
    """A checkpoint with `modules` modules, which share the tables."""
    raw = RAW[family] | changes
    kind = FileKind.of(raw)
    arrays = [body_arrays(rng, kind) for _ in range(max(modules, 1))]
    for each in arrays:
        each |= {name: arrays[0][name] for name in TABLES}
    tensors: Tensors = {
        "model.embed_tokens.weight": stored(arrays[0]["embed_tokens"]), "lm_head.weight": stored(arrays[0]["lm_head"])
    }  # fmt: skip
    for index in range(modules):
        for name, array in arrays[index].items():
            if name not in TABLES:
                tensors[published(family, index, name)] = stored(array)
    return ModulesFolder(folder, family, raw, arrays, tensors)
