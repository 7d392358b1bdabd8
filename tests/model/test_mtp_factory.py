# SPDX-License-Identifier: AGPL-3.0-only
"""Draft heads of a checkpoint in every quantisation: which one it gets, what it drafts with, what stays in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spark_py.model.checkpoint import Checkpoint, open_checkpoint
from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.levers import ModelLevers
from spark_py.model.speculative import SpeculativeDecoder
from spark_py.model.weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight
from spark_py.runtime.errors import ArgumentPointerError, UnsupportedError
from spark_py.runtime.gpu import GpuBackend
from tests.model.mtp_forms import decode
from tests.model.scripted import write_drafting_tiny
from tests.model.tiny import MOE, Array, Tiny

NVFP4, FP8, BF16 = MtpQuantization.NVFP4, MtpQuantization.FP8, MtpQuantization.BF16
EXPERTS = MOE | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 32}
"""Rows of weights that FP8 and NVFP4 can have, and experts of two widths."""
LEVERS = ModelLevers(mtp_max_seqs=1)
NEW_TOKENS = 24
BLOCK = 128


@pytest.fixture(params=["dense", "experts"])
def tiny(request: pytest.FixtureRequest, tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_drafting_tiny(tmp_path / "model", rng, **(EXPERTS if request.param == "experts" else {}))


@pytest.fixture
def sparse(tmp_path: Path, rng: np.random.Generator) -> Tiny:
    return write_drafting_tiny(tmp_path / "model", rng, **EXPERTS)


@contextmanager
def opened(gpu: GpuBackend, tiny: Tiny) -> Iterator[Checkpoint]:
    """The checkpoint; nothing stays on the device."""
    before = gpu.live_bytes()
    with open_checkpoint(tiny.folder, gpu, 64) as found:
        yield found
    assert gpu.live_bytes() == before


def make(model: Checkpoint, quant: MtpQuantization) -> MtpHead:
    head = model.proposer(LEVERS, quant)
    assert isinstance(head, MtpHead)
    return head


def written(model: Checkpoint, head: MtpHead | None) -> tuple[list[int], int]:
    """The text with a head and its accepted drafts."""
    decoder = SpeculativeDecoder(model.target, head, 2 if head else 0, (), LEVERS)
    found = decoder.generate([1, 2, 3], NEW_TOKENS)
    return found.tokens, found.stats.accepted


def in_blocks(tiny: Tiny, chosen: Callable[[str], bool]) -> dict[str, Array]:
    """Store the head's projections that are chosen as E4M3 with a scale a block; gives their values."""
    values = {}
    for name in [n for n, w in tiny.weights.items() if n.startswith("mtp.") and w.ndim == 2 and chosen(n)]:
        weight = tiny.weights[name].astype(np.float32)
        n, k = weight.shape
        scales = np.full((-(-n // BLOCK), -(-k // BLOCK)), np.abs(weight).max() / 448, np.float32)
        codes = (weight / scales[0, 0]).astype(ml_dtypes.float8_e4m3fn)
        tiny.weights[name], tiny.weights[f"{name}_scale_inv"] = codes, scales
        values[name] = codes.astype(np.float64) * scales[0, 0]
    tiny.save()
    return values


def test_every_quantisation_leaves_the_text_as_it_is(gpu: GpuBackend, tiny: Tiny) -> None:
    with opened(gpu, tiny) as model:
        text, _ = written(model, None)
        offered = model.proposer.quantizations()
        assert offered == ((BF16, FP8, NVFP4) if tiny.raw["num_experts"] else (BF16, FP8))
        for quant in offered:
            head = make(model, quant)
            assert head.quant is quant
            tokens, accepted = written(model, head)
            assert tokens == text
            assert accepted > 0


def test_the_lm_head_of_each(gpu: GpuBackend, sparse: Tiny) -> None:
    """The target's own, but for NVFP4: those have the same copy of it, without a transposed twin."""
    with opened(gpu, sparse) as model:
        bf16, fp8, nvfp4, again = (make(model, quant) for quant in (BF16, FP8, NVFP4, NVFP4))
        assert isinstance(bf16.lm_head, DenseWeight)
        assert fp8.lm_head is bf16.lm_head
        assert isinstance(nvfp4.lm_head, QuantizedWeight)
        assert again.lm_head is nvfp4.lm_head
        assert nvfp4.lm_head_nvfp4_t is None
        wanted = sparse.weights["lm_head.weight"].astype(np.float64)
        # 2 significant bits within a group of 16: a step is a sixth of the group's largest value at most.
        assert np.abs(decode(gpu, nvfp4.lm_head) - wanted).max() <= np.abs(wanted).max() / 6
        assert nvfp4.lm_head.weight not in (bf16.lm_head.weight, bf16.embed_tokens.weight)


def test_quantised_heads_keep_no_copy_in_bf16(gpu: GpuBackend, sparse: Tiny) -> None:
    """What a head in FP8 or NVFP4 takes is its quantised weights and what belongs to every head."""
    matrices = {n: w for n, w in sparse.weights.items() if n.startswith("mtp.") and w.ndim == 2 and "gate.w" not in n}
    size, rows = sum(w.size for w in matrices.values()), sum(len(w) for w in matrices.values())
    lm_head = sparse.weights["lm_head.weight"].size
    taken = {}
    with opened(gpu, sparse) as model:
        for quant in (BF16, FP8, NVFP4):
            before = gpu.live_bytes()
            head = make(model, quant)
            pool, scratch = head.kv_cache.total_bytes(), head.prefill_scratch
            taken[quant] = gpu.live_bytes() - before - pool
            assert (scratch is not None) == (quant is BF16)
            if scratch is not None:
                dims = head.h, head.nq, head.nkv, head.hd
                taken[quant] -= sum(scratch.sizes(512, *dims).values())
    # BF16, 2 bytes an element; FP8, 1 and an FP32 scale a row; NVFP4, 9/16.
    assert taken[BF16] - taken[FP8] == pytest.approx(2 * size - size - 4 * rows, abs=0.05 * size)
    assert taken[BF16] - taken[NVFP4] == pytest.approx(2 * size - (size + lm_head) * 9 / 16, abs=0.05 * size)


def test_a_head_after_a_quantised_one_has_its_tensors(gpu: GpuBackend, tiny: Tiny) -> None:
    with opened(gpu, tiny) as model:
        make(model, FP8)
        for quant in (BF16, FP8):
            head = make(model, quant)
            exact = tiny.weights["mtp.fc.weight"].astype(np.float64)
            error = np.abs(decode(gpu, head.fc) - exact).max()
            assert error <= (0 if quant is BF16 else np.abs(exact).max() / 16)


def test_block_scaled_fp8_is_taken_over(gpu: GpuBackend, tiny: Tiny) -> None:
    """By an FP8 head alone: beside it, one in BF16 has the same values, and NVFP4 is made of them."""
    values = in_blocks(tiny, lambda name: name != "mtp.fc.weight" and "gate.weight" not in name)
    name = "mtp.layers.0.self_attn.o_proj.weight"
    with opened(gpu, tiny) as model:
        text, _ = written(model, None)
        for quant in model.proposer.quantizations():
            head = make(model, quant)
            if quant is FP8:
                assert isinstance(head.fc, Fp8DenseWeight)
                assert isinstance(head.o_proj, Fp8Weight)
                np.testing.assert_array_equal(decode(gpu, head.o_proj), values[name])
                triple = head.dense_ffn_generic or head.moe_shared_generic
                assert triple is not None
                assert all(isinstance(weight, Fp8Weight) for weight in triple)
            elif quant is BF16:
                rounded = values[name].astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
                np.testing.assert_array_equal(decode(gpu, head.o_proj), rounded)
            assert written(model, head)[0] == text


def test_a_checkpoint_that_keeps_its_head_out_of_quantisation(
    gpu: GpuBackend, sparse: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    sparse.raw["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["mtp.fc"]}
    sparse.save()
    with opened(gpu, sparse) as model:
        assert model.proposer.quantizations() == (BF16,)
        assert not caplog.text
        assert make(model, NVFP4).quant is BF16
        assert "stays BF16, not nvfp4" in caplog.text


def test_a_dense_ffn_in_nvfp4_is_refused(gpu: GpuBackend, tmp_path: Path, rng: np.random.Generator) -> None:
    tiny = write_drafting_tiny(tmp_path / "model", rng)
    with opened(gpu, tiny) as model:
        with pytest.raises(UnsupportedError, match="NVFP4 mode is not supported for MTP heads with a dense FFN"):
            make(model, NVFP4)
        assert written(model, make(model, FP8))[0] == written(model, None)[0]


def test_what_was_freed_is_not_read(gpu: GpuBackend, sparse: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy freed too early is a fault that the backends see: here the router, which is not copied."""
    from spark_py.model import mtp_factory

    right = mtp_factory.free_copied

    def too_much(store: Any, weights: Any, gpu: GpuBackend) -> None:
        right(store, weights, gpu)
        gpu.free(store.remove("mtp.layers.0.mlp.gate.weight").ptr)

    monkeypatch.setattr(mtp_factory, "free_copied", too_much)
    with opened(gpu, sparse) as model, pytest.raises(ArgumentPointerError):
        written(model, make(model, FP8))
