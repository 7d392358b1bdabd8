# SPDX-License-Identifier: AGPL-3.0-only
"""The parts of a draft of DeepSeek-V4's module, each in a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from spark_py.model.layer import AttnMetadataDev
from spark_py.model.layers.deepseek_v4 import (
    V4Attention,
    V4AttentionShape,
    V4Ffn,
    V4FfnShape,
    V4HyperConnections,
    V4HyperShape,
    V4Layer,
    V4Norm,
    V4Projection,
    V4Shapes,
)
from spark_py.ops.argmax import argmax_bf16
from spark_py.ops.residual_add import residual_add
from spark_py.ops.rms_norm_vanilla import rms_norm
from spark_py.runtime.gpu import DevicePtr, GpuBackend
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache

from .random_weights import RandomWeights, v4_weights
from .shapes import v4_parts_read
from .timing import Bandwidth, measure_graph

__all__ = ["V4_SHAPES", "V4Parts", "open_v4_parts", "v4_rows"]

_BLOCK = 16  # rows of a block of the KV cache
V4_SHAPES: dict[str, V4Shapes] = {
    "v4-flash": V4Shapes(V4AttentionShape(), V4HyperShape(), V4FfnShape()),
    "tiny": V4Shapes(
        V4AttentionShape(64, 8, 32, 8, 48, 4, 16, 16), V4HyperShape(64, 4, 3), V4FfnShape(64, 8, 2, 32, vocab_size=300)
    ),
}


class V4Parts:
    """The parts of a module over `rows` sequences whose windows are full; `draft` is their order in a draft."""

    def __init__(
        self, gpu: GpuBackend, make: RandomWeights, shapes: V4Shapes, vocab: int, rows: int, stack: ExitStack
    ) -> None:
        self.gpu, self.rows, self.shapes, self.vocab, self.stream = gpu, rows, shapes, vocab, gpu.create_stream()
        stack.callback(gpu.destroy_stream, self.stream)
        self.weights, self.table = v4_weights(make, shapes), make.tensor(vocab, shapes.attention.hidden_size)
        h, hc = shapes.hyper.hidden_size, shapes.hyper.hc_mult
        blocks = -(-(shapes.attention.window + 1) // _BLOCK)
        config = KvCacheConfig(_BLOCK, 1, shapes.attention.head_dim, 1, KvCacheDtype.BF16, shared_kv=True)
        cache = stack.enter_context(PagedKvCache(config, blocks * rows, gpu, "bench.kv"))
        make.fill(cache.k_pool_ptr(0), blocks * rows * cache.block_stride_bytes_for_layer(0), "units")
        block = self.weights.block
        attention = stack.enter_context(V4Attention(block.attention, shapes.attention, cache, gpu, rows))
        self.connections = stack.enter_context(V4HyperConnections(shapes.hyper, gpu, rows))
        self.ffn = stack.enter_context(V4Ffn(block.ffn, shapes.ffn, gpu, rows))
        self.layer = V4Layer(block.layer, attention, self.ffn, self.connections)
        self.attention = attention
        self.e_proj = V4Projection(self.weights.e_proj, h, h, gpu, "e_proj")
        self.h_proj = V4Projection(self.weights.h_proj, h, h, gpu, "h_proj")
        self.head = V4Projection(self.table, vocab, h, gpu, "head")
        self.norm_k = gpu.kernel("rms_norm_vanilla", "rms_norm_vanilla")
        self.add_k = gpu.kernel("residual_add", "bf16_residual_add")
        self.argmax_k = gpu.kernel("argmax", "argmax_bf16")
        self.meta = self._meta(make, blocks)
        self.row, self.rows_of = make.tensor(rows, h).weight, make.tensor(rows * hc, h).weight
        self.streams, self.out = make.f32(rows, hc, h), make.tensor(rows * hc, h).weight
        self.logits, self.ids = make.alloc(2 * rows * vocab), make.alloc(4 * rows)

    def _meta(self, make: RandomWeights, blocks: int) -> AttnMetadataDev:
        """The row after a window of others."""
        at = self.shapes.attention.window
        tables = np.arange(self.rows * blocks, dtype=np.int32).reshape(self.rows, blocks)
        slots = tables[:, at // _BLOCK].astype(np.int64) * _BLOCK + at % _BLOCK

        def put(array: Any) -> DevicePtr:
            ptr = make.alloc(array.nbytes)
            self.gpu.copy_h2d(array.reshape(-1).view(np.uint8), ptr)
            return ptr

        positions = put(np.full(self.rows, at, np.uint32))
        lengths = put(np.full(self.rows, at + 1, np.int32))
        return AttnMetadataDev(positions, positions, positions, put(slots), lengths, put(tables), blocks, self.rows)

    def combiner(self) -> None:
        """Norms and products of the embedding and of all streams, in BF16."""
        gpu, stream, w = self.gpu, self.stream, self.weights
        h, hc, eps = self.shapes.hyper.hidden_size, self.shapes.hyper.hc_mult, self.shapes.hyper.norm_eps
        rms_norm(gpu, self.norm_k, self.row, w.enorm, self.out, self.rows, h, eps, stream)
        self.e_proj.run(self.out, self.row, self.rows, stream)
        rms_norm(gpu, self.norm_k, self.rows_of, w.hnorm, self.out, self.rows * hc, h, eps, stream)
        self.h_proj.run(self.out, self.rows_of, self.rows * hc, stream)
        if not self.connections.expand_sum(self.rows_of, self.row, self.streams, self.rows, True, stream):
            residual_add(gpu, self.add_k, self.row, self.rows_of, self.rows * h, stream)
            self.connections.expand(self.row, self.streams, self.rows, stream)

    def attend(self) -> None:
        """Attention alone."""
        self.attention.decode(self.row, self.meta, self.out, self.stream)

    def mix(self) -> None:
        """The mixture alone."""
        self.ffn(self.row, self.out, self.rows, self.stream)

    def connect(self) -> None:
        """Both connections of the block around nothing."""
        for site in (self.weights.block.layer.hc_attn, self.weights.block.layer.hc_ffn):
            self.connections.around(site, self.streams, lambda y, o: None, self.rows, self.stream)

    def logit(self) -> None:
        """Streams to one row, norm, LM head, argmax."""
        gpu, stream, norm = self.gpu, self.stream, V4Norm(self.weights.norm, self.shapes.hyper.norm_eps, self.norm_k)
        self.connections.collapse_normed(
            self.weights.hc_head, self.streams, self.out, norm, self.out, self.rows, stream
        )
        self.head.run(self.out, self.logits, self.rows, stream)
        for row in range(self.rows):
            logits = self.logits.offset(2 * self.vocab * row)
            argmax_bf16(gpu, self.argmax_k, logits, self.ids.offset(4 * row), self.vocab, stream)

    def draft(self) -> None:
        """All of a step."""
        self.combiner()
        self.layer.decode(self.streams, self.meta, self.stream)
        self.logit()

    def parts(self) -> dict[str, Callable[[], None]]:
        """The names of `v4_parts_read`, and the whole draft."""
        return {
            "combiner": self.combiner,
            "attention": self.attend,
            "mixture": self.mix,
            "connections": self.connect,
            "LM head": self.logit,
            "draft": self.draft,
        }


@contextmanager
def open_v4_parts(gpu: GpuBackend, shapes: V4Shapes, rows: int, seed: int = 0) -> Iterator[V4Parts]:
    """A module of random weights over `rows` sequences."""
    with ExitStack() as stack:
        make = RandomWeights(gpu, seed, small=shapes.hyper.hidden_size < 1024)
        stack.callback(make.release)
        yield V4Parts(gpu, make, shapes, shapes.ffn.vocab_size, rows, stack)


def v4_rows(
    gpu: GpuBackend, shapes: V4Shapes, rows: int, repeats: int, bandwidth: Bandwidth | None
) -> Iterator[dict[str, Any]]:
    """A row of JSON for each part: `us`, `min_us`, `max_us` within replays of its graph one behind the other, `MB` to
    read, and with a bandwidth `floor_us` and `of_read_bandwidth`."""
    read = {part: reads.rows(rows) for part, reads in v4_parts_read(shapes, shapes.ffn.vocab_size).items()}
    read["draft"] = sum(read.values())
    with open_v4_parts(gpu, shapes, rows) as parts:
        for part, action in parts.parts().items():
            times = measure_graph(gpu, parts.stream, action, repeats)
            row: dict[str, Any] = {"rows": rows, "part": part, "MB": round(read[part] / 1e6, 1)}
            row |= {"us": round(times.us, 1), "min_us": round(times.min_us, 1), "max_us": round(times.max_us, 1)}
            if bandwidth is not None:
                floor = bandwidth.floor_us(read[part])
                row |= {"floor_us": round(floor, 1), "of_read_bandwidth": round(floor / times.us, 3)}
            yield row
