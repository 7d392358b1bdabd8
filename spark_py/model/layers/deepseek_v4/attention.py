# SPDX-License-Identifier: AGPL-3.0-only
"""V4Attention: low-rank queries over one latent row a token, a window, sinks, and an output by groups of heads.

Of a normalised input row x at position p, with RMS(v) = v / sqrt(mean(v^2) + eps):

    q = heads of W_qb (RMS(W_qa x) * q_norm); each head becomes RMS of itself, its tail rotated by p;
    kv = RMS(W_kv x) * kv_norm, its tail rotated by p: the key and value of this token for all heads;
    o = softmax over the last `window` rows and the head's sink, which has no value; its tail rotated by -p;
    y = W_ob (block g of W_oa times the heads of group g, for each g).

The tail is the last rope_dim elements, rotated by neighbours; DeepSeek-V4's `inference/model.py` is the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from ....ops.rms_norm_vanilla import rms_norm
from ....ops.spark_v4_paged_decode import spark_v4_paged_decode, spark_v4_paged_decode_fp8
from ....ops.spark_v4_qkv import (
    check_head,
    spark_v4_kv_assemble,
    spark_v4_kv_assemble_fp8,
    spark_v4_q_and_kv,
    spark_v4_q_norm_rope,
)
from ....runtime.errors import InvalidArgumentError, UnsupportedError
from ....runtime.gpu import DevicePtr, GpuBackend, StreamLike
from ....runtime.kv_cache import KvCacheDtype, KvScales, PagedKvCache
from ....runtime.sizes import count
from ...layer import AttnMetadataDev
from ...weight_map import DenseWeight, Fp8Weight
from .projection import V4GroupedProjection, V4Projection, V4Weight
from .scratch import OwnedBuffers

__all__ = ["V4Attention", "V4AttentionShape", "V4AttentionWeights"]

_BF16 = 2  # bytes
_STEP = 8  # elements of a 16-byte load


@dataclass(frozen=True, slots=True)
class V4AttentionShape:
    """The sizes, by default those of DeepSeek-V4-Flash. `window` counts the positions a row sees, itself included.

    InvalidArgumentError for sizes that the kernels do not take: rows that are read are multiples of 8 elements,
    o_groups divides num_heads, head_dim is at most 512.
    """

    hidden_size: int = 4096
    num_heads: int = 64
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    window: int = 128
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("num_heads", "o_groups", "o_lora_rank", "window"):
            count(name, getattr(self, name))
        check_head(self.head_dim, self.rope_dim, self.rope_theta)
        for name, size in (
            ("hidden_size", self.hidden_size),
            ("q_lora_rank", self.q_lora_rank),
            ("o_groups * o_lora_rank", self.o_groups * self.o_lora_rank),
        ):
            if count(name, size) % _STEP:
                raise InvalidArgumentError(
                    name, size, f"a multiple of {_STEP} is needed: rows are read 16 bytes a load"
                )
        if self.num_heads % self.o_groups:
            raise InvalidArgumentError("o_groups", self.o_groups, f"it must divide num_heads = {self.num_heads}")
        if not 0.0 < self.norm_eps < float("inf"):
            raise InvalidArgumentError("norm_eps", self.norm_eps, "a finite number above 0 is needed")

    @property
    def q_size(self) -> int:
        """Elements of all heads of a row."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements of the heads of one output group."""
        return self.q_size // self.o_groups


@dataclass(frozen=True, slots=True)
class V4AttentionWeights:
    """Under the checkpoint's names; h hidden_size, n heads of d, r q_lora_rank, g groups of l = o_lora_rank.

    wq_a [r, h], q_norm [r], wq_b [n * d, r], wkv [d, h], kv_norm [d], wo_a [g * l, n * d / g], wo_b [h, g * l]; norms
    are used as they are, BF16. attn_sink is the address of FP32 [n]. Each matrix has a format of its own; wo_a is BF16
    or E4M3: one launch for all groups.
    """

    wq_a: V4Weight
    q_norm: DenseWeight
    wq_b: V4Weight
    wkv: V4Weight
    kv_norm: DenseWeight
    wo_a: DenseWeight | Fp8Weight
    wo_b: V4Weight
    attn_sink: DevicePtr

    def check(self, shape: V4AttentionShape, name: str) -> None:
        """InvalidArgumentError for the first tensor that is NULL or of another shape."""
        h, d, rank, out = shape.hidden_size, shape.head_dim, shape.q_lora_rank, shape.o_groups * shape.o_lora_rank
        self.wq_a.check_shape(f"{name}.wq_a", rank, h)
        self.q_norm.check_shape(f"{name}.q_norm", rank)
        self.wq_b.check_shape(f"{name}.wq_b", shape.q_size, rank)
        self.wkv.check_shape(f"{name}.wkv", d, h)
        self.kv_norm.check_shape(f"{name}.kv_norm", d)
        self.wo_a.check_shape(f"{name}.wo_a", out, shape.group_size)
        self.wo_b.check_shape(f"{name}.wo_b", h, out)
        if self.attn_sink.is_null:
            raise InvalidArgumentError(f"{name}.attn_sink", self.attn_sink, "a tensor on the device is needed")


class V4Attention:
    """Decode of up to `max_rows` sequences, one new row each, over layer `kv_layer` of a cache of latent rows.

    The cache has `shared_kv`, one KV head of head_dim, BF16 or FP8 with a scale of 1. Weights and cache stay the
    caller's and must outlive this. A row's bits do not depend on how many are decoded together.

    Refusals: InvalidArgumentError for a tensor or cache that does not fit, UnsupportedError for an NVFP4 cache, a
    KernelSetError for a kernel that the set lacks. Nothing stays allocated after an error.
    """

    def __init__(
        self,
        weights: V4AttentionWeights,
        shape: V4AttentionShape,
        kv_cache: PagedKvCache,
        gpu: GpuBackend,
        max_rows: int = 1,
        kv_layer: int = 0,
        name: str = "attn",
    ) -> None:
        self.gpu, self.weights, self.shape, self.kv_cache, self.kv_layer = gpu, weights, shape, kv_cache, kv_layer
        weights.check(shape, name)
        self._check_cache()
        narrow = "_fp8" if self._fp8 else ""
        o_rows = shape.o_groups * shape.o_lora_rank
        self._wq_a, self._wq_b, self._wkv, self._wo_b = (
            V4Projection(getattr(weights, part), n, k, gpu, f"{name}.{part}")
            for part, n, k in (
                ("wq_a", shape.q_lora_rank, shape.hidden_size),
                ("wq_b", shape.q_size, shape.q_lora_rank),
                ("wkv", shape.head_dim, shape.hidden_size),
                ("wo_b", shape.hidden_size, o_rows),
            )
        )
        self._norm_k = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
        self._q_norm_rope_k = gpu.kernel("spark_v4_qkv", "spark_v4_q_norm_rope")
        self._q_and_kv_k = gpu.try_kernel("spark_v4_qkv", f"spark_v4_q_and_kv{narrow}")
        self._assemble_k = gpu.kernel("spark_v4_qkv", f"spark_v4_kv_assemble{narrow}")
        self._decode_k = gpu.kernel("spark_v4_paged_decode", f"spark_v4_paged_decode{narrow}")
        self._wo_a = V4GroupedProjection(
            weights.wo_a, shape.o_groups, shape.o_lora_rank, shape.group_size, gpu, f"{name}.wo_a"
        )
        row_elements = {
            "q_latent": shape.q_lora_rank,
            "q": shape.q_size,
            "kv": shape.head_dim,
            "heads_out": shape.q_size,
            "o_latent": o_rows,
        }
        sizes = {buffer: elements * _BF16 for buffer, elements in row_elements.items()}
        self._scratch = OwnedBuffers(gpu, name, max_rows, sizes)

    def _check_cache(self) -> None:
        cache, shape, layer = self.kv_cache, self.shape, self.kv_layer
        layout = cache.layout(layer)
        if not cache.config.shared_kv:
            raise InvalidArgumentError("shared_kv", False, "a latent row is key and value: the cache needs one pool")
        if (layout.num_kv_heads, layout.head_dim) != (1, shape.head_dim):
            found = (layout.num_kv_heads, layout.head_dim)
            raise InvalidArgumentError(f"KV heads of layer {layer}", found, f"(1, {shape.head_dim}) is needed")
        if layout.dtype is KvCacheDtype.NVFP4:
            raise UnsupportedError("an nvfp4 cache of latent rows is not offered: take bf16 or fp8")
        self._fp8 = layout.dtype is KvCacheDtype.FP8
        self._check_scales()

    def _check_scales(self) -> None:
        if self._fp8 and (scales := self.kv_cache.fp8_scales(self.kv_layer)) != KvScales():
            raise InvalidArgumentError("fp8 scales", scales, "1.0 is needed: latent rows are stored as they are")

    def decode(self, x: DevicePtr, meta: AttnMetadataDev, output: DevicePtr, stream: StreamLike) -> None:
        """output BF16 [rows, h] of x BF16 [rows, h], normalised: the new row of each of rows = meta.num_seqs sequences.

        Writes each row's latent to its slot, then attends over the seq_len rows that its block table names. Positions
        turn queries and keys, lengths bound the window: a cache may begin at any position. x and output lie on 16-byte
        addresses and may be one buffer. CapacityError for more rows than max_rows.
        """
        rows = self._scratch.check_rows(meta.num_seqs)
        self._check_scales()
        # Both read x alone.
        self._wq_a.run_with(self._wkv, x, self._scratch["q_latent"], self._scratch["kv"], rows, stream)
        self._queries(rows, stream)
        if self._q_and_kv_k:
            self._rotate_all(meta, rows, stream)
        else:
            self._rotate_queries(meta, rows, stream)
            self._write_row(meta, rows, stream)
        self._attend(meta, rows, stream)
        self._project_out(output, rows, stream)

    def write(self, x: DevicePtr, meta: AttnMetadataDev, stream: StreamLike) -> None:
        """The latents that `decode` writes, and nothing else. Rows may be of one sequence: of `meta`, positions, slots
        and num_seqs are read."""
        rows = self._scratch.check_rows(meta.num_seqs)
        self._check_scales()
        self._wkv.run(x, self._scratch["kv"], rows, stream)
        self._write_row(meta, rows, stream)

    def _queries(self, rows: int, stream: StreamLike) -> None:
        shape, weights, gpu = self.shape, self.weights, self.gpu
        latent, q, rank = self._scratch["q_latent"], self._scratch["q"], shape.q_lora_rank
        rms_norm(gpu, self._norm_k, latent, weights.q_norm, latent, rows, rank, shape.norm_eps, stream)
        self._wq_b.run(latent, q, rows, stream)

    def _rotate_all(self, meta: AttnMetadataDev, rows: int, stream: StreamLike) -> None:
        """`_rotate_queries` and `_write_row`, with their bits."""
        shape, scratch = self.shape, self._scratch
        spark_v4_q_and_kv(
            self.gpu, self._q_and_kv_k, scratch["q"], scratch["kv"], self.weights.kv_norm, meta.positions,
            self.kv_cache.k_pool_ptr(self.kv_layer), meta.slot, rows, shape.num_heads, shape.head_dim, shape.rope_dim,
            shape.norm_eps, shape.rope_theta, stream,
        )  # fmt: skip

    def _rotate_queries(self, meta: AttnMetadataDev, rows: int, stream: StreamLike) -> None:
        shape = self.shape
        spark_v4_q_norm_rope(
            self.gpu, self._q_norm_rope_k, self._scratch["q"], meta.positions, rows, shape.num_heads, shape.head_dim,
            shape.rope_dim, shape.norm_eps, shape.rope_theta, stream,
        )  # fmt: skip

    def _write_row(self, meta: AttnMetadataDev, rows: int, stream: StreamLike) -> None:
        shape, kv = self.shape, self._scratch["kv"]
        assemble = spark_v4_kv_assemble_fp8 if self._fp8 else spark_v4_kv_assemble
        assemble(
            self.gpu, self._assemble_k, kv, self.weights.kv_norm, meta.positions,
            self.kv_cache.k_pool_ptr(self.kv_layer), meta.slot, rows, shape.head_dim, shape.rope_dim, shape.norm_eps,
            shape.rope_theta, stream,
        )  # fmt: skip

    def _attend(self, meta: AttnMetadataDev, rows: int, stream: StreamLike) -> None:
        shape = self.shape
        attend = spark_v4_paged_decode_fp8 if self._fp8 else spark_v4_paged_decode
        attend(
            self.gpu, self._decode_k, self._scratch["q"], self.kv_cache.k_pool_ptr(self.kv_layer),
            self._scratch["heads_out"], meta.block_table, meta.seq_len, meta.positions, self.weights.attn_sink,
            meta.max_blocks_per_seq, rows, shape.num_heads, shape.head_dim, shape.rope_dim, self.kv_cache.block_size(),
            float(shape.head_dim**-0.5), shape.rope_theta, shape.window, stream,
        )  # fmt: skip

    def _project_out(self, output: DevicePtr, rows: int, stream: StreamLike) -> None:
        latent = self._scratch["o_latent"]
        self._wo_a.run(self._scratch["heads_out"], latent, rows, stream)
        self._wo_b.run(latent, output, rows, stream)

    def release(self) -> None:
        """Free the scratch; a second call does nothing. Weights and cache stay."""
        self._scratch.release()

    def __enter__(self) -> V4Attention:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()
