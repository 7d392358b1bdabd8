# SPDX-License-Identifier: AGPL-3.0-only
"""Construction of MtpHead: what it refuses, the size of its vocabulary and pool, its kernels, the end of its life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_py.model.layers.mtp_head import MtpHead, MtpQuantization
from spark_py.model.layers.mtp_head.new import mtp_num_blocks
from spark_py.model.layers.mtp_head.types import MtpPrefillScratch
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseWeight, Fp8DenseWeight, Fp8Weight, QuantizedWeight
from spark_py.runtime.errors import InvalidArgumentError, KernelSetError, ModuleNotFoundInSetError, UnsupportedError
from spark_py.runtime.gpu import DevicePtr, GpuBackend, KernelHandle
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, KvScales
from tests.model.mtp_forms import FUSED, hide, to_nvfp4
from tests.model.support import (
    BF16,
    SPARSE,
    a_hidden,
    config,
    dense,
    download,
    make_rig,
    mtp_weights,
    random_weights,
)  # fmt: skip

# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(("asked", "vocab"), [(0, 203), (500, 203), (203, 203), (100, 100), (1, 1)])
def test_size_of_the_draft_vocabulary(gpu: GpuBackend, rng: np.random.Generator, asked: int, vocab: int) -> None:
    rig = make_rig(gpu, rng, mtp_vocab_size=asked, levers=ModelLevers(keep_logits=True))
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
    wrong, moe = changes.pop("config", {}), changes.pop("moe", False)
    c = config(**wrong)
    arrays = random_weights(rng, config(**wrong) if moe else config(), moe) | changes.pop("arrays", {})
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
MOE = {"config": SPARSE, "moe": True}


def without(**parts: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Weights with some parts exchanged."""
    return lambda args: {"weights": replace(args["weights"], **parts)}


def in_blocks(args: dict[str, Any]) -> dict[str, Any]:
    """q_proj in FP8 with block scales, as a checkpoint may have it."""
    return {"weights": replace(args["weights"], q_proj=Fp8Weight(DevicePtr(4096), DevicePtr(8192), 256, 64))}


@pytest.mark.parametrize("quant", MtpQuantization)
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("nvfp4_lm_head", [False, True], ids=["bf16 head", "nvfp4 head"])
def test_which_heads_there_are(
    gpu: GpuBackend, rng: np.random.Generator, quant: MtpQuantization, moe: bool, nvfp4_lm_head: bool
) -> None:
    changes = dict(MOE) if moe else {}
    if nvfp4_lm_head:
        changes["change"] = lambda a: {"lm_head": to_nvfp4(gpu, download(gpu, a["lm_head"].weight, (203, 64)))}
    if quant is MtpQuantization.NVFP4 and not moe:
        with pytest.raises(UnsupportedError, match="dense FFN: use --mtp-quantization fp8 or bf16"):
            construct(gpu, rng, quant=quant)
        return
    with construct(gpu, rng, quant=quant, **changes) as head:
        dense = head.dense_ffn_generic
        assert [dense is not None, head.moe_nvfp4 is not None, head.moe_fused is not None] == [
            not moe, moe and quant is MtpQuantization.NVFP4, moe and quant is not MtpQuantization.NVFP4
        ]  # fmt: skip
        assert head.moe_experts_generic is head.moe_shared_generic is None
        form = {"bf16": DenseWeight, "fp8": Fp8DenseWeight, "nvfp4": QuantizedWeight}[quant.value]
        projections = [head.fc, head.q_proj, head.k_proj, head.v_proj, head.o_proj, *(dense or ())]
        assert {type(weight) for weight in projections} == {form}
        assert isinstance(head.lm_head, QuantizedWeight) is nvfp4_lm_head
        # Norms, router and shared gate are the checkpoint's own.
        assert all(type(w) is DenseWeight for w in (head.moe_gate, head.shared_expert_gate) if moe)
        assert (head.prefill_scratch is not None) is (quant is MtpQuantization.BF16)


@pytest.mark.parametrize(
    ("quant", "dtype", "block_bytes"),
    [
        (MtpQuantization.BF16, KvCacheDtype.BF16, 4096 * 2),
        (MtpQuantization.FP8, KvCacheDtype.BF16, 4096 * 2),
        (MtpQuantization.NVFP4, KvCacheDtype.FP8, 4096),
    ],
)
def test_the_kv_pool_by_quantisation(
    gpu: GpuBackend, rng: np.random.Generator, quant: MtpQuantization, dtype: KvCacheDtype, block_bytes: int
) -> None:
    """A block of 16 tokens and 2 heads of 32 has 1024 values a side. Scales of an FP8 pool are 1."""
    with construct(gpu, rng, quant=quant, **MOE) as head:
        assert head.kv_cache.config.dtype is dtype
        assert head.kv_bf16 is (dtype is KvCacheDtype.BF16)
        assert head.kv_cache.config.block_bytes() == block_bytes // 2
        assert head.kv_cache.total_bytes() == head.kv_cache.num_blocks() * block_bytes // 2
        if dtype is KvCacheDtype.FP8:
            assert head.kv_cache.fp8_scales(0) == KvScales(1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant": MtpQuantization.NVFP4}, "dense FFN: use --mtp-quantization fp8 or bf16"),
        ({"change": lambda a: {"config": replace(a["config"], kv_lora_rank=512)}}, "latent .*kv_lora_rank 512"),
        ({"change": in_blocks}, "mtp q_proj is FP8 with block scales and the head bf16: take fp8"),
        ({"change": in_blocks, "quant": MtpQuantization.NVFP4, **MOE}, "mtp q_proj is FP8 .* the head nvfp4"),
    ],
)
def test_what_is_not_offered(gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        construct(gpu, rng, **changes)


@pytest.mark.parametrize("quant", MtpQuantization)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"change": without(moe_gate=None)}, "mtp moe_gate is None"),
        ({"change": without(shared_expert=None)}, "mtp shared_expert is None"),
        ({"change": without(shared_expert_gate=None)}, "mtp shared_expert_gate is None"),
        ({"change": without(experts=())}, "mtp experts is 0: the config has 6"),
        ({"change": lambda a: {"config": replace(a["config"], num_experts_per_tok=7)}}, "num_experts_per_tok is 7: 6"),
        ({"change": lambda a: {"config": replace(a["config"], num_experts_per_tok=0)}}, "num_experts_per_tok is 0"),
        ({"arrays": {"moe_gate": np.zeros((6, 32), BF16)}}, r"mtp moe_gate is \(6, 32\): \(6, 64\)"),
        ({"arrays": {"shared_expert_gate": np.zeros((2, 64), BF16)}}, "mtp shared_expert_gate"),
        ({"arrays": {"experts[5].up_proj": np.zeros((32, 64), BF16)}}, r"mtp experts\[5\].up_proj is \(32, 64\)"),
        ({"arrays": {"shared_expert.down_proj": np.zeros((48, 64), BF16)}}, "mtp shared_expert.down_proj"),
    ],
)
def test_experts_that_do_not_fit(
    gpu: GpuBackend, rng: np.random.Generator, quant: MtpQuantization, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        construct(gpu, rng, quant=quant, **MOE | changes)


@pytest.mark.parametrize(
    ("quant", "weight", "words"),
    [
        (MtpQuantization.FP8, np.inf, "mtp k_proj: scale of row 3"),
        (MtpQuantization.NVFP4, np.inf, "mtp k_proj: largest magnitude"),
    ],
)
def test_a_weight_that_cannot_be_quantised_is_named(
    gpu: GpuBackend, rng: np.random.Generator, quant: MtpQuantization, weight: float, words: str
) -> None:
    bad = random_weights(rng, config(**SPARSE), moe=True)["k_proj"]
    bad[3, 5] = weight
    with pytest.raises(InvalidArgumentError, match=words):
        construct(gpu, rng, quant=quant, **MOE, arrays={"k_proj": bad})


@pytest.mark.parametrize("quant", [MtpQuantization.FP8, MtpQuantization.NVFP4])
def test_rows_of_quantised_weights_are_whole_groups(
    gpu: GpuBackend, rng: np.random.Generator, quant: MtpQuantization
) -> None:
    """In BF16 a multiple of 8 will do."""
    changes = {"config": SPARSE | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 40}, "moe": True}
    with pytest.raises(InvalidArgumentError, match="FFN width is 40: a multiple of 16"):
        construct(gpu, rng, quant=quant, **changes)
    construct(gpu, rng, **changes).release()
    with pytest.raises(InvalidArgumentError, match="hidden_size is 72: a multiple of 16"):
        construct(gpu, rng, config={"hidden_size": 72}, change=lambda a: {"lm_head": NVFP4})


def twin(ldb: int, scale2: float = 1.0, **parts: Any) -> dict[str, Any]:
    """An NVFP4 LM head and a transposed twin of it."""
    return {"lm_head": NVFP4, "lm_head_nvfp4_t": (replace(NVFP4, weight_scale_2=scale2, **parts), ldb)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (twin(203), "row length of lm_head_nvfp4_t is 203: a multiple of 128, and at least the draft vocabulary, 203"),
        (twin(128), "row length of lm_head_nvfp4_t is 128"),
        (twin(256, 2.0), "weight_scale_2 of lm_head_nvfp4_t is 2.0: the LM head's own, 1.0"),
        (twin(256, weight_scale=DevicePtr.NULL), "weight_scale of lm_head_nvfp4_t"),
        ({"lm_head_nvfp4_t": (NVFP4, 256)}, "lm_head_nvfp4_t is .*None where the LM head is not NVFP4"),
    ],
)
def test_a_transposed_lm_head_that_does_not_fit(
    gpu: GpuBackend, rng: np.random.Generator, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        construct(gpu, rng, **changes)


@pytest.mark.parametrize("lever", [True, False])
def test_the_transposed_lm_head_goes_with_its_lever(gpu: GpuBackend, rng: np.random.Generator, lever: bool) -> None:
    with construct(gpu, rng, levers=ModelLevers(lm_head_tgemm=lever), **twin(256)) as head:
        assert (head.lm_head_nvfp4_t is not None) is lever


def test_progress_and_summary_in_the_log(
    gpu: GpuBackend, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    many = {"config": SPARSE | {"num_experts": 300, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}}
    with caplog.at_level("INFO", "spark_py.model.mtp_head"):
        construct(gpu, rng, quant=MtpQuantization.NVFP4, moe=True, mtp_vocab_size=100, **many).release()
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["  MTP experts quantized: 128/300", "  MTP experts quantized: 256/300"]
    summary = "MTP head: quant=nvfp4, fc=[64,128], attn Q=[256,64], ffn=MoE (NVFP4 fused), 300 experts, vocab=100/203"
    assert lines[2].startswith(f"{summary} (LM head 0.0 MB)")
    caplog.clear()
    with caplog.at_level("INFO", "spark_py.model.mtp_head"):
        construct(gpu, rng).release()
    assert "quant=bf16" in caplog.text
    assert "ffn=dense FFN, 0 experts, vocab=203/203" in caplog.text


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("max_seq", "stride"),
    [(64, 2048), (7167, 2048), (7168, 2056), (8192, 2312), (16384, 4360), (32768, 8456), (131072, 33032)],
)
def test_slabs_of_attention_metadata(
    gpu: GpuBackend, rng: np.random.Generator, max_seq: int, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 of them, each with room for a block table of max_seq / 16 + 1 entries."""
    asked: dict[str, int] = {}
    real = type(gpu).alloc

    def alloc(self: GpuBackend, nbytes: int, label: str = "") -> DevicePtr:
        asked[label] = nbytes
        return real(self, nbytes, label)

    monkeypatch.setattr(type(gpu), "alloc", alloc)
    with construct(gpu, rng, max_seq_len=max_seq, levers=ModelLevers(mtp_max_seqs=1, drafter_prefill=False)) as head:
        assert head.propose_meta_stride == stride
        assert asked["mtp_head.propose_meta"] == 32 * stride
        assert 256 + 4 * (max_seq // 16 + 1) <= stride
        assert not [label for label in asked if label.startswith("mtp_head.prefill")]
    with construct(gpu, rng, levers=ModelLevers(propose_meta_stride=4096)) as head:
        assert asked["mtp_head.propose_meta"] == 32 * 4096


@pytest.mark.parametrize(
    ("h", "nq", "nkv", "total"), [(5120, 24, 4, 45_094_912), (2048, 16, 2, 19_929_088)], ids=["27B", "80B"]
)
def test_bytes_of_the_prefill_scratch(h: int, nq: int, nkv: int, total: int) -> None:
    assert sum(MtpPrefillScratch.sizes(512, h, nq, nkv, 256).values()) == total


@pytest.mark.parametrize(
    ("max_seq", "seqs", "main", "nkv_hd", "elem", "total"),
    [
        (16384, 16, 15203, 4 * 256, 2, 996_343_808),
        (16384, 8, 15203, 4 * 256, 2, 537_395_200),
        (32768, 8, 8000, 4 * 256, 2, 524_288_000),
        (131072, 8, 20000, 2 * 256, 2, 655_360_000),
        (131072, 1, 20000, 2 * 256, 1, 134_234_112),
        (131072, 32, 6000, 2 * 256, 2, 268_468_224),
    ],
)
def test_bytes_of_the_pool(max_seq: int, seqs: int, main: int, nkv_hd: int, elem: int, total: int) -> None:
    quant = MtpQuantization.NVFP4 if elem == 1 else MtpQuantization.FP8
    kv = KvCacheConfig(block_size=16, num_kv_heads=nkv_hd // 256, head_dim=256, num_layers=1, dtype=quant.kv_dtype())
    assert mtp_num_blocks(max_seq, seqs, main) * kv.block_bytes() == total


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


ALWAYS = {
    "norm::rms_norm", "norm::residual_add_rms_norm", "rope::rope_forward", "residual_add::bf16_residual_add",
    "residual_add::sigmoid_gate_mul", "residual_add::bf16_concat", "argmax::argmax_bf16",
    "embed_from_argmax::embed_from_argmax",
}  # fmt: skip
BF16_KV = {"reshape_and_cache::reshape_and_cache_flash", "paged_decode::paged_decode_attn"}
FP8_KV = {"reshape_and_cache::reshape_and_cache_flash_fp8", "paged_decode_fp8::paged_decode_attn_fp8"}
GEMV, SILU = {"gemv::dense_gemv_bf16"}, {"moe_silu_mul::moe_silu_mul"}
BF16_SET = ALWAYS | BF16_KV | GEMV | {"ssm_preprocess::deinterleave_qg"}
FP8_SET = ALWAYS | BF16_KV | {
    "ssm_preprocess::deinterleave_qg", "gemv_fp8w::quantize_bf16_to_fp8", "gemv_fp8w::dense_gemv_fp8w"
}  # fmt: skip
PACKED = {"w4a16_gemv::w4a16_gemv"}
NVFP4_SET = ALWAYS | FP8_KV | PACKED | {
    "quantize_nvfp4::nvfp4_global_absmax", "quantize_nvfp4::quantize_bf16_to_nvfp4", "w4a16_gemv::w4a16_gemv_qg",
    "w4a16_gemv_fused::w4a16_gemv_dual",
}  # fmt: skip
ROUTED = {"moe_topk::moe_topk_softmax", "moe_expert_gemv::moe_weighted_sum_blend"} | SILU
BATCHED = {
    "argmax::argmax_bf16_batch", "argmax::argmax_bf16_batch_lp", "embed_from_argmax::batched_embed",
    "spark_qk_norm_rope_cache::spark_qk_norm_rope_cache", "spark_norm_rows::spark_norm_concat",
    "spark_norm_rows::spark_add_then_norm",
}  # fmt: skip
BATCHM = {"dense_gemv_bf16_batchm::dense_gemv_bf16_batchm", "spark_gemv_rows::spark_gemv_rows"}
GRAPH = {"spark_propose_inputs::spark_propose_inputs"}
PICK, PICK_PACKED = (GRAPH | {f"{module}::{module}_argmax"} for module in ("spark_gemv_rows", "spark_w4a16_gemv_rows"))
FP8_ROWS = {"gemv_fp8w::spark_dense_gemv_fp8w_batchm", "spark_fp8_gemv_rows::spark_fp8_gemv_rows"}
GEMMS = {"gemm::dense_gemm_bf16", "gemm::dense_gemm_bf16_pipelined"} | BATCHM
WIDTHS = {f"w4a16_gemv::w4a16_gemv_batch{rows}" for rows in (4, 5, 6, 7, 8, 16, 32)}
WIDTHS |= {"spark_w4a16_gemv_rows::spark_w4a16_gemv_rows"}


@pytest.mark.parametrize(
    ("quant", "changes", "required", "optional"),
    [
        (MtpQuantization.BF16, {}, BF16_SET | SILU, BATCHED | GEMMS | PICK),
        (MtpQuantization.BF16, MOE, BF16_SET | ROUTED, BATCHED | GEMMS),
        (MtpQuantization.BF16, twin(256), BF16_SET | SILU | PACKED, BATCHED | GEMMS | WIDTHS | PICK_PACKED),
        (MtpQuantization.FP8, {}, FP8_SET | SILU | GEMV, BATCHED | BATCHM | FP8_ROWS | PICK),
        (MtpQuantization.FP8, {"lm_head": NVFP4}, FP8_SET | SILU | PACKED, BATCHED | WIDTHS | FP8_ROWS | PICK_PACKED),
        (MtpQuantization.FP8, MOE, FP8_SET | ROUTED | GEMV, BATCHED | BATCHM | FP8_ROWS),
    ],
)
def test_kernels_that_a_head_does_not_run_are_not_asked_for(
    gpu: GpuBackend,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    quant: MtpQuantization,
    changes: dict[str, Any],
    required: set[str],
    optional: set[str],
) -> None:
    """And each that is required is: a set without it is refused, one without the others is not."""
    hide(monkeypatch, gpu, *FUSED)
    asked: dict[str, set[str]] = {"kernel": set(), "try_kernel": set()}
    real, real_try = type(gpu).kernel, type(gpu).try_kernel

    def kernel(self: GpuBackend, module: str, function: str) -> KernelHandle:
        asked["kernel"].add(f"{module}::{function}")
        return real(self, module, function)

    def try_kernel(self: GpuBackend, module: str, function: str) -> KernelHandle:
        asked["try_kernel"].add(f"{module}::{function}")
        return real_try(self, module, function)

    with monkeypatch.context() as patch:
        patch.setattr(type(gpu), "kernel", kernel)
        patch.setattr(type(gpu), "try_kernel", try_kernel)
        construct(gpu, rng, quant=quant, **changes).release()
    fused = {name for names in asked.values() for name in names if name.startswith(FUSED)}
    assert asked["kernel"] - fused == required
    sw = {"w4a16_gemv::w4a16_gemv_sw"} if required >= PACKED else set()
    eight = {"w4a16_gemv::w4a16_gemv_batch8_rt2"} if optional >= WIDTHS else set()
    tiles = {"w4a16::w4a16_gemm_t_p3"} if "lm_head_nvfp4_t" in changes else set()
    # Of two kernels for the same thing the second is looked for where the set lacks the first.
    found = asked["try_kernel"] - fused - {"w4a16_gemv::w4a16_gemv_batch8", "w4a16::w4a16_gemm_t"}
    assert found == (optional | sw | eight | tiles) - {"w4a16_gemv::w4a16_gemv_batch8"}

    def only_required(self: GpuBackend, module: str, function: str) -> KernelHandle:
        return KernelHandle(0)

    with monkeypatch.context() as patch:
        patch.setattr(type(gpu), "try_kernel", only_required)
        with construct(gpu, rng, quant=quant, **changes) as head:
            assert not head.w4a16_batchm
            assert not head.dense_gemm_k
    for missing in required:
        with monkeypatch.context() as patch:
            hide(patch, gpu, *FUSED, function=missing)
            with pytest.raises(KernelSetError):
                construct(gpu, rng, quant=quant, **changes)


def test_kernels_of_an_nvfp4_head(gpu: GpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts need their layer's kernels beside these; what BF16 and FP8 heads run is not asked for."""
    lacking = {"gemm", "ssm_preprocess", "gemv_fp8w", "w8a16_gemv", "paged_decode"}
    for missing in NVFP4_SET:
        with monkeypatch.context() as patch:
            hide(patch, gpu, function=missing)
            with pytest.raises(KernelSetError):
                construct(gpu, rng, quant=MtpQuantization.NVFP4, **MOE)
    for module in lacking:
        hide(monkeypatch, gpu, function=f"{module}::")
    with construct(gpu, rng, quant=MtpQuantization.NVFP4, lm_head=NVFP4, **MOE) as head:
        assert head.w4a16_gemv_qg_k
        assert not head.dense_gemv_fp8w_k


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
