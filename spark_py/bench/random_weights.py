# SPDX-License-Identifier: AGPL-3.0-only
"""Random weights of the heads that are measured, in the formats of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from spark_py.model.config import ModelConfig
from spark_py.model.layers.deepseek_v4 import (
    V4AttentionWeights,
    V4BlockWeights,
    V4ExpertWeights,
    V4FfnWeights,
    V4HyperShape,
    V4HyperWeights,
    V4LayerWeights,
    V4MtpWeights,
    V4RouterWeights,
    V4Shapes,
)
from spark_py.model.layers.mtp_head.body import HeadBody, QkNorm, SharedExpert
from spark_py.model.weight_map import DenseExpertWeight, DenseWeight, F32Weight, Fp8Weight, MtpWeights, Mxfp4Weight
from spark_py.runtime.gpu import DevicePtr, GpuBackend

__all__ = ["RandomWeights", "head_weights", "v4_weights"]

_E4M3_ONE = 0x38
_SCALE_BYTE = 121  # 2^-6 in E8M0


class RandomWeights:
    """Makes tensors from a pool of random values, uploaded once and copied until a tensor is full, and owns them.

    `small`, for narrow heads: a pool of 128 KiB instead of 8 MiB, and values of 0.1 instead of 0.02, so that every part
    of the head still has a say in its result.
    """

    def __init__(self, gpu: GpuBackend, seed: int = 0, small: bool = False) -> None:
        values = 1 << (16 if small else 22)
        self.gpu, self.pointers = gpu, list[DevicePtr]()
        self.random = np.random.default_rng(seed)
        units = self.random.standard_normal(values, np.float32)
        codes = self.random.integers(0, 256, 2 * values, dtype=np.uint8)
        codes[codes & 127 == 127] = _E4M3_ONE  # E4M3 has NaN there
        self.pool_bytes = 2 * values
        weights = units * (0.1 if small else 0.02)
        bf16 = {kind: array.astype(ml_dtypes.bfloat16) for kind, array in (("weights", weights), ("units", units))}
        try:
            self.pools = {kind: self.put(pool) for kind, pool in (bf16 | {"codes": codes}).items()}
        except BaseException:
            self.release()
            raise

    def alloc(self, nbytes: int) -> DevicePtr:
        """Memory until `release`."""
        self.pointers.append(self.gpu.alloc(nbytes, "bench"))
        return self.pointers[-1]

    def put(self, array: np.ndarray[Any, Any]) -> DevicePtr:
        """A copy of an array on the device."""
        ptr = self.alloc(array.nbytes)
        self.gpu.copy_h2d(np.ascontiguousarray(array).reshape(-1).view(np.uint8), ptr)
        return ptr

    def fill(self, ptr: DevicePtr, nbytes: int, kind: str = "weights") -> None:
        """Random numbers in memory that is there: BF16 as small as "weights", BF16 "units" of variance 1, or 8-bit
        "codes" without NaN."""
        pool, stream = self.pools[kind], self.gpu.default_stream()
        start, done = len(self.pointers) * 57344 % (self.pool_bytes // 2) // 256 * 256, 0
        while done < nbytes:
            size = min(nbytes - done, self.pool_bytes - start)
            self.gpu.copy_d2d_async(pool.offset(start), ptr.offset(done), size, stream)
            done, start = done + size, 0

    def tensor(self, *shape: int) -> DenseWeight:
        """A BF16 tensor of values of the pool, beginning somewhere else each time."""
        total = 2 * int(np.prod(shape))
        ptr = self.alloc(total)
        self.fill(ptr, total)
        return DenseWeight(ptr, shape)

    def stack(self, count: int, *shape: int) -> list[DenseWeight]:
        """`count` BF16 tensors behind each other in one allocation."""
        whole, nbytes = self.tensor(count, *shape), 2 * int(np.prod(shape))
        return [DenseWeight(whole.weight.offset(i * nbytes), shape) for i in range(count)]

    def codes(self, nbytes: int) -> DevicePtr:
        """8-bit or packed 4-bit codes."""
        ptr = self.alloc(nbytes)
        self.fill(ptr, nbytes, "codes")
        return ptr

    def f32(self, *shape: int) -> DevicePtr:
        """FP32, as small as a projection's."""
        values = self.random.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        return self.put(values.astype(np.float32))

    def fp8(self, n: int, k: int) -> Fp8Weight:
        """E4M3 codes, a scale for each block of 128 x 128."""
        return Fp8Weight(self.codes(n * k), self.f32(-(-n // 128), -(-k // 128)), n, k)

    def mxfp4(self, count: int, n: int, k: int) -> list[Mxfp4Weight]:
        """`count` tensors behind each other: E2M1 codes, and the same scale for each block of 32."""
        each, scale = n * k // 2, n * k // 32
        codes, scales = self.codes(count * each), self.alloc(count * scale)
        self.gpu.memset(scales, _SCALE_BYTE, count * scale)
        return [Mxfp4Weight(codes.offset(i * each), scales.offset(i * scale), n, k) for i in range(count)]

    def release(self) -> None:
        """Free everything; a second call does nothing."""
        if self.gpu.closed:
            return
        self.gpu.synchronize(self.gpu.default_stream())
        while self.pointers:
            self.gpu.free(self.pointers.pop())


def head_weights(make: RandomWeights, c: ModelConfig) -> MtpWeights:
    """All tensors of an MtpHead, as its body wants them; experts of a kind lie behind each other."""
    h, hd, body = c.hidden_size, c.head_dim, HeadBody.of(c)
    q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
    parts: dict[str, Any] = {
        name: make.tensor(h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "input_layernorm", "post_attn_layernorm", "norm")
    }
    widths = {QkNorm.PER_HEAD: (hd, hd), QkNorm.WHOLE: (q, kv)}.get(body.qk_norm)
    parts |= {name: widths and make.tensor(widths[i]) for i, name in enumerate(("q_norm", "k_norm"))}
    parts |= {"fc": make.tensor(h, 2 * h), "q_proj": make.tensor((2 if body.gated else 1) * q, h)}
    parts |= {"k_proj": make.tensor(kv, h), "v_proj": make.tensor(kv, h), "o_proj": make.tensor(h, q)}

    def ffn(width: int) -> DenseExpertWeight:
        return DenseExpertWeight(make.tensor(width, h), make.tensor(width, h), make.tensor(h, width))

    if not c.num_experts:
        return MtpWeights(dense_ffn=ffn(c.intermediate_size), **parts)
    shared, inter = body.shared_expert, c.moe_intermediate_size
    shapes = ((inter, h), (inter, h), (h, inter))
    gates, ups, downs = (make.stack(c.num_experts, *shape) for shape in shapes)
    return MtpWeights(
        moe_gate=make.tensor(c.num_experts, h),
        shared_expert=None if shared is SharedExpert.NONE else ffn(c.shared_expert_intermediate_size),
        shared_expert_gate=make.tensor(1, h) if shared is SharedExpert.GATED else None,
        experts=[DenseExpertWeight(*each) for each in zip(gates, ups, downs, strict=True)],
        correction_bias=F32Weight(make.f32(c.num_experts), (c.num_experts,)) if c.use_routing_bias else None,
        **parts,
    )


def v4_weights(make: RandomWeights, shapes: V4Shapes, mode: str = "mxfp4") -> V4MtpWeights:
    """All tensors of a DeepSeek-V4 module: in mode mxfp4 as in the published files, in bf16 all BF16."""
    a, ffn, hyper = shapes.attention, shapes.ffn, shapes.hyper
    h, out = a.hidden_size, a.o_groups * a.o_lora_rank
    projection: Callable[[int, int], Any] = make.tensor if mode == "bf16" else make.fp8
    routed: Callable[[int, int, int], list[Any]] = make.stack if mode == "bf16" else make.mxfp4
    widths = ((ffn.inter, h), (ffn.inter, h), (h, ffn.inter))

    def connections(shape: V4HyperShape = hyper, head: bool = False) -> V4HyperWeights:
        hc = shape.hc_mult
        rows = hc if head else (2 + hc) * hc
        return V4HyperWeights(make.f32(rows, hc * h), make.f32(1 if head else 3), make.f32(rows))

    attention = V4AttentionWeights(
        wq_a=projection(a.q_lora_rank, h),
        q_norm=make.tensor(a.q_lora_rank),
        wq_b=projection(a.q_size, a.q_lora_rank),
        wkv=projection(a.head_dim, h),
        kv_norm=make.tensor(a.head_dim),
        wo_a=projection(out, a.group_size),
        wo_b=projection(h, out),
        attn_sink=make.f32(a.num_heads),
    )
    router = V4RouterWeights(make.tensor(ffn.num_experts, h), make.f32(ffn.num_experts))
    w1s, w3s, w2s = (routed(ffn.num_experts, *width) for width in widths)
    experts = [V4ExpertWeights(*each) for each in zip(w1s, w3s, w2s, strict=True)]
    return V4MtpWeights(
        block=V4BlockWeights(
            V4LayerWeights(connections(), make.tensor(h), connections(), make.tensor(h)),
            attention,
            V4FfnWeights(router, experts, V4ExpertWeights(*(projection(*width) for width in widths))),
        ),
        enorm=make.tensor(h),
        hnorm=make.tensor(h),
        e_proj=projection(h, h),
        h_proj=projection(h, h),
        norm=make.tensor(h),
        hc_head=connections(head=True),
    )
