# SPDX-License-Identifier: AGPL-3.0-only
"""Loading an MTP head: from one file, shards or mtp.safetensors; and everything that must not load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_loader import load_mtp_weights, mtp_tensor_shapes
from spark_py.model.weight_map import DenseWeight, MtpWeights
from spark_py.runtime.errors import (
    InvalidArgumentError,
    MissingWeightError,
    UnreadScaleError,
    UnsupportedError,
    WeightFormatError,
)
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightStore
from tests.model.support import BF16, Array, config, dense, download, random_weights

LAYER = "mtp.layers.0."
NAMES = {
    "pre_fc_norm_embedding": "mtp.pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden": "mtp.pre_fc_norm_hidden.weight",
    "fc": "mtp.fc.weight",
    "input_layernorm": LAYER + "input_layernorm.weight",
    "q_proj": LAYER + "self_attn.q_proj.weight",
    "k_proj": LAYER + "self_attn.k_proj.weight",
    "v_proj": LAYER + "self_attn.v_proj.weight",
    "o_proj": LAYER + "self_attn.o_proj.weight",
    "q_norm": LAYER + "self_attn.q_norm.weight",
    "k_norm": LAYER + "self_attn.k_norm.weight",
    "post_attn_layernorm": LAYER + "post_attention_layernorm.weight",
    "norm": "mtp.norm.weight",
    "gate_proj": LAYER + "mlp.gate_proj.weight",
    "up_proj": LAYER + "mlp.up_proj.weight",
    "down_proj": LAYER + "mlp.down_proj.weight",
}
"""Written out here once more: a test that took the loader's names could not find a wrong one."""


@pytest.fixture
def tensors(rng: np.random.Generator) -> dict[str, Array]:
    """A checkpoint's MTP tensors by name, and one of the target."""
    arrays = random_weights(rng, config())
    named = {name: arrays[field] for field, name in NAMES.items()}
    return named | {"model.embed_tokens.weight": arrays["embed_tokens"]}


def write(folder: Path, tensors: dict[str, Array], layout: str) -> None:
    if layout == "one":
        save_file(tensors, folder / "model.safetensors")
    elif layout == "mtp":
        own = {name: a for name, a in tensors.items() if name.startswith("mtp.")}
        save_file(own, folder / "mtp.safetensors")
        save_file({name: a for name, a in tensors.items() if name not in own}, folder / "model.safetensors")
    else:
        parts: dict[str, dict[str, Array]] = {
            "model-00001-of-00002.safetensors": {},
            "model-00002-of-00002.safetensors": {},
        }
        index = {}
        for i, (name, array) in enumerate(tensors.items()):
            file = sorted(parts)[i % 2]
            parts[file][name], index[name] = array, file
        for file, content in parts.items():
            save_file(content, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def field_of(weights: MtpWeights, field: str) -> DenseWeight:
    assert weights.dense_ffn is not None
    owner: Any = weights.dense_ffn if hasattr(weights.dense_ffn, field) else weights
    weight: DenseWeight = getattr(owner, field)
    return weight


@pytest.mark.parametrize("layout", ["one", "mtp", "shards"])
def test_every_tensor_is_where_it_belongs(
    gpu: GpuBackend, tmp_path: Path, tensors: dict[str, Array], layout: str
) -> None:
    write(tmp_path, tensors, layout)
    with WeightStore.open(tmp_path) as store:
        weights = load_mtp_weights(store, config(), gpu)
        for field, name in NAMES.items():
            weight = field_of(weights, field)
            assert weight.shape == tensors[name].shape
            assert download(gpu, weight.weight, weight.shape).tobytes() == tensors[name].tobytes(), field
        assert store.unread() == ("model.embed_tokens.weight",)


def test_the_names_are_those_of_the_checkpoints() -> None:
    assert {field: name for field, (name, _) in mtp_tensor_shapes(config()).items()} == NAMES


def test_f32_is_rounded_to_bf16(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, tensors: Any) -> None:
    wide = rng.standard_normal((64, 128)).astype(np.float32)
    save_file(tensors | {"mtp.fc.weight": wide}, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store:
        fc = load_mtp_weights(store, config(), gpu).fc
        assert download(gpu, fc.weight, fc.shape).tobytes() == wide.astype(BF16).tobytes()


def test_a_missing_tensor_is_missed_in_the_folder(gpu: GpuBackend, tmp_path: Path, tensors: Any) -> None:
    """Also when nothing but the MTP module is left to load."""
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store:
        store.load(gpu, list(tensors))
        with pytest.raises(MissingWeightError) as caught:
            load_mtp_weights(store, config(), gpu)
    assert str(caught.value).splitlines()[0] == f"1 tensor is not in {tmp_path}: 'mtp.norm.weight'"


@pytest.mark.parametrize("name", [*NAMES.values()])
def test_one_missing_tensor_is_named(gpu: GpuBackend, tmp_path: Path, tensors: Any, name: str) -> None:
    save_file({n: a for n, a in tensors.items() if n != name}, tmp_path / "model.safetensors")
    before = gpu.live_bytes()
    with WeightStore.open(tmp_path) as store, pytest.raises(MissingWeightError) as caught:
        load_mtp_weights(store, config(), gpu)
    assert caught.value.missing == (name,)
    assert "without drafts" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert gpu.live_bytes() == before


def test_a_checkpoint_without_an_mtp_module(gpu: GpuBackend, tmp_path: Path, tensors: Any) -> None:
    save_file({n: a for n, a in tensors.items() if not n.startswith("mtp.")}, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store, pytest.raises(MissingWeightError) as caught:
        load_mtp_weights(store, config(num_mtp_modules=1), gpu)
    assert set(caught.value.missing) == set(NAMES.values())


@pytest.mark.parametrize("name", [*NAMES.values()])
def test_another_shape_is_named(gpu: GpuBackend, tmp_path: Path, tensors: Any, name: str) -> None:
    save_file(tensors | {name: np.concatenate([tensors[name]] * 2)}, tmp_path / "model.safetensors")
    before = gpu.live_bytes()
    with WeightStore.open(tmp_path) as store, pytest.raises(InvalidArgumentError, match=name):
        load_mtp_weights(store, config(), gpu)
    assert gpu.live_bytes() == before


def test_a_transposed_matrix_is_refused(gpu: GpuBackend, tmp_path: Path, tensors: Any) -> None:
    name = NAMES["fc"]
    save_file(tensors | {name: np.ascontiguousarray(tensors[name].T)}, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store, pytest.raises(InvalidArgumentError, match=r"\(128, 64\)"):
        load_mtp_weights(store, config(), gpu)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, np.uint8, np.float16], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("field", "error"), [("q_proj", WeightFormatError), ("q_norm", UnsupportedError)])
def test_another_dtype_is_named(
    gpu: GpuBackend, tmp_path: Path, tensors: Any, dtype: Any, field: str, error: type[Exception]
) -> None:
    """FP8 without its scales, packed U8 and F16 would all be read as BF16 numbers."""
    name = NAMES[field]
    save_file(tensors | {name: tensors[name].astype(np.float32).astype(dtype)}, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store, pytest.raises(error, match=name):
        load_mtp_weights(store, config(), gpu)
    assert gpu.live_bytes() == 0


@pytest.mark.parametrize(
    "name",
    [
        "mtp.fc.weight_scale_inv", "mtp.layers.0.mlp.up_proj.weight_scale", "mtp.layers.0.self_attn.k_scale",
        "mtp.layers.1.input_layernorm.weight", "mtp.embed_tokens.weight", "mtp.lm_head.weight",
        "mtp.layers.0.mlp.gate.weight",
    ],
)  # fmt: skip
def test_a_tensor_that_must_not_be_left_aside(gpu: GpuBackend, tmp_path: Path, tensors: Any, name: str) -> None:
    save_file(tensors | {name: np.zeros(4, BF16)}, tmp_path / "model.safetensors")
    error = UnreadScaleError if "scale" in name else UnsupportedError
    with WeightStore.open(tmp_path) as store, pytest.raises(error, match=name):
        load_mtp_weights(store, config(), gpu)


def test_other_tensors_of_the_module_are_listed(
    gpu: GpuBackend, tmp_path: Path, tensors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"mtp.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store:
        load_mtp_weights(store, config(), gpu)
    assert "'mtp.rotary_emb.inv_freq'" in caplog.text
    assert "embed_tokens" not in caplog.text


def test_more_modules_than_the_head_has(gpu: GpuBackend, tmp_path: Path, tensors: Any) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightStore.open(tmp_path) as store, pytest.raises(UnsupportedError, match="3 MTP modules"):
        load_mtp_weights(store, config(num_mtp_modules=3), gpu)


def test_a_head_of_loaded_weights_drafts(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, tensors: Any
) -> None:
    """The same ids as with tensors that were put on the device by hand."""
    from tests.model.support import make_rig

    arrays = {field: tensors[name] for field, name in NAMES.items()}
    arrays |= {
        "embed_tokens": tensors["model.embed_tokens.weight"],
        "lm_head": random_weights(rng, config())["lm_head"],
    }
    rig = make_rig(gpu, rng, arrays=arrays)
    hidden = rng.standard_normal(64).astype(BF16)
    write(tmp_path, tensors, "mtp")
    with WeightStore.open(tmp_path) as store:
        weights = load_mtp_weights(store, rig.config, gpu)
        head = MtpHead(
            weights, dense(gpu, arrays["embed_tokens"]), dense(gpu, arrays["lm_head"]), None, rig.config, gpu,
            MtpQuantization.parse("bf16"), 0, 256, 0, ModelLevers(),
        )  # fmt: skip
        state = head.alloc_state(gpu)
        found = head.propose(9, rig.put(hidden), 5, 3, state, rig.ctx, rig.stream)
        head.release()
    assert found == rig.propose(rig.state(), 9, hidden, 5, 3)


@pytest.mark.parametrize("word", ["bf16", "BF16", "fp8", "nvfp4", "NvFp4", "fp4"])
def test_words_of_the_quantisations(word: str) -> None:
    wanted = {"bf16": "BF16", "fp8": "FP8", "nvfp4": "NVFP4", "fp4": "NVFP4"}[word.lower()]
    assert MtpQuantization.parse(word).name == wanted
    assert MtpQuantization.parse(word).supports_drafter_prefill() == (wanted == "BF16")


@pytest.mark.parametrize("word", ["", "bf-16", "int8", "bf16 "])
def test_other_words(word: str) -> None:
    with pytest.raises(InvalidArgumentError, match="mtp_quantization"):
        MtpQuantization.parse(word)
