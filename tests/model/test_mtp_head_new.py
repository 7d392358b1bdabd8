# SPDX-License-Identifier: AGPL-3.0-only
"""Construction of MtpHead: what it refuses, the size of its vocabulary and pool, its kernels, the end of its life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.layers.mtp_head.new import mtp_num_blocks
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight, QuantizedWeight
from spark_py.runtime.errors import InvalidArgumentError, ModuleNotFoundInSetError, UnsupportedError
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from tests.model.support import BF16, a_hidden, config, dense, download, make_rig, mtp_weights, random_weights

# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(("asked", "vocab"), [(0, 203), (500, 203), (203, 203), (100, 100), (1, 1)])
def test_size_of_the_draft_vocabulary(gpu: GpuBackend, rng: np.random.Generator, asked: int, vocab: int) -> None:
    rig = make_rig(gpu, rng, mtp_vocab_size=asked)
    assert rig.head.draft_vocab == vocab
    gpu.memset(rig.ctx.buffers.logits(), 0xFF, 2 * 203)
    picked = rig.propose(rig.state(), 3, a_hidden(rig, rng), 4, 1)[0]
    assert picked == int(np.argmax(rig.logits()))
    beyond = download(gpu, rig.ctx.buffers.logits(), (203,), np.dtype(np.uint16))[vocab:]
    assert (beyond == 0xFFFF).all(), "logits beyond the draft vocabulary are not computed"


@pytest.mark.parametrize(("embed", "head", "vocab"), [(203, 320, 203), (190, 320, 190), (320, 190, 190)])
def test_padded_tables(gpu: GpuBackend, rng: np.random.Generator, embed: int, head: int, vocab: int) -> None:
    """The largest logits of all are in the rows behind the vocabulary."""
    arrays = random_weights(rng, config())
    for name, rows in (("embed_tokens", embed), ("lm_head", head)):
        table = rng.standard_normal((rows, 64)).astype(BF16)
        table[vocab:] = 1000.0
        table[vocab + 1 :: 2] = -1000.0
        arrays[name] = table
    rig = make_rig(gpu, rng, arrays=arrays, vocab_size=300)
    assert rig.head.draft_vocab == min(vocab, 300)
    hidden = a_hidden(rig, rng)
    ids = rig.propose(rig.state(), vocab - 1, hidden, 4, 3)
    assert all(0 <= token < vocab for token in ids)
    with pytest.raises(InvalidArgumentError, match="last_token"):
        rig.propose(rig.state(), embed, hidden, 4, 1)


def test_a_negative_vocabulary_is_refused(gpu: GpuBackend, rng: np.random.Generator) -> None:
    with pytest.raises(InvalidArgumentError, match="mtp_vocab_size is -1"):
        make_rig(gpu, rng, mtp_vocab_size=-1)


@pytest.mark.parametrize(
    ("max_seq", "seqs", "main", "blocks"),
    [
        (16384, 16, 15203, 15203), (16384, 8, 15203, 8200), (32768, 8, 8000, 8000), (131072, 8, 20000, 20000),
        (131072, 1, 20000, 8193), (131072, 32, 6000, 8193), (1, 1, 0, 1), (15, 3, 100, 3), (16, 3, 100, 6),
    ],
)  # fmt: skip
def test_blocks_of_the_pool(max_seq: int, seqs: int, main: int, blocks: int) -> None:
    assert mtp_num_blocks(max_seq, seqs, main) == blocks


# ---------------------------------------------------------------- construction


def construct(gpu: GpuBackend, rng: np.random.Generator, **changes: Any) -> MtpHead:
    c = config(**changes.pop("config", {}))
    arrays = random_weights(rng, config()) | changes.pop("arrays", {})
    args: dict[str, Any] = {
        "weights": mtp_weights(gpu, arrays),
        "embed_tokens": dense(gpu, arrays["embed_tokens"]),
        "lm_head": dense(gpu, arrays["lm_head"]),
        "lm_head_nvfp4_t": None,
        "config": c,
        "gpu": gpu,
        "quant": MtpQuantization.BF16,
        "mtp_vocab_size": 0,
        "max_seq_len": 64,
        "main_kv_blocks": 0,
        "levers": ModelLevers(),
    }
    change = changes.pop("change", lambda a: {})
    args |= change(args) | changes
    before = gpu.live_bytes()
    try:
        return MtpHead(**args)
    except BaseException:
        assert gpu.live_bytes() == before, "nothing stays allocated after an error"
        raise


NVFP4 = QuantizedWeight(DevicePtr(4096), DevicePtr(8192), 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant": MtpQuantization.NVFP4}, "an MTP head in nvfp4"),
        ({"quant": MtpQuantization.FP8}, "an MTP head in fp8"),
        ({"lm_head": NVFP4}, "NVFP4 LM head"),
        ({"lm_head_nvfp4_t": (NVFP4, 256)}, "NVFP4 LM head"),
        ({"change": lambda a: {"weights": replace(a["weights"], dense_ffn=None)}}, "experts"),
        ({"config": {"attn_output_gate": False}}, "gate"),
    ],
)
def test_what_is_not_offered(gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        construct(gpu, rng, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrays": {"fc": np.zeros((64, 64), BF16)}}, r"mtp fc is \(64, 64\): \(64, 128\)"),
        ({"arrays": {"q_norm": np.zeros(64, BF16)}}, r"mtp q_norm is \(64,\): \(32,\)"),
        ({"arrays": {"down_proj": np.zeros((96, 64), BF16)}}, "mtp down_proj"),
        ({"arrays": {"embed_tokens": np.zeros((203, 32), BF16)}}, "embed_tokens"),
        ({"lm_head": DenseWeight(DevicePtr.NULL)}, "lm_head"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"main_kv_blocks": -1}, "main_kv_blocks is -1"),
        ({"config": {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}}, "head_dim is 16"),
        ({"config": {"hidden_size": 60}}, "hidden_size is 60"),
    ],
)
def test_what_does_not_fit(gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        construct(gpu, rng, **changes)


def test_a_missing_kernel_is_named(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(gpu).kernel

    def kernel(self: GpuBackend, module: str, function: str) -> Any:
        if module == "rope":
            raise ModuleNotFoundInSetError(module, (), "this set")
        return real(self, module, function)

    monkeypatch.setattr(type(gpu), "kernel", kernel)
    with pytest.raises(ModuleNotFoundInSetError, match="no module 'rope'"):
        construct(gpu, rng)


def test_kernels_that_a_bf16_head_does_not_run_are_not_asked_for(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    for name in ("kernel", "try_kernel"):
        real = getattr(type(gpu), name)

        def look_up(self: GpuBackend, module: str, function: str, real: Any = real) -> Any:
            asked.add(f"{module}::{function}")
            return real(self, module, function)

        monkeypatch.setattr(type(gpu), name, look_up)
    construct(gpu, rng)
    assert asked == {
        "norm::rms_norm", "norm::residual_add_rms_norm", "rope::rope_forward",
        "reshape_and_cache::reshape_and_cache_flash", "paged_decode::paged_decode_attn",
        "residual_add::bf16_residual_add", "residual_add::sigmoid_gate_mul", "residual_add::bf16_concat",
        "argmax::argmax_bf16", "embed_from_argmax::embed_from_argmax", "gemv::dense_gemv_bf16",
        "ssm_preprocess::deinterleave_qg", "moe_silu_mul::moe_silu_mul", "gemm::dense_gemm_bf16",
        "dense_gemv_bf16_batchm::dense_gemv_bf16_batchm",
    }  # fmt: skip


def test_everything_is_freed(gpu: GpuBackend, rng: np.random.Generator) -> None:
    weights = gpu.live_bytes()
    with construct(gpu, rng) as head:
        pools = head.kv_cache.total_bytes()
        assert pools > 0
        state = head.alloc_state(gpu)
        grown = gpu.live_bytes()
    head.release()
    assert gpu.live_bytes() < grown - pools
    assert weights <= gpu.live_bytes()
    head.free_state(gpu, state)


def test_an_allocation_that_fails_leaves_nothing(
    gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = type(gpu).alloc

    def alloc(self: GpuBackend, nbytes: int, label: str = "") -> DevicePtr:
        if label == "mtp_head.prefill.k_out":
            raise MemoryError(label)
        return real(self, nbytes, label)

    monkeypatch.setattr(type(gpu), "alloc", alloc)
    with pytest.raises(MemoryError):
        construct(gpu, rng)
