# SPDX-License-Identifier: AGPL-3.0-only
"""Checks of DeepSeek-V4's loader that tests and mutants share: each holds for the package, every mutant fails one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layers.deepseek_v4 import V4BlockWeights, V4HyperWeights, V4MtpWeights, V4TargetWeights
from spark_py.model.weight_map import DenseWeight, Fp8Weight, Mxfp4Weight
from spark_py.runtime.errors import (
    ConfigError,
    InvalidArgumentError,
    MissingScaleError,
    MissingWeightError,
    OutOfDeviceMemoryError,
    ScaleShapeError,
    ScaleValueError,
    SparkError,
    UnreadScaleError,
    UnsupportedError,
    WeightFormatError,
)
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.weights import WeightDtype, WeightStore
from spark_py.testing import BF16, F32, Array, download, f64
from tests.model import v4_files as files
from tests.model.v4_ffn_support import Bf16, Fp8, Mxfp4

D = WeightDtype
MTP = "mtp.0."


class Loader(NamedTuple):
    """The modules under test: the real ones, or a mutant and what is built on it."""

    upload: ModuleType
    deepseek_v4_names: ModuleType
    deepseek_v4_upload: ModuleType
    deepseek_v4: ModuleType

    def mtp(self, store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> V4MtpWeights:
        weights: V4MtpWeights = self.deepseek_v4.load_v4_mtp_weights(store, config, gpu)
        return weights

    def target(self, store: WeightStore, config: ModelConfig, gpu: GpuBackend) -> V4TargetWeights:
        weights: V4TargetWeights = self.deepseek_v4.load_v4_target_weights(store, config, gpu)
        return weights


def opened(folder: Path, tensors: files.Tensors, shards: int = 3) -> WeightStore:
    return WeightStore.open(files.write_folder(folder, tensors, shards=shards))


def on_device(gpu: GpuBackend, ptr: DevicePtr, like: Array) -> Array:
    """The bytes of a tensor on the device, in the type and shape of one on the host."""
    return download(gpu, ptr, like.shape, like.dtype)


def assert_matrix(gpu: GpuBackend, weight: Any, tensors: files.Tensors, name: str, *, dense: bool = False) -> None:
    """The weight has the values of the file's tensor, in the file's format unless `dense`."""
    host = files.matrix_of(tensors, name)
    if dense or isinstance(host, Bf16):
        assert isinstance(weight, DenseWeight), name
        found = f64(on_device(gpu, weight.weight, np.empty(weight.shape, BF16)))
        np.testing.assert_array_equal(found, host.values(), name)  # E4M3 times a power of two is a BF16 number
    elif isinstance(host, Fp8):
        assert isinstance(weight, Fp8Weight), name
        assert (weight.n, weight.k) == host.codes.shape
        codes = on_device(gpu, weight.weight, host.codes.view(np.uint8)).view(ml_dtypes.float8_e4m3fn)
        scales = on_device(gpu, weight.row_scale, np.empty(host.scales.shape, F32))
        np.testing.assert_array_equal(scales, np.ldexp(1.0, host.scales.astype(int) - 127), name)
        np.testing.assert_array_equal(codes.view(np.uint8), host.codes.view(np.uint8), name)
    else:
        assert isinstance(host, Mxfp4), name
        assert isinstance(weight, Mxfp4Weight), name
        assert (weight.n, 2 * host.codes.shape[1]) == (len(host.codes), weight.k)
        np.testing.assert_array_equal(on_device(gpu, weight.weight, host.codes), host.codes, name)
        np.testing.assert_array_equal(on_device(gpu, weight.weight_scale, host.scales), host.scales, name)


def assert_exact(gpu: GpuBackend, ptr: DevicePtr, tensors: files.Tensors, name: str) -> None:
    array, dtype = tensors[name]
    wanted = array.astype(F32) if dtype is D.BF16 else array
    np.testing.assert_array_equal(on_device(gpu, ptr, wanted), wanted, name)


def assert_hyper(gpu: GpuBackend, weights: V4HyperWeights, tensors: files.Tensors, name: str) -> None:
    for part in files.HYPER:
        assert_exact(gpu, getattr(weights, part), tensors, f"{name}_{part}")


def assert_block(gpu: GpuBackend, block: V4BlockWeights, tensors: files.Tensors, prefix: str, hashed: bool) -> None:
    """Every tensor of the block is the one under `prefix`."""
    attention, ffn = block.attention, block.ffn
    for part in ("attn", "ffn"):
        assert_matrix(gpu, getattr(block.layer, f"{part}_norm"), tensors, f"{prefix}{part}_norm.weight")
        assert_hyper(gpu, getattr(block.layer, f"hc_{part}"), tensors, f"{prefix}hc_{part}")
    for part in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"):
        assert_matrix(gpu, getattr(attention, part), tensors, f"{prefix}attn.{part}.weight")
    assert_exact(gpu, attention.attn_sink, tensors, f"{prefix}attn.attn_sink")
    assert_matrix(gpu, ffn.router.gate, tensors, f"{prefix}ffn.gate.weight")
    assert ffn.router.is_hash is hashed
    chosen = ("tid2eid", ffn.router.tid2eid) if hashed else ("bias", ffn.router.bias)
    assert_exact(gpu, chosen[1], tensors, f"{prefix}ffn.gate.{chosen[0]}")
    for part in ("w1", "w3", "w2"):
        assert_matrix(gpu, getattr(ffn.shared, part), tensors, f"{prefix}ffn.shared_experts.{part}.weight")
        for number, expert in enumerate(ffn.experts):
            assert_matrix(gpu, getattr(expert, part), tensors, f"{prefix}ffn.experts.{number}.{part}.weight")


def assert_mtp(gpu: GpuBackend, weights: V4MtpWeights, tensors: files.Tensors) -> None:
    for part in ("enorm", "hnorm", "norm", "e_proj", "h_proj"):
        assert_matrix(gpu, getattr(weights, part), tensors, f"{MTP}{part}.weight")
    assert_hyper(gpu, weights.hc_head, tensors, f"{MTP}hc_head")
    assert_block(gpu, weights.block, tensors, MTP, hashed=False)


def assert_target(gpu: GpuBackend, weights: V4TargetWeights, tensors: files.Tensors) -> None:
    for part in ("embed", "norm", "head"):
        assert_matrix(gpu, getattr(weights, part), tensors, f"{part}.weight")
    assert_hyper(gpu, weights.hc_head, tensors, "hc_head")
    for layer, block in enumerate(weights.blocks):
        assert_block(gpu, block, tensors, f"layers.{layer}.", hashed=layer < 1)


def refused(
    gpu: GpuBackend,
    load: Callable[[WeightStore, ModelConfig, GpuBackend], Any],
    folder: Path,
    tensors: files.Tensors,
    error: type[SparkError],
    *told: str,
    config: ModelConfig | None = None,
) -> None:
    """The error is of exactly this type and names what is wrong, and nothing is left on the device."""
    before = gpu.live_bytes()
    with opened(folder, tensors) as store:
        with pytest.raises(error) as caught:
            load(store, config or files.config(), gpu)
        assert type(caught.value) is error
        for word in told:
            assert word in str(caught.value)
        assert gpu.live_bytes() == before
        assert store.total_bytes() == 0


# Checks.


def check_published(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """The module, and then the target, of a folder as published; each reads its own tensors and no others."""
    tensors = files.published(np.random.default_rng(1))
    for name in (f"{MTP}e_proj.scale", f"{MTP}ffn.experts.4.w2.scale", "layers.1.attn.wkv.scale"):
        scale = tensors[name][0].view(np.uint8)
        scale[...] = np.resize(np.array([0, 1, 254, 126, 127, 128], np.uint8), scale.shape)
    with opened(folder, tensors) as store:
        mine = {name for name in tensors if name.startswith(MTP)}
        weights = loader.mtp(store, files.config(), gpu)
        assert_mtp(gpu, weights, tensors)
        assert set(store.unread()) == tensors.keys() - mine
        again, before = loader.mtp(store, files.config(), gpu), gpu.live_bytes()
        assert (again, gpu.live_bytes()) == (weights, before)  # what is there stays as it is
        assert_target(gpu, loader.target(store, files.config(), gpu), tensors)
        assert store.unread() == ()
    assert gpu.live_bytes() == 0


def check_sizes(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """What stays in its format takes no more than in the file, but for scales in FP32."""
    tensors = files.published(np.random.default_rng(2), target=False)
    stored = {name: array.nbytes for name, (array, _) in tensors.items()}
    for name, (array, dtype) in tensors.items():
        if dtype is D.F8_E8M0:
            weight = tensors[name.removesuffix("scale") + "weight"][1]
            stored[name] = array.size * (4 if weight is D.F8_E4M3 else 1)
    with opened(folder, tensors) as store:
        loader.mtp(store, files.config(), gpu)
        assert store.total_bytes() == sum(stored.values())


def check_names(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """BF16 under the published names, under those of transformers' modules, and as transformers saves them."""
    tensors = files.in_bf16(files.published(np.random.default_rng(3)))
    for number, rename in enumerate((lambda name: name, files.module_name, files.saved_name)):
        with opened(folder / str(number), files.renamed(tensors, rename)) as store:
            assert_mtp(gpu, loader.mtp(store, files.config(), gpu), tensors)
            assert_target(gpu, loader.target(store, files.config(), gpu), tensors)


def check_stacks(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    tensors = files.in_bf16(files.published(np.random.default_rng(4)))
    with opened(folder, files.stacked(tensors)) as store:
        assert_mtp(gpu, loader.mtp(store, files.config(), gpu), tensors)
        assert_target(gpu, loader.target(store, files.config(), gpu), tensors)


def check_formats(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """The dtype of each tensor decides: parameters that were saved in BF16, one expert that is not MXFP4."""
    tensors = files.published(np.random.default_rng(5), target=False)
    for name in ("hc_attn_fn", "attn.attn_sink", "ffn.gate.bias", "hc_head_scale"):
        tensors[MTP + name] = tensors[MTP + name][0].astype(BF16), D.BF16
    plain = files.in_bf16(tensors)
    wq_b, w3 = f"{MTP}attn.wq_b.weight", f"{MTP}ffn.experts.2.w3.weight"
    tensors |= {name: plain[name] for name in (wq_b, w3)}
    for name in (wq_b, w3):
        del tensors[name.removesuffix("weight") + "scale"]
    with opened(folder, tensors) as store:
        weights = loader.mtp(store, files.config(), gpu)
        for part in ("wq_a", "wq_b"):
            assert_matrix(gpu, getattr(weights.block.attention, part), tensors, f"{MTP}attn.{part}.weight")
        assert_exact(gpu, weights.block.attention.attn_sink, tensors, f"{MTP}attn.attn_sink")
        assert_exact(gpu, weights.block.ffn.router.bias, tensors, f"{MTP}ffn.gate.bias")
        assert_hyper(gpu, weights.hc_head, tensors, f"{MTP}hc_head")
        assert_hyper(gpu, weights.block.layer.hc_attn, tensors, f"{MTP}hc_attn")
        for number, expert in enumerate(weights.block.ffn.experts):
            assert_matrix(gpu, expert.w1, tensors, f"{MTP}ffn.experts.{number}.w1.weight", dense=True)


def check_missing(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """All that is missing is named at once."""
    tensors = files.published(np.random.default_rng(6))
    gone = ("hnorm.weight", "h_proj.weight", "hc_ffn_base", "ffn.experts.5.w2.weight", "ffn.gate.bias")
    left = {name: stored for name, stored in tensors.items() if name not in {MTP + each for each in gone}}
    refused(gpu, loader.mtp, folder / "mtp", left, MissingWeightError, "5 tensors", *(f"'{MTP}{g}'" for g in gone))
    del tensors["layers.1.attn.wkv.weight"], tensors["head.weight"], tensors["layers.0.ffn.gate.tid2eid"]
    told = ("3 tensors", "'layers.1.attn.wkv.weight'", "'head.weight'", "'layers.0.ffn.gate.tid2eid'")
    refused(gpu, loader.target, folder / "target", tensors, MissingWeightError, *told)


def check_other_tensors(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """What stands under the module's prefix and means something else is refused by name."""
    tensors = files.published(np.random.default_rng(7), target=False)
    norm, fp8 = tensors[f"{MTP}norm.weight"], tensors[f"{MTP}attn.wkv.weight"]
    table = np.zeros((files.CONFIG["vocab_size"], 2), np.int64), D.I64
    plain = files.in_bf16(tensors)
    wq_a = plain[f"{MTP}attn.wq_a.weight"]
    for number, (name, stored, error, told) in enumerate(
        (
            ("mtp.0.main_proj.weight", fp8, UnsupportedError, "DSpark"),
            ("mtp.2.markov_head.weight", norm, UnsupportedError, "DSpark"),
            ("mtp.1.enorm.weight", norm, UnsupportedError, "'mtp.1.enorm.weight'"),
            ("mtp.0.attn.compressor.norm.weight", norm, UnsupportedError, "compressor"),
            ("mtp.0.emb.tok_emb.weight", norm, UnsupportedError, "tok_emb"),
            ("mtp.0.ffn.gate.tid2eid", table, UnsupportedError, "tid2eid"),
            ("mtp.0.attn.wq_a.weight_scale", norm, WeightFormatError, "wq_a"),
            ("mtp.0.self_attn.q_a_proj.weight", wq_a, WeightFormatError, "'mtp.0.self_attn.q_a_proj.weight'"),
            ("mtp.0.norm.scale", norm, UnreadScaleError, "'mtp.0.norm.scale'"),
        )
    ):
        where = folder / str(number)
        with opened(where, tensors | {name: stored}) as store:
            with pytest.raises(error, match=told.strip("'")):
                loader.mtp(store, files.config(), gpu)
            assert store.total_bytes() == 0


def check_wrong_tensors(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    tensors = files.published(np.random.default_rng(8), target=False)
    wo_a, w2, gate = (f"{MTP}{leaf}" for leaf in ("attn.wo_a.", "ffn.experts.3.w2.", "ffn.gate."))
    scale = tensors[f"{w2}scale"][0].copy()
    scale.view(np.uint8)[7, 1] = 0xFF
    fp8 = tensors[f"{MTP}attn.wkv.weight"][0]
    without = {name: stored for name, stored in tensors.items() if name != f"{w2}scale"}
    h, experts = files.CONFIG["hidden_size"], files.CONFIG["n_routed_experts"]
    cases: tuple[tuple[files.Tensors, type[SparkError], str], ...] = (
        (without, MissingScaleError, f"{w2}weight"),
        (tensors | {f"{w2}scale": (scale, D.F8_E8M0)}, ScaleValueError, f"{w2}scale"),
        (tensors | {f"{wo_a}scale": (np.ones((2, 1), F32), D.F32)}, ScaleShapeError, f"{wo_a}scale"),
        (tensors | {f"{gate}weight": (np.zeros((experts, h), fp8.dtype), D.F8_E4M3),
                    f"{gate}scale": (np.ones((1, 2), F32), D.F32)}, UnsupportedError, f"{gate}weight"),
        (tensors | {f"{gate}bias": (np.zeros(experts + 1, F32), D.F32)}, InvalidArgumentError, f"{gate}bias"),
        (tensors | {f"{MTP}e_proj.weight": (np.zeros((h, h), BF16), D.BF16)}, UnreadScaleError, "e_proj.scale"),
        (tensors | {f"{MTP}enorm.weight": (np.zeros(h + 1, BF16), D.BF16)}, InvalidArgumentError, "enorm.weight"),
    )  # fmt: skip
    for number, (wrong, error, told) in enumerate(cases):
        refused(gpu, loader.mtp, folder / str(number), wrong, error, told)
    two = files.config(num_nextn_predict_layers=2)
    refused(gpu, loader.mtp, folder / "two", tensors, UnsupportedError, "2 MTP modules", config=two)


def check_target(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    tensors = files.published(np.random.default_rng(9))
    table = tensors["layers.0.ffn.gate.tid2eid"][0].copy()
    table[17, 1] = files.CONFIG["n_routed_experts"]
    wrong = tensors | {"layers.0.ffn.gate.tid2eid": (table, D.I64)}
    refused(gpu, loader.target, folder / "table", wrong, InvalidArgumentError, "tid2eid[17, 1]")
    compressed = files.config(compress_ratios=[0, 4, 0])
    refused(gpu, loader.target, folder / "ratio", tensors, UnsupportedError, "layer 1", config=compressed)
    more = tensors | {"layers.2.attn_norm.weight": tensors["norm.weight"]}
    refused(gpu, loader.target, folder / "more", more, UnsupportedError, "'layers.2.attn_norm.weight'")
    with opened(folder / "tied", {n: t for n, t in tensors.items() if n != "head.weight"}) as store:
        weights = loader.target(store, files.config(tie_word_embeddings=True), gpu)
        assert weights.head == weights.embed


def check_presence(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    tensors = files.published(np.random.default_rng(10), target=False)
    has = loader.deepseek_v4.has_v4_mtp
    with opened(folder / "all", tensors) as store:
        assert has(store, files.config())
        assert not has(store, files.config(num_nextn_predict_layers=0))
    with opened(folder / "none", {n: t for n, t in tensors.items() if n != f"{MTP}enorm.weight"}) as store:
        assert not has(store, files.config())
    with (
        opened(folder / "dspark", tensors | {"mtp.0.main_proj.weight": tensors[f"{MTP}norm.weight"]}) as store,
        pytest.raises(UnsupportedError, match="DSpark"),
    ):
        has(store, files.config())


def check_memory(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """All of it is asked for before the first allocation; what fails on the way leaves nothing."""
    tensors = files.published(np.random.default_rng(11), target=False)
    with opened(folder, tensors) as store, pytest.MonkeyPatch.context() as patch:
        loader.mtp(store, files.config(), gpu)
        need = store.total_bytes()
        for name in [name for name in store.names() if store.is_loaded(name)]:
            gpu.free(store.remove(name).ptr)
        patch.setattr(gpu, "free_memory", lambda: need - 1)
        with pytest.raises(OutOfDeviceMemoryError):
            loader.mtp(store, files.config(), gpu)
        assert gpu.live_bytes() == 0
        patch.undo()
        store_load, calls = store.load, []

        def load(*args: Any, **named: Any) -> tuple[str, ...]:
            calls.append(args)
            if len(calls) > 1:
                raise ConfigError("test", "the second upload fails")
            return store_load(*args, **named)

        patch.setattr(store, "load", load)
        with pytest.raises(ConfigError, match="second upload"):
            loader.mtp(store, files.config(), gpu)
        assert (gpu.live_bytes(), store.total_bytes()) == (0, 0)


CHECKS = (
    check_published, check_sizes, check_names, check_stacks, check_formats, check_missing, check_other_tensors,
    check_wrong_tensors, check_target, check_presence, check_memory,
)  # fmt: skip
