# SPDX-License-Identifier: AGPL-3.0-only
"""MTP modules of every format and expert layout, bit for bit, and loaders that are wrong in one detail."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from spark_py.model import weight_loader
from spark_py.model.config import ModelConfig
from spark_py.model.weight_loader import head_plans, quantization, qwen3_next, upload
from spark_py.runtime import open_backend
from spark_py.runtime.errors import ConfigError, MissingWeightError, SparkError, UnsupportedError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.weights import WeightDtype, WeightTensor
from tests.model.dequant_support import oracle_bf16
from tests.model.mtp_loader_support import (
    CHECKS,
    EXPERTS,
    FORMATS,
    GATE_UP,
    MLP,
    Loader,
    assert_bits,
    assert_loaded,
    config,
    module,
    opened,
    store_weight,
)
from tests.model.support import RAW

FOLDER = Path(weight_loader.__file__).parent
REAL = Loader(upload, quantization, head_plans, qwen3_next)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check(check: Callable[[Loader, GpuBackend, Path], None], gpu: GpuBackend, tmp_path: Path) -> None:
    check(REAL, gpu, tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_projection_in_every_format(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, form: str) -> None:
    """fc, whose blocks of 128 have edges on both sides."""
    made = module(rng, "dense")
    fc = store_weight(rng, "mtp.fc.weight", 160, 320, form)
    del made.stored["mtp.fc.weight"]
    with opened(tmp_path, made.stored | fc.stored) as store:
        weights = weight_loader.load_mtp_weights(store, config(), gpu)
        assert_bits(gpu, weights.fc, fc.bits["mtp.fc.weight"], form)
        assert store.unread() == ()


def test_slices_belong_to_their_stack(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    """Zero-copy: the experts take no memory besides the stacks, and the store frees each stack once."""
    made = module(rng, "B")
    with opened(tmp_path, made.stored) as store:
        weights = weight_loader.load_mtp_weights(store, config(EXPERTS), gpu)
        assert gpu.live_bytes() == store.total_bytes() == sum(2 * bits.size for bits in made.bits.values())
        base = store.get(GATE_UP).ptr
        assert weights.experts[0].gate_proj.weight == base
        assert {base.offset(2 * 2 * e * 96 * 160) for e in range(EXPERTS)} == {
            expert.gate_proj.weight for expert in weights.experts
        }
    assert gpu.live_bytes() == 0


def test_f32_stacks_are_rounded(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    made = module(rng, "B")
    wide = rng.standard_normal((EXPERTS, 192, 160)).astype(np.float32)
    made.stored[GATE_UP] = wide, WeightDtype.F32
    made.bits[GATE_UP] = oracle_bf16(wide)
    with opened(tmp_path, made.stored) as store:
        assert_loaded(gpu, weight_loader.load_mtp_weights(store, config(EXPERTS), gpu), made, "B")


def test_quantised_stacks_are_refused(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    made = module(rng, "B")
    made.stored[GATE_UP] = np.ones((EXPERTS, 192, 160), np.uint8), WeightDtype.U8
    with opened(tmp_path, made.stored) as store, pytest.raises(UnsupportedError, match=rf"'{GATE_UP}' is U8"):
        weight_loader.load_mtp_weights(store, config(EXPERTS), gpu)
    assert gpu.live_bytes() == 0


def test_tensors_that_are_on_the_device_alone(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    """A caller's own BF16 tensor is taken; one of another form is refused."""
    made = module(rng, "dense")
    del made.stored["mtp.fc.weight"]
    with opened(tmp_path, made.stored) as store:
        ptr = gpu.alloc(2 * 160 * 320)
        store.insert("mtp.fc.weight", WeightTensor(ptr, (160, 320), WeightDtype.BF16))
        fc = weight_loader.load_mtp_weights(store, config(), gpu).fc
        assert (fc.weight, fc.shape) == (ptr, (160, 320))  # type: ignore[union-attr]
        store.insert("mtp.fc.weight", WeightTensor(ptr, (160, 640), WeightDtype.U8))
        with pytest.raises(UnsupportedError, match=r"'mtp\.fc\.weight' is on the device as U8"):
            weight_loader.load_mtp_weights(store, config(), gpu)


def test_an_error_in_the_middle_leaves_nothing(
    gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = module(rng, "A", lambda i: FORMATS[i % len(FORMATS)])
    with opened(tmp_path, made.stored) as store:
        copies = 0
        copy = gpu.copy_h2d

        def failing(source: object, target: DevicePtr) -> None:
            nonlocal copies
            copies += 1
            if copies == 4:
                raise UnsupportedError("no more")
            copy(source, target)  # type: ignore[arg-type]

        monkeypatch.setattr(gpu, "copy_h2d", failing)
        with pytest.raises(UnsupportedError, match="no more"):
            weight_loader.load_mtp_weights(store, config(EXPERTS), gpu)
        assert (gpu.live_bytes(), store.total_bytes()) == (0, 0)
        monkeypatch.undo()
        assert_loaded(gpu, weight_loader.load_mtp_weights(store, config(EXPERTS), gpu), made, "A")


def test_experts_of_a_missing_layer_are_listed(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    made = module(rng, "A")
    tensors = {name: t for name, t in made.stored.items() if f"{MLP}experts.1." not in name}
    with opened(tmp_path, tensors) as store, pytest.raises(MissingWeightError) as caught:
        weight_loader.load_mtp_weights(store, config(EXPERTS), gpu)
    assert caught.value.missing == tuple(
        f"{MLP}experts.1.{part}.weight" for part in ("down_proj", "gate_proj", "up_proj")
    )


# The configuration's lists.


@pytest.mark.parametrize(
    "name", ["ignore", "ignored_layers", "ignore_modules", "modules_to_not_convert", "exclude_modules"]
)
def test_lists_of_ignored_modules(name: str) -> None:
    listed = {"quant_method": "fp8", name: ["lm_head", "re:mtp.*", "lm_head"]}
    assert ModelConfig.from_dict(RAW | {"quantization_config": listed}).ignore_modules == ("lm_head", "re:mtp.*")
    text = {"text_config": RAW, "model_type": "qwen3_next", "quantization_config": listed}
    assert ModelConfig.from_dict(text).ignore_modules == ("lm_head", "re:mtp.*")
    assert ModelConfig.from_dict(RAW | {"quantization_config": {name: None}}).ignore_modules == ()
    for bad in ("mtp", [3], [""]):
        with pytest.raises(ConfigError, match=f"quantization_config.{name}"):
            ModelConfig.from_dict(RAW | {"quantization_config": {name: bad}})


def test_lists_of_several_names_are_joined() -> None:
    lists = {"ignore": ["a"], "exclude_modules": ["b", "a"]}
    assert ModelConfig.from_dict(RAW | {"quantization_config": lists}).ignore_modules == ("a", "b")


# Mutants.

MUTANTS: dict[str, tuple[str, str, str]] = {
    "up rows before gate rows": (
        "qwen3_next",
        "gate = gate_up.ptr.offset(2 * e * size)",
        "gate = gate_up.ptr.offset(2 * e * size + size - 2 * size * (e > 0))",
    ),
    "experts of a stack one projection apart": ("qwen3_next", "offset(2 * e * size)", "offset(e * size)"),
    "the first expert's down projection for all": ("qwen3_next", "down.ptr.offset(e * size)", "down.ptr"),
    "dense wherever a dense tensor is": (
        "qwen3_next", "if names.ROUTER in store:", "if names.ROUTER in store and not in_store(store, names.DENSE):"
    ),
    "dense by the configuration": (
        "qwen3_next", "return in_store(store, names.DENSE) or config", "return config"
    ),
    "a missing router is a dense head": (
        "qwen3_next", "in_store(store, names.DENSE) or config.num_experts == 0", "True"
    ),
    "one stack is enough": ("qwen3_next", "not dense and all(", "not dense and any("),
    "stacks only where no expert is by itself": (
        "qwen3_next",
        "all(name in store for name in names.STACKED)",
        "all(n in store for n in names.STACKED) and f'{names.MLP}experts.0.up_proj.weight' not in store",
    ),
    "scales that nothing applied": ("qwen3_next", "    check_scales_applied(store, accounted, _PREFIX)\n", ""),
    "each expert in a format of its own": (
        "qwen3_next", "[] if stacked else [every]", "[[n for n, _ in e.values()] for e in experts]"
    ),
    "router and gates in any format": ("head_plans", "if plain and not store.is_loaded(name):", "if False:"),
    "ignore_modules not looked at": ("head_plans", "store, name, config.ignore_modules)", "store, name)"),
    "any shape": ("head_plans", "if plan.shape != shape:", "if False:"),
    "FP8 always stays FP8": ("qwen3_next", "if native_fp8:", "if True:"),
    "row scales taken for block scales": (
        "upload", "return store.info(plan.scale).shape in fp8_scale_shapes(n, k)[Fp8Scales.BLOCK]", "return True"
    ),
    "native scales not widened": ("upload", "= read_scale(store, plan), _", "= store.read(plan.scale), _"),
    "a failed upload keeps what it has": ("upload", "free_quietly(gpu, store.remove(name).ptr)", "pass"),
    "memory of dequantised weights not asked for": ("upload", "reserve_bytes=need + reserve_bytes, ", ""),
    "forced by fc alone": ("quantization", ', f"{LAYER}self_attn.q_proj.weight")', ",)"),
    "forced by q_proj alone": ("quantization", '("mtp.fc.weight", f"', '(f"'),
    "the first entry decides": ("quantization", "config.ignore_modules)", "config.ignore_modules[:1])"),
}  # fmt: skip


def build(changed: str, old: str, new: str) -> Loader:
    """The modules, made anew from source so that each imports those before it, one of them edited."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in Loader._fields:
            source = (FOLDER / f"{name}.py").read_text()
            if name == changed:
                assert source.count(old) == 1, f"the mutant's place {old!r} is {source.count(old)} times in {name}.py"
                source = source.replace(old, new)
            full = f"{weight_loader.__name__}.{name}"
            copy = ModuleType(full)
            copy.__package__ = weight_loader.__name__
            patch.setitem(sys.modules, full, copy)
            exec(compile(source, f"{name} (mutant)", "exec"), copy.__dict__)
            made.append(copy)
    return Loader(*made)


def run_checks(loader: Loader, folder: Path) -> None:
    with open_backend("host") as gpu:
        for i, check in enumerate(CHECKS):
            (folder / str(i)).mkdir()
            check(loader, gpu, folder / str(i))
        gpu.sweep_unreleased()


@pytest.mark.host_only("what a loader does with files does not depend on the backend")
def test_unchanged_source_passes(tmp_path: Path) -> None:
    run_checks(build("", "", ""), tmp_path)


@pytest.mark.host_only("what a loader does with files does not depend on the backend")
@pytest.mark.deep
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    loader = build(*MUTANTS[name])
    with pytest.raises((AssertionError, SparkError, pytest.fail.Exception)):
        run_checks(loader, tmp_path)
