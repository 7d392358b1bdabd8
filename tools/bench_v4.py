# SPDX-License-Identifier: AGPL-3.0-only
"""What a draft of DeepSeek-V4-Flash's MTP module costs, part by part, at its shapes and in its formats.

Weights are random: E4M3 projections with block scales, 256 MXFP4 experts, BF16 tables; the window is full. A row says
how many microseconds a part takes on the GPU (a graph, replayed one time after the other), how many bytes of weights
and latents it must read, and which share of the read bandwidth that is. "draft" is all parts of a step in the reference
mode, one behind the other in one graph; what fits the L2 cache of a part alone is read from there.

Beside it, where transformers is there, the time of `DeepseekV4DecoderLayer` with BF16 weights on the same card in the
same run, a token with an empty cache, by the host's clock. One JSON object on stdout.

    python tools/bench_v4.py [--shapes v4-flash] [--backend cuda] [--rows 1,4] [--repeats 25]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.model.layer import AttnMetadataDev
from spark_py.model.layers.deepseek_v4 import (
    V4Attention,
    V4AttentionShape,
    V4AttentionWeights,
    V4BlockWeights,
    V4ExpertWeights,
    V4Ffn,
    V4FfnShape,
    V4FfnWeights,
    V4HyperConnections,
    V4HyperShape,
    V4HyperWeights,
    V4Layer,
    V4LayerWeights,
    V4MtpWeights,
    V4Projection,
    V4RouterWeights,
    V4Shapes,
)
from spark_py.model.weight_map import Fp8Weight, Mxfp4Weight
from spark_py.ops.argmax import argmax_bf16
from spark_py.ops.residual_add import residual_add
from spark_py.ops.rms_norm_vanilla import rms_norm
from spark_py.runtime import DevicePtr, GpuBackend, open_backend
from spark_py.runtime.kv_cache import KvCacheConfig, KvCacheDtype, PagedKvCache
from tools.bench_propose import Weights, read_bandwidth

BLOCK = 16  # rows of the KV cache
SHAPES: dict[str, V4Shapes] = {
    "v4-flash": V4Shapes(V4AttentionShape(), V4HyperShape(), V4FfnShape()),
    "tiny": V4Shapes(
        V4AttentionShape(64, 8, 32, 8, 48, 4, 12, 16), V4HyperShape(64, 4, 3), V4FfnShape(64, 8, 2, 32, vocab_size=300)
    ),
}


class V4Weights(Weights):
    """Random weights in the formats of the published files."""

    def __init__(self, gpu: GpuBackend) -> None:
        super().__init__(gpu)
        codes = np.random.default_rng(2).integers(0, 256, self.pool_bytes, dtype=np.uint8)
        codes[codes & 127 == 127] = 0x38  # E4M3 has NaN there
        self.codes_pool = self.alloc(self.pool_bytes)
        gpu.copy_h2d(codes, self.codes_pool)

    def codes(self, nbytes: int) -> DevicePtr:
        """Codes of the pool, repeated."""
        ptr, stream = self.alloc(nbytes), self.gpu.default_stream()
        for done in range(0, nbytes, self.pool_bytes):
            size = min(self.pool_bytes, nbytes - done)
            self.gpu.copy_d2d_async(self.codes_pool, ptr.offset(done), size, stream)
        return ptr

    def f32(self, *shape: int) -> DevicePtr:
        """FP32, as small as a projection's."""
        values = np.random.default_rng(1).standard_normal(shape) * shape[-1] ** -0.5
        ptr = self.alloc(4 * values.size)
        self.gpu.copy_h2d(values.astype(np.float32).reshape(-1).view(np.uint8), ptr)
        return ptr

    def filled(self, byte: int, nbytes: int) -> DevicePtr:
        """The same byte everywhere: E8M0 scales, say."""
        ptr = self.alloc(nbytes)
        self.gpu.memset(ptr, byte, nbytes)
        return ptr

    def fp8(self, n: int, k: int) -> Fp8Weight:
        """E4M3 codes, a scale for each block."""
        return Fp8Weight(self.codes(n * k), self.f32(-(-n // 128), -(-k // 128)), n, k)

    def mxfp4(self, n: int, k: int) -> Mxfp4Weight:
        """E2M1 codes, and a scale of 2^-6 for each block."""
        return Mxfp4Weight(self.codes(n * k // 2), self.filled(121, n * k // 32), n, k)

    def expert(self, kind: Callable[[int, int], Any], shape: V4FfnShape) -> V4ExpertWeights:
        """w1, w3, w2."""
        h, inter = shape.hidden_size, shape.inter
        return V4ExpertWeights(kind(inter, h), kind(inter, h), kind(h, inter))

    def hyper(self, shape: V4HyperShape, head: bool = False) -> V4HyperWeights:
        """Connections of a sublayer, or of a head."""
        hc = shape.hc_mult
        rows = hc if head else (2 + hc) * hc
        return V4HyperWeights(self.f32(rows, hc * shape.hidden_size), self.f32(1 if head else 3), self.f32(rows))


def mtp_weights(make: V4Weights, shapes: V4Shapes) -> V4MtpWeights:
    """All tensors of a module."""
    a, ffn, hyper = shapes.attention, shapes.ffn, shapes.hyper
    h, out = a.hidden_size, a.o_groups * a.o_lora_rank
    attention = V4AttentionWeights(
        wq_a=make.fp8(a.q_lora_rank, h),
        q_norm=make.tensor(a.q_lora_rank),
        wq_b=make.fp8(a.q_size, a.q_lora_rank),
        wkv=make.fp8(a.head_dim, h),
        kv_norm=make.tensor(a.head_dim),
        wo_a=make.tensor(out, a.group_size),
        wo_b=make.fp8(h, out),
        attn_sink=make.f32(a.num_heads),
    )
    router = V4RouterWeights(make.tensor(ffn.num_experts, h), make.f32(ffn.num_experts))
    experts = [make.expert(make.mxfp4, ffn) for _ in range(ffn.num_experts)]
    return V4MtpWeights(
        block=V4BlockWeights(
            V4LayerWeights(make.hyper(hyper), make.tensor(h), make.hyper(hyper), make.tensor(h)),
            attention,
            V4FfnWeights(router, experts, make.expert(make.fp8, ffn)),
        ),
        enorm=make.tensor(h),
        hnorm=make.tensor(h),
        e_proj=make.fp8(h, h),
        h_proj=make.fp8(h, h),
        norm=make.tensor(h),
        hc_head=make.hyper(hyper, head=True),
    )


def bytes_read(shapes: V4Shapes, vocab: int, rows: int) -> dict[str, float]:
    """What each part must read: weights once for all rows, experts and latents of the window for each."""
    a, ffn, hyper = shapes.attention, shapes.ffn, shapes.hyper
    h, out = a.hidden_size, a.o_groups * a.o_lora_rank
    site = 4.0 * (2 + hyper.hc_mult) * hyper.hc_mult * hyper.hc_mult * h
    attention = 1.0 * (a.q_lora_rank * h + a.q_size * a.q_lora_rank + a.head_dim * h + h * out)
    attention += 2.0 * out * a.group_size + rows * 2.0 * a.window * a.head_dim
    expert = 3 * h * ffn.inter
    parts = {
        "combiner": 2.0 * h * h,
        "attention": attention,
        "mixture": 2.0 * ffn.num_experts * h + expert + rows * ffn.top_k * expert * 17 / 32,
        "connections": 2 * site,
        "LM head": 2.0 * vocab * h + 4.0 * hyper.hc_mult**2 * h,
    }
    return parts | {"draft": sum(parts.values())}


class Rig:
    """The parts of a module over `rows` sequences whose windows are full; `draft` is their order in a draft."""

    def __init__(
        self, gpu: GpuBackend, make: V4Weights, shapes: V4Shapes, vocab: int, rows: int, stack: ExitStack
    ) -> None:
        self.gpu, self.rows, self.shapes, self.vocab, self.stream = gpu, rows, shapes, vocab, gpu.create_stream()
        stack.callback(gpu.destroy_stream, self.stream)
        self.weights, self.table = mtp_weights(make, shapes), make.tensor(vocab, shapes.attention.hidden_size)
        h, hc = shapes.hyper.hidden_size, shapes.hyper.hc_mult
        blocks = -(-(shapes.attention.window + 1) // BLOCK)
        config = KvCacheConfig(BLOCK, 1, shapes.attention.head_dim, 1, KvCacheDtype.BF16, shared_kv=True)
        cache = stack.enter_context(PagedKvCache(config, blocks * rows, gpu, "bench.kv"))
        for block in range(blocks * rows):
            cache.zero_block(block, self.stream)
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

    def _meta(self, make: V4Weights, blocks: int) -> AttnMetadataDev:
        """The row after a window of others."""
        at = self.shapes.attention.window
        tables = np.arange(self.rows * blocks, dtype=np.int32).reshape(self.rows, blocks)
        slots = tables[:, at // BLOCK].astype(np.int64) * BLOCK + at % BLOCK

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
        gpu, stream, h, eps = self.gpu, self.stream, self.shapes.hyper.hidden_size, self.shapes.hyper.norm_eps
        self.connections.collapse(self.weights.hc_head, self.streams, self.out, self.rows, stream)
        rms_norm(gpu, self.norm_k, self.out, self.weights.norm, self.out, self.rows, h, eps, stream)
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
        """The names of `bytes_read`."""
        return {
            "combiner": self.combiner,
            "attention": self.attend,
            "mixture": self.mix,
            "connections": self.connect,
            "LM head": self.logit,
            "draft": self.draft,
        }


@contextmanager
def rig_of(gpu: GpuBackend, shapes: V4Shapes, vocab: int, rows: int) -> Iterator[Rig]:
    """A module of random weights."""
    with ExitStack() as stack:
        make = V4Weights(gpu)
        stack.callback(make.release)
        yield Rig(gpu, make, shapes, vocab, rows, stack)


def microseconds(rig: Rig, action: Callable[[], None], repeats: int, replays: int = 10) -> dict[str, float]:
    """Median and spread of a part within `replays` replays of its graph behind each other."""
    gpu, stream = rig.gpu, rig.stream
    action()
    gpu.begin_capture(stream)
    action()
    graph = gpu.end_capture(stream)
    times = []
    for repeat in range(repeats + 2):
        gpu.synchronize(stream)
        start = time.perf_counter()
        for _ in range(replays):
            gpu.launch_graph(graph, stream)
        gpu.synchronize(stream)
        if repeat > 1:
            times.append((time.perf_counter() - start) * 1e6 / replays)
    gpu.destroy_graph(graph)
    return {"us": statistics.median(times), "min_us": min(times), "max_us": max(times)}


def theirs(shapes: V4Shapes, rows: int, repeats: int, device: str = "cuda") -> list[dict[str, Any]]:
    """`DeepseekV4DecoderLayer` in BF16, with each form of its experts that the card has; empty without transformers."""
    try:
        import torch
        from transformers import DeepseekV4Config, DynamicCache
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modelling
    except ImportError:
        return []
    a, ffn, hyper = shapes.attention, shapes.ffn, shapes.hyper
    config = DeepseekV4Config(
        hidden_size=a.hidden_size, num_attention_heads=a.num_heads, head_dim=a.head_dim, qk_rope_head_dim=a.rope_dim,
        q_lora_rank=a.q_lora_rank, o_groups=a.o_groups, o_lora_rank=a.o_lora_rank, sliding_window=a.window,
        n_routed_experts=ffn.num_experts, num_experts_per_tok=ffn.top_k, moe_intermediate_size=ffn.inter,
        hc_mult=hyper.hc_mult, hc_sinkhorn_iters=hyper.sinkhorn_iters, num_hidden_layers=1, vocab_size=ffn.vocab_size,
        layer_types=["sliding_attention"], mlp_layer_types=["moe"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    found: list[dict[str, Any]] = []
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for experts in ("eager", "grouped_mm"):
        config._experts_implementation = experts
        with torch.device(device), torch.no_grad():
            torch.set_default_dtype(torch.bfloat16)
            layer = modelling.DeepseekV4DecoderLayer(config, 0).eval().to(torch.bfloat16)
            for parameter in layer.parameters():
                parameter.normal_(std=0.02)
            rotary = modelling.DeepseekV4RotaryEmbedding(config)
            streams = torch.randn(rows, 1, hyper.hc_mult, a.hidden_size)
            position = torch.full((rows, 1), a.window)
            tables = {kind: rotary(streams, position, layer_type=kind) for kind in ("main", "compress")}

            def step(
                layer: Any = layer, streams: Any = streams, tables: Any = tables, position: Any = position
            ) -> None:
                cache = DynamicCache(config=config)
                layer(streams, position_embeddings=tables, position_ids=position, attention_mask=None, cache=cache)

            times = []
            try:
                for repeat in range(repeats + 3):
                    synchronize()
                    start = time.perf_counter()
                    step()
                    synchronize()
                    if repeat > 2:
                        times.append((time.perf_counter() - start) * 1e6)
            except Exception as error:  # an implementation that this torch or card has not
                found.append({"part": f"DeepseekV4DecoderLayer, bf16, experts {experts}", "error": str(error)[:200]})
                continue
            finally:
                torch.set_default_dtype(torch.float32)
        found.append({"part": f"DeepseekV4DecoderLayer, bf16, experts {experts}", "us": statistics.median(times)})
        del layer
        torch.cuda.empty_cache()
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="v4-flash", choices=tuple(SHAPES))
    parser.add_argument("--backend", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--rows", default="1,4", help="sequences at once (default 1,4)")
    parser.add_argument("--repeats", type=int, default=25, help="measurements that count (default 25)")
    options = parser.parse_args()
    shapes = SHAPES[options.shapes]
    vocab = shapes.ffn.vocab_size
    bandwidth = read_bandwidth() if options.backend == "cuda" else None
    found: list[dict[str, Any]] = []
    counts = [int(each) for each in options.rows.split(",")]
    with open_backend(options.backend) as gpu:
        device = gpu.device_name()
        for rows in counts:
            nbytes = bytes_read(shapes, vocab, rows)
            with rig_of(gpu, shapes, vocab, rows) as rig:
                for part, action in rig.parts().items():
                    row: dict[str, Any] = {"rows": rows, "part": part, "MB": round(nbytes[part] / 1e6, 1)}
                    row |= {key: round(us, 1) for key, us in microseconds(rig, action, options.repeats).items()}
                    if bandwidth:
                        floor = nbytes[part] / bandwidth * 1e6
                        row |= {"floor_us": round(floor, 1), "of_read_bandwidth": round(floor / row["us"], 3)}
                    found.append(row)
    if options.backend == "cuda":
        found += [{"rows": rows} | row for rows in counts for row in theirs(shapes, rows, options.repeats)]
    about: dict[str, Any] = {"device": device, "shapes": options.shapes, "repeats": options.repeats}
    if bandwidth:
        about["read_GB_per_s"] = round(bandwidth / 1e9, 1)
    json.dump(about | {"rows": found}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
