# SPDX-License-Identifier: AGPL-3.0-only
"""Twin of the attention in `layers/mtp_head/forward.rs`: norms of queries and keys, RoPE, the KV write, attention over
the drafter's own rows and the gate, for one row or for a row of each of several sequences.

Where the set has `spark_qk_norm_rope_cache`, all before attention is one launch, with the bits of the single kernels.
Where the set has `spark_paged_decode_split` and the head a size that it takes, attention is split along the sequence
and all sequences go in one launch; with the engine's kernels alone, sequence by sequence. Which of them is decided with
the head, so that a row has the same bits alone, in a batch and in a graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....ops.paged_decode import paged_decode_attn
from ....ops.paged_decode_fp8 import paged_decode_attn_fp8
from ....ops.reshape_and_cache import reshape_and_cache, reshape_and_cache_fp8
from ....ops.residual_add import sigmoid_gate_mul
from ....ops.rope import rope
from ....ops.spark_paged_decode_split import (
    partial_bytes,
    spark_paged_decode_merge,
    spark_paged_decode_split,
    sums_bytes,
    takes_head,
)
from ....ops.spark_qk_norm_rope_cache import LARGEST_HEAD, spark_qk_norm_rope_cache
from ....runtime.gpu import DevicePtr, KernelHandle, StreamLike
from ...layer import AttnMetadataDev
from ...weight_map import DenseWeight, MtpWeights
from .body import QkNorm
from .new import BF16_BYTES, KV_BLOCK_SIZE
from .norms import MtpHeadNorms

__all__ = ["KV_SCALE", "MtpHeadAttention"]

KV_SCALE = 1.0
"""Scale of K and V in an FP8 pool: they are stored as they are, saturating at 448."""
SPLIT_SEQUENCES = 8
"""Sequences of one launch of the split attention, for which there is memory."""
_SPLIT = (("seq_len", 4), ("block_table", 4))


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """The kernels of split attention and what they leave for each other: FP32, for `SPLIT_SEQUENCES` sequences."""

    split: KernelHandle
    merge: KernelHandle
    partial: DevicePtr
    sums: DevicePtr


class MtpHeadAttention(MtpHeadNorms):
    """Attention of drafter rows."""

    split_attention: SplitAttention | None = None
    spark_qk_norm_rope_cache_k = KernelHandle(0)

    def _build(self, weights: MtpWeights, main_kv_blocks: int) -> None:
        super()._build(weights, main_kv_blocks)
        prepare = "spark_qk_norm_rope_cache"
        if self.hd <= LARGEST_HEAD:
            self.spark_qk_norm_rope_cache_k = self.gpu.try_kernel(
                prepare, prepare if self.kv_bf16 else f"{prepare}_fp8"
            )
        if not takes_head(self.hd):
            return
        module = "spark_paged_decode_split"
        split = self.gpu.try_kernel(module, module if self.kv_bf16 else f"{module}_fp8")
        merge = self.gpu.try_kernel(module, "spark_paged_decode_merge")
        if split and merge:
            partial = self._alloc("attention.partial", partial_bytes(SPLIT_SEQUENCES, self.nq, self.hd))
            sums = self._alloc("attention.sums", sums_bytes(SPLIT_SEQUENCES, self.nq))
            self.split_attention = SplitAttention(split, merge, partial, sums)

    def _attend(
        self,
        queries: DevicePtr,
        keys: DevicePtr,
        values: DevicePtr,
        metas: Sequence[AttnMetadataDev],
        output: DevicePtr,
        stream: StreamLike,
    ) -> None:
        """output BF16 [n, nq, hd] of queries BF16 [n, q_width], keys and values BF16 [n, nkv, hd] as they were
        projected, whose rows go into the pool: row i over the sequence of metas[i], times its gates if any."""
        self._prepare(queries, keys, values, metas, stream)
        if (split := self.split_attention) is None:
            for i, meta in enumerate(metas):
                q, out = self._query(queries, i), self._head_row(output, i)
                self._attention(q, meta, out, stream)
                self._apply_gate(q, out, stream)
            return
        step = SPLIT_SEQUENCES if _strides(metas, *_SPLIT) else 1
        for first in range(0, len(metas), step):
            some = metas[first : first + step]
            self._attend_split(split, self._query(queries, first), some, self._head_row(output, first), stream)

    def _prepare(
        self,
        queries: DevicePtr,
        keys: DevicePtr,
        values: DevicePtr,
        metas: Sequence[AttnMetadataDev],
        stream: StreamLike,
    ) -> None:
        """Queries and keys normed and rotated in place, keys and values in the pool."""
        gpu, nq, nkv, hd, n = self.gpu, self.nq, self.nkv, self.hd, len(metas)
        strides = (1, 1) if n == 1 else _strides(metas, ("positions", 4), ("slot", 8))
        whole = self.body.qk_norm is QkNorm.WHOLE
        if whole or strides is None or not self.spark_qk_norm_rope_cache_k:
            self._norm_queries(queries, n, stream)
            self._norm_keys(keys, n, stream)
        if strides is None or not self.spark_qk_norm_rope_cache_k:
            for i, meta in enumerate(metas):
                q, k, v = self._query(queries, i), self._kv(keys, i), self._kv(values, i)
                rope(gpu, self.rope_k, q, k, meta.positions, 1, nq, nkv, hd, self.rotary_dim, self.rope_theta, stream)
                self._write_kv(k, v, meta.slot, 1, stream)
            return
        kv, layer = self.kv_cache, self.attn_layer_idx
        norms = (None, None) if whole else (self.q_norm, self.k_norm)
        spark_qk_norm_rope_cache(
            gpu, self.spark_qk_norm_rope_cache_k, queries, keys, values, *norms, kv.k_pool_ptr(layer),
            kv.v_pool_ptr(layer), metas[0].positions, metas[0].slot, *strides, n, nq, nkv, hd, self.rotary_dim,
            KV_BLOCK_SIZE, self.q_width, kv.cache_stride(layer), self._one_plus, self.eps,
            self.rope_theta, stream, fp8_scales=None if self.kv_bf16 else (KV_SCALE, KV_SCALE),
        )  # fmt: skip

    def _norm_queries(self, queries: DevicePtr, rows: int, stream: StreamLike) -> None:
        """The norm of queries, BF16 [rows, q_width]. Where gates lie between, row by row: one launch over all would
        take gates for queries."""
        if self.q_norm is None:
            return
        step = 1 if self.body.gated else rows
        for row in range(0, rows, step):
            at = queries.offset(row * self.q_width * BF16_BYTES)
            self._norm_heads(at, self.q_norm, step, self.nq, stream)

    def _norm_keys(self, keys: DevicePtr, rows: int, stream: StreamLike) -> None:
        """The norm of keys, BF16 [rows, nkv, hd]."""
        if self.k_norm is not None:
            self._norm_heads(keys, self.k_norm, rows, self.nkv, stream)

    def _norm_heads(self, x: DevicePtr, weight: DenseWeight, rows: int, heads: int, stream: StreamLike) -> None:
        """The norm of BF16 [rows, heads, hd] in place: of each head, or of each row."""
        if self.body.qk_norm is QkNorm.WHOLE:
            self._rms_norm(x, weight, x, rows, heads * self.hd, stream)
        else:
            self._rms_norm(x, weight, x, rows * heads, self.hd, stream)

    def _query(self, queries: DevicePtr, row: int) -> DevicePtr:
        return queries.offset(row * self.q_width * BF16_BYTES)

    def _kv(self, rows: DevicePtr, row: int) -> DevicePtr:
        return rows.offset(row * self.nkv * self.hd * BF16_BYTES)

    def _head_row(self, output: DevicePtr, row: int) -> DevicePtr:
        return output.offset(row * self.nq * self.hd * BF16_BYTES)

    def _attend_split(
        self,
        split: SplitAttention,
        queries: DevicePtr,
        metas: Sequence[AttnMetadataDev],
        output: DevicePtr,
        stream: StreamLike,
    ) -> None:
        gpu, nq, nkv, hd, n = self.gpu, self.nq, self.nkv, self.hd, len(metas)
        kv, layer, first = self.kv_cache, self.attn_layer_idx, metas[0]
        lens_stride, table_stride = _strides(metas, *_SPLIT) or (1, first.max_blocks_per_seq)
        spark_paged_decode_split(
            gpu, split.split, queries, kv.k_pool_ptr(layer), kv.v_pool_ptr(layer), split.partial, split.sums,
            first.block_table, first.seq_len, table_stride, lens_stride, n, nq, nkv, hd, KV_BLOCK_SIZE,
            KV_SCALE / math.sqrt(hd), self.q_width, kv.cache_stride(layer), 0, stream, fp8=not self.kv_bf16,
        )  # fmt: skip
        gate = queries.offset(nq * hd * BF16_BYTES) if self.body.gated else DevicePtr.NULL
        spark_paged_decode_merge(
            gpu, split.merge, split.partial, split.sums, output, gate, first.seq_len, lens_stride, n, nq, hd, KV_SCALE,
            self.q_width, 0, stream,
        )  # fmt: skip

    def _attention(self, q: DevicePtr, meta: AttnMetadataDev, output: DevicePtr, stream: StreamLike) -> None:
        """Attention of one row by the engine's kernel."""
        gpu, nq, nkv, hd = self.gpu, self.nq, self.nkv, self.hd
        kv, layer = self.kv_cache, self.attn_layer_idx
        pools = (kv.k_pool_ptr(layer), kv.v_pool_ptr(layer))
        scale = 1.0 / math.sqrt(hd)
        if self.kv_bf16:
            paged_decode_attn(
                gpu, self.paged_decode_k, q, *pools, output, meta.block_table, meta.seq_len, meta.max_blocks_per_seq,
                meta.num_seqs, nq, nkv, hd, KV_BLOCK_SIZE, scale, nq * hd, 0, stream,
            )  # fmt: skip
        else:
            paged_decode_attn_fp8(
                gpu, self.paged_decode_k, q, *pools, output, meta.block_table, meta.seq_len, meta.max_blocks_per_seq,
                meta.num_seqs, nq, nkv, hd, KV_BLOCK_SIZE, scale, KV_SCALE, KV_SCALE, nq * hd, kv.cache_stride(layer),
                stream,
            )  # fmt: skip

    def _apply_gate(self, queries: DevicePtr, output: DevicePtr, stream: StreamLike) -> None:
        """The attention's output of one row, BF16 [nq, hd], times sigmoid of the gates behind its queries."""
        if self.body.gated:
            n = self.nq * self.hd
            gate = queries.offset(n * BF16_BYTES)
            sigmoid_gate_mul(self.gpu, self.sigmoid_gate_mul_k, output, gate, output, n, stream)

    def _write_kv(self, k: DevicePtr, v: DevicePtr, slots: DevicePtr, rows: int, stream: StreamLike) -> None:
        """Rows of K and V, BF16 [rows, nkv, hd], into the pool, at `slots` i64 [rows] on the device."""
        gpu, nkv, hd, kv, layer = self.gpu, self.nkv, self.hd, self.kv_cache, self.attn_layer_idx
        pools, row = (kv.k_pool_ptr(layer), kv.v_pool_ptr(layer)), self.nkv * self.hd
        if self.kv_bf16:
            reshape_and_cache(
                gpu, self.reshape_cache_k, k, v, *pools, slots, rows, nkv, hd, KV_BLOCK_SIZE, row, row, stream
            )
        else:
            reshape_and_cache_fp8(
                gpu, self.reshape_cache_k, k, v, *pools, slots, rows, nkv, hd, KV_BLOCK_SIZE, KV_SCALE, KV_SCALE,
                row, row, kv.cache_stride(layer), stream,
            )  # fmt: skip


def _strides(metas: Sequence[AttnMetadataDev], *parts: tuple[str, int]) -> tuple[int, int] | None:
    """For two parts of the metadata, a name and the bytes of an element, how many elements lie from a sequence's to the
    next one's. None for fewer than two sequences, and where they do not lie evenly."""
    if len(metas) < 2:
        return None
    found = []
    for pick, element in parts:
        at = [getattr(meta, pick).address for meta in metas]
        step = at[1] - at[0]
        if step <= 0 or step % element or any(b - a != step for a, b in itertools.pairwise(at)):
            return None
        found.append(step // element)
    return found[0], found[1]
