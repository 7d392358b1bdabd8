# SPDX-License-Identifier: AGPL-3.0-only
"""What a draft costs at the shapes of real heads: each quantisation, eager and replayed, one sequence and several.

Weights are random and have the dimensions of Qwen3.6-27B (dense FFN) and of Qwen3-Next-80B-A3B (experts); the KV cache
holds 4096 tokens a sequence, the draft vocabulary is the command line's default of the engine, 100,000. A row says how
many microseconds a whole `propose` takes on the host's clock, read-back included, how many bytes it must read, and
which share of the read bandwidth that is. The bandwidth is measured in the same run, by torch's sum of 4 GiB; without
torch the share is left out. The weights of a step exceed the L2 cache many times. One JSON object on stdout.

    python tools/bench_propose.py [--shapes qwen3.6-27b,qwen3-next-80b] [--backend cuda] [--repeats 25]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spark_py.model.config import ModelConfig
from spark_py.model.layer import ForwardContext
from spark_py.model.layers.mtp_head import MtpHead, MtpProposerState, MtpQuantization
from spark_py.model.layers.mtp_head.quantize import Quantizer
from spark_py.model.levers import ModelLevers
from spark_py.model.weight_map import DenseExpertWeight, DenseWeight, MtpWeights
from spark_py.runtime import DevicePtr, GpuBackend, open_backend
from spark_py.runtime.buffers import BufferArena

CONTEXT, VOCAB, SEQUENCES = 4096, 100_000, 8
_COMMON = {"model_type": "qwen3_next", "rms_norm_eps": 1e-6, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_EXPERTS = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.6-27b": {
        "hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 17408, "vocab_size": VOCAB, "num_hidden_layers": 1, "mlp_only_layers": [0],
    },
    "qwen3-next-80b": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "intermediate_size": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts": 512, "num_experts_per_tok": 10, "vocab_size": VOCAB, "num_hidden_layers": 1, **_EXPERTS,
    },
    "tiny": {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "intermediate_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
        "num_experts": 6, "num_experts_per_tok": 2, "vocab_size": 300, "num_hidden_layers": 1, **_EXPERTS,
    },
}  # fmt: skip
BYTES = {MtpQuantization.BF16: 2.0, MtpQuantization.FP8: 1.0, MtpQuantization.NVFP4: 0.5625}
"""Bytes of a weight, block scales included."""


class Weights:
    """Random weights on a backend: a pool of values, uploaded once and copied until a tensor is full."""

    def __init__(self, gpu: GpuBackend) -> None:
        self.gpu, self.pointers = gpu, list[DevicePtr]()
        values = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * 0.02
        self.pool_bytes = 2 * values.size
        self.pool = self.alloc(self.pool_bytes)
        gpu.copy_h2d(values.astype(ml_dtypes.bfloat16).view(np.uint8), self.pool)

    def alloc(self, nbytes: int) -> DevicePtr:
        """Memory until `release`."""
        self.pointers.append(self.gpu.alloc(nbytes))
        return self.pointers[-1]

    def tensor(self, *shape: int) -> DenseWeight:
        """A BF16 tensor of values of the pool, beginning somewhere else each time."""
        total, done = 2 * int(np.prod(shape)), 0
        start = len(self.pointers) * 4096 * 14 % (self.pool_bytes // 2)
        ptr, stream = self.alloc(total), self.gpu.default_stream()
        while done < total:
            size = min(total - done, self.pool_bytes - start)
            self.gpu.copy_d2d_async(self.pool.offset(start), ptr.offset(done), size, stream)
            done, start = done + size, 0
        return DenseWeight(ptr, shape)

    def ffn(self, width: int, h: int) -> DenseExpertWeight:
        """Gate, up and down."""
        return DenseExpertWeight(self.tensor(width, h), self.tensor(width, h), self.tensor(h, width))

    def release(self) -> None:
        """Free everything."""
        self.gpu.synchronize(self.gpu.default_stream())
        while self.pointers:
            self.gpu.free(self.pointers.pop())


def mtp_weights(make: Weights, c: ModelConfig) -> MtpWeights:
    """All tensors of a head."""
    h, hd = c.hidden_size, c.head_dim
    q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
    parts: dict[str, Any] = {
        name: make.tensor(h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "input_layernorm", "post_attn_layernorm", "norm")
    }
    parts |= {"q_norm": make.tensor(hd), "k_norm": make.tensor(hd), "fc": make.tensor(h, 2 * h)}
    parts |= {"q_proj": make.tensor(2 * q, h), "k_proj": make.tensor(kv, h), "v_proj": make.tensor(kv, h)}
    parts |= {"o_proj": make.tensor(h, q)}
    if not c.num_experts:
        return MtpWeights(dense_ffn=make.ffn(c.intermediate_size, h), **parts)
    return MtpWeights(
        moe_gate=make.tensor(c.num_experts, h),
        shared_expert=make.ffn(c.shared_expert_intermediate_size, h),
        shared_expert_gate=make.tensor(1, h),
        experts=[make.ffn(c.moe_intermediate_size, h) for _ in range(c.num_experts)],
        **parts,
    )


def bytes_read(c: ModelConfig, quant: MtpQuantization, context: int) -> dict[str, float]:
    """What a draft of one sequence must read: weights that every row shares, experts and KV rows of its own."""
    h, hd = c.hidden_size, c.head_dim
    q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
    each = BYTES[quant]
    shared = each * (h * 2 * h + 2 * q * h + 2 * kv * h + h * q)
    shared += c.vocab_size * h * (each if quant is MtpQuantization.NVFP4 else 2.0)
    own = 2 * kv * context * (1.0 if quant is MtpQuantization.NVFP4 else 2.0)
    if c.num_experts:
        shared += 2.0 * c.num_experts * h + each * 3 * h * c.shared_expert_intermediate_size
        own += each * 3 * h * c.moe_intermediate_size * c.num_experts_per_tok
    else:
        shared += each * 3 * h * c.intermediate_size
    return {"shared": shared, "own": own}


class Rig:
    """A head with sequences of `CONTEXT` rows."""

    def __init__(self, gpu: GpuBackend, head: MtpHead, c: ModelConfig, buffers: BufferArena, context: int) -> None:
        self.gpu, self.head, self.context, self.stream = gpu, head, context, gpu.create_stream()
        self.ctx, self.row_bytes = ForwardContext(buffers, gpu, c, head.levers), 2 * c.hidden_size
        self.states = [self._state() for _ in range(SEQUENCES)]
        self.hidden = gpu.alloc(self.row_bytes * SEQUENCES)
        gpu.memset(self.hidden, 0x3C, self.row_bytes * SEQUENCES)

    def _state(self) -> MtpProposerState:
        state, kv = self.head.alloc_state(self.gpu), self.head.kv_cache
        kv.grow_table(state.block_table, -(-self.context // kv.block_size()), "bench")
        for block in state.block_table:
            kv.zero_block(block, self.stream)
        state.seq_len, state.last_pair_key = self.context, self.context - 1
        return state

    def propose(self, drafts: int) -> None:
        """One sequence, and a verdict that drops its rows, so that the context stays as long as it was."""
        state = self.states[0]
        found = self.head.propose(7, self.hidden, self.context + 1, drafts, state, self.ctx, self.stream)
        assert len(found) == drafts
        self._undo(state)

    def propose_batch(self, n: int, drafts: int) -> None:
        """n sequences at once, with verdicts as after `propose`."""
        rows = [self.hidden.offset(self.row_bytes * i) for i in range(n)]
        states = self.states[:n]
        positions = [self.context + 1] * n
        found = self.head.propose_batch([7] * n, rows, positions, drafts, states, self.ctx, self.stream)
        assert found is not None, "the head offers no batched propose"
        for state in states:
            self._undo(state)

    @contextmanager
    def launching_one_by_one(self) -> Iterator[None]:
        """The head as if its levers allowed no graph: heads take a while to build, so one serves both ways."""
        inputs, self.head.propose_inputs = self.head.propose_inputs, None
        try:
            yield
        finally:
            self.head.propose_inputs = inputs

    def _undo(self, state: MtpProposerState) -> None:
        state.seq_len, state.last_num_drafted, state.last_pair_key = self.context, 0, self.context - 1

    def release(self) -> None:
        """Give back what is not the head's."""
        for state in self.states:
            self.head.free_state(self.gpu, state)
        self.gpu.free(self.hidden)
        self.gpu.destroy_stream(self.stream)


def microseconds(action: Callable[[], None], repeats: int) -> dict[str, float]:
    """Median and spread of a call, after three that do not count."""
    times = []
    for repeat in range(repeats + 3):
        start = time.perf_counter()
        action()
        if repeat >= 3:
            times.append((time.perf_counter() - start) * 1e6)
    return {"us": statistics.median(times), "min_us": min(times), "max_us": max(times)}


def read_bandwidth() -> float | None:
    """Bytes a second of torch's sum of 4 GiB of random FP32, the median of twelve; None without torch or GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    values = torch.randn(1 << 30, device="cuda")
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        values.sum()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    del values
    torch.cuda.empty_cache()
    return (4 << 30) / statistics.median(times)


@contextmanager
def rig_of(gpu: GpuBackend, c: ModelConfig, quant: MtpQuantization, levers: ModelLevers, context: int) -> Iterator[Rig]:
    """A head of random weights; what it was quantised from is gone."""
    with ExitStack() as stack:
        weights = Weights(gpu)
        stack.callback(weights.release)
        table = weights.tensor(c.vocab_size, c.hidden_size)
        lm_head: Any = table
        if quant is MtpQuantization.NVFP4:
            quantizer = Quantizer(gpu, quant, gpu.default_stream())
            stack.callback(quantizer.release)
            lm_head = quantizer.proj("lm_head", table, c.vocab_size, c.hidden_size)
        max_seq_len = context + 64
        head = MtpHead(mtp_weights(weights, c), table, lm_head, None, c, gpu, quant, 0, max_seq_len, 1 << 20, levers)
        stack.callback(head.release)
        buffers = stack.enter_context(BufferArena(c, 64, max_seq_len, 16, SEQUENCES, gpu))
        rig = Rig(gpu, head, c, buffers, context)
        stack.callback(rig.release)
        yield rig


def paths(rig: Rig, parts: dict[str, float]) -> list[tuple[str, float, Callable[[], None]]]:
    """Name, bytes that it must read, and call of each way to draft."""
    each, batch = parts["shared"] + parts["own"], parts["shared"] + SEQUENCES * parts["own"]
    return [
        ("1 draft", each, lambda: rig.propose(1)),
        ("3 drafts", 3 * each, lambda: rig.propose(3)),
        (f"{SEQUENCES} sequences, 1 draft", batch, lambda: rig.propose_batch(SEQUENCES, 1)),
        (f"{SEQUENCES} sequences, 3 drafts", 3 * batch, lambda: rig.propose_batch(SEQUENCES, 3)),
    ]


def measure(gpu: GpuBackend, names: list[str], repeats: int, context: int, bandwidth: float | None) -> Iterator[Any]:
    """A row for each shape, quantisation and path."""
    for name in names:
        c = ModelConfig.from_dict(_COMMON | SHAPES[name] | {"layer_types": ["full_attention"]})
        for quant in (MtpQuantization.BF16, MtpQuantization.FP8, MtpQuantization.NVFP4):
            if quant is MtpQuantization.NVFP4 and not c.num_experts:
                continue
            parts = bytes_read(c, quant, context)
            with rig_of(gpu, c, quant, ModelLevers(), context) as rig:
                for path, nbytes, action in paths(rig, parts):
                    for way in ("eager", "graph"):
                        row = {"shape": name, "quantization": quant.value, "path": f"{path}, {way}"}
                        with rig.launching_one_by_one() if way == "eager" else nullcontext():
                            row |= {key: round(value, 1) for key, value in microseconds(action, repeats).items()}
                        row["MB"] = round(nbytes / 1e6, 1)
                        if bandwidth:
                            floor = nbytes / bandwidth * 1e6
                            row |= {"floor_us": round(floor, 1), "of_read_bandwidth": round(floor / row["us"], 3)}
                        yield row


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3.6-27b,qwen3-next-80b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "host"))
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"KV rows of a sequence (default {CONTEXT})")
    parser.add_argument("--repeats", type=int, default=25, help="calls that count (default 25)")
    options = parser.parse_args()
    names = options.shapes.split(",")
    if unknown := [name for name in names if name not in SHAPES]:
        parser.error(f"no shape {', '.join(unknown)}: there are {', '.join(SHAPES)}")
    bandwidth = read_bandwidth() if options.backend == "cuda" else None
    with open_backend(options.backend) as gpu:
        rows = list(measure(gpu, names, options.repeats, options.context, bandwidth))
        found: dict[str, Any] = {"device": gpu.device_name()}
    if bandwidth:
        found["read_GB_per_s"] = round(bandwidth / 1e9, 1)
    json.dump(found | {"context": options.context, "repeats": options.repeats, "rows": rows}, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
