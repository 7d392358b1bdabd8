# SPDX-License-Identifier: AGPL-3.0-only
"""MTP modules in files, in every stored format and expert layout, and the checks that tests and mutants share.

What a loaded tensor must hold is worked out element by element (`dequant_support`). Dimensions are such that blocks of
128 have edges on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layers.mtp_head import MtpQuantization
from spark_py.model.weight_map import DenseExpertWeight, DenseWeight, Fp8ExpertWeight, Fp8Weight, MtpWeights
from spark_py.runtime.errors import (
    IgnoredModuleError,
    InvalidArgumentError,
    MissingScaleError,
    MissingWeightError,
    OutOfDeviceMemoryError,
    ScaleValueError,
    SparkError,
    UnreadScaleError,
    UnsupportedError,
)
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.weights import WeightDtype, WeightStore
from tests.model.dequant_support import (
    BF16,
    E4M3,
    E8M0,
    Array,
    oracle_bf16,
    oracle_fp4,
    oracle_fp8,
    random_e4m3,
    random_packed,
    random_scale,
    scale_values,
)
from tests.model.support import config as small_config
from tests.model.support import download
from tests.runtime.weights_support import write

D = WeightDtype
Tensors = dict[str, tuple[Array, WeightDtype]]
H, INTER, EXPERT_INTER, SHARED_INTER, EXPERTS = 160, 288, 96, 192, 3
MLP, ATTENTION = "mtp.layers.0.mlp.", "mtp.layers.0.self_attn."
ROUTER, SHARED_GATE = MLP + "gate.weight", MLP + "shared_expert_gate.weight"
GATE_UP, DOWN = MLP + "experts.gate_up_proj", MLP + "experts.down_proj"
PARTS = ("gate_proj", "up_proj", "down_proj")
FP8_BLOCK = ("block F32", "block BF16", "block E8M0")
FORMATS = ("BF16", "F32", *FP8_BLOCK, "row", "tensor", "NVFP4", "NVFP4 packed", "MXFP4")
_SCALE_DTYPES = {"F32": np.dtype(np.float32), "BF16": BF16, "E8M0": E8M0}


class Loader(NamedTuple):
    """The modules under test: the real ones, or a mutant and what is built on it."""

    upload: ModuleType
    quantization: ModuleType
    head_plans: ModuleType
    qwen3_next: ModuleType


class Module(NamedTuple):
    """An MTP module's stored tensors, and by name the BF16 bits that each weight must become."""

    stored: Tensors
    bits: dict[str, Array]


def config(experts: int = 0, **changes: Any) -> ModelConfig:
    sparse = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_INTER, "mlp_only_layers": []}
    sparse |= {"num_experts": experts, "shared_expert_intermediate_size": SHARED_INTER}
    base = {"hidden_size": H, "intermediate_size": INTER} | (sparse if experts else {})
    return small_config(**(base | changes))


def store_weight(rng: np.random.Generator, name: str, n: int, k: int, form: str) -> Module:
    """A projection [n, k] in one of FORMATS. Scales are no powers of two, save E8M0 ones."""
    stem, spread = name.removesuffix(".weight"), 3
    if form in ("BF16", "F32"):
        wide = rng.standard_normal((n, k)).astype(np.float32)
        array = wide.astype(BF16) if form == "BF16" else wide
        return Module({name: (array, D(form))}, {name: oracle_bf16(array.astype(np.float32))})
    if form in ("NVFP4", "NVFP4 packed"):
        packed, scale = random_packed(rng, n, k), random_scale(rng, E4M3, n, k // 16)
        divisor = np.float32(rng.uniform(2000, 4000))
        multiplier = np.float32(1) / divisor
        bits = oracle_bf16(oracle_fp4(packed, scale, 16, float(multiplier)))
        scales: Tensors = {f"{stem}.weight_scale": (scale, D.F8_E4M3)}
        if form == "NVFP4":
            scales[f"{stem}.weight_scale_2"] = np.array(multiplier), D.F32
            return Module({name: (packed, D.U8)} | scales, {name: bits})
        scales[f"{stem}.weight_global_scale"] = np.array([divisor]), D.F32
        return Module({f"{name}_packed": (packed, D.U8)} | scales, {name: bits})
    if form == "MXFP4":
        packed, scale = random_packed(rng, n, k), random_scale(rng, E8M0, n, k // 32, spread=spread)
        stored: Tensors = {name: (packed, D.U8), f"{stem}.weight_scale": (scale, D.F8_E8M0)}
        return Module(stored, {name: oracle_bf16(oracle_fp4(packed, scale, 32))})
    kind, _, dtype = form.partition(" ")
    weight = random_e4m3(rng, n, k)
    shape = {"block": (-(-n // 128), -(-k // 128)), "row": (n, 1), "tensor": ()}[kind]
    scale = random_scale(rng, _SCALE_DTYPES[dtype or "F32"], *shape, spread=spread)
    named = f"{stem}.weight_scale_inv" if kind == "block" else f"{stem}.weight_scale"
    stored = {name: (weight, D.F8_E4M3), named: (scale, D.F8_E8M0 if dtype == "E8M0" else D(dtype or "F32"))}
    return Module(stored, {name: oracle_bf16(oracle_fp8(weight, scale))})


def shapes(c: ModelConfig, ffn: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of a module whose FFN is "dense", has experts of their own ("A") or stacks ("B")."""
    q, kv, hd = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.head_dim
    found: dict[str, tuple[int, ...]] = {
        "mtp.pre_fc_norm_embedding.weight": (H,),
        "mtp.pre_fc_norm_hidden.weight": (H,),
        "mtp.norm.weight": (H,),
        "mtp.fc.weight": (H, 2 * H),
        "mtp.layers.0.input_layernorm.weight": (H,),
        "mtp.layers.0.post_attention_layernorm.weight": (H,),
        ATTENTION + "q_norm.weight": (hd,),
        ATTENTION + "k_norm.weight": (hd,),
        ATTENTION + "q_proj.weight": (2 * q, H),
        ATTENTION + "k_proj.weight": (kv, H),
        ATTENTION + "v_proj.weight": (kv, H),
        ATTENTION + "o_proj.weight": (H, q),
    }

    def triple(prefix: str, inter: int) -> dict[str, tuple[int, ...]]:
        sides = ((inter, H), (inter, H), (H, inter))
        return {f"{prefix}{part}.weight": side for part, side in zip(PARTS, sides, strict=True)}

    if ffn == "dense":
        return found | triple(MLP, INTER)
    found |= {ROUTER: (EXPERTS, H), SHARED_GATE: (1, H)} | triple(MLP + "shared_expert.", SHARED_INTER)
    if ffn == "B":
        return found | {GATE_UP: (EXPERTS, 2 * EXPERT_INTER, H), DOWN: (EXPERTS, H, EXPERT_INTER)}
    for e in range(EXPERTS):
        found |= triple(f"{MLP}experts.{e}.", EXPERT_INTER)
    return found


def module(
    rng: np.random.Generator, ffn: str, forms: Mapping[str, str] | Callable[[int], str] = lambda i: "BF16"
) -> Module:
    """A random module. `forms` says the format of a projection, by name (BF16 where it has none) or by its number."""
    stored: Tensors = {}
    bits: dict[str, Array] = {}
    projections = 0
    for name, shape in shapes(config(0 if ffn == "dense" else EXPERTS), ffn).items():
        if len(shape) != 2 or name in (ROUTER, SHARED_GATE):
            array = rng.standard_normal(shape).astype(BF16)
            stored[name], bits[name] = (array, D.BF16), array.view(np.uint16)
            continue
        form = forms(projections) if callable(forms) else forms.get(name, "BF16")
        made = store_weight(rng, name, *shape, form)
        stored |= made.stored
        bits |= made.bits
        projections += 1
    return Module(stored, bits)


def opened(folder: Path, tensors: Tensors) -> WeightStore:
    folder.mkdir(exist_ok=True)
    return WeightStore.open(write(folder / "model.safetensors", dict(tensors)))


def bits_of(gpu: GpuBackend, weight: DenseWeight) -> Array:
    return download(gpu, weight.weight, weight.shape, np.dtype(np.uint16))


def assert_bits(gpu: GpuBackend, weight: Any, expected: Array, name: str) -> None:
    assert isinstance(weight, DenseWeight), name
    assert weight.shape == expected.shape, name
    np.testing.assert_array_equal(bits_of(gpu, weight), expected, name)


def assert_loaded(gpu: GpuBackend, weights: MtpWeights, made: Module, ffn: str) -> None:
    """Every field has the bits of its tensor, in BF16."""
    for field, name in {
        "fc": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
        "pre_fc_norm_embedding": "mtp.pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden": "mtp.pre_fc_norm_hidden.weight",
        "input_layernorm": "mtp.layers.0.input_layernorm.weight",
        "post_attn_layernorm": "mtp.layers.0.post_attention_layernorm.weight",
        **{part: f"{ATTENTION}{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
        **({} if ffn == "dense" else {"moe_gate": ROUTER, "shared_expert_gate": SHARED_GATE}),
    }.items():
        assert_bits(gpu, getattr(weights, field), made.bits[name], name)

    def same(expert: Any, prefix: str) -> None:
        assert isinstance(expert, DenseExpertWeight)
        for part in PARTS:
            assert_bits(gpu, getattr(expert, part), made.bits[f"{prefix}{part}.weight"], prefix + part)

    if ffn == "dense":
        same(weights.dense_ffn, MLP)
        assert (weights.moe_gate, weights.shared_expert, weights.shared_expert_gate) == (None, None, None)
        assert weights.experts == ()
        return
    assert weights.dense_ffn is None
    same(weights.shared_expert, MLP + "shared_expert.")
    assert len(weights.experts) == EXPERTS
    for e, expert in enumerate(weights.experts):
        if ffn == "A":
            same(expert, f"{MLP}experts.{e}.")
            continue
        gate_up, down = made.bits[GATE_UP][e], made.bits[DOWN][e]
        for part, expected in zip(PARTS, (gate_up[:EXPERT_INTER], gate_up[EXPERT_INTER:], down), strict=True):
            assert_bits(gpu, getattr(expert, part), expected, f"expert {e} {part}")


def refused(
    loader: Loader, gpu: GpuBackend, folder: Path, tensors: Tensors, c: ModelConfig, error: type[SparkError], *told: str
) -> None:
    """The error is of exactly this type and names what is wrong, and nothing is left on the device."""
    before = gpu.live_bytes()
    with opened(folder, tensors) as store:
        with pytest.raises(error) as caught:
            loader.qwen3_next.load_mtp_weights(store, c, gpu)
        assert type(caught.value) is error
        for word in told:
            assert word in str(caught.value)
        assert gpu.live_bytes() == before
        assert store.total_bytes() == 0


# Checks: each of them holds for the package, and every mutant fails one.


def check_formats(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    rng = np.random.default_rng(21)
    load = loader.qwen3_next.load_mtp_weights
    for ffn in ("dense", "A", "B"):
        made = module(rng, ffn, lambda i: FORMATS[(i + 2) % len(FORMATS)])
        with opened(folder / ffn, made.stored) as store:
            c = config(0 if ffn == "dense" else EXPERTS)
            weights = load(store, c, gpu)
            assert_loaded(gpu, weights, made, ffn)
            assert store.unread() == ()
            before = gpu.live_bytes()
            assert load(store, c, gpu) == weights  # what is there stays as it is
            assert gpu.live_bytes() == before
        assert gpu.live_bytes() == 0


def check_choice_of_ffn(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """By the tensors, not by the configuration, save where no tensor says anything."""
    rng = np.random.default_rng(22)
    dense, split, stacked = module(rng, "dense"), module(rng, "A"), module(rng, "B")
    load = loader.qwen3_next.load_mtp_weights
    for number, (stored, made, ffn) in enumerate(
        (
            (dense.stored, dense, "dense"),
            (dense.stored | split.stored, split, "A"),
            (split.stored | stacked.stored, stacked, "B"),
        )
    ):
        with opened(folder / str(number), stored) as store:
            assert_loaded(gpu, load(store, config(EXPERTS), gpu), made, ffn)
    for half in (GATE_UP, DOWN):
        tensors = {name: t for name, t in stacked.stored.items() if name not in (GATE_UP, DOWN) or name == half}
        refused(loader, gpu, folder, tensors, config(EXPERTS), MissingWeightError, f"{MLP}experts.0.gate_proj", half)
    bare = {name: t for name, t in split.stored.items() if name != ROUTER}
    refused(loader, gpu, folder, bare, config(EXPERTS), MissingWeightError, ROUTER)
    refused(loader, gpu, folder, split.stored, config(), UnsupportedError, ROUTER)


def check_native_fp8(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    """Block-scaled E4M3 stays as it is: alone, or a whole FFN; the rest is BF16."""
    rng = np.random.default_rng(23)
    load = loader.qwen3_next.load_mtp_weights

    def same(weight: Any, made: Module, name: str) -> None:
        assert isinstance(weight, Fp8Weight), name
        codes, scale = made.stored[name][0], made.stored[name.replace(".weight", ".weight_scale_inv")][0]
        assert (weight.n, weight.k) == codes.shape
        got = download(gpu, weight.weight, codes.shape, np.dtype(np.uint8))
        np.testing.assert_array_equal(got, codes.view(np.uint8))
        np.testing.assert_array_equal(
            download(gpu, weight.row_scale, scale.shape, np.dtype(np.float32)), scale_values(scale)
        )

    def expert(found: Any, made: Module, prefix: str) -> None:
        assert isinstance(found, Fp8ExpertWeight)
        for part in PARTS:
            same(getattr(found, part), made, f"{prefix}{part}.weight")

    for ffn in ("dense", "A"):
        made = module(rng, ffn, lambda i: FP8_BLOCK[i % 3])
        with opened(folder / ffn, made.stored) as store:
            c = config(0 if ffn == "dense" else EXPERTS)
            weights = load(store, c, gpu, native_fp8=True)
            for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
                same(getattr(weights, part), made, f"{ATTENTION}{part}.weight")
            same(weights.fc, made, "mtp.fc.weight")
            assert isinstance(weights.norm, DenseWeight)
            if ffn == "dense":
                expert(weights.dense_ffn, made, MLP)
            else:
                expert(weights.shared_expert, made, MLP + "shared_expert.")
                for e, routed in enumerate(weights.experts):
                    expert(routed, made, f"{MLP}experts.{e}.")
                assert_bits(gpu, weights.moe_gate, made.bits[ROUTER], ROUTER)
            assert load(store, c, gpu, native_fp8=True) == weights
            with pytest.raises(UnsupportedError, match="on the device as F8_E4M3"):
                load(store, c, gpu)
        assert gpu.live_bytes() == 0
        # One that is not block-scaled: the FFN is BF16 as a whole, a projection by itself.
        other = f"{MLP}up_proj.weight" if ffn == "dense" else f"{MLP}experts.2.down_proj.weight"
        names = [name for name, shape in shapes(config(EXPERTS), ffn).items() if len(shape) == 2]
        made = module(rng, ffn, dict.fromkeys(names, "block BF16") | {other: "row", f"{ATTENTION}k_proj.weight": "row"})
        with opened(folder / (ffn + " mixed"), made.stored) as store:
            weights = load(store, c, gpu, native_fp8=True)
            same(weights.q_proj, made, f"{ATTENTION}q_proj.weight")
            assert_bits(gpu, weights.k_proj, made.bits[f"{ATTENTION}k_proj.weight"], "k_proj")
            for found in (weights.dense_ffn,) if ffn == "dense" else (weights.shared_expert, *weights.experts):
                assert isinstance(found, DenseExpertWeight)


def check_refusals(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    rng = np.random.default_rng(24)
    up, last = f"{MLP}experts.1.up_proj.weight", f"{MLP}experts.2.down_proj.weight"
    c = config(EXPERTS)
    made = module(rng, "A", {up: "block BF16", last: "NVFP4 packed"})

    def check(change: Tensors, error: type[SparkError], *told: str, c: ModelConfig = c, without: str = "") -> None:
        tensors = {name: t for name, t in made.stored.items() if name != without} | change
        refused(loader, gpu, folder, tensors, c, error, *told)

    scale, dtype = made.stored[up.replace(".weight", ".weight_scale_inv")]
    bad = scale.copy()
    bad[0, 1] = np.nan
    check({}, MissingScaleError, f"'{up}'", without=up.replace(".weight", ".weight_scale_inv"))
    check({}, MissingScaleError, f"'{last}_packed'", without=last.replace(".weight", ".weight_scale"))
    check({up.replace(".weight", ".weight_scale_inv"): (bad, dtype)}, ScaleValueError, f"'{up}'")
    bf16 = np.ones((EXPERT_INTER, H), BF16), D.BF16
    check({up: bf16}, UnreadScaleError, up.replace(".weight", ".weight_scale_inv"))
    packed = np.ones((EXPERT_INTER, H // 2), np.uint8), D.U8
    check({f"{MLP}experts.0.up_proj.weight": packed}, MissingScaleError, f"'{MLP}experts.0.up_proj.weight'")
    for name, shape in ((ROUTER, (EXPERTS, H)), (SHARED_GATE, (1, H)), ("mtp.norm.weight", (H,))):
        quantised: Tensors = {name: (random_e4m3(rng, *shape), D.F8_E4M3)}
        quantised[name.replace(".weight", ".weight_scale")] = np.ones((), np.float32), D.F32
        check(quantised, UnsupportedError, f"'{name}'", "F8_E4M3")
    check({up.replace("up", "gate"): (np.ones((H, EXPERT_INTER), BF16), D.BF16)}, InvalidArgumentError, "gate_proj")
    check({}, IgnoredModuleError, f"'{up}'", "'mtp'", c=config(EXPERTS, quantization_config={"ignore": ["mtp"]}))
    # Memory for what is made on the host is asked for before the first tensor is uploaded.
    plain = sum(2 * int(np.prod(array.shape)) for array, kind in made.stored.values() if kind is D.BF16 and array.ndim)
    plain -= 2 * int(scale.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "free_memory", lambda: plain + 100)
        check({}, OutOfDeviceMemoryError, "nothing was uploaded")


def check_forced(loader: Loader, gpu: GpuBackend, folder: Path) -> None:
    forced, q = loader.quantization.forced_quantization, MtpQuantization
    for entry, covered in {
        "mtp.fc": True, "mtp.layers.0.self_attn.q_proj": True, "mtp": True, "re:.*self_attn": True, "mtp*": True,
        "lm_head": False, "mtp.layers.0.mlp": False, "mtp.layers.0.self_attn.k_proj": False, "mtp.f": False,
    }.items():  # fmt: skip
        c = config(quantization_config={"modules_to_not_convert": ["lm_head", entry]})
        for requested in q:
            assert forced(c, requested) is (q.BF16 if covered else requested)
    assert forced(config(), q.NVFP4) is q.NVFP4


CHECKS: tuple[Callable[[Loader, GpuBackend, Path], None], ...] = (
    check_forced,
    check_refusals,
    check_choice_of_ffn,
    check_native_fp8,
    check_formats,
)
