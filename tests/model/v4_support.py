# SPDX-License-Identifier: AGPL-3.0-only
"""A small random DeepSeek-V4 attention on a backend, sequences in scattered blocks, and the same attention in FP64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spark_py.model.layer import AttnMetadataDev
from spark_py.model.layers.deepseek_v4 import V4AttentionShape, V4AttentionWeights
from spark_py.model.weight_map import DenseWeight
from spark_py.runtime.gpu import GpuBackend
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from spark_py.testing import BF16, Array, f64, normal, upload
from tests.kernels import v4_oracle

SHAPE = V4AttentionShape(
    hidden_size=32, num_heads=8, head_dim=64, rope_dim=16, q_lora_rank=24, o_groups=4, o_lora_rank=10, window=16
)
BLOCK = 4


def draw_weights(rng: np.random.Generator, shape: V4AttentionShape = SHAPE) -> dict[str, Array]:
    """Every tensor of an attention, sinks that dominate and that vanish among them; projections keep a row's size."""
    sinks = rng.standard_normal(shape.num_heads).astype(np.float32)
    sinks[:2] = 8.0, -30.0
    out = shape.o_groups * shape.o_lora_rank

    def projection(n: int, k: int) -> Array:
        return normal(rng, n, k, scale=k**-0.5)

    def norm(size: int) -> Array:
        return (1 + 0.3 * rng.standard_normal(size)).astype(BF16)

    return {
        "wq_a": projection(shape.q_lora_rank, shape.hidden_size),
        "q_norm": norm(shape.q_lora_rank),
        # Heads of sizes that differ, which a norm of each evens out.
        "wq_b": projection(shape.q_size, shape.q_lora_rank) * np.repeat(
            2.0 ** (np.arange(shape.num_heads) % 4), shape.head_dim
        )[:, None].astype(BF16),
        "wkv": projection(shape.head_dim, shape.hidden_size),
        "kv_norm": norm(shape.head_dim),
        "wo_a": projection(out, shape.group_size),
        "wo_b": projection(shape.hidden_size, out),
        "attn_sink": sinks,
    }  # fmt: skip


def to_device(gpu: GpuBackend, host: dict[str, Array]) -> V4AttentionWeights:
    """The tensors on the device, shapes given."""
    sink = upload(gpu, host["attn_sink"])
    dense = {name: DenseWeight(upload(gpu, a), a.shape) for name, a in host.items() if name != "attn_sink"}
    return V4AttentionWeights(**dense, attn_sink=sink)


def make_cache(
    gpu: GpuBackend, blocks: int, dtype: KvCacheDtype = KvCacheDtype.BF16, shape: V4AttentionShape = SHAPE
) -> PagedKvCache:
    """A cache of latent rows, every element NaN."""
    cache = PagedKvCache(KvCacheConfig(BLOCK, 1, shape.head_dim, 1, dtype, shared_kv=True), blocks, gpu, "v4.kv")
    for block in range(blocks):
        cache.poison_block(block, gpu.default_stream())
    return cache


@dataclass(frozen=True)
class Pages:
    """Block tables of sequences of `lengths` tokens, blocks in random order with unused ones between."""

    tables: Array
    blocks: int

    @classmethod
    def scatter(cls, rng: np.random.Generator, lengths: Sequence[int]) -> Pages:
        counts = [-(-length // BLOCK) for length in lengths]
        blocks = sum(counts) + 2
        order = rng.permutation(blocks)
        tables = np.full((len(lengths), max(counts)), -1, np.int32)
        start = 0
        for table, mine in zip(tables, counts, strict=True):
            table[:mine] = order[start : start + mine]
            start += mine
        return cls(tables, blocks)

    def meta(self, gpu: GpuBackend, sequences: Sequence[int], token: int, first_position: int) -> AttnMetadataDev:
        """Metadata of row number `token` of each of `sequences`, whose rows begin at `first_position`."""
        tables = self.tables[list(sequences)]
        rows = len(sequences)
        slots = tables[:, token // BLOCK].astype(np.int64) * BLOCK + token % BLOCK
        positions = upload(gpu, np.full(rows, first_position + token, np.uint32))
        return AttnMetadataDev(
            positions, positions, positions, upload(gpu, slots), upload(gpu, np.full(rows, token + 1, np.int32)),
            upload(gpu, tables), tables.shape[1], rows,
        )  # fmt: skip


def attention_of(
    rows: Array,
    host: dict[str, Array],
    shape: V4AttentionShape = SHAPE,
    *,
    first_position: int = 0,
    head_norm: bool = True,
    sinks: bool = True,
    back: bool = True,
    mixed_groups: bool = False,
) -> Array:
    """Output [h] of the last of rows [L, h] in FP64; the arguments after `first_position` name misreadings."""
    w = {name: f64(array) for name, array in host.items()}
    x, eps = f64(rows), shape.norm_eps
    positions = first_position + np.arange(len(x))
    latent = v4_oracle.rms(w["wq_a"] @ x[-1], eps, w["q_norm"])
    q = (w["wq_b"] @ latent).reshape(shape.num_heads, shape.head_dim)
    q = v4_oracle.rms(q, eps) if head_norm else q
    q = v4_oracle.rope(q[None], positions[-1:], shape.rope_theta, shape.rope_dim)[0]
    kv = v4_oracle.rms(x @ w["wkv"].T, eps, w["kv_norm"])
    kv = v4_oracle.rope(kv, positions, shape.rope_theta, shape.rope_dim)
    a = w["attn_sink"] if sinks else np.full(shape.num_heads, -1e30)
    o = v4_oracle.attention(q, kv, a, shape.window)
    if back:
        o = v4_oracle.rope(o[None], positions[-1:], shape.rope_theta, shape.rope_dim, inverse=True)[0]
    if mixed_groups:
        o = o.reshape(-1, shape.o_groups, shape.head_dim).swapaxes(0, 1)
    return w["wo_b"] @ v4_oracle.grouped(o.reshape(-1), w["wo_a"], shape.o_groups)
