# SPDX-License-Identifier: AGPL-3.0-only
"""MTP modules behind the layers of MiniMax-M2 and GLM-4.5: what is loaded from which name, what is refused, and the
heads that come of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_py.model.layer import DraftProposer, ForwardContext
from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.layers.mtp_multi import MultiModuleMtpHead
from spark_py.model.levers import ModelLevers
from spark_py.model.row_policy import RowPolicy
from spark_py.model.weight_loader import load_mtp_modules, module_names, modules_present
from spark_py.model.weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, MtpWeights, QuantizedWeight
from spark_py.runtime.buffers import BufferArena
from spark_py.runtime.errors import InvalidArgumentError, MissingWeightError, UnreadScaleError, UnsupportedError
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightDtype
from tests.model.bodies_support import TABLES, BodyOracle
from tests.model.modules_support import RAW, ModulesFolder, modules_folder, stored
from tests.model.multi_support import MultiRig, Text
from tests.model.support import BF16, E4M3, FFN, Array, Rig, download, relative_l2

BOUND = 0.025
LEVERS = ModelLevers(mtp_max_seqs=2)
each_family = pytest.mark.parametrize("family", RAW)


def fields_of(weights: MtpWeights) -> dict[str, Any]:
    """The tensors of a module under the names of `body_arrays`."""
    found = {name: getattr(weights, name) for name in MtpWeights.__slots__}
    experts, shared = found.pop("experts"), found.pop("shared_expert")
    flat = {f"experts[{i}].{part}": getattr(expert, part) for i, expert in enumerate(experts) for part in FFN}
    flat |= {f"shared_expert.{part}": getattr(shared, part) for part in FFN} if shared else {}
    return {name: weight for name, weight in (found | flat).items() if weight is not None}


def check_loaded(gpu: GpuBackend, made: ModulesFolder, modules: list[MtpWeights]) -> None:
    """Every tensor has the bits of the file's, and none is left out."""
    assert len(modules) == len(made.arrays)
    for weights, arrays in zip(modules, made.arrays, strict=True):
        found = fields_of(weights)
        assert found.keys() == arrays.keys() - set(TABLES)
        for name, weight in found.items():
            wanted = arrays[name]
            assert weight.shape == wanted.shape, name
            assert download(gpu, weight.weight, wanted.shape, wanted.dtype).tobytes() == wanted.tobytes(), name


@each_family
def test_modules_are_loaded_from_the_published_names(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, family: str
) -> None:
    made = modules_folder(tmp_path / "m", rng, family, 2)
    with made.store() as store:
        assert modules_present(store, made.config) == 2
        check_loaded(gpu, made, load_mtp_modules(store, made.config, gpu))


@pytest.mark.parametrize("fault", ["up and down swapped", "gate and up swapped", "the first module twice"])
def test_a_wrong_name_is_seen(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 2, intermediate_size=64)
    if fault == "the first module twice":
        monkeypatch.setattr(module_names, "module_prefix", lambda config, index: "model.layers.2.")
    else:
        parts = ("w1", "w2", "w3") if fault.startswith("up") else ("w3", "w1", "w2")
        names = replace(module_names._MIXTURES["minimax_m2"], parts=parts)
        monkeypatch.setitem(module_names._MIXTURES, "minimax_m2", names)
    with made.store() as store, pytest.raises((AssertionError, InvalidArgumentError)):
        check_loaded(gpu, made, load_mtp_modules(store, made.config, gpu))


# ---------------------------------------------------------------- modules that are not there


@each_family
def test_a_checkpoint_without_modules_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, family: str
) -> None:
    made = modules_folder(tmp_path / "m", rng, family, 0)
    with made.factory(gpu) as factory, pytest.raises(MissingWeightError, match="num_mtp_modules 3") as error:
        factory(LEVERS)
    assert made.name(0, "fc") in error.value.missing
    assert made.name(0, "experts[5].up_proj") in error.value.missing
    assert "decode without drafts" in str(error.value)


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_fewer_modules_than_configured_are_said(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, caplog: pytest.LogCaptureFixture, modules: int
) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", modules)
    with made.factory(gpu) as factory, caplog.at_level(logging.WARNING):
        head = factory(LEVERS)
        assert isinstance(head, MultiModuleMtpHead)
        assert head.num_modules() == modules
        assert (f"using {modules} of 3 MTP modules" in caplog.text) is (modules < 3)
        for asked in (0, 1, 3, 4):
            assert len(drafts_of(gpu, made, head, asked)) == min(asked, modules)


def drafts_of(gpu: GpuBackend, made: ModulesFolder, head: DraftProposer, asked: int) -> list[int]:
    """What a fresh state drafts; all is given back."""
    with BufferArena(made.config, 8, 128, 16, 1, gpu) as arena:
        ctx, stream = ForwardContext(arena, gpu, made.config, LEVERS), gpu.default_stream()
        hidden, state = gpu.alloc(2 * made.config.hidden_size), head.alloc_state(gpu)
        gpu.memset(hidden, 0x3C, 2 * made.config.hidden_size)
        drafts = head.propose(5, hidden, 7, asked, state, ctx, stream)
        head.free_state(gpu, state)
        gpu.free(hidden)
    return drafts


@pytest.mark.parametrize("name", ["enorm.weight", "eh_proj.weight", "block_sparse_moe.experts.3.w2.weight"])
def test_a_module_that_is_there_in_part_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 2)
    del made.tensors[f"model.layers.3.{name}"]
    with made.store() as store, pytest.raises(MissingWeightError) as error:
        load_mtp_modules(store, made.config, gpu)
    assert error.value.missing == (f"model.layers.3.{name}",)
    assert not any(store.is_loaded(each) for each in store.names())


def test_a_module_left_out_before_the_last_is_refused(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path
) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 3)
    made.tensors = {name: each for name, each in made.tensors.items() if not name.startswith("model.layers.3.")}
    with made.store() as store, pytest.raises(MissingWeightError, match="module 2 is there") as error:
        load_mtp_modules(store, made.config, gpu)
    assert "model.layers.3.enorm.weight" in error.value.missing


def test_more_modules_than_configured_are_refused(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 3, num_mtp_modules=2)
    with made.store() as store, pytest.raises(UnsupportedError, match="3 MTP modules, its configuration 2"):
        load_mtp_modules(store, made.config, gpu)


def test_what_the_configuration_does_not_say_the_files_do(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path
) -> None:
    """As transformers saves MiniMax-M2's configuration, without the number of modules."""
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 1, num_mtp_modules=None)
    with made.factory(gpu) as factory:
        head = factory(LEVERS)
        assert isinstance(head, MtpHead)
        assert len(drafts_of(gpu, made, head, 3)) == 3


def test_other_families_have_no_names(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 1)
    with made.store() as store, pytest.raises(UnsupportedError, match=r"no names are known .*'qwen3_next'"):
        load_mtp_modules(store, replace(made.config, model_type="qwen3_next"), gpu)


# ---------------------------------------------------------------- what else a module has


@pytest.mark.parametrize("name", ["self_attn.o_proj.bias", "self_attn.sinks", "shared_head.norm.bias", "norm.weight"])
def test_tensors_that_would_change_the_others_are_refused(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, name: str
) -> None:
    made = modules_folder(tmp_path / "m", rng, "glm4_moe", 2)
    made.tensors[f"model.layers.3.{name}"] = stored(np.zeros(64, BF16))
    with made.store() as store, pytest.raises(UnsupportedError, match=f"model.layers.3.{name}"):
        load_mtp_modules(store, made.config, gpu)


def test_a_norm_under_a_layers_name_and_harmless_tensors(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path
) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 1)
    made.tensors["model.layers.2.norm.weight"] = made.tensors.pop("model.layers.2.shared_head.norm.weight")
    for name in ("self_attn.rotary_emb.inv_freq", "self_attn.k_scale"):
        made.tensors[f"model.layers.2.{name}"] = stored(np.ones(1, np.float32))
    with made.store() as store:
        check_loaded(gpu, made, load_mtp_modules(store, made.config, gpu))


@each_family
def test_tables_are_a_modules_own_where_they_differ(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, family: str
) -> None:
    """Module 0 has copies of the target's, module 1 a LM head of its own."""
    made = modules_folder(tmp_path / "m", rng, family, 2)
    for index in (0, 1):
        for name in TABLES:
            made.tensors[made.name(index, f"own.{name}")] = stored(made.arrays[0][name])
    own = (made.arrays[0]["lm_head"].astype(np.float32) * -1).astype(BF16)
    made.tensors[made.name(1, "own.lm_head")] = stored(own)
    with made.factory(gpu) as factory:
        head = factory(LEVERS)
        assert isinstance(head, MultiModuleMtpHead)
        tables = factory._weights
        assert [m.embed_tokens for m in head.modules] == [tables.embed_tokens] * 2
        assert head.modules[0].lm_head == tables.lm_head
        assert isinstance(mine := head.modules[1].lm_head, DenseWeight)
        assert download(gpu, mine.weight, own.shape).tobytes() == own.tobytes()
    made.tensors[made.name(1, "own.lm_head")] = stored(own[:, :32].copy())
    with made.store() as store, pytest.raises(InvalidArgumentError, match=r"\[rows, 64\]"):
        load_mtp_modules(store, made.config, gpu)


def test_the_routers_bias_is_widened_and_nothing_else(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path
) -> None:
    made = modules_folder(tmp_path / "m", rng, "glm4_moe", 1)
    name = made.name(0, "correction_bias")
    rounded = made.arrays[0]["correction_bias"].astype(BF16)
    made.tensors[name] = stored(rounded)
    made.arrays[0]["correction_bias"] = rounded.astype(np.float32)
    with made.store() as store:
        check_loaded(gpu, made, load_mtp_modules(store, made.config, gpu))
    for wrong, words in ((rounded[:5], r"\(8,\)"), (rounded.astype(np.float16), "F16")):
        made.tensors[name] = (wrong, WeightDtype.F16 if wrong.dtype == np.float16 else WeightDtype.BF16)
        with made.store() as store, pytest.raises((InvalidArgumentError, UnsupportedError), match=words):
            load_mtp_modules(store, made.config, gpu)


# ---------------------------------------------------------------- formats


def in_blocks(made: ModulesFolder, index: int, name: str) -> Array:
    """Store a projection as E4M3 with a scale a block; gives its values as BF16."""
    weight = made.arrays[index][name].astype(np.float32)
    scale = np.full((1, 1), np.abs(weight).max() / 448, np.float32)
    codes = (weight / scale).astype(E4M3)
    stem = made.name(index, name)
    made.tensors[stem] = codes, WeightDtype.F8_E4M3
    made.tensors[f"{stem}_scale_inv"] = stored(scale)
    return (codes.astype(np.float32) * scale).astype(BF16)


def test_block_scaled_tensors_become_bf16(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 2)
    for index, name in ((0, "q_proj"), (1, "experts[4].down_proj"), (1, "fc")):
        made.arrays[index][name] = in_blocks(made, index, name)
    with made.store() as store:
        check_loaded(gpu, made, load_mtp_modules(store, made.config, gpu))
    made.tensors["model.layers.3.self_attn.o_proj.weight_scale_inv"] = stored(np.ones((1, 1), np.float32))
    with made.store() as store, pytest.raises(UnreadScaleError, match=r"o_proj\.weight_scale_inv"):
        load_mtp_modules(store, made.config, gpu)


def test_an_fp8_head_takes_what_is_block_scaled(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    """MiniMax-M2's own files: all projections and experts, and the entry projection in BF16."""
    made = modules_folder(tmp_path / "m", rng, "minimax_m2", 2)
    for index in (0, 1):
        for name in made.arrays[index]:
            if name.startswith("experts[") or name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                in_blocks(made, index, name)
    with made.factory(gpu) as factory:
        head = factory(LEVERS, MtpQuantization.FP8)
        assert isinstance(head, MultiModuleMtpHead)
        for module in head.modules:
            assert isinstance(module.q_proj, Fp8Weight)
            assert isinstance(module.fc, Fp8DenseWeight)
            assert module.moe_experts_generic is not None
            assert isinstance(module.moe_experts_generic[5][2], Fp8Weight)
        assert len(drafts_of(gpu, made, head, 2)) == 2


@each_family
def test_every_quantisation_drafts_and_leaves_nothing(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, family: str
) -> None:
    made = modules_folder(tmp_path / "m", rng, family, 2)
    with made.factory(gpu) as factory:
        assert factory.quantizations() == (MtpQuantization.BF16, MtpQuantization.FP8, MtpQuantization.NVFP4)
        for quant in factory.quantizations():
            head = factory(LEVERS, quant)
            assert isinstance(head, MultiModuleMtpHead)
            assert len(drafts_of(gpu, made, head, 2)) == 2
            packed = [isinstance(module.lm_head, QuantizedWeight) for module in head.modules]
            assert packed == [quant is MtpQuantization.NVFP4] * 2
        assert factory(LEVERS, MtpQuantization.NVFP4).modules[0].lm_head is head.modules[1].lm_head


def test_modules_kept_out_of_quantisation_stay_bf16(gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path) -> None:
    listed = {"quantization_config": {"modules_to_not_convert": ["model.layers.2.eh_proj"]}}
    made = modules_folder(tmp_path / "m", rng, "glm4_moe", 1, num_nextn_predict_layers=1, **listed)
    with made.factory(gpu) as factory:
        assert factory.quantizations() == (MtpQuantization.BF16,)
        head = factory(LEVERS, MtpQuantization.FP8)
        assert isinstance(head, MtpHead)
        assert head.quant is MtpQuantization.BF16


# ---------------------------------------------------------------- numbers


def definition(made: ModulesFolder, tokens: list[int], hidden: list[Array], k: int) -> tuple[Array, float]:
    """(logits of draft k - 1, how clear every choice of experts was), by the chain of the first k modules in FP64."""
    before, logits, clear = [row.astype(np.float64) for row in hidden], np.empty(0), np.inf
    for i, arrays in enumerate(made.arrays[:k]):
        oracle, outputs = BodyOracle.of_kind(made.kind, arrays), []
        for x, row in enumerate(before):
            logits, out = oracle.step(tokens[x + i + 1], row, x + i + 1)
            clear = min(clear, oracle.router_gap)
            outputs.append(out)
        before = outputs
    return logits, clear


@each_family
@pytest.mark.parametrize("refeed", [True, False])
def test_modules_draft_as_the_definition_says(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, family: str, refeed: bool
) -> None:
    """After a prompt that all modules were fed, and after verdicts and what is fed then; or with one row each, as the
    engine has it. Chained behind the final norm for GLM-4.5, before it for MiniMax-M2."""
    levers = replace(LEVERS, row_policy=RowPolicy.VERIFIED, refeed=refeed)
    compared = 0
    for attempt in range(6):
        made = modules_folder(tmp_path / f"m{attempt}", rng, family, 3)
        with made.factory(gpu) as factory, BufferArena(made.config, 8, 128, 16, 1, gpu) as arena:
            head = factory(levers)
            assert isinstance(head, MultiModuleMtpHead)
            ctx = ForwardContext(arena, gpu, made.config, levers)
            rigs = [
                Rig(gpu, made.config, arrays, module, ctx, gpu.default_stream())
                for module, arrays in zip(head.modules, made.arrays, strict=True)
            ]
            rig = MultiRig(head, rigs)
            text, state = Text(rig, rng, 4 if refeed else 1), rig.state()
            if refeed:
                text.prefill(state)
            for k, accepted in ((1, 1), (2, 0), (3, 2), (3, 1)):
                drafts = text.propose(state, k)
                logits = rig.first.logits()
                wanted, clear = definition(made, [*text.tokens, *drafts[:-1]], text.hidden, k)
                if clear > 0.01:
                    compared += 1
                    assert relative_l2(logits, wanted) < BOUND, f"draft {k - 1}"
                if refeed:
                    head.after_verify(accepted, state, rig.first.stream)
                    text.confirm(drafts[:accepted])
                    text.catch_up(state)
                else:
                    head.free_state(gpu, state)
            head.free_state(gpu, state)
        if compared > 3:
            return
    assert compared > 2


@pytest.mark.parametrize(("family", "place"), [("glm4_moe", "hidden_states"), ("minimax_m2", "norm_output")])
def test_a_chain_on_the_other_side_of_the_norm_is_seen(
    gpu: GpuBackend, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, place: str
) -> None:
    monkeypatch.setattr(MtpHead, "output_row", lambda self, ctx: ctx.buffers.pointer(place))
    with pytest.raises(AssertionError, match="draft"):
        test_modules_draft_as_the_definition_says(gpu, rng, tmp_path, family, False)
