# SPDX-License-Identifier: AGPL-3.0-only
"""Targets whose projections and LM head are quantised: the BF16 that they become, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spark_py.model.target import load_target_weights
from spark_py.model.weight_map import DenseExpertWeight, MoeWeights
from spark_py.runtime.errors import (
    IgnoredModuleError,
    MissingScaleError,
    MissingWeightError,
    SparkError,
    UnreadScaleError,
    UnsupportedError,
)
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightDtype
from tests.model.dequant_support import BF16, Array
from tests.model.mtp_loader_support import (
    EXPERTS,
    FORMATS,
    MLP,
    Tensors,
    assert_bits,
    config,
    module,
    opened,
    store_weight,
)
from tests.model.tiny import Tiny, write_tiny

D = WeightDtype
LAYER = "model.layers.0."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FFN = ("gate_proj", "up_proj", "down_proj")
UP = f"{LAYER}mlp.up_proj.weight"


@pytest.fixture
def tiny(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_tiny(tmp_path / "tiny", rng)


def plain(tiny: Tiny) -> Tensors:
    """The target's tensors as they are, in BF16."""
    return {name: (array, D.BF16) for name, array in tiny.weights.items() if not name.startswith("mtp.")}


@pytest.mark.parametrize("first", range(0, len(FORMATS), 3))
def test_projections_of_every_format(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, tiny: Tiny, first: int
) -> None:
    tensors, bits = plain(tiny), {name: array.view(np.uint16) for name, array in tiny.weights.items()}
    quantisable = [name for name in tensors if name.endswith("_proj.weight")] + ["lm_head.weight"]
    for i, name in enumerate(quantisable):
        made = store_weight(rng, name, *tensors.pop(name)[0].shape, FORMATS[(first + i) % len(FORMATS)])
        tensors |= made.stored
        bits |= made.bits
    with opened(tmp_path, tensors) as store:
        weights = load_target_weights(store, tiny.config, gpu)
        assert_bits(gpu, weights.lm_head, bits["lm_head.weight"], "lm_head")
        assert_bits(gpu, weights.embed_tokens, bits["model.embed_tokens.weight"], "embed_tokens")
        for number, layer in enumerate(weights.layers):
            own = f"model.layers.{number}."
            for part in ATTENTION:
                assert_bits(gpu, getattr(layer, part), bits[f"{own}self_attn.{part}.weight"], own + part)
            assert isinstance(layer.ffn, DenseExpertWeight)
            for part in FFN:
                assert_bits(gpu, getattr(layer.ffn, part), bits[f"{own}mlp.{part}.weight"], own + part)
            assert_bits(gpu, layer.input_layernorm, bits[f"{own}input_layernorm.weight"], own)
        assert store.unread() == ()
    assert gpu.live_bytes() == 0


def refused(gpu: GpuBackend, folder: Path, tiny: Tiny, tensors: Tensors, error: type[SparkError], *told: str) -> None:
    with opened(folder, tensors) as store, pytest.raises(error) as caught:
        load_target_weights(store, tiny.config, gpu)
    assert type(caught.value) is error
    for word in told:
        assert word in str(caught.value)
    assert gpu.live_bytes() == 0


def test_what_is_refused(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, tiny: Tiny) -> None:
    base = plain(tiny)
    made = store_weight(rng, UP, 96, 64, "row").stored
    scale = UP.replace(".weight", ".weight_scale")
    refused(gpu, tmp_path, tiny, base | {UP: made[UP]}, MissingScaleError, f"'{UP}'", "F8_E4M3")
    refused(gpu, tmp_path, tiny, base | {scale: made[scale]}, UnreadScaleError, f"'{scale}'")
    bytes_: Tensors = {UP: (np.ones((96, 32), np.uint8), D.U8)}
    refused(gpu, tmp_path, tiny, base | bytes_, MissingScaleError, f"'{UP}'", "U8")
    for name in (f"{LAYER}input_layernorm.weight", "model.embed_tokens.weight"):
        codes: Tensors = {name: (np.ones(base[name][0].shape, np.uint8), D.U8)}
        refused(gpu, tmp_path, tiny, base | codes, UnsupportedError, f"'{name}' is U8")
    gone = {name: t for name, t in base.items() if name not in (UP, "lm_head.weight")}
    refused(gpu, tmp_path, tiny, gone, MissingWeightError, f"'{UP}'", "'lm_head.weight'")
    tiny.raw["quantization_config"] = {"ignore": ["lm_head", "re:.*up_proj"]}
    tiny.save()
    refused(gpu, tmp_path, tiny, base | made, IgnoredModuleError, f"'{UP}'", "'re:.*up_proj'")


def test_scales_of_a_cache_belong_to_no_weight(gpu: GpuBackend, tmp_path: Path, tiny: Tiny) -> None:
    one = np.ones((), np.float32), D.F32
    scales: Tensors = {f"{LAYER}self_attn.k_scale": one, f"{LAYER}self_attn.v_proj.v_scale": one}
    with opened(tmp_path, plain(tiny) | scales) as store:
        weights = load_target_weights(store, tiny.config, gpu)
        assert_bits(gpu, weights.norm, tiny.weights["model.norm.weight"].view(np.uint16), "norm")
        assert set(store.unread()) == set(scales)


def test_f32_is_rounded(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, tiny: Tiny) -> None:
    wide = rng.standard_normal(64).astype(np.float32)
    with opened(tmp_path, plain(tiny) | {"model.norm.weight": (wide, D.F32)}) as store:
        norm = load_target_weights(store, tiny.config, gpu).norm
        assert_bits(gpu, norm, wide.astype(BF16).view(np.uint16), "norm")


@pytest.mark.parametrize("layout", ["A", "B"])
def test_experts_of_every_format(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, layout: str) -> None:
    """A layer of experts is stored as that of an MTP module is, under the target's names."""
    made = module(rng, layout, lambda i: FORMATS[(i + 1) % len(FORMATS)])
    tensors: Tensors = {name.replace("mtp.", "model."): tensor for name, tensor in made.stored.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(LAYER)}
    c = config(EXPERTS, num_hidden_layers=1, layer_types=["full_attention"])
    for name, shape in {"model.embed_tokens.weight": (c.vocab_size, 160), "model.norm.weight": (160,)}.items():
        tensors[name] = np.ones(shape, BF16), D.BF16
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with opened(tmp_path, tensors) as store:
        ffn = load_target_weights(store, c, gpu).layers[0].ffn
        assert isinstance(ffn, MoeWeights)
        assert_bits(gpu, ffn.gate, made.bits[f"{MLP}gate.weight"], "gate")
        assert_bits(gpu, ffn.shared_expert_gate, made.bits[f"{MLP}shared_expert_gate.weight"], "shared gate")
        for part in FFN:
            name = f"shared_expert.{part}.weight"
            assert_bits(gpu, getattr(ffn.shared_expert, part), made.bits[MLP + name], name)
            for e, expert in enumerate(ffn.experts):
                name = f"experts.{e}.{part}.weight"
                bits = stacked(made.bits, e, part) if layout == "B" else made.bits[MLP + name]
                assert_bits(gpu, getattr(expert, part), bits, name)
        assert store.unread() == ()


def stacked(bits: dict[str, Array], expert: int, part: str) -> Array:
    joint, down = bits[f"{MLP}experts.gate_up_proj"][expert], bits[f"{MLP}experts.down_proj"][expert]
    half = len(joint) // 2
    return {"gate_proj": joint[:half], "up_proj": joint[half:], "down_proj": down}[part]
