# SPDX-License-Identifier: AGPL-3.0-only
"""Heads in every quantisation beside the FP64 head of the weights that they really have: what was quantised is read
back from the device and decoded here, by the formats' definitions and by nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from spark_py.model.config import ModelConfig
from spark_py.model.layers.mtp_head import HeadBody, MtpHead, MtpQuantization, new
from spark_py.model.layers.mtp_head.quantize import Quantizer
from spark_py.model.layers.mtp_head.types import ProjectionWeight
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, MtpWeights, QuantizedWeight
from spark_py.ops.quantize_nvfp4 import quantize_to_nvfp4
from spark_py.runtime.errors import FunctionNotFoundError
from spark_py.runtime.gpu import GpuBackend, KernelHandle
from tests.model.support import (
    BF16,
    E4M3,
    SPARSE,
    Array,
    Oracle,
    Rig,
    config,
    download,
    make_rig,
    random_weights,
    relative_l2,
    upload,
)  # fmt: skip

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
CLEAR_ID = 0.25
"""Logits are about 1 in size; the error of a single one is below a tenth of it, that of a difference below this."""
U8, F32 = np.dtype(np.uint8), np.dtype(np.float32)


@dataclass(frozen=True)
class Form:
    """One kind of head."""

    quant: MtpQuantization
    moe: bool = False
    nvfp4_lm_head: bool = False
    hidden: tuple[str, ...] = ()
    """Beginnings of the names of kernels that the set is made to lack."""

    def __str__(self) -> str:
        return "-".join(
            [self.quant.value, "moe" if self.moe else "dense"]
            + ["nvfp4 head"] * self.nvfp4_lm_head
            + [f"no {name}" for name in self.hidden]
        )


FUSED = ("moe_shared_expert_fused_bf16", "spark_moe_shared_expert_fused_fp8")
"""What the modules of fused experts are called. The engine's own set has none for FP8, and may lack that for BF16."""
FORMS = [
    Form(MtpQuantization.BF16),
    Form(MtpQuantization.BF16, nvfp4_lm_head=True),
    Form(MtpQuantization.BF16, moe=True),
    Form(MtpQuantization.BF16, moe=True, hidden=FUSED),
    Form(MtpQuantization.FP8),
    Form(MtpQuantization.FP8, nvfp4_lm_head=True),
    Form(MtpQuantization.FP8, moe=True),
    Form(MtpQuantization.FP8, moe=True, hidden=FUSED),
    Form(MtpQuantization.NVFP4, moe=True),
    Form(MtpQuantization.NVFP4, moe=True, nvfp4_lm_head=True),
]


class Recorder(Quantizer):
    """Keeps what it makes, by name. `made` belongs to the last one that was built."""

    made: ClassVar[dict[str, ProjectionWeight]] = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).made = {}

    def proj(self, name: str, *rest: Any) -> ProjectionWeight:
        self.made[name] = made = super().proj(name, *rest)
        return made


def decode(gpu: GpuBackend, weight: ProjectionWeight) -> Array:
    """A weight [n, k] in FP64, from its bytes on the device."""
    if isinstance(weight, DenseWeight):
        return download(gpu, weight.weight, weight.shape).astype(np.float64)
    if isinstance(weight, QuantizedWeight):
        n, k = weight.shape
        packed = download(gpu, weight.weight, (n, k // 2), U8)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(n, k)
        scales = download(gpu, weight.weight_scale, (n, k // 16), E4M3).astype(np.float64)
        return E2M1[codes] * np.repeat(scales, 16, axis=1) * float(np.float32(weight.weight_scale_2))
    codes = download(gpu, weight.weight, (weight.n, weight.k), E4M3).astype(np.float64)
    if isinstance(weight, Fp8DenseWeight):
        return codes * download(gpu, weight.row_scale, (weight.n, 1), F32)
    scales = download(gpu, weight.row_scale, (-(-weight.n // 128), -(-weight.k // 128)), F32).astype(np.float64)
    return codes * np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[: weight.n, : weight.k]


def to_nvfp4(gpu: GpuBackend, array: Array) -> QuantizedWeight:
    """A BF16 weight [n, k] in NVFP4, which the test owns."""
    source, (n, k) = upload(gpu, array), array.shape
    kernels = (gpu.kernel("quantize_nvfp4", name) for name in ("nvfp4_global_absmax", "quantize_bf16_to_nvfp4"))
    made = quantize_to_nvfp4(gpu, *kernels, source, n, k, gpu.default_stream())
    return QuantizedWeight(made.weight, made.weight_scale, made.weight_scale_2, shape=(n, k))


def to_blocks(gpu: GpuBackend, rng: np.random.Generator, array: Array) -> tuple[Fp8Weight, Array]:
    """Something like `array` in FP8 with random block scales, as a checkpoint would have it, and its values."""
    n, k = array.shape
    scales = rng.uniform(0.5, 2, (-(-n // 128), -(-k // 128))).astype(np.float32)
    whole = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)[:n, :k].astype(np.float64)
    codes = (array.astype(np.float64) / whole).astype(E4M3)
    return Fp8Weight(upload(gpu, codes), upload(gpu, scales), n, k), codes.astype(np.float64) * whole


def hide(monkeypatch: pytest.MonkeyPatch, gpu: GpuBackend, *modules: str, function: str = "") -> None:
    """Make the backend's kernel set lack every module whose name begins so, and every "module::function" that begins
    with `function`."""
    kernel, try_kernel, has = type(gpu).kernel, type(gpu).try_kernel, type(gpu).has_module

    def lacks(module: str, name: str) -> bool:
        return module.startswith(modules) or (bool(function) and f"{module}::{name}".startswith(function))

    def look_up(self: GpuBackend, module: str, name: str) -> KernelHandle:
        if lacks(module, name):
            raise FunctionNotFoundError(module, name, (), "this set")
        return kernel(self, module, name)

    def try_look_up(self: GpuBackend, module: str, name: str) -> KernelHandle:
        return KernelHandle(0) if lacks(module, name) else try_kernel(self, module, name)

    monkeypatch.setattr(type(gpu), "kernel", look_up)
    monkeypatch.setattr(type(gpu), "try_kernel", try_look_up)
    monkeypatch.setattr(type(gpu), "has_module", lambda self, m: not m.startswith(modules) and has(self, m))


def make_form(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    form: Form,
    *,
    levers: ModelLevers | None = None,
    head_class: type[MtpHead] = MtpHead,
    weights: MtpWeights | None = None,
    arrays: dict[str, Array] | None = None,
    body: HeadBody | None = None,
    made: ModelConfig | None = None,
    **changes: Any,
) -> tuple[Rig, dict[str, Array]]:
    """A head of that form, and in FP64 the weights that it has."""
    if form.hidden:
        hide(monkeypatch, gpu, *form.hidden)
    monkeypatch.setattr(new, "Quantizer", Recorder)
    changes = (SPARSE if form.moe else {}) | changes
    arrays = arrays or random_weights(rng, config(**changes), form.moe)
    lm_head = to_nvfp4(gpu, arrays["lm_head"]) if form.nvfp4_lm_head else None
    rig = make_rig(
        gpu, rng, arrays=arrays, quant=form.quant, lm_head=lm_head, levers=levers, head_class=head_class,
        weights=weights, body=body, made=made, **changes,
    )  # fmt: skip
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    exact |= {name: decode(gpu, weight) for name, weight in Recorder.made.items()}
    if lm_head is not None:
        exact["lm_head"] = decode(gpu, lm_head)
    return rig, exact


@dataclass
class Compared:
    """How far a head was from the FP64 head: relative L2 over all rows, and how many rows and ids were compared."""

    logits: float = 0.0
    hidden: float = 0.0
    keys: float = 0.0
    values: float = 0.0
    rows: int = 0
    ids: int = 0


def run(rig: Rig, rng: np.random.Generator, oracle: Oracle, proposes: int, drafts: int, clear: float) -> Compared:
    """Propose `drafts` tokens `proposes` times, all accepted, and hold every row against the oracle, which is given the
    head's own ids and hidden rows.

    Where the last expert chosen and the first that was not are closer than `clear`, the row says nothing and is left
    out; so is an id whose logit is not CLEAR_ID above the next.
    """
    head, state, found = rig.head, rig.state(), Compared()
    seen: list[tuple[int, Array, Array]] = []
    pairs: list[tuple[Array, Array, Array, Array]] = []
    step = type(head).forward_one

    def forward_one(*args: Any) -> int:
        picked = step(head, *args)
        seen.append((picked, rig.logits(), rig.hidden()))
        return picked

    head.forward_one = forward_one  # type: ignore[method-assign,assignment]
    position = 1
    for _ in range(proposes):
        token = int(rng.integers(0, rig.config.vocab_size))
        hidden: Array = (rng.standard_normal(rig.config.hidden_size) * 2).astype(BF16)
        seen.clear()
        ids = rig.propose(state, token, hidden, position, drafts)
        assert ids == [picked for picked, _, _ in seen]
        own = hidden.astype(np.float64)
        for j, (picked, logits, after) in enumerate(seen):
            wanted, wanted_hidden = oracle.step(token, own, position + j)
            assert picked == int(np.argmax(logits))
            if oracle.router_gap > clear:
                pairs.append((logits, wanted, after, wanted_hidden))
                second, best = np.partition(wanted, -2)[-2:]
                if best - second > CLEAR_ID:
                    found.ids += 1
                    assert picked == int(np.argmax(wanted)), f"id of draft {j}"
            token, own = picked, after
        rig.head.after_verify(drafts, state, rig.stream)
        position += drafts
    keys, values = rig.rows(state)
    assert len(keys) == proposes * drafts
    found.rows = len(pairs)
    if pairs:
        logits, wanted, after, wanted_hidden = (np.concatenate(each) for each in zip(*pairs, strict=True))
        found.logits, found.hidden = relative_l2(logits, wanted), relative_l2(after, wanted_hidden)
    found.keys, found.values = relative_l2(keys, np.stack(oracle.keys)), relative_l2(values, np.stack(oracle.values))
    return found
